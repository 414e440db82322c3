"""The small JSON files by which Orbax (v0 and v1) opens a step; the arrays are in the index.

Functions of their arguments, with keys in order: the same step gives the same bytes. What Orbax
cannot hold stands as `None` in its tree, so that the places of all other leaves stay what they
are: bytes, ints beyond 64 bits, and a leaf whose name Orbax would confuse with another one's.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from typing import Any, Protocol

from ckpt.errors import Damaged
from ckpt.specs import ArraySpec

KeyPath = Sequence[tuple[str, int]]
"""Keys from the root, each with its Orbax key type: 1 in a sequence, 2 by name."""

EMPTY_TYPES = ("None", "Dict", "List", "Tuple")
"""How Orbax names nodes without leaves; other empty nodes, such as an empty namedtuple: `None`."""

_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"

# Orbax reads its scalars back as Python's bool, int and float, which hold these exactly.
_SCALARS = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()  # noqa: SIM905
)


class Leaf(Protocol):
    """What is needed of a leaf spec."""

    @property
    def param(self) -> str:
        """Name inside OCDBT; that of its array."""

    @property
    def keys(self) -> KeyPath: ...

    @property
    def kind(self) -> str:
        """jax, numpy, numpy_scalar, int, float, bool, complex, str, bytes or key."""

    @property
    def storage_dtype(self) -> str | None:
        """None for values that are held in the tree record and have no array."""

    @property
    def inline(self) -> Any:
        """The string of a leaf of kind `str`; something else if it is no valid text."""

    @property
    def impl(self) -> str | None:
        """Name of the generator of a leaf of kind `key`."""

    @property
    def orbax(self) -> bool:
        """False if another leaf has the name that Orbax would give to this one."""


def files(
    leaves: Sequence[Leaf],
    arrays: Sequence[ArraySpec],
    empty: Sequence[tuple[KeyPath, str]] = (),
    *,
    item: str,
    device: str,
    init_ns: int,
    commit_ns: int,
) -> dict[str, bytes]:
    """All of Orbax's small files by name relative to the step, but for the marker.

    `item` is the folder of the tree, `empty` lists the nodes without leaves by path and type.

    Raises `Damaged` when a leaf has no array.
    """
    strings = string_values(leaves)
    return {
        "_CHECKPOINT_METADATA": checkpoint_metadata(item, init_ns=init_ns, commit_ns=commit_ns),
        "orbax.checkpoint": b"",
        f"{item}/_METADATA": tree_metadata(leaves, arrays, empty),
        f"{item}/_sharding": shardings(leaves, device),
        f"{item}/array_metadatas/process_0": array_metadatas(leaves, arrays),
    } | ({f"{item}/_strings.json": strings} if strings else {})


def checkpoint_metadata(item: str, *, init_ns: int, commit_ns: int) -> bytes:
    """`_CHECKPOINT_METADATA`; times in nanoseconds since 1970.

    It names v0's handler: v1 knows it as another name of its own, v0 does not know v1's.
    """
    return _json(
        {
            "commit_timestamp_nsecs": commit_ns,
            "custom_metadata": {},
            "init_timestamp_nsecs": init_ns,
            "item_handlers": {item: _HANDLER},
            "metrics": {},
            "performance_metrics": {},
        }
    )


def tree_metadata(
    leaves: Sequence[Leaf],
    arrays: Sequence[ArraySpec],
    empty: Sequence[tuple[KeyPath, str]] = (),
) -> bytes:
    """`_METADATA`: path and type of every leaf and of every node without leaves."""
    chunk_shapes = _chunk_shapes(leaves, arrays)
    nodes: list[tuple[KeyPath, dict[str, Any]]] = []
    for leaf in leaves:
        kind = _value_type(leaf)
        value: dict[str, Any] = {"skip_deserialize": kind == "None", "value_type": kind}
        if kind == "jax.Array":
            value["write_shape"] = chunk_shapes[leaf.param]
        nodes.append((leaf.keys, value))
    for keys, kind in empty:
        kind = kind if kind in EMPTY_TYPES else "None"
        nodes.append((keys, {"skip_deserialize": True, "value_type": kind}))

    entries: dict[str, Any] = {}
    # In the order of the tree, in which Orbax writes them: items of a list by number.
    for keys, value in sorted(nodes, key=lambda node: [_rank(key) for key in node[0]]):
        path = str(tuple(key for key, _ in keys))
        key_metadata = [{"key": key, "key_type": key_type} for key, key_type in keys]
        # Paths that Orbax cannot tell apart, such as keys 1 and "1": it sees the first.
        entries.setdefault(path, {"key_metadata": key_metadata, "value_metadata": value})
    metadata = {
        "custom_metadata": None,
        # Without this Orbax v0 reads a chunk that is not there as zeros.
        "store_array_data_equal_to_fill_value": True,
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": True,
    }
    return json.dumps(metadata).encode()


def shardings(leaves: Sequence[Leaf], device: str) -> bytes:
    """`_sharding`: where a restore without a template puts each jax array.

    `device` is the name of one, such as `cpu:0`. Orbax refuses arrays that have none on record.
    """
    value = json.dumps({"device_str": device, "sharding_type": "SingleDeviceSharding"})
    params = (leaf.param for leaf in leaves if _value_type(leaf) == "jax.Array")
    return _json({urlsafe_b64encode(param.encode()).decode(): value for param in params})


def array_metadatas(leaves: Sequence[Leaf], arrays: Sequence[ArraySpec]) -> bytes:
    """`array_metadatas/process_0`: chunks of each jax array; alone says what is a PRNG key."""
    chunk_shapes = _chunk_shapes(leaves, arrays)
    rows = [
        {
            "array_metadata": {
                "chunk_shape": chunk_shapes[leaf.param],
                "ext_metadata": {"random_key_impl": leaf.impl} if leaf.kind == "key" else None,
                "param_name": leaf.param,
                "write_shape": chunk_shapes[leaf.param],
            }
        }
        for leaf in leaves
        if _value_type(leaf) == "jax.Array"
    ]
    return _json({"array_metadatas": rows})


def string_values(leaves: Sequence[Leaf]) -> bytes:
    """`_strings.json`: the strings by param; empty if there are none and no file is due."""
    strings = {leaf.param: leaf.inline for leaf in leaves if _value_type(leaf) == "string"}
    return _json(strings) if strings else b""


def _chunk_shapes(
    leaves: Sequence[Leaf], arrays: Sequence[ArraySpec]
) -> dict[str, tuple[int, ...]]:
    """Chunk shapes by param, one for each leaf that is a jax array to Orbax."""
    shapes = {spec.param: spec.chunk_shape for spec in arrays}
    for leaf in leaves:
        if _value_type(leaf) == "jax.Array" and leaf.param not in shapes:
            raise Damaged(f"leaf {leaf.param!r}: wanted its array in an image, found it in none")
    return shapes


def _rank(key: tuple[str, int]) -> tuple[int, str]:
    text, key_type = key
    return (int(text), "") if key_type == 1 and text.isdecimal() else (0, text)


def _value_type(leaf: Leaf) -> str:
    """Orbax's name for the type of a leaf; `None` for what it cannot hold."""
    if not leaf.orbax:
        return "None"
    if leaf.kind == "str":
        # Orbax looks a string up by JSON pointer, in which these two have a meaning.
        known = isinstance(leaf.inline, str) and not {"/", "~"} & set(leaf.param)
        return "string" if known else "None"
    if leaf.storage_dtype is None:
        return "None"
    if leaf.kind in ("jax", "key"):
        return "jax.Array"
    if leaf.kind != "numpy" and leaf.storage_dtype in _SCALARS:
        return "scalar"
    return "np.ndarray"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()

"""One leaf as a value: what the tree record says of it, and how its bytes lie in an image.

Free of jax, so that the writer and the tools can import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ckpt.dtypes import parse, storage_name
from ckpt.errors import Damaged

ARRAYS = frozenset({"jax", "numpy", "numpy_scalar"})
"""Kinds that may stand for each other under a template: same dtype, same shape, same bits."""

SCALARS = {"bool": "bool", "int": "int64", "float": "float64", "complex": "complex128"}
"""Python's scalars, each with the dtype in which it is stored as an array of no dimension."""

_WEAK = {
    "bool": ("bool",),
    "int": ("int32", "int64"),
    "float": ("float32", "float64"),
    "complex": ("complex64", "complex128"),
}
"""What jax makes of Python's scalars, without and with 64 bits: arrays of a weak type."""

KINDS = ARRAYS | SCALARS.keys() | {"str", "bytes", "key"}
MAX_DIMENSIONS = 64
READABLE_DIMENSIONS = 32
"""TensorStore, and so Orbax, opens no array of more dimensions."""


class LeafSpec(NamedTuple):  # made by the thousands, and a tuple is made in a quarter of the time
    """What the tree record says of one leaf.

    A spec with `storage_dtype` None is held in the record itself, and no array belongs to it.
    """

    name: str
    """Path in the tree, unique: keys joined by `/`; see `tree` for the escapes."""
    param: str
    """Name inside OCDBT, unique: Orbax's, where `orbax` is true; else one that starts with `~`."""
    keys: tuple[tuple[str, int], ...]
    """Orbax's `key_metadata`: each key as text, with 1 for a place in a sequence, 2 for a name."""
    kind: str
    """One of KINDS."""
    dtype: str
    """Logical dtype (`dtypes.logical_name`); for keys JAX's own name, such as `key<fry>`."""
    shape: tuple[int, ...]
    """Logical shape; of an array of keys without the dimension of the key data."""
    storage_dtype: str | None
    """Dtype in the image."""
    storage_shape: tuple[int, ...] | None
    """Shape in the image: that of the key data for keys, else `shape`."""
    inline: Any = None
    """JSON form (`plain.encode`) of a str, bytes, or an int beyond 64 bits."""
    memory_kind: str | None = None
    """Memory of a jax array if it is not the default memory of its devices, such as
    `pinned_host`."""
    weak_type: bool = False
    """Whether a jax array gives way in dtype promotion."""
    committed: bool = True
    """Whether a jax array is bound to its devices; an uncommitted one follows its neighbours."""
    impl: str | None = None
    """Implementation of a PRNG key, such as `threefry2x32`."""
    orbax: bool = True
    """Whether Orbax can see the leaf, under `param` and with the same values."""

    def __str__(self) -> str:
        """Type and shape as messages give them: `float32[4,2]`, `Python int`."""
        dimensions = ",".join(map(str, self.shape))
        if self.kind in ARRAYS:
            return f"{self.dtype}[{dimensions}]"
        if self.kind == "key":
            return f"{self.impl} key[{dimensions}]"
        return f"Python {self.kind}"

    @property
    def storage_bytes(self) -> int:
        """Size of the stored array; 0 for what is held in the record."""
        if self.storage_dtype is None or self.storage_shape is None:
            return 0
        return math.prod(self.storage_shape) * parse(self.storage_dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        """Fields by name, without those that have their default."""
        values = zip(_FIELDS, self, strict=True)
        return {k: v for k, v in values if k not in _DEFAULTS or v != _DEFAULTS[k]}

    @classmethod
    def from_json(cls, value: Any) -> LeafSpec:
        """The spec that `to_json` gave, through JSON.

        Raises:
            Damaged: not such a value, or one that contradicts itself.
            Unsupported: a dtype that this release does not know.
        """
        if not isinstance(value, dict) or not value.keys() <= _FIELDS.keys():
            raise Damaged(f"tree record: wanted the fields of a leaf, found {str(value)[:200]}")
        fields = dict(value)
        for name in ("shape", "storage_shape"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        if isinstance(fields.get("keys"), list):
            fields["keys"] = tuple(tuple(k) if isinstance(k, list) else k for k in fields["keys"])
        try:
            spec = cls(**fields)
        except TypeError as error:
            raise Damaged(f"tree record: a leaf lacks fields: {str(value)[:200]}") from error
        fault = _fault(spec)
        if fault:
            raise Damaged(f"tree record: leaf {str(spec.name)[:200]!r}: {fault}")
        return spec


@dataclass(frozen=True, slots=True)
class EmptySpec:
    """A node without leaves, such as `{}` or `None`.

    The structure record holds it by itself; Orbax needs a line for it among the leaves, in tree
    order, or it cannot rebuild the list or tuple that the node stands in.
    """

    keys: tuple[tuple[str, int], ...]
    """As in `LeafSpec`."""
    orbax_type: str
    """Orbax's name: `None`, `Dict`, `List` or `Tuple`."""
    before: int
    """How many leaves come before it in tree order."""

    def to_json(self) -> list[Any]:
        """Keys, type and position."""
        return [[list(key) for key in self.keys], self.orbax_type, self.before]

    @classmethod
    def from_json(cls, value: Any) -> EmptySpec:
        """What `to_json` gave, through JSON. Raises `Damaged` for anything else."""
        match value:
            case [list(keys), "None" | "Dict" | "List" | "Tuple" as kind, int(before)]:
                pairs = tuple(tuple(key) if isinstance(key, list) else key for key in keys)
                if before >= 0 and not isinstance(before, bool) and _are_keys(pairs):
                    return cls(pairs, kind, before)
        raise Damaged(f"tree record: wanted an empty node, found {str(value)[:200]}")


def each_from_json(values: Iterable[Any]) -> Iterator[LeafSpec]:
    """`LeafSpec.from_json` of each value; what differs by name only is checked once."""
    moulds: dict[Any, tuple[dict[str, Any], LeafSpec]] = {}
    pairs: dict[Any, tuple[str, int]] = {}
    for value in values:
        rest = dict(value) if type(value) is dict else {}
        own = _own(rest, pairs)
        try:
            key = (rest.get("kind"), rest.get("dtype"), *rest.get("shape", ()))
            known = moulds.get(key)
        except TypeError:
            key, known = None, None
        if known is not None and own is not None and known[0] == rest:
            # What is equal may be of another type (True and 1), so the values are those known.
            shared: Any = known[1][len(own) :]
            yield LeafSpec(*own, *shared)
            continue
        spec = LeafSpec.from_json(value)
        moulds[key] = (rest, spec)
        yield spec


def _own(
    rest: dict[str, Any], known: dict[Any, tuple[str, int]]
) -> tuple[str, str, tuple[tuple[str, int], ...]] | None:
    """Name, param and keys, taken out of `rest`; None if they are not what they should be.

    `known` are the keys that other leaves have, too.
    """
    name, param, keys = rest.pop("name", None), rest.pop("param", None), rest.pop("keys", None)
    if type(name) is not str or type(param) is not str or type(keys) is not list:
        return None
    found = []
    for key in keys:
        if type(key) is not list:
            return None
        pair = tuple(key)
        try:
            same = known.get(pair)
        except TypeError:
            return None
        if same is None:
            if not _are_keys((pair,)):
                return None
            same = known[pair] = pair
        found.append(same)  # not `pair`: (x, True) is equal to (x, 1)
    return name, param, tuple(found)


def specs_from_json(value: Any) -> tuple[LeafSpec, ...]:
    """The specs of a tree from the list of what `to_json` gave for each, through JSON.

    Raises:
        Damaged: anything else, or two leaves of one name or param.
        Unsupported: a dtype that this release does not know.
    """
    if not isinstance(value, list):
        raise Damaged(f"tree record: wanted a list of leaves, found {str(value)[:200]}")
    specs = tuple(each_from_json(value))
    must_be_distinct(specs)
    return specs


def must_be_distinct(specs: Sequence[LeafSpec]) -> None:
    """Raises Damaged when two leaves of a record have one name or param."""
    for field in ("name", "param"):
        if len({getattr(spec, field) for spec in specs}) != len(specs):
            raise Damaged(f"tree record: two leaves have one {field}")


def storage_view(array: np.ndarray, spec: LeafSpec) -> np.ndarray:
    """A logical array, or a shard of it, as it lies in the image: C order, little-endian.

    Shares memory with `array` where the bytes are the same.
    """
    assert spec.storage_dtype is not None, spec.name
    dtype = parse(spec.storage_dtype)
    if array.dtype is dtype and array.flags.c_contiguous:
        return array
    array = np.asarray(array, order="C")
    if array.dtype.byteorder == ">":
        array = array.byteswap().view(array.dtype.newbyteorder("<"))
    return array.view(dtype)


def logical_view(array: np.ndarray, spec: LeafSpec) -> np.ndarray:
    """Inverse of `storage_view`; the array keeps its shape, and its memory where it can."""
    dtype = parse(spec.dtype)
    if dtype.byteorder == ">":
        return array.view(dtype.newbyteorder("<")).byteswap().view(dtype)
    return array.view(dtype)


def differences(saved: Iterable[LeafSpec], wanted: Iterable[LeafSpec]) -> list[str]:
    """All differences between two lists of leaves, one line each, sorted by leaf name.

    Leaves are paired by name. jax arrays, NumPy arrays and NumPy scalars differ by dtype and shape
    only; a Python scalar counts as the 0-d array in which it is stored (`int` as int64), and a
    weakly typed array of no dimension as the Python scalar that jax made it of: after a jitted step
    a state has these in place of those. Keys differ by implementation and shape. Byte order, memory
    kind, weak type and sharding are no differences: the template decides them.
    """
    saved, wanted = list(saved), list(wanted)
    if len(saved) == len(wanted) and all(map(_equal, saved, wanted)):
        return []
    found_by_name = {spec.name: spec for spec in saved}
    wanted_by_name = {spec.name: spec for spec in wanted}
    lines = []
    for name in sorted(found_by_name.keys() | wanted_by_name.keys()):
        found, want = found_by_name.get(name), wanted_by_name.get(name)
        if found is None or want is None or not _agree(found, want):
            lines.append(f"{name}: wanted {want or 'nothing'}, found {found or 'nothing'}")
    return lines


def _equal(found: LeafSpec, wanted: LeafSpec) -> bool:
    """Whether they certainly agree; quick."""
    same = found.name == wanted.name and found.kind == wanted.kind and found.dtype == wanted.dtype
    return same and found.shape == wanted.shape and found.impl == wanted.impl


def _agree(found: LeafSpec, wanted: LeafSpec) -> bool:
    if found.kind == wanted.kind and found.kind not in ARRAYS:
        return found.shape == wanted.shape and found.impl == wanted.impl
    if found.weak_type and found.shape == () and wanted.kind in SCALARS:
        return found.dtype in _WEAK[wanted.kind]
    return (
        {found.kind, wanted.kind} <= ARRAYS | SCALARS.keys()
        and found.dtype.removeprefix(">") == wanted.dtype.removeprefix(">")
        and found.shape == wanted.shape
    )


_FIELDS = dict.fromkeys(LeafSpec._fields)
_DEFAULTS: dict[str, Any] = {
    "inline": None,
    "memory_kind": None,
    "weak_type": False,
    "committed": True,
    "impl": None,
    "orbax": True,
}


def _fault(spec: LeafSpec) -> str:
    """What is wrong with the fields of a spec from a file; empty if nothing."""
    for field in ("name", "param", "kind", "dtype"):
        if not isinstance(getattr(spec, field), str):
            return f"{field} is no text"
    for field in ("storage_dtype", "memory_kind", "impl"):
        if not isinstance(getattr(spec, field), str | None):
            return f"{field} is no text"
    for field in ("weak_type", "committed", "orbax"):
        if not isinstance(getattr(spec, field), bool):
            return f"{field} is neither true nor false"
    if not _are_keys(spec.keys):
        return "keys are not pairs of text and 1 or 2"
    if not _is_shape(spec.shape) or not (
        spec.storage_shape is None or _is_shape(spec.storage_shape)
    ):
        return f"no shape: {spec.shape!r:.200}, {spec.storage_shape!r:.200}"
    if spec.kind not in KINDS:
        return f"unknown kind {spec.kind!r:.200}"
    stored = (spec.storage_dtype, spec.storage_shape)
    if stored not in _storage(spec):
        return f"a {spec.kind} of {spec.dtype!r:.200} is not stored as {stored!r:.200}"
    return ""


def _storage(spec: LeafSpec) -> Sequence[tuple[str | None, tuple[int, ...] | None]]:
    """The storage dtypes and shapes that a spec may have."""
    if spec.kind in ARRAYS:
        dtype = storage_name(spec.dtype)
        return [(dtype, spec.shape if dtype else None)]
    if spec.kind == "key":
        shape = spec.storage_shape or ()
        fits = spec.impl is not None and shape[: len(spec.shape)] == spec.shape
        return [("uint32", shape)] if fits else []
    if spec.shape != ():
        return []
    if spec.kind in SCALARS and spec.inline is None:
        return [(SCALARS[spec.kind], ())]
    return [(None, None)] if spec.kind in ("int", "str", "bytes") else []


def _are_keys(keys: Any) -> bool:
    if not isinstance(keys, tuple):
        return False
    for key in keys:
        if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
            return False
        if type(key[1]) is not int or key[1] not in (1, 2):
            return False
    return True


def _is_shape(shape: Any) -> bool:
    return (
        isinstance(shape, tuple)
        and len(shape) <= MAX_DIMENSIONS
        and all(type(size) is int and 0 <= size < 2**62 for size in shape)
    )

"""Steps as the writer makes them, by hand from a pytree: two images, index, Orbax's small files."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt import image, ocdbt, orbax_json
from ckpt.specs import ArraySpec, ShardSpec

ATTEMPT, STEP = 3, 40
Pair = collections.namedtuple("Pair", "x y")
Nothing = collections.namedtuple("Nothing", "")


@dataclass
class Leaf:
    """A leaf spec as `orbax_json` wants it."""

    param: str
    keys: list[tuple[str, int]]
    kind: str
    storage_dtype: str | None
    inline: Any = None
    impl: str | None = None
    orbax: bool = True


def key_path(path: tuple[Any, ...]) -> list[tuple[str, int]]:
    def one(key: Any) -> tuple[str, int]:
        match key:
            case jax.tree_util.SequenceKey():
                return str(key.idx), 1
            case jax.tree_util.GetAttrKey():
                return key.name, 2
        return str(key.key), 2

    return [one(key) for key in path]


def is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def empty_type(node: Any) -> str:
    return {dict: "Dict", list: "List", tuple: "Tuple"}.get(type(node), "None")


def stored(value: Any) -> tuple[str, Any]:
    """Kind of a leaf, and what an image holds of it."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "key", jax.random.key_data(value)
    if isinstance(value, jax.Array):
        return "jax", value
    if isinstance(value, np.ndarray):
        return "numpy", value
    if isinstance(value, np.generic):
        return "numpy_scalar", np.asarray(value)
    kind = type(value).__name__
    if kind in ("str", "bytes") or (kind == "int" and not -(2**63) <= value < 2**63):
        return kind, None
    return kind, np.asarray(value)


def write_step(root: Path, tree: Any, limit_bytes: int = 48) -> Path:
    """A step in two images: devices 0 to 3 belong to process 0, which has all else, too."""
    leaves: list[Leaf] = []
    arrays: list[ArraySpec] = []
    shards: tuple[list[ShardSpec], list[ShardSpec]] = ([], [])
    sources: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
    for path, value in flat:
        if is_empty(value):
            continue
        keys = key_path(path)
        param = ".".join(key for key, _ in keys)
        kind, held = stored(value)
        impl = str(jax.random.key_impl(value)) if kind == "key" else None
        dtype = held.dtype.name if held is not None else None
        leaves.append(Leaf(param, keys, kind, dtype, value if kind == "str" else None, impl))
        if held is None:
            continue
        parts = [(0, (0,) * held.ndim, np.asarray(held))]
        if isinstance(held, jax.Array):
            parts = [
                (
                    int(shard.device.id >= 4),
                    tuple(part.start or 0 for part in shard.index),
                    np.asarray(shard.data),
                )
                for shard in held.addressable_shards
                if shard.replica_id == 0
            ]
        chunk = image.chunk_shape(parts[0][2].shape, held.dtype.itemsize, limit_bytes)
        for process, start, data in parts:
            shards[process].append(ShardSpec(len(arrays), start, data.shape))
            sources[process].append(data)
        arrays.append(ArraySpec(param, held.dtype.name, held.shape, chunk))

    step = root / str(STEP)
    (step / "state" / "d").mkdir(parents=True)
    headers, paths = [], []
    for process in range(2):
        plan = image.plan(arrays, shards[process], {})
        buffer = bytearray(plan.size_bytes)
        headers.append(image.fill(plan, buffer, sources[process]))
        paths.append(f"d/a{ATTEMPT}-p{process}.image")
        (step / "state" / paths[-1]).write_bytes(buffer)
    nodes = f"d/a{ATTEMPT}.index"
    database = ocdbt.index(headers, paths, nodes, uuid=bytes(16), time_ns=1)
    (step / "state" / nodes).write_bytes(database.nodes)
    (step / "state" / "manifest.ocdbt").write_bytes(database.manifest)
    empty = [(key_path(path), empty_type(node)) for path, node in flat if is_empty(node)]
    device = str(jax.local_devices()[0])
    small = orbax_json.files(
        leaves, arrays, empty, item="state", device=device, init_ns=1, commit_ns=2
    )
    for name, content in small.items():
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).write_bytes(content)
    (step / "commit_success.txt").write_bytes(b"{}")
    return step


def mesh_sharding(rows: int, *spec: str | None) -> NamedSharding:
    devices = np.array(jax.devices()).reshape(rows, -1)
    return NamedSharding(Mesh(devices, ("a", "b")), PartitionSpec(*spec))


def sample_tree() -> dict[str, Any]:
    split, rows = mesh_sharding(4, "a", "b"), mesh_sharding(4, "b")
    return {
        "params": {
            "w": jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(16, 4), split),
            "b": jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), rows),
            "scale": jnp.float32(2.5),
            "none": jnp.zeros((0, 3), jnp.float32),
            "a/b %20é?#": jnp.arange(3),
        },
        "opt": [Pair(jnp.ones(2), None), {"host": np.arange(6, dtype=np.int64).reshape(2, 3)}],
        "scalars": (7, 2.5, True, np.float32(0.1), np.int16(-3)),
        "other": (1 + 2j, ml_dtypes.bfloat16(3), np.complex64(1j)),
        "hidden": [b"raw", 10**30, "shown"],
        "name": "run 17",
        "key": jax.random.key(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(4, impl="rbg"), 8), rows),
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None, "named": Nothing()},
        "by number": {5: jnp.ones(1), 10: jnp.zeros(1)},
    }

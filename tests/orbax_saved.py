"""Steps that Orbax wrote, in all ways it has; what it restores from them, and comparison."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

Pair = collections.namedtuple("Pair", "x y")


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def state(*, numpy_scalars: bool = True, strings: bool = True) -> dict[str, Any]:
    spread = NamedSharding(mesh(), PartitionSpec("a", "b"))
    tree = {
        "w": jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), spread),
        "b": jnp.asarray(np.arange(3), jnp.bfloat16),
        "f8": jnp.asarray(np.arange(3), jnp.float8_e4m3fn),
        "i4": jnp.asarray(np.arange(5), jnp.int4),
        "mask": jnp.array([True, False]),
        "c": jnp.array([1 + 2j], jnp.complex64),
        "zeros": jnp.zeros((40, 30)),
        "big": jax.random.normal(jax.random.key(1), (64, 64)),
        "n": np.arange(5, dtype=np.int64),
        "count": 3,
        "rate": 2.5,
        "layers": [jnp.ones(2), {"q": np.float32(3) if numpy_scalars else jnp.ones(())}],
        "pair": (jnp.full((), 7.0), 1),
        "named": Pair(jnp.ones(2), 2),
        "by_number": {1: jnp.ones(2), 0: jnp.zeros(2)},
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 8),
        "none": None,
        "no_dict": {},
        "no_list": [],
        "no_tuple": (),
    }
    if strings:
        tree["name"] = "hello"
    return tree


def save_manager(path: pathlib.Path) -> pathlib.Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.StandardSave(state(strings=False)))
        manager.wait_until_finished()
    return path / "3"


def save_standard(path: pathlib.Path) -> pathlib.Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "step_07", state(strings=False))
    return path / "step_07"


def save_pytree(path: pathlib.Path, **options: Any) -> pathlib.Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path / "5", state())
    return path / "5"


def save_v1(path: pathlib.Path) -> pathlib.Path:
    v1.save(path / "9", state(numpy_scalars=False))
    return path / "9"


SAVERS: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    "manager": save_manager,
    "standard": save_standard,
    "v1": save_v1,
    "zarr2": lambda path: save_pytree(path, use_ocdbt=False),
    "zarr3": lambda path: save_pytree(path, use_ocdbt=False, use_zarr3=True),
    "ocdbt-zarr2": save_pytree,
    "ocdbt-zarr3": lambda path: save_pytree(path, use_zarr3=True),
}


class Saved:
    """One step per saver, written when first asked for and read-only."""

    def __init__(self, place: pathlib.Path) -> None:
        self._place = place
        self._found: dict[str, pathlib.Path] = {}

    def __call__(self, saver: str) -> pathlib.Path:
        if saver not in self._found:
            self._found[saver] = SAVERS[saver](self._place / saver)
        return self._found[saver]


def by_orbax(directory: pathlib.Path) -> Any:
    """What the handler of Orbax's first generation restores from an item, of either generation."""
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    with ocp.PyTreeCheckpointer() as checkpointer:
        if (directory / "_sharding").exists():
            return checkpointer.restore(directory)
        tree = {"a": as_numpy, "b": {"c": as_numpy}}  # Orbax asks for more where it is missing
        return checkpointer.restore(directory, restore_args=tree)


def item_directory(step: pathlib.Path) -> pathlib.Path:
    names = [n for n in ("default", "state", "items") if (step / n).is_dir()]
    return step / names[0] if names else step


def plain(value: Any) -> Any:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(jax.random.key_impl(value)), plain(jax.random.key_data(value)))
    if isinstance(value, jax.Array | np.ndarray):
        array = np.asarray(value)
        return (array.dtype.name, array.shape, array.tobytes())
    return (type(value).__name__, value)


def is_leaf(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple) and not value)


def assert_same(found: Any, wanted: Any) -> None:
    left, shape_found = jax.tree.flatten(found, is_leaf=is_leaf)
    right, shape_wanted = jax.tree.flatten(wanted, is_leaf=is_leaf)
    assert shape_found == shape_wanted
    assert [plain(x) for x in left] == [plain(x) for x in right]

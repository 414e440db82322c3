"""What the processes of a test save and restore: a tree, data, and the place where it happens.

All values are pure functions of a step number, so each process, and the test itself, knows what it
must find, and where.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from memory_source import Columns

import ckpt
from datapipe import Pipeline

DEVICES = 8
"""Of all processes together."""

# --- the tree that is saved: a pure function of the step ------------------------------------------


def wanted(step: int) -> dict[str, np.ndarray]:
    """The values of all arrays of `state`; keys as their data."""
    rng = np.random.default_rng(step)
    return {
        "rows": rng.normal(size=(16, 6)).astype(np.float32),
        "columns": rng.normal(size=(6, 16)).astype(np.float32),
        "both": rng.integers(-9, 9, (8, 8), np.int32),
        "half": rng.normal(size=(8, 2, 3)).astype(ml_dtypes.bfloat16),
        "replicated": rng.integers(0, 99, 5).astype(np.int32),
        "unusual": rng.normal(size=(16,)).astype(ml_dtypes.float8_e4m3),
        "keys": rng.integers(0, 2**32, (8, 2), np.uint32),
        "one": rng.normal(size=3).astype(np.float32),
        "key": np.asarray(jax.random.key_data(jax.random.key(step))),
        "host": rng.integers(0, 9, (3, 4)).astype(np.int16),
    }


HOST_VALUES = {"lr": 0.1, "name": "run", "big": 2**70, "blob": b"\0\1", "on": True}


def shardings(*, turned: bool = False) -> dict[str, Any]:
    """Where the arrays are; `turned` gives the same arrays other shardings."""
    line = Mesh(np.array(jax.devices()), ("x",))
    plane = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    spec = PartitionSpec
    rows, columns = NamedSharding(line, spec("x")), NamedSharding(line, spec(None, "x"))
    everywhere = NamedSharding(line, spec())
    local = SingleDeviceSharding(jax.local_devices()[-1])
    if turned:
        return {
            "rows": NamedSharding(plane, spec(None, "y")),
            "columns": NamedSharding(plane, spec("y", "x")),
            "both": columns,
            "half": everywhere,
            "replicated": everywhere,
            "unusual": NamedSharding(plane, spec("y")),
            "keys": NamedSharding(plane, spec("x")),
            "one": everywhere,
            "key": everywhere,
        }
    return {
        "rows": rows,
        "columns": columns,
        "both": NamedSharding(plane, spec("x", "y")),
        "half": NamedSharding(plane, spec("x")),
        "replicated": everywhere,
        "unusual": rows,
        "keys": rows,
        "one": local,
        "key": local,
    }


def state(step: int, *, turned: bool = False) -> dict[str, Any]:
    """The tree of a step on this process's devices."""
    values = wanted(step)
    found: dict[str, Any] = {"host": values.pop("host"), "static": dict(HOST_VALUES), "step": step}
    for name, sharding in shardings(turned=turned).items():
        array = spread(values[name], sharding)
        found[name] = jax.random.wrap_key_data(array) if name.startswith("key") else array
    return found


def spread(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def like(*, turned: bool = False) -> dict[str, Any]:
    """A template without values of the arrays."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(spec, state(0, turned=turned))


def differences(found: dict[str, Any], step: int, *, turned: bool = False) -> list[str]:
    """What of a restored tree is not bit for bit what this process must have of it."""
    wrong = []
    for name, value in wanted(step).items():
        leaf = found[name]
        if name == "host":
            if not (isinstance(leaf, np.ndarray) and same_bits(leaf, value)):
                wrong.append(f"host: {leaf!r}")
            continue
        if leaf.sharding != shardings(turned=turned)[name]:
            wrong.append(f"{name}: {leaf.sharding}")
        array = jax.random.key_data(leaf) if name.startswith("key") else leaf
        if len(array.addressable_shards) != len(leaf.sharding.addressable_devices):
            wrong.append(f"{name}: {len(array.addressable_shards)} shards")
        for shard in array.addressable_shards:
            if not same_bits(np.asarray(shard.data), value[shard.index]):
                wrong.append(f"{name}{shard.index}: {shard.data}")
    if (found["static"], found["step"]) != (HOST_VALUES, step):
        wrong.append(f"host values: {found['static']}, {found['step']}")
    return wrong


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


# --- the data -------------------------------------------------------------------------------------


def pipeline(seed: int = 5, epochs: int = 20) -> Pipeline:
    return Pipeline(Columns(200), batch_size=16, seed=seed, epochs=epochs).map(
        _numbers, version="1"
    )


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"], "row": record["row"]}


def data_sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


def rows_of(batch: dict[str, jax.Array]) -> dict[str, list[int]]:
    """The rows of a batch that this process holds: first row -> ids."""
    return {
        str(shard.index[0].indices(16)[0]): np.asarray(shard.data).tolist()
        for shard in batch["id"].addressable_shards
    }


class Counter:
    """An iterator like Grain's: its state is that of one process."""

    def __init__(self, start: int) -> None:
        self.at = start

    def get_state(self) -> dict[str, int]:
        return {"next_index": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["next_index"]


# --- the place ------------------------------------------------------------------------------------


class Stage:
    """A run under a directory, as one process sees it."""

    def __init__(self, scene: str, directory: Path, index: int, count: int) -> None:
        self.root = directory / scene
        self.scene, self.index, self.count = scene, index, count
        self._arenas = directory / f"{scene}.arena-{index}"
        self._meetings = 0

    def manager(self, *, timeout_s: float = 60.0, **options: Any) -> ckpt.CheckpointManager:
        # Scenes patch what the writer calls, and want failures at once.
        tier = ckpt.Shared(self.root, **{"patience_s": 0, **options})
        return ckpt.CheckpointManager(
            tier, arena=self._arenas, timeout_s=timeout_s, writer="thread"
        )

    def meet(self) -> None:
        """Wait for all processes, by other means than those that are tested."""
        from jax._src import distributed

        client = distributed.global_state.client
        if client is not None:
            self._meetings += 1
            client.wait_at_barrier(f"{self.scene}-{self._meetings}", 120_000)


def error_of(act: Callable[[], Any]) -> dict[str, Any] | None:
    """Type and text of the error that a call ends with, and how long it took."""
    begun = time.monotonic()
    try:
        act()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - begun,
        }
    return None

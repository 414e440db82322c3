"""What the tests of `Loading` restore: a state of all kinds of leaves, and a watched image."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rows import Rows

import ckpt
from ckpt.open_images import ImageReader
from ckpt.store import FileStore

MESH = jax.make_mesh((8,), ("x",))
SPREAD = NamedSharding(MESH, PartitionSpec("x"))
COLUMNS = NamedSharding(MESH, PartitionSpec(None, "x"))


def state_of(tag: int) -> dict[str, Any]:
    """All that a template may hold: sharded, replicated, uncommitted, weak, keys, NumPy, others."""
    rows = jnp.arange(64.0 * 16).reshape(64, 16) + tag
    return {
        "spread": jax.device_put(rows, SPREAD),
        "columns": jax.device_put(rows + 1, COLUMNS),
        "copies": jax.device_put(rows + 2, NamedSharding(MESH, PartitionSpec())),
        "one": jax.device_put(rows + 3, jax.devices()[5]),
        "free": rows + 4,
        "half": (rows + 5).astype(jnp.bfloat16),
        "weak": jax.jit(lambda: 1.5)() + tag,
        "key": jax.random.key(tag),
        "keys": jax.device_put(jax.random.split(jax.random.key(tag), 8), SPREAD),
        "host": np.arange(50) + tag,
        "count": tag,
        "name": f"state {tag}",
    }


def copied(state: Any) -> Any:
    """The same values in arrays of their own: those of a tree may be donated then."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)


def devices_of(state: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]


def traits(state: Any) -> list[Any]:
    """What a restore into a template takes from the template."""
    return [
        (x.shape, x.dtype, x.sharding, x.committed, getattr(x, "weak_type", None))
        for x in devices_of(state)
    ]


def is_gone(leaf: jax.Array) -> bool:
    return leaf.is_deleted()


def live_bytes() -> int:
    return sum(each.nbytes for each in jax.live_arrays())


def full(tag: int) -> dict[str, Any]:
    return {**state_of(tag), "ema": jnp.full(4, float(tag))}


@contextlib.contextmanager
def manager_of(root: Path) -> Iterator[ckpt.CheckpointManager]:
    tier = ckpt.Shared(root, keep=ckpt.Keep())
    with ckpt.CheckpointManager(tier, arena=root.parent / "arena") as manager:
        yield manager


class Watched(ImageReader):
    """An image that tells before it reads chunks; its header is read in the calling thread."""

    def __init__(self, image: Any, told: Callable[[int], object]) -> None:
        self.name, self.size_bytes = image.name, image.size_bytes
        self._image, self._told = image, told

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if threading.current_thread().name.startswith("ckpt-read"):
            self._told(sum(buffer.nbytes for _, buffer in ranges))
        self._image.read_into(ranges)

    def close(self) -> None:
        self._image.close()


@contextlib.contextmanager
def watched(told: Callable[[int], object]) -> Iterator[None]:
    """`told` gets the bytes of each read of chunks, before it."""
    original = FileStore.open_image

    def open_image(self: FileStore, key: str) -> ImageReader:
        return Watched(original(self, key), told)

    with mock.patch.object(FileStore, "open_image", open_image):
        yield


def save_three(root: Path) -> Path:
    """Steps 1 to 3; the newest has a leaf more. Returns `root`."""
    tier = ckpt.Shared(root, keep=ckpt.Keep())
    data = Rows()
    with ckpt.CheckpointManager(tier, arena=root.with_name("arena")) as manager:
        manager.resume(data=data)
        for step in (1, 2):
            data.take()
            manager.save(step, state_of(step), data=data)
        data.take()
        manager.save(3, {**state_of(3), "ema": jnp.full(4, 3.0)}, data=data)
        manager.wait_until_finished(60)
    return root

"""Device to arena: copy this process's share of a state into a slot, as an image.

Each shard is written once in the whole run: by the process that holds its replica 0. Values on the
host, and arrays that live on one process's devices only, are taken to be the same in all processes;
process 0 writes them. Every image lists all arrays.

On CPU the values are copied from where XLA has them, before `take` returns. From other platforms
only the shards that are to be written go to the host, through pinned memory where there is some.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ckpt import image
from ckpt.arena import Arena, Slot
from ckpt.errors import Misuse, Unsupported
from ckpt.image import ArraySpec, Header, ShardSpec
from ckpt.leaves import storage_view
from ckpt.tree import Leaf
from ckpt.values import stored

_MAX_THREADS = 8


@dataclass(frozen=True, eq=False)
class SnapshotPlan:
    """The layout of snapshots of one structure and sharding, for the next `take`."""

    signature: list[Any] = field(repr=False)
    """What the plan holds for: of each array its name, dtype, shape and sharding."""
    picks: list[tuple[int, ...]] = field(repr=False)
    """Of each array the numbers of the addressable shards that this process writes."""
    image: image.Plan


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state in a slot. Whoever is done with it calls `slot.release()`."""

    slot: Slot
    header: Header
    plan: SnapshotPlan


def take(
    leaves: Sequence[Leaf],
    arena: Arena,
    meta: dict[str, Any] | Callable[[], dict[str, Any]],
    *,
    previous: SnapshotPlan | None = None,
    timeout_s: float | None = None,
) -> Snapshot:
    """Copy `leaves` into a free slot of `arena`; afterwards they may be donated or overwritten.

    Waits until the arrays are computed, then up to `timeout_s` for a slot. `meta`, or what it
    returns, goes into the image. `previous`, the plan of any earlier snapshot, saves the planning
    when structure and shardings are the same. Leaves held in the tree record are left out.

    Raises:
        Misuse: an array was deleted or donated, named by its leaf; meta is not JSON.
        Unsupported: an array is sharded unevenly.
        StoreFailed: no slot came free, or the arena's place is too small.
    """
    with jax.profiler.TraceAnnotation("ckpt.snapshot"):
        held = [leaf for leaf in leaves if leaf.spec.storage_dtype is not None]
        try:
            values = [stored(leaf.value, leaf.spec) for leaf in held]
            jax.block_until_ready(values)
        except RuntimeError:
            _name_deleted(held)
            raise
        plan = _plan(held, values, previous)
        layout = plan.image.with_meta(meta() if callable(meta) else meta)
        slot = arena.claim(layout.size_bytes, timeout_s)
        try:
            sources = _sources(held, values, plan.picks)
            header = image.fill(layout, slot.buffer, sources, _threads(), where=str(slot.path))
        except BaseException:
            slot.release()
            raise
    return Snapshot(slot, header, plan)


def _name_deleted(leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted():
            raise Misuse(
                f"leaf {leaf.spec.name}: the array is deleted, or was donated to a jitted "
                "function; save the arrays that the function returned"
            )


def _plan(
    leaves: Sequence[Leaf], values: Sequence[Any], previous: SnapshotPlan | None
) -> SnapshotPlan:
    signature = [
        (leaf.spec.param, str(leaf.spec.storage_dtype), value.shape, _sharding(value))
        for leaf, value in zip(leaves, values, strict=True)
    ]
    if previous is not None and previous.signature == signature:
        return previous
    arrays: list[ArraySpec] = []
    shards: list[ShardSpec] = []
    picks = []
    shares: dict[Any, _Share] = {}
    for i, ((param, dtype, shape, sharding), value) in enumerate(
        zip(signature, values, strict=True)
    ):
        share = shares.get((shape, sharding))
        if share is None:
            share = shares[shape, sharding] = _share(value, param)
        chunk = image.chunk_shape(share.shard_shape, image.dtype_of(dtype).itemsize)
        arrays.append(ArraySpec(param, dtype, shape, chunk))
        shards += (ShardSpec(i, start, share.shard_shape) for start in share.starts)
        picks.append(share.picks)
    return SnapshotPlan(signature, picks, image.plan(arrays, shards, {}))


def _sharding(value: np.ndarray | jax.Array) -> jax.sharding.Sharding | None:
    return value.sharding if isinstance(value, jax.Array) else None


@dataclass(frozen=True)
class _Share:
    """What this process writes of an array; `shard_shape` is the same in all processes."""

    shard_shape: tuple[int, ...]
    picks: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]


def _share(value: np.ndarray | jax.Array, param: str) -> _Share:
    shape = value.shape
    if not isinstance(value, jax.Array):
        mine = jax.process_index() == 0
        return _Share(shape, (0,) * mine, ((0,) * len(shape),) * mine)
    try:
        shard_shape = value.sharding.shard_shape(shape)
    except ValueError as error:
        raise Unsupported(f"{param}: an uneven sharding of {shape} cannot be saved") from error
    everywhere = value.is_fully_addressable and jax.process_count() > 1
    picks, starts = [], []
    for i, shard in enumerate(value.addressable_shards):
        if shard.replica_id == 0 and not (everywhere and jax.process_index() != 0):
            picks.append(i)
            starts.append(
                tuple(part.indices(n)[0] for part, n in zip(shard.index, shape, strict=True))
            )
    return _Share(shard_shape, tuple(picks), tuple(starts))


def _sources(
    leaves: Sequence[Leaf], values: Sequence[Any], picks: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """One array on the host per shard that this process writes; on CPU these are views."""
    shards: list[Any] = []
    specs = []
    away: dict[int, Any] = {}  # position in `shards` -> sharding in pinned memory
    for leaf, value, chosen in zip(leaves, values, picks, strict=True):
        for i in chosen:
            shard = value
            if isinstance(value, jax.Array):
                if len(value.sharding.device_set) > 1:
                    shard = value.addressable_data(i)
                if (pinned := _pinned(value.sharding)) is not None:
                    away[len(shards)] = shard.sharding.with_memory_kind(pinned)
            shards.append(shard)
            specs.append(leaf.spec)
    if away:
        moved = jax.device_put([shards[at] for at in away], list(away.values()))
        for at, shard in zip(away, jax.block_until_ready(moved), strict=True):
            shards[at] = shard
    return [storage_view(np.asarray(s), spec) for s, spec in zip(shards, specs, strict=True)]


@functools.lru_cache(maxsize=1024)
def _pinned(sharding: jax.sharding.Sharding) -> str | None:
    """The memory to go through for arrays of this sharding; None for those the host can read."""
    device: Any = next(iter(sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    away = device.platform != "cpu" and sharding.memory_kind not in ("pinned_host", "unpinned_host")
    return "pinned_host" if away and "pinned_host" in kinds else None


def _threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))

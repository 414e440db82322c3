"""Device to arena: copy this process's share of a state into a slot, as an image.

Each shard is written once in the whole run: by the process that holds its replica 0. Values on the
host, and arrays that live on one process's devices only, are taken to be the same in all processes;
process 0 writes them. Every image lists all arrays.

On CPU the values are copied from where XLA has them, before `take` returns. From other platforms
only the shards that are to be written go to the host, through pinned memory where there is some.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ckpt import image
from ckpt.arena import Arena, Slot
from ckpt.errors import Misuse, Unsupported
from ckpt.image import Header
from ckpt.leaves import LeafSpec, storage_view
from ckpt.outline import Outline
from ckpt.specs import ArraySpec, ShardSpec, dtype_of
from ckpt.tree import Flat
from ckpt.values import stored

_MAX_THREADS = 8


@dataclass(frozen=True)
class _Route:
    picks: tuple[int, ...]
    """Numbers of the addressable shards that this process writes."""
    single: bool
    """Whether the array is its only shard."""
    pinned: str | None
    """The memory to go through; None where the host can read the shards."""


_WHOLE = _Route((0,), True, None)


@dataclass(frozen=True, eq=False)
class SnapshotPlan:
    """The layout of snapshots of one structure and sharding, for the next `take`."""

    outline: Outline = field(repr=False)
    """Of the tree that it was made for: an equal one needs no second look."""
    held: list[int] = field(repr=False)
    """Which leaves are stored, by number; the others are held in the tree record."""
    specs: list[LeafSpec] = field(repr=False)
    """Theirs."""
    signature: list[Any] = field(repr=False)
    """What the plan holds for: of each array its name, dtype, shape and sharding."""
    routes: list[_Route] = field(repr=False)
    """Of each array what this process writes, and how it gets to the host."""
    direct: bool
    """Whether each array is one whole shard that the host can read where it is."""
    image: image.Plan


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A state in a slot. Whoever is done with it calls `slot.release()`."""

    slot: Slot
    header: Header
    plan: SnapshotPlan


def take(
    flat: Flat,
    arena: Arena,
    meta: dict[str, Any] | Callable[[], dict[str, Any]],
    *,
    previous: SnapshotPlan | None = None,
    timeout_s: float | None = None,
) -> Snapshot:
    """Copy a tree into a free slot of `arena`; afterwards it may be donated or overwritten.

    Waits until the arrays are computed, then up to `timeout_s` for a slot. `meta`, or what it
    returns, goes into the image, with the tree record on process 0. `previous`, the plan of any
    earlier snapshot, saves the planning when structure and shardings are the same.

    Raises:
        Misuse: an array was deleted or donated, named by its leaf; meta is not JSON.
        Unsupported: an array is sharded unevenly.
        StoreFailed: no slot came free, or the arena's place is too small.
    """
    with jax.profiler.TraceAnnotation("ckpt.snapshot"):
        same = previous is not None and previous.outline is flat.outline
        held = previous.held if previous is not None and same else _held(flat.specs)
        specs = previous.specs if previous is not None and same else [flat.specs[i] for i in held]
        found = [flat.values[i] for i in held]
        try:
            values = list(map(stored, found, specs))
            jax.block_until_ready(values)
        except RuntimeError:
            _name_deleted(found, specs)
            raise
        plan = previous
        if plan is None or not same:
            plan = _plan(flat.outline, held, specs, values, previous)
        tree = flat.outline.record if jax.process_index() == 0 else b""
        layout = plan.image.with_meta(meta() if callable(meta) else meta, tree)
        slot = arena.claim(layout.size_bytes, timeout_s)
        try:
            sources = _sources(specs, values, plan)
            header = image.fill(layout, slot.buffer, sources, _threads(), where=str(slot.path))
            slot.filled()
        except BaseException:
            slot.release()
            raise
    return Snapshot(slot, header, plan)


def about_bytes(tree: Any) -> int:
    """Roughly the size of this process's image of a tree: its share, if arrays are evenly owned."""
    try:
        leaves = jax.tree.leaves(tree)
    except (TypeError, ValueError):
        return 0  # keys of several types, which JAX does not flatten; the first save will tell
    total = 0.0
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            held = 1.0 if leaf.is_fully_addressable else _share_of(leaf.sharding)
            total += leaf.nbytes * held
        elif isinstance(leaf, np.ndarray):
            total += leaf.nbytes
    return int(total)


def _share_of(sharding: jax.sharding.Sharding) -> float:
    return len(sharding.addressable_devices) / len(sharding.device_set)


def _held(specs: Sequence[LeafSpec]) -> list[int]:
    return [i for i, spec in enumerate(specs) if spec.storage_dtype is not None]


def _name_deleted(values: Sequence[Any], specs: Sequence[LeafSpec]) -> None:
    for value, spec in zip(values, specs, strict=True):
        if isinstance(value, jax.Array) and value.is_deleted():
            raise Misuse(
                f"leaf {spec.name}: the array is deleted, or was donated to a jitted "
                "function; save the arrays that the function returned"
            )


def _plan(
    outline: Outline,
    held: list[int],
    specs: list[LeafSpec],
    values: Sequence[Any],
    previous: SnapshotPlan | None,
) -> SnapshotPlan:
    signature = [
        (spec.param, str(spec.storage_dtype), value.shape, _sharding(value))
        for spec, value in zip(specs, values, strict=True)
    ]
    if previous is not None and previous.signature == signature:
        return replace(previous, outline=outline, held=held, specs=specs)
    arrays: list[ArraySpec] = []
    shards: list[ShardSpec] = []
    routes = []
    shares: dict[Any, _Share] = {}
    for i, ((param, dtype, shape, sharding), value) in enumerate(
        zip(signature, values, strict=True)
    ):
        share = shares.get((shape, sharding))
        if share is None:
            share = shares[shape, sharding] = _share(value, param)
        chunk = image.chunk_shape(share.shard_shape, dtype_of(dtype).itemsize)
        arrays.append(ArraySpec(param, dtype, shape, chunk))
        shards += (ShardSpec(i, start, share.shard_shape) for start in share.starts)
        routes.append(share.route)
    layout = image.plan(arrays, shards, {})
    direct = all(route == _WHOLE for route in routes)
    return SnapshotPlan(outline, held, specs, signature, routes, direct, layout)


def _sharding(value: np.ndarray | jax.Array) -> jax.sharding.Sharding | None:
    return value.sharding if isinstance(value, jax.Array) else None


@dataclass(frozen=True)
class _Share:
    """What this process writes of an array; `shard_shape` is the same in all processes."""

    shard_shape: tuple[int, ...]
    route: _Route
    starts: tuple[tuple[int, ...], ...]


def _share(value: np.ndarray | jax.Array, param: str) -> _Share:
    shape = value.shape
    if not isinstance(value, jax.Array):
        mine = jax.process_index() == 0
        return _Share(shape, _Route((0,) * mine, True, None), ((0,) * len(shape),) * mine)
    try:
        shard_shape = value.sharding.shard_shape(shape)
    except ValueError as error:
        raise Unsupported(f"{param}: an uneven sharding of {shape} cannot be saved") from error
    if not value.addressable_shards:
        devices: set[Any] = value.sharding.device_set
        owners = {device.process_index for device in devices}
        if len(owners) == 1:
            # There it looks like an array that each process has for itself, which process 0 writes.
            raise Unsupported(
                f"{param}: lies on devices of process {owners.pop()} only, of which this process "
                "has none; replicate it, or spread it over the devices of several processes"
            )
    everywhere = value.is_fully_addressable and jax.process_count() > 1
    picks, starts = [], []
    for i, shard in enumerate(value.addressable_shards):
        if shard.replica_id == 0 and not (everywhere and jax.process_index() != 0):
            picks.append(i)
            starts.append(
                tuple(part.indices(n)[0] for part, n in zip(shard.index, shape, strict=True))
            )
    single = len(value.sharding.device_set) == 1
    route = _Route(tuple(picks), single, _pinned(value.sharding))
    return _Share(shard_shape, route, tuple(starts))


def _sources(
    specs: Sequence[LeafSpec], values: Sequence[Any], plan: SnapshotPlan
) -> list[np.ndarray]:
    """One array on the host per shard that this process writes; on CPU these are views."""
    shards: list[Any] = list(values)
    if not plan.direct:
        shards, owners, away = [], [], {}  # away: position in `shards` -> sharding to go through
        for spec, value, route in zip(specs, values, plan.routes, strict=True):
            for i in route.picks:
                shard = value if route.single else value.addressable_data(i)
                if route.pinned is not None:
                    away[len(shards)] = shard.sharding.with_memory_kind(route.pinned)
                shards.append(shard)
                owners.append(spec)
        specs = owners
        if away:
            moved = jax.device_put([shards[at] for at in away], list(away.values()))
            for at, shard in zip(away, jax.block_until_ready(moved), strict=True):
                shards[at] = shard
    return list(map(storage_view, map(np.asarray, shards), specs))


def _pinned(sharding: jax.sharding.Sharding) -> str | None:
    """The memory to go through for arrays of this sharding; None for those the host can read."""
    device: Any = next(iter(sharding.device_set))
    kinds = {memory.kind for memory in device.addressable_memories()}
    away = device.platform != "cpu" and sharding.memory_kind not in ("pinned_host", "unpinned_host")
    return "pinned_host" if away and "pinned_host" in kinds else None


def _threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))

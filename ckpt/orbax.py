"""Steps that Orbax wrote, read through TensorStore: values on the host or under any sharding.

Both API generations, zarr v2 and v3, in OCDBT or in plain directories; see `orbax_files` for the
files around the arrays. Orbax stores no digests: a flipped bit inside a chunk is found only when it
breaks the compression or an index. A chunk that is not there is `Damaged`, except in old
checkpoints whose metadata says that absent chunks stand for zeros. Shapes are what metadata claims:
none is allocated for that this host could not hold, or that hardly any stored chunk backs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from ckpt.errors import Damaged, Mismatch, StoreFailed, Unsupported
from ckpt.orbax_files import (
    OrbaxItem,
    OrbaxLeaf,
    full_param,
    is_orbax_step,
    items,
    read_item,
    read_json,
    step_names,
    steps,
    trees,
)
from ckpt.orbax_nesting import empty_value, rebuild
from ckpt.placement import Box, HostLeaf, boxes, place, whole
from ckpt.wording import counted

__all__ = [
    "SavedArray",
    "full_param",
    "is_orbax_step",
    "items",
    "read",
    "read_json",
    "read_tree",
    "specs",
    "step_names",
    "steps",
    "trees",
]

Wanted = Mapping[str, jax.sharding.Sharding | None]

_CACHE_BYTES = 64 << 20
_OPEN_AT_ONCE = 1024
_FILLED_BYTES = 1 << 30
_FILLED_TIMES = 64
"""Zeros for absent chunks: so many bytes in any case, beyond that so many times what is stored. A
fresh optimizer is a few times the size of its parameters."""

_AWAY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "UNAUTHENTICATED", "RESOURCE_EXH")


@dataclass(frozen=True)
class SavedArray:
    """One leaf of a step of Orbax.

    `shape` and `dtype` are those of the stored array, None for leaves that are none; for a PRNG key
    (`impl` is set) they are those of the uint32 key data. The other fields: see `OrbaxLeaf`.
    """

    param: str
    keys: tuple[tuple[str, int], ...]
    value_type: str
    shape: tuple[int, ...] | None
    dtype: str | None
    impl: str | None


def specs(path: str | os.PathLike[str], item: str | None = None) -> list[SavedArray]:
    """What a step holds, without reading values; in Orbax's order.

    Raises:
        NotFound, Damaged, Unsupported, Misuse: as `orbax_files.read_item`.
    """
    found = read_item(path, item)
    leaves = [leaf for leaf in found.leaves if leaf.is_array]
    opened = iter(_open_all(found, leaves))
    return [_spec(leaf, next(opened) if leaf.is_array else None) for leaf in found.leaves]


def _spec(leaf: OrbaxLeaf, array: Any) -> SavedArray:
    shape = None if array is None else tuple(array.shape)
    dtype = None if array is None else np.dtype(array.dtype.numpy_dtype).name
    return SavedArray(leaf.param, leaf.keys, leaf.value_type, shape, dtype, leaf.impl)


def read(
    path: str | os.PathLike[str],
    wanted: Wanted | None = None,
    item: str | None = None,
    *,
    budget_bytes: int = 1 << 30,
) -> dict[str, Any]:
    """Values by param. `wanted` maps params to a sharding, or None for the host; None: all, there.

    On the host arrays are `np.ndarray`, scalars Python numbers. Under a sharding they are
    `jax.Array`, of which this process reads its own parts. PRNG keys are key arrays, strings `str`;
    None and empty containers are themselves. About `budget_bytes` of reads are under way at a time;
    an array above it is read alone.

    Raises:
        Damaged: absent or unreadable data, with leaf and place.
        Mismatch: a wanted param is not there, or a sharding does not fit.
        NotFound, Unsupported, Misuse, StoreFailed: as `orbax_files.read_item`.
    """
    found = read_item(path, item)
    return _read(found, _selected(found, wanted), wanted or {}, budget_bytes)


def read_tree(
    path: str | os.PathLike[str], item: str | None = None, *, budget_bytes: int = 1 << 30
) -> Any:
    """The whole tree on the host, as `orbax_nesting.rebuild` makes it: dicts and lists.

    `budget_bytes` as in `read`.

    Raises:
        NotFound, Damaged, Unsupported, Misuse, StoreFailed: as `read`.
    """
    found = read_item(path, item)
    values = _read(found, _selected(found, None), {}, budget_bytes)
    return rebuild(found, [values[leaf.param] for leaf in found.leaves])


def _selected(found: OrbaxItem, wanted: Wanted | None) -> list[OrbaxLeaf]:
    by_param: dict[str, OrbaxLeaf] = {}
    for leaf in found.leaves:
        if wanted is not None and leaf.param not in wanted:
            continue
        if leaf.param in by_param:
            first, second = (tuple(key for key, _ in x.keys) for x in (by_param[leaf.param], leaf))
            raise Damaged(
                f"{found.location}: {first} and {second} share the name "
                f"{leaf.param!r}; Orbax kept only one of their values and does not say which"
            )
        by_param[leaf.param] = leaf
    missing = [param for param in wanted or () if param not in by_param]
    if missing:
        raise Mismatch(
            f"{found.location}: not there: {len(missing)} of "
            f"{counted(len(wanted or ()), 'leaf', 'leaves')}",
            [f"{param}: wanted an array, found no leaf of that name" for param in missing],
        )
    return list(by_param.values())


def _read(
    found: OrbaxItem, leaves: Sequence[OrbaxLeaf], shardings: Wanted, budget_bytes: int
) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(leaf.param for leaf in leaves)
    for leaf in leaves:
        if leaf.value_type == "string":
            values[leaf.param] = found.strings[leaf.param]
        elif not leaf.is_array:
            values[leaf.param] = empty_value(leaf)
    arrays = [leaf for leaf in leaves if leaf.is_array]
    reads = [
        _Read(leaf, array, shardings.get(leaf.param), found.location)
        for leaf, array in zip(arrays, _open_all(found, arrays), strict=True)
    ]
    _must_be_credible(found, reads)
    for group in _groups(reads, budget_bytes):
        values.update(zip([r.leaf.param for r in group], _finish(group), strict=True))
    return values


class _Read:
    """An open array, the parts of it that are wanted here, and how many bytes those are."""

    def __init__(
        self,
        leaf: OrbaxLeaf,
        array: Any,
        sharding: jax.sharding.Sharding | None,
        location: str,
    ) -> None:
        self.leaf, self.array, self.location = leaf, array, location
        self.sharding = sharding
        self.shape = tuple(array.shape)
        self.dtype: np.dtype[Any] = np.dtype(array.dtype.numpy_dtype)
        self.boxes: tuple[Box, ...] = (whole(self.shape),)
        if sharding is not None and leaf.impl is None:
            self.boxes = boxes(self.shape, self.dtype, sharding, leaf.param)
        sizes = (math.prod(stop - start for start, stop in box) for box in self.boxes)
        self.nbytes = sum(sizes) * self.dtype.itemsize

    def start(self, batch: Any) -> list[Any]:
        index = [tuple(slice(*part) for part in box) for box in self.boxes]
        return [self.array[at].read(order="C", batch=batch) for at in index]


def _must_be_credible(found: OrbaxItem, reads: Sequence[_Read]) -> None:
    """What is about to be allocated could be true.

    Raises:
        Unsupported: one array is larger than the memory of this host.
        Damaged: absent chunks would stand for far more zeros than there is data.
    """
    memory_bytes = _memory_bytes()
    for read in reads:
        if read.nbytes > memory_bytes:
            raise Unsupported(
                f"{found.location}: {read.leaf.param}: {read.dtype}{list(read.shape)} takes "
                f"{read.nbytes} bytes, and this host has {memory_bytes} bytes of memory; its "
                "metadata is damaged, or it has to be restored under a sharding over more hosts"
            )
    wanted = sum(read.nbytes for read in reads)
    if not found.missing_is_zero or wanted <= _FILLED_BYTES:
        return
    stored = sum(map(_stored_bytes, reads))
    if wanted - stored > _FILLED_BYTES + _FILLED_TIMES * stored:
        largest = max(reads, key=lambda read: read.nbytes)
        raise Damaged(
            f"{found.location}: {largest.leaf.param}: {largest.dtype}{list(largest.shape)}: the "
            f"arrays take {wanted} bytes, the chunks that are there {stored}; zeros for all the "
            "others are not believed, a shape is wrong or chunks were lost"
        )


def _stored_bytes(read: _Read) -> int:
    """At most what the chunks of an array that are there hold, of what is wanted."""
    # A key is what was written at once: of zarr v3 a shard, which has many chunks to be read.
    chunk = math.prod(read.array.chunk_layout.write_chunk.shape or ()) * read.dtype.itemsize
    keys = _await(read.array.kvstore.list(), read.location, read.leaf)
    there = sum(1 for key in keys if not key.rpartition(b"/")[2].startswith((b".z", b"zarr.json")))
    return min(read.nbytes, there * chunk)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _groups(reads: Sequence[_Read], budget_bytes: int) -> Iterator[list[_Read]]:
    group: list[_Read] = []
    total = 0
    for each in reads:
        if group and total + each.nbytes > budget_bytes:
            yield group
            group, total = [], 0
        group.append(each)
        total += each.nbytes
    if group:
        yield group


def _finish(group: Sequence[_Read]) -> list[Any]:
    """Read a group: chunks that several parts share are fetched once, thanks to the batch."""
    with ts.Batch() as batch:
        futures = [read.start(batch) for read in group]
    parts: list[dict[Box, np.ndarray]] = []
    for read, pending in zip(group, futures, strict=True):
        found = [_await(one, read.location, read.leaf) for one in pending]
        parts.append(dict(zip(read.boxes, found, strict=True)))
    sharded = [i for i, r in enumerate(group) if r.sharding is not None and r.leaf.impl is None]
    placed = place([_host_leaf(group[i], parts[i]) for i in sharded])
    values: list[Any] = [None] * len(group)
    for i, array in zip(sharded, placed, strict=True):
        values[i] = array
    for i, (read, have) in enumerate(zip(group, parts, strict=True)):
        if values[i] is None:
            values[i] = _host_value(read, next(iter(have.values())))
    return values


def _host_leaf(read: _Read, parts: Mapping[Box, np.ndarray]) -> HostLeaf:
    assert read.sharding is not None
    return HostLeaf(read.leaf.param, read.shape, read.dtype, read.sharding, parts)


def _host_value(read: _Read, value: np.ndarray) -> Any:
    if read.leaf.impl is not None:
        return _keys(read, value)
    if read.leaf.value_type == "scalar":
        if value.ndim:
            raise Damaged(
                f"{read.location}: {read.leaf.param}: wanted a scalar, found shape {value.shape}"
            )
        return value.item()
    return value


def _keys(read: _Read, data: np.ndarray) -> jax.Array:
    impl = read.leaf.impl
    try:
        keys = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=impl)
    except (ValueError, TypeError) as error:
        raise Unsupported(
            f"{read.location}: {read.leaf.param}: key data {data.dtype}{list(data.shape)} of PRNG "
            f"{impl!r} is not known to this JAX: {error}"
        ) from error
    if read.sharding is None:
        return keys
    boxes(keys.shape, np.dtype(np.uint32), read.sharding, read.leaf.param)
    return jax.make_array_from_callback(
        keys.shape, read.sharding, lambda index: keys[index], dtype=keys.dtype
    )


def _open_all(found: OrbaxItem, leaves: Sequence[OrbaxLeaf]) -> list[Any]:
    context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    opened: list[Any] = []
    for first in range(0, len(leaves), _OPEN_AT_ONCE):
        some = leaves[first : first + _OPEN_AT_ONCE]
        futures = [_open(found, one, context) for one in some]
        opened += [
            _await(future, found.location, leaf) for future, leaf in zip(futures, some, strict=True)
        ]
    return opened


def _open(found: OrbaxItem, leaf: OrbaxLeaf, context: Any) -> Any:
    spec = {
        "driver": "zarr3" if found.zarr3 else "zarr",
        "kvstore": _kvstore(found, leaf),
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
        "fill_missing_data_reads": found.missing_is_zero,
    }
    return ts.open(spec, open=True, read=True, context=context)


def _kvstore(found: OrbaxItem, leaf: OrbaxLeaf) -> dict[str, Any]:
    if found.ocdbt:
        return {
            "driver": "ocdbt",
            "base": ts.KvStore.Spec(_directory(found.location, "")).to_json(),
            "path": leaf.param + "/",
        }
    if any(part in ("", ".", "..") for part in leaf.param.split("/")) or "\0" in leaf.param:
        raise Damaged(f"{found.location}: {leaf.param!r}: no name for a directory inside the step")
    return ts.KvStore.Spec(_directory(found.location, leaf.param)).to_json()


def _directory(location: str, name: str) -> Any:
    if "://" in location:
        return "/".join(part for part in (location.rstrip("/"), name) if part) + "/"
    return {"driver": "file", "path": os.path.join(location, name, "")}


def _await(future: Any, location: str, leaf: OrbaxLeaf) -> Any:
    try:
        return future.result()
    except (ValueError, RuntimeError, OSError, NotImplementedError) as error:
        text = str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        if text.startswith(_AWAY):
            raise StoreFailed(f"{location}: {leaf.param}: {text}") from error
        if text.startswith(("UNIMPLEMENTED", "INVALID_ARGUMENT")) and "not registered" in text:
            raise Unsupported(f"{location}: {leaf.param}: {text}") from error
        raise Damaged(f"{location}: {leaf.param}: cannot be read: {text}") from error

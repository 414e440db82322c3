"""Images in memory, as processes would write them, and arrays of any dtype to put into them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from ckpt import image
from ckpt.errors import Damaged
from ckpt.fetch import ImageFile
from ckpt.placement import boxes, whole
from ckpt.specs import ArraySpec, ShardSpec


@dataclass
class Bytes(ImageFile):
    """An image in memory that counts what is asked of it."""

    name: str
    data: bytes
    ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        for offset, buffer in ranges:
            self.ranges.append((offset, buffer.nbytes))
            found = self.data[offset : offset + buffer.nbytes]
            if len(found) != buffer.nbytes:
                raise Damaged(f"{self.name}: ends at byte {offset + len(found)}")
            buffer[:] = found


Images = list[tuple[image.Header, Bytes]]


def make_images(
    arrays: Mapping[str, np.ndarray],
    shardings: Mapping[str, Sharding | None],
    *,
    processes: int = 1,
    limit_bytes: int = 1 << 20,
) -> Images:
    """What `processes` would write of these arrays: their shards dealt out in turn."""
    specs, owned = [], [[] for _ in range(processes)]
    turn = itertools.cycle(range(processes))
    for number, (param, array) in enumerate(arrays.items()):
        sharding = shardings[param]
        parts = (
            [whole(array.shape)]
            if sharding is None
            else boxes(array.shape, array.dtype, sharding, param)
        )
        shape = tuple(stop - start for start, stop in parts[0])
        chunk = image.chunk_shape(shape, array.dtype.itemsize, limit_bytes)
        specs.append(ArraySpec(param, array.dtype.name, array.shape, chunk))
        for part in parts:
            start = tuple(a for a, _ in part)
            source = array[tuple(slice(*ab) for ab in part)]
            owned[next(turn)].append((ShardSpec(number, start, shape), source))
    found = []
    for process, mine in enumerate(owned):
        plan = image.plan(specs, [shard for shard, _ in mine], {"process": process})
        buffer = bytearray(plan.size_bytes)
        name = f"p{process}.image"
        header = image.fill(plan, buffer, [source for _, source in mine], where=name)
        data = bytes(buffer)
        assert (
            image.decode(lambda o, n, d=data: d[o : o + n], len(data), name).digest == header.digest
        )
        found.append((header, Bytes(name, data)))
    return found


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.random.default_rng(seed).integers(0, 8 if dtype != "bool" else 2, shape)
    return values.astype(np.complex64 if dtype == "complex64" else np.float32).astype(kind)


def same(found: Any, wanted: np.ndarray) -> bool:
    array = np.asarray(found)
    return (
        array.shape == wanted.shape
        and array.dtype == wanted.dtype
        and array.tobytes() == np.ascontiguousarray(wanted).tobytes()
    )

"""Images in memory that are small, decoded and filled."""

from __future__ import annotations

import math
import struct
from typing import Any

import crc32c
import numpy as np

from ckpt import grid, image
from ckpt.image import Header, Plan
from ckpt.specs import ArraySpec, ShardSpec, dtype_of

PAGE = grid.PAGE_BYTES


def decoded(raw: Any, where: str = "here") -> Header:
    view = memoryview(raw)
    return image.decode(lambda offset, length: view[offset : offset + length], len(view), where)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    wanted = dtype_of(dtype)
    if dtype == "bool" or dtype == "int4":
        return rng.integers(0, 2, shape).astype(wanted)
    count = math.prod(shape) * wanted.itemsize
    return rng.integers(0, 256, count, np.uint8).view(wanted).reshape(shape)


def filled(plan: Plan, sources: list[np.ndarray], threads: int = 1) -> tuple[bytearray, Header]:
    buffer = bytearray(b"\xa5" * plan.size_bytes)
    return buffer, image.fill(plan, buffer, sources, threads)


def assembled(raw: Any, header: Header) -> dict[str, np.ndarray]:
    """Each array put together from its verified chunks, the slow and plain way."""
    whole = {a.param: np.zeros(a.shape, dtype_of(a.dtype)) for a in header.arrays}
    columns, view = header.columns, memoryview(raw)
    for row, (offset, length) in enumerate(image.payload_ranges(header).tolist()):
        stored = view[offset : offset + length]
        image.verify_chunk(header, row, stored)
        image.verify_chunk(header, row, stored[:-4])
        assert struct.unpack("<I", stored[-4:])[0] == crc32c.crc32c(stored[:-4])
        spec = header.arrays[columns.array[row]]
        at = columns.grid[row].tolist()[: len(spec.shape)]
        index = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, spec.chunk_shape, strict=True))
        chunk = np.frombuffer(stored[:-4], dtype_of(spec.dtype)).reshape(spec.chunk_shape)
        whole[spec.param][index] = chunk
    return whole


def small_image() -> tuple[bytes, Header]:
    """Two arrays, four chunks, 12 KiB."""
    arrays = [ArraySpec("a", "float32", (4, 3), (2, 3)), ArraySpec("b.c", "int64", (), ())]
    shards = [ShardSpec(0, (0, 0), (4, 3)), ShardSpec(1, (), ())]
    plan = image.plan(arrays, shards, {"step": 7, "who": "ü"})
    sources = [np.arange(12, dtype=np.float32).reshape(4, 3), np.array(5)]
    raw, header = filled(plan, sources)
    return bytes(raw), header

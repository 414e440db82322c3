"""What an image holds, in words: arrays, and the parts of them that one process has.

No bytes and no places; both are only names, dtypes and shapes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ckpt.errors import Unsupported

_MAX_DIMENSIONS = 64
_MAX_COUNT = 2**62  # products and sums below this do not wrap in 64 bits

_DTYPE_NAMES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64
    complex128 bfloat16 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2
    float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn int4 int2
"""
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _DTYPE_NAMES.split()}
"""Storage dtypes by name."""


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a storage dtype name; raises `Unsupported` for any other name."""
    if name not in DTYPES:
        names = ", ".join(DTYPES)
        raise Unsupported(f"dtype {name!r} cannot be held in an image; wanted one of {names}")
    return DTYPES[name]


class ArraySpec(NamedTuple):  # made by the thousands
    """A global array as stored. `chunk_shape` divides `shape`; its entries are at least 1."""

    param: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return _grid(self.shape, self.chunk_shape)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, without its CRC."""
        return _chunk_bytes(self.dtype, self.chunk_shape)


# Models have many arrays of one shape.
@functools.lru_cache(maxsize=4096)
def _grid(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // c for n, c in zip(shape, chunk_shape, strict=True))


@functools.lru_cache(maxsize=4096)
def _chunk_bytes(dtype: str, chunk_shape: tuple[int, ...]) -> int:
    return math.prod(chunk_shape) * dtype_of(dtype).itemsize


class ShardSpec(NamedTuple):
    """A part of array number `array` that this process holds; made of whole chunks."""

    array: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


def parse_arrays(listed: Any) -> tuple[ArraySpec, ...]:
    """The specs of a list that was read; equal shapes become one object, so one type as well.

    What they say is for `fault` to judge. Raises TypeError, ValueError when it is no such list.
    """
    known: dict[Any, tuple[Any, Any]] = {}
    arrays = []
    for param, dtype, shape, chunk in listed:
        shapes = (tuple(shape), tuple(chunk))
        arrays.append(ArraySpec(param, dtype, *known.setdefault(shapes, shapes)))
    return tuple(arrays)


def fault(arrays: Sequence[ArraySpec]) -> str | None:
    """What is wrong with these specs, whatever source they come from; None if nothing."""
    names: set[str] = set()
    fine: set[tuple[str, int, int]] = set()  # by identity: True is equal to 1
    for a in arrays:
        if type(a.param) is not str or a.param in names or not _is_utf8(a.param):
            return f"array name {a.param!r} is no text, or is there twice"
        names.add(a.param)
        looked_at = (a.dtype, id(a.shape), id(a.chunk_shape))
        if type(a.dtype) is str and looked_at in fine:
            continue
        if type(a.dtype) is not str or a.dtype not in DTYPES:
            return f"{a.param}: dtype {a.dtype!r} is none of {', '.join(DTYPES)}"
        if len(a.shape) != len(a.chunk_shape) or len(a.shape) > _MAX_DIMENSIONS:
            return f"{a.param}: chunks of {a.chunk_shape} have not the rank of {a.shape}"
        cells, chunk_bytes = 1, DTYPES[a.dtype].itemsize
        for n, c in zip(a.shape, a.chunk_shape, strict=True):
            if type(n) is not int or type(c) is not int or n < 0 or c < 1 or n % c:
                return f"{a.param}: chunks of {a.chunk_shape} do not tile {a.shape}"
            cells, chunk_bytes = cells * (n // c), chunk_bytes * c
        if cells >= _MAX_COUNT or chunk_bytes >= _MAX_COUNT:
            return f"{a.param}: {a.shape} in chunks of {a.chunk_shape} is beyond 2**62"
        fine.add(looked_at)
    return None


def _is_utf8(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False

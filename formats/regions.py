"""Rows of Arrow columns, by number, straight from a mapped file.

One gather serves all record batches of a file: a row is named by its batch (`parts`) and its
number there (`rows`), int64[n] both. Nothing in the file is trusted: each place is checked against
the buffer it must lie in, for just the rows that are asked for, so that a damaged file gives an
error and never another part of memory. What is not covered here is read through Arrow, once it has
validated the batch.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Protocol, final

import numpy as np
import pyarrow as pa

from formats.columns import NullFound, numpy_scalar
from formats.source import Column

Values = np.ndarray | list[Any]


class BadRow(ValueError):
    """Row `row` of those asked for cannot be read; the cause is chained."""

    def __init__(self, row: int, cause: Exception) -> None:
        super().__init__(str(cause))
        self.row = row
        self.cause = cause


class Rows(Protocol):
    """A column of a file, by row."""

    def take(self, parts: np.ndarray, rows: np.ndarray) -> Values:
        """The n rows, as `Source.read` gives them. Raises: BadRow."""


def mapped_rows(
    column: Column,
    arrays: Sequence[pa.Array],
    data: np.ndarray,
    raw: mmap.mmap | bytes,
    fill: pa.Scalar | None,
) -> Rows | None:
    """Direct access to `column`, whose batches are `arrays`; None where Arrow has to do it.

    data: uint8, the whole file; raw: the same. The arrays must lie in it.
    """
    if not arrays:
        return None
    arrays = [_storage(array) for array in arrays]
    kind = arrays[0].type
    if any(array.type != kind or array.offset for array in arrays):
        return None
    buffers = [array.buffers() for array in arrays]
    regions = [
        _region(data, [each[number] for each in buffers]) for number in range(len(buffers[0]))
    ]
    if any(region is None for region in regions):
        return None
    found = [region for region in regions if region is not None]
    if column.kind in ("str", "bytes"):
        return _variable_or_fixed(column, kind, found, raw)
    if column.kind == "array" and pa.types.is_boolean(kind):
        return _Numbers(column, np.dtype(bool), found[0], _Bits(found[1]), fill)
    if column.kind == "array":
        width = 1
        while pa.types.is_fixed_size_list(kind):
            width, kind = width * kind.list_size, kind.value_type
        stored = _stored(kind)
        inner_nulls = len(found) > 2 and any(region.any for region in found[:-1])
        if stored is None or inner_nulls or len(found) != len(column.shape) + 2 or not width:
            return None
        return _Numbers(column, stored, found[0], _Items(found[-1], stored, width), fill)
    if column.kind == "ragged" and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        stored = _stored(kind.value_type)
        if stored is None or stored.name != column.dtype or len(found) != 4 or found[2].any:
            return None
        offsets = _Offsets(found[1], found[3], pa.types.is_large_list(kind), stored.itemsize)
        return _Ragged(stored, found[0], offsets, data)
    return None


def _storage(array: pa.Array) -> pa.Array:
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array


def _stored(kind: pa.DataType) -> np.dtype | None:
    """How values of a fixed width lie in a buffer, where NumPy has that."""
    types = pa.types
    if types.is_integer(kind) or types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype())
    if types.is_date32(kind):
        return np.dtype(np.int32)
    if types.is_timestamp(kind) or types.is_date64(kind) or types.is_duration(kind):
        return np.dtype(np.int64)
    return None


def _variable_or_fixed(
    column: Column, kind: pa.DataType, found: list[_Region], raw: mmap.mmap | bytes
) -> Rows | None:
    if pa.types.is_fixed_size_binary(kind):
        return _Texts(column, found[0], _Fixed(found[1], kind.byte_width), raw)
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if large or pa.types.is_string(kind) or pa.types.is_binary(kind):
        return _Texts(column, found[0], _Offsets(found[1], found[2], large, 1), raw)
    return None


@final
class _Region:
    """One buffer of a column, in all batches.

    at, size: int64[batches], the place in the file and the length, in bytes; no buffer has 0 of
    both.
    """

    def __init__(self, data: np.ndarray, at: np.ndarray, size: np.ndarray) -> None:
        self._data = data
        self.at = at
        self.size = size
        self.any = bool((size > 0).any())
        self.all = bool((size > 0).all())

    def items(
        self, parts: np.ndarray, first: np.ndarray, width_bytes: int, step: int
    ) -> np.ndarray:
        """Items of `width_bytes` bytes, each from `first * step` bytes into its buffer on.

        `width_bytes` is at most `2 * step` or a multiple of it.
        """
        room = (self.size[parts] - width_bytes) // step
        _check((first >= 0) & (first <= room), "lies outside of its buffer")
        if not first.size:
            return np.zeros(0, np.dtype((np.void, width_bytes)))
        # Items that begin at any byte: one block is copied for each.
        anywhere = np.ndarray(
            (self._data.size - width_bytes + 1,),
            np.dtype((np.void, width_bytes)),
            self._data,
            0,
            (1,),
        )
        found: np.ndarray = anywhere[self.at[parts] + first * step]
        return found


def _region(data: np.ndarray, buffers: Sequence[pa.Buffer | None]) -> _Region | None:
    """None if one of `buffers` does not lie in `data`: it was decompressed or converted."""
    base = data.ctypes.data
    at = np.array([buffer.address - base if buffer else 0 for buffer in buffers], np.int64)
    size = np.array([buffer.size if buffer else 0 for buffer in buffers], np.int64)
    at[size == 0] = 0
    if ((at < 0) | (at > data.size - size)).any():
        return None
    return _Region(data, at, size)


def _check(good: np.ndarray, what: str) -> None:
    if not good.all():
        raise BadRow(int(np.flatnonzero(~good)[0]), ValueError(f"its value {what}"))


def _valid(bitmap: _Region, parts: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
    """Which rows are not null, bool[n]; None if all of them."""
    if not bitmap.any:
        return None
    valid = np.ones(len(rows), np.bool_)
    has = np.flatnonzero(bitmap.size[parts] > 0)
    valid[has] = _Bits(bitmap).values(parts[has], rows[has])
    return None if valid.all() else valid


@final
class _Bits:
    """Packed booleans."""

    def __init__(self, region: _Region) -> None:
        self._region = region

    def values(self, parts: np.ndarray, rows: np.ndarray) -> np.ndarray:
        octets = self._region.items(parts, rows >> 3, 1, 1).view(np.uint8)
        return ((octets >> (rows & 7).astype(np.uint8)) & 1).astype(np.bool_)


@final
class _Items:
    """Numbers, `width` of them a row."""

    def __init__(self, region: _Region, stored: np.dtype, width: int) -> None:
        self._region = region
        self._stored = stored
        self._bytes = stored.itemsize * width

    def values(self, parts: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return self._region.items(parts, rows, self._bytes, self._bytes).view(self._stored)


@final
class _Numbers:
    """An `array` column."""

    def __init__(
        self,
        column: Column,
        stored: np.dtype,
        bitmap: _Region,
        values: _Bits | _Items,
        fill: pa.Scalar | None,
    ) -> None:
        self._column = column
        self._stored = stored
        self._bitmap = bitmap
        self._values = values
        self._fill = None if fill is None else numpy_scalar(fill, column.dtype)

    def take(self, parts: np.ndarray, rows: np.ndarray) -> Values:
        valid = _valid(self._bitmap, parts, rows)
        if valid is not None and self._fill is None:
            raise BadRow(int(np.flatnonzero(~valid)[0]), NullFound("holds a null"))
        found = self._values.values(parts, rows).reshape(len(rows), *self._column.shape)
        dtype = np.dtype(self._column.dtype)
        if dtype != self._stored:
            found = found.astype(np.int64).view(dtype) if dtype.kind in "mM" else found
        if valid is not None:
            found[~valid] = self._fill
        return found


@final
class _Fixed:
    """Values of `width` bytes each: where they lie in the file."""

    def __init__(self, region: _Region, width: int) -> None:
        self._region = region
        self._width = width

    def bounds(self, parts: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self._width:
            return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        room = self._region.size[parts] // self._width
        _check(rows < room, "lies outside of its buffer")
        first = self._region.at[parts] + rows * self._width
        return first, first + self._width


@final
class _Offsets:
    """Values of any length: where they lie in the file, by a buffer of offsets."""

    def __init__(self, offsets: _Region, values: _Region, large: bool, item_bytes: int) -> None:
        self._offsets = offsets
        self._values = values
        self._dtype = np.dtype(np.int64 if large else np.int32)
        self._item_bytes = item_bytes

    def bounds(self, parts: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First byte and the one behind the last, int64[n] both."""
        width = self._dtype.itemsize
        pairs = self._offsets.items(parts, rows, 2 * width, width).view(self._dtype)
        first, last = pairs.reshape(len(rows), 2).astype(np.int64).T
        room = self._values.size[parts] // self._item_bytes
        _check((first >= 0) & (first <= last) & (last <= room), "lies outside of its buffer")
        at = self._values.at[parts]
        return at + first * self._item_bytes, at + last * self._item_bytes


@final
class _Texts:
    """A `str` or `bytes` column."""

    def __init__(
        self, column: Column, bitmap: _Region, places: _Fixed | _Offsets, raw: mmap.mmap | bytes
    ) -> None:
        self._is_text = column.kind == "str"
        self._bitmap = bitmap
        self._places = places
        self._raw = raw

    def take(self, parts: np.ndarray, rows: np.ndarray) -> Values:
        starts, stops = self._places.bounds(parts, rows)
        raw = self._raw
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        found: list[Any] = [raw[start:stop] for start, stop in spans]
        valid = _valid(self._bitmap, parts, rows)
        if valid is not None:
            for row in np.flatnonzero(~valid).tolist():
                found[row] = None
        return _decoded(found) if self._is_text else found


def _decoded(found: list[bytes | None]) -> list[Any]:
    try:
        return [each if each is None else each.decode() for each in found]
    except UnicodeDecodeError:
        for row, each in enumerate(found):
            try:
                (each or b"").decode()
            except UnicodeDecodeError as error:
                raise BadRow(row, error) from error
        raise


@final
class _Ragged:
    """A `ragged` column: lists of numbers."""

    def __init__(
        self, stored: np.dtype, bitmap: _Region, places: _Offsets, data: np.ndarray
    ) -> None:
        self._stored = stored
        self._bitmap = bitmap
        self._places = places
        self._data = data

    def take(self, parts: np.ndarray, rows: np.ndarray) -> Values:
        starts, stops = self._places.bounds(parts, rows)
        data, stored = self._data, self._stored
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        found: list[Any] = [data[start:stop].copy().view(stored) for start, stop in spans]
        valid = _valid(self._bitmap, parts, rows)
        if valid is not None:
            for row in np.flatnonzero(~valid).tolist():
                found[row] = None
        return found

"""How many rows each record batch of an Arrow IPC file has, from its metadata alone.

Arrow's own reader decompresses a batch before it says how long it is. The few fields needed are
read here as the format describes them: a footer that lists blocks, and in each block a message.
Nothing is trusted: a place outside of the file is an error.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import final

from formats.arguments import LIMIT

_MAGIC = b"ARROW1"
_CONTINUES = 0xFFFFFFFF
_RECORD_BATCH = 3


class BadLayout(ValueError):
    """The bytes are no Arrow IPC file."""


@dataclass(frozen=True)
class Layout:
    """rows: of each record batch. as_stored: buffers can be used where they lie."""

    rows: tuple[int, ...]
    as_stored: bool


def is_file(data: memoryview) -> bool:
    """Whether `data` begins as the file format does; the stream format has no mark of its own."""
    return bytes(data[:6]) == _MAGIC


def read_layout(data: memoryview) -> Layout:
    """The layout of a whole file. Raises: BadLayout."""
    try:
        return _layout(data)
    except struct.error as error:
        raise BadLayout(f"its metadata points outside of it ({error})") from error


def _layout(data: memoryview) -> Layout:
    if len(data) < 20 or bytes(data[-6:]) != _MAGIC:
        raise BadLayout("it does not end with the mark of a whole file")
    (footer_bytes,) = struct.unpack_from("<i", data, len(data) - 10)
    start = len(data) - 10 - footer_bytes
    if footer_bytes <= 0 or start < 8:
        raise BadLayout(f"its footer is said to have {footer_bytes} bytes")
    footer = _root(data[: len(data) - 10], start)
    schema = footer.table(1)
    as_stored = schema is None or schema.number(0, "<h") == 0  # 0: little-endian
    rows = []
    first, count = footer.vector(3)
    if count * 24 > len(data):
        raise BadLayout(f"its footer lists {count} record batches")
    for number in range(count):
        at, metadata_bytes, body_bytes = struct.unpack_from("<qi4xq", data, first + 24 * number)
        if at < 0 or metadata_bytes < 0 or body_bytes < 0:
            raise BadLayout(f"record batch {number} has a negative place")
        if at + metadata_bytes + body_bytes > len(data):
            raise BadLayout(f"record batch {number} lies beyond its end")
        marks = struct.unpack_from("<I", data, at)
        message = _root(data, at + (8 if marks[0] == _CONTINUES else 4))
        batch = message.table(2)
        if message.number(1, "<B") != _RECORD_BATCH or batch is None:
            raise BadLayout(f"record batch {number} is something else")
        rows.append(batch.number(0, "<q"))
        as_stored = as_stored and batch.table(3) is None
    return Layout(checked_rows(rows), as_stored)


def checked_rows(rows: list[int]) -> tuple[int, ...]:
    """`rows` if they can be. Raises: BadLayout."""
    if any(count < 0 for count in rows) or sum(rows) >= LIMIT:
        raise BadLayout(f"its record batches are said to have {sum(rows)} rows")
    return tuple(rows)


@final
class _Table:
    """A flatbuffer table at a place in `data`."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - self._read("<i", at)
        self._fields_bytes = self._read("<H", self._fields)

    def number(self, field: int, code: str) -> int:
        """A scalar field, 0 where it is left out."""
        at = self._place(field)
        return self._read(code, at) if at else 0

    def table(self, field: int) -> _Table | None:
        at = self._place(field)
        return _Table(self._data, at + self._read("<I", at)) if at else None

    def vector(self, field: int) -> tuple[int, int]:
        """Place of the first element and number of elements."""
        at = self._place(field)
        if not at:
            return 0, 0
        at += self._read("<I", at)
        return at + 4, self._read("<I", at)

    def _place(self, field: int) -> int:
        if 6 + 2 * field > self._fields_bytes:
            return 0
        offset = self._read("<H", self._fields + 4 + 2 * field)
        return self._at + offset if offset else 0

    def _read(self, code: str, at: int) -> int:
        if at < 0:  # would be counted from the end
            raise BadLayout("its metadata points before its start")
        (value,) = struct.unpack_from(code, self._data, at)
        return int(value)


def _root(data: memoryview, at: int) -> _Table:
    (offset,) = struct.unpack_from("<I", data, at)
    return _Table(data, at + offset)

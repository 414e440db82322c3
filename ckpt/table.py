"""Header page and chunk table of an image, as bytes; `ckpt/image.py` has the map.

`Columns` are the table in the hands of the program. What is read is checked here, number by
number, before it is used: sizes, offsets, names.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Never

import numpy as np
import xxhash

from ckpt import specs
from ckpt.frames import MOST_TIMES
from ckpt.grid import CRC_BYTES, PAGE_BYTES, alignment, coordinates, repeated, round_up
from ckpt.specs import ArraySpec

MAGIC = b"LASTGOOD"
PLAIN = 1
"""Version of an image whose chunks lie there as they are."""
COMPRESSED = 2
"""Version of an image whose chunks are zstd frames; its rows have one more column."""

# Magic, version, page size; size_bytes, table offset and length; chunks, length of the list of
# arrays, of meta, of the tree record; xxh3-128 of the table.
_PAGE = struct.Struct("<8sII QQQ QQQQ 16s")
_CHECK_AT = PAGE_BYTES - 16
_ROW_BYTES = {PLAIN: 8 + 8 + 16 + 4 + 4, COMPRESSED: 8 + 8 + 16 + 4 + 4 + 8}


@dataclass(frozen=True, eq=False)
class Columns:
    """The chunk table, one row per chunk.

    `array` u32[n]: index into the arrays; `grid` i64[n, w]: grid coordinates, zero beyond the
    array's rank; `offset` u64[n]: first byte in the image; `nbytes` u64[n]: of the chunk, without
    the CRC; `digest` u8[n, 16]: xxh3-128 of these bytes; `crc` u32[n]: CRC-32C of the bytes as they
    are stored, which also stands behind them; `frames` u64[n]: their number in a compressed image,
    None where chunks are stored as they are.
    """

    array: np.ndarray
    grid: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    digest: np.ndarray
    crc: np.ndarray
    frames: np.ndarray | None = None

    @property
    def stored(self) -> np.ndarray:
        """Bytes of each chunk in the image, without the CRC: u64[n]."""
        return self.nbytes if self.frames is None else self.frames


class Page(NamedTuple):
    """The fields of a header page that differ from image to image."""

    version: int
    size_bytes: int
    table_at: int
    table_bytes: int
    chunks: int
    arrays_bytes: int
    meta_bytes: int
    tree_bytes: int
    table_digest: bytes

    def emit(self) -> bytes:
        """The page, with its digest."""
        body = _PAGE.pack(MAGIC, self.version, PAGE_BYTES, *self[1:]).ljust(_CHECK_AT, b"\0")
        return body + xxhash.xxh3_128_digest(body)

    @property
    def columns_bytes(self) -> int:
        """Length of all columns; what follows in the table are the texts."""
        return self.chunks * _ROW_BYTES[self.version]


def row_bytes(version: int) -> int:
    """What a chunk adds to the table of an image."""
    return _ROW_BYTES[version]


def parse_page(page: bytes, size_bytes: int, damaged: Callable[[str], Never]) -> Page:
    """The fields of a page, of any version; those of one that we know are checked.

    `damaged` raises what its argument says. `size_bytes` is what the file or slot holds.
    """
    if not page.startswith(MAGIC):
        damaged(f"no finished image: wanted {MAGIC!r} at byte 0, found {page[: len(MAGIC)]!r}")
    if (found := xxhash.xxh3_128_digest(page[:_CHECK_AT])) != page[_CHECK_AT:]:
        damaged(f"header page: wanted digest {page[_CHECK_AT:].hex()}, found {found.hex()}")
    _, version, page_bytes, *fields = _PAGE.unpack_from(page)
    read = Page(version, *fields)
    if version not in _ROW_BYTES:
        return read
    if page_bytes != PAGE_BYTES:
        damaged(f"header page: wanted {PAGE_BYTES} bytes, found {page_bytes}")
    if read.size_bytes > size_bytes:
        damaged(f"wanted {read.size_bytes} bytes, found {size_bytes}: truncated")
    at, length = read.table_at, read.table_bytes
    if at < PAGE_BYTES or read.size_bytes != round_up(at + length, PAGE_BYTES):
        damaged(f"table: {length} bytes at byte {at} do not end {read.size_bytes} bytes")
    texts = read.arrays_bytes + read.meta_bytes + read.tree_bytes
    if read.columns_bytes + texts != length:
        damaged(
            f"table: {read.chunks} chunks with {read.arrays_bytes} and {read.meta_bytes} bytes of "
            f"JSON and {read.tree_bytes} of the tree do not make {length} bytes"
        )
    return read


def parse_table(
    page: Page, table: bytes, damaged: Callable[[str], Never]
) -> tuple[dict[str, Any], tuple[ArraySpec, ...], Columns, bytes]:
    """Meta, arrays, columns and tree record of the table that belongs to a checked page."""
    if (found := xxhash.xxh3_128_digest(table)) != page.table_digest:
        damaged(f"table: wanted digest {page.table_digest.hex()}, found {found.hex()}")
    meta_at, tree_at = page.columns_bytes + page.arrays_bytes, len(table) - page.tree_bytes
    try:
        listed = json.loads(table[page.columns_bytes : meta_at].decode())
        meta = json.loads(table[meta_at:tree_at].decode())
        arrays = specs.parse_arrays(listed)
    except (ValueError, TypeError, RecursionError) as error:
        damaged(f"table: {error}")
    if not isinstance(meta, dict):
        damaged(f"meta: wanted an object, found {type(meta).__name__}")
    if fault := specs.fault(arrays):
        damaged(fault)
    return meta, arrays, _columns(page, table, arrays, damaged), table[tree_at:]


def cells(page: Page, table: bytes | memoryview) -> np.ndarray:
    """The column `cell` u64[n], of which `Columns` has the coordinates."""
    return np.frombuffer(table, "<u8", page.chunks)


def _columns(
    page: Page,
    table: bytes,
    arrays: tuple[ArraySpec, ...],
    damaged: Callable[[str], Never],
) -> Columns:
    count, end = page.chunks, page.table_at
    cell = cells(page, table)
    offset = np.frombuffer(table, "<u8", count, 8 * count)
    digest = np.frombuffer(table, np.uint8, 16 * count, 16 * count).reshape(count, 16)
    array = np.frombuffer(table, "<u4", count, 32 * count)
    crc = np.frombuffer(table, "<u4", count, 36 * count)
    frames = None
    if page.version == COMPRESSED:
        frames = np.frombuffer(table, "<u8", count, 40 * count)

    def refuse(wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            damaged(f"table: chunk {int(np.flatnonzero(wrong)[0])} {what}")

    refuse(array >= len(arrays), f"is of an array beyond the {len(arrays)} there are")
    grids = [a.grid for a in arrays]
    refuse(cell >= np.array([math.prod(g) for g in grids], np.uint64)[array], "leaves its array")
    if (row := repeated(array, cell)) is not None:
        damaged(f"table: chunk {row} is there twice")
    nbytes = np.array([a.chunk_bytes for a in arrays], np.uint64)[array]
    stored = nbytes
    if frames is not None:
        refuse(frames > end, "is longer than its image")
        refuse(nbytes // np.uint64(MOST_TIMES) > frames, "is too short for what it is to hold")
        stored = frames
    step = alignment(stored).astype(np.uint64)
    refuse(offset % step != 0, "starts between the places where a chunk may")
    refuse(
        (offset < PAGE_BYTES) | (offset >= end), f"starts outside of bytes {PAGE_BYTES} .. {end}"
    )
    order = np.argsort(offset)
    stop = offset + stored + np.uint64(CRC_BYTES)
    limit = np.empty_like(offset)
    limit[order] = np.append(offset[order][1:], np.uint64(end))
    refuse(stop > limit, "runs into the next one, or into the table")
    return Columns(array, coordinates(grids, array, cell), offset, nbytes, digest, crc, frames)

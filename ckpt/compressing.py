"""An image to a compressed one, in other memory: the slot stays a valid image all the while.

Chunks are compressed by several threads and put in their places by this one, in the order of the
image. The same image gives the same bytes, as long as zstd is the same.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import crc32c
import numpy as np
import xxhash

from ckpt import table
from ckpt.errors import Damaged, Misuse, StoreFailed
from ckpt.frames import LEVEL
from ckpt.grid import CRC_BYTES, PAGE_BYTES, alignment, round_up
from ckpt.image import Header
from ckpt.table import COMPRESSED, PLAIN, Page

_RUN_BYTES = 4 << 20  # of small chunks, for one thread: each is too short to let another one run
_MAX_THREADS = 8


class _Run(NamedTuple):
    """Frames of a run of chunks, and the CRC-32C of each."""

    frames: list[bytes]
    crcs: list[int]


def compressed(
    header: Header, data: memoryview, threads: int | None = None
) -> tuple[Header, memoryview]:
    """A compressed image of the same chunks, meta and tree; pure.

    `data` (u8) is the image of `header`, as `ckpt.image.fill` made it. The new one begins at a page
    of memory and takes up what it holds; while it is made, also the chunks that `threads` (by
    default one for each core, up to 8) are at, or wait to be put behind others.

    Raises:
        Misuse: the image is compressed already.
        StoreFailed: the memory is not to be had.
    """
    if header.compression is not None:
        raise Misuse(f"{header.where}: the image is compressed already")
    page, rows = _page_and_table(header, data)
    columns = header.columns
    order = np.argsort(columns.offset, kind="stable")
    texts = rows[page.columns_bytes :]
    target = _memory(header, _bound(columns.nbytes, len(texts)))
    offset, frames = np.zeros(len(order), "<u8"), np.zeros(len(order), "<u8")
    crc = np.zeros(len(order), "<u4")
    at = PAGE_BYTES
    tasks = list(_tasks(columns.offset, columns.nbytes, order))
    with ThreadPoolExecutor(threads or _threads(), thread_name_prefix="ckpt-compress") as pool:
        pending = [pool.submit(_compress, data, spans) for _, spans in tasks]
        try:
            for number, (first, spans) in enumerate(tasks):
                run = pending[number].result()
                pending[number] = None  # type: ignore[call-overload]  # its frames are copied
                places, at = _put(target, at, run)
                mine = order[first : first + len(spans)]
                offset[mine], crc[mine] = places, run.crcs
                frames[mine] = [len(frame) for frame in run.frames]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    table_at = at
    cell = table.cells(page, rows)
    filled = (cell, offset, columns.digest, columns.array.astype("<u4"), crc, frames)
    body = b"".join((*(column.tobytes() for column in filled), texts))
    size_bytes = round_up(table_at + len(body), PAGE_BYTES)
    top = page._replace(
        version=COMPRESSED,
        size_bytes=size_bytes,
        table_at=table_at,
        table_bytes=len(body),
        table_digest=xxhash.xxh3_128_digest(body),
    ).emit()
    target[table_at : table_at + len(body)] = body
    target[:PAGE_BYTES] = top
    made = replace(
        header,
        columns=replace(columns, offset=offset, crc=crc, frames=frames),
        size_bytes=size_bytes,
        digest=xxhash.xxh3_128_hexdigest(top + body),
    )
    return made, target[:size_bytes]


def _page_and_table(header: Header, data: memoryview) -> tuple[Page, bytes]:
    def damaged(what: str) -> Any:
        raise Damaged(f"{header.where}: {what}")

    page = table.parse_page(bytes(data[:PAGE_BYTES]), len(data), damaged)
    if page.version != PLAIN:
        damaged(f"wanted an image of format {PLAIN}, found {page.version}")
    return page, bytes(data[page.table_at : page.table_at + page.table_bytes])


def _bound(nbytes: np.ndarray, texts_bytes: int) -> int:
    """The most that the image can have: what zstd says of frames, each with a gap before it."""
    frames = nbytes.astype(np.int64)
    frames = frames + (frames >> 8) + (np.maximum(0, (128 << 10) - frames) >> 11) + CRC_BYTES
    gaps = alignment(frames)
    rows = len(nbytes) * table.row_bytes(COMPRESSED)
    return int(round_up(PAGE_BYTES + (frames + gaps).sum() + rows + texts_bytes, PAGE_BYTES))


def _memory(header: Header, nbytes: int) -> memoryview:
    """Zeros that begin at a page; of them only what is written takes memory."""
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise StoreFailed(
            f"{header.where}: no room for a compressed copy of up to {nbytes} bytes beside it "
            f"({error}); give the tier no compression, or the process more memory"
        ) from error


_Span = tuple[int, int]


def _tasks(
    offset: np.ndarray, nbytes: np.ndarray, order: np.ndarray
) -> Iterator[tuple[int, Sequence[_Span]]]:
    """Runs of chunks in the order of the image: place of the first, and start and stop of each."""
    starts = offset[order].tolist()
    spans: list[_Span] = []
    left = _RUN_BYTES
    for number, (start, size) in enumerate(zip(starts, nbytes[order].tolist(), strict=True)):
        if spans and size > left:
            yield number - len(spans), spans
            spans, left = [], _RUN_BYTES
        spans.append((start, start + size))
        left -= size
    if spans:
        yield len(starts) - len(spans), spans


def _compress(data: memoryview, spans: Sequence[_Span]) -> _Run:
    import zstandard

    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    frames = [compress(data[start:stop]) for start, stop in spans]
    return _Run(frames, list(map(crc32c.crc32c, frames)))


def _put(target: memoryview, at: int, run: _Run) -> tuple[list[int], int]:
    """Lay the frames behind byte `at`; their offsets, and the first byte behind them."""
    places = []
    steps = alignment(np.array([len(frame) for frame in run.frames])).tolist()
    for frame, crc, step in zip(run.frames, run.crcs, steps, strict=True):
        at = -(-at // step) * step
        places.append(at)
        end = at + len(frame)
        target[at:end] = frame
        at = end + CRC_BYTES
        target[end:at] = crc.to_bytes(CRC_BYTES, "little")
    return places, at


def _threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))

"""An image to a compressed one, in other memory: the slot stays a valid image all the while.

Chunks are compressed by several threads, each into scratch memory, and put in their places by this
one, in the order of the image. All memory is mapped, and goes back when it is done with: objects of
this size would stay with the heaps of the threads. The same image gives the same bytes, as long as
zstd is the same.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, final

import numpy as np
import xxhash
from awscrt import checksums

from ckpt import table
from ckpt.errors import Damaged, Misuse, StoreFailed
from ckpt.frames import LEVEL
from ckpt.grid import CRC_BYTES, PAGE_BYTES, alignment, round_up
from ckpt.image import Header
from ckpt.table import COMPRESSED, PLAIN, Page
from ckpt.threads import submitted

_RUN_BYTES = 4 << 20  # of small chunks, for one thread: each is too short to let another one run
_LARGE_BYTES = 128 << 10
_MAX_THREADS = 4  # beyond, the store is slower


_Span = tuple[int, int]


@final
class _Press:
    """What one task at a time compresses with, and into."""

    def __init__(self, scratch: memoryview) -> None:
        import zstandard

        self.scratch = scratch
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)

    def run(self, data: memoryview, spans: Sequence[_Span]) -> tuple[list[int], list[int]]:
        """Frames of these chunks, one behind the other; length and CRC-32C of each."""
        at, lengths, crcs = 0, [], []
        for start, stop in spans:
            end = at + self._frame(data[start:stop], at)
            lengths.append(end - at)
            crcs.append(checksums.crc32c(self.scratch[at:end]))
            at = end
        return lengths, crcs

    def _frame(self, chunk: memoryview, at: int) -> int:
        if len(chunk) < _LARGE_BYTES:
            frame = self._compressor.compress(chunk)
            self.scratch[at : at + len(frame)] = frame
            return len(frame)
        reader, end = self._compressor.stream_reader(chunk, size=len(chunk)), at
        while found := reader.readinto(self.scratch[end:]):
            end += found
        if reader.read(1):
            raise StoreFailed(f"zstd: a frame of {len(chunk)} bytes is longer than its bound")
        return end - at


def compressed(
    header: Header, data: memoryview, threads: int | None = None
) -> tuple[Header, memoryview]:
    """A compressed image of the same chunks, meta and tree; pure.

    `data` (u8) is the image of `header`, as `ckpt.image.fill` made it. The new one begins at a page
    of memory and takes up what it holds; while it is made, also a chunk for each of `threads` (by
    default one for each core, up to 4) and one more.

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
    done = 0
    for press, lengths, crcs in _pressed(header, data, order, threads or _threads()):
        mine = order[done : done + len(lengths)]
        done += len(lengths)
        offset[mine], at = _put(target, at, press.scratch, lengths, crcs)
        frames[mine], crc[mine] = lengths, crcs
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


def _frames_bound(nbytes: np.ndarray) -> int:
    """The most that frames of these chunks can have; zstd says that of each."""
    each = nbytes.astype(np.int64)
    return int((each + (each >> 8) + (np.maximum(0, (128 << 10) - each) >> 11)).sum())


def _bound(nbytes: np.ndarray, texts_bytes: int) -> int:
    """The most that the image can have: frames, each with a CRC and a gap before it, and table."""
    row_bytes = CRC_BYTES + table.row_bytes(COMPRESSED)
    # A frame can be long enough to begin at a page where its chunk is not.
    gaps = alignment(nbytes.astype(np.int64) * 2).sum()
    content = _frames_bound(nbytes) + gaps + len(nbytes) * row_bytes + texts_bytes
    return int(round_up(PAGE_BYTES + content, PAGE_BYTES))


def _memory(header: Header, nbytes: int) -> memoryview:
    """Zeros that begin at a page; of them only what is written takes memory."""
    try:
        return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError as error:
        raise StoreFailed(
            f"{header.where}: no room for a compressed copy of up to {nbytes} bytes beside it "
            f"({error}); give the tier no compression, or the process more memory"
        ) from error


def _pressed(
    header: Header, data: memoryview, order: np.ndarray, threads: int
) -> Iterator[tuple[_Press, list[int], list[int]]]:
    """Runs of chunks in `order`: the press with their frames until the next, lengths and CRCs."""
    columns = header.columns
    runs = list(_runs(columns.offset[order].tolist(), columns.nbytes[order].tolist()))
    largest = max((_frames_bound(np.diff(run, axis=1)) for run in map(np.array, runs)), default=0)
    count = min(threads + 1, len(runs))
    free = [_Press(_memory(header, largest)) for _ in range(count)]
    pending: deque[tuple[_Press, Future[tuple[list[int], list[int]]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-compress") as pool:
        try:
            for run in runs:
                if not free:
                    press, future = pending.popleft()
                    yield press, *future.result()
                    free.append(press)
                press = free.pop()
                pending.append((press, submitted(pool, press.run, data, run)))
            for press, future in pending:
                yield press, *future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _runs(starts: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[_Span]]:
    """Neighbours that one thread compresses; a large chunk is a run by itself."""
    spans: list[_Span] = []
    left = _RUN_BYTES
    for start, size in zip(starts, sizes, strict=True):
        if spans and size > left:
            yield spans
            spans, left = [], _RUN_BYTES
        spans.append((start, start + size))
        left -= size
    if spans:
        yield spans


def _put(
    target: memoryview, at: int, scratch: memoryview, lengths: list[int], crcs: list[int]
) -> tuple[list[int], int]:
    """Lay frames behind byte `at`; their offsets, and the first byte behind them."""
    places, start = [], 0
    steps = alignment(np.array(lengths)).tolist()
    for length, crc, step in zip(lengths, crcs, steps, strict=True):
        at = -(-at // step) * step
        places.append(at)
        end = at + length
        target[at:end] = scratch[start : start + length]
        start += length
        at = end + CRC_BYTES
        target[end:at] = crc.to_bytes(CRC_BYTES, "little")
    return places, at


def _threads() -> int:
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))

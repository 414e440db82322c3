"""Copy arrays into an image's chunks, taking digest and checksum on the way, by several threads.

Each chunk is copied and digested by one thread in pieces that stay in its core's cache. Copy,
digest and checksum release the GIL.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import crc32c
import numpy as np
import xxhash

from ckpt.grid import Places, is_range

_PIECE_BYTES = 512 * 1024
_RUN_BYTES = 4 * 2**20  # of small chunks, for one thread: they hold the GIL most of the time


@dataclass(frozen=True, eq=False)
class Part:
    """A source and the rows of its chunks: `first`, `first` + 1, ... in row-major order."""

    source: np.ndarray
    chunk: tuple[int, ...]
    first: int
    count: int


def copy_chunks(
    target: np.ndarray, parts: Sequence[Part], places: Places, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """Copy all chunks of `parts` to their places in `target` (u8).

    The room behind a chunk gets its CRC-32C, then zeros. Returns the xxh3-128 u8[n, 16] and the
    CRC-32C u32[n] of the chunks as they lie in `target`.
    """
    sink = _Sink(target, places)
    _run(_tasks(sink, parts), threads)
    return sink.digest, sink.crc


class _Sink:
    """The target, and the columns of what was written to it. Rows are independent of each other."""

    def __init__(self, target: np.ndarray, places: Places) -> None:
        self.target = target
        self.view = memoryview(target.data)
        self.start = places.offset.tolist()
        self.nbytes = places.nbytes.tolist()
        self.room = places.room.tolist()
        self.digest = np.empty((len(self.start), 16), np.uint8)
        self.crc = np.empty(len(self.start), "<u4")
        self._digest_view = memoryview(self.digest.reshape(-1).data)

    def put_small(self, rows: list[tuple[int, np.ndarray]]) -> None:
        for row, raw in rows:
            start = self.start[row]
            end = start + self.nbytes[row]
            self.target[start:end] = raw
            view = self.view[start:end]
            self._finish(row, xxhash.xxh3_128_digest(view), crc32c.crc32c(view))

    def put(self, row: int, raw: np.ndarray) -> None:
        hasher, crc = xxhash.xxh3_128(), 0
        start, size = self.start[row], self.nbytes[row]
        for at in range(0, size, _PIECE_BYTES):
            stop = min(at + _PIECE_BYTES, size)
            self.target[start + at : start + stop] = raw[at:stop]
            view = self.view[start + at : start + stop]
            hasher.update(view)
            crc = crc32c.crc32c(view, crc)
        self._finish(row, hasher.digest(), crc)

    def put_strided(self, row: int, block: np.ndarray) -> None:
        """A chunk that is not one range of its source: NumPy gathers it."""
        start = self.start[row]
        end = start + self.nbytes[row]
        self.target[start:end].view(block.dtype).reshape(block.shape)[...] = block
        view = self.view[start:end]
        self._finish(row, xxhash.xxh3_128_digest(view), crc32c.crc32c(view))

    def _finish(self, row: int, digest: bytes, crc: int) -> None:
        self._digest_view[16 * row : 16 * row + 16] = digest
        self.crc[row] = crc
        end = self.start[row] + self.nbytes[row]
        gap = self.room[row] - self.nbytes[row]
        self.view[end : end + gap] = crc.to_bytes(gap, "little")


def _tasks(sink: _Sink, parts: Sequence[Part]) -> Iterator[Callable[[], None]]:
    """One task per large chunk, and one for each run of small ones."""
    small: list[tuple[int, np.ndarray]] = []
    for part in parts:
        source, first, count = part.source, part.first, part.count
        if count == 0:
            continue
        if not source.flags.c_contiguous or (count > 1 and not is_range(part.chunk, source.shape)):
            for row, block in enumerate(_blocks(source, part.chunk), first):
                yield functools.partial(sink.put_strided, row, block)
            continue
        raw = source.reshape(-1).view(np.uint8)
        size = sink.nbytes[first]
        if size > _PIECE_BYTES:
            for i in range(count):
                yield functools.partial(sink.put, first + i, raw[i * size : (i + 1) * size])
        elif count == 1:
            small.append((first, raw))
        else:
            small += ((first + i, raw[i * size : (i + 1) * size]) for i in range(count))
    run: list[tuple[int, np.ndarray]] = []
    left = _RUN_BYTES
    for row, raw in small:
        run.append((row, raw))
        left -= raw.nbytes
        if left <= 0:
            yield functools.partial(sink.put_small, run)
            run, left = [], _RUN_BYTES
    yield functools.partial(sink.put_small, run)


def _blocks(source: np.ndarray, chunk: tuple[int, ...]) -> Iterator[np.ndarray]:
    steps = [range(0, n, c) for n, c in zip(source.shape, chunk, strict=True)]
    for at in itertools.product(*steps):
        yield source[tuple(slice(a, a + c) for a, c in zip(at, chunk, strict=True))]


def _run(tasks: Iterator[Callable[[], None]], threads: int) -> None:
    """Run all tasks, this thread helping; the first error is raised once all threads stopped."""
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                task()
        except BaseException as error:
            errors.append(error)

    helpers = [threading.Thread(target=work, name="ckpt-copy") for _ in range(threads - 1)]
    try:
        for helper in helpers:
            helper.start()
    except BaseException as error:
        errors.append(error)
    work()
    for helper in helpers:
        while helper.is_alive():  # an interrupt must not leave a thread writing into the target
            try:
                helper.join()
            except BaseException as error:
                errors.append(error)
    if errors:
        raise errors[0]

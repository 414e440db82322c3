"""Copy arrays into an image's chunks, taking digest and checksum on the way, by several threads.

Each chunk is copied and digested by one thread in pieces that stay in its core's cache. Copy,
digest and checksum release the GIL.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash
from awscrt import checksums

from ckpt.grid import CRC_BYTES, Places, is_range

_PIECE_BYTES = 512 * 1024
_STRETCH_BYTES = 64 * 1024  # gathered in passing: in cache, and nothing that a thread's heap keeps
_RUN_BYTES = 4 * 2**20  # of small chunks, for one thread: they hold the GIL most of the time


class Part(NamedTuple):  # there is one per leaf, and a tuple is made in a third of the time
    """A source and the rows of its chunks: so many from `first` on, in row-major order."""

    source: np.ndarray
    chunk: tuple[int, ...]
    first: int
    chunks: int


def copy_chunks(
    target: np.ndarray, parts: Iterable[Part], places: Places, threads: int
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

    def put_small(self, rows: Sequence[int], sources: Sequence[np.ndarray]) -> None:
        """Chunks that are one range each; neighbours of one kind go together."""
        at = 0
        while at < len(rows):
            row, kind = rows[at], sources[at].dtype
            size, room = self.nbytes[row], self.room[row]
            stop, place = at + 1, self.start[row] + room
            end = min(len(rows), at + max(1, _STRETCH_BYTES // size))
            while stop < end and sources[stop].dtype is kind:
                after = rows[stop]
                if after - row != stop - at or self.start[after] != place:
                    break
                if self.nbytes[after] != size or self.room[after] != room:
                    break
                stop, place = stop + 1, place + room
            self._put_stretch(row, [source.reshape(-1) for source in sources[at:stop]])
            at = stop

    def _put_stretch(self, first: int, sources: list[np.ndarray]) -> None:
        """Chunks of one size and room, one behind the other; a call for each would cost more."""
        count, size, room = len(sources), self.nbytes[first], self.room[first]
        start = self.start[first]
        bytes_of = sources[0] if count == 1 else np.concatenate(sources)
        block = self.target[start : start + count * room].reshape(count, room)
        block[:, :size] = bytes_of.view(np.uint8).reshape(count, size)
        digests, crcs = [], []
        for at in range(start, start + count * room, room):
            view = self.view[at : at + size]
            digests.append(xxhash.xxh3_128_digest(view))
            crcs.append(checksums.crc32c(view))
        rows = slice(first, first + count)
        self.digest[rows] = np.frombuffer(b"".join(digests), np.uint8).reshape(count, 16)
        self.crc[rows] = crcs
        block[:, size : size + CRC_BYTES] = self.crc[rows].view(np.uint8).reshape(count, CRC_BYTES)
        block[:, size + CRC_BYTES :] = 0

    def put(self, row: int, raw: np.ndarray) -> None:
        hasher, crc = xxhash.xxh3_128(), 0
        start, size = self.start[row], self.nbytes[row]
        for at in range(0, size, _PIECE_BYTES):
            stop = min(at + _PIECE_BYTES, size)
            self.target[start + at : start + stop] = raw[at:stop]
            view = self.view[start + at : start + stop]
            hasher.update(view)
            crc = checksums.crc32c(view, crc)
        self._finish(row, hasher.digest(), crc)

    def put_strided(self, row: int, block: np.ndarray) -> None:
        """A chunk that is not one range of its source: NumPy gathers it."""
        start = self.start[row]
        end = start + self.nbytes[row]
        self.target[start:end].view(block.dtype).reshape(block.shape)[...] = block
        view = self.view[start:end]
        self._finish(row, xxhash.xxh3_128_digest(view), checksums.crc32c(view))

    def _finish(self, row: int, digest: bytes, crc: int) -> None:
        self._digest_view[16 * row : 16 * row + 16] = digest
        self.crc[row] = crc
        end = self.start[row] + self.nbytes[row]
        gap = self.room[row] - self.nbytes[row]
        self.view[end : end + gap] = crc.to_bytes(gap, "little")


def _tasks(sink: _Sink, parts: Iterable[Part]) -> Iterator[Callable[[], None]]:
    """One task per large chunk, and one for each run of small ones."""
    rows: list[int] = []  # of the small ones, and their bytes
    small: list[np.ndarray] = []
    for part in parts:
        source, first, count = part.source, part.first, part.chunks
        if count == 0:
            continue
        if not source.flags.c_contiguous or (count > 1 and not is_range(part.chunk, source.shape)):
            for row, block in enumerate(_blocks(source, part.chunk), first):
                yield functools.partial(sink.put_strided, row, block)
            continue
        size = sink.nbytes[first]
        if count == 1 and size <= _PIECE_BYTES:
            rows.append(first)
            small.append(source)
            continue
        raw = source.reshape(-1).view(np.uint8)
        if size > _PIECE_BYTES:
            for i in range(count):
                yield functools.partial(sink.put, first + i, raw[i * size : (i + 1) * size])
        else:
            rows += range(first, first + count)
            small += (raw[i * size : (i + 1) * size] for i in range(count))
    first, left = 0, _RUN_BYTES
    for stop, source in enumerate(small, 1):
        left -= source.nbytes
        if left <= 0 or stop == len(small):
            yield functools.partial(sink.put_small, rows[first:stop], small[first:stop])
            first, left = stop, _RUN_BYTES


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

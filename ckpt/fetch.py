"""Verified chunks out of images into buffers: which ranges are read, how, and what is damaged.

::

    Chunk  ->  Read                          ->  verified, and in its buffers
               large, one range of a buffer:     straight there
               lent by the image:                is there
               small, neighbours together:       through a scratch buffer within the budget
               large, scattered:                 likewise, alone
               of a compressed image:            frames, through a scratch buffer; out of it
                                                 straight there, or through a second one

Every chunk is checked against digest and CRC of the table, and the CRC that stands behind it; the
CRC of a compressed one is that of its frame, and is checked before anybody looks into the frame.
Damage does not stop the reading: all of it comes in one error.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import xxhash
from awscrt import checksums

from ckpt.disk import DIRECT_FROM_BYTES
from ckpt.errors import Damaged, NotFound
from ckpt.frames import inflater
from ckpt.grid import CRC_BYTES, PAGE_BYTES
from ckpt.image import Header, verify_chunk

SMALL_BYTES = 256 * 1024
"""Chunks below this share reads; a request of their own would cost more than the copy."""

RUN_BYTES = 4 << 20
GAP_BYTES = 64 * 1024
"""How much that nobody wants is read along to save a request; less than a chunk read by itself."""

GROUP_BYTES = 16 << 20
LISTED = 20


class ImageFile(Protocol):
    """An open image: `read_into` fills each buffer from its offset, in parallel where it helps.

    It raises `Damaged` when the file ends too early, `NotFound` when it is not there any more, and
    `StoreFailed` when the store failed. `lend` gives bytes where they lie, or None.
    """

    name: str
    size_bytes: int

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None: ...

    def lend(self, offset: int, nbytes: int) -> np.ndarray | None:
        return None


@dataclass(frozen=True, slots=True)
class Copy:
    """A part of a chunk and where it goes: a view of the target, and the index in the chunk."""

    target: np.ndarray
    index: tuple[Any, ...]


class Chunk(NamedTuple):  # there is one per leaf at least, and a tuple is made faster
    """A chunk to be read: row `row` of the table of image number `image`, for leaf `leaf`.

    With `direct`, a contiguous u8 range of a target, its bytes belong there, or are there if that
    was `lent` by the image; `copies` are made from them otherwise, or besides.
    """

    image: int
    row: int
    leaf: str
    offset: int
    nbytes: int
    direct: np.ndarray | None
    copies: tuple[Copy, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    lent: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """What one task reads of one image; `scratch_bytes` 0: straight into the targets."""

    image: int
    chunks: Sequence[Chunk]
    offset: int
    read_bytes: int
    scratch_bytes: int
    frames: Sequence[int] = ()
    """Of a compressed image: the length of each chunk there."""


class _Frame(NamedTuple):
    """A chunk of a compressed image. Of the image `nbytes` from `offset` on are read for it."""

    image: int
    offset: int
    nbytes: int
    chunk: Chunk


S = TypeVar("S", Chunk, _Frame)


class Fetch:
    """Reads chunks of these images, call by call; what is damaged is said at the end."""

    def __init__(
        self, images: Sequence[tuple[Header, ImageFile]], *, budget_bytes: int, threads: int
    ) -> None:
        self._images = images
        self._digests = [header.columns.digest.tobytes() for header, _ in images]
        self._crcs = [header.columns.crc.astype("<u4").tobytes() for header, _ in images]
        self._frames: dict[int, list[int]] = {
            number: header.columns.frames.tolist()
            for number, (header, _) in enumerate(images)
            if header.columns.frames is not None
        }
        """Of compressed images: the length of each chunk there."""
        self._budget = _Budget(budget_bytes)
        self._run_bytes = max(1, min(RUN_BYTES, budget_bytes))
        self._threads = threads
        self._lock = threading.Lock()
        self._wrong: list[tuple[int, int, str]] = []  # image, offset, message
        self.chunks = 0
        self.bytes_read = 0

    @property
    def is_intact(self) -> bool:
        """Whether all chunks up to now were what was written."""
        return not self._wrong

    def run(self, chunks: Sequence[Chunk], progress: Callable[[int], None]) -> None:
        """Fill the targets of `chunks`; damage is noted, and `progress` is told the bytes done.

        Raises:
            StoreFailed: the store failed; nothing is known about the chunks.
        """
        self.chunks += len(chunks)
        reads = self._frame_reads(chunks) if self._frames else []
        if self._frames:
            chunks = [chunk for chunk in chunks if chunk.image not in self._frames]
        reads += plan_reads([c for c in chunks if self._is_inside(c, c.nbytes)], self._run_bytes)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="ckpt-read") as pool:
            pending = [pool.submit(self._do, read) for read in reads]
            try:
                for read, one in zip(reads, pending, strict=True):
                    one.result()
                    self.bytes_read += read.read_bytes
                    progress(sum(chunk.nbytes for chunk in read.chunks))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def raise_damage(self) -> None:
        """Raises:
        Damaged: chunks are not what was written; leaf, image and chunk of each, up to a bound.
        """
        if self._wrong:
            raise Damaged(_listed([text for *_, text in sorted(self._wrong)], self.chunks))

    def _frame_reads(self, chunks: Sequence[Chunk]) -> list[_Read]:
        """What is read of compressed images: only their chunks are looked at."""
        frames = [
            _Frame(chunk.image, chunk.offset, self._frames[chunk.image][chunk.row], chunk)
            for chunk in chunks
            if chunk.image in self._frames
        ]
        frames = [frame for frame in frames if self._is_inside(frame.chunk, frame.nbytes)]
        return plan_frames(frames, self._run_bytes)

    def _is_inside(self, chunk: Chunk, stored_bytes: int) -> bool:
        header, image = self._images[chunk.image]
        end = chunk.offset + stored_bytes + CRC_BYTES
        if end <= image.size_bytes:
            return True
        self._note(
            chunk,
            f"{_place(header, chunk)}: wanted bytes up to {end}, found a file of "
            f"{image.size_bytes} bytes: truncated",
        )
        return False

    def _do(self, read: _Read) -> None:
        with self._budget.hold(read.scratch_bytes):
            if read.frames:
                self._out_of_frames(read)
            elif read.scratch_bytes:
                self._through_scratch(read)
            else:
                self._straight(read)

    def _through_scratch(self, read: _Read) -> None:
        scratch = aligned_bytes(read.read_bytes, 1)
        view = memoryview(scratch.data)
        if not self._fill(read, [(read.offset, view)]):
            return
        for chunk in read.chunks:
            start = chunk.offset - read.offset
            stop = start + chunk.nbytes
            if not self._is_intact(chunk, view[start:stop], view[stop : stop + CRC_BYTES]):
                continue
            raw = scratch[start:stop]
            if chunk.direct is not None:
                chunk.direct[:] = raw
            _copy(chunk, raw)

    def _out_of_frames(self, read: _Read) -> None:
        view = memoryview(aligned_bytes(read.read_bytes, 1).data)
        if not self._fill(read, [(read.offset, view)]):
            return
        for chunk, stored_bytes in zip(read.chunks, read.frames, strict=True):
            start = chunk.offset - read.offset
            stored = view[start : start + stored_bytes + CRC_BYTES]
            raw = chunk.direct if chunk.direct is not None else np.empty(chunk.nbytes, np.uint8)
            if self._inflate(chunk, stored, raw):
                _copy(chunk, raw)

    def _inflate(self, chunk: Chunk, stored: memoryview, raw: np.ndarray) -> bool:
        row, frame, behind = chunk.row, stored[:-CRC_BYTES], stored[-CRC_BYTES:]
        crc = checksums.crc32c(frame).to_bytes(CRC_BYTES, "little")
        if crc == behind == self._crcs[chunk.image][CRC_BYTES * row : CRC_BYTES * (row + 1)]:
            with contextlib.suppress(Damaged):  # said below, with its place
                inflater().into(raw.data, frame)
                digest = self._digests[chunk.image][16 * row : 16 * row + 16]
                if xxhash.xxh3_128_digest(raw.data) == digest:
                    return True
        header = self._images[chunk.image][0]
        what = f"{_place(header, chunk)}: changed while it was looked at"
        try:
            verify_chunk(header, row, stored)
        except Damaged as error:
            what = str(error)
        self._note(chunk, what)
        return False

    def _straight(self, read: _Read) -> None:
        crcs = memoryview(bytearray(CRC_BYTES * len(read.chunks)))
        ranges = []
        for i, chunk in enumerate(read.chunks):
            assert chunk.direct is not None
            if not chunk.lent:
                ranges.append((chunk.offset, chunk.direct.data))
            behind = crcs[CRC_BYTES * i : CRC_BYTES * (i + 1)]
            ranges.append((chunk.offset + chunk.nbytes, behind))
        if not self._fill(read, ranges):
            return
        for i, chunk in enumerate(read.chunks):
            assert chunk.direct is not None
            behind = crcs[CRC_BYTES * i : CRC_BYTES * (i + 1)]
            if self._is_intact(chunk, chunk.direct.data, behind):
                _copy(chunk, chunk.direct)

    def _fill(self, read: _Read, ranges: Sequence[tuple[int, memoryview]]) -> bool:
        header, image = self._images[read.image]
        try:
            image.read_into(ranges)
        except (Damaged, NotFound) as error:
            # Gone or cut since it was opened: which of these chunks that hits is not worth asking.
            for chunk in read.chunks:
                self._note(chunk, f"{_place(header, chunk)}: {error}")
            return False
        return True

    def _is_intact(self, chunk: Chunk, view: memoryview, crc: memoryview) -> bool:
        row = chunk.row
        digest = self._digests[chunk.image][16 * row : 16 * row + 16]
        if (
            xxhash.xxh3_128_digest(view) == digest
            and crc == self._crcs[chunk.image][CRC_BYTES * row : CRC_BYTES * (row + 1)]
        ):
            return True
        try:
            verify_chunk(self._images[chunk.image][0], row, bytes(view) + bytes(crc))
        except Damaged as error:
            self._note(chunk, str(error))
            return False
        return True

    def _note(self, chunk: Chunk, message: str) -> None:
        with self._lock:
            self._wrong.append((chunk.image, chunk.offset, f"leaf {chunk.leaf}: {message}"))


def plan_reads(chunks: Sequence[Chunk], run_bytes: int) -> list[_Read]:
    """What is read together, in the order of the files; pure."""
    in_order = sorted(chunks, key=lambda chunk: (chunk.image, chunk.offset))
    large = [chunk for chunk in in_order if chunk.nbytes >= SMALL_BYTES or chunk.lent]
    small = [chunk for chunk in in_order if not (chunk.nbytes >= SMALL_BYTES or chunk.lent)]
    straight = [chunk for chunk in large if chunk.direct is not None]
    reads = [_run_of([chunk]) for chunk in large if chunk.direct is None]
    reads += map(_run_of, _grouped(small, lambda run, c: _stretches(run, c, run_bytes)))
    reads += map(_straight_of, _grouped(straight, _fits))
    return sorted(reads, key=lambda read: (read.image, read.offset))


def plan_frames(frames: Sequence[_Frame], run_bytes: int) -> list[_Read]:
    """The same for compressed images. Small is a chunk that is small when it is out; pure."""
    in_order = sorted(frames, key=lambda frame: (frame.image, frame.offset))
    small = [frame for frame in in_order if frame.chunk.nbytes < SMALL_BYTES]
    groups = [[frame] for frame in in_order if frame.chunk.nbytes >= SMALL_BYTES]
    groups += _grouped(small, lambda run, frame: _stretches(run, frame, run_bytes))
    return sorted(map(_frames_of, groups), key=lambda read: (read.image, read.offset))


def _grouped(chunks: Sequence[S], belongs: Callable[[list[S], S], bool]) -> Iterator[list[S]]:
    group: list[S] = []
    for chunk in chunks:
        if group and not (group[-1].image == chunk.image and belongs(group, chunk)):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _stretches(run: list[S], chunk: S, run_bytes: int) -> bool:
    near = chunk.offset - run[-1].offset - run[-1].nbytes <= GAP_BYTES
    return near and chunk.offset + chunk.nbytes + CRC_BYTES - run[0].offset <= run_bytes


def _fits(group: list[Chunk], chunk: Chunk) -> bool:
    return sum(c.nbytes for c in group) + chunk.nbytes <= GROUP_BYTES


def _run_of(chunks: Sequence[Chunk]) -> _Read:
    first, last = chunks[0], chunks[-1]
    length = last.offset + last.nbytes + CRC_BYTES - first.offset
    return _Read(first.image, chunks, first.offset, length, length)


def _straight_of(chunks: Sequence[Chunk]) -> _Read:
    length = sum(chunk.nbytes + CRC_BYTES for chunk in chunks)
    return _Read(chunks[0].image, chunks, chunks[0].offset, length, 0)


def _frames_of(frames: Sequence[_Frame]) -> _Read:
    first, last = frames[0], frames[-1]
    length = last.offset + last.nbytes + CRC_BYTES - first.offset
    chunks = [frame.chunk for frame in frames]
    second = max((chunk.nbytes for chunk in chunks if chunk.direct is None), default=0)
    stored = [frame.nbytes for frame in frames]
    return _Read(first.image, chunks, first.offset, length, length + second, stored)


def _copy(chunk: Chunk, raw: np.ndarray) -> None:
    if chunk.copies:
        block = raw.view(chunk.dtype).reshape(chunk.shape)
        for copy in chunk.copies:
            copy.target[...] = block[copy.index]


def _place(header: Header, chunk: Chunk) -> str:
    spec = header.arrays[header.columns.array[chunk.row]]
    at = tuple(header.columns.grid[chunk.row, : len(spec.shape)].tolist())
    return f"{header.where}: {spec.param}, chunk {at} at byte {chunk.offset}"


def _listed(messages: Sequence[str], total: int) -> str:
    lines = "".join(f"\n  {text}" for text in messages[:LISTED])
    more = f"\n  and {len(messages) - LISTED} more" if len(messages) > LISTED else ""
    if total == 1:
        return f"the one chunk that is needed is damaged:{lines}{more}"
    return f"{len(messages)} of the {total} chunks that are needed are damaged:{lines}{more}"


class _Budget:
    """Bytes that may be in use at a time; what is larger waits until it is alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= self._limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


def aligned_empty(shape: Sequence[int], dtype: np.dtype[Any], alignment_bytes: int) -> np.ndarray:
    """An uninitialised C-contiguous array whose first byte is a multiple of `alignment_bytes`."""
    raw = aligned_bytes(math.prod(shape) * dtype.itemsize, alignment_bytes)
    return raw.view(dtype).reshape(shape)


def aligned_bytes(nbytes: int, alignment_bytes: int) -> np.ndarray:
    """As `aligned_empty`: u8[nbytes]. From 1 MiB on it starts at a page: see `FileImage`."""
    if nbytes >= DIRECT_FROM_BYTES:
        # NumPy would ask for huge pages: where memory is in pieces, each one waits for the kernel
        # to make room, and a restore takes twice as long.
        with contextlib.suppress(OSError):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
        alignment_bytes = PAGE_BYTES
    raw = np.empty(nbytes + alignment_bytes - 1, np.uint8)
    start = -raw.ctypes.data % alignment_bytes
    return raw[start : start + nbytes]

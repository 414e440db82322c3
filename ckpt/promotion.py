"""From an image in a Local tier to a step: verified first, then copied window by window."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import final

from ckpt import image, threads
from ckpt.grid import CRC_BYTES, PAGE_BYTES
from ckpt.image import Header
from ckpt.open_images import ImageReader

_RUN_BYTES = 16 << 20
"""Neighbouring small chunks are read together, up to this much."""

_THREADS = 2


@final
class ImageWindows:
    """An open image as a source of what is to be written; each window is memory of its own."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader

    @property
    def size_bytes(self) -> int:
        return self._reader.size_bytes

    def window(self, start: int, stop: int) -> memoryview:
        """Raises Damaged when the image ends before, StoreFailed."""
        first = start - start % PAGE_BYTES
        if stop <= start:
            return memoryview(b"")
        # Memory that begins at a page can be read into past the page cache, and written from so.
        memory = memoryview(mmap.mmap(-1, stop - first))
        self._reader.read_into([(first, memory)])
        return memory[start - first :]

    def whole(self) -> memoryview:
        """All of it at once."""
        return self.window(0, self.size_bytes)


def verify(header: Header, windows: ImageWindows, beat: Callable[[], None]) -> None:
    """Check every chunk of an image; `beat` is called again and again.

    Raises:
        Damaged: a chunk is not what was saved; names it. StoreFailed.
    """

    def check(run: list[int]) -> None:
        beat()
        start, stop = int(offset[run[0]]), int(offset[run[-1]] + stored[run[-1]]) + CRC_BYTES
        data = windows.window(start, stop)
        for row in run:
            at = int(offset[row]) - start
            image.verify_chunk(header, row, data[at : at + int(stored[row]) + CRC_BYTES])

    offset, stored = header.columns.offset, header.columns.stored
    threads.each(check, list(_runs(header)), _THREADS)


def _runs(header: Header) -> Iterator[list[int]]:
    """Rows whose chunks lie close together, in the order of the file."""
    offsets, sizes = header.columns.offset.tolist(), header.columns.stored.tolist()
    run: list[int] = []
    for row in sorted(range(len(offsets)), key=offsets.__getitem__):
        if run and offsets[row] + sizes[row] - offsets[run[0]] > _RUN_BYTES:
            yield run
            run = []
        run.append(row)
    if run:
        yield run

"""An open image of a store: positional reads straight into buffers."""

from __future__ import annotations

import abc
import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from ckpt import disk, threads
from ckpt.errors import Damaged
from ckpt.grid import PAGE_BYTES


class ImageReader(abc.ABC):
    """An open image: positional reads straight into buffers."""

    name: str
    size_bytes: int

    @abc.abstractmethod
    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer from its offset.

        Raises:
            Damaged: the image ends before a range does.
            StoreFailed: the store failed.
        """

    def lend(self, offset: int, nbytes: int) -> np.ndarray | None:
        """u8[nbytes], writable: these bytes where they lie, for as long as somebody has them.

        None where they have to be read, which is everywhere but in memory.
        """
        return None

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of one range."""
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise Damaged(
                f"{self.name}: wanted bytes {offset}..{offset + length}, "
                f"found a file of {self.size_bytes} bytes"
            )
        data = bytearray(length)
        self.read_into([(offset, memoryview(data))])
        return bytes(data)

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the reader holds."""

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class FileImage(ImageReader):
    """An image in a file system, read with `preadv` by two threads.

    What is not in the page cache goes straight from the disk into buffers that start at a page:
    the cache would cost a copy, and pages that others need.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._descriptor = disk.open_file(path)
        self._direct: int | None = None
        self._reopening = threading.Lock()
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        pieces = [
            (offset + start, buffer[start : start + disk.WINDOW_BYTES])
            for offset, whole in ranges
            for buffer in [whole.cast("B")]
            for start in range(0, buffer.nbytes, disk.WINDOW_BYTES)
        ]
        with disk.translated(Path(self.name)):
            threads.each(lambda piece: self._fill(*piece), pieces, disk.THREADS)

    def _fill(self, offset: int, buffer: memoryview) -> None:
        done = 0
        if buffer.nbytes >= disk.DIRECT_FROM_BYTES and offset % PAGE_BYTES == 0:
            done = self._fill_directly(offset, buffer)
        while done < buffer.nbytes:
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise Damaged(
                    f"{self.name}: ends at byte {offset + done}, "
                    f"wanted bytes up to {offset + buffer.nbytes}; the file was cut"
                )
            done += count

    def _fill_directly(self, offset: int, buffer: memoryview) -> int:
        """Whole pages past the page cache; how many bytes that were, be it none."""
        whole = buffer.nbytes - buffer.nbytes % PAGE_BYTES
        if not disk.is_page_aligned(buffer) or disk.is_cached(self._descriptor, offset):
            return 0
        direct = self._reopened()
        done = 0
        while direct >= 0 and done < whole:
            try:
                count = os.preadv(direct, [buffer[done:whole]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return done  # a file system that takes the flag and refuses the read
            if count % PAGE_BYTES or count == 0:
                return done  # its end, or a place from which there is no going on like this
            done += count
        return done

    def _reopened(self) -> int:
        """The descriptor for direct reads; negative where there is none."""
        if self._direct is None:
            with self._reopening:
                if self._direct is None:
                    self._direct = disk.open_direct(self._descriptor)
        return self._direct

    def close(self) -> None:
        for descriptor in (self._descriptor, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._descriptor, self._direct = -1, -1

"""Files mapped into memory: bytes without copies, and errors where the file changed underneath."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import final

import numpy as np

from formats.errors import Mismatch, Unsupported
from formats.files import File, naming, open_binary

_FEW = 16  # files that are looked at sooner than it is found out which of them are meant


@final
class Mapped:
    """One local file, mapped for reading.

    raw: all of it; shares the pages of every process that maps the file.
    bytes: the same, uint8, read-only.

    Raises: Mismatch when its size is not what was listed; NotFound, StoreFailed.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self.raw: mmap.mmap | bytes = b""
        with open_binary(file) as stream, naming(file.path):
            if os.fstat(stream.fileno()).st_size:  # an empty file cannot be mapped
                self.raw = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self.raw, np.uint8)
        self.check()

    def check(self) -> None:
        """Raise Mismatch if the file no longer has its size: pages beyond its end kill a process.

        Meant before each read. A file that is replaced, as a new file under its name, stays as it
        was for those who have mapped it.
        """
        size_bytes = self.raw.size() if isinstance(self.raw, mmap.mmap) else 0
        if size_bytes != self._file.size_bytes:
            raise Mismatch(
                f"{self._file.path} changed since the source was opened; open it again,"
                " and replace files instead of writing into them",
                [f"{self._file.name}: wanted {self._file.size_bytes} bytes, found {size_bytes}"],
            )


@final
class Joined:
    """Several mapped files, so that one gather takes from all of them.

    bytes: uint8, read-only, from the first to the last of the addresses at which they lie. Between
        them is nothing that may be touched: whoever takes from it stays within the files.
    at: int64[files], where in `bytes` each file begins; meaningless for an empty file.
    """

    def __init__(self, files: Sequence[Mapped]) -> None:
        self._files = tuple(files)
        self._size = [f.raw.size if isinstance(f.raw, mmap.mmap) else _nothing for f in files]
        self._sizes = [f.bytes.size for f in files]
        places = np.array([(f.bytes.ctypes.data, f.bytes.size) for f in files], np.int64)
        held = places[places[:, 1] > 0]
        first, stop = (held[:, 0].min(), held.sum(1).max()) if held.size else (0, 0)
        count = int(stop - first)
        whole = (ctypes.c_uint8 * count).from_address(int(first)) if count else b""
        self.bytes = np.frombuffer(memoryview(whole), np.uint8)
        self.bytes.flags.writeable = False
        self.at = places[:, 0] - first

    def check(self, numbers: np.ndarray) -> None:
        """`Mapped.check` of the files of these numbers, int64[n]."""
        few = len(self._files) <= _FEW
        for number in range(len(self._files)) if few else set(numbers.tolist()):
            if self._size[number]() != self._sizes[number]:
                self._files[number].check()


def _nothing() -> int:
    """The size of an empty file."""
    return 0


def only_local(files: Sequence[File], what: str) -> None:
    """Raise Unsupported if one of `files` is a URL; `what` names their format in the plural."""
    remote = next((file.path for file in files if file.is_url), None)
    if remote is not None:
        raise Unsupported(
            f"{remote}: {what} are read from local file systems only;"
            " mount the bucket or copy the files"
        )

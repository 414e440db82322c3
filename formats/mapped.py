"""Files mapped into memory: bytes without copies, and errors where the file changed underneath."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import final

import numpy as np

from formats.errors import Mismatch, Unsupported
from formats.files import File, naming, open_binary


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


def only_local(files: Sequence[File], what: str) -> None:
    """Raise Unsupported if one of `files` is a URL; `what` names their format in the plural."""
    remote = next((file.path for file in files if file.is_url), None)
    if remote is not None:
        raise Unsupported(
            f"{remote}: {what} are read from local file systems only;"
            " mount the bucket or copy the files"
        )

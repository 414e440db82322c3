"""A Local tier: image files of one process of one run, in a directory of their own.

::

    <location>/<xxh3-64 of the run>-p<process>/     0700, ours
        <step>-b<branch>-a<attempt>.image           durable before it has this name
        <step>-b<branch>-a<attempt>.image.tmp-<32 hex digits>      in the making

Every other name is foreign: never read, never deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import final

import xxhash

from ckpt import disk
from ckpt.errors import Damaged, NotFound, StoreFailed
from ckpt.image import Header, decode
from ckpt.lineage import StepId
from ckpt.open_images import FileImage, ImageReader
from ckpt.slots import step_of
from ckpt.store import absolute_location
from ckpt.windows import Source, size_of

# For `fullmatch`, and ASCII digits only.
_NAME = re.compile(r"(0|[1-9][0-9]{0,17})-b([1-9][0-9]{0,17})-a([1-9][0-9]{0,17})\.image")
_TEMPORARY = re.compile(_NAME.pattern + r"\.tmp-[0-9a-f]{32}")


@dataclass(frozen=True)
class LocalImage:
    """An image file, by its name: nothing of it was read."""

    id: StepId
    path: Path
    size_bytes: int


@final
class LocalImages:
    """The images of process `index` of the run whose home is at `run`.

    Args:
        location: the directory of the tier, a path or `file://` URL; made when it is needed.
    """

    def __init__(self, location: str | os.PathLike[str], run: str, index: int) -> None:
        self.index = index
        self.directory = Path(
            absolute_location(location), f"{xxhash.xxh3_64_hexdigest(os.fsencode(run))}-p{index}"
        )

    def __repr__(self) -> str:
        return f"LocalImages({str(self.directory)!r})"

    def list(self) -> list[LocalImage]:
        """What is there, ascending; empty when there is no directory. Raises StoreFailed."""
        images = []
        with contextlib.suppress(NotFound), disk.translated(self.directory):
            self._must_be_private()
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    step = _parse(entry.name)
                    if step is not None and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):
                            size_bytes = entry.stat(follow_symlinks=False).st_size
                            images.append(LocalImage(step, Path(entry.path), size_bytes))
        return sorted(images, key=lambda image: image.id)

    def write(self, header: Header, data: Source) -> None:
        """Write the image of `header`; durable when it returns, and whole under its name.

        Raises:
            StoreFailed: the disk failed, or the directory is not of this user alone.
        """
        path = self.path(step_of(header))
        temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
        with disk.translated(path, size_of(data)):
            disk.make_directory(self.directory.parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.directory, 0o700)
                disk.sync_directory(self.directory.parent)
            self._must_be_private()
            try:
                disk.write_bulk(temporary, data)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            disk.sync_directory(self.directory)

    def open(self, step: StepId) -> ImageReader:
        """The image of a step, for reading.

        Raises:
            NotFound: it is not there. Damaged: what is there is no file. StoreFailed.
        """
        path = self.path(step)
        with disk.translated(path):
            self._must_be_private()
            if path.is_symlink():
                raise Damaged(f"{path}: wanted a file, found a symbolic link")
            return FileImage(path)

    def header(self, step: StepId) -> Header:
        """What the image of a step says of itself; its chunks were not looked at.

        Raises:
            Damaged: the file is not the image that its name tells of, nor of its size.
            NotFound, StoreFailed: as `open`. Unsupported: it is of a newer format.
        """
        with self.open(step) as reader:
            return self.header_of(step, reader)

    def header_of(self, step: StepId, reader: ImageReader) -> Header:
        """As `header`, of an image that is open."""
        header = decode(reader.read, reader.size_bytes, reader.name)
        if header.size_bytes != reader.size_bytes:
            raise Damaged(
                f"{reader.name}: wanted {header.size_bytes} bytes, found {reader.size_bytes}"
            )
        found, process = step_of(header), header.meta.get("process")
        if found != step or process != self.index:
            raise Damaged(
                f"{reader.name}: wanted {step} of process {self.index}, "
                f"found {found} of process {process}"
            )
        return header

    def delete(self, step: StepId) -> None:
        """Remove the image of a step; absent is fine. Raises StoreFailed."""
        path = self.path(step)
        with contextlib.suppress(NotFound), disk.translated(path, changes=True):
            self._must_be_private()
            os.unlink(path)
            disk.sync_directory(self.directory)

    def clear(self) -> None:
        """Remove what dead writers left in the making. Only while nobody else writes here."""
        with contextlib.suppress(NotFound), disk.translated(self.directory, changes=True):
            self._must_be_private()
            for name in os.listdir(self.directory):
                if _TEMPORARY.fullmatch(name):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self.directory / name)

    def path(self, step: StepId) -> Path:
        """Where the image of a step is, or would be."""
        return self.directory / f"{step.step}-b{step.branch}-a{step.attempt}.image"

    def _must_be_private(self) -> None:
        """What others can write into is not read, or it could hand them the trainer's state."""
        found = os.lstat(self.directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise StoreFailed(
                f"{self.directory}: wanted a directory of user {os.geteuid()} with mode 0700, "
                f"found {stat.filemode(found.st_mode)} of user {found.st_uid}; remove it, or give "
                "the Local tier another location"
            )


def _parse(name: str) -> StepId | None:
    found = _NAME.fullmatch(name)
    return StepId(*map(int, found.groups())) if found else None

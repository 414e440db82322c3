"""A location: small durable files, bulk images, atomic publishing.

The contract (every store must hold it, `tests/store_contract.py` asks):

- Keys are relative paths with `/`; no empty, `.` or `..` components.
- `put`, `put_many`, `put_if_absent`, `write_image`, `move` are durable when they return.
- `put_if_absent` has exactly one winner; the others get `AlreadyExists`.
- `put` is atomic: a reader sees the old bytes or the new ones.
- `move` is atomic and fails on an existing non-empty target; what it moved is gone from the source.
- `NotFound` is raised for what is not there and for nothing else; every other failure of the
  store is `StoreFailed`.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from ckpt.errors import AlreadyExists, Damaged, Misuse, NotFound, StoreFailed

PAGE_BYTES = 4096
WINDOW_BYTES = 16 << 20
"""Bytes of one bulk write: large enough for the disk, small enough to share among threads."""

SMALL_LIMIT_BYTES = 1 << 30
"""No small file of ours comes near this; a larger one is not read into memory."""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}$")


@dataclass(frozen=True)
class Entry:
    """One name below a prefix."""

    name: str
    is_dir: bool
    size_bytes: int = 0


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


class Store(abc.ABC):
    """What the rest of the package asks of a location; see the module docstring."""

    location: str
    renames: bool
    """Has an atomic `move`. Without it steps are written in place and the marker publishes."""

    @abc.abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write or replace a small file."""

    @abc.abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write a small file unless the key is taken.

        Raises:
            AlreadyExists: the key is taken; what is there is left as it is.
        """

    def put_many(self, files: Mapping[str, bytes]) -> None:
        """`put` for several files; durable when it returns, in no particular order before."""
        for key, data in files.items():
            self.put(key, data)

    @abc.abstractmethod
    def read(self, key: str) -> bytes:
        """The bytes of a small file. Raises NotFound."""

    @abc.abstractmethod
    def list(self, prefix: str) -> list[Entry]:
        """Names one level below a prefix, sorted; empty when there is none."""

    @abc.abstractmethod
    def exists(self, key: str) -> bool:
        """Is there a file or directory of that name?"""

    @abc.abstractmethod
    def delete(self, key: str) -> None:
        """Remove one file; absent is fine."""

    @abc.abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Remove everything below a prefix; absent is fine."""

    @abc.abstractmethod
    def move(self, source: str, target: str) -> None:
        """Rename a directory.

        Raises:
            NotFound: no such source.
            AlreadyExists: the target is there and not empty.
        """

    @abc.abstractmethod
    def write_image(self, key: str, data: memoryview) -> None:
        """Write a large file, durable and without leaving it in the page cache if possible."""

    @abc.abstractmethod
    def open_image(self, key: str) -> ImageReader:
        """Open a large file for reading. Raises NotFound."""

    def walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, size in bytes) of every file below a prefix, sorted."""
        for entry in self.list(prefix):
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir:
                yield from self.walk(key)
            else:
                yield key, entry.size_bytes


def check_key(key: str) -> str:
    """The key itself, if it is a clean relative path.

    Raises:
        Misuse: it is not.
    """
    parts = key.split("/")
    if not key or "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise Misuse(f"key {key!r}: wanted a relative path without empty, '.' or '..' components")
    return key


def open_store(location: str | os.PathLike[str]) -> Store:
    """The store behind a path or URL.

    Raises:
        Misuse: a URL scheme that is not known.
    """
    text = os.fspath(location)
    if text.startswith("file://"):
        text = text[len("file://") :]
    elif "://" in text:
        scheme = text.split("://", 1)[0]
        raise Misuse(f"{text}: scheme {scheme!r} is not supported; wanted a path or file://")
    return FileStore(text)


@final
class FileStore(Store):
    """A directory of a POSIX file system."""

    renames = True

    def __init__(self, location: str | os.PathLike[str]) -> None:
        self.location = os.path.abspath(os.fspath(location))
        self._root = Path(self.location)

    def __repr__(self) -> str:
        return f"FileStore({self.location!r})"

    def put(self, key: str, data: bytes) -> None:
        self.put_many({key: data})

    def put_many(self, files: Mapping[str, bytes]) -> None:
        directories: dict[Path, None] = {}
        for key, data in files.items():
            path = self._path(key)
            with _translated(path, len(data)):
                self._make_directory(path.parent)
                temporary = _temporary(path)
                try:
                    _write_file(temporary, data)
                    os.replace(temporary, path)
                except BaseException:
                    _unlink(temporary)
                    raise
            directories[path.parent] = None
        for directory in directories:
            with _translated(directory):
                _sync_directory(directory)

    def put_if_absent(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with _translated(path, len(data)):
            self._make_directory(path.parent)
            temporary = _temporary(path)
            try:
                _write_file(temporary, data)
                # A hard link is the one creation that is atomic, complete and exclusive at once.
                os.link(temporary, path)
            except FileExistsError:
                raise AlreadyExists(f"{path}: there already; left as it is") from None
            finally:
                _unlink(temporary)
            _sync_directory(path.parent)

    def append(self, key: str, data: bytes) -> None:
        """Add to a file that one writer keeps; whole lines survive a crash, the last may not."""
        path = self._path(key)
        with _translated(path, len(data)):
            self._make_directory(path.parent)
            with open(path, "ab", buffering=0) as file:
                file.write(data)

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with _translated(path), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > SMALL_LIMIT_BYTES:
                raise Damaged(f"{path}: wanted a small file, found {size} bytes")
            return file.readall()

    def list(self, prefix: str) -> list[Entry]:
        path = self._path(prefix) if prefix else self._root
        found = []
        try:
            with _translated(path), os.scandir(path) as entries:
                for entry in entries:
                    if _TEMPORARY.search(entry.name):
                        continue
                    is_dir = entry.is_dir(follow_symlinks=False)
                    try:
                        size = 0 if is_dir else entry.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue
                    found.append(Entry(entry.name, is_dir, size))
        except NotFound:
            return []
        return sorted(found, key=lambda entry: entry.name)

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with _translated(path):
            try:
                os.lstat(path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _translated(path):
            try:
                os.unlink(path)
            except FileNotFoundError:
                return
            _sync_directory(path.parent)

    def delete_tree(self, prefix: str) -> None:
        path = self._path(prefix)
        with _translated(path):
            # A directory may vanish meanwhile: two attempts may clean up the same remains.
            shutil.rmtree(path, onerror=_ignore_absent)
            _sync_directory(path.parent)

    def move(self, source: str, target: str) -> None:
        old, new = self._path(source), self._path(target)
        with _translated(old):
            try:
                os.rename(old, new)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise AlreadyExists(f"{new}: there already; left as it is") from None
                raise
            _sync_directory(new.parent)
            if new.parent != old.parent:
                _sync_directory(old.parent)

    def write_image(self, key: str, data: memoryview) -> None:
        path = self._path(key)
        with _translated(path, data.nbytes):
            self._make_directory(path.parent)
            # In place: the name carries the attempt, and no part names it before it is whole.
            _write_bulk(path, data)
            _sync_directory(path.parent)

    def open_image(self, key: str) -> ImageReader:
        path = self._path(key)
        with _translated(path):
            return FileImage(path)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _make_directory(self, directory: Path) -> None:
        """Create what is missing, and make each new name durable in its parent."""
        missing = []
        while not directory.exists():
            missing.append(directory)
            directory = directory.parent
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each)
            _sync_directory(each.parent)


@final
class FileImage(ImageReader):
    """An image in a file system, read with `preadv` by two threads."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size_bytes = os.fstat(self._descriptor).st_size

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        pieces = [
            (offset + start, buffer[start : start + WINDOW_BYTES])
            for offset, whole in ranges
            for buffer in [whole.cast("B")]
            for start in range(0, buffer.nbytes, WINDOW_BYTES)
        ]
        with _translated(Path(self.name)):
            if len(pieces) == 1:
                self._fill(*pieces[0])
                return
            with ThreadPoolExecutor(2) as pool:
                for _ in pool.map(lambda piece: self._fill(*piece), pieces):
                    pass

    def _fill(self, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < buffer.nbytes:
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise Damaged(
                    f"{self.name}: ends at byte {offset + done}, "
                    f"wanted bytes up to {offset + buffer.nbytes}; the file was cut"
                )
            done += count

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _ignore_absent(_function: object, _path: object, info: tuple) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def _write_file(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_bulk(path: Path, data: memoryview) -> None:
    """O_DIRECT from page-aligned memory where the file system has it, else buffered windows."""
    data = data.cast("B")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    aligned = np.frombuffer(data, np.uint8).ctypes.data % PAGE_BYTES == 0 if data.nbytes else False
    descriptor = -1
    direct = False
    if aligned:
        try:
            descriptor = os.open(path, flags | os.O_DIRECT, 0o666)
            direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    if descriptor < 0:
        descriptor = os.open(path, flags, 0o666)
    try:
        if data.nbytes:
            with contextlib.suppress(OSError):
                os.posix_fallocate(descriptor, 0, data.nbytes)
        whole = data.nbytes - data.nbytes % PAGE_BYTES if direct else data.nbytes
        _write_windows(descriptor, data[:whole], direct=direct)
        if whole < data.nbytes:
            # The unaligned tail cannot go out with O_DIRECT.
            rest = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write_range(rest, data[whole:], whole)
                os.fsync(rest)
            finally:
                os.close(rest)
        os.fsync(descriptor)
        if os.fstat(descriptor).st_size != data.nbytes:
            raise OSError(errno.EIO, f"wrote {data.nbytes} bytes, the file has another size")
    finally:
        os.close(descriptor)


def _write_windows(descriptor: int, data: memoryview, *, direct: bool) -> None:
    starts = range(0, data.nbytes, WINDOW_BYTES)
    if direct and len(starts) > 1:
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(
                lambda s: _write_range(descriptor, data[s : s + WINDOW_BYTES], s), starts
            ):
                pass
        return
    for start in starts:
        _write_range(descriptor, data[start : start + WINDOW_BYTES], start)
        if not direct:
            # Keep writeback close behind, so that it does not pile up and stall the train step.
            os.fdatasync(descriptor)


def _write_range(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextlib.contextmanager
def _translated(path: Path, wanted_bytes: int | None = None) -> Iterator[None]:
    """OSError to the errors of this package, with the path and what can be done."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{error.filename or path}: not there") from error
    except NotADirectoryError as error:
        text = f"{path}: a parent of it is a file, wanted a directory"
        raise (NotFound(text) if wanted_bytes is None else StoreFailed(text)) from error
    except OSError as error:
        raise StoreFailed(_explain(path, error, wanted_bytes)) from error


def _explain(path: Path, error: OSError, wanted_bytes: int | None) -> str:
    text = f"{path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = ""
        with contextlib.suppress(OSError):
            parent = next(p for p in path.parents if p.exists())
            free = f", {shutil.disk_usage(parent).free} bytes are free"
        size = f" (writing {wanted_bytes} bytes{free})" if wanted_bytes is not None else ""
        return f"{text}{size}; free space, keep fewer steps (Keep), or use another location"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{text}; this user needs write access to the location"
    return text

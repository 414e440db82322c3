"""A location: small durable files, bulk images, atomic publishing.

The contract (every store must hold it, `tests/store_contract.py` asks):

- Keys are relative paths with `/`; no empty, `.` or `..` components.
- `put`, `put_many`, `put_if_absent`, `write_image`, `move` are durable when they return.
- `put_if_absent` has exactly one winner; the others get `AlreadyExists`. Behind a network the
  winner may be told so, too, when an answer was lost.
- `put` is atomic: a reader sees the old bytes or the new ones.
- `move` is atomic and fails on an existing non-empty target; what it moved is gone from the source.
- `write_image` leaves nothing behind when it fails.
- Either `move` is atomic (`renames`), or there is an atomic `swap` (`SwappingStore`).
- `NotFound` is raised by what reads and moves, for what is not there and for nothing else; what is
  there and is no file is `Damaged`; every other failure of the store is `StoreFailed`.
- `delete` and `delete_tree` of what is absent are fine.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ckpt import disk
from ckpt.arguments import shown
from ckpt.errors import AlreadyExists, Damaged, Misuse, NotFound, StoreFailed
from ckpt.open_images import FileImage, ImageReader
from ckpt.windows import Source, size_of

SMALL_LIMIT_BYTES = 1 << 30
"""No small file of ours comes near this; a larger one is not read into memory."""

_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}\Z")
_ABSENT = (FileNotFoundError, NotADirectoryError)
"""No more than these: whoever asks for a loop of links, or gets no answer, must not be told that
nothing is there."""
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Of one name in a list: gone meanwhile, or a link that leads nowhere, which is no entry."""


@dataclass(frozen=True)
class Entry:
    """One name below a prefix."""

    name: str
    is_dir: bool
    size_bytes: int | None = 0
    """None: listing does not tell it."""


class Store(abc.ABC):
    """What the rest of the package asks of a location; see the module docstring."""

    location: str
    renames: bool
    """Has an atomic `move`. Without it steps are written in place and the marker publishes."""

    cut_bytes: int | None = None
    """Images are cut between chunks into objects of at most so many bytes; None: they are not."""

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
        """The bytes of a small file. Raises NotFound, and Damaged for what can be none."""

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes | NotFound | Damaged]:
        """What `read` returns or raises for each key; a failure of the store is raised."""
        found: list[bytes | NotFound | Damaged] = []
        for key in keys:
            try:
                found.append(self.read(key))
            except (NotFound, Damaged) as error:
                found.append(error)
        return found

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
        """Remove everything below a prefix; absent is fine. Links are removed, never followed."""

    def clear_temporaries(self, prefix: str) -> None:  # noqa: B027 - most stores have none
        """Remove what interrupted calls left below a prefix that nobody else writes to."""

    @abc.abstractmethod
    def move(self, source: str, target: str) -> None:
        """Rename a directory.

        Raises:
            NotFound: no such directory.
            AlreadyExists: the target is there and not empty.
            Misuse: the store cannot rename.
        """

    @abc.abstractmethod
    def write_image(self, key: str, data: Source, cuts: Sequence[int] = ()) -> None:
        """Write a large file, durable and without leaving it in the page cache if possible.

        Args:
            cuts: offsets at which a store with `cut_bytes` begins a new object.
        """

    @abc.abstractmethod
    def open_image(self, key: str) -> ImageReader:
        """Open a large file for reading. Raises NotFound, Damaged."""

    def append(self, key: str, data: bytes) -> None:
        """Add lines to a log that one writer keeps: here each addition is a file below the key."""
        self.put(f"{key}/{time.time_ns():020d}", data)

    def read_log(self, key: str) -> bytes:
        """What was appended, in order; empty when there is nothing."""
        parts = self.read_many([f"{key}/{entry.name}" for entry in self.list(key)])
        return b"".join(part for part in parts if isinstance(part, bytes))

    def walk(self, prefix: str) -> Iterator[tuple[str, int | None]]:
        """(key, size in bytes if listing tells it) of every file below a prefix, sorted."""
        for entry in self.list(prefix):
            key = f"{prefix}/{entry.name}" if prefix else entry.name
            if entry.is_dir:
                yield from self.walk(key)
            else:
                yield key, entry.size_bytes


class SwappingStore(Store):
    """A store that cannot rename, but can replace the bytes of a small file atomically."""

    renames = False

    @abc.abstractmethod
    def swap(self, key: str, old: bytes, new: bytes) -> None:
        """Replace a small file that holds `old` by `new`.

        Raises:
            NotFound: it holds something else by now, or is gone; what is there is left as it is.
        """

    @abc.abstractmethod
    def delete_tree_but(self, prefix: str, name: str) -> None:
        """Remove everything below a prefix but the file `name` right below it."""


def check_key(key: str) -> str:
    """The key itself, if it is a clean relative path.

    Raises:
        Misuse: it is not.
    """
    parts = key.split("/")
    if "\0" in key or any(part in ("", ".", "..") for part in parts) or not _has_bytes(key):
        raise Misuse(
            f"key {key!r}: wanted a relative path of text without empty, '.' or '..' components"
        )
    if any(_TEMPORARY.search(part) for part in parts):
        raise Misuse(f"key {key!r}: names that end like this are those of files in the making")
    return key


def _has_bytes(key: str) -> bool:
    try:
        os.fsencode(key)
    except UnicodeEncodeError:
        return False
    return True


def open_store(location: str | os.PathLike[str]) -> Store:
    """The store behind a path or a URL: `file://`, `s3://bucket/prefix`, `gs://bucket/prefix`.

    Raises:
        Misuse: no text, no path, a URL scheme that is not known, or no bucket.
    """
    text = absolute_location(location)
    if "://" in text:
        scheme = text.split("://", 1)[0]
        if scheme not in ("s3", "gs"):
            raise Misuse(
                f"{text}: scheme {scheme!r} is not supported; wanted a path, file://, "
                "s3://bucket/prefix or gs://bucket/prefix"
            )
        # Only here: who works on files should not pay for loading tensorstore.
        from ckpt.store_kv import open_bucket

        return open_bucket(text)
    return FileStore(text)


def absolute_location(location: Any, name: str = "location") -> str:
    """The absolute path that a path or a `file://` URL means; other URLs as they are.

    Raises:
        Misuse: no text, or no path.
    """
    text = check_location(location, name)
    if text.startswith("file://"):
        path = text.removeprefix("file://")
    elif "://" in text:
        return text
    else:
        path = os.path.expanduser(text)
    if not path:
        raise Misuse(f"{name} {text!r}: wanted a path; '.' is this directory")
    return os.path.abspath(path)


def local_path(place: Any, name: str) -> Path:
    """The absolute path that an argument names. Raises Misuse for a bucket, and for no path."""
    text = absolute_location(place, name)
    if "://" in text:
        raise Misuse(f"{name} {text!r:.200}: wanted a path on this host")
    return Path(text)


def check_location(location: Any, name: str = "location") -> str:
    """The text of a location. Raises Misuse for what is no text, or cannot be a path."""
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    if not isinstance(text, str):
        raise Misuse(f"{name}: wanted a path or URL as text, found {shown(location)}")
    if "\0" in text or not _has_bytes(text):
        raise Misuse(f"{name} {text!r:.200}: wanted text without NUL that a path can hold")
    return text


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
            with disk.translated(path, len(data)):
                disk.make_directory(path.parent)
                temporary = _temporary(path)
                try:
                    disk.write_new(temporary, data)
                    os.replace(temporary, path)
                except BaseException:
                    _unlink(temporary)
                    raise
            directories[path.parent] = None
        for directory in directories:
            with disk.translated(directory, 0):
                disk.sync_directory(directory)

    def put_if_absent(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with disk.translated(path, len(data)):
            disk.make_directory(path.parent)
            temporary = _temporary(path)
            try:
                disk.write_new(temporary, data)
                # A hard link is the one creation that is atomic, complete and exclusive at once.
                os.link(temporary, path)
            except FileExistsError:
                # Network file systems may repeat a call whose answer was lost: then it was ours.
                if os.stat(temporary).st_nlink != 2:
                    raise AlreadyExists(f"{path}: there already; left as it is") from None
            finally:
                _unlink(temporary)
            disk.sync_directory(path.parent)

    def append(self, key: str, data: bytes) -> None:
        """Add to a file that one writer keeps; whole lines survive a crash, the last may not."""
        path = self._path(key)
        with disk.translated(path, len(data)):
            disk.make_directory(path.parent)
            disk.append(path, data)

    def read_log(self, key: str) -> bytes:
        try:
            return self.read(key)
        except NotFound:
            return b""

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with disk.translated(path), open(disk.open_file(path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > SMALL_LIMIT_BYTES:
                raise Damaged(f"{path}: wanted a small file, found {size} bytes")
            return file.readall()

    def list(self, prefix: str) -> list[Entry]:
        path = self._path(prefix) if prefix else self._root
        found = []
        try:
            with disk.translated(path), os.scandir(path) as entries:
                for entry in entries:
                    if _TEMPORARY.search(entry.name):
                        continue
                    try:
                        # Links are followed: a branch may have been moved to another disk.
                        is_dir = entry.is_dir()
                        size = 0 if is_dir else entry.stat().st_size
                    except OSError as error:
                        if error.errno in _NOWHERE:
                            continue
                        raise
                    found.append(Entry(entry.name, is_dir, size))
        except NotFound:
            return []
        return sorted(found, key=lambda entry: entry.name)

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with disk.translated(path):
            try:
                os.lstat(path)
            except _ABSENT:
                return False
            return True

    def delete(self, key: str) -> None:
        path = self._path(key)
        with disk.translated(path, changes=True):
            try:
                os.unlink(path)
                disk.sync_directory(path.parent)
            except _ABSENT:
                return

    def delete_tree(self, prefix: str) -> None:
        path = self._path(prefix)
        with disk.translated(path, changes=True):
            try:
                mode = os.lstat(path).st_mode
            except _ABSENT:
                return
            if stat.S_ISDIR(mode):
                # A directory may vanish meanwhile: two attempts may clean up the same remains.
                shutil.rmtree(path, onerror=_ignore_absent)
            elif stat.S_ISLNK(mode) and not os.path.isfile(path):
                _unlink(path)  # what it leads to, if anything, is not below this prefix
            else:
                return
            with contextlib.suppress(*_ABSENT):
                disk.sync_directory(path.parent)

    def clear_temporaries(self, prefix: str) -> None:
        path = self._path(prefix)
        with disk.translated(path, changes=True):
            for directory, _, names in os.walk(path, onerror=_raise_unless_absent):
                for name in names:
                    if _TEMPORARY.search(name):
                        _unlink(Path(directory, name))

    def move(self, source: str, target: str) -> None:
        old, new = self._path(source), self._path(target)
        with disk.translated(old, changes=True):
            if not stat.S_ISDIR(os.stat(old).st_mode):
                raise NotFound(f"{old}: no directory")
            with disk.translated(new, 0):
                disk.make_directory(new.parent)
            try:
                os.rename(old, new)
            except OSError as error:
                taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
                if taken and os.path.lexists(new):
                    raise AlreadyExists(f"{new}: there already; left as it is") from None
                if error.errno == errno.ENOTDIR:
                    raise StoreFailed(f"{new}: a parent of it is a file") from error
                raise
            disk.sync_directory(new.parent)
            if new.parent != old.parent:
                disk.sync_directory(old.parent)

    def write_image(self, key: str, data: Source, cuts: Sequence[int] = ()) -> None:
        path = self._path(key)
        with disk.translated(path, size_of(data)):
            disk.make_directory(path.parent)
            # In place: the name carries the attempt, and no part names it before it is whole.
            try:
                disk.write_bulk(path, data)
                disk.sync_directory(path.parent)
            except BaseException:
                # On a full disk what was written must not stay in the way of everybody.
                with contextlib.suppress(OSError):
                    os.unlink(path)
                raise

    def open_image(self, key: str) -> ImageReader:
        path = self._path(key)
        with disk.translated(path):
            return FileImage(path)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _ignore_absent(_function: object, _path: object, info: tuple) -> None:
    if not isinstance(info[1], _ABSENT):
        raise info[1]


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, _ABSENT):
        raise error

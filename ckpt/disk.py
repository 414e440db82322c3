"""The calls that touch a disk: durable, in plain sequence, with errors that say what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np

from ckpt import threads
from ckpt.errors import CheckpointError, Damaged, NotFound, StoreFailed
from ckpt.grid import PAGE_BYTES
from ckpt.windows import Source, size_of, window_of

WINDOW_BYTES = 16 << 20
"""Bytes of one bulk write: large enough for the disk, small enough to share among threads."""

THREADS = 2
"""At a time for one file."""

DIRECT_FROM_BYTES = 1 << 20
"""Buffers of this size start at a page, so that they can be read past the page cache."""


def make_directory(directory: Path) -> None:
    """Create what is missing, and make each new name durable in its parent.

    Raises:
        StoreFailed: a link on the way leads nowhere. OSError: what is there cannot be looked at,
            and is not taken for missing.
    """
    missing: list[Path] = []
    while not _is_there(directory):
        missing.append(directory)
        directory = directory.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each)
        sync_directory(each.parent)


def _is_there(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise StoreFailed(
                f"{path}: wanted a directory, found a link to {os.readlink(path)}, where nothing "
                "is; mount what it leads to, or remove it"
            ) from None
        return False
    return True


def open_file(path: Path) -> int:
    """A descriptor to read from.

    Raises:
        Damaged: what is there is no file, nor a link to one. OSError: that cannot be told, be it
            that a link on the way leads nowhere.
    """
    try:
        # Not blocking: a pipe under this name must not hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and path.is_symlink():
            raise Damaged(
                f"{path}: wanted a file, found a link to {os.readlink(path)}, which leads nowhere; "
                "put back what it leads to, or remove it"
            ) from error
        raise
    try:
        _must_be_file(path, descriptor, Damaged)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_to_write(path: Path, flags: int) -> int:
    """A descriptor of a file of ours: nothing else under its name is opened, nor waited for.

    Raises:
        StoreFailed: there is something else. OSError.
    """
    flags |= os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            with contextlib.suppress(OSError):
                _refuse(path, os.lstat(path).st_mode, StoreFailed)
        raise
    try:
        _must_be_file(path, descriptor, StoreFailed)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _must_be_file(path: Path, descriptor: int, kind: type[CheckpointError]) -> None:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        _refuse(path, mode, kind)


def _refuse(path: Path, mode: int, kind: type[CheckpointError]) -> NoReturn:
    raise kind(f"{path}: wanted a file, found {kind_of(mode)}; remove it")


def kind_of(mode: int) -> str:
    """What the mode of something says that it is, in words."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return f"{kinds.get(stat.S_IFMT(mode), 'a device')} ({stat.filemode(mode)})"


def open_direct(descriptor: int) -> int:
    """The same file once more, to be read past the page cache; -1 where that is refused."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
        return os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError:
        return -1


def is_cached(descriptor: int, offset: int) -> bool:
    """Whether the page at `offset` is in memory already, or nobody can tell."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the read that follows tells what is really wrong
    return True


def is_page_aligned(buffer: memoryview) -> bool:
    """Whether a buffer starts where direct I/O wants it."""
    return np.frombuffer(buffer, np.uint8).ctypes.data % PAGE_BYTES == 0


def write_new(path: Path, data: bytes) -> None:
    """A file that was not there, durable but for its name."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file; not made durable."""
    descriptor = _open_to_write(path, os.O_APPEND)
    try:
        _write_all(descriptor, data)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bulk(path: Path, data: Source) -> None:
    """O_DIRECT from page-aligned memory where the file system has it, else buffered windows."""
    aligned = not isinstance(data, memoryview) or is_page_aligned(data)
    if size_of(data) > 0 and aligned:
        try:
            _write_whole(path, data, direct=True)
            return
        except OSError as error:
            # Refused when it is opened, or only by the first write, or after a short one.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    _write_whole(path, data, direct=False)


def _write_whole(path: Path, data: Source, *, direct: bool) -> None:
    size_bytes = size_of(data)
    descriptor = _open_to_write(path, os.O_TRUNC | (os.O_DIRECT if direct else 0))
    try:
        if size_bytes:
            with contextlib.suppress(OSError):
                os.posix_fallocate(descriptor, 0, size_bytes)
        whole = size_bytes - size_bytes % PAGE_BYTES if direct else size_bytes
        _write_windows(descriptor, data, whole, direct=direct)
        if whole < size_bytes:
            # The unaligned tail cannot go out with O_DIRECT.
            rest = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                _write_range(rest, window_of(data, whole, size_bytes), whole)
                os.fsync(rest)
            finally:
                os.close(rest)
        os.fsync(descriptor)
        found = os.fstat(descriptor).st_size
        if found != size_bytes:
            raise OSError(errno.EIO, f"wrote {size_bytes} bytes, the file has {found}")
    finally:
        os.close(descriptor)


def _write_windows(descriptor: int, data: Source, stop: int, *, direct: bool) -> None:
    def write(start: int) -> None:
        window = window_of(data, start, min(start + WINDOW_BYTES, stop))
        _write_range(descriptor, window, start)

    starts = range(0, stop, WINDOW_BYTES)
    if direct:
        threads.each(write, starts, THREADS)
        return
    for start in starts:
        write(start)
        # Keep writeback close behind, so that it does not pile up and stall the train step.
        os.fdatasync(descriptor)


def _write_range(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextlib.contextmanager
def translated(
    path: Path, wanted_bytes: int | None = None, *, changes: bool = False
) -> Iterator[None]:
    """OSError to the errors of this package, with the path and what can be done.

    `wanted_bytes` is the size of what is being written, None for what reads, moves or deletes;
    `changes` tells the last two from the first.
    """
    writing = wanted_bytes is not None
    try:
        yield
    except FileNotFoundError as error:
        if writing:
            text = f"{path}: its directory vanished while it was written"
            raise StoreFailed(f"{text}; does another process clean up here?") from error
        raise NotFound(f"{error.filename or path}: not there") from error
    except NotADirectoryError as error:
        text = f"{path}: a parent of it is a file, wanted a directory"
        raise (StoreFailed if writing else NotFound)(text) from error
    except OSError as error:
        access = "write" if writing or changes else "read"
        raise StoreFailed(_explain(path, error, wanted_bytes, access)) from error


def _explain(path: Path, error: OSError, wanted_bytes: int | None, access: str) -> str:
    text = f"{path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = ""
        with contextlib.suppress(OSError):
            parent = next(p for p in path.parents if p.exists())
            free = f", {shutil.disk_usage(parent).free} bytes are free"
        size = f" (writing {wanted_bytes} bytes{free})" if wanted_bytes is not None else ""
        return f"{text}{size}; free space, keep fewer steps (Keep), or use another location"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{text}; this user needs {access} access to the location"
    if error.errno == errno.EFBIG:
        return (
            f"{text}; files of this process may not be that large: raise its limit (ulimit -f), or "
            "that of the file system"
        )
    return text

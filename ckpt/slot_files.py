"""The files of an arena: slots as they lie in its directory, one image each, and their locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt import disk
from ckpt.errors import Damaged, StoreFailed, Unsupported
from ckpt.grid import PAGE_BYTES, round_up
from ckpt.image import Header, decode
from ckpt.wording import counted

_SLOT_NAME = re.compile(r"slot-(0|[1-9][0-9]{0,3})")
_STEP_BYTES = 32 * 2**20  # made ready at a time: a close waits no longer than for this
_GROW_BYTES = 2**20  # slots grow in these steps, with that much to spare for a longer table


class NoRoom(StoreFailed):
    """The place is too small for a slot."""

    def __init__(self, text: str, needed_bytes: int) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True)
class StoredImage:
    """A slot that holds an image: header page and table are intact, chunks were not looked at."""

    slot: int
    path: Path
    header: Header


class SlotFiles:
    """The slot files in a directory; who may use which is for their owner to know."""

    def __init__(self, directory: Path, directory_fd: int) -> None:
        self.directory = directory
        self._directory_fd = directory_fd
        self._locks: dict[int, int] = {}  # descriptors

    def images(self) -> list[StoredImage]:
        """The slots whose header and table are intact. Raises `StoreFailed`."""
        found = []
        for number in slot_numbers(self._directory_fd):
            path = self.path(number)
            with self._opened(number, os.O_RDONLY) as fd:
                header = header_in(fd, str(path))
            if header is not None:
                found.append(StoredImage(number, path, header))
        return found

    def path(self, number: int) -> Path:
        return self.directory / slot_name(number)

    def sizes(self, number: int) -> tuple[int, int]:
        """How long a slot is, and how many bytes it occupies; 0 when there is none."""
        try:
            name = slot_name(number)
            found = os.stat(name, dir_fd=self._directory_fd, follow_symlinks=False)
        except FileNotFoundError:
            return 0, 0
        return found.st_size, found.st_blocks * 512

    def free_bytes(self) -> int:
        """What is free at the place."""
        place = os.fstatvfs(self._directory_fd)
        return place.f_bavail * place.f_frsize

    def lock(self, number: int) -> bool:
        """For filling; False while another process reads the slot. The file is made if absent."""
        if number not in self._locks:
            # Not that of the mapping, which a forked child keeps, and the lock with it.
            self._locks[number] = self._open(number, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._locks[number], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, number: int) -> None:
        """From now on others may read it."""
        if (fd := self._locks.get(number)) is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def delete(self, number: int) -> None:
        """Delete a slot that is locked."""
        os.unlink(slot_name(number), dir_fd=self._directory_fd)
        os.close(self._locks.pop(number))

    def close(self) -> None:
        """Let go of all locks. In a forked child: without touching those of its parent."""
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()

    def map_as_is(self, number: int) -> mmap.mmap:
        """A slot that is there. Raises `StoreFailed`, OSError, ValueError."""
        with self._opened(number, os.O_RDWR) as fd:
            return mmap.mmap(fd, os.fstat(fd).st_size)

    def map_grown(self, number: int, nbytes: int, go_on: Callable[[], None]) -> mmap.mmap:
        """A slot of at least `nbytes`, made or grown if need be.

        `go_on` is called between pieces of the work, and raises to end it. Raises `NoRoom`,
        `StoreFailed`.
        """
        with self._opened(number, os.O_RDWR | os.O_CREAT) as fd:
            size = os.fstat(fd).st_size
            if size < nbytes:
                grown = round_up(nbytes + _GROW_BYTES, _GROW_BYTES)
                self._allocate(fd, size, grown, go_on)
                size = grown
            try:
                return mmap.mmap(fd, size)
            except (OSError, ValueError) as error:
                raise StoreFailed(
                    f"{self.path(number)}: cannot map its {size} bytes: {error}; give the process "
                    "more memory, or use fewer slots"
                ) from error

    def _allocate(self, fd: int, size: int, grown: int, go_on: Callable[[], None]) -> None:
        """Give the file all its blocks now: running out of space later would be a SIGBUS."""
        try:
            needed_bytes = grown - os.fstat(fd).st_blocks * 512
            free_bytes = self.free_bytes()
        except OSError as error:
            raise StoreFailed(f"{self.directory}: cannot look at a slot: {error}") from error
        cause: OSError | None = None
        if needed_bytes <= free_bytes:
            try:
                for at in range(0, grown, _STEP_BYTES):
                    go_on()
                    os.posix_fallocate(fd, at, min(_STEP_BYTES, grown - at))
                return
            except OSError as error:
                os.ftruncate(fd, size)
                if error.errno == errno.EFBIG:
                    raise StoreFailed(
                        f"{self.directory}: cannot grow a slot to {grown} bytes: {error}; files of "
                        "this process may not be that large: raise its limit (ulimit -f), or that "
                        "of the file system"
                    ) from error
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreFailed(f"{self.directory}: cannot grow a slot: {error}") from error
                cause = error
        there = counted(sum(self.sizes(k)[0] > 0 for k in slot_numbers(self._directory_fd)), "slot")
        raise NoRoom(
            f"{self.directory}: a slot of {grown} bytes needs {needed_bytes} bytes more, "
            f"{free_bytes} are free there, beside {there}; give the arena a larger place, "
            "enlarge this one (a container's --shm-size), or use fewer slots",
            needed_bytes,
        ) from cause

    def _open(self, number: int, flags: int) -> int:
        try:
            return open_file(self.directory, self._directory_fd, slot_name(number), flags)
        except FileNotFoundError as error:
            raise StoreFailed(f"{self.path(number)}: cannot open this slot: {error}") from error

    @contextlib.contextmanager
    def _opened(self, number: int, flags: int) -> Iterator[int]:
        fd = self._open(number, flags)
        try:
            yield fd
        finally:
            os.close(fd)


def open_file(directory: Path, directory_fd: int, name: str, flags: int) -> int:
    """A descriptor of a file of an arena; nothing else of its name is opened, nor waited for.

    Raises:
        StoreFailed: there is something else, or it cannot be opened. FileNotFoundError.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    path = directory / name
    try:
        found = os.open(name, flags, 0o600, dir_fd=directory_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            _must_be_file(path, os.stat(name, dir_fd=directory_fd, follow_symlinks=False))
        raise StoreFailed(f"{path}: cannot open this file of an arena: {error}") from error
    try:
        _must_be_file(path, os.fstat(found))
    except BaseException:
        os.close(found)
        raise
    return found


def _must_be_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise StoreFailed(
            f"{path}: wanted a file of an arena, found {disk.kind_of(found.st_mode)}; remove it, "
            "or give the arena another directory"
        )


def prefault(mapping: mmap.mmap, go_on: Callable[[], None]) -> None:
    """Map every page for writing now, without changing a byte: copies then meet warm pages.

    NumPy releases the GIL for it; `madvise` would keep all threads waiting for seconds.
    """
    touch = np.frombuffer(mapping, np.uint8)[::PAGE_BYTES]
    pages = _STEP_BYTES // PAGE_BYTES
    for first in range(0, len(touch), pages):
        go_on()
        some = touch[first : first + pages]
        np.bitwise_or(some, 0, out=some)


def header_in(fd: int, where: str) -> Header | None:
    """The header of the image in an open slot; None when there is none."""
    try:
        return decode(
            lambda offset, length: os.pread(fd, length, offset), os.fstat(fd).st_size, where
        )
    except (Damaged, Unsupported):
        return None


def age_of(header: Header) -> tuple[int, int]:
    """(time_ns, step) of an image, which order the snapshots of a run; 0 where it says neither."""
    time_ns, step = (header.meta.get(name) for name in ("time_ns", "step"))
    return time_ns if isinstance(time_ns, int) else 0, step if isinstance(step, int) else 0


def slot_name(number: int) -> str:
    return f"slot-{number}"


def slot_numbers(directory_fd: int) -> list[int]:
    matches = map(_SLOT_NAME.fullmatch, os.listdir(directory_fd))
    return sorted(int(match[1]) for match in matches if match)

"""The arena: a private directory of slot files, mapped into memory, in which snapshots lie.

::

    <directory>/        0700, ours
        lock            flock held by the live owner; its text says who that is
        slot-<k>        one image each: preallocated, mapped, prefaulted, reused for ever

What protects a snapshot is the slot file, not a process: after a crash a later owner can find it by
`valid_images` (no manager adopts it yet: it goes on from the newest step). The kernel drops the
lock when its owner dies, so stale means that the lock can be had; no process ids are compared.
`multiprocessing.shared_memory` is not used because its blocks vanish with their creator.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import socket
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ckpt.errors import Damaged, InUse, Misuse, StoreFailed, Unsupported
from ckpt.grid import PAGE_BYTES, round_up
from ckpt.image import Header, decode
from ckpt.wording import counted

_SHARED_MEMORY = Path("/dev/shm")
_SLOT_NAME = re.compile(r"slot-(0|[1-9][0-9]{0,3})")
_LOCK_NAME = "lock"
_FORMAT = "lastgood arena 1"
_GROW_BYTES = 2**20  # slots grow in these steps, with that much to spare for a longer table
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class StoredImage:
    """A slot that holds an image: header page and table are intact, chunks were not looked at."""

    slot: int
    path: Path
    header: Header


@dataclass(frozen=True)
class StaleArena:
    """An arena without a live owner. `size_bytes` is what its slots occupy."""

    directory: Path
    owner: dict[str, Any]
    size_bytes: int


class Slot:
    """A slot in the hands of one holder, until `release`; its bytes stay until the next claim."""

    def __init__(self, arena: Arena, number: int, mapping: mmap.mmap) -> None:
        self._arena = arena
        self._released = False
        self.number = number
        self.path = arena.directory / _slot_name(number)
        self.buffer = memoryview(mapping)
        """Writable, page-aligned; at least as long as was claimed."""

    def release(self) -> None:
        """Hand the slot back. The buffer must not be used afterwards. Idempotent."""
        if not self._released:
            self._released = True
            self.buffer = memoryview(b"")
            self._arena._take_back(self.number)


class Arena:
    """The slots of one process of a run on this host, owned by holding the lock.

    `owner` is a JSON object that says who this is (`run`, ...); pid, host and start time are added.
    Thread-safe. A forked child does not keep the lock.

    Raises `InUse`, naming the owner, when a live one holds the directory; `StoreFailed` when the
    directory cannot be made or is not private to this user.
    """

    def __init__(self, directory: str | Path, *, owner: dict[str, Any], slots: int = 2) -> None:
        if not 1 <= slots <= 1000:
            raise Misuse(f"slots: wanted 1 to 1000, found {slots}")
        self.directory = Path(directory).absolute()
        self.slots = slots
        """How many slots `claim` uses. With 1, a crash while saving leaves no snapshot at all."""
        self._free = threading.Condition()
        self._held: set[int] = set()
        self._order: list[int] = []  # slots by their last claim, oldest first
        self._maps: dict[int, mmap.mmap] = {}
        self._closed = False
        self._lock_fd, self._directory_fd = _own(self.directory, _owner_text(owner))
        _live.add(self)
        try:
            full = {image.slot for image in self.valid_images()}
        except BaseException:
            self._let_go()
            raise
        self._order = sorted(range(slots), key=lambda k: (k in full, k))

    def claim(self, nbytes: int, timeout_s: float | None = None) -> Slot:
        """A free slot of at least `nbytes`, grown if need be; waits while all are held.

        Slots without an image are given first, then the one claimed longest ago. The image in it is
        gone once the holder starts to fill it. Raises `StoreFailed` when the place is too small,
        or no slot came free within `timeout_s`.
        """
        with self._free:
            self._must_be_open()
            usable = self._free.wait_for(lambda: self._closed or self._next(), timeout_s)
            self._must_be_open()
            if not usable:
                raise StoreFailed(
                    f"{self.directory}: none of {counted(self.slots, 'slot')} came free "
                    f"within {timeout_s} s: "
                    "earlier snapshots are still being written; give more slots, or save less often"
                )
            number = self._next()[0]
            self._held.add(number)
            self._drop_surplus()
        try:
            mapping = self._mapped(number, nbytes)
        except BaseException:
            self._take_back(number)
            raise
        with self._free:
            self._order.remove(number)
            self._order.append(number)
        return Slot(self, number, mapping)

    def adopt(self, number: int) -> Slot:
        """Hold the slot of a `StoredImage` as it is, so that it is not claimed for something else.

        Adopt before the first claim, which may take any slot that is not held. Raises `Misuse`
        when it is held already, or gone.
        """
        with self._free:
            self._must_be_open()
            if number in self._held:
                raise Misuse(f"{self.directory}: slot {number} is held already")
            self._held.add(number)
        try:
            with self._opened(number, os.O_RDWR) as fd:
                return Slot(self, number, mmap.mmap(fd, os.fstat(fd).st_size))
        except (StoreFailed, OSError, ValueError) as error:
            self._take_back(number)
            raise Misuse(f"{self.directory}: slot {number} has no image: {error}") from error

    def valid_images(self) -> list[StoredImage]:
        """Slots whose header and table are intact, by slot number.

        Whether the chunks are, too, is for `ckpt.image.verify_chunk` to say: after a kill they are;
        after a crash of the host, with an arena on disk, they may not be.
        """
        self._must_be_open()
        found = []
        for number in _slot_numbers(self._directory_fd):
            path = self.directory / _slot_name(number)
            with self._opened(number, os.O_RDONLY) as fd, contextlib.suppress(Damaged, Unsupported):

                def read(offset: int, length: int, fd: int = fd) -> bytes:
                    return os.pread(fd, length, offset)

                header = decode(read, os.fstat(fd).st_size, str(path))
                found.append(StoredImage(number, path, header))
        return found

    def close(self, *, remove: bool) -> None:
        """Let go of the lock; with `remove`, delete slots and directory first. Idempotent.

        Buffers of slots still held stay mapped until they are dropped.
        """
        with self._free:
            if self._closed:
                return
            self._closed = True
            self._free.notify_all()
        self._maps.clear()
        if remove:
            _remove(self.directory, self._directory_fd)
        self._let_go()

    def _let_go(self) -> None:
        _live.discard(self)
        os.close(self._directory_fd)
        os.close(self._lock_fd)

    def _must_be_open(self) -> None:
        if self._closed:
            raise Misuse(f"{self.directory}: the arena is closed")

    def _next(self) -> list[int]:
        return [k for k in self._order if k not in self._held]

    def _take_back(self, number: int) -> None:
        with self._free:
            self._held.discard(number)
            if not self._closed:
                self._drop_surplus()
            self._free.notify_all()

    def _drop_surplus(self) -> None:
        """Delete slots left by an owner that had more of them, unless somebody adopted them."""
        for number in _slot_numbers(self._directory_fd):
            if number >= self.slots and number not in self._held:
                os.unlink(_slot_name(number), dir_fd=self._directory_fd)

    @contextlib.contextmanager
    def _opened(self, number: int, flags: int) -> Iterator[int]:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(_slot_name(number), flags, 0o600, dir_fd=self._directory_fd)
        except OSError as error:
            path = self.directory / _slot_name(number)
            raise StoreFailed(f"{path}: cannot open this slot: {error}") from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _mapped(self, number: int, nbytes: int) -> mmap.mmap:
        mapping = self._maps.get(number)
        if mapping is not None and len(mapping) >= nbytes:
            return mapping
        with self._opened(number, os.O_RDWR | os.O_CREAT) as fd:
            size = os.fstat(fd).st_size
            if size < nbytes:
                grown = round_up(nbytes + _GROW_BYTES, _GROW_BYTES)
                self._allocate(fd, size, grown)
                size = grown
            mapping = mmap.mmap(fd, size)
        _prefault(mapping)
        self._maps[number] = mapping
        return mapping

    def _allocate(self, fd: int, size: int, grown: int) -> None:
        """Give the file all its blocks now: running out of space later would be a SIGBUS."""
        place = os.fstatvfs(fd)
        free_bytes = place.f_bavail * place.f_frsize
        needed_bytes = grown - os.fstat(fd).st_blocks * 512
        cause: OSError | None = None
        if needed_bytes <= free_bytes:
            try:
                os.posix_fallocate(fd, 0, grown)
                return
            except OSError as error:
                os.ftruncate(fd, size)
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise StoreFailed(f"{self.directory}: cannot grow a slot: {error}") from error
                cause = error
        raise StoreFailed(
            f"{self.directory}: a slot of {grown} bytes needs {needed_bytes} bytes more, "
            f"{free_bytes} are free there, for {counted(self.slots, 'slot')}; give the arena "
            "a larger place, enlarge this one (a container's --shm-size), or use fewer slots"
        ) from cause


_live: weakref.WeakSet[Arena] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A fork shares its parent's lock, which would outlive the parent: close the child's copy."""
    for arena in list(_live):
        arena._let_go()
        arena._closed = True


os.register_at_fork(after_in_child=_forget_in_child)


def default_directory(location: str, process: int) -> Path:
    """Where the arena of a run at `location` lies: the same for every attempt on this host.

    In shared memory, else in the system's temporary directory. Makes this user's own directory
    there. Raises `StoreFailed` when that is not private.
    """
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK)
    base = _SHARED_MEMORY if usable else Path(tempfile.gettempdir())
    mine = base / f"lastgood-{os.getuid()}"
    _make_private(mine)
    name = location if "://" in location else os.path.realpath(location)
    return mine / f"{xxhash.xxh3_64_hexdigest(os.fsencode(name))}-p{process}"


def stale_arenas(parent: str | Path) -> list[StaleArena]:
    """Arenas at `parent` or directly in it that no live process owns; changes nothing."""
    return list(_each_stale(Path(parent), remove=False))


def remove_stale(parent: str | Path) -> list[StaleArena]:
    """Delete the arenas that `stale_arenas` finds, and the snapshots in them; returns them.

    Only an arena's own files are deleted, and its directory when that is empty then.
    """
    return list(_each_stale(Path(parent), remove=True))


def _each_stale(parent: Path, *, remove: bool) -> Iterator[StaleArena]:
    for directory in (parent, *sorted(parent.glob("*"))):
        try:
            directory_fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            lock_fd = os.open(_LOCK_NAME, _FLAGS, dir_fd=directory_fd)
        except OSError:
            os.close(directory_fd)
            continue
        try:
            owner = _read_owner(lock_fd)
            ours = os.fstat(directory_fd).st_uid == os.geteuid() and owner.get("format") == _FORMAT
            if ours and _try_lock(lock_fd):
                numbers = _slot_numbers(directory_fd)
                blocks = [
                    os.stat(_slot_name(k), dir_fd=directory_fd, follow_symlinks=False).st_blocks
                    for k in numbers
                ]
                if remove:
                    _remove(directory, directory_fd)
                yield StaleArena(directory, owner, 512 * sum(blocks))
        finally:
            os.close(lock_fd)
            os.close(directory_fd)


def _own(directory: Path, owner: str) -> tuple[int, int]:
    """Make the directory and take its lock; returns the descriptors of lock and directory."""
    error = None
    for _ in range(100):  # an owner that leaves may remove it between any two of these calls
        try:
            _make_private(directory)
            directory_fd = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as absent:
            error = absent
            continue
        try:
            lock_fd = os.open(_LOCK_NAME, _FLAGS | os.O_CREAT, 0o600, dir_fd=directory_fd)
        except OSError as failed:
            os.close(directory_fd)
            if not isinstance(failed, FileNotFoundError):
                raise StoreFailed(f"{directory}: cannot open its lock: {failed}") from failed
            error = failed
            continue
        if not _try_lock(lock_fd):
            text = _describe(_read_owner(lock_fd))
            os.close(lock_fd)
            os.close(directory_fd)
            if any(arena.directory == directory for arena in list(_live)):
                raise InUse(
                    f"{directory} is held by another manager of this run in this process: {text}; "
                    "close() that one first, or use it (a notebook cell that ran twice made two)"
                )
            raise InUse(
                f"{directory} is held by a live manager of this run: {text}; stop that one first, "
                "or give this run another location"
            )
        if _is_current(lock_fd, directory, directory_fd):
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, owner.encode(), 0)
            return lock_fd, directory_fd
        os.close(lock_fd)
        os.close(directory_fd)
    raise StoreFailed(f"{directory}: cannot be made, or vanishes each time: {error}") from error


def _is_current(lock_fd: int, directory: Path, directory_fd: int) -> bool:
    """Whether the lock that we hold is still the one under this path, not one just removed."""
    try:
        lock, at = os.stat(_LOCK_NAME, dir_fd=directory_fd), os.stat(directory)
    except FileNotFoundError:
        return False
    return os.path.samestat(lock, os.fstat(lock_fd)) and os.path.samestat(
        at, os.fstat(directory_fd)
    )


def _make_private(directory: Path) -> None:
    """Make it, or check that it is ours alone; `FileNotFoundError` when it was just removed."""
    try:
        for ancestor in (*reversed(directory.parents), directory):
            with contextlib.suppress(FileExistsError):
                if not ancestor.exists():
                    ancestor.mkdir(mode=0o700)
        found = os.lstat(directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreFailed(f"{directory}: cannot make this directory: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise StoreFailed(
            f"{directory}: wanted a directory of user {os.geteuid()} with mode 0700, found "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}; remove it or give another"
        )


def _remove(directory: Path, directory_fd: int) -> None:
    """Delete the arena's files, the lock last, while the lock is held."""
    for name in (*map(_slot_name, _slot_numbers(directory_fd)), _LOCK_NAME):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory_fd)
    with contextlib.suppress(OSError):  # something foreign lies in it: not ours to delete
        directory.rmdir()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner_text(owner: dict[str, Any]) -> str:
    known = {"format": _FORMAT, "pid": os.getpid(), "host": socket.gethostname()}
    return json.dumps({**known, "since_ns": time.time_ns(), **owner})


def _read_owner(fd: int) -> dict[str, Any]:
    """What the lock says about its owner; empty when it says nothing (yet)."""
    for _ in range(20):
        with contextlib.suppress(ValueError):
            owner = json.loads(os.pread(fd, 65536, 0))
            if isinstance(owner, dict):
                return owner
        time.sleep(0.005)  # its owner has the lock and is about to write this
    return {}


def _describe(owner: dict[str, Any]) -> str:
    since_ns = owner.get("since_ns")
    since = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since_ns / 1e9))
        if isinstance(since_ns, int)
        else "?"
    )
    pid, host, run = (owner.get(key, "?") for key in ("pid", "host", "run"))
    return f"pid {pid} on host {host}, run {run}, since {since}"


def _slot_name(number: int) -> str:
    return f"slot-{number}"


def _slot_numbers(directory_fd: int) -> list[int]:
    matches = map(_SLOT_NAME.fullmatch, os.listdir(directory_fd))
    return sorted(int(match[1]) for match in matches if match)


def _prefault(mapping: mmap.mmap) -> None:
    """Map every page for writing now, without changing a byte, so that copies meet warm pages.

    NumPy releases the GIL for it; `madvise` would keep all threads waiting for seconds.
    """
    touch = np.frombuffer(mapping, np.uint8)[::PAGE_BYTES]
    np.bitwise_or(touch, 0, out=touch)

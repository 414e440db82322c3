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
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.errors import Damaged, Misuse, StoreFailed, Unsupported
from ckpt.grid import PAGE_BYTES, round_up
from ckpt.image import Header, decode
from ckpt.owning import own, remove_files, slot_name, slot_numbers
from ckpt.wording import counted

_STEP_BYTES = 32 * 2**20  # made ready at a time: a close waits no longer than for this
_GROW_BYTES = 2**20  # slots grow in these steps, with that much to spare for a longer table


@dataclass(frozen=True)
class StoredImage:
    """A slot that holds an image: header page and table are intact, chunks were not looked at."""

    slot: int
    path: Path
    header: Header


class Slot:
    """A slot in the hands of one holder, until `release`; its bytes stay until the next claim."""

    def __init__(self, arena: Arena, number: int, mapping: mmap.mmap) -> None:
        self._arena = arena
        self._released = False
        self.number = number
        self.path = arena.directory / slot_name(number)
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
        self._ended = False
        self._preparing: threading.Thread | None = None
        self._warming: int | None = None  # the slot that it is at: a claim waits for it
        self._remove_at_end: bool | None = None
        is_here = any(arena.directory == self.directory for arena in list(_live))
        self._lock_fd, self._directory_fd = own(self.directory, owner, is_here=is_here)
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
            self._free.wait_for(self._has_next, timeout_s)
            # A slot that is only being warmed is about to come: to wait for it is no time-out.
            self._free.wait_for(lambda: self._warming is None or self._has_next())
            self._must_be_open()
            if not self._has_next():
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
            with self._free:
                self._order.remove(number)
                self._order.append(number)
            self.prepare(nbytes)
        except BaseException:
            self._take_back(number)
            raise
        return Slot(self, number, mapping)

    def prepare(self, nbytes: int) -> None:
        """Grow and prefault the free slots in the background: a claim of `nbytes` finds them warm.

        Where there is no room nothing is said; the claim that needs it will.
        """
        with self._free:
            self._must_be_open()
            if self._preparing is None and any(self._is_cold(k, nbytes) for k in self._next()):
                self._preparing = threading.Thread(
                    target=self._prepare, args=(nbytes,), name="ckpt-prefault"
                )
                try:
                    self._preparing.start()
                except RuntimeError:  # the interpreter ends, or has all the threads it may have
                    self._preparing = None

    def _prepare(self, nbytes: int) -> None:
        try:
            while True:
                with self._free:
                    cold = [k for k in self._next() if self._is_cold(k, nbytes)]
                    if self._closed or not cold:
                        break
                    self._warming = cold[0]
                try:
                    self._mapped(cold[0], nbytes)
                except (StoreFailed, Misuse):
                    break
                finally:
                    with self._free:
                        self._warming = None
                        self._free.notify_all()
        finally:
            with self._free:
                self._preparing = None
                remove = self._remove_at_end
            if remove is not None:
                self._end(remove=remove)

    def _is_cold(self, number: int, nbytes: int) -> bool:
        mapping = self._maps.get(number)
        return mapping is None or len(mapping) < nbytes

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
        for number in slot_numbers(self._directory_fd):
            path = self.directory / slot_name(number)
            with self._opened(number, os.O_RDONLY) as fd, contextlib.suppress(Damaged, Unsupported):

                def read(offset: int, length: int, fd: int = fd) -> bytes:
                    return os.pread(fd, length, offset)

                header = decode(read, os.fstat(fd).st_size, str(path))
                found.append(StoredImage(number, path, header))
        return found

    def close(self, *, remove: bool) -> None:
        """Let go of the lock; with `remove`, delete slots and directory first. Idempotent.

        Buffers of slots still held stay mapped until they are dropped. When it is interrupted, the
        lock is free all the same, or another call goes on.
        """
        with self._free:
            if self._ended:
                return
            self._closed = True
            self._free.notify_all()
            preparing = self._preparing
            if preparing is threading.current_thread():  # a finalizer, run in passing
                self._remove_at_end = remove
                return
        if preparing is not None:
            preparing.join()
        self._end(remove=remove)

    def _end(self, *, remove: bool) -> None:
        self._maps.clear()
        try:
            if remove:
                remove_files(self.directory, self._directory_fd)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if not self._ended:
            self._ended = True
            _live.discard(self)
            os.close(self._directory_fd)
            os.close(self._lock_fd)

    def _must_be_open(self) -> None:
        if self._closed:
            raise Misuse(f"{self.directory}: the arena is closed")

    def _has_next(self) -> bool:
        return self._closed or self._next()[:1] not in ([], [self._warming])

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
        for number in slot_numbers(self._directory_fd):
            if number >= self.slots and number not in self._held:
                os.unlink(slot_name(number), dir_fd=self._directory_fd)

    @contextlib.contextmanager
    def _opened(self, number: int, flags: int) -> Iterator[int]:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(slot_name(number), flags, 0o600, dir_fd=self._directory_fd)
        except OSError as error:
            path = self.directory / slot_name(number)
            raise StoreFailed(f"{path}: cannot open this slot: {error}") from error
        try:
            yield fd
        finally:
            os.close(fd)

    def _mapped(self, number: int, nbytes: int) -> mmap.mmap:
        if not self._is_cold(number, nbytes):
            return self._maps[number]
        with self._opened(number, os.O_RDWR | os.O_CREAT) as fd:
            size = os.fstat(fd).st_size
            if size < nbytes:
                grown = round_up(nbytes + _GROW_BYTES, _GROW_BYTES)
                self._allocate(fd, size, grown)
                size = grown
            try:
                mapping = mmap.mmap(fd, size)
            except (OSError, ValueError) as error:
                path = self.directory / slot_name(number)
                raise StoreFailed(
                    f"{path}: cannot map its {size} bytes: {error}; give the process more memory, "
                    "or use fewer slots"
                ) from error
        self._prefault(mapping)
        self._maps[number] = mapping
        return mapping

    def _allocate(self, fd: int, size: int, grown: int) -> None:
        """Give the file all its blocks now: running out of space later would be a SIGBUS."""
        try:
            place = os.fstatvfs(fd)
            needed_bytes = grown - os.fstat(fd).st_blocks * 512
        except OSError as error:
            raise StoreFailed(f"{self.directory}: cannot look at a slot: {error}") from error
        free_bytes = place.f_bavail * place.f_frsize
        cause: OSError | None = None
        if needed_bytes <= free_bytes:
            try:
                for at in range(0, grown, _STEP_BYTES):
                    self._must_be_open()
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
        raise StoreFailed(
            f"{self.directory}: a slot of {grown} bytes needs {needed_bytes} bytes more, "
            f"{free_bytes} are free there, for {counted(self.slots, 'slot')}; give the arena "
            "a larger place, enlarge this one (a container's --shm-size), or use fewer slots"
        ) from cause

    def _prefault(self, mapping: mmap.mmap) -> None:
        """Map every page for writing now, without changing a byte: copies then meet warm pages.

        NumPy releases the GIL for it; `madvise` would keep all threads waiting for seconds.
        """
        touch = np.frombuffer(mapping, np.uint8)[::PAGE_BYTES]
        pages = _STEP_BYTES // PAGE_BYTES
        for first in range(0, len(touch), pages):
            self._must_be_open()
            some = touch[first : first + pages]
            np.bitwise_or(some, 0, out=some)


_live: weakref.WeakSet[Arena] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A fork shares its parent's lock, which would outlive the parent: close the child's copy."""
    for arena in list(_live):
        arena._let_go()
        arena._closed = True
        arena._free = threading.Condition()  # a thread that is not here may have held the old one
        arena._preparing = arena._warming = None


os.register_at_fork(after_in_child=_forget_in_child)

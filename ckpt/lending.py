"""Pages of a slot lent to arrays: a restore from memory copies nothing.

A loan maps the slot privately: who writes to a lent array gets a copy of the page, and the image in
the slot stays as it is. The other way round the slot must not be filled anew while a page of it is
lent: a loan holds the shared lock of a reader. It ends when the last array is gone, which is soon
where the train step donates its state; what is still there when the slot's turn comes is copied
under the arrays, which notice nothing (`settle`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import final

import numpy as np

from ckpt.errors import StoreFailed
from ckpt.grid import PAGE_BYTES, round_up

LEND_FROM_BYTES = 64 * 1024
"""Smaller chunks share their pages with others."""
_POPULATE_WRITE = 23  # of madvise; since Linux 5.14
_STEP_BYTES = 32 * 2**20  # copied at a time: a close waits no longer than for this
_FAILED = ctypes.c_void_p(-1).value


@final
class Loan:
    """The image in one slot, lent piece by piece. Thread-safe."""

    def __init__(self, lock: _Lock, at: int, nbytes: int) -> None:
        self._lock, self._at, self._nbytes = lock, at, nbytes
        # All arrays refer to this one. Not `mmap.mmap`, which cannot be told what to copy when.
        self._pages: ctypes.Array[ctypes.c_ubyte] | None
        self._pages = (ctypes.c_ubyte * nbytes).from_address(at)
        self._lent: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}  # by offset
        self._turn = threading.Lock()
        weakref.finalize(self._pages, _end, lock, at, nbytes).atexit = False

    @staticmethod
    def of(locked: int, nbytes: int) -> Loan | None:
        """Of a slot that is open under a shared lock; None where the system cannot do it."""
        if not sys.platform.startswith("linux"):
            return None
        # A mapping keeps the lock of what it was made from, and a forked child the mapping.
        try:
            other = os.open(f"/proc/self/fd/{locked}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        access = mmap.PROT_READ | mmap.PROT_WRITE
        at = _libc.mmap(None, nbytes, access, mmap.MAP_PRIVATE, other, 0)
        os.close(other)
        if at in (None, _FAILED):
            return None
        # The header page is lent to nobody: it tells whether pages can be copied on demand.
        if _libc.madvise(at, PAGE_BYTES, _POPULATE_WRITE) != 0:
            _libc.munmap(at, nbytes)
            return None
        return Loan(_Lock(os.dup(locked)), at, nbytes)

    def lend(self, offset: int, nbytes: int) -> np.ndarray | None:
        """u8[nbytes] at this offset, writable; None where pages would be shared, or are lent."""
        with self._turn:
            inside = 0 < offset <= offset + nbytes <= self._nbytes
            if self._pages is None or not inside or offset % PAGE_BYTES or nbytes < LEND_FROM_BYTES:
                return None
            if offset in self._lent:  # two arrays in the same pages would see each other's writes
                return None
            lent = np.frombuffer(memoryview(self._pages), np.uint8, nbytes, offset)
            self._lent[offset] = (weakref.ref(lent), nbytes)
            return lent

    def close(self) -> None:
        """No more is lent: it is over once the arrays are gone."""
        with self._turn:
            self._pages = None

    @property
    def is_over(self) -> bool:
        """Whether the slot is free of this loan."""
        return self._lock.fd < 0

    def settle(self, go_on: Callable[[], None]) -> None:
        """Give the arrays that are left pages of their own, and the slot back.

        `go_on` is called between pieces of the work, and raises to end it. Raises `StoreFailed`
        when there is no memory for it.
        """
        self.close()
        for offset, (array, nbytes) in self._lent.items():
            end = offset + round_up(nbytes, PAGE_BYTES)
            for start in range(offset, end, _STEP_BYTES):
                go_on()
                kept = array()  # and with it the mapping, until the call is over
                if kept is None:
                    break
                some = min(_STEP_BYTES, end - start)
                if _libc.madvise(self._at + start, some, _POPULATE_WRITE) != 0:
                    number = ctypes.get_errno()
                    raise StoreFailed(
                        f"cannot copy {some} bytes that were restored from this host's memory and "
                        f"are still in use: {os.strerror(number)}; give the process more memory"
                    )
        self._lock.let_go()

    def forget_in_child(self) -> None:
        """As of `Loans`."""
        self._lock.let_go()


@final
class Loans:
    """Those of an arena, by slot. Its owner's turn is needed for every call."""

    def __init__(self) -> None:
        self._made: dict[int, list[Loan]] = {}

    def make(self, number: int, locked: int, nbytes: int) -> Loan | None:
        """As `Loan.of`."""
        loan = Loan.of(locked, nbytes)
        if loan is not None:
            self._made.setdefault(number, []).append(loan)
        return loan

    def of(self, slots: Collection[int] | None = None) -> list[Loan]:
        """Those that are not over, of these slots, or of all."""
        for slot, loans in list(self._made.items()):
            self._made[slot] = [each for each in loans if not each.is_over]
        return [
            each
            for slot, loans in self._made.items()
            if slots is None or slot in slots
            for each in loans
        ]

    def forget_in_child(self) -> None:
        """After a fork: the arrays stay, the locks are the parent's alone."""
        for loans in self._made.values():
            for each in loans:
                each.forget_in_child()


class _Lock:
    """A descriptor of the slot under a shared flock."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def let_go(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _end(lock: _Lock, at: int, nbytes: int) -> None:
    _libc.munmap(at, nbytes)
    lock.let_go()


_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform.startswith("linux"):
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

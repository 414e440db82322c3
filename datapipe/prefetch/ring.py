"""Batches in memory that two processes share: how one lies there, and the slots of a ring.

A batch is pickled with its arrays out of band, and lies in one stretch of bytes::

    int64 n, then n lengths     of the pickle and of each array
    the pickle                  at the next multiple of 64
    each array                  at the next multiple of 64 each

The memory has no name (`memfd_create`): it goes with the last process that maps it, however that
ends. Both sides are processes of one program and trust each other.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import cloudpickle
import numpy as np
from numpy.typing import NDArray

ALIGNED_BYTES: Final = 64  # what JAX wants to take an array as it lies

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Parcel:
    """A value as it is to lie in memory."""

    parts: tuple[memoryview, ...]  # the pickle, then the arrays

    @staticmethod
    def of(value: Any) -> Parcel:
        """Any value that can be pickled; what its own program defines goes by value."""
        buffers: list[pickle.PickleBuffer] = []
        head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return Parcel((memoryview(head), *(buffer.raw() for buffer in buffers)))

    @property
    def size_bytes(self) -> int:
        """The length of the stretch."""
        return _stops([part.nbytes for part in self.parts])[-1]

    def write(self, memory: memoryview) -> None:
        """Lays it down at the start of `memory`, which is long enough."""
        lengths = [part.nbytes for part in self.parts]
        table = np.array([len(lengths), *lengths], np.int64).tobytes()
        memory[: len(table)] = table
        for part, stop in zip(self.parts, _stops(lengths), strict=True):
            memory[stop - part.nbytes : stop] = part


def opened(memory: Bytes) -> Any:
    """The value of a parcel. Its arrays are views of `memory`, which they keep alive."""
    count = int(memory[:8].view(np.int64)[0])
    lengths = memory[8 : 8 * (count + 1)].view(np.int64).tolist()
    bytes_there = memory.data
    head, *buffers = (
        bytes_there[stop - length : stop]
        for length, stop in zip(lengths, _stops(lengths), strict=True)
    )
    return pickle.loads(head, buffers=buffers)


def _stops(lengths: list[int]) -> list[int]:
    """Where each part ends."""
    stops = []
    end = 8 * (len(lengths) + 1)
    for length in lengths:
        end = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES + length
        stops.append(end)
    return stops


def anonymous(size_bytes: int) -> int:
    """A file in memory without a name; the descriptor belongs to the caller."""
    fd = os.memfd_create("datapipe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def enclosed(parcel: Parcel) -> int:
    """A parcel in memory of its own, where no slot is large enough."""
    fd = anonymous(parcel.size_bytes)
    try:
        with mmap.mmap(fd, parcel.size_bytes) as memory, memoryview(memory) as view:
            parcel.write(view)
    except BaseException:
        os.close(fd)
        raise
    return fd


def mapped(fd: int, size_bytes: int) -> Bytes:
    """Memory behind a descriptor; goes when the last array on it does."""
    return np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)


_numbers = itertools.count()


class _Lent(weakref.ref[Bytes]):
    """An array on a slot."""

    __slots__ = ("slot",)
    slot: int


class Ring:
    """Slots of one size. Pages that were never used cost nothing.

    A slot is *free*, *granted* to a worker that may write to it, or *lent*, as long as an array on
    it is alive. So nobody has to give it back, at a time when an interrupt might come in between.

    Args:
      slots: their number.
      slot_bytes: the size of each.
      kept: how many the user may keep.
    """

    def __init__(self, slots: int, slot_bytes: int, kept: int) -> None:
        self.number = next(_numbers)
        self.slots = slots
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = anonymous(slots * self.slot_bytes)
        self._memory = mapped(self.fd, slots * self.slot_bytes)
        self._free: deque[int | _Lent] = deque(range(slots))
        self._lent: dict[int, _Lent] = {}
        self._most_kept = kept
        self._kept: list[weakref.ref[Bytes]] = []
        self._closing = weakref.finalize(self, os.close, self.fd)

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def grant(self) -> int:
        """A free slot, for a worker. There must be one."""
        slot = self._free.pop()  # the one used last: fewer pages are touched
        return slot.slot if isinstance(slot, _Lent) else slot

    def take_back(self, slot: int) -> None:
        """A granted slot is free again."""
        self._free.append(slot)

    def lend(self, slot: int, size_bytes: int) -> Bytes:
        """What lies in a granted slot, which is free when nothing refers to the array any more."""
        # A view of NumPy would not do: its own views would refer to the whole ring instead of it.
        start = slot * self.slot_bytes
        lent = np.frombuffer(self._memory.data[start : start + size_bytes], np.uint8)
        # The collector may come at any time, in any thread, and an interrupt with it: what it calls
        # takes no lock and is no Python.
        self._lent[slot] = reference = _Lent(lent, self._free.append)
        reference.slot = slot
        return lent

    def handed_over(self, lent: Bytes) -> Bytes:
        """For the user: that array, or a copy where the user keeps as many slots as may be kept."""
        kept = [each for each in self._kept if each() is not None]
        if len(kept) >= self._most_kept:
            return lent.copy()
        self._kept = [*kept, weakref.ref(lent)]
        return lent

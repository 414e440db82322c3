"""The arena: a private directory of slot files, mapped into memory, in which snapshots lie.

::

    <directory>/        0700, ours
        lock            flock held by the live owner; its text says who that is
        slot-<k>        one image each: preallocated, mapped, prefaulted, reused for ever

What protects a snapshot is the slot file, not a process: after a crash the next owner finds it by
`valid_images` and holds it by `adopt`. The kernel drops the lock when its owner dies, so stale
means that the lock can be had; pids only tell how long to wait for it.
`multiprocessing.shared_memory` is not used because its blocks vanish with their creator.

A slot is filled under an exclusive flock on its file, and read by others under a shared one: a
writer that outlives its trainer never reads what the next trainer puts there. Slots without an
image are filled first, then the one with the oldest: the newest is always the last to go.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ckpt.errors import Misuse, StoreFailed
from ckpt.lending import Loan, Loans
from ckpt.owning import StaleArena, make_room, own, remove_files
from ckpt.slot_files import (
    NoRoom,
    SlotFiles,
    StoredImage,
    age_of,
    prefault,
    slot_name,
    slot_numbers,
)
from ckpt.wording import counted

MOST_SLOTS = 1000
_log = logging.getLogger("ckpt")
_POLL_S = 0.02


class NoFreeSlot(StoreFailed):
    """All slots are held, and none was released in time."""


class Slot:
    """A slot in the hands of a holder, until `release`; its bytes stay until the next claim."""

    def __init__(self, arena: Arena, number: int, mapping: mmap.mmap) -> None:
        self._arena = arena
        self._mapping = mapping
        self._released = False
        self.number = number
        self.path = arena.directory / slot_name(number)
        self.buffer = memoryview(mapping)
        """Writable, page-aligned; at least as long as was claimed."""

    def filled(self) -> None:
        """The image is there: from now on others may read it, and it is the newest."""
        with self._arena._free:
            self._arena._filling.discard(self.number)
            self._arena._files.unlock(self.number)

    def share(self) -> Slot:
        """The same slot for another holder; it is free once all of them have released it.

        Raises `Misuse` when this holder has done so already.
        """
        with self._arena._free:
            if self._released:
                raise Misuse(f"{self.path}: released already; share it before")
            self._arena._held[self.number] += 1
        return Slot(self._arena, self.number, self._mapping)

    def release(self) -> None:
        """Hand the slot back. The buffer must not be used afterwards. Idempotent."""
        with self._arena._free:
            if self._released:
                return
            self._released = True
        self.buffer = memoryview(b"")
        del self._mapping
        self._arena._take_back(self.number)


class Arena:
    """The slots of one process of a run on this host, owned by holding the lock.

    `owner` is a JSON object that says who this is (`run`, ...); pid, host and start time are added.
    With `frees_stale`, arenas of dead runs that lie beside this one are deleted when there is no
    room for a slot. `when_fewer` is told, by a claim, how many slots are left when it goes on with
    fewer: whoever holds some for long must give them back. Thread-safe. A forked child does not
    keep the lock.

    Raises `InUse`, naming the owner, when a live one holds the directory; `StoreFailed` when the
    directory cannot be made or is not private to this user.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        owner: dict[str, Any],
        slots: int = 2,
        frees_stale: bool = False,
        when_fewer: Callable[[int], None] = lambda slots: None,
    ) -> None:
        if not 1 <= slots <= MOST_SLOTS:
            raise Misuse(f"slots: wanted 1 to {MOST_SLOTS}, found {slots}")
        self.directory = Path(directory).absolute()
        self.slots = slots
        """How many slots `claim` uses; fewer than were wanted where there is no room for them. With
        1, a crash while saving leaves no snapshot at all."""
        self._frees_stale = frees_stale
        self._when_fewer = when_fewer
        self._free = threading.Condition()
        self._held: dict[int, int] = {}  # by slot: how many hold it
        self._filling: set[int] = set()  # claimed, and no image is there yet
        self._order: list[int] = []  # slots by their last claim, oldest first
        self._maps: dict[int, mmap.mmap] = {}
        self._warm: set[int] = set()  # prefaulted, as long as they are mapped
        self._loans = Loans()
        self._settling = False  # a newer snapshot is there: what is still lent is copied
        self._closed = False
        self._ended = False
        self._preparing: threading.Thread | None = None
        self._warming: int | None = None  # the slot that it is at: a claim waits for it
        self._remove_at_end: bool | None = None
        is_here = any(arena.directory == self.directory for arena in list(_live))
        owned = own(self.directory, owner, is_here=is_here)
        self._lock_fd, self._directory_fd = owned.lock_fd, owned.directory_fd
        self._files = SlotFiles(self.directory, self._directory_fd)
        _live.add(self)
        try:
            ages = {image.slot: age_of(image.header) for image in self.valid_images()}
        except BaseException:
            self._let_go()
            raise
        self._order = sorted(range(slots), key=lambda k: (k in ages, ages.get(k), k))

    def claim(self, nbytes: int, timeout_s: float | None = None) -> Slot:
        """A free slot of at least `nbytes`, grown if need be; waits while all are held or read.

        Slots without an image are given first, then the one filled longest ago. The image in it is
        gone once the holder starts to fill it; `Slot.filled` lets others read the new one. Where
        there is no room for another slot, it goes on with those that are there.

        Raises `StoreFailed` when the place is too small for any, or no slot came free within
        `timeout_s`.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            number = self._take(end, timeout_s)
            try:
                mapping = self._mapped(number, nbytes)
            except NoRoom as error:
                try:
                    again = self._found_room(error.needed_bytes, number)
                    if not again and not self._goes_on_without(number, nbytes, error):
                        raise
                finally:
                    self._take_back(number)
                if not again:
                    self._when_fewer(self.slots)
                continue
            except BaseException:
                self._take_back(number)
                raise
            try:
                with self._free:
                    self._order.remove(number)
                    self._order.append(number)
                    self._filling.add(number)
                    self._settling = True
                self.prepare(nbytes)
            except BaseException:
                self._take_back(number)
                raise
            return Slot(self, number, mapping)

    @property
    def free(self) -> int:
        """How many slots a claim would find without waiting for whoever reads them."""
        with self._free:
            return sum(map(self._is_free, self._next()))

    def _is_free(self, number: int) -> bool:
        if number == self._warming or not self._files.sizes(number)[0]:
            return True
        if self._loans.of([number]):
            return True  # a claim copies what is lent
        free = self._files.lock(number)
        if free:
            self._files.unlock(number)
        return free

    def loan(self, number: int, locked: int, nbytes: int) -> Loan | None:
        """Lend the image in a slot, open under a shared lock, to arrays of this process.

        None where that cannot be. The slot is not claimed before its pages are back, or copied.
        """
        with self._free:
            if self._closed:
                return None
            self._settling = False
            return self._loans.make(number, locked, nbytes)

    def _take(self, end: float | None, timeout_s: float | None) -> int:
        """Hold the slot that is next in turn and that nobody reads."""
        while True:
            with self._free:
                self._must_be_open()
                free = self._next()
                for number in free:
                    if number == self._warming:
                        break
                    if self._files.lock(number):
                        self._held[number] = 1
                        self._drop_surplus()
                        return number
                if self._warming is not None and self._warming in free:
                    # A slot that is only being warmed is about to come: to wait is no time-out.
                    self._free.wait()
                    continue
                lent = self._loans.of(free)
                if not lent:
                    self._wait_for_one(free, end, timeout_s)
            for loan in lent:
                loan.settle(self._must_be_open)

    def _wait_for_one(
        self, free: Sequence[int], end: float | None, timeout_s: float | None
    ) -> None:
        left_s = None if end is None else end - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise NoFreeSlot(
                f"{self.directory}: none of {counted(self.slots, 'slot')} came free within "
                f"{timeout_s} s: each has a snapshot that somebody still needs; give more slots, "
                "or save less often"
            )
        # Nobody tells that another process has read a slot to the end.
        self._free.wait(min(_POLL_S, left_s or _POLL_S) if free else left_s)

    def _found_room(self, needed_bytes: int, number: int) -> bool:
        """Free what is not needed: arenas of dead runs, slots of ours. Whether that may help."""
        freed: list[StaleArena] = []
        if self._frees_stale:
            freed = make_room(self.directory.parent, needed_bytes, keep=self.directory)
            for dead in freed:
                _log.warning("freed %s: there was no room for a slot of %s", dead, self.directory)
        with self._free:
            free_bytes = self._files.free_bytes()
            if freed and free_bytes >= needed_bytes:
                return True
            images = {image.slot: age_of(image.header) for image in self.valid_images()}
            newest = max(images, key=lambda k: images[k], default=None)
            spare = [k for k in self._next() if k not in (number, newest, self._warming)]
            sizes = {k: self._files.sizes(k)[1] for k in spare}
            if free_bytes + sum(sizes.values()) < needed_bytes:
                return False
            gone = [k for k in spare if sizes[k] and self._files.lock(k)]
            for other in gone:
                self._forget(other)
            return bool(gone)

    def _goes_on_without(self, number: int, nbytes: int, why: StoreFailed) -> bool:
        """Give a slot up for good, if another one will do."""
        with self._free:
            others = [k for k in self._order if k != number]
            if number not in self._order or not any(
                self._files.sizes(k)[0] >= nbytes for k in others
            ):
                return False
            # Those without memory would meet the same.
            gone = [number, *(k for k in others if self._files.sizes(k)[0] < nbytes)]
            gone = [k for k in gone if k not in (*self._held, self._warming) or k == number]
            self._order = [k for k in self._order if k not in gone]
            self.slots = len(self._order)
        cost = (
            "a save then waits until the one before is written, and a crash while it is copied "
            "leaves no snapshot in memory"
            if self.slots == 1
            else "saves then wait sooner for those before"
        )
        _log.warning("%s; going on with %s: %s", why, counted(self.slots, "slot"), cost)
        return True

    def prepare(self, nbytes: int) -> None:
        """Grow and prefault the free slots in the background: a claim of `nbytes` finds them warm,
        and what is still lent of them copied.

        Where there is no room nothing is said; the claim that needs it will.
        """
        with self._free:
            self._must_be_open()
            cold = any(self._is_cold(k, nbytes) for k in self._next())
            if self._preparing is None and (cold or self._due()):
                self._preparing = threading.Thread(
                    target=self._prepare, args=(nbytes,), name="ckpt-prefault"
                )
                try:
                    self._preparing.start()
                except RuntimeError:  # the interpreter ends, or has all the threads it may have
                    self._preparing = None

    def _prepare(self, nbytes: int) -> None:
        try:
            self._warm_up(nbytes)
            for loan in self._due():
                loan.settle(self._must_be_open)
        except (StoreFailed, Misuse):
            pass
        finally:
            with self._free:
                self._preparing = None
                remove = self._remove_at_end
            if remove is not None:
                self._end(remove=remove)

    def _warm_up(self, nbytes: int) -> None:
        while True:
            with self._free:
                cold = [k for k in self._next() if self._is_cold(k, nbytes)]
                if self._closed or not cold:
                    return
                self._warming = cold[0]
            try:
                self._mapped(cold[0], nbytes)
            finally:
                with self._free:
                    self._warming = None
                    self._free.notify_all()

    def _due(self) -> list[Loan]:
        """Loans that are not over when a newer snapshot comes: nobody donates these arrays."""
        return self._loans.of() if self._settling else []

    def _is_cold(self, number: int, nbytes: int) -> bool:
        mapping = self._maps.get(number)
        return mapping is None or len(mapping) < nbytes or number not in self._warm

    def adopt(self, number: int) -> Slot:
        """Hold the slot of a `StoredImage` as it is, so that it is not claimed for something else.

        Adopt before the first claim, which may take any slot that is not held. Its file is used
        again afterwards. Raises `Misuse` when it is held already, or gone.
        """
        with self._free:
            self._must_be_open()
            if number in self._held:
                raise Misuse(f"{self.directory}: slot {number} is held already")
            while number == self._warming:
                self._free.wait()
            self._held[number] = 1
        try:
            if number not in self._maps:
                self._maps[number] = self._files.map_as_is(number)
            return Slot(self, number, self._maps[number])
        except (StoreFailed, OSError, ValueError) as error:
            self._take_back(number)
            raise Misuse(f"{self.directory}: slot {number} has no image: {error}") from error

    def reuse_first(self, numbers: Collection[int]) -> None:
        """Slots of which nobody wants the images any more are claimed before the others."""
        with self._free:
            self._order.sort(key=lambda k: k not in numbers)

    def valid_images(self) -> list[StoredImage]:
        """Slots whose header and table are intact, by slot number.

        Whether the chunks are, too, is for `ckpt.image.verify_chunk` to say: after a kill they are;
        after a crash of the host, with an arena on disk, they may not be.
        """
        self._must_be_open()
        return self._files.images()

    def close(self, *, remove: bool) -> None:
        """Let go of the lock; with `remove`, delete the slots first, and the directory unless it
        was there before. Idempotent.

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
            else:
                self._give_back_lent()
        finally:
            self._let_go()

    def _give_back_lent(self) -> None:
        """The next owner need not wait until this process has dropped its arrays."""
        try:
            for loan in self._loans.of():
                loan.settle(lambda: None)
        except StoreFailed as error:
            _log.warning("%s: it stays read until this process ends: %s", self.directory, error)

    def _let_go(self) -> None:
        if not self._ended:
            self._ended = True
            _live.discard(self)
            self._files.close()
            os.close(self._directory_fd)
            os.close(self._lock_fd)

    def _must_be_open(self) -> None:
        if self._closed:
            raise Misuse(f"{self.directory}: the arena is closed")

    def _next(self) -> list[int]:
        return [k for k in self._order if k not in self._held]

    def _take_back(self, number: int) -> None:
        with self._free:
            left = self._held.get(number, 1) - 1
            if left:
                self._held[number] = left
                return
            self._held.pop(number, None)
            self._files.unlock(number)
            if number in self._filling:  # nothing is lost when it goes first the next time
                self._filling.discard(number)
                if number in self._order:
                    self._order.remove(number)
                    self._order.insert(0, number)
            if not self._closed:
                self._drop_surplus()
            self._free.notify_all()

    def _forget(self, number: int) -> None:
        """Delete the file of a slot that is locked; the slot may be made anew."""
        self._files.delete(number)
        self._maps.pop(number, None)
        self._warm.discard(number)

    def _drop_surplus(self) -> None:
        """Delete slots that are not in use any more, unless they are held, read, or the newest."""
        surplus = [k for k in slot_numbers(self._directory_fd) if k not in self._order]
        surplus = [k for k in surplus if k not in self._held]
        if not surplus:
            return
        ages = {image.slot: age_of(image.header) for image in self.valid_images()}
        newest = max(ages, key=lambda k: ages[k], default=None)
        for number in surplus:
            if number != newest and self._files.lock(number):
                self._forget(number)

    def _mapped(self, number: int, nbytes: int) -> mmap.mmap:
        if not self._is_cold(number, nbytes):
            return self._maps[number]
        mapping = self._maps.get(number)
        if mapping is None or len(mapping) < nbytes:
            mapping = self._files.map_grown(number, nbytes, self._must_be_open)
        prefault(mapping, self._must_be_open)
        self._maps[number] = mapping
        self._warm.add(number)
        return mapping


_live: weakref.WeakSet[Arena] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A fork shares its parent's lock, which would outlive the parent: close the child's copy."""
    for arena in list(_live):
        arena._let_go()
        arena._closed = True
        arena._free = threading.Condition()  # a thread that is not here may have held the old one
        arena._preparing = arena._warming = None
        arena._loans.forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)

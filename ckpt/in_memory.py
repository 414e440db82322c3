"""The Memory tier of a process: whose slots stay, until newer snapshots are valid everywhere."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import final

from ckpt.arena import Arena, Slot
from ckpt.imaged import HostImage
from ckpt.lineage import Lineage, StepId, counts


@final
class InMemory:
    """Holds a slot for each snapshot that is to stay. Thread-safe.

    Args:
        keep: how many of the newest stay; 0 without a Memory tier, or without room for it.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._lock = threading.Lock()
        self._copied: dict[StepId, Slot] = {}
        """Here; in other processes perhaps not yet."""
        self._kept: list[tuple[StepId, Slot]] = []
        """Everywhere, oldest first."""

    def copied(self, id: StepId, slot: Slot) -> None:
        """A snapshot is in a slot of this process."""
        with self._lock:
            self._copied[id] = slot

    def reached(self, id: StepId) -> None:
        """It is in a slot of every process: older ones may go."""
        with self._lock:
            slot = self._copied.pop(id, None)
        if slot is not None:
            self._stay(id, slot)

    def missed(self, id: StepId) -> None:
        """Some process will never have it: nobody can go on from it."""
        with self._lock:
            slot = self._copied.pop(id, None)
        if slot is not None:
            slot.release()

    def begin(self, line: Lineage, images: Iterable[HostImage], arena: Arena) -> None:
        """What was copied before, here or by a trainer that died, stays; what no longer counts
        goes.

        Args:
            images: those that count from now on.
        """
        images = sorted(images, key=lambda each: each.id)
        with self._lock:
            held = sorted([*self._kept, *self._copied.items()], key=lambda each: each[0])
            self._copied.clear()
            gone = [each for each in held if not counts(line, each[0])]
            self._kept = [each for each in held if each not in gone]
            kept = {id for id, _ in self._kept}
        for _, slot in gone:
            slot.release()
        wanted = {image.slot for image in images}
        arena.reuse_first([number for number in range(arena.slots) if number not in wanted])
        for image in images:
            if self._keep and image.slot is not None and image.id not in kept:
                self._stay(image.id, arena.adopt(image.slot))

    def limit(self, keep: int) -> None:
        """From now on so many stay."""
        with self._lock:
            self._keep = keep
            gone = self._surplus()
        for _, slot in gone:
            slot.release()

    @property
    def awaited(self) -> int:
        """How many slots hold snapshots that some process may not have copied yet."""
        with self._lock:
            return len(self._copied)

    def held(self, number: int, arena: Arena) -> Slot:
        """The slot of an image, for one more holder."""
        with self._lock:
            for _, slot in self._kept:
                if slot.number == number:
                    return slot.share()
        return arena.adopt(number)

    def release(self) -> None:
        """Let go of all slots."""
        with self._lock:
            slots = [*self._copied.values(), *(slot for _, slot in self._kept)]
            self._copied.clear()
            self._kept.clear()
        for slot in slots:
            slot.release()

    def _stay(self, id: StepId, slot: Slot) -> None:
        with self._lock:
            self._kept = sorted([*self._kept, (id, slot)], key=lambda each: each[0])
            gone = self._surplus()
        for _, each in gone:
            each.release()

    def _surplus(self) -> list[tuple[StepId, Slot]]:
        """Those that stay no longer, to be released; the caller has the lock."""
        count = max(0, len(self._kept) - self._keep)
        gone, self._kept = self._kept[:count], self._kept[count:]
        return gone


def who_holds(arena: Arena, writing: int, awaited: int, troubles: str) -> str:
    """Why no slot is free, in words.

    Args:
        writing: how many slots are read by the writer; awaited: how many hold what other processes
            have not copied yet.
        troubles: what is known against the durable tiers.
    """
    found = []
    if writing:
        found.append(
            f"{writing} of {arena.slots} hold snapshots that are not written yet: "
            f"{troubles or 'the stores are slow'}; a Local tier takes over from the slots, and "
            "busy='skip' leaves saves out"
        )
    if awaited:
        found.append(
            f"{awaited} of {arena.slots} hold snapshots that other processes have not "
            "copied yet; see what they wait for"
        )
    return "; ".join(found) or (
        f"another process still reads what lies in {arena.directory}, such as the writer "
        "of a trainer that died: wait until it has ended, or end it"
    )

"""The saves of a manager under way: slots, the writer, and what it reports.

::

    save ── snapshot ──> slot ──┬── Memory: kept until a newer one is valid in all processes
                                └── Job ──> writer ──> Local, Shared
    Pending <── Acks <────────── reports ─────┘

Nothing here holds the manager. The garbage collector may run in any thread, in the middle of
anything, so a manager that nobody closed is not waited for: the writer finishes what is queued and
then lets go of the arena.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from ckpt import arena_places, backend, flush, in_memory, log, signals, snapshot
from ckpt.acks import Acks
from ckpt.arena import Arena, Slot
from ckpt.backend import Backend, WriterKind
from ckpt.catching_up import due_elsewhere, newest_in
from ckpt.errors import CheckpointError, Damaged, PeerFailed, StoreFailed, Superseded
from ckpt.imaged import MEMORY, Hosted, HostImage, host_images
from ckpt.in_memory import InMemory
from ckpt.lineage import StepId
from ckpt.local import LocalImages
from ckpt.messages import (
    Abandon,
    Begin,
    Done,
    Failed,
    Flush,
    Job,
    Note,
    Noted,
    Ready,
    Released,
    Report,
    Said,
    Settle,
    Settled,
    Trouble,
)
from ckpt.pending import Background, Pending
from ckpt.processes import Processes
from ckpt.start import Started
from ckpt.status import Progress, Status
from ckpt.store import Store
from ckpt.tiers import Tiers, patience_of
from ckpt.tree import Flat
from ckpt.waiting import Snapshots
from ckpt.wording import counted

_log = logging.getLogger("ckpt")


@final
class Saves:
    """Between the manager, which decides, and the writer, which writes.

    Args:
        stores: of the Shared tiers, by name.
    """

    def __init__(
        self,
        tiers: Tiers,
        stores: Mapping[str, Store],
        processes: Processes,
        background: Background,
        *,
        slots: int,
        arena: Path | None,
        writer: WriterKind,
        timeout_s: float,
    ) -> None:
        tiers.must_suit(processes.count)
        tiers.must_fit(slots)
        self._tiers, self._stores = tiers, stores
        self._location = stores["shared"].location
        self._processes, self._background = processes, background
        self._slots = slots
        self._place = arena
        self._kind, self._timeout_s = writer, timeout_s
        self._pid = os.getpid()
        self.arena: Arena | None = None
        self._backend: Backend | None = None
        self._signals: signals.Installed | None = None
        self._lock = threading.RLock()
        """Of what reports change; reports come from threads of the writer."""
        self._settled = threading.Event()
        self._settle = 0
        """The number of the newest question whether nothing is under way."""
        patience_s = timeout_s + max(map(patience_of, tiers.durable.values()))
        self.snapshots = Snapshots(self._location, background, self._who_holds, patience_s)
        self._writing: dict[tuple[StepId, int], Slot] = {}
        """A step may be brought out from two slots, one after the other."""
        self._refused: set[StepId] = set()
        """Steps that cannot be, whatever the stores do: the images of the processes do not belong
        together. What else fails in one tier says nothing of an image in another one."""
        self._in_memory = InMemory(tiers.kept_in_memory)
        self._progress = Progress(tiers)
        self._writer_pid: int | None = None
        self._starts = 0
        self.skipped = 0
        self.locals = {
            name: LocalImages(tier.location, self._location, processes.index)
            for name, tier in tiers.local.items()
        }
        self._acks = Acks(
            processes,
            tuple(tiers.shared),
            self._reached,
            self._missed,
            self._given_up,
            timeout_s=timeout_s,
            extra_s=lambda name: 0.0 if name == MEMORY else patience_of(tiers.durable[name]),
        )

    # --- the arena and the writer -----------------------------------------------------------

    def own_arena(self) -> None:
        """Take the lock that keeps a second live manager on this host away."""
        if self.arena is not None:
            return
        place = arena_places.place_of(self._place, self._location, self._processes)
        arena_places.wait_until_gone(place)
        self.arena = Arena(
            place,
            owner={"run": self._location},
            slots=self._slots,
            frees_stale=self._place is None,
            when_fewer=self._go_on_with_fewer,
        )

    def _go_on_with_fewer(self, slots: int) -> None:
        """There is no room for all slots: what memory keeps must leave one for the next save."""
        wanted, keep = self._tiers.kept_in_memory, slots - 1
        if keep >= wanted:
            return
        self._in_memory.limit(keep)
        text = (
            f"there is room for {counted(slots, 'slot')}, and {self._tiers.least_slots} are "
            f"needed: {keep} of {counted(wanted, 'snapshot')} stay while the next is copied; give "
            "the arena a larger place"
        )
        self._progress.falls_short(Trouble(MEMORY, text, time.time_ns()))
        _log.warning("%s: tier %s: %s", self._location, MEMORY, text)

    def host_images(self) -> Hosted:
        """The images of this process in memory and on the disks of this host."""
        found = host_images(self.arena, self.locals)
        images = tuple(each for each in found.images if each.id not in self._refused)
        return dataclasses.replace(found, images=images)

    def prepare(self, nbytes: int) -> None:
        """Make slots ready in the background."""
        if self.arena is not None and nbytes:
            self.arena.prepare(nbytes)

    def begin(self, started: Started) -> None:
        """An attempt has decided: its saves are those of the owner of the run."""
        if self._backend is None:
            self._start_writer()
        assert self._backend is not None
        self._backend.tell(Begin(started.number, started.line))
        if self._processes.count > 1 and self._processes.index == 0:
            flush.clear(self._stores["shared"], started.number)
        assert self.arena is not None
        self._in_memory.begin(started.line, started.images, self.arena)
        newest = {name: newest_in(started, name) for name in self._tiers}
        self._progress.begin(started.line, newest)
        decision = started.decision
        if decision.kind == "rewind" and decision.parent is not None:
            self.note(log.rewound(decision.parent, decision.reason).to_json())
        if self._processes.count == 1 and started.images:
            for image, due in due_elsewhere(started, self._tiers.durable):
                self._bring_out(image, due)

    def _start_writer(self) -> None:
        assert self.arena is not None
        setup = backend.setup_of(
            self._tiers.durable,
            self._stores,
            self.locals,
            str(self.arena.directory),
            self._processes,
            self._timeout_s,
        )
        self._backend, self._signals = backend.start(self._kind, setup, self._report, self._stores)

    def settle(self) -> None:
        """Wait until nothing of the attempt is under way, be it a deletion."""
        self._background.wait(None)
        if self._backend is not None:
            with self._lock:
                self._settle += 1
                self._settled.clear()
            self._backend.tell(Settle(self._settle))
            if not self._settled.wait(self._timeout_s):
                raise StoreFailed(
                    f"{self._location}: the writer has not come to rest within "
                    f"{self._timeout_s:.0f} s: a deletion hangs; see status()"
                )

    def _bring_out(self, image: HostImage, due: Sequence[str]) -> None:
        """What lies on this host goes to further tiers."""
        assert self.arena is not None
        _log.info("%s: %s goes from %s to %s", self._location, image.id, image.tier, due)
        held = self._in_memory.held
        slot = None if image.slot is None else held(image.slot, self.arena)
        self._expect(image.id, Pending(image.id.step, due))
        self._submit(image.id, due, slot, {"from": image.tier})

    def _expect(self, id: StepId, pending: Pending) -> None:
        if pending not in self._background.pendings:
            self._background.pendings.append(pending)
        self._acks.expect(id, pending)

    def _submit(
        self, id: StepId, durable: Sequence[str], slot: Slot | None, figures: dict[str, Any]
    ) -> None:
        assert self._backend is not None
        if slot is not None:
            with self._lock:
                self._writing[id, slot.number] = slot
        number = None if slot is None else slot.number
        self._backend.tell(Job(id, tuple(durable), number, figures))

    # --- a save ---------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Would a save find a free slot now?"""
        assert self.arena is not None
        return self.arena.free > 0

    def save(
        self,
        id: StepId,
        flat: Flat,
        meta: Callable[[], dict[str, Any]] | dict[str, Any],
        tiers: Sequence[str],
        begun: float,
    ) -> tuple[Pending, snapshot.Snapshot]:
        """Copy a state, and have it brought to some tiers.

        Args:
            begun: monotonic time at which the trainer began to wait.
        """
        pending = Pending(id.step, tiers)
        assert self.arena is not None
        taken = self.snapshots.take(self.arena, flat, meta)
        self._hand_over(id, taken, tiers, pending, begun)
        return pending, taken

    def extend(
        self,
        id: StepId,
        flat: Flat,
        meta: dict[str, Any],
        tiers: Sequence[str],
        pending: Pending,
    ) -> None:
        """Have a step that was saved already brought to further tiers: the same image."""
        begun = time.monotonic()
        assert self.arena is not None
        taken = self.snapshots.take(self.arena, flat, meta)
        pending.extend(tiers)
        self._hand_over(id, taken, tiers, pending, begun)

    def _who_holds(self, arena: Arena) -> str:
        with self._lock:
            writing = len({slot.number for slot in self._writing.values()})
        troubles = self._progress.troubles(self._tiers.durable)
        return in_memory.who_holds(arena, writing, self._in_memory.awaited, troubles)

    def _hand_over(
        self,
        id: StepId,
        taken: snapshot.Snapshot,
        tiers: Sequence[str],
        pending: Pending,
        begun: float,
    ) -> None:
        durable = [tier for tier in tiers if tier != MEMORY]
        if MEMORY in tiers:
            self._in_memory.copied(id, taken.slot.share())
        self._expect(id, pending)
        figures = {"blocking_s": round(time.monotonic() - begun, 6)}
        if durable:
            self._submit(id, durable, taken.slot, figures)
        else:
            taken.slot.release()
        if MEMORY in tiers:
            self._acks.done(id, MEMORY)
            self.note(log.saved(id, MEMORY, figures).to_json())

    def note(self, event: dict[str, Any]) -> None:
        """A line in the log of the attempt, which process 0 keeps."""
        if self._backend is not None and self._processes.index == 0:
            self._backend.tell(Note(event))

    # --- what the writer reports ------------------------------------------------------------------

    def _report(self, report: Report) -> None:
        match report:
            case Ready():
                before, self._writer_pid = self._writer_pid, report.pid
                self._starts += 1
                if before is not None:
                    reason = f"the writer with pid {before} had ended"
                    self.note(log.restarted(reason).to_json())
            case Released():
                with self._lock:
                    slot = self._writing.pop((report.id, report.slot), None)
                if slot is not None:
                    slot.release()
            case Done():
                self._acks.done(report.id, report.tier)
            case Failed(id=None):
                self._background.unheard.append(report.error)
            case Failed(id=StepId() as id):
                if isinstance(report.error, StoreFailed | PeerFailed):
                    self._progress.failed(id)
                self._acks.failed(id, report.tier, report.error)
            case Noted(error=BaseException() as error):
                self._background.unheard.append(error)
            case Trouble():
                self._progress.trouble(report)
                how = f"fails, and is tried again: {report.text}" if report.text else "works again"
                _log.warning("%s: tier %s %s", self._location, report.tier, how)
            case Said():
                _log.log(report.level, "%s", report.text)
            case Settled():
                with self._lock:
                    if report.number == self._settle:
                        self._settled.set()

    def _reached(self, id: StepId, tier: str) -> None:
        """All processes have a step there."""
        self._progress.reached(id, tier)
        if tier == MEMORY:
            self._in_memory.reached(id)

    def _missed(self, id: StepId, tier: str, error: BaseException, is_told: bool) -> None:
        """A tier will not have a step."""
        if tier == MEMORY:
            self._in_memory.missed(id)
        if self._processes.count > 1 and tier in self._tiers.shared and isinstance(error, Damaged):
            self._refused.add(id)
        news = not isinstance(error, Superseded) or self._background.superseded() is None
        if not is_told and news:
            self._background.unheard.append(error)

    def _given_up(self, id: StepId, error: CheckpointError) -> None:
        if self._backend is not None:
            self._backend.tell(Abandon(id, error))

    # --- looking ----------------------------------------------------------------------------------

    def status(self, attempt: int | None) -> Status:
        """How all tiers are doing."""
        arena = self.arena
        return Status(
            attempt,
            self._progress.tiers(self._background.under_way()),
            self._kind,
            self._writer_pid if self._kind == "process" else None,
            max(0, self._starts - 1),
            0 if arena is None else arena.slots,
            0 if arena is None else arena.free,
            self.skipped,
        )

    # --- the end ----------------------------------------------------------------------------------

    def close(self, *, in_order: bool) -> None:
        """Finish everything; the newest snapshot goes to the durable tiers. Idempotent.

        Args:
            in_order: the other processes can be expected to close, too.
        """
        if self._backend is not None:
            if self._tiers.memory is not None:
                flush.meet(self._processes, self._location, self._timeout_s, in_order=in_order)
                self._backend.tell(Flush())
            self._backend.close()
            if in_order:
                self._acks.settle(backend.GRACE_S)  # of what was flushed
        if self._signals is not None:
            self._signals.put_back()
            self._signals = None

    def free_arena(self) -> None:
        """After `close`. What reached no durable tier stays for the next start."""
        arena = self.arena
        if arena is None:
            return
        self._in_memory.release()
        for slot in self._writing.values():
            slot.release()
        arena.close(remove=not self._is_needed())
        self.arena = None

    def _is_needed(self) -> bool:
        """Whether the next start on this host could go on from what is only in memory."""
        if self._background.superseded() is not None:
            return False  # the run went on elsewhere, from before that
        behind = self._progress.is_behind(MEMORY)
        if behind and self.arena is not None:
            _log.warning(
                "%s: not everything is durable; the snapshots stay in %s for the next start here",
                self._location,
                self.arena.directory,
            )
        return behind

    def let_go(self) -> None:
        """Of a manager that was collected: finish all saves and free the arena, without waiting."""
        if self.arena is None or os.getpid() != self._pid:
            return
        _log.warning("%s: a manager was dropped without close()", self._location)
        if self._signals is not None:
            self._signals.put_back()
        if self._backend is not None and self._backend.is_alive:
            arena_places.add(self.arena.directory, self._backend.leave(self._end))
        else:
            self._end()

    def _end(self) -> None:
        try:
            for error in self._background.untold():
                _log.error("%s: a save failed and nobody asked for it: %s", self._location, error)
            self._processes.leave("its manager was dropped")
        except Exception:
            _log.exception("%s: while a dropped manager let go", self._location)
        finally:
            self.free_arena()

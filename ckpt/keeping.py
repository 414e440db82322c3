"""After a step is acknowledged: its figures into the log of the attempt, and retention.

In a thread of its own, so that neither ever delays a save: a deletion may take as long as it takes.
Nothing that fails here touches what was saved.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from ckpt import attempts, clearing, layout, log, publishing, retention
from ckpt.errors import (
    CheckpointError,
    Damaged,
    NotFound,
    StoreFailed,
    Superseded,
    Unsupported,
)
from ckpt.lineage import Lineage, StepId, counting
from ckpt.local import LocalImages
from ckpt.log import Event
from ckpt.messages import Failed, Noted, Said, Tell
from ckpt.retention import Keep, Metrics
from ckpt.steps import read_manifest
from ckpt.store import Store

Json = Any
_UNWRITTEN_LIMIT = 1000
"""So many lines wait for a store that fails; older ones are given up."""


class Place(Protocol):
    """A tier, as retention sees it."""

    keep: Keep
    on_host: bool
    """What lies there are copies for this host, which must do without the home for a while."""

    def steps(self) -> Sequence[StepId]:
        """What is committed there, counting or not."""

    def metrics(self, step: StepId) -> Metrics:
        """What was saved with a step there. Raises Damaged, NotFound."""

    def delete(self, step: StepId, owner: int) -> None:
        """Delete a step for an attempt. Raises Superseded when a newer one owns the run."""

    def kept(self) -> Collection[StepId]:
        """What has to stay until it has gone to another tier."""


class SharedPlace:
    """The steps of a Shared tier.

    Args:
        home: where the claims of the run are; without it, this is the home.
        queued: the steps that are still to be copied from here.
    """

    on_host = False

    def __init__(
        self,
        store: Store,
        keep: Keep,
        home: Store | None = None,
        queued: Callable[[], Collection[StepId]] = tuple,
    ) -> None:
        self.keep = keep
        self.kept = queued
        self._store, self._home = store, home or store
        self._halfway: dict[StepId, int] = {}
        """Steps that are condemned by an attempt, and could not be removed."""

    def steps(self) -> Sequence[StepId]:
        """The committed steps; what a store that failed has left of others is removed first."""
        self._finish()
        return attempts.list_run(self._store).steps

    def metrics(self, step: StepId) -> Metrics:
        """Those in its manifest."""
        return read_manifest(self._store, step).metrics or {}

    def delete(self, step: StepId, owner: int) -> None:
        """Condemn, look, remove."""
        try:
            clearing.delete_step(self._store, step, owner=owner, home=self._home)
        except StoreFailed:
            self._halfway[step] = owner
            raise

    def _finish(self) -> None:
        for step, owner in list(self._halfway.items()):
            try:
                attempts.look(self._home, owner)
            except Superseded:
                del self._halfway[step]  # who took over clears up what it finds
                continue
            publishing.of(self._store).remove(step.branch, step.step, owner)
            del self._halfway[step]


class LocalPlace:
    """The images of a Local tier.

    Args:
        queued: the steps that are still to be written from here into a Shared tier.
    """

    on_host = True

    def __init__(
        self, images: LocalImages, keep: Keep, queued: Callable[[], Collection[StepId]] = tuple
    ) -> None:
        self.keep = keep
        self.kept = queued
        self._images = images

    def steps(self) -> Sequence[StepId]:
        """Those of which there is an image."""
        return [found.id for found in self._images.list()]

    def metrics(self, step: StepId) -> Metrics:
        """Those in the image of process 0; the others have none."""
        record = self._images.header(step).meta.get("record")
        found = record.get("metrics") if isinstance(record, dict) else None
        numbers = found.items() if isinstance(found, dict) else ()
        return {n: v for n, v in numbers if isinstance(v, int | float) and type(v) is not bool}

    def delete(self, step: StepId, owner: int) -> None:
        """The image of this process; it is on no other host."""
        self._images.delete(step)


@dataclass(frozen=True)
class _Begun:
    """An attempt, and its lineage."""

    owner: int
    line: Lineage


@dataclass(frozen=True)
class _Line:
    owner: int
    event: Event


@final
class Keeper:
    """Deletes what the tiers give up, and writes down what happened.

    Args:
        home: the store of the log, of pins, and of metrics that came late.
        places: the tiers by name, nearest first.
        tell: told `Failed(None, "", Superseded)` when a newer attempt owns the run, and `Said` for
            what is to stand in the log of the trainer. From this thread and from callers of `lost`.
        index: of this process. Only process 0 writes the log.
    """

    def __init__(
        self, home: Store, places: Mapping[str, Place], tell: Tell, *, index: int = 0
    ) -> None:
        self._home, self._places, self._tell = home, dict(places), tell
        self._writes = index == 0
        self._locks = {tier: threading.Lock() for tier in places}
        self._beginning = threading.Lock()
        """Held while it is told that the attempt, which must be the one of then, is superseded."""
        self._begun: _Begun | None = None
        self._over: _Begun | None = None
        """The attempt that is known to be superseded."""
        self._known: dict[str, dict[StepId, Metrics]] = {tier: {} for tier in places}
        """What manifests say, by tier; a committed step never changes."""
        self._late = _Late(home)
        self._pins: frozenset[tuple[int, int]] | None = None
        """(branch, step), when they were read last."""
        self._unwritten: list[_Line] = []
        self._torn: set[int] = set()
        """Attempts whose log may end within a line."""
        self._whole: set[int] = set()
        """Attempts whose log was looked at."""
        self._queue: queue.SimpleQueue[_Line | str | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name="ckpt-keeper", daemon=True)
        self._thread.start()

    def begin(self, owner: int, line: Lineage) -> None:
        """From now on the run is that of this attempt."""
        self._late.forget()
        with self._beginning:
            self._begun = _Begun(owner, line)

    def supersede(self, owner: int) -> None:
        """This attempt does not own the run any more: from now on what is left is the new owner's,
        who may be about to copy elsewhere what had to stay for that until now."""
        begun = self._begun  # no lock: it is called from where one is held
        if begun is not None and begun.owner <= owner:
            self._over = begun

    def saved(self, tier: str, step: StepId, figures: Mapping[str, Json]) -> None:
        """A step reached a tier: into the log, then retention of that tier. Only queues both."""
        if self._writes:
            self.note(log.saved(step, tier, figures).to_json())
            self._say(logging.INFO, f"saved {step} in {tier}: {dict(figures)}")
        self._queue.put(tier)

    def freed(self, tier: str) -> None:
        """What had to stay there, since it was on its way elsewhere, need not any more. Queued."""
        self._queue.put(tier)

    def lost(self, tier: str, step: StepId) -> int:
        """The tier is full and could not hold a step: delete now what may go.

        Returns how many steps were deleted. Waits for a deletion that is under way there.
        """
        return self._clean(tier, hasty=True)

    def note(self, event: Mapping[str, Json]) -> None:
        """A line for the log of the attempt. Only queues it."""
        members = dict(event)
        kind, begun = str(members.pop("event", "")), self._begun
        time_ns = members.pop("time_ns", 0) or time.time_ns()
        noted = Event(kind, members, time_ns)
        self._late.add(noted)
        if begun is not None and self._writes:
            self._queue.put(_Line(begun.owner, noted))

    def settle(self, then: Callable[[], None]) -> None:
        """Call `then`, from the thread of this, when all is done that was queued before."""
        self._queue.put(then)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()

    # --- the thread -------------------------------------------------------------------------

    def _work(self) -> None:
        more = True
        while more:
            asked = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    asked.append(self._queue.get_nowait())
            more = None not in asked
            try:
                self._write([each for each in asked if isinstance(each, _Line)])
                due = {each for each in asked if isinstance(each, str)}
                for tier in self._places:
                    if tier in due:
                        self._clean(tier)
            except BaseException as error:  # what is queued behind must not wait for ever
                self._tell(Failed(None, "", error))
            for each in asked:
                if callable(each):
                    each()
        self._give_up_metrics()

    # --- retention --------------------------------------------------------------------------

    def _clean(self, tier: str, *, hasty: bool = False) -> int:
        """Returns how many steps were deleted."""
        deleted, failure = 0, None
        if tier not in self._places:
            return 0  # one that is process 0's to clean
        with self._locks[tier]:
            begun, place = self._begun, self._places[tier]
            if begun is None or begun is self._over or place.keep == Keep():
                return 0
            try:
                for old in self._doomed(tier, place, begun.line, hasty=hasty):
                    if begun is self._over:
                        break
                    try:
                        place.delete(old, begun.owner)
                    except Superseded:
                        raise
                    except CheckpointError as error:
                        failure = failure or error  # another one may well go
                        continue
                    deleted += 1
                    self._queue_line(begun.owner, log.deleted(old, tier))
                if failure is not None:
                    raise failure
            except Superseded as error:
                with self._beginning:
                    if begun is self._begun:
                        self._over = begun
                        self._tell(Failed(None, "", error))
            except CheckpointError as error:
                # What was to go stays until the next save.
                self._say(logging.WARNING, f"retention of {tier}: {error}")
                self._queue_line(begun.owner, log.retention_failed(tier, error))
        return deleted

    def _doomed(self, tier: str, place: Place, line: Lineage, *, hasty: bool) -> list[StepId]:
        there = place.steps()
        pins = self._pinned_names(place, hasty=hasty)
        stay = {*place.kept(), *(step for step in there if (step.branch, step.step) in pins)}
        metrics: dict[StepId, Metrics] = {}
        if place.keep.best is not None:
            counted = counting(line, there)
            known = self._metrics(tier, place, counted)
            late = self._late.known()
            metrics = {step: log.joined(known.get(step), late.get(step)) or {} for step in counted}
            # One bad step must not end all retention; it stays for whoever looks into it.
            stay |= {step for step in counted if step.attempt and step not in known}
        return retention.doomed(place.keep, line, there, metrics=metrics, pinned=stay)

    def _metrics(self, tier: str, place: Place, counted: Sequence[StepId]) -> dict[StepId, Metrics]:
        """What was saved with each step that can be read; each is read once."""
        before, found = self._known[tier], {}
        for step in counted:
            try:
                if step in before:
                    found[step] = before[step]
                elif step.attempt:
                    found[step] = place.metrics(step)
            except (Damaged, NotFound, Unsupported) as error:
                self._say(logging.WARNING, f"retention of {tier} keeps {step}: {error}")
        self._known[tier] = found
        return found

    def _pinned_names(self, place: Place, *, hasty: bool) -> frozenset[tuple[int, int]]:
        """The pins, which lie in the home. Copies of a host do with those of before, if the home
        does not answer, or if there is no time to ask it."""
        enough = self._pins if place.on_host else None
        if hasty and enough is not None:
            return enough
        try:
            self._pins = pinned_names(self._home)
        except StoreFailed:
            if enough is None:
                raise
            return enough
        return self._pins

    # --- the log ----------------------------------------------------------------------------

    def _queue_line(self, owner: int, event: Event) -> None:
        if self._writes:
            stamped = Event(event.kind, event.members, time.time_ns())
            if threading.current_thread() is self._thread:
                self._write([_Line(owner, stamped)])
            else:
                self._queue.put(_Line(owner, stamped))

    def _write(self, lines: Sequence[_Line]) -> None:
        """Append, in order; what a failing store does not take is tried again with the next."""
        waiting = [*self._unwritten, *lines]
        while waiting:
            owner = waiting[0].owner
            group = [line for line in waiting if line.owner == owner]
            try:
                self._append(owner, b"".join(log.emit(line.event.to_json()) for line in group))
            except CheckpointError as error:
                self._say(logging.WARNING, f"log: {error}")
                self._torn.add(owner)
                break
            self._tell_of([line for line in group if line.event.kind == log.METRICS])
            waiting = [line for line in waiting if line.owner != owner]
        surplus = max(0, len(waiting) - _UNWRITTEN_LIMIT)
        metrics = [line for line in waiting[:surplus] if line.event.kind == log.METRICS]
        self._unwritten = [*metrics, *waiting[surplus:]]

    def _tell_of(self, metrics: Sequence[_Line], error: CheckpointError | None = None) -> None:
        """They decide what is kept: whoever gave them keeps them until this is told."""
        for line in metrics:
            self._tell(Noted(line.event.time_ns, error))

    def _give_up_metrics(self) -> None:
        lost = [line for line in self._unwritten if line.event.kind == log.METRICS]
        if lost:
            key = layout.log_name(lost[-1].owner)
            text = f"{self._home.location}/{key}: metrics that came late could not be written"
            self._tell_of(lost, StoreFailed(f"{text}; add them again when the store works"))

    def _append(self, owner: int, text: bytes) -> None:
        key = layout.log_name(owner)
        if owner not in self._whole:
            # A writer before this one may have died within a line.
            before = self._home.read_log(key)
            if before and not before.endswith(b"\n"):
                self._torn.add(owner)
            self._whole.add(owner)
        self._home.append(key, b"\n" + text if owner in self._torn else text)
        self._torn.discard(owner)

    def _say(self, level: int, text: str) -> None:
        self._tell(Said(level, f"{self._home.location}: {text}"))


@final
class _Late:
    """Metrics that came late: read once from all logs, then followed."""

    def __init__(self, home: Store) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._read: dict[StepId, dict[str, float]] | None = None
        self._own: list[Event] = []
        """Those of the attempts of this keeper, which may not be in the log yet."""

    def forget(self) -> None:
        """Another attempt begins, and others may have been there since."""
        with self._lock:
            self._read = None

    def add(self, event: Event) -> None:
        """An event of this attempt."""
        if event.kind == log.METRICS:
            with self._lock:
                self._own.append(event)
                if self._read is not None:
                    log.add_late(self._read, [event])

    def known(self) -> dict[StepId, dict[str, float]]:
        """All of them. Raises StoreFailed."""
        with self._lock:
            found = self._read
        if found is None:
            # Not under the lock: a store that hangs must not hold up who only adds one.
            found = log.late_metrics(self._home, attempts.list_run(self._home))
            with self._lock:
                log.add_late(found, self._own)
                self._read = found
        with self._lock:
            return {step: dict(metrics) for step, metrics in found.items()}


def pinned_names(home: Store) -> frozenset[tuple[int, int]]:
    """(branch, step) of all pins."""
    names = (layout.parse_pin_name(entry.name) for entry in home.list(layout.PINS))
    return frozenset(name for name in names if name is not None)


def why_kept(home: Store, line: Lineage, step: StepId) -> str | None:
    """Why not even the user may delete a step of the home; None when nothing is against it."""
    pins = pinned_names(home)
    pinned = [step] if (step.branch, step.step) in pins else []
    return retention.why_kept(line, attempts.list_run(home).steps, step, pinned)

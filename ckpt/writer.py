"""The writer: brings snapshots into the durable tiers, in a thread or in a process of its own.

One thread takes what it is told and looks after the others; each durable tier has a lane, a thread
that works off the jobs for it in order. So a store that is down or does not answer holds up neither
the other tiers nor, if there is a Local tier, a slot. No jax here.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import final

from ckpt import commit, flush, lanes, log
from ckpt.course import Course
from ckpt.deliveries import Depot, ToLocal, ToShared
from ckpt.disk import WINDOW_BYTES
from ckpt.errors import Misuse, StoreFailed, Superseded
from ckpt.housekeeping import Keeping, MakeKeeper, make_keeper
from ckpt.lanes import Delivery, Figures, Lane
from ckpt.lineage import Lineage, StepId, counts
from ckpt.local import LocalImages
from ckpt.messages import (
    Abandon,
    Begin,
    Close,
    Done,
    Failed,
    Flush,
    Job,
    Note,
    Released,
    Report,
    Said,
    Settle,
    Settled,
    Setup,
    Tell,
    ToWriter,
    Trouble,
)
from ckpt.slots import Slots
from ckpt.store import Store, open_store
from ckpt.tiers import Local, Shared, patience_of

_log = logging.getLogger("ckpt")

KEEPER_S = 60.0
"""So long, and at least as long as the tiers are patient, deletions are waited for at the end."""


FlushChoice = Callable[[Slots, Begin, Setup, Store], tuple[StepId, int] | None]
"""Which snapshot is the newest of the run, and its slot here; None: there is none to be flushed."""


class _Wake:
    """To the loop: something has ended."""


@final
class Writer:
    """Works off what it is told; see `ckpt.messages`.

    Args:
        tell: hears the reports, from any thread, one at a time.
        stores: of Shared tiers, by name; others are opened.
        make_keeper: None: nothing is deleted, and no log is kept.
        flush_choice: what a `Flush` brings out.

    Raises:
        Misuse: a location is none.
    """

    def __init__(
        self,
        setup: Setup,
        tell: Tell,
        stores: Mapping[str, Store] | None = None,
        *,
        make_keeper: MakeKeeper | None = make_keeper,
        flush_choice: FlushChoice = flush.choose,
    ) -> None:
        self._setup, self._tell, self._flush_choice = setup, tell, flush_choice
        shared = {n: tier for n, tier in setup.tiers.items() if isinstance(tier, Shared)}
        local = {n: tier for n, tier in setup.tiers.items() if isinstance(tier, Local)}
        given = stores or {}
        self._stores = {n: given.get(n) or open_store(tier.location) for n, tier in shared.items()}
        home = self._stores["shared"]
        self._depot = Depot(
            Slots(setup.arena),
            {n: LocalImages(t.location, home.location, setup.index) for n, t in local.items()},
            home,
            setup.index,
            setup.count,
            setup.timeout_s,
        )
        self._known = {name: commit.Known() for name in shared}
        self._swept: set[str] = set()
        self._begin: Begin | None = None
        self._abandoned: dict[StepId, Abandon] = {}
        self._settles: list[int] = []
        """Who is to hear that nothing is under way."""
        self._superseded: tuple[int, BaseException] | None = None
        """The newest attempt that is known not to own the run any more, and what told so."""
        self._lock = threading.Lock()
        self._active: list[Course] = []
        self._reached: dict[str, list[StepId]] = {name: [] for name in setup.tiers}
        """What each tier has got, as far as it was this writer that brought it."""
        self._troubles: dict[str, int] = {}
        """Since when, in ns, by tier."""
        self._reporting = threading.Lock()
        self._is_over = False
        # A SimpleQueue: `leave` may come in the middle of a `put`, from the garbage collector.
        self._inbox: queue.SimpleQueue[ToWriter | _Wake | Callable[[], None]] = queue.SimpleQueue()
        self._is_closing = False
        self._last: Callable[[], None] | None = None
        self._keeper = (
            make_keeper(setup, self._depot, self._stores, self.queued, self._report)
            if make_keeper is not None
            else None
        )
        self._lanes = {
            name: Lane(name, patience_of(tier), self._bulk_bytes(name), self._deliver, self)
            for name, tier in setup.tiers.items()
        }
        self._thread = threading.Thread(target=self._loop, name="ckpt-writer", daemon=True)
        self._thread.start()

    # --- for the trainer --------------------------------------------------------------------

    def tell(self, message: ToWriter, /) -> None:
        """Say something to it. Returns at once."""
        self._inbox.put(message)

    def close(self) -> None:
        """Finish everything, then end. What hangs longer than its tier is patient has failed."""
        self._inbox.put(Close())
        self._thread.join()

    def leave(self, last: Callable[[], None]) -> threading.Thread:
        """As `close`, without waiting: the thread, which calls `last` at the very end."""
        self._inbox.put(last)
        return self._thread

    @property
    def is_alive(self) -> bool:
        """Is it there? It is not after `close`."""
        return self._thread.is_alive()

    def queued(self) -> Collection[StepId]:
        """The steps that are still on their way into a Shared tier."""
        with self._lock:
            return {course.id for course in self._active if course.open & self._stores.keys()}

    # --- the loop ---------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            while not (self._is_closing and self._is_quiet()):
                try:
                    self._handle(self._next())
                    self._look()
                except BaseException as error:  # those who wait behind it must not wait for ever
                    self._report(Failed(None, "", error))
            self._end()
        finally:
            self._is_over = True
            if self._last is not None:
                self._last()

    def _next(self) -> ToWriter | _Wake | Callable[[], None]:
        try:
            return self._inbox.get(timeout=None if self._is_quiet() else lanes.SILENT_S / 5)
        except queue.Empty:
            return _Wake()

    def _handle(self, message: ToWriter | _Wake | Callable[[], None]) -> None:
        match message:
            case Begin():
                self._start_attempt(message)
            case Job():
                self._accept(message)
            case Abandon():
                self._abandoned[message.id] = message
                for course in self._courses():
                    if course.id == message.id:
                        course.abandon(message.error)
            case Note():
                if self._keeper is not None:
                    self._keeper.note(message.event)
            case Flush():
                self._flush()
            case Settle():
                self._settles.append(message.number)
            case Close():
                self._is_closing = True
            case Setup() | _Wake():
                pass
            case _:
                self._is_closing, self._last = True, message

    def _look(self) -> None:
        for lane in self._lanes.values():
            lane.look()
        if self._settles and self._is_quiet():
            numbers, self._settles = self._settles, []

            def settled() -> None:
                for number in numbers:
                    self._report(Settled(number))

            # Not waited for: a deletion may hang, and what is to be flushed must be heard of.
            if self._keeper is None:
                settled()
            else:
                self._keeper.settle(settled)

    def _is_quiet(self) -> bool:
        """Is nothing under way but what was given up?"""
        with self._lock:
            if self._active:
                return False
        return all(lane.is_idle or lane.is_stuck() for lane in self._lanes.values())

    def _end(self) -> None:
        for lane in self._lanes.values():
            lane.end()
        if self._keeper is not None:
            keeper = self._keeper
            for name in self._depot.images:  # also what a writer left that woke too late
                self._guarded(operator.methodcaller("freed", name))
            closing = threading.Thread(target=keeper.close, name="ckpt-keeper-end", daemon=True)
            try:
                closing.start()
            except RuntimeError:  # the interpreter ends
                keeper.close()
            else:
                closing.join(self._patience_s())
        self._depot.slots.close()

    def _patience_s(self) -> float | None:
        longest_s = max(KEEPER_S, *map(patience_of, self._setup.tiers.values()))
        return longest_s if longest_s < threading.TIMEOUT_MAX else None

    # --- jobs -------------------------------------------------------------------------------

    def _start_attempt(self, begin: Begin) -> None:
        # First: until this returns, what the keeper tells is told of the attempt before.
        if self._keeper is not None:
            self._keeper.begin(begin.owner, begin.line)
        self._begin = begin
        self._abandoned.clear()
        for name, steps in self._reached.items():
            self._reached[name] = [step for step in steps if counts(begin.line, step)]

    def _accept(self, job: Job, *, flushed: bool = False) -> None:
        begin = self._begin
        if begin is None or self._is_closing or not set(job.tiers) <= self._lanes.keys():
            error = Misuse(
                f"{job.id}: wanted a job for {list(self._lanes)} of an attempt that runs"
            )
            for name in job.tiers:
                self._report(Failed(job.id, name, error))
            if job.slot is not None:
                self._report(Released(job.id, job.slot))
            return

        def released() -> None:
            if job.slot is not None and not flushed:
                self._report(Released(job.id, job.slot))

        local = [name for name in job.tiers if name in self._depot.images]
        course = Course(job, begin.owner, begin.line, local, released)
        if not job.tiers:
            released()
            return
        with self._lock:
            self._active.append(course)
            superseded = self._superseded
        if superseded is not None and course.owner <= superseded[0]:
            course.supersede(superseded[1])
        if job.id in self._abandoned:
            course.abandon(self._abandoned[job.id].error)
        for name in job.tiers:
            self._lanes[name].submit(course)

    def _deliver(self, course: Course, lane: Lane) -> Delivery:
        tier = self._setup.tiers[lane.tier]
        if isinstance(tier, Local):
            return ToLocal(self._depot, course, lane, self._swept)
        store, known = self._stores[lane.tier], self._known[lane.tier]
        return ToShared(self._depot, course, lane, store, tier.compression, known)

    def _flush(self) -> None:
        """The newest snapshot into every tier that has nothing as new."""
        begin = self._begin
        if begin is None:
            return
        answer: queue.SimpleQueue[tuple[StepId, int] | BaseException | None] = queue.SimpleQueue()

        def choose() -> None:
            try:
                answer.put(self._flush_choice(self._depot.slots, begin, self._setup, home))
            except BaseException as error:
                answer.put(error)

        home = self._depot.home
        try:
            threading.Thread(target=choose, name="ckpt-flush", daemon=True).start()
        except RuntimeError:  # the interpreter ends
            choose()
        until_s = time.monotonic() + max(0.0, self._setup.grace_s)
        while True:
            left_s = until_s - time.monotonic()
            try:
                chosen = answer.get(timeout=min(lanes.SILENT_S / 5, max(0.0, left_s)))
                break
            except queue.Empty:
                if left_s <= 0:
                    text = f"which snapshot to flush was not known in {self._setup.grace_s:g} s"
                    chosen = StoreFailed(text)
                    break
            for lane in self._lanes.values():
                lane.look()
        if isinstance(chosen, BaseException):
            self._report(Said(logging.WARNING, f"{home.location}: nothing is flushed: {chosen}"))
        elif chosen is not None:
            step, slot = chosen
            tiers = tuple(n for n in self._lanes if not self._has_as_new(n, step, begin.line))
            if tiers:
                self._accept(Job(step, tiers, slot, {"flushed": True}), flushed=True)

    def _has_as_new(self, tier: str, step: StepId, line: Lineage) -> bool:
        """Has the tier got, or is it about to get, this step or a newer one?"""
        with self._lock:
            known = list(self._reached[tier])
            known += [course.id for course in self._active if course.is_open(tier)]
        return any(counts(line, other) and other.step >= step.step for other in known)

    def _bulk_bytes(self, tier: str) -> int:
        """How much of an image its store takes at a time."""
        store = self._stores.get(tier)
        cut_bytes = None if store is None else store.cut_bytes
        return 2 * (cut_bytes or WINDOW_BYTES)

    # --- what lanes tell ------------------------------------------------------------------------

    def done(self, course: Course, tier: str, figures: Figures) -> None:
        """A lane has brought a job into its tier."""
        if tier in self._stores:
            for name in self._stores.keys() & self._lanes.keys():
                self._lanes[name].answered()  # the home answers, without which none of them saves
        # Before it ends: nobody may think that all is settled while this is to be noted.
        if course.is_open(tier) and self._keeper is not None and self._keeps(tier):
            self._guarded(lambda keeper: keeper.saved(tier, course.id, figures))
        begin = self._begin
        with self._lock:
            # A call that has hung may end in an attempt that went back behind its step.
            if begin is not None and counts(begin.line, course.id):
                newer = [step for step in self._reached[tier] if step > course.id]
                self._reached[tier] = newer or [course.id]
        if course.end(tier, landed=True):
            self._report(Done(course.id, tier, figures))
            self._forget(course)

    def failed(self, course: Course, tier: str, error: BaseException) -> None:
        """A tier will not have a job."""
        if isinstance(error, Superseded):
            self._supersede(course.owner, error)
        if course.end(tier, landed=False):
            self._report(Failed(course.id, tier, error))
            self._forget(course)

    def make_room(self, course: Course, tier: str) -> None:
        """A tier is full."""

        def clean(keeper: Keeping) -> None:
            if keeper.lost(tier, course.id):
                self._lanes[tier].answered()

        if self._keeps(tier):
            self._guarded(clean)

    def trouble(self, report: Trouble) -> None:
        """A tier fails, or works again."""
        if report.text:
            event = log.trouble(report.tier, report.text)
            self._troubles.setdefault(report.tier, report.since_ns)
        else:
            since_ns = self._troubles.pop(report.tier, time.time_ns())
            event = log.recovered(report.tier, (time.time_ns() - since_ns) / 1e9)
        self._guarded(lambda keeper: keeper.note(event.to_json()))
        self._report(report)

    def idle(self) -> None:
        """A lane has nothing to do."""
        self._inbox.put(_Wake())

    def _keeps(self, tier: str) -> bool:
        return self._setup.index == 0 or tier in self._depot.images

    def _guarded(self, act: Callable[[Keeping], object]) -> None:
        """What goes wrong in the keeper is told, and touches no save."""
        if self._keeper is not None:
            try:
                act(self._keeper)
            except BaseException as error:
                self._report(Failed(None, "", error))

    def _forget(self, course: Course) -> None:
        if course.open:
            return
        with self._lock, contextlib.suppress(ValueError):
            self._active.remove(course)
        if self._stores.keys() & set(course.job.tiers):
            for name in self._depot.images:
                self._guarded(operator.methodcaller("freed", name))

    def _courses(self) -> list[Course]:
        with self._lock:
            return list(self._active)

    def _supersede(self, owner: int, error: BaseException) -> None:
        """An attempt does not own the run any more; one that began here since then may."""
        with self._lock:
            if self._superseded is None or self._superseded[0] < owner:
                self._superseded = owner, error
            active = list(self._active)
        self._guarded(lambda keeper: keeper.supersede(owner))  # before anything is said to be freed
        for course in active:
            if course.owner <= owner:
                course.supersede(error)

    def _report(self, report: Report) -> None:
        if isinstance(report, Failed) and isinstance(report.error, Superseded):
            begin = self._begin
            if report.id is None and begin is not None:  # of a job: `failed` has done it
                self._supersede(begin.owner, report.error)
        with self._reporting:
            if not self._is_over:
                try:
                    self._tell(report)
                except Exception:  # the thread that tells has more to do
                    _log.exception("a report was not taken: %s", report)

"""How an attempt begins: claim, clear up, choose, read, decide (FORMAT.md section 5).

Process 0 claims, lists and decides; all processes read and vote, so that the whole run goes on from
one step or none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ckpt import attempts, commit, layout, publishing, records, states
from ckpt.attempts import Listing
from ckpt.errors import Damaged, Misuse, NotFound
from ckpt.fit import EXACT, Fit
from ckpt.lineage import (
    Decision,
    Kind,
    Lineage,
    Skips,
    StepId,
    choose,
    counting,
    decide,
    join_skips,
    line_before,
    lineage,
    may_put_back,
    served,
)
from ckpt.loading import DEFAULT, Loading
from ckpt.processes import Matter
from ckpt.reader import (
    MISSING,
    Lost,
    Restored,
    RestoreReport,
    Template,
    every_step_damaged,
    load,
    with_damaged,
    with_report,
)
from ckpt.resolving import nothing_there
from ckpt.roots import must_be_a_root
from ckpt.steps import Damage, Manifest, read_manifest
from ckpt.store import Store
from ckpt.verification import check_step

Json = Any
_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class Wish:
    """What the caller wants to go on from."""

    kind: Kind
    step: int | None = None
    """None: the newest that is intact."""
    like: Any = MISSING
    data: Any = None
    must_exist: bool = False
    batches: range | None = None
    """Batches to skip, counted from 0."""
    skips: Skips | None = None
    """Examples to skip, when they are known already."""
    reason: str = ""
    guard: Json = None
    fit: Fit = EXACT
    loading: Loading = DEFAULT
    load_values: bool = True
    """False: the step is verified, chunk by chunk, and nothing is built from it."""
    branch: int | None = None
    """On which `step` lies, if it is not to be one of the lineage."""


@dataclass(frozen=True)
class Started:
    """An attempt that has decided."""

    decision: Decision
    line: Lineage
    restored: Restored

    @property
    def number(self) -> int:
        return self.decision.attempt


@dataclass(frozen=True)
class Start:
    """The beginning of one attempt, a matter of all processes."""

    store: Store
    matter: Matter
    held: int | None = None
    """The newest attempt that this manager has claimed before."""
    claimed: Callable[[int], None] = lambda number: None
    """Told the number of this one, as soon as the one before is over."""

    def run(self, wish: Wish) -> Started:
        """Raises NotFound, Damaged, Mismatch, Misuse, StoreFailed, PeerFailed, Superseded.

        Whoever calls it tells the others of an exception (`with matter`).
        """
        self._same_call(wish)
        number = self.matter.decide("claim", lambda: self._claim(wish))
        self.claimed(number)
        with attempts.explained(self.store, number):
            return self._go_on(number, wish)

    def _go_on(self, number: int, wish: Wish) -> Started:
        """What an attempt that has claimed the run starts with."""
        told = self.matter.decide("cleared", lambda: self._clear_up(number, wish))
        listing = attempts.list_run(self.store)
        steps = self._candidates(listing, wish)
        skips = wish.skips or self._skips(listing, wish)

        lost: list[Lost] = []
        restored = None
        for step in steps:
            restored = self._load(number, listing, step, wish, lost)
            if restored is not None:
                break
        lost = with_damaged(lost, listing, restored, wish.step)
        if restored is None and lost:
            raise Damaged(every_step_damaged(self.store, lost))
        if restored is None and wish.must_exist:
            raise NotFound(nothing_there(self.store, listing))
        if restored is None:
            restored = Restored(0, None if wish.like is MISSING else wish.like)

        decision = self._decide(number, wish, restored, listing, skips, lost)
        with states.kept_on_error(wish.data):
            self.matter.vote("data", lambda: self._position(decision, restored, wish.data))
            self.matter.decide("recorded", lambda: attempts.record(self.store, decision))
        _log.info(
            "%s: attempt %d, %s, step %d",
            self.store.location,
            number,
            decision.kind,
            restored.step,
        )
        known = {**listing.decisions, number: decision}
        report = with_report(
            restored,
            lost=tuple(lost),
            rolled_forward=tuple(told["done"]),
            records=tuple(Damage(file, why) for file, why in told["records"]),
            fresh=decision.parent is None,
        )
        # A rewind after which nothing was saved yet: its guard must not start anew.
        pending = decision.guard if decision.kind != "rewind" else None
        return Started(
            decision, lineage(known, decision), replace(report, guard_before_rewind=pending)
        )

    def _same_call(self, wish: Wish) -> None:
        """Nothing is written before all processes are there and want the same."""
        batches = wish.batches
        call = {
            "call": wish.kind,
            "step": wish.step,
            "branch": wish.branch,
            "must_exist": wish.must_exist,
            "skip_batches": None if batches is None else [batches.start, batches.stop],
            "data": sorted(states.named(wish.data)),
        }
        calls = self.matter.gather("call", call)
        for process, other in enumerate(calls):
            for key, wanted in calls[0].items():
                if other[key] != wanted:
                    raise Misuse(
                        f"{self.store.location}: the processes of a run make the same calls, but "
                        f"{key} is {wanted!r} in process 0 and {other[key]!r} in process {process}"
                    )

    def _claim(self, wish: Wish) -> int:
        """Process 0: become the owner, unless it can be seen already that this leads nowhere."""
        must_be_a_root(self.store)
        if wish.kind == "start":
            self._must_be_new()
        if wish.must_exist:
            # Before anything is written: a mistyped root must stay as it is.
            before = attempts.list_run(self.store)
            if not any(remain.state == "making" for remain in before.remains):
                if not before.counting and wish.branch is None:
                    _must_not_be_lost(self.store, before)
                    raise NotFound(nothing_there(self.store, before))
                if wish.step is not None:
                    _wanted(before, wish)
        return attempts.claim(self.store, wish.kind, held=self.held)

    def _clear_up(self, number: int, wish: Wish) -> dict[str, Json]:
        """Process 0: write lost records anew, publish or remove what older attempts left in the
        making. Returns what was done, and what was wrong with the records."""
        listing = attempts.list_run(self.store)
        records.told(self.store, listing.records.damage)
        records.write_back(self.store, listing.records)
        done = commit.roll_forward(self.store, number, listing)
        for line in done:
            _log.info("%s: %s", self.store.location, line)
        if wish.kind == "start":
            self._must_be_new()  # a step that was complete is published by now
        return {"done": done, "records": [list(each) for each in listing.records.damage]}

    def _must_be_new(self) -> None:
        found = attempts.list_run(self.store)
        if found.counting or found.damaged:
            newest = max(found.counting, default=None)
            raise Misuse(
                f"{self.store.location}: holds steps up to {newest}; call resume() or restore() "
                "first, so that it is clear what this manager goes on from, or use another root "
                "for a new run"
            )

    def _candidates(self, listing: Listing, wish: Wish) -> list[StepId]:
        """The steps to try, in this order; as process 0 sees them."""

        def make() -> list[Json]:
            found = listing.counting
            if wish.step is not None:
                found = _wanted_or_older(listing, wish)
            elif not found:
                _must_not_be_lost(self.store, listing)
            return [layout.emit_step_id(step) for step in reversed(found)]

        where = f"{self.store.location}: steps of process 0"
        found = (layout.parse_step_id(value, where) for value in self.matter.decide("steps", make))
        return [step for step in found if step is not None]

    def _load(
        self, number: int, listing: Listing, step: StepId, wish: Wish, lost: list[Lost]
    ) -> Restored | None:
        """Everybody reads, then all vote. None when it is damaged for somebody."""
        try:
            return self.matter.vote(
                f"step {step.step}", lambda: self._load_here(number, listing, step, wish)
            )
        except Damaged as error:
            lost.append(Lost(step.step, str(error)))
            _log.warning("%s: %s is damaged: %s", self.store.location, step, error)
            return None

    def _load_here(self, number: int, listing: Listing, step: StepId, wish: Wish) -> Restored:
        try:
            return self._read(step, wish)
        except Damaged as error:
            # An older attempt may have condemned it after our claim; then it is ours to put back.
            place = publishing.of(self.store)
            found = [
                remain
                for remain in attempts.list_run(self.store).remains
                if (remain.branch, remain.step) == (step.branch, step.step)
                and may_put_back(number, listing.steps, remain)
            ]
            if not place.stands(step) and found:
                commit.put_back(self.store, step, found[0])
            elif not (isinstance(error.__cause__, NotFound) and place.stands(step)):
                raise  # else another process was faster in putting it back
            return self._read(step, wish)

    def _read(self, step: StepId, wish: Wish) -> Restored:
        if wish.load_values or not step.attempt:
            process = (self.matter.index, self.matter.count)
            template = Template(wish.like, wish.fit, wish.loading, wish.data, process)
            return load(self.store, step, template)
        try:
            damage = check_step(self.store, step)
        except NotFound as error:
            raise Damaged(f"{self.store.location}: {step} was listed and is gone") from error
        return Restored(step.step, None, report=RestoreReport(step, damage=damage))

    def _skips(self, listing: Listing, wish: Wish) -> Skips:
        """The examples of a range of batches, on the lineage on which they were seen."""
        batches = wish.batches
        if not batches:
            return {}
        if wish.data is None:
            raise Misuse("rewind with skips: give `data`, the iterators that are to skip")
        found: Skips = {}
        for reach, share in served(listing.lineage, batches):
            base = self._base(listing, share.start)
            first = share.start - base.id.step
            relative = range(first, first + len(share))
            # A step on which a branch forked knows nothing of what was left out on that branch.
            seen_by = listing.decisions.get(reach.attempt)
            in_force = seen_by.skips if seen_by is not None else {}
            where = f"{self.store.location}: {base.id}"
            found = join_skips(
                found, states.ranges_of(wish.data, base.data, relative, in_force, where)
            )
        return found

    def _base(self, listing: Listing, batch: int) -> Manifest:
        """The newest step from which one can count on to a batch."""
        bases = [s for s in listing.counting if s.step <= batch and s.attempt]
        damaged: Damaged | None = None
        for step in reversed(bases):
            try:
                return read_manifest(self.store, step)
            except Damaged as error:
                damaged = error
        if damaged is not None:
            raise damaged
        oldest = min(listing.counting, default=None)
        raise Misuse(
            f"rewind: no step at or before {batch} was saved, so the examples of batch {batch} are "
            f"not known; the oldest is {oldest}"
        )

    def _decide(
        self,
        number: int,
        wish: Wish,
        restored: Restored,
        listing: Listing,
        skips: Skips,
        lost: list[Lost],
    ) -> Decision:
        parent = restored.report.source
        kind, reason = wish.kind, wish.reason
        if parent is None:
            kind = "start"
        elif lost and kind in ("resume", "restore"):
            kind, reason = "fallback", f"step {lost[0].step} is damaged"

        def make() -> str:
            decision = decide(
                number,
                kind,
                parent=parent,
                newest=max(listing.counting, default=None),
                current=listing.head,
                own_branch=not self.store.renames,
                reason=reason,
                skips=skips,
                time_ns=time.time_ns(),
                guard=wish.guard,
            )
            return layout.emit_decision(decision).decode()

        text = self.matter.decide("decision", make)
        return layout.parse_decision(text.encode(), "decision of process 0")

    def _position(self, decision: Decision, restored: Restored, data: Any) -> None:
        if data is None:
            return
        source = restored.report.source
        if source is not None and source.attempt:
            where = f"{self.store.location}: step {restored.step}"
            saved = read_manifest(self.store, source).data
            states.put(
                data,
                saved,
                decision.skips,
                process=self.matter.index,
                processes=self.matter.count,
                where=where,
            )
        else:
            for name, each in states.named(data).items():
                states.apply_skips(name, each, decision.skips)


def _wanted(listing: Listing, wish: Wish) -> StepId | None:
    """The step that was asked for; None when it is damaged and a rewind takes an older one.

    Raises:
        NotFound: no such step in the lineage. Damaged: its marker cannot be read.
    """
    if wish.branch is not None and wish.step is not None:
        name = layout.step_name(wish.branch, wish.step)
        for place, reason in listing.damaged:
            if place == name:
                raise Damaged(reason)
        return choose(listing.lineage, listing.steps, wish.step, wish.branch)
    for step, reason in listing.damaged_steps:
        if step == wish.step:
            if wish.kind == "rewind":
                return None
            raise Damaged(reason)
    return choose(listing.lineage, listing.steps, wish.step)


def _wanted_or_older(listing: Listing, wish: Wish) -> list[StepId]:
    """The step that was asked for; for a rewind the older ones of its lineage, too. Ascending."""
    chosen = _wanted(listing, wish)
    line = listing.lineage
    if wish.branch is not None and chosen is not None:
        line = line_before(listing.decisions, chosen)
    older = counting(line, listing.steps) if wish.kind == "rewind" else []
    number = wish.step if wish.step is not None else -1
    return [*(s for s in older if s.step < number), *([chosen] if chosen else [])]


def _must_not_be_lost(store: Store, listing: Listing) -> None:
    """A run in which nothing counts: has it never saved a step, or are its steps gone?

    Raises:
        Damaged: they are damaged, or gone: the newest is never deleted by us.
    """
    if listing.damaged:
        raise Damaged(nothing_there(store, listing))
    head = listing.head
    if head is not None and head.parent is not None:
        raise Damaged(
            f"{store.location}: attempt {head.attempt} went on from {head.parent}, and that step "
            "is gone, with all others of the lineage; put the directories of the branches back"
        )


def batches_of(skip_steps: range | None, skip_batches: range | None, to: int) -> range | None:
    """Batches that a rewind to step `to` is to skip, counted from 0. Step s used batch s - 1.

    Raises:
        Misuse: both ranges are given, one is no plain range, or `to` has learnt from one of them.
    """
    if skip_steps is not None and skip_batches is not None:
        raise Misuse("rewind: give skip_steps or skip_batches, not both")
    for name, given in (("skip_steps", skip_steps), ("skip_batches", skip_batches)):
        if given is not None and (not isinstance(given, range) or given.step != 1):
            raise Misuse(f"rewind: {name}: wanted a range such as range(1700, 1721), got {given!r}")
    if skip_steps is not None:
        if len(skip_steps) and skip_steps.start < 1:
            raise Misuse(f"rewind: skip_steps: steps count from 1, found {skip_steps}")
        skip_batches = range(skip_steps.start - 1, skip_steps.stop - 1)
    if skip_batches and skip_batches.start < to:
        raise Misuse(
            f"rewind: step {to} has learnt from batch {skip_batches.start} already (step s used "
            f"batch s - 1): skip nothing before step {to + 1}, or go back to step "
            f"{skip_batches.start} or earlier"
        )
    return skip_batches

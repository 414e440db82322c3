"""How an attempt begins: claim, clear up, choose, read, decide (FORMAT.md section 5).

Process 0 claims, lists and decides; all processes read and vote, so that the whole run goes on from
one step or none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt import attempts, candidates, clearing, layout, publishing, records, states
from ckpt.candidates import HOME, HOST_ONLY, Made, Sources
from ckpt.errors import Damaged, Misuse, NotFound, StoreFailed
from ckpt.fit import EXACT, Fit
from ckpt.imaged import Hosted, HostImage
from ckpt.lineage import (
    Decision,
    Kind,
    Lineage,
    Skips,
    StepId,
    counting,
    counts,
    decide,
    lineage,
    may_put_back,
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
from ckpt.skipped import skips_of
from ckpt.steps import Damage, read_manifest
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
    source: Store
    """Where the step that it went on from can be read again: home, another Shared tier, an image
    that looks like a run. Home for a fresh run."""
    images: tuple[HostImage, ...] = ()
    """Those of this host that count from now on: none is newer than the parent."""
    shared: Mapping[str, Collection[StepId]] = field(default_factory=dict)
    """The committed steps of each Shared tier when it began, by its name."""
    silent: Collection[str] = ()
    """Local tiers of this host that did not answer: what they have is not known."""

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
    host: Callable[[], Hosted] = Hosted
    """What the arena and the Local tiers of this process hold."""
    others: Mapping[str, Store] = field(default_factory=dict)
    """The further Shared tiers by name."""
    kept_in_memory: int = 0
    """So many of the newest snapshots in the arena are steps in any case."""

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
        sources, made = self._sources(number)
        listing = sources.listing
        tries = self._candidates(sources, wish, made)
        skips = wish.skips or skips_of(sources, wish.batches, wish.data, self.held)

        lost: list[Lost] = []
        restored, source = None, self.store
        for step, tiers in tries:
            found = self._load(number, sources, step, tiers, wish, lost)
            if found is not None:
                restored, source = found
                break
        lost += [each for each in made.told("damaged", "store") if wish.step in (None, each.step)]
        failed = [each for each in made.passed if each.kind == "store"]
        if restored is None and failed and wish.step in (None, failed[0].step.step):
            raise StoreFailed(
                f"{self.store.location}: the images of {failed[0].step} on the hosts are the only "
                f"ones there are, and no step could be made of them: {failed[0].why}"
            )
        restored = _with_unreadable(restored, sources, lost, wish.step)
        lost = with_damaged(lost, listing, restored, wish.step)
        if restored is None and lost:
            raise Damaged(every_step_damaged(self.store, lost))
        if restored is None and wish.must_exist:
            raise NotFound(nothing_there(self.store, listing) + made.listed("given up"))
        if restored is None:
            restored = Restored(0, None if wish.like is MISSING else wish.like)

        decision = self._decide(number, wish, restored, sources, skips, lost)
        with states.kept_on_error(wish.data):
            self.matter.vote("data", lambda: self._position(decision, restored, source, wish.data))
            self.matter.decide("recorded", lambda: attempts.record(self.store, decision))
        _log.info(
            "%s: attempt %d, %s, step %d%s",
            self.store.location,
            number,
            decision.kind,
            restored.step,
            f", from {restored.report.tier}" if restored.report.tier else "",
        )
        given_up = tuple(e for e in made.told("apart") if wish.step in (None, e.step))
        for each in given_up:
            text = "%s: the images of step %d on the hosts make no step and are given up: %s"
            _log.warning(text, self.store.location, each.step, each.reason)
        known = {**listing.decisions, number: decision}
        report = with_report(
            restored,
            lost=tuple(lost),
            given_up=given_up,
            rolled_forward=tuple(told["done"]),
            records=tuple(Damage(file, why) for file, why in told["records"]),
            fresh=decision.parent is None,
        )
        # A rewind after which nothing was saved yet: its guard must not start anew.
        pending = decision.guard if decision.kind != "rewind" else None
        line = lineage(known, decision)
        return Started(
            decision,
            line,
            replace(report, guard_before_rewind=pending),
            source,
            tuple(image for image in sources.images if counts(line, image.id)),
            {
                HOME: listing.steps,
                **{name: there for name, (_, there) in sources.others.items()},
            },
            tuple(sources.hosted.silent),
        )

    def _look(self) -> Sources:
        process = (self.matter.index, self.matter.count)
        return candidates.look(self.store, self.others, self.host(), process, self.kept_in_memory)

    def _sources(self, number: int) -> tuple[Sources, Made]:
        """All tiers, once the images of several processes have become a step."""
        sources, made = self._look(), Made()
        for tier, error in sources.hosted.silent.items():
            _log.warning("%s: %s did not answer: %s", self.store.location, tier, error)
        if self.matter.count > 1:
            made = candidates.make_step(self.matter, number, sources, sources.hosted)
        for each in made.passed:
            if each.kind != "apart":
                text = "%s: no step was made of the images of %s: %s"
                _log.warning(text, self.store.location, each.step, each.why)
        if made.step is not None:
            _log.info("%s: made a step of the images of %s", self.store.location, made.step)
            sources = self._look()
        return sources, made

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
            before = self._look()
            if not any(remain.state == "making" for remain in before.listing.remains):
                here = before.counting or before.images
                if not here and wish.branch is None:
                    candidates.must_not_be_lost(before)
                    raise NotFound(nothing_there(self.store, before.listing))
                if wish.step is not None and (before.alone or not before.images):
                    _wanted(before, wish)
        return attempts.claim(self.store, wish.kind, held=self.held)

    def _clear_up(self, number: int, wish: Wish) -> dict[str, Json]:
        """Process 0: write lost records anew, publish or remove what older attempts left in the
        making. Returns what was done, and what was wrong with the records."""
        listing = attempts.list_run(self.store)
        records.told(self.store, listing.records.damage)
        records.write_back(self.store, listing.records)
        done = clearing.roll_forward(self.store, number, listing)
        for line in done:
            _log.info("%s: %s", self.store.location, line)
        if wish.kind == "start":
            self._must_be_new()  # a step that was complete is published by now
        return {"done": done, "records": [list(each) for each in listing.records.damage]}

    def _must_be_new(self) -> None:
        found = self._look()
        there = {*found.counting, *(image.id for image in found.images)}
        if there or found.listing.damaged:
            newest = max(there, default=None)
            raise Misuse(
                f"{self.store.location}: holds steps up to {newest}; call resume() or restore() "
                "first, so that it is clear what this manager goes on from, or use another root "
                "for a new run"
            )

    def _candidates(
        self, sources: Sources, wish: Wish, made: Made
    ) -> list[tuple[StepId, list[str]]]:
        """The steps to try and their tiers, in this order; as process 0 sees them."""

        def make() -> list[Json]:
            found = sources.counting
            if wish.step is not None:
                found = _wanted(sources, wish)
            elif not found:
                candidates.must_not_be_lost(sources, made)
            return [[layout.emit_step_id(s), sources.tiers(s)] for s in reversed(found)]

        where = f"{self.store.location}: steps of process 0"
        told = self.matter.decide("steps", make)
        found = ((layout.parse_step_id(value, where), tiers) for value, tiers in told)
        return [(step, tiers) for step, tiers in found if step is not None]

    def _load(
        self,
        number: int,
        sources: Sources,
        step: StepId,
        tiers: list[str],
        wish: Wish,
        lost: list[Lost],
    ) -> tuple[Restored, Store] | None:
        """Everybody reads, then all vote, tier by tier. None when none has it whole for all."""
        passed: list[Damage] = []
        for tier in tiers:
            try:
                restored, store = self.matter.vote(
                    f"step {step.step}, {tier}",
                    lambda tier=tier: self._load_here(number, sources, step, tier, wish),  # type: ignore[misc]
                )
            except Damaged as error:
                passed.append(Damage(tier, str(error)))
                _log.warning("%s: %s is damaged in %s: %s", self.store.location, step, tier, error)
                continue
            damage = (*passed, *restored.report.damage)
            return with_report(restored, tier=tier, damage=damage), store
        one = len(passed) == 1
        lost.append(Lost(step.step, passed[0].what if one else "; ".join(map(str, passed))))
        return None

    def _load_here(
        self, number: int, sources: Sources, step: StepId, tier: str, wish: Wish
    ) -> tuple[Restored, Store]:
        try:
            store = sources.store(step, tier)
            candidates.must_be_of_the_run(sources, step, tier)
            return self._read(store, step, wish), store
        except NotFound as error:
            raise Damaged(f"{self.store.location}: {step} is not in {tier} any more") from error
        except Damaged as error:
            if tier != candidates.HOME:
                raise
            # An older attempt may have condemned it after our claim; then it is ours to put back.
            place = publishing.of(self.store)
            found = [
                remain
                for remain in attempts.list_run(self.store).remains
                if (remain.branch, remain.step) == (step.branch, step.step)
                and may_put_back(number, sources.listing.steps, remain)
                and place.was_committed(step, remain)
            ]
            if not place.stands(step) and found:
                place.put_back(step, found[0].attempt)
            elif not (isinstance(error.__cause__, NotFound) and place.stands(step)):
                raise  # else another process was faster in putting it back
            return self._read(self.store, step, wish), self.store

    def _read(self, store: Store, step: StepId, wish: Wish) -> Restored:
        if wish.load_values or not step.attempt:
            process = (self.matter.index, self.matter.count)
            template = Template(wish.like, wish.fit, wish.loading, wish.data, process)
            return load(store, step, template)
        try:
            damage = check_step(store, step)
        except NotFound as error:
            raise Damaged(f"{store.location}: {step} was listed and is gone") from error
        return Restored(step.step, None, report=RestoreReport(step, damage=damage))

    def _decide(
        self,
        number: int,
        wish: Wish,
        restored: Restored,
        sources: Sources,
        skips: Skips,
        lost: list[Lost],
    ) -> Decision:
        parent = restored.report.source
        kind, reason = wish.kind, wish.reason
        if parent is None:
            kind = "start"
        elif lost and kind in ("resume", "restore"):
            kind, reason = "fallback", f"step {lost[0].step} is damaged"
        if parent is not None and not counting(sources.line, sources.shared):
            reason = f"{reason}; {HOST_ONLY}" if reason else HOST_ONLY

        def make() -> str:
            decision = decide(
                number,
                kind,
                parent=parent,
                newest=max(sources.counting, default=None),
                current=sources.listing.head,
                own_branch=not self.store.renames,
                reason=reason,
                skips=skips,
                time_ns=time.time_ns(),
                guard=wish.guard,
            )
            return layout.emit_decision(decision).decode()

        text = self.matter.decide("decision", make)
        return layout.parse_decision(text.encode(), "decision of process 0")

    def _position(self, decision: Decision, restored: Restored, store: Store, data: Any) -> None:
        if data is None:
            return
        source = restored.report.source
        if source is not None and source.attempt:
            where = f"{self.store.location}: step {restored.step}"
            saved = read_manifest(store, source).data
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


def _wanted(sources: Sources, wish: Wish) -> list[StepId]:
    """The step that was asked for; for a rewind the older ones of its lineage, too. Ascending.

    Raises:
        NotFound: there is no such step. Damaged: its marker cannot be read.
    """
    assert wish.step is not None
    return candidates.wanted(sources, wish.step, wish.branch, or_older=wish.kind == "rewind")


def _with_unreadable(
    restored: Restored | None, sources: Sources, lost: list[Lost], wanted: int | None
) -> Restored | None:
    """What is there by its name only: newer steps are lost, a tier of the step itself was passed
    over."""
    there = {each.step for each in sources.counting}
    passed = []
    source = None if restored is None else restored.report.source
    for each in sources.unreadable:
        step = each.id.step
        if source is not None and (source.branch, source.step) == (each.id.branch, step):
            passed.append(Damage(each.tier, each.reason))
        elif (
            step not in there
            and (restored is None or restored.step < step)
            and (wanted is None or step <= wanted)
        ):
            lost.append(Lost(step, f"{each.tier}: {each.reason}"))
            there.add(step)
    if restored is None:
        return None
    return with_report(restored, damage=(*passed, *restored.report.damage))


def batches_of(skip_steps: range | None, skip_batches: range | None, to: int) -> range | None:
    """Batches that a rewind to step `to` is to skip, counted from 0. Step s used batch s - 1.

    Raises:
        Misuse: both ranges are given, one is no plain range or empty, or `to` has learnt from one
            of them.
    """
    if skip_steps is not None and skip_batches is not None:
        raise Misuse("rewind: give skip_steps or skip_batches, not both")
    for name, given in (("skip_steps", skip_steps), ("skip_batches", skip_batches)):
        if given is not None and (not isinstance(given, range) or given.step != 1):
            raise Misuse(f"rewind: {name}: wanted a range such as range(1700, 1721), got {given!r}")
        if given is not None and not given:
            raise Misuse(
                f"rewind: {name}: {given!r} is empty, so nothing would be skipped; leave it out, "
                "or give the first and one past the last, such as range(1700, 1721)"
            )
    if skip_steps is not None:
        if skip_steps.start < 1:
            raise Misuse(f"rewind: skip_steps: steps count from 1, found {skip_steps}")
        skip_batches = range(skip_steps.start - 1, skip_steps.stop - 1)
    if skip_batches and skip_batches.start < to:
        raise Misuse(
            f"rewind: step {to} has learnt from batch {skip_batches.start} already (step s used "
            f"batch s - 1): skip nothing before step {to + 1}, or go back to step "
            f"{skip_batches.start} or earlier"
        )
    return skip_batches

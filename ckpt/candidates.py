"""What an attempt may go on from, and where each step can be read: nearest tier first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckpt import attempts, commit, layout, promotion, publishing, records
from ckpt.attempts import Listing
from ckpt.errors import CheckpointError, Damaged, StoreFailed, Superseded
from ckpt.imaged import Hosted, HostImage, Imaged, Unreadable, is_of_run, nearest
from ckpt.lineage import Decision, Lineage, StepId, choose, counting, counts, covers, line_before
from ckpt.manifest import read_manifest
from ckpt.processes import Matter
from ckpt.reader import Lost
from ckpt.resolving import nothing_there
from ckpt.store import Store

Json = Any
HOME = "shared"
HOST_ONLY = "from an image on a host; no shared tier had a step of the run"
"""In the reason of a decision: if that host is lost, nothing of the run is damaged."""


@dataclass(frozen=True)
class Sources:
    """The steps that there are in all tiers, as one process sees them."""

    home: Store
    listing: Listing
    """Of home, whose records say what counts."""
    others: Mapping[str, tuple[Store, frozenset[StepId]]]
    """Further Shared tiers: their committed steps."""
    hosted: Hosted
    """Those of the run only; they are steps where `alone`."""
    unreadable: tuple[Unreadable, ...]
    """Of the lineage, in all tiers but home."""
    alone: bool
    """Is there one process only?"""

    @property
    def line(self) -> Lineage:
        return self.listing.lineage

    @property
    def images(self) -> tuple[HostImage, ...]:
        return self.hosted.images

    @property
    def shared(self) -> set[StepId]:
        """The committed steps of all Shared tiers, counting or not."""
        return {*self.listing.steps, *(step for _, steps in self.others.values() for step in steps)}

    @property
    def steps(self) -> list[StepId]:
        """Those that can be restored, ascending."""
        here = {image.id for image in self.images} if self.alone else set()
        return sorted(self.shared | here)

    @property
    def counting(self) -> list[StepId]:
        """Those of the lineage."""
        return counting(self.line, self.steps)

    def tiers(self, step: StepId) -> list[str]:
        """Where a step can be read."""
        near = [image.tier for image in nearest(self.images).get(step, ())] if self.alone else []
        home = [HOME] if step in self.listing.steps else []
        return [*near, *home, *(name for name, (_, there) in self.others.items() if step in there)]

    def store(self, step: StepId, tier: str) -> Store:
        """From which a step is read; the same for all steps of a Shared tier."""
        if tier == HOME:
            return self.home
        if tier in self.others:
            return self.others[tier][0]
        images = nearest(self.images)[step]
        return Imaged(self.home, next(image for image in images if image.tier == tier))

    def readable(self, step: StepId) -> Iterator[Store]:
        """The stores that have a step, nearest first."""
        return (self.store(step, tier) for tier in self.tiers(step))


def look(
    home: Store,
    others: Mapping[str, Store],
    hosted: Hosted,
    process: tuple[int, int],
    kept_in_memory: int = 0,
) -> Sources:
    """List all tiers.

    Args:
        process: whose images these are, and how many processes there are.
        kept_in_memory: so many of the newest snapshots are steps in any case. Of the others those
            are that no durable tier has anything as new as, and copies of what such a tier has: a
            slot that was not used again yet must not bring back what was deleted.

    Raises:
        StoreFailed: a Shared tier did not answer: what it holds may be newer than all else.
    """
    listing = attempts.list_run(home)
    found = {}
    unreadable: list[Unreadable] = []
    for name, store in others.items():
        try:
            there = attempts.list_run(store)
            found[name] = (store, frozenset(there.steps))
            for place, why in there.damaged:
                branch, step = layout.parse_full_step_name(place)
                if covers(listing.lineage, branch, step):
                    unreadable.append(Unreadable(StepId(step, branch, 0), name, why))
        except StoreFailed as error:
            raise StoreFailed(
                f"{error}; {name} may have the newest step, so nothing is begun without it: bring "
                "it back, or start without that tier to do without its steps"
            ) from error
    ours = hosted
    if hosted.images or hosted.damaged:
        ours = hosted.counting(listing.lineage, listing.decisions, *process)
        durable = {*listing.steps, *(step for _, steps in found.values() for step in steps)}
        if process[1] == 1:  # else the peers need not have that one
            durable |= {image.id for image in ours.images if image.slot is None}
        newest = max(counting(listing.lineage, durable), default=None)
        ours = ours.without_spent(kept_in_memory, durable, newest)
    unreadable += ours.damaged
    return Sources(home, listing, found, ours, tuple(unreadable), process[1] == 1)


def wanted(sources: Sources, step: int, branch: int | None, *, or_older: bool) -> list[StepId]:
    """The step that was asked for; `or_older`: with the older ones of its lineage. Ascending.

    Without it in the result, and no error, it is damaged and an older one will do.

    Raises:
        NotFound: no such step in the lineage, or on `branch`. Damaged: its marker cannot be read.
    """
    listing = sources.listing
    chosen = None
    damaged = _damage_of(listing, step, branch)
    if damaged is None or any(each.step == step for each in sources.counting):
        chosen = choose(listing.lineage, sources.steps, step, branch)
    elif branch is not None or not or_older:
        raise Damaged(damaged)
    line = listing.lineage
    if branch is not None and chosen is not None:
        line = line_before(listing.decisions, chosen)
    older = counting(line, sources.steps) if or_older else []
    return [*(each for each in older if each.step < step), *([chosen] if chosen else [])]


def _damage_of(listing: Listing, step: int, branch: int | None) -> str | None:
    """Why the marker at home of a step cannot be read, if so."""
    if branch is not None:
        return dict(listing.damaged).get(layout.step_name(branch, step))
    return dict(listing.damaged_steps).get(step)


def must_not_be_lost(sources: Sources, made: Made | None = None) -> None:
    """A run in which nothing counts: has it never saved a step, or are its steps gone?

    Args:
        made: what came of the images of several processes.

    Raises:
        Damaged: they are damaged, or gone: the newest is never deleted by us.
        StoreFailed: a Local tier that did not answer may have them.
    """
    made = Made() if made is None else made
    given_up = made.listed("given up")
    store, listing = sources.home, sources.listing
    if listing.damaged:
        raise Damaged(nothing_there(store, listing) + given_up)
    for tier, error in sources.hosted.silent.items():
        raise StoreFailed(
            f"{error}; no other tier has a step of the run, and {tier} may have some: bring it "
            "back, or start without that tier"
        ) from error
    for silent in made.silent:
        raise StoreFailed(
            f"{silent}; no other tier has a step of the run, and this one may have some: bring it "
            f"back, or start without that tier{made.listed('no step without it')}"
        )
    head = listing.head
    if head is not None and head.parent is not None and HOST_ONLY not in head.reason:
        raise Damaged(
            f"{store.location}: attempt {head.attempt} went on from {head.parent}, and that step "
            "is gone, with all others of the lineage; put the directories of the branches back"
            f"{given_up}"
        )


def must_be_of_the_run(sources: Sources, step: StepId, tier: str) -> None:
    """What stands in a further Shared tier is of the run of which home has the records.

    Raises:
        Damaged: it is not. NotFound: it is gone.
    """
    if tier not in sources.others or not step.attempt:
        return
    store = sources.others[tier][0]
    manifest = read_manifest(store, step)
    try:
        records.must_be_of_this_run(sources.home, manifest)
    except Damaged as error:
        raise Damaged(f"{store.location}: {error}") from error


# --- a step from the images of several processes --------------------------------------------------


def holders(
    told: Sequence[Sequence[Json]], line: Lineage, decisions: Mapping[int, Decision]
) -> dict[StepId, set[int]]:
    """The steps that count and of which somebody has an image: the processes that have it.

    Args:
        told: for each process [step, branch, attempt, time_ns of the decision] of each image.
    """
    found: dict[StepId, set[int]] = {}
    for process, images in enumerate(told):
        for *numbers, decided_ns in images:
            step = StepId(*numbers)
            decision = decisions.get(step.attempt)
            if decision is not None and decision.time_ns == decided_ns and counts(line, step):
                found.setdefault(step, set()).add(process)
    return found


@dataclass(frozen=True)
class Passed:
    """Images of which no step was made."""

    step: StepId
    why: str
    kind: Literal["damaged", "store", "apart"]
    """The images are damaged, a store failed, or they are intact and belong to no step: a process
    has none, or they do not fit together. Nobody can ever restore the last, so they are given up.
    """


@dataclass(frozen=True)
class Made:
    """What came of the images that several processes have of steps newer than those at home."""

    step: StepId | None = None
    """Of these images a step was made."""
    passed: tuple[Passed, ...] = ()
    """Newer ones, newest first."""
    silent: tuple[str, ...] = ()
    """Local tiers of any process that did not answer, and why."""

    def told(self, *kinds: str) -> list[Lost]:
        """What was passed over, for the report."""
        return [Lost(each.step.step, each.why) for each in self.passed if each.kind in kinds]

    def listed(self, what: str) -> str:
        """For a message that nothing is there: what was there."""
        each = [f"the images of {one.step}: {one.why}" for one in self.passed]
        return f"; {what}: {'; '.join(each)}" if each else ""


def make_step(matter: Matter, number: int, sources: Sources, hosted: Hosted) -> Made:
    """Make a step of the newest images that belong together, if home has none as new.

    A matter of all processes. What fails leaves nothing that a later attempt would take for a step
    of its lineage. Older images are tried only if the newer ones are to blame, not a store.

    Raises:
        Superseded: a newer attempt owns the run. PeerFailed.
    """
    listing = sources.listing
    mine = nearest(
        image
        for image in hosted.images
        if image.header.meta.get("processes") == matter.count
        and image.header.meta.get("process") == matter.index
    )
    told = [
        [step.step, step.branch, step.attempt, images[0].header.meta.get("decided_ns")]
        for step, images in mine.items()
    ]
    silent = {tier: str(error) for tier, error in hosted.silent.items()}
    everyone = matter.gather("images", [told, silent])

    def newer() -> Json:
        newest = max(sources.counting, default=None)
        found = holders([each for each, _ in everyone], listing.lineage, listing.decisions)
        return [
            [layout.emit_step_id(step), sorted(found[step])]
            for step in sorted(found, reverse=True)
            if newest is None or newest.step < step.step
        ]

    passed: list[Passed] = []
    made = None
    for value, having in matter.decide("of images", newer):
        step = layout.parse_step_id(value, "the choice of process 0")
        assert step is not None
        lacking = [process for process in range(matter.count) if process not in having]
        if lacking:
            passed.append(Passed(step, _absent(lacking, everyone), "apart"))
            continue
        failed = _make(matter, number, sources, step, mine)
        if failed is None:
            made = step
            break
        passed.append(failed)
        if failed.kind == "store":
            break
    quiet = tuple(
        f"process {process}: {tier}: {why}"
        for process, (_, tiers) in enumerate(everyone)
        for tier, why in tiers.items()
    )
    return Made(made, tuple(passed), quiet)


def _absent(lacking: Sequence[int], everyone: Sequence[Json]) -> str:
    """Who has no image of a step, or does not know."""
    each = []
    for process in lacking:
        silent = ", ".join(everyone[process][1])
        unknown = f", and its {silent} did not answer" if silent else ""
        each.append(f"process {process} has no image of it{unknown}")
    return "; ".join(each)


def _make(
    matter: Matter, number: int, sources: Sources, step: StepId, mine: Mapping[StepId, Any]
) -> Passed | None:
    """A step of images that all processes have; what came in the way, if it was not made."""
    store, listing, name = sources.home, sources.listing, layout.step_name(step.branch, step.step)

    written = _write_image(store, step, mine[step], listing, number)
    wrong = matter.gather(f"image written, {name}", written)
    for process, why in enumerate(wrong):
        if why is not None:
            return Passed(step, f"process {process}: {why[1]}", why[0])
    why = matter.decide(f"made, {name}", lambda: _publish(store, step, listing.lineage, number))
    return None if why is None else Passed(step, why[1], why[0])


def _write_image(
    store: Store, step: StepId, images: Sequence[HostImage], listing: Listing, number: int
) -> Json:
    """The nearest image that is whole, and its part. If there is none: [kind, why]."""
    making = publishing.of(store).making(step, number)
    why, damaged = [], True
    for image in images:
        if not is_of_run(image.header, listing.decisions):
            continue
        try:
            with image.open() as reader:
                windows = promotion.ImageWindows(reader)
                promotion.verify(image.header, windows, lambda: None)
                commit.write_image(store, making, image.header, windows)
            part = commit.part_of(image.header)
            name = layout.part_name(part.attempt, part.process)
            store.put(f"{making}/{name}", part.emit())
        except CheckpointError as error:
            why.append(f"{image.tier}: {error}")
            damaged &= isinstance(error, Damaged)
        else:
            return None
    return ["damaged" if damaged else "store", "; ".join(why) or "no image of this run"]


def _publish(store: Store, step: StepId, line: Lineage, number: int) -> Json:
    """Process 0: as in a roll-forward. What went wrong: [kind, why]."""
    making = publishing.of(store).making(step, number)
    try:
        headers = commit.read_headers(store, making, step.attempt)
        try:
            marker = commit.finish(store, step, headers, maker=number)
        except Damaged as error:
            return ["apart", str(error)]  # each was verified: they do not belong together
        commit.publish(store, step, marker, line, owner=number, maker=number)
    except Superseded:
        raise
    except CheckpointError as error:
        return ["damaged" if isinstance(error, Damaged) else "store", str(error)]
    return None

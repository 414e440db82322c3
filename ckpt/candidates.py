"""What an attempt may go on from, and where each step can be read: nearest tier first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt import attempts, commit, layout, promotion, publishing, records
from ckpt.attempts import Listing
from ckpt.errors import CheckpointError, Damaged, StoreFailed, Superseded
from ckpt.imaged import Hosted, HostImage, Imaged, Unreadable, is_of_run, nearest
from ckpt.lineage import Decision, Lineage, StepId, choose, counting, counts, covers, line_before
from ckpt.manifest import read_manifest
from ckpt.processes import Matter
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


def must_not_be_lost(sources: Sources) -> None:
    """A run in which nothing counts: has it never saved a step, or are its steps gone?

    Raises:
        Damaged: they are damaged, or gone: the newest is never deleted by us.
        StoreFailed: a tier of this host that did not answer may have them.
    """
    store, listing = sources.home, sources.listing
    if listing.damaged:
        raise Damaged(nothing_there(store, listing))
    for tier, error in sources.hosted.silent.items():
        raise StoreFailed(
            f"{error}; no other tier has a step of the run, and {tier} may have some: bring it "
            "back, or start without that tier"
        ) from error
    head = listing.head
    if head is not None and head.parent is not None and HOST_ONLY not in head.reason:
        raise Damaged(
            f"{store.location}: attempt {head.attempt} went on from {head.parent}, and that step "
            "is gone, with all others of the lineage; put the directories of the branches back"
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


def newest_common(
    told: Sequence[Sequence[Json]], line: Lineage, decisions: Mapping[int, Decision]
) -> StepId | None:
    """The newest step that counts and of which every process has told that it has its image.

    Args:
        told: for each process [step, branch, attempt, time_ns of the decision] of each image.
    """
    each = [
        {
            StepId(*image[:3])
            for image in images
            if image[2] in decisions and decisions[image[2]].time_ns == image[3]
        }
        for images in told
    ]
    common = set.intersection(*each) if each else set()
    return max((step for step in common if counts(line, step)), default=None)


@dataclass(frozen=True)
class Made:
    """What came of the newest images that all processes have."""

    step: StepId
    why_not: str = ""
    """Empty: it is a step now."""
    damaged: bool = False
    """Is it the images that are to blame, not the store?"""


def make_step(matter: Matter, number: int, sources: Sources, hosted: Hosted) -> Made | None:
    """Make a step of the newest images that all processes have, if home has none as new.

    A matter of all processes; None when there is nothing to do. What fails leaves nothing that a
    later attempt would take for a step of its lineage.

    Raises:
        Superseded: a newer attempt owns the run. PeerFailed.
    """
    store, listing = sources.home, sources.listing
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
    everyone = matter.gather("images", told)

    def choice() -> Json:
        step = newest_common(everyone, listing.lineage, listing.decisions)
        newest = max(sources.counting, default=None)
        is_newer = step is not None and (newest is None or newest.step < step.step)
        return layout.emit_step_id(step) if is_newer else None

    chosen = matter.decide("of images", choice)
    step = layout.parse_step_id(chosen, "the choice of process 0")
    if step is None:
        return None
    wrong = matter.gather("image written", _write_image(store, step, mine[step], listing, number))
    for process, why in enumerate(wrong):
        if why is not None:
            return Made(step, f"process {process}: {why[1]}", why[0])
    why = matter.decide("made", lambda: _publish(store, step, listing.lineage, number))
    return Made(step) if why is None else Made(step, why[1], why[0])


def _write_image(
    store: Store, step: StepId, images: Sequence[HostImage], listing: Listing, number: int
) -> Json:
    """The nearest image that is whole, and its part. If there is none: [damaged, why]."""
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
    return [damaged, "; ".join(why) or "no image of this run"]


def _publish(store: Store, step: StepId, line: Lineage, number: int) -> Json:
    """Process 0: as in a roll-forward. What went wrong: [damaged, why]."""
    making = publishing.of(store).making(step, number)
    try:
        headers = commit.read_headers(store, making, step.attempt)
        marker = commit.finish(store, step, headers, maker=number)
        commit.publish(store, step, marker, line, owner=number, maker=number)
    except Superseded:
        raise
    except CheckpointError as error:
        return [isinstance(error, Damaged), str(error)]
    return None

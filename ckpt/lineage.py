"""What counts: pure decisions over attempt records and markers (FORMAT.md, sections 2 to 7).

No I/O, no clock. The model test explores these very functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from ckpt.errors import Damaged, NotFound

Kind = Literal["start", "resume", "restore", "rewind", "fallback", "fork"]
KINDS: tuple[Kind, ...] = ("start", "resume", "restore", "rewind", "fallback", "fork")

Skips = Mapping[str, Sequence[tuple[int, int]]]
"""Iterator name -> half-open ranges of examples, sorted and disjoint."""


@dataclass(frozen=True, order=True)
class StepId:
    """A committed step, as its marker tells. Branch 0, attempt 0: written by Orbax."""

    step: int
    branch: int
    attempt: int

    def __str__(self) -> str:
        return f"step {self.step} (branch {self.branch}, attempt {self.attempt})"


@dataclass(frozen=True)
class Claim:
    """The record that makes an attempt the owner of the run."""

    attempt: int
    kind: Kind
    host: str
    pid: int
    time_ns: int


@dataclass(frozen=True)
class Decision:
    """Where an attempt continues from, and on which branch."""

    attempt: int
    kind: Kind
    parent: StepId | None
    branch: int
    reason: str = ""
    skips: Skips = field(default_factory=dict)
    time_ns: int = 0
    guard: Any = None
    """State of the spike guard (JSON) when it asked for this rewind."""


@dataclass(frozen=True)
class Reach:
    """The steps of one chain member that count: `after` < step <= `upto` (None: no bound)."""

    attempt: int
    branch: int
    after: int
    upto: int | None

    def holds(self, step: StepId) -> bool:
        return (
            step.attempt == self.attempt
            and step.branch == self.branch
            and step.step > self.after
            and (self.upto is None or step.step <= self.upto)
        )


Lineage = tuple[Reach, ...]
"""Newest chain member first."""

ORBAX_ROOT = 0
"""Branch and attempt number of steps that Orbax wrote into the root."""


@dataclass(frozen=True)
class Remain:
    """A temporary name that was found: a step in the making, being deleted, or moved aside."""

    branch: int
    step: int
    attempt: int
    state: Literal["making", "deleted", "aside"]
    name: str
    complete: bool = False
    """All parts and images are there and agree; asked only of steps in the making."""


def owner(claims: Collection[int]) -> int:
    """The highest claimed number; 0 when nobody has claimed the run."""
    return max(claims, default=0)


def owns(attempt: int, claims: Collection[int]) -> bool:
    """The look: is `attempt` still the owner?"""
    return owner(claims) == attempt


def next_number(claims: Collection[int]) -> int:
    """The number to claim next."""
    return owner(claims) + 1


def head(decisions: Mapping[int, Decision]) -> Decision | None:
    """The decision of the highest number that has one; None for a run without decisions."""
    return decisions[max(decisions)] if decisions else None


def lineage(decisions: Mapping[int, Decision], of: Decision | None) -> Lineage:
    """Reaches of the chain of `of`, newest first.

    A run without decisions has the lineage of what Orbax left in the root.

    Raises:
        Damaged: a record that the chain needs is absent, or the chain does not descend.
    """
    reaches: list[Reach] = []
    upto: int | None = None
    current = of
    while current is not None:
        parent = current.parent
        after = parent.step if parent is not None else -1
        reaches.append(Reach(current.attempt, current.branch, after, upto))
        if parent is None:
            return tuple(reaches)
        upto = parent.step
        if parent.attempt == ORBAX_ROOT:
            break
        if parent.attempt >= current.attempt:
            raise Damaged(
                f"attempt {current.attempt} names attempt {parent.attempt} as the writer of its "
                "parent, which is not older; the attempt records are damaged"
            )
        if parent.attempt not in decisions:
            raise Damaged(
                f"attempt {current.attempt} continues from {parent}, but the record "
                f"attempts/{parent.attempt}.from.json is absent or damaged; put it back "
                "from a copy of the run, or restore that step by its path"
            )
        current = decisions[parent.attempt]
    reaches.append(Reach(ORBAX_ROOT, ORBAX_ROOT, -1, upto))
    return tuple(reaches)


def covers(line: Lineage, branch: int, step: int) -> bool:
    """Would a step of that name belong to the lineage, whatever attempt its marker told?"""
    return any(reach.holds(StepId(step, branch, reach.attempt)) for reach in line)


def counts(line: Lineage, step: StepId) -> bool:
    """Does a committed step belong to the lineage?"""
    return any(reach.holds(step) for reach in line)


def reach_of(line: Lineage, step: int) -> Reach:
    """The chain member to which a step number belongs, whether that step was saved or not."""
    return next(r for r in line if r.after < step and (r.upto is None or step <= r.upto))


def served(line: Lineage, batches: range) -> list[tuple[Reach, range]]:
    """The chain members that served a range of batches, with their shares. Batch b made step b + 1.

    What was skipped changes only from one member to the next.
    """
    shares = []
    start = batches.start
    while start < batches.stop:
        reach = reach_of(line, start + 1)
        stop = batches.stop if reach.upto is None else min(batches.stop, reach.upto)
        shares.append((reach, range(start, stop)))
        start = stop
    return shares


def counting(line: Lineage, steps: Iterable[StepId]) -> list[StepId]:
    """The steps that count, in ascending order."""
    return sorted(step for step in steps if counts(line, step))


def decide(
    attempt: int,
    kind: Kind,
    *,
    parent: StepId | None,
    newest: StepId | None,
    current: Decision | None,
    own_branch: bool = False,
    reason: str = "",
    skips: Skips | None = None,
    time_ns: int = 0,
    guard: Any = None,
) -> Decision:
    """The decision of `attempt`, which continues from `parent`.

    Args:
        parent: the step that was chosen; None for a run that starts from nothing.
        newest: the newest counting step at the time of the listing.
        current: the head's decision at the time of the listing.
        own_branch: the store cannot rename, so that no two attempts may share a branch.
        skips: new skips, on top of those of the head, which stay in force.
        guard: see `Decision`; kept by those who go on from the same step before one is saved.
    """
    stays = (
        not own_branch
        and kind in ("resume", "restore")
        and current is not None
        and parent is not None
        and parent == newest
    )
    branch = current.branch if stays and current is not None else attempt
    inherited = current.skips if current is not None else {}
    if stays and current is not None and parent == current.parent and guard is None:
        guard = current.guard
    joined = join_skips(inherited, skips or {})
    return Decision(attempt, kind, parent, branch, reason, joined, time_ns, guard)


def may_be_remade(line: Lineage, attempt: int, occupant: StepId | None) -> bool:
    """May a step that stands where `attempt` wants to publish be moved aside?

    `occupant` is None when its marker cannot be read: what is damaged is never cleaned up.
    """
    return occupant is not None and occupant.attempt < attempt and not counts(line, occupant)


@dataclass(frozen=True)
class Publish:
    """Roll forward: finish the commit of this step."""

    remain: Remain


@dataclass(frozen=True)
class Remove:
    """Roll forward: delete this temporary name."""

    remain: Remain


def roll_forward(
    attempt: int, line: Lineage, steps: Iterable[StepId], remains: Iterable[Remain]
) -> list[Publish | Remove]:
    """What a new attempt does with the temporary names it found, publishing in step order.

    `line` is the lineage of the head at the time of the listing, `steps` the committed steps.
    Names of attempts that are not older than `attempt` are left alone.
    """
    older = [remain for remain in remains if remain.attempt < attempt]
    newest = max((step.step for step in counting(line, steps)), default=-1)
    actions: list[Publish | Remove] = []
    for remain in sorted(older, key=lambda r: (r.step, r.attempt, r.name)):
        would_count = counts(line, StepId(remain.step, remain.branch, remain.attempt))
        if remain.state == "making" and remain.complete and would_count and remain.step > newest:
            actions.append(Publish(remain))
            newest = remain.step
        else:
            actions.append(Remove(remain))
    return actions


def may_put_back(attempt: int, seen: Collection[StepId], remain: Remain) -> bool:
    """May a step be taken back from its `-deleted` name?

    Only if this attempt saw it committed *after* its claim: then the deleter condemned it later,
    and its look will find the claim, so that it will not remove it.
    """
    return (
        remain.state == "deleted"
        and remain.attempt < attempt
        and any(s.branch == remain.branch and s.step == remain.step for s in seen)
    )


def condemned_under_head(line: Lineage, remains: Iterable[Remain]) -> list[tuple[StepId, Remain]]:
    """Names under which a step is condemned that a later attempt of the head's chain went on from.

    That one saw it committed after its claim, so an older attempt condemned it after that claim:
    whoever did it would have found the claim, and has removed nothing of it. It did not live to
    put it back. All of the chain, since a deleter may sleep while several attempts come and go.
    """
    went_on = {
        StepId(member.after, before.branch, before.attempt): member.attempt
        for member, before in pairwise(line)
    }
    return [
        (parent, remain)
        for remain in remains
        for parent, attempt in went_on.items()
        if remain.state == "deleted"
        and remain.attempt < attempt
        and (remain.branch, remain.step) == (parent.branch, parent.step)
    ]


def choose(
    line: Lineage, steps: Iterable[StepId], wanted: int | None = None, branch: int | None = None
) -> StepId | None:
    """The newest counting step, the counting step numbered `wanted`, or the one on a branch.

    Args:
        branch: with it the committed step `wanted` of that branch, whether it counts or not.

    Raises:
        NotFound: `wanted` is given and there is no such step.
    """
    there = sorted(step for step in steps if branch in (None, step.branch))
    found = counting(line, there) if branch is None else there
    if wanted is None:
        return found[-1] if found else None
    for step in found:
        if step.step == wanted:
            return step
    newest = ", ".join(str(s.step) for s in found[-8:]) or "none"
    if branch is not None:
        raise NotFound(f"step {wanted} is not on branch {branch}; newest steps there: {newest}")
    raise NotFound(f"step {wanted} is not in the lineage of the run; newest steps there: {newest}")


def line_before(decisions: Mapping[int, Decision], step: StepId) -> Lineage:
    """The lineage of who goes on from a step, whether the step counts now or not.

    It begins with the attempt that made the step and ends the reach of that attempt there.

    Raises:
        Damaged: a record that the chain needs is absent, or the chain does not descend.
    """
    after = max({step.attempt, *decisions}) + 1
    return lineage(decisions, Decision(after, "rewind", step, after))[1:]


def join_skips(*skips: Skips) -> dict[str, list[tuple[int, int]]]:
    """The union of several skip lists, sorted and disjoint."""
    merged: dict[str, list[tuple[int, int]]] = {}
    for name in sorted({name for each in skips for name in each}):
        ranges = sorted((int(a), int(b)) for each in skips for a, b in each.get(name, ()) if a < b)
        joined: list[tuple[int, int]] = []
        for start, stop in ranges:
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        if joined:
            merged[name] = joined
    return merged

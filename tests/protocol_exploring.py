"""Every interleaving of attempts of the protocol model, and what must hold in every state."""

from __future__ import annotations

from protocol_model import Actor, Record, Script, Violation, World, advance

from ckpt import lineage
from ckpt.lineage import StepId


def play(
    world: World, script: Script, until: str = "end", *, wrote: int = 0
) -> tuple[World, Actor]:
    """One attempt, undisturbed, until it is at an operation and has written as many files."""
    actor = Actor(script)
    for _ in range(1000):
        if (actor.at, actor.wrote) == (until, wrote):
            return world, actor
        world, actor = advance(world, actor)
    raise Violation(f"an undisturbed attempt does not end: {actor}")


def explore(world: World, scripts: list[Script], paused: tuple[Actor, ...] = ()) -> int:
    """Every interleaving of the scripts, stopped (killed) after every operation.

    In every state the invariants are checked, and a further attempt must find the run in order.
    Returns the number of states.

    Args:
        paused: attempts that had begun before, and wake up.
    """
    start = (world, (*paused, *(Actor(script) for script in scripts)))
    seen = {start}
    stack = [start]
    audited: set[World] = set()
    while stack:
        world, actors = stack.pop()
        check(world)
        if world not in audited:
            audited.add(world)
            audit(world)
        for number, actor in enumerate(actors):
            if actor.done:
                continue
            after, moved = advance(world, actor)
            state = (after, (*actors[:number], moved, *actors[number + 1 :]))
            if state not in seen:
                seen.add(state)
                stack.append(state)
    return len(seen)


def check(world: World) -> None:
    """The invariants that a single state can break."""
    line = world.line()
    for number, tier in enumerate(world.tiers):
        for step in tier.torn():
            raise Violation(f"M1: {step} is committed and incomplete")
        counting = lineage.counting(line, tier.steps())
        if len({s.step for s in counting}) != len(counting):
            raise Violation(f"M8: two versions of a step count: {counting}")
        for step in (s for n, s in world.acked if n == number):
            if (number, step) in world.condemned:
                continue
            if not lineage.counts(line, step) and not _went_back(world, step):
                raise Violation(f"M3: {step} was acknowledged and does not count: {line}")
            if step not in tier.steps() and not tier.in_limbo(step):
                raise Violation(f"M2: {step} was acknowledged and is gone from tier {number}")
    _check_fork_point(world, line)


def _went_back(world: World, step: StepId) -> bool:
    """Did a later attempt leave this step behind, and has none of the run as it is come back?"""
    records = {r.attempt: r for r in world.records}
    later = [r for r in records.values() if r.attempt > step.attempt and r.kind in _BACK]
    of_the_run = _ancestors(records, records[max(records)]) if records else {}
    left = [r.attempt for r in later if not _comes_after(records, r, step)]
    back = [
        r.attempt
        for r in later
        if _comes_after(records, r, step) and r.attempt in {max(records), *of_the_run}
    ]
    return bool(left) and max(left) > max(back, default=0)


_BACK = ("rewind", "restore", "fallback")


def _comes_after(records: dict[int, Record], record: Record, step: StepId) -> bool:
    return step.step <= _ancestors(records, record).get(step.attempt, -1)


def _ancestors(records: dict[int, Record], record: Record) -> dict[int, int]:
    """The attempts on which an attempt builds, each with the last step that it has of them.

    Told from the records alone, not by what is to be checked.
    """
    found: dict[int, int] = {}
    parent = record.parent
    while parent is not None and parent.attempt in records:
        found[parent.attempt] = parent.step
        parent = records[parent.attempt].parent
    return found


def _check_fork_point(world: World, line: lineage.Lineage) -> None:
    """Until two steps of the newest branch count, one can go back to where it forked."""
    parent = _fork_point(world, line)
    if parent is not None and not any(
        parent in tier.steps() or tier.in_limbo(parent) for tier in world.tiers
    ):
        raise Violation(f"M4: the fork point {parent} of the newest branch is gone")


def _fork_point(world: World, line: lineage.Lineage) -> StepId | None:
    """The step that is not to be lost; None when there is no such."""
    head = lineage.head(world.decisions())
    if head is None or head.branch not in world.decisions():
        return None
    parent = world.decisions()[head.branch].parent
    if parent is None or not lineage.counts(line, parent):
        return None
    if all(step != parent for _, step in world.published):
        return None  # it was only ever an image
    for number in range(len(world.tiers)):
        own = [s for n, s in world.published if n == number and s.branch == head.branch]
        if len(lineage.counting(line, own)) >= 2:
            return None
    return parent


def audit(world: World) -> None:
    """Everybody dies now. The next attempt must find the newest step, and leave order behind."""
    for host in [None, *sorted({host for host, _ in world.images})]:
        _audit(world, host)


def _audit(world: World, host: int | None) -> None:
    line = world.line()
    whole = [step for tier in world.tiers for step in tier.unpublished()]
    before = set(lineage.counting(line, whole))
    before |= {s for tier in world.tiers for s in lineage.counting(line, tier.steps())}
    before |= set(lineage.counting(line, (s for at, s in world.images if at == host)))
    after, actor = play(world, Script("resume", saves=1, host=host))
    if actor.outcome != "finished":
        raise Violation(f"the next attempt ended with {actor.outcome!r}")
    fork = _fork_point(world, line)
    if fork is not None and not any(fork in tier.steps() for tier in after.tiers):
        raise Violation(f"M4: the next attempt did not put back {fork}")
    if before and (actor.chosen is None or actor.chosen.step < max(before).step):
        raise Violation(f"the next attempt took {actor.chosen}, newest was {max(before)}")
    own = StepId(actor.step - 1, actor.branch, actor.number)
    if lineage.choose(after.line(), after.tiers[0].steps()) != own:
        raise Violation(f"the next attempt saved {own}, and it is not the newest")
    left = [r for tier in after.tiers for r in tier.remains() if r.attempt < actor.number]
    if left:
        raise Violation(f"S1: left behind: {left}")
    check(after)

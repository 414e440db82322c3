"""A model of a run's stores and of attempts that race on them.

Worlds and actors are immutable values; `step` gives the one successor of an actor's next store
operation. What is *decided* is decided by the product's functions in `ckpt.lineage` and
`ckpt.retention`, called through their modules so that a test can plant a bug in them.
The home store (number 0) holds the attempt records; every store holds steps. There are stores that
rename (`Tier`) and stores that swap markers (`SwapTier`), as in `ckpt.publishing`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from protocol_stores import IMAGE, PART, SwapTier, Tier

from ckpt import lineage, retention
from ckpt.errors import CheckpointError
from ckpt.lineage import Decision, Publish, StepId
from ckpt.retention import Keep


class Violation(AssertionError):
    """An invariant of FORMAT.md section 4 does not hold."""


class Record(NamedTuple):
    """A decision, hashable."""

    attempt: int
    kind: str
    parent: StepId | None
    branch: int
    skips: tuple[tuple[int, int], ...]

    def decision(self) -> Decision:
        skips = {"data": list(self.skips)} if self.skips else {}
        return Decision(self.attempt, self.kind, self.parent, self.branch, "", skips)


class World(NamedTuple):
    claims: frozenset[int]
    records: frozenset[Record]
    tiers: tuple[Tier | SwapTier, ...]
    acked: frozenset[tuple[int, StepId]] = frozenset()
    condemned: frozenset[tuple[int, StepId]] = frozenset()
    """What retention gave up on purpose, and was not put back."""
    published: frozenset[tuple[int, StepId]] = frozenset()
    """Every step that ever had a final name."""
    images: frozenset[tuple[int, StepId]] = frozenset()
    """(host, step): what arenas and disks of hosts hold."""

    def decisions(self) -> dict[int, Decision]:
        return {r.attempt: r.decision() for r in self.records}

    def line(self) -> lineage.Lineage:
        decisions = self.decisions()
        return lineage.lineage(decisions, lineage.head(decisions))

    def tier(self, number: int, tier: Tier | SwapTier) -> World:
        new = frozenset((number, step) for step in tier.steps())
        return self._replace(
            tiers=(*self.tiers[:number], tier, *self.tiers[number + 1 :]),
            published=self.published | new,
        )


@dataclass(frozen=True)
class Script:
    """What an attempt wants to do."""

    kind: str = "resume"
    to: int | None = None
    skip: tuple[int, int] | None = None
    saves: int = 2
    host: int | None = None
    """Where its images lie, and those that it finds; None: on a host that keeps none."""
    every: int = 1
    """Only these steps go to the stores; the others are images on the host."""
    promotes: bool = False
    """The step that it went on from is published first, if no store has it."""
    keep: Keep = field(default_factory=Keep)


@dataclass(frozen=True)
class Actor:
    """One attempt in progress. `at` names the next store operation."""

    script: Script
    at: str = "list claims"
    number: int = 0
    heard: World | None = None
    """Decisions and steps as listed after the claim."""
    actions: tuple = ()
    seen: frozenset[StepId] = frozenset()
    chosen: StepId | None = None
    branch: int = 0
    step: int = 0
    promoting: bool = False
    saved: int = 0
    wrote: int = 0
    tier: int = 0
    doomed: tuple[StepId, ...] = ()
    outcome: str = ""

    @property
    def done(self) -> bool:
        return self.at == "end"


def advance(world: World, actor: Actor) -> tuple[World, Actor]:
    """The next store operation of one actor."""
    return _OPERATIONS[actor.at](world, actor)


def _end(actor: Actor, outcome: str) -> Actor:
    return replace(actor, at="end", outcome=outcome, heard=None, actions=(), doomed=())


def _list_claims(world: World, actor: Actor) -> tuple[World, Actor]:
    return world, replace(actor, number=lineage.next_number(world.claims), at="claim")


def _claim(world: World, actor: Actor) -> tuple[World, Actor]:
    if actor.number in world.claims:
        return world, replace(actor, at="list claims")
    return world._replace(claims=world.claims | {actor.number}), replace(actor, at="list records")


def _list_records(world: World, actor: Actor) -> tuple[World, Actor]:
    return world, replace(actor, heard=world, at="list steps", tier=0)


def _list_steps(world: World, actor: Actor) -> tuple[World, Actor]:
    """Decisions were read before, steps are read now: listing a run is not one operation."""
    assert actor.heard is not None
    heard = actor.heard._replace(tiers=world.tiers)
    line = heard.line()
    actions = tuple(
        (number, action)
        for number, tier in enumerate(world.tiers)
        for action in lineage.roll_forward(actor.number, line, tier.steps(), tier.remains())
    )
    return world, replace(actor, heard=heard, actions=actions, at="roll forward")


def _roll_forward(world: World, actor: Actor) -> tuple[World, Actor]:
    if not actor.actions:
        return world, replace(actor, at="list again")
    (number, action), rest = actor.actions[0], actor.actions[1:]
    remain, tier = action.remain, world.tiers[number]
    if isinstance(action, Publish):
        step = StepId(remain.step, remain.branch, remain.attempt)
        if step not in tier.unpublished():
            return world, replace(actor, actions=rest)
        at = "prepare remain" if tier.own_branch else "look before publishing remain"
        return world, replace(actor, at=at)
    taken = tier.take_over(remain, actor.number)
    if taken is None:
        return world, replace(actor, actions=rest)
    return world.tier(number, taken), replace(actor, at="look before removing remain")


def _prepare_remain(world: World, actor: Actor) -> tuple[World, Actor]:
    number, action = actor.actions[0]
    step = StepId(action.remain.step, action.remain.branch, action.remain.attempt)
    world = world.tier(number, world.tiers[number].prepare(step))
    return world, replace(actor, at="look before publishing remain")


def _look_before_publishing_remain(world: World, actor: Actor) -> tuple[World, Actor]:
    if not lineage.owns(actor.number, world.claims):
        return world, _end(actor, "superseded")
    return world, replace(actor, at="publish remain")


def _publish_remain(world: World, actor: Actor) -> tuple[World, Actor]:
    (number, action), rest = actor.actions[0], actor.actions[1:]
    remain, tier = action.remain, world.tiers[number]
    step = StepId(remain.step, remain.branch, remain.attempt)
    if tier.taken(step, step.attempt):
        occupant = tier.occupant(step)
        assert actor.heard is not None
        if not lineage.may_be_remade(actor.heard.line(), actor.number, occupant):
            raise Violation(f"attempt {actor.number} cannot roll forward: {occupant}")
        assert isinstance(tier, Tier)
        return world.tier(number, tier.set_aside(step, actor.number)), actor
    after = tier.publish(step, actor.number, step.attempt)
    if after is not None:
        world = world.tier(number, after)
    return world, replace(actor, actions=rest, at="roll forward")


def _look_before_removing_remain(world: World, actor: Actor) -> tuple[World, Actor]:
    if not lineage.owns(actor.number, world.claims):
        return world, _end(actor, "superseded")
    return world, replace(actor, at="remove remain")


def _remove_remain(world: World, actor: Actor) -> tuple[World, Actor]:
    (number, action), rest = actor.actions[0], actor.actions[1:]
    remain = action.remain
    tier, all_gone = world.tiers[number].remove(remain.branch, remain.step, actor.number)
    if all_gone:
        actor = replace(actor, actions=rest, at="roll forward")
    return world.tier(number, tier), actor


def _list_again(world: World, actor: Actor) -> tuple[World, Actor]:
    assert actor.heard is not None
    heard = actor.heard._replace(tiers=world.tiers)
    line = heard.line()
    steps = {step for tier in heard.tiers for step in tier.steps()} | _images(world, actor)
    seen = frozenset(lineage.counting(line, steps))
    try:
        chosen = lineage.choose(line, steps, actor.script.to)
    except CheckpointError:
        return world, _end(actor, "not found")
    return world, replace(actor, heard=heard, seen=seen, chosen=chosen, at="read")


def _images(world: World, actor: Actor) -> set[StepId]:
    return {step for host, step in world.images if host == actor.script.host}


def _read(world: World, actor: Actor) -> tuple[World, Actor]:
    chosen = actor.chosen
    there = _images(world, actor).union(*(tier.steps() for tier in world.tiers))
    if chosen is None or chosen in there:
        return world, replace(actor, at="decide")
    for number, tier in enumerate(world.tiers):
        for remain in tier.remains():
            if (remain.branch, remain.step) == (chosen.branch, chosen.step) and (
                lineage.may_put_back(actor.number, actor.seen, remain)
            ):
                after = tier.put_back(chosen, remain.attempt)
                assert after is not None
                return world.tier(number, after), actor
    if not lineage.owns(actor.number, world.claims):
        return world, _end(actor, "superseded")
    raise Violation(f"M4: attempt {actor.number} saw {chosen} after its claim, and it is gone")


def _decide(world: World, actor: Actor) -> tuple[World, Actor]:
    assert actor.heard is not None
    newest = max(actor.seen, default=None)
    current = lineage.head(actor.heard.decisions())
    script = actor.script
    kind = script.kind if actor.chosen is not None else "start"
    skips = {"data": [script.skip]} if script.skip else {}
    decision = lineage.decide(
        actor.number,
        kind,
        parent=actor.chosen,
        newest=newest,
        current=current,
        own_branch=world.tiers[0].own_branch,
        skips=skips,
    )
    if current is not None and not _covers(decision.skips, current.skips):
        raise Violation(f"attempt {actor.number} forgot skips of attempt {current.attempt}")
    if not _covers(decision.skips, skips):
        raise Violation(f"attempt {actor.number} forgot its own skips")
    record = Record(
        actor.number, kind, decision.parent, decision.branch, tuple(decision.skips.get("data", ()))
    )
    if any(r.attempt == actor.number for r in world.records):
        raise Violation(f"M6: attempt {actor.number} decided twice")
    step = decision.parent.step + 1 if decision.parent else 0
    unpublished = not any(actor.chosen in tier.steps() for tier in world.tiers)
    promoting = script.promotes and actor.chosen is not None and unpublished
    at = "write" if promoting else "copy"
    after = replace(actor, branch=decision.branch, step=step, heard=None, at=at, tier=0)
    after = replace(after, promoting=promoting)
    return world._replace(records=world.records | {record}), after


def _covers(wide: lineage.Skips, narrow: lineage.Skips) -> bool:
    return lineage.join_skips(wide, narrow) == lineage.join_skips(wide)


def _copy(world: World, actor: Actor) -> tuple[World, Actor]:
    """Into the arena; what is not due in the stores stays there."""
    if actor.saved == actor.script.saves:
        return world, _end(actor, "finished")
    host = actor.script.host
    if host is not None:
        world = world._replace(images=world.images | {(host, _own(actor))})
    due = actor.step % actor.script.every == 0
    return world, replace(actor, at="write") if due else _after_all_tiers(actor)


def _write(world: World, actor: Actor) -> tuple[World, Actor]:
    """Image first, then part; both in the directory that the attempt of the step makes."""
    file = PART if actor.wrote else IMAGE
    tier = world.tiers[actor.tier].write(_own(actor), file, actor.number)
    at = "prepare" if tier.own_branch else "look"
    after = replace(actor, wrote=0, at=at) if actor.wrote else replace(actor, wrote=1)
    return world.tier(actor.tier, tier), after


def _prepare(world: World, actor: Actor) -> tuple[World, Actor]:
    tier = world.tiers[actor.tier].prepare(_own(actor))
    return world.tier(actor.tier, tier), replace(actor, at="look")


def _own(actor: Actor) -> StepId:
    """The step that is being made."""
    if actor.promoting:
        assert actor.chosen is not None
        return actor.chosen
    return StepId(actor.step, actor.branch, actor.number)


def _look(world: World, actor: Actor) -> tuple[World, Actor]:
    if not lineage.owns(actor.number, world.claims):
        return world, _end(actor, "superseded")
    return world, replace(actor, at="publish")


def _publish(world: World, actor: Actor) -> tuple[World, Actor]:
    tier, step = world.tiers[actor.tier], _own(actor)
    if tier.taken(step, actor.number):
        occupant = tier.occupant(step)
        if occupant == step:
            return world, replace(actor, at="look again")
        if not lineage.may_be_remade(world.line(), actor.number, occupant):
            if lineage.owns(actor.number, world.claims):
                raise Violation(
                    f"attempt {actor.number} owns the run and cannot publish: {occupant}"
                )
            return world, _end(actor, "superseded")
        assert isinstance(tier, Tier)
        return world.tier(actor.tier, tier.set_aside(step, actor.number)), actor
    after = tier.publish(step, actor.number, actor.number)
    if after is not None:
        world = world.tier(actor.tier, after)
    # None: somebody rolled it forward or removed it: the look afterwards tells.
    return world, replace(actor, at="look again")


def _look_again(world: World, actor: Actor) -> tuple[World, Actor]:
    if not lineage.owns(actor.number, world.claims):
        return world, _end(actor, "superseded")
    step = _own(actor)
    # From here on `Pending.wait` returns for this tier.
    return world._replace(acked=world.acked | {(actor.tier, step)}), replace(actor, at="retain")


def _retain(world: World, actor: Actor) -> tuple[World, Actor]:
    line = world.line()
    steps = lineage.counting(line, world.tiers[actor.tier].steps())
    doomed = tuple(retention.doomed(actor.script.keep, line, steps))
    return world, _next_doomed(actor, doomed)


def _next_doomed(actor: Actor, doomed: tuple[StepId, ...]) -> Actor:
    if doomed:
        return replace(actor, doomed=doomed, at="condemn")
    return replace(actor, doomed=(), at="next")


def _condemn(world: World, actor: Actor) -> tuple[World, Actor]:
    step = actor.doomed[0]
    tier = world.tiers[actor.tier].condemn(step, actor.number)
    if tier is None:
        return world, _next_doomed(actor, actor.doomed[1:])
    world = world._replace(condemned=world.condemned | {(actor.tier, step)})
    return world.tier(actor.tier, tier), replace(actor, at="look before removing")


def _look_before_removing(world: World, actor: Actor) -> tuple[World, Actor]:
    if lineage.owns(actor.number, world.claims):
        return world, replace(actor, at="remove")
    return world, replace(actor, at="put back")


def _put_back(world: World, actor: Actor) -> tuple[World, Actor]:
    tier = world.tiers[actor.tier].put_back(actor.doomed[0], actor.number)
    if tier is not None:
        world = world._replace(condemned=world.condemned - {(actor.tier, actor.doomed[0])})
        world = world.tier(actor.tier, tier)
    return world, _end(actor, "superseded")


def _remove(world: World, actor: Actor) -> tuple[World, Actor]:
    step = actor.doomed[0]
    tier, all_gone = world.tiers[actor.tier].remove(step.branch, step.step, actor.number)
    if all_gone:
        actor = _next_doomed(actor, actor.doomed[1:])
    return world.tier(actor.tier, tier), actor


def _next(world: World, actor: Actor) -> tuple[World, Actor]:
    """The same step for the next tier, or the next step."""
    if actor.tier + 1 < len(world.tiers):
        return world, replace(actor, tier=actor.tier + 1, at="write")
    return world, _after_all_tiers(actor)


def _after_all_tiers(actor: Actor) -> Actor:
    if actor.promoting:
        return replace(actor, promoting=False, tier=0, at="copy")
    return replace(actor, tier=0, step=actor.step + 1, saved=actor.saved + 1, at="copy")


_OPERATIONS = {
    "list claims": _list_claims,
    "claim": _claim,
    "list records": _list_records,
    "list steps": _list_steps,
    "roll forward": _roll_forward,
    "prepare remain": _prepare_remain,
    "look before publishing remain": _look_before_publishing_remain,
    "publish remain": _publish_remain,
    "look before removing remain": _look_before_removing_remain,
    "remove remain": _remove_remain,
    "list again": _list_again,
    "read": _read,
    "decide": _decide,
    "copy": _copy,
    "write": _write,
    "prepare": _prepare,
    "look": _look,
    "publish": _publish,
    "look again": _look_again,
    "retain": _retain,
    "condemn": _condemn,
    "look before removing": _look_before_removing,
    "put back": _put_back,
    "remove": _remove,
    "next": _next,
}


# --- exploring and checking ------------------------------------------------------------------


def play(world: World, script: Script) -> tuple[World, Actor]:
    """One attempt, undisturbed."""
    actor = Actor(script)
    for _ in range(1000):
        if actor.done:
            return world, actor
        world, actor = advance(world, actor)
    raise Violation(f"an undisturbed attempt does not end: {actor}")


def explore(world: World, scripts: list[Script]) -> int:
    """Every interleaving of the scripts, stopped (killed) after every operation.

    In every state the invariants are checked, and a further attempt must find the run in order.
    Returns the number of states.
    """
    start = (world, tuple(Actor(script) for script in scripts))
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
    records = {r.attempt: r for r in world.records}
    for number, tier in enumerate(world.tiers):
        for step in tier.torn():
            raise Violation(f"M1: {step} is committed and incomplete")
        counting = lineage.counting(line, tier.steps())
        if len({s.step for s in counting}) != len(counting):
            raise Violation(f"M8: two versions of a step count: {counting}")
        for step in (s for n, s in world.acked if n == number):
            if (number, step) in world.condemned:
                continue
            if not _went_back(records, step) and not lineage.counts(line, step):
                raise Violation(f"M3: {step} was acknowledged and does not count: {line}")
            if step not in tier.steps() and not tier.in_limbo(step):
                raise Violation(f"M2: {step} was acknowledged and is gone from tier {number}")
    _check_fork_point(world, line)


def _went_back(records: dict[int, Record], step: StepId) -> bool:
    """A later attempt chose to continue from before this step."""
    return any(
        r.attempt > step.attempt
        and r.kind in ("rewind", "restore", "fallback")
        and (r.parent is None or r.parent.step < step.step)
        for r in records.values()
    )


def _check_fork_point(world: World, line: lineage.Lineage) -> None:
    """Until two steps of the newest branch count, one can go back to where it forked."""
    head = lineage.head(world.decisions())
    if head is None or head.branch not in world.decisions():
        return
    parent = world.decisions()[head.branch].parent
    if parent is None or not lineage.counts(line, parent):
        return
    if all(step != parent for _, step in world.published):
        return  # it was only ever an image
    for number in range(len(world.tiers)):
        own = [s for n, s in world.published if n == number and s.branch == head.branch]
        if len(lineage.counting(line, own)) >= 2:
            return
    if not any(parent in tier.steps() or tier.in_limbo(parent) for tier in world.tiers):
        raise Violation(f"M4: the fork point {parent} of branch {head.branch} is gone")


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
    if before and (actor.chosen is None or actor.chosen.step < max(before).step):
        raise Violation(f"the next attempt took {actor.chosen}, newest was {max(before)}")
    own = StepId(actor.step - 1, actor.branch, actor.number)
    if lineage.choose(after.line(), after.tiers[0].steps()) != own:
        raise Violation(f"the next attempt saved {own}, and it is not the newest")
    left = [r for tier in after.tiers for r in tier.remains() if r.attempt < actor.number]
    if left:
        raise Violation(f"S1: left behind: {left}")
    check(after)


def empty(tiers: int, *, renames: bool = True) -> World:
    return World(frozenset(), frozenset(), (Tier() if renames else SwapTier(),) * tiers)

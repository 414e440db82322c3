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
from ckpt.lineage import Decision, Publish, Remain, StepId
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

    def line(self, attempt: int | None = None) -> lineage.Lineage:
        """That of an attempt, by default of the head."""
        decisions = self.decisions()
        return lineage.lineage(decisions, decisions.get(attempt, lineage.head(decisions)))

    def tier(self, number: int, tier: Tier | SwapTier) -> World:
        new = frozenset((number, step) for step in tier.steps())
        return self._replace(
            tiers=(*self.tiers[:number], tier, *self.tiers[number + 1 :]),
            published=self.published | new,
        )


class PutBack(NamedTuple):
    """To do for an attempt that found the step condemned that the head went on from."""

    step: StepId
    remain: Remain


@dataclass(frozen=True)
class Script:
    """What an attempt wants to do."""

    kind: str = "resume"
    to: int | None = None
    branch: int | None = None
    """On which `to` lies, if not in the lineage."""
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
    actions: list[tuple] = []
    for number, tier in enumerate(world.tiers):
        kept = [
            (step, remain)
            for step, remain in lineage.condemned_under_head(line, tier.remains())
            if tier.was_committed(step, remain)
        ]
        actions += [(number, PutBack(step, remain)) for step, remain in kept]
        remains = [r for r in tier.remains() if all(r != remain for _, remain in kept)]
        todo = lineage.roll_forward(actor.number, line, tier.steps(), remains)
        actions += [(number, action) for action in todo]
    return world, replace(actor, heard=heard, actions=tuple(actions), at="roll forward")


def _roll_forward(world: World, actor: Actor) -> tuple[World, Actor]:
    if not actor.actions:
        return world, replace(actor, at="list again")
    (number, action), rest = actor.actions[0], actor.actions[1:]
    remain, tier = action.remain, world.tiers[number]
    if isinstance(action, PutBack):
        back = tier.put_back(action.step, remain.attempt)
        world = world if back is None else world.tier(number, back)
        return world, replace(actor, actions=rest)
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
    to, branch = actor.script.to, actor.script.branch
    asked = {s for s in steps if (s.step, s.branch) == (to, branch)}
    try:
        chosen = lineage.choose(line, steps, to, branch)
    except CheckpointError:
        if asked:
            raise Violation(f"{asked} is there, and cannot be gone back to") from None
        return world, _end(actor, "not found")
    if branch is not None and chosen not in asked:
        raise Violation(f"asked for step {to} of branch {branch}, got {chosen}")
    return world, replace(actor, heard=heard, seen=frozenset(steps), chosen=chosen, at="read")


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
    newest = max(lineage.counting(actor.heard.line(), actor.seen), default=None)
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
    """By the lineage of the attempt, which may own the run no longer."""
    line, steps = world.line(actor.number), world.tiers[actor.tier].steps()
    doomed = tuple(retention.doomed(actor.script.keep, line, steps))
    for step in doomed:
        if step.attempt > actor.number:
            raise Violation(f"M7: attempt {actor.number} is to delete {step}")
    counting = set(lineage.counting(line, steps))
    _check_branches(actor, set(steps) - counting, doomed)
    if actor.script.keep.last is None and counting & set(doomed):
        raise Violation(f"attempt {actor.number} keeps all that counts, but {doomed} are to go")
    return world, _next_doomed(actor, doomed)


def _check_branches(actor: Actor, left: set[StepId], doomed: tuple[StepId, ...]) -> None:
    """Of the branches that were left the newest stay, whole, and no other."""
    keep = actor.script.keep.branches
    there = {s for s in left if s.attempt <= actor.number}
    newest = sorted({s.branch for s in there}, reverse=True)[:keep]
    stay = {s for s in there if s.branch in newest}
    if there - set(doomed) != stay:
        wrong = sorted(stay ^ (there - set(doomed)))
        raise Violation(f"branches={keep}: of {sorted(there)} these are wrong: {wrong}")


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


def empty(tiers: int, *, renames: bool = True) -> World:
    return World(frozenset(), frozenset(), (Tier() if renames else SwapTier(),) * tiers)

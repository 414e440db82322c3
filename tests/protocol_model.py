"""A model of a run's stores and of attempts that race on them.

Worlds and actors are immutable values; `step` gives the one successor of an actor's next store
operation. What is *decided* is decided by the product's functions in `ckpt.lineage` and
`ckpt.retention`, called through their modules so that a test can plant a bug in them.
The home store (number 0) holds the attempt records; every store holds steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

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


class Tier(NamedTuple):
    """One store. A step under a final name: (branch, step, attempt, progress)."""

    final: frozenset[tuple[int, int, int, int]] = frozenset()
    making: frozenset[tuple[int, int, int, int]] = frozenset()
    trash: frozenset[tuple[int, int, int, int, int, str]] = frozenset()
    """(branch, step, attempt of the step, progress, attempt that moved it, state)"""

    def steps(self) -> list[StepId]:
        return [StepId(s, b, a) for b, s, a, _ in self.final]

    def remains(self) -> list[Remain]:
        made = [Remain(b, s, a, "making", f"{b}/{s}-{a}", p == 2) for b, s, a, p in self.making]
        moved = [
            Remain(b, s, by, state, f"{b}/{s}-{by}-{state}") for b, s, _, _, by, state in self.trash
        ]
        return made + moved

    def occupant(self, branch: int, step: int) -> tuple[int, int, int, int] | None:
        return next((f for f in self.final if f[:2] == (branch, step)), None)


class World(NamedTuple):
    claims: frozenset[int]
    records: frozenset[Record]
    tiers: tuple[Tier, ...]
    acked: frozenset[tuple[int, StepId]] = frozenset()
    condemned: frozenset[tuple[int, StepId]] = frozenset()
    """What retention gave up on purpose, and was not put back."""
    published: frozenset[tuple[int, StepId]] = frozenset()
    """Every step that ever had a final name."""

    def decisions(self) -> dict[int, Decision]:
        return {r.attempt: r.decision() for r in self.records}

    def line(self) -> lineage.Lineage:
        decisions = self.decisions()
        return lineage.lineage(decisions, lineage.head(decisions))

    def tier(self, number: int, tier: Tier) -> World:
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
    saved: int = 0
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
        made = _making(tier, remain)
        if made is not None:
            if not lineage.owns(actor.number, world.claims):
                return world, _end(actor, "superseded")
            there = tier.occupant(remain.branch, remain.step)
            if there is not None:
                occupant = StepId(there[1], there[0], there[2])
                assert actor.heard is not None
                if not lineage.may_be_remade(actor.heard.line(), actor.number, occupant):
                    raise Violation(f"attempt {actor.number} cannot roll forward: {occupant}")
                moved = (*there, actor.number, "aside")
                tier = tier._replace(final=tier.final - {there}, trash=tier.trash | {moved})
                return world.tier(number, tier), actor
            tier = tier._replace(making=tier.making - {made}, final=tier.final | {made})
        return world.tier(number, tier), replace(actor, actions=rest)
    # Removing: first out of the way under a name of this attempt, then gone.
    if remain.state == "making":
        made = _making(tier, remain)
        if made is not None:
            moved = (*made, actor.number, "deleted")
            tier = tier._replace(making=tier.making - {made}, trash=tier.trash | {moved})
    else:
        old = _trashed(tier, remain)
        if old is not None:
            moved = (*old[:4], actor.number, "deleted")
            tier = tier._replace(trash=tier.trash - {old} | {moved})
    return world.tier(number, tier), replace(actor, at="remove remain")


def _remove_remain(world: World, actor: Actor) -> tuple[World, Actor]:
    (number, action), rest = actor.actions[0], actor.actions[1:]
    tier = world.tiers[number]
    gone = {
        t
        for t in tier.trash
        if t[:2] == (action.remain.branch, action.remain.step) and t[4] == actor.number
    }
    tier = tier._replace(trash=tier.trash - gone)
    return world.tier(number, tier), replace(actor, actions=rest, at="roll forward")


def _list_again(world: World, actor: Actor) -> tuple[World, Actor]:
    assert actor.heard is not None
    heard = actor.heard._replace(tiers=world.tiers)
    line = heard.line()
    steps = {step for tier in heard.tiers for step in tier.steps()}
    seen = frozenset(lineage.counting(line, steps))
    try:
        chosen = lineage.choose(line, steps, actor.script.to)
    except CheckpointError:
        return world, _end(actor, "not found")
    return world, replace(actor, heard=heard, seen=seen, chosen=chosen, at="read")


def _read(world: World, actor: Actor) -> tuple[World, Actor]:
    chosen = actor.chosen
    if chosen is None or any(chosen in tier.steps() for tier in world.tiers):
        return world, replace(actor, at="decide")
    for number, tier in enumerate(world.tiers):
        for remain in tier.remains():
            if (remain.branch, remain.step) == (chosen.branch, chosen.step) and (
                lineage.may_put_back(actor.number, actor.seen, remain)
            ):
                old = _trashed(tier, remain)
                assert old is not None
                tier = tier._replace(trash=tier.trash - {old}, final=tier.final | {old[:4]})
                return world.tier(number, tier), actor
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
        actor.number, kind, parent=actor.chosen, newest=newest, current=current, skips=skips
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
    after = replace(actor, branch=decision.branch, step=step, heard=None, at="write", tier=0)
    return world._replace(records=world.records | {record}), after


def _covers(wide: lineage.Skips, narrow: lineage.Skips) -> bool:
    return lineage.join_skips(wide, narrow) == lineage.join_skips(wide)


def _write(world: World, actor: Actor) -> tuple[World, Actor]:
    """Image first, then part; both in the directory that this attempt makes."""
    if actor.saved == actor.script.saves:
        return world, _end(actor, "finished")
    tier = world.tiers[actor.tier]
    mine = [m for m in tier.making if m[:3] == (actor.branch, actor.step, actor.number)]
    progress = mine[0][3] if mine else 0
    made = (actor.branch, actor.step, actor.number, progress + 1)
    tier = tier._replace(making=tier.making - set(mine) | {made})
    at = "look" if progress + 1 == 2 else "write"
    return world.tier(actor.tier, tier), replace(actor, at=at)


def _look(world: World, actor: Actor) -> tuple[World, Actor]:
    if not lineage.owns(actor.number, world.claims):
        return world, _end(actor, "superseded")
    return world, replace(actor, at="publish")


def _publish(world: World, actor: Actor) -> tuple[World, Actor]:
    tier = world.tiers[actor.tier]
    made = next((m for m in tier.making if m[:3] == (actor.branch, actor.step, actor.number)), None)
    if made is None:
        # Somebody rolled it forward or removed it: the look afterwards tells.
        return world, replace(actor, at="look again")
    there = tier.occupant(actor.branch, actor.step)
    if there is None:
        tier = tier._replace(making=tier.making - {made}, final=tier.final | {made})
        return world.tier(actor.tier, tier), replace(actor, at="look again")
    occupant = StepId(there[1], there[0], there[2])
    if occupant.attempt == actor.number:
        return world, replace(actor, at="look again")
    if not lineage.may_be_remade(world.line(), actor.number, occupant):
        if lineage.owns(actor.number, world.claims):
            raise Violation(f"attempt {actor.number} owns the run and cannot publish: {occupant}")
        return world, _end(actor, "superseded")
    moved = (*there, actor.number, "aside")
    tier = tier._replace(final=tier.final - {there}, trash=tier.trash | {moved})
    return world.tier(actor.tier, tier), actor


def _look_again(world: World, actor: Actor) -> tuple[World, Actor]:
    if not lineage.owns(actor.number, world.claims):
        return world, _end(actor, "superseded")
    step = StepId(actor.step, actor.branch, actor.number)
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
    step, tier = actor.doomed[0], world.tiers[actor.tier]
    there = next((f for f in tier.final if StepId(f[1], f[0], f[2]) == step), None)
    if there is None:
        return world, _next_doomed(actor, actor.doomed[1:])
    moved = (*there, actor.number, "deleted")
    tier = tier._replace(final=tier.final - {there}, trash=tier.trash | {moved})
    world = world._replace(condemned=world.condemned | {(actor.tier, step)})
    return world.tier(actor.tier, tier), replace(actor, at="look before removing")


def _look_before_removing(world: World, actor: Actor) -> tuple[World, Actor]:
    if lineage.owns(actor.number, world.claims):
        return world, replace(actor, at="remove")
    return world, replace(actor, at="put back")


def _condemned_entry(world: World, actor: Actor) -> tuple | None:
    step = actor.doomed[0]
    return next(
        (
            t
            for t in world.tiers[actor.tier].trash
            if StepId(t[1], t[0], t[2]) == step and t[4:] == (actor.number, "deleted")
        ),
        None,
    )


def _put_back(world: World, actor: Actor) -> tuple[World, Actor]:
    old, tier = _condemned_entry(world, actor), world.tiers[actor.tier]
    if old is not None and tier.occupant(old[0], old[1]) is None:
        tier = tier._replace(trash=tier.trash - {old}, final=tier.final | {old[:4]})
        world = world._replace(condemned=world.condemned - {(actor.tier, actor.doomed[0])})
    return world.tier(actor.tier, tier), _end(actor, "superseded")


def _remove(world: World, actor: Actor) -> tuple[World, Actor]:
    old, tier = _condemned_entry(world, actor), world.tiers[actor.tier]
    if old is not None:
        world = world.tier(actor.tier, tier._replace(trash=tier.trash - {old}))
    return world, _next_doomed(actor, actor.doomed[1:])


def _next(world: World, actor: Actor) -> tuple[World, Actor]:
    """The same step for the next tier, or the next step."""
    if actor.tier + 1 < len(world.tiers):
        return world, replace(actor, tier=actor.tier + 1, at="write")
    return world, replace(actor, tier=0, step=actor.step + 1, saved=actor.saved + 1, at="write")


def _making(tier: Tier, remain: Remain) -> tuple | None:
    key = (remain.branch, remain.step, remain.attempt)
    return next((m for m in tier.making if m[:3] == key), None)


def _trashed(tier: Tier, remain: Remain) -> tuple | None:
    key = (remain.branch, remain.step, remain.attempt, remain.state)
    return next((t for t in tier.trash if (t[0], t[1], t[4], t[5]) == key), None)


_OPERATIONS = {
    "list claims": _list_claims,
    "claim": _claim,
    "list records": _list_records,
    "list steps": _list_steps,
    "roll forward": _roll_forward,
    "remove remain": _remove_remain,
    "list again": _list_again,
    "read": _read,
    "decide": _decide,
    "write": _write,
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
        for branch, step, attempt, progress in tier.final:
            if progress != 2:
                raise Violation(f"M1: {StepId(step, branch, attempt)} is final and incomplete")
        counting = lineage.counting(line, tier.steps())
        if len({s.step for s in counting}) != len(counting):
            raise Violation(f"M8: two versions of a step count: {counting}")
        for step in (s for n, s in world.acked if n == number):
            if (number, step) in world.condemned:
                continue
            if not _went_back(records, step) and not lineage.counts(line, step):
                raise Violation(f"M3: {step} was acknowledged and does not count: {line}")
            if step not in tier.steps() and not _in_limbo(tier, step):
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
    for number in range(len(world.tiers)):
        own = [s for n, s in world.published if n == number and s.branch == head.branch]
        if len(lineage.counting(line, own)) >= 2:
            return
    if not any(parent in tier.steps() or _in_limbo(tier, parent) for tier in world.tiers):
        raise Violation(f"M4: the fork point {parent} of branch {head.branch} is gone")


def _in_limbo(tier: Tier, step: StepId) -> bool:
    """Condemned, and not yet removed or put back."""
    return any(
        StepId(t[1], t[0], t[2]) == step and t[3] == 2 and t[5] == "deleted" for t in tier.trash
    )


def audit(world: World) -> None:
    """Everybody dies now. The next attempt must find the newest step, and leave order behind."""
    line = world.line()
    whole = [
        StepId(s, b, a)
        for tier in world.tiers
        for b, s, a, progress in tier.making
        if progress == 2
    ]
    before = set(lineage.counting(line, whole))
    before |= {s for tier in world.tiers for s in lineage.counting(line, tier.steps())}
    after, actor = play(world, Script("resume", saves=1))
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


def empty(tiers: int) -> World:
    return World(frozenset(), frozenset(), (Tier(),) * tiers)

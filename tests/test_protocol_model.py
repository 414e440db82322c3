"""The protocol of FORMAT.md, explored exhaustively; and proof that the exploration can fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest
from protocol_exploring import explore, play
from protocol_model import Script, Violation, empty
from protocol_stores import WHOLE, SwapTier, Tier

from ckpt import lineage, retention
from ckpt.errors import CheckpointError
from ckpt.lineage import Remain, StepId
from ckpt.retention import Keep


@dataclass(frozen=True)
class Paused:
    """An attempt that gets as far as `at`, and goes on when the others race, if it still lives."""

    script: Script
    at: str
    wrote: int = 0
    dies: bool = False


TWO_BRANCHES = [Script(saves=2), Script("rewind", to=0, saves=1)]
"""Step 1 of branch 1 was left; step 1 of branch 2 counts."""
CLEARS = Script(saves=1, keep=Keep(branches=0))
SCENARIOS = {
    # name: (tiers, attempts before, attempts that race)
    "two fresh starts": (1, [], [Script(saves=1), Script(saves=1)]),
    "resume against resume": (1, [Script(saves=2)], [Script(saves=2), Script(saves=2)]),
    "keep one": (
        1,
        [Script(saves=2)],
        [Script(saves=2, keep=Keep(last=1)), Script(saves=1, keep=Keep(last=1))],
    ),
    "rewind under a live writer": (
        1,
        [Script(saves=3)],
        [Script(saves=2, keep=Keep(last=2)), Script("rewind", to=1, skip=(5, 9), saves=2)],
    ),
    "rewind with retention": (
        1,
        [Script(saves=3)],
        [
            Script(saves=2, keep=Keep(last=2)),
            Script("rewind", to=1, skip=(5, 9), saves=2, keep=Keep(last=1)),
        ],
    ),
    "two rewinds": (
        1,
        [Script(saves=3), Script("rewind", to=1, skip=(2, 4), saves=1)],
        [Script("rewind", to=1, skip=(6, 8), saves=1), Script("rewind", to=0, saves=1)],
    ),
    "restore an older step": (
        1,
        [Script(saves=2)],
        [Script(saves=1), Script("restore", to=0, saves=2, keep=Keep(last=1))],
    ),
    "two tiers": (2, [Script(saves=1)], [Script(saves=1), Script(saves=1)]),
    "two tiers, rewind with retention": (
        2,
        [Script(saves=2)],
        [Script(saves=1, keep=Keep(last=1)), Script("rewind", to=0, saves=1)],
    ),
    "rewind to the newest, keep one": (
        1,
        [Script(saves=2)],
        [Script("rewind", to=1, saves=2, keep=Keep(last=1)), Script(saves=1, keep=Keep(last=1))],
    ),
    "an image newer than home, then the host is lost": (
        1,
        [Script(saves=3, host=1, every=2), Script(saves=1, host=1, every=5)],
        [Script(saves=2, host=1, every=2), Script(saves=2)],
    ),
    "an image that is published by the next attempt": (
        1,
        [Script(saves=2, host=1, every=2)],
        [Script(saves=1, host=1, promotes=True), Script(saves=2)],
    ),
    "two tiers, and an image that is published by the next attempt": (
        2,
        [Script(saves=2, host=1, every=2)],
        [Script(saves=1, host=1, every=5, promotes=True), Script(saves=1)],
    ),
    "back among images, keep one": (
        1,
        [Script(saves=3, host=1, every=2)],
        [
            Script("rewind", to=1, skip=(5, 9), host=1, saves=2, keep=Keep(last=1)),
            Script(saves=2, host=1, every=2, promotes=True, keep=Keep(last=1)),
        ],
    ),
    "back to a branch that was left, and is to go": (
        1,
        [*TWO_BRANCHES, Script("rewind", to=0, saves=1)],
        [
            Script(saves=1, keep=Keep(branches=1)),
            Script("rewind", to=1, branch=1, saves=1, keep=Keep(branches=1)),
        ],
    ),
    "back and forth between branches, each with retention": (
        1,
        TWO_BRANCHES,
        [
            Script("rewind", to=1, branch=1, saves=2, keep=Keep(last=1, branches=1)),
            Script(saves=1, keep=Keep(last=1, branches=0)),
        ],
    ),
    "paused in its retention, while the next goes back to what it condemns": (
        1,
        [*TWO_BRANCHES, Paused(CLEARS, "condemn"), Script("rewind", to=1, branch=1, saves=1)],
        [Script(saves=3, keep=Keep(last=1))],
    ),
    "half-made, and an image of it": (
        1,
        [Script(saves=1), Paused(Script(saves=1, host=1), "write", wrote=1, dies=True)],
        [Script(saves=1, host=1), Script(saves=1, host=1)],
    ),
    "something in the way": (1, [Script(saves=1)], [Script(saves=2), Script(saves=1)]),
}
LONG = {
    "three attempts": (1, [], [Script(saves=1), Script(saves=1), Script(saves=1)]),
    "three attempts, one of them paused in its retention": (
        1,
        [*TWO_BRANCHES, Paused(CLEARS, "condemn"), Script("rewind", to=1, branch=1, saves=1)],
        [Script(saves=2, keep=Keep(last=1)), Script(saves=1)],
    ),
}


def run(name: str, *, renames: bool = True) -> int:
    tiers, before, racing = (SCENARIOS | LONG)[name]
    world = empty(tiers, renames=renames)
    paused = []
    for each in before:
        if isinstance(each, Paused):
            world, actor = play(world, each.script, each.at, wrote=each.wrote)
            paused += [] if each.dies else [actor]
        else:
            world, _ = play(world, each)
    if name == "something in the way":
        # Attempt 0 stands for one that nobody's chain holds, seen late on a store that lists late.
        home = world.tiers[0]
        assert isinstance(home, Tier)
        world = world.tier(0, home._replace(final=home.final | {(1, 1, 0, WHOLE)}))
    return explore(world, racing, tuple(paused))


def by_swap(scenarios: dict[str, Any]) -> list[str]:
    """Without rename nothing can be in the way: nobody shares a branch."""
    return [name for name in scenarios if name != "something in the way"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_interleaving(name: str) -> None:
    states = run(name)
    print(f"{name}: {states} states")
    assert states > 500


@pytest.mark.parametrize("name", by_swap(SCENARIOS))
def test_every_interleaving_without_rename(name: str) -> None:
    states = run(name, renames=False)
    print(f"{name}: {states} states")
    assert states > 500


@pytest.mark.soak
@pytest.mark.parametrize("renames", [True, False])
@pytest.mark.parametrize("name", LONG)
def test_every_interleaving_of_more(name: str, renames: bool) -> None:
    states = run(name, renames=renames)
    print(f"{name}: {states} states")
    assert states > 100_000


_decide, _choose = lineage.decide, lineage.choose
_condemned_under_head = lineage.condemned_under_head


def _by_branch(steps: Iterable[StepId]) -> dict[int, list[StepId]]:
    return {branch: list(some) for branch, some in groupby(sorted(steps, key=_branch), _branch)}


def _branch(step: StepId) -> int:
    return step.branch


IMAGED = "an image that is published by the next attempt"
LIVE = "rewind under a live writer"
WAY = "something in the way"
LEFT = "back to a branch that was left, and is to go"
AND_FORTH = "back and forth between branches, each with retention"
PAUSED = "paused in its retention, while the next goes back to what it condemns"
BUGS: dict[str, tuple[Any, ...]] = {
    # name: (module, function, what stands in its place, where it is looked for first)
    "owns: always": (lineage, "owns", lambda attempt, claims: True),
    "next_number: not the next": (
        lineage,
        "next_number",
        lambda claims: max(lineage.owner(claims), 1),
    ),
    "head: the oldest": (
        lineage,
        "head",
        lambda decisions: decisions[min(decisions)] if decisions else None,
    ),
    "counts: every marker": (lineage, "counts", lambda line, step: True),
    "counts: beyond the take-over": (
        lineage,
        "counts",
        lambda line, step: any(r.attempt == step.attempt for r in line),
        LIVE,
    ),
    "counts: only the newest attempt": (
        lineage,
        "counts",
        lambda line, step: bool(line) and line[0].holds(step),
    ),
    "choose: the oldest": (
        lineage,
        "choose",
        lambda line, steps, *wanted: min(lineage.counting(line, steps), default=None),
    ),
    "choose: only what counts": (
        lineage,
        "choose",
        lambda line, steps, wanted=None, branch=None: _choose(
            line, lineage.counting(line, steps), wanted, branch
        ),
        LEFT,
    ),
    "choose: the step of that number that counts": (
        lineage,
        "choose",
        lambda line, steps, wanted=None, branch=None: _choose(line, steps, wanted),
        LEFT,
    ),
    "decide: forgets skips": (
        lineage,
        "decide",
        lambda attempt, kind, *, current, **rest: _decide(attempt, kind, current=None, **rest),
        LIVE,
    ),
    "decide: a rewind stays on its branch": (
        lineage,
        "decide",
        lambda attempt, kind, *, parent, newest, **rest: _decide(
            attempt, "resume", parent=parent, newest=parent, **rest
        ),
        LIVE,
    ),
    "roll_forward: publishes the incomplete": (
        lineage,
        "roll_forward",
        lambda attempt, line, steps, remains: [
            lineage.Publish(r) for r in remains if r.attempt < attempt and r.state == "making"
        ],
    ),
    "roll_forward: cleans up what is newer": (
        lineage,
        "roll_forward",
        lambda attempt, line, steps, remains: [lineage.Remove(r) for r in remains],
    ),
    "roll_forward: loses whole steps": (
        lineage,
        "roll_forward",
        lambda attempt, line, steps, remains: [
            lineage.Remove(r) for r in remains if r.attempt < attempt
        ],
    ),
    "roll_forward: leaves things behind": (
        lineage,
        "roll_forward",
        lambda attempt, line, steps, remains: [],
    ),
    "may_be_remade: never": (lineage, "may_be_remade", lambda line, attempt, occupant: False, WAY),
    "may_put_back: never": (lineage, "may_put_back", lambda attempt, seen, remain: False, LEFT),
    "condemned_under_head: nothing": (
        lineage,
        "condemned_under_head",
        lambda line, remains: [],
        LEFT,
    ),
    "condemned_under_head: only what the newest attempt went on from": (
        lineage,
        "condemned_under_head",
        lambda line, remains: _condemned_under_head(line[:2], remains),
        PAUSED,
    ),
    "doomed: the newest": (
        retention,
        "doomed",
        lambda keep, line, steps, **rest: lineage.counting(line, steps)[-1:] if keep.last else [],
    ),
    "doomed: fork points": (
        retention,
        "doomed",
        lambda keep, line, steps, **rest: lineage.counting(line, steps)[:-1] if keep.last else [],
        LIVE,
    ),
    "fork_points: none": (retention, "fork_points", lambda line, steps: set(), AND_FORTH),
    "abandoned: also what newer attempts made": (
        retention,
        "abandoned",
        lambda line, steps: _by_branch(set(steps) - set(lineage.counting(line, steps))),
        LEFT,
    ),
    "abandoned: also what counts of other branches": (
        retention,
        "abandoned",
        lambda line, steps: _by_branch(
            s for s in steps if s.branch != line[0].branch and s.attempt <= line[0].attempt
        ),
        LEFT,
    ),
    "abandoned: by attempt, not by branch": (
        retention,
        "abandoned",
        lambda line, steps: {
            s.attempt: [s]
            for s in steps
            if s.attempt <= line[0].attempt and not lineage.counts(line, s)
        },
        AND_FORTH,
    ),
    "_surplus_branches: the oldest stay": (
        retention,
        "_surplus_branches",
        lambda keep, left: [] if keep.branches is None else sorted(left)[keep.branches :],
        LEFT,
    ),
    "_surplus_branches: one too many goes": (
        retention,
        "_surplus_branches",
        lambda keep, left: [] if keep.branches is None else sorted(left)[-keep.branches :],
        AND_FORTH,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrong, *first = BUGS[bug]
    monkeypatch.setattr(module, name, wrong)
    found = {}
    for scenario in [*first, *SCENARIOS]:
        try:
            run(scenario)
        except (Violation, CheckpointError) as violation:
            found[scenario] = str(violation)
            break
    print(f"{bug}: {found}")
    assert found, f"{bug}: no scenario noticed"


def _blind(**state: Any) -> Any:
    return lambda tier, step, by, maker=0: tier._with(
        tier._at(step.branch, step.step)._replace(**state)
    )


SWAP_BUGS = {
    "publish: also where nothing was prepared": (
        "keep one",
        "publish",
        lambda tier, step, owner, maker: (
            None
            if tier._at(step.branch, step.step).state in ("committed", "condemned")
            else _blind(state="committed")(tier, step, owner)
        ),
    ),
    "publish: whatever stands there": ("keep one", "publish", _blind(state="committed")),
    "put_back: whatever stands there": ("keep one", "put_back", _blind(state="committed", by=0)),
    "condemn: whatever stands there": (
        "rewind under a live writer",
        "condemn",
        lambda tier, step, owner: _blind(state="condemned", by=owner)(tier, step, owner),
    ),
    "take_over: whoever has it": (
        "keep one",
        "take_over",
        lambda tier, remain, owner: tier._with(
            tier._at(remain.branch, remain.step)._replace(state="condemned", by=owner)
        ),
    ),
}


@pytest.mark.parametrize("bug", SWAP_BUGS)
def test_a_bug_in_a_swap_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, name, wrong = SWAP_BUGS[bug]
    monkeypatch.setattr(SwapTier, name, wrong)
    with pytest.raises((Violation, CheckpointError)) as found:
        run(scenario, renames=False)
    print(f"{bug}: {found.value}")


def test_what_the_head_itself_condemned_is_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its retention may have removed half of what it went on from."""

    def whoever(line: lineage.Lineage, remains: Iterable[Remain]) -> list[tuple[StepId, Remain]]:
        return [
            (step, remain)
            for remain in remains
            for step, _ in _condemned_under_head(line, [dataclasses.replace(remain, attempt=0)])
        ]

    monkeypatch.setattr(lineage, "condemned_under_head", whoever)
    with pytest.raises(Violation, match=r"M1: step .* is committed and incomplete"):
        run(AND_FORTH, renames=False)


@pytest.mark.parametrize("tier", [Tier, SwapTier])
def test_only_what_was_committed_is_put_back(tier: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an attempt went on from may have been an image, and what was made of it half-made."""
    monkeypatch.setattr(tier, "was_committed", lambda tier, step, remain: True)
    wrong = "M1: step 1 .* incomplete" if tier is Tier else "S1: left behind"
    scenario = "half-made, and an image of it" if tier is Tier else IMAGED
    with pytest.raises(Violation, match=wrong):
        run(scenario, renames=tier is Tier)


def test_whoever_makes_a_step_of_an_image_does_so_under_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under that of the image's attempt, an older one that cleans up takes half of it away."""
    write, publish, taken = Tier.write, Tier.publish, Tier.taken
    monkeypatch.setattr(
        Tier, "write", lambda tier, step, file, maker: write(tier, step, file, step.attempt)
    )
    monkeypatch.setattr(
        Tier, "publish", lambda tier, step, owner, maker: publish(tier, step, owner, step.attempt)
    )
    monkeypatch.setattr(Tier, "taken", lambda tier, step, maker: taken(tier, step, step.attempt))
    with pytest.raises(Violation, match=r"M1: step 1 .* is committed and incomplete"):
        run(IMAGED)

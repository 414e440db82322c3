"""The protocol of FORMAT.md, explored exhaustively; and proof that the exploration can fail."""

from __future__ import annotations

from typing import Any

import pytest
from protocol_model import Script, Violation, empty, explore, play
from protocol_stores import WHOLE, SwapTier, Tier

from ckpt import lineage, retention
from ckpt.errors import CheckpointError
from ckpt.retention import Keep

RESUME = Script("resume")
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
    "something in the way": (1, [Script(saves=1)], [Script(saves=2), Script(saves=1)]),
}
LONG = {"three attempts": (1, [], [Script(saves=1), Script(saves=1), Script(saves=1)])}


def run(name: str, *, renames: bool = True) -> int:
    tiers, before, racing = (SCENARIOS | LONG)[name]
    world = empty(tiers, renames=renames)
    for script in before:
        world, _ = play(world, script)
    if name == "something in the way":
        # Attempt 0 stands for one that nobody's chain holds, seen late on a store that lists late.
        home = world.tiers[0]
        assert isinstance(home, Tier)
        world = world.tier(0, home._replace(final=home.final | {(1, 1, 0, WHOLE)}))
    return explore(world, racing)


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


_decide = lineage.decide

BUGS = {
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
    ),
    "counts: only the newest attempt": (
        lineage,
        "counts",
        lambda line, step: bool(line) and line[0].holds(step),
    ),
    "choose: the oldest": (
        lineage,
        "choose",
        lambda line, steps, wanted=None: min(lineage.counting(line, steps), default=None),
    ),
    "decide: forgets skips": (
        lineage,
        "decide",
        lambda attempt, kind, *, current, **rest: _decide(attempt, kind, current=None, **rest),
    ),
    "decide: a rewind stays on its branch": (
        lineage,
        "decide",
        lambda attempt, kind, *, parent, newest, **rest: _decide(
            attempt, "resume", parent=parent, newest=parent, **rest
        ),
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
    "may_be_remade: never": (lineage, "may_be_remade", lambda line, attempt, occupant: False),
    "may_put_back: never": (lineage, "may_put_back", lambda attempt, seen, remain: False),
    "doomed: the newest": (
        retention,
        "doomed",
        lambda keep, line, steps, **rest: steps[-1:] if keep.last else [],
    ),
    "doomed: fork points": (
        retention,
        "doomed",
        lambda keep, line, steps, **rest: steps[:-1] if keep.last else [],
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, wrong = BUGS[bug]
    monkeypatch.setattr(module, name, wrong)
    found = {}
    for scenario in SCENARIOS:
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
        run("an image that is published by the next attempt")

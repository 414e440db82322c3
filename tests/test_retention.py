"""Which steps stay: the rules one by one over random histories, and against a naive restatement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from histories import OPERATIONS, History
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.lineage import Decision, StepId, lineage
from ckpt.retention import Best, Keep, abandoned, best, doomed, why_kept

Metrics = dict[StepId, dict[str, float]]


@st.composite
def keeps(draw: st.DrawFn) -> Keep:
    number = st.none() | st.integers(1, 4)
    ranked = st.none() | st.builds(
        Best, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])
    )
    return Keep(draw(number), draw(number), draw(ranked), draw(st.none() | st.integers(0, 3)))


VALUES = st.sampled_from([0.0, 1.0, 1.0, 2.0, -3.0, math.inf, -math.inf, math.nan, None])


def naive(keep: Keep, run: History, metrics: Metrics, pinned: set[StepId]) -> set[StepId]:
    """The rules once more, each as a sentence about one step."""
    counts = run.counts
    others = run.steps - set(counts)
    branches = {step.branch for step in others}

    def wanted(step: StepId) -> bool:
        if step in others:
            newer = {branch for branch in branches if branch > step.branch}
            return keep.branches is None or len(newer) < keep.branches
        if keep.last is None and keep.every is None and keep.best is None:
            return True
        newer_steps = [other for other in counts if other.step > step.step]
        if keep.last is not None and len(newer_steps) < keep.last:
            return True
        if keep.every is not None and step.step % keep.every == 0:
            return True
        return keep.best is not None and ranks(step, keep.best)

    def value(step: StepId, policy: Best) -> float:
        found = metrics.get(step, {}).get(policy.metric, math.nan)
        return found if policy.mode == "min" else -found

    def ranks(step: StepId, policy: Best) -> bool:
        own = value(step, policy)
        if not math.isfinite(own):
            return False
        better = [
            other
            for other in counts
            if math.isfinite(value(other, policy))
            and (value(other, policy) < own or (value(other, policy) == own and other > step))
        ]
        return len(better) < policy.count

    def protected(step: StepId) -> bool:
        if step in pinned or not step.attempt:
            return True
        if counts and step == counts[-1]:
            return True
        if not counts and step == max(others, key=lambda each: (each.branch, each.step)):
            return True
        own = [each for each in counts if each.branch == run.head.branch]
        older = [each for each in counts if each.branch != run.head.branch]
        return len(own) < 2 and older[-1:] == [step] and run.head.parent is not None

    return {step for step in run.steps if not wanted(step) and not protected(step)}


@given(st.data(), keeps(), st.booleans(), st.lists(st.sampled_from(OPERATIONS), max_size=30))
def test_random_histories_lose_what_the_rules_say(
    data: st.DataObject, keep: Keep, own_branches: bool, operations: list[str]
) -> None:
    run = History(own_branches)
    metrics: Metrics = {}
    for operation in operations:
        if operation != "retire":
            run.play(data.draw, operation)
            for step in run.steps - metrics.keys():
                loss = data.draw(VALUES, label=f"loss of {step}")
                metrics[step] = {} if loss is None else {"loss": loss}
            continue
        pinned = data.draw(st.sets(st.sampled_from(sorted(run.steps)))) if run.steps else set()
        there = data.draw(st.permutations(sorted(run.steps)))
        go = doomed(keep, run.line, there, metrics=metrics, pinned=pinned)
        told = f"{keep}, pinned {pinned}, {metrics}, {run.told}"
        assert go == sorted(go), told
        assert set(go) == naive(keep, run, metrics, pinned), told
        counted, head = run.counts, run.head
        run.delete(go)
        assert run.counts[-1:] == counted[-1:], told
        assert pinned <= run.steps, told
        if sum(step.branch == head.branch for step in counted) < 2:
            # Whoever finds the one step of the branch damaged can still go back.
            before = [step for step in counted if step.branch != head.branch]
            assert set(before[-1:]) <= run.steps, told
        assert doomed(keep, run.line, run.steps, metrics=metrics, pinned=pinned) == [], told


@given(st.data(), keeps(), st.lists(st.sampled_from(OPERATIONS[:-1]), min_size=4, max_size=20))
def test_a_paused_attempt_deletes_nothing_of_those_after_it(
    data: st.DataObject, keep: Keep, operations: list[str]
) -> None:
    """What it does not know it would take for abandoned; numbers tell that it is newer."""
    run = History()
    for operation in operations:
        run.play(data.draw, operation)
    for old in run.decisions:
        line = lineage(run.decisions, run.decisions[old])
        go = doomed(replace(keep, branches=0), line, run.steps)
        assert all(step.attempt <= old for step in go), (old, keep, run.told)


def test_nothing_is_deleted_by_default() -> None:
    steps = [StepId(number, 1, 1) for number in range(5)]
    line = lineage({1: Decision(1, "start", None, 1)}, Decision(2, "rewind", steps[2], 2))
    assert doomed(Keep(), line, steps) == []


def run_with_branches() -> tuple[dict[int, Decision], list[StepId]]:
    """Branch 1: 1 to 4, left at 2. Branch 2: 3 to 5, left at 3. Branch 3: 4, 5."""
    steps = [
        *(StepId(number, 1, 1) for number in (1, 2, 3, 4)),
        *(StepId(number, 2, 2) for number in (3, 4, 5)),
        *(StepId(number, 3, 3) for number in (4, 5)),
    ]
    decisions = {
        1: Decision(1, "start", None, 1),
        2: Decision(2, "rewind", StepId(2, 1, 1), 2),
        3: Decision(3, "rewind", StepId(3, 2, 2), 3),
    }
    return decisions, steps


@pytest.mark.parametrize(
    ("branches", "gone"),
    [(None, []), (2, []), (1, [(3, 1), (4, 1)]), (0, [(3, 1), (4, 1), (4, 2), (5, 2)])],
)
def test_the_newest_abandoned_branches_stay_whole(
    branches: int | None, gone: list[tuple[int, int]]
) -> None:
    decisions, steps = run_with_branches()
    line = lineage(decisions, decisions[3])
    assert {branch: len(found) for branch, found in abandoned(line, steps).items()} == {1: 2, 2: 2}
    found = doomed(Keep(branches=branches), line, steps)
    assert sorted((step.step, step.branch) for step in found) == gone
    # The rules about steps of the lineage do not touch them.
    both = doomed(Keep(last=1, branches=branches), line, steps)
    assert set(both) - set(found) == {StepId(1, 1, 1), StepId(2, 1, 1), StepId(3, 2, 2), steps[-2]}


def test_a_branch_that_was_gone_back_to_counts_again() -> None:
    decisions, steps = run_with_branches()
    decisions[4] = Decision(4, "rewind", StepId(4, 1, 1), 4)
    line = lineage(decisions, decisions[4])
    # Its steps are the lineage, the other two are abandoned, and its last is a fork point.
    assert set(abandoned(line, steps)) == {2, 3}
    found = doomed(Keep(last=1, branches=1), line, steps)
    assert sorted((step.step, step.branch) for step in found) == [
        *((1, 1), (2, 1), (3, 1)),
        *((3, 2), (4, 2), (5, 2)),
    ]


def test_pins_and_orbax_outlive_their_branch() -> None:
    orbax = [StepId(number, 0, 0) for number in (1, 2, 3)]
    ours = [StepId(number, 1, 1) for number in (2, 3)]
    line = lineage({}, Decision(2, "rewind", orbax[0], 2))
    keep = Keep(last=1, branches=0)
    assert doomed(keep, line, [*orbax, *ours]) == ours
    assert doomed(keep, line, [*orbax, *ours], pinned=ours[:1]) == ours[1:]


def test_where_nothing_counts_the_newest_of_the_newest_branch_stays() -> None:
    """A tier that has no step of the lineage yet, or the home after its last one was damaged."""
    steps = [StepId(9, 1, 1), StepId(3, 2, 2), StepId(4, 2, 2)]
    line = lineage({}, Decision(3, "start", None, 3))
    assert doomed(Keep(branches=0), line, steps) == [steps[1], steps[0]]


def test_the_best_are_of_the_lineage() -> None:
    """What a branch reached that was left says nothing of the run as it is now."""
    decisions, steps = run_with_branches()
    line = lineage(decisions, decisions[3])
    losses = dict(zip(steps, (0.5, 0.4, 0.01, 0.02, 0.6, 0.0, 0.0, 0.3, 0.9), strict=True))
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    found = doomed(Keep(best=Best("loss", 2)), line, steps, metrics=metrics)
    assert found == [StepId(1, 1, 1), StepId(3, 2, 2)]
    decisions[4] = Decision(4, "rewind", StepId(4, 1, 1), 4)
    back = lineage(decisions, decisions[4])
    found = doomed(Keep(best=Best("loss", 1)), back, steps, metrics=metrics)
    assert found == [StepId(1, 1, 1), StepId(2, 1, 1)]  # the best, and where branch 4 forked


def test_modes_of_best() -> None:
    steps = [StepId(number, 1, 1) for number in (1, 2, 3, 4)]
    values = dict(zip(steps, (3.0, 1.0, 1.0, math.nan), strict=True))
    metrics = {step: {"acc": value} for step, value in values.items()}
    assert best(Best("acc"), steps, metrics) == [steps[2]]
    assert best(Best("acc", 3), steps, metrics) == [steps[2], steps[1], steps[0]]
    assert best(Best("acc", 2, mode="max"), steps, metrics) == [steps[0], steps[2]]
    assert best(Best("other"), steps, metrics) == []
    with pytest.raises(ckpt.Misuse, match="wanted 'min' or 'max'"):
        Best("acc", mode="least")  # type: ignore[arg-type]
    with pytest.raises(ckpt.Misuse, match=r"branches .*: wanted a whole number from 0 on"):
        Keep(branches=-1)


def test_why_a_step_is_kept() -> None:
    decisions, steps = run_with_branches()
    line = lineage(decisions, decisions[3])
    assert "newest of the run" in (why_kept(line, steps, StepId(5, 3, 3), ()) or "")
    assert "pinned" in (why_kept(line, steps, steps[0], steps[:1]) or "")
    assert why_kept(line, steps, StepId(3, 2, 2), ()) is None  # its branch has two steps
    fewer = [step for step in steps if step != StepId(4, 3, 3)]
    assert "where branch 3 forked" in (why_kept(line, fewer, StepId(3, 2, 2), ()) or "")
    assert "Orbax" in (why_kept(line, [], StepId(1, 0, 0), ()) or "")

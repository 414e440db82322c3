"""Rewinds in a row, to steps of branches that were left, and back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_runs import answer, iterator, refusal, training
from histories import OPERATIONS, History
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Records, number

import ckpt
from ckpt import attempts
from ckpt.lineage import (
    Decision,
    Remain,
    StepId,
    choose,
    condemned_under_head,
    counting,
    counts,
    line_before,
    lineage,
    served,
)
from ckpt.retention import fork_points
from ckpt.store import FileStore
from datapipe import Pipeline


@given(st.data(), st.booleans(), st.lists(st.sampled_from(OPERATIONS), max_size=25))
def test_what_counts_is_what_the_trainer_had(
    data: st.DataObject, own_branches: bool, operations: list[str]
) -> None:
    run = History(own_branches)
    for operation in operations:
        if operation == "retire":
            gone = data.draw(st.sets(st.sampled_from(sorted(run.steps)))) if run.steps else set()
            run.delete(gone - set(run.counts[-1:]))
            continue
        run.play(data.draw, operation)
        line, wanted = run.line, run.counts
        assert counting(line, run.steps) == wanted, run.told
        assert choose(line, run.steps) == (wanted[-1] if wanted else None), run.told
        left = {i for a, b in run.head.skips.get("data", ()) for i in range(a, b)}
        assert left == run.skips, run.told
        for step in run.steps:
            before = counting(line_before(run.decisions, step), run.steps)
            assert before == [s for s in run.before[step] if s in run.steps], (step, run.told)


@given(st.data(), st.booleans(), st.lists(st.sampled_from(OPERATIONS[:-1]), max_size=25))
def test_the_fork_point_is_the_parent_of_who_opened_the_branch(
    data: st.DataObject, own_branches: bool, operations: list[str]
) -> None:
    run = History(own_branches)
    for operation in operations:
        run.play(data.draw, operation)
        opened = run.decisions[run.head.branch].parent
        own = [step for step in run.counts if step.branch == run.head.branch]
        wanted = {opened} if opened is not None and len(own) < 2 else set()
        assert fork_points(run.line, run.counts) == wanted, run.told


@given(st.data(), st.lists(st.sampled_from(OPERATIONS[:-1]), max_size=20), st.integers(0, 20))
def test_each_batch_was_served_by_one_chain_member(
    data: st.DataObject, operations: list[str], start: int
) -> None:
    """Also where the chain leads over a branch that had been left."""
    run = History()
    for operation in operations:
        run.play(data.draw, operation)
    made_by = {step.step: step.attempt for step in run.counts}
    shares = served(run.line, range(start, start + 10))
    assert [batch for _, share in shares for batch in share] == list(range(start, start + 10))
    for reach, share in shares:
        for batch in share:
            assert made_by.get(batch + 1, reach.attempt) == reach.attempt, run.told


def two_branches() -> tuple[dict[int, Decision], list[StepId]]:
    one = [StepId(number, 1, 1) for number in (1, 2, 3, 4)]
    two = [StepId(number, 2, 2) for number in (3, 5)]
    decisions = {
        1: Decision(1, "start", None, 1),
        2: Decision(2, "rewind", one[1], 2),
    }
    return decisions, [*one, *two]


def test_a_branch_that_was_left_is_chosen_by_name() -> None:
    decisions, steps = two_branches()
    line = lineage(decisions, decisions[2])
    assert choose(line, steps, 3) == StepId(3, 2, 2)
    assert choose(line, steps, 3, branch=1) == StepId(3, 1, 1)
    assert choose(line, steps, 2, branch=1) == StepId(2, 1, 1)
    assert choose(line, steps, branch=1) == StepId(4, 1, 1)
    with pytest.raises(ckpt.NotFound, match=r"step 5 is not on branch 1; .* there: 1, 2, 3, 4"):
        choose(line, steps, 5, branch=1)
    with pytest.raises(ckpt.NotFound, match="branch 7; newest steps there: none"):
        choose(line, steps, 5, branch=7)
    with pytest.raises(ckpt.NotFound, match="not in the lineage"):
        choose(line, steps, 4)


# --- real runs -----------------------------------------------------------------------------------


def numbers(root: Path) -> list[tuple[int, int]]:
    return [(step.step, step.branch) for step in attempts.list_run(FileStore(root)).counting]


def test_back_and_forth_between_branches(tmp_path: Path) -> None:
    """Rewinds in a row, each with skips of its own; another batch size in between."""
    root = tmp_path / "run"
    with training(root) as trainer:  # batches of 4; a step is saved every 5
        trainer.resume()
        trainer.train(20)
        bad = trainer.records(12, 14)
        trainer.rewind(10, skip_steps=range(12, 14))
        trainer.train(20)
        bad |= trainer.records(17, 18)
        first = trainer.used
    assert numbers(root) == [(5, 1), (10, 1), (15, 2), (20, 2)]

    # Back to the branch that was left, leaving out what the newest attempt saw as step 17.
    done = answer(
        *("rewind", root, "--to", 15, "--branch", 1, "--skip-steps", "17:18"),
        *("--reason", "the old one was better", "--yes"),
    )
    assert done["to"] == {"step": 15, "branch": 1, "attempt": 1}
    assert [step["step"] for step in done["plan"]["left_behind"]] == [15, 20]
    assert numbers(root) == [(5, 1), (10, 1), (15, 1)]
    with training(root) as trainer:
        assert trainer.resume() == 15
        trainer.train(25)
        assert not bad & trainer.records(16, 26)
    assert numbers(root) == [(5, 1), (10, 1), (15, 1), (20, 3), (25, 3)]

    # And once more to the other, with nothing skipped: all of before stays in force.
    assert ckpt.rewind(root, 20, branch=2) == StepId(20, 2, 2)
    assert numbers(root) == [(5, 1), (10, 1), (15, 2), (20, 2)]
    with training(root) as trainer:
        assert trainer.resume() == 20
        trainer.train(25)
        again = trainer.records(21, 26)
    assert not bad & again
    assert not again & {record for batch in first.values() for record in batch}
    assert numbers(root)[-2:] == [(20, 2), (25, 5)]

    # To a step of a branch that was left as the newest, with batches of another size.
    ckpt.rewind(root, 25, branch=3)
    larger = Pipeline(Records(1000), batch_size=7, seed=3).map(number, version="1").iterator()
    with larger, training(root, data=larger) as trainer:
        assert trainer.resume() == 25
        trainer.train(40)
        assert not bad & trainer.records(26, 41)
        assert all(len(trainer.used[step]) == 7 for step in range(26, 41))
    assert numbers(root)[-4:] == [(25, 3), (30, 7), (35, 7), (40, 7)]


def test_a_rewind_to_a_branch_that_saved_nothing_is_what_resume_takes(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with training(root) as trainer:
        trainer.resume()
        trainer.train(10)
        trainer.rewind(5)
        trainer.train(10)
    ckpt.rewind(root, 10, branch=1)
    ckpt.rewind(root, 10, branch=2)
    ckpt.rewind(root, 10, branch=1, reason="last word")
    assert numbers(root) == [(5, 1), (10, 1)]
    with training(root) as trainer:
        assert trainer.resume() == 10
        assert trainer.manager._tenure.attempt.decision.parent == StepId(10, 1, 1)
        branch = trainer.manager._tenure.attempt.decision.branch
        assert branch == 5  # that of the rewind: it went on from its newest step
        trainer.train(15)
    assert numbers(root) == [(5, 1), (10, 1), (15, 5)]


def damage(root: Path, branch: int, step: int) -> None:
    image = next((root / f"branch-{branch}" / str(step)).glob("state/d/*.image"))
    image.write_bytes(image.read_bytes()[:-4096])


def test_a_damaged_step_of_a_branch_that_was_left(tmp_path: Path) -> None:
    """The next older one is that of its own line, not of the present one."""
    root = tmp_path / "run"
    with training(root) as trainer:
        trainer.resume()
        trainer.train(20)
        trainer.rewind(5)
        trainer.train(20)
    damage(root, 1, 20)
    assert ckpt.rewind(root, 20, branch=1) == StepId(15, 1, 1)
    (root / "branch-2" / "20" / "commit_success.txt").unlink()
    with pytest.raises(ckpt.Damaged, match=r"branch-2/20"):
        ckpt.rewind(root, 20, branch=2)
    assert "branch-2/20" in refusal(
        *("rewind", root, "--to", 20, "--branch", 2, "--reason", "x", "--dry-run"), code=1
    )


def condemn(root: Path, step: StepId, by: int) -> None:
    place = root / f"branch-{step.branch}"
    (place / f"{step.step}").rename(place / f"{step.step}.orbax-checkpoint-tmp-a{by}-deleted")


@pytest.mark.parametrize("branch", [1, 2])
def test_a_step_that_was_condemned_after_a_rewind_to_it_is_put_back(
    tmp_path: Path, branch: int
) -> None:
    """The trainer before was paused, condemned the step, and died before its look; then the new
    one died before it saved anything."""
    root = tmp_path / "run"
    with training(root) as trainer:
        trainer.resume()
        trainer.train(15)
        trainer.rewind(5)
        trainer.train(15)
    target = ckpt.rewind(root, 10, branch=branch)
    condemn(root, target, by=2)
    other = StepId(15, 2, 2)
    condemn(root, other, by=2)
    shutil.rmtree(root / "branch-1" / "5")  # nothing else of the lineage is there
    with training(root) as trainer:
        assert trainer.resume() == 10
        assert trainer.manager._tenure.attempt.decision.parent == target
    assert not list(root.rglob("*-deleted"))
    assert not (root / "branch-2" / "15").exists()  # what nobody went on from goes, as it was to


def test_only_what_older_attempts_condemned_is_put_back() -> None:
    decisions, _ = two_branches()
    line = lineage(decisions, decisions[2])
    parent = StepId(2, 1, 1)
    old = Remain(1, 2, 1, "deleted", "x")
    assert condemned_under_head(line, [old]) == [(parent, old)]
    for other in (
        Remain(1, 2, 2, "deleted", "x"),  # by the head itself: its retention
        Remain(1, 2, 3, "deleted", "x"),
        Remain(1, 2, 1, "aside", "x"),
        Remain(1, 2, 1, "making", "x"),
        Remain(1, 3, 1, "deleted", "x"),
        Remain(2, 2, 1, "deleted", "x"),
    ):
        assert condemned_under_head(line, [other]) == []
    assert condemned_under_head(lineage(decisions, decisions[1]), [old]) == []


@pytest.mark.parametrize("branch", [3, 99])
def test_what_is_not_on_a_branch(tmp_path: Path, branch: int) -> None:
    root = tmp_path / "run"
    with training(root) as trainer:
        trainer.resume()
        trainer.train(10)
    with pytest.raises(ckpt.NotFound, match=f"not on branch {branch}; newest steps there: none"):
        ckpt.rewind(root, 10, branch=branch)
    with pytest.raises(ckpt.NotFound, match="not on branch 1; newest steps there: 5, 10"):
        ckpt.rewind(root, 7, branch=1)
    with pytest.raises(ckpt.Misuse, match="branch: wanted a whole number"):
        ckpt.rewind(root, 5, branch=-1)
    assert attempts.list_claims(FileStore(root)) == [1]  # nothing was written


def test_steps_are_those_that_the_named_attempt_counted(tmp_path: Path) -> None:
    """`--seen-by` an attempt of a branch that was left: positions are those of its own line."""
    root = tmp_path / "run"
    with training(root) as trainer:
        trainer.resume()
        trainer.train(20)
        bad = trainer.records(17, 19)
        trainer.rewind(5, skip_steps=range(7, 9))
        trainer.train(15)
    options: tuple[Any, ...] = ("--to", 15, "--branch", 1, "--skip-steps", "17:19")
    options = (*options, "--reason", "x", "--dry-run")
    seen = answer("rewind", root, *options, "--seen-by", 1)["new_skips"]
    now = answer("rewind", root, *options)["new_skips"]
    assert seen != now  # two batches were left out on the present one
    with iterator() as data:
        saved = ckpt.open(root).manifest(StepId(15, 1, 1)).data["data"]["state"]
        assert seen["data"] == [list(r) for r in data.span(saved, 1, 3)]
    answer("rewind", root, *options[:-1], "--seen-by", 1, "--yes")
    with training(root) as trainer:
        assert trainer.resume() == 15
        trainer.train(30)
        assert not bad & trainer.records(16, 31)


def test_counts_is_about_the_line_of_now() -> None:
    decisions, steps = two_branches()
    line = lineage(decisions, decisions[2])
    assert [counts(line, step) for step in steps] == [True, True, False, False, True, True]

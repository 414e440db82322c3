"""`ckpt rewind`: the plan, the examples it computes, and that they never come back."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import BATCH, answer, ckpt_command, iterator, refusal, state, training
from memory_source import Columns

import ckpt
from ckpt import attempts
from ckpt.store import FileStore
from datapipe import Pipeline
from tools import rewinding

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Steps 5, 10, ... 30 of one attempt, and the records that each step used."""
    root = tmp_path_factory.mktemp("rewind") / "run"
    with training(root) as trainer:
        trainer.resume()
        trainer.train(30)
    return root, trainer


@pytest.fixture
def run(original, tmp_path):
    return shutil.copytree(original[0], tmp_path / "run")


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_plan_says_what_will_happen_and_a_dry_run_changes_nothing(run):
    before = contents(run)
    options = ("--to", 15, "--skip-steps", "17:19", "--reason", "spike", "--dry-run")
    planned = answer("rewind", run, *options)
    assert planned["to"] == {"step": 15, "branch": 1, "attempt": 1}
    assert [step["step"] for step in planned["left_behind"]] == [20, 25, 30]
    assert planned["attempt"] == 2
    assert planned["batches"] == [16, 18]
    assert planned["counted_from"]["step"] == 15
    assert planned["new_skips"] == planned["skips"] == {"data": [[64, 72]]}
    text = ckpt_command("rewind", run, *options).stdout
    for told in ("step 15 (branch 1", "3 steps: 20, 25, 30", "batches 16:18", "64:72", "spike"):
        assert told in text
    assert contents(run) == before


@pytest.mark.parametrize("option", [("--skip-steps", "17:21"), ("--skip-batches", "16:20")])
def test_after_a_rewind_no_skipped_example_is_served_again(run, original, option):
    bad = original[1].records(17, 21)
    done = answer("rewind", run, "--to", 10, *option, "--reason", "spike", "--yes")
    assert (done["to"]["step"], done["attempt"], done["branch"]) == (10, 2, 2)
    with training(run) as trainer:
        assert trainer.resume() == 10
        trainer.train(30)
    served = [record for step in range(11, 31) for record in trainer.used[step]]
    assert not bad & set(served)
    # All else is served as before, in the same order.
    undisturbed = [original[1].used[step] for step in range(11, 31)]
    wanted = [record for batch in undisturbed for record in batch if record not in bad]
    assert served[: len(wanted)] == wanted
    assert ckpt.open(run).all_steps() == [5, 10, 15, 20, 25, 30]


def test_the_examples_are_those_that_an_opened_iterator_gives(run):
    planned = answer("rewind", run, "--to", 5, "--skip-steps", "8:13", "--reason", "x", "--dry-run")
    reader = ckpt.open(run)
    saved = reader.manifest(reader.find(5)).data["data"]["state"]
    assert planned["new_skips"]["data"] == [list(r) for r in iterator().span(saved, 2, 7)]


def test_steps_after_a_rewind_are_counted_without_what_it_left_out(run):
    """Here no step was saved since; the step it went back to knows nothing of its skips."""
    with training(run) as trainer:
        trainer.rewind(10, skip_steps=range(12, 14))
        trainer.train(14)
        bad = trainer.records(13, 15)
    # A rewind that saved nothing: nobody knows which of the two curves was read.
    options = ("--to", 10, "--skip-steps", "13:15", "--reason", "again")
    message = refusal("rewind", run, *options, "--dry-run", code=2)
    assert "--seen-by 1" in message
    assert "--seen-by 2" in message
    before = answer("rewind", run, *options, "--seen-by", 1, "--dry-run")
    assert before["new_skips"] == {"data": [[12 * BATCH, 14 * BATCH]]}
    assert "--seen-by 9" in refusal("rewind", run, *options, "--seen-by", 9, "--dry-run", code=2)
    answer("rewind", run, *options, "--seen-by", 2, "--yes")
    with training(run) as trainer:
        trainer.resume()
        trainer.train(30)
    assert not bad & trainer.records(11, 31)


def test_a_resume_after_a_rewind_counts_as_the_rewind_did(run):
    answer("rewind", run, "--to", 10, "--skip-steps", "12:14", "--reason", "x", "--yes")
    with training(run) as trainer:
        trainer.resume()
        trainer.train(14)
        bad = trainer.records(13, 15)
    answer("rewind", run, "--to", 10, "--skip-steps", "13:15", "--reason", "y", "--yes")
    with training(run) as trainer:
        trainer.resume()
        trainer.train(30)
    assert not bad & trainer.records(11, 31)


def test_the_manager_counts_steps_after_a_rewind_as_it_served_them(tmp_path):
    with training(tmp_path / "run") as trainer:
        trainer.resume()
        trainer.train(20)
        trainer.rewind(10, skip_steps=range(12, 14))
        trainer.train(14)
        bad = trainer.records(13, 15)
        trainer.rewind(10, skip_steps=range(13, 15))
        trainer.train(30)
    assert not bad & trainer.records(11, 31)


def test_a_rewind_without_skips_needs_no_data(tmp_path):
    for _ in range(3):
        ckpt.save(tmp_path / "run", state())
    done = answer("rewind", tmp_path / "run", "--to", 1, "--reason", "x", "--yes")
    assert done["to"]["step"] == 1
    assert ckpt.open(tmp_path / "run").latest_step() == 1
    options = ("--to", 1, "--skip-steps", "2:3", "--reason", "x", "--yes")
    assert "saved with `data=`" in refusal("rewind", tmp_path / "run", *options, code=2)


class Counter:
    """An iterator of another kind, as Grain's are to us: a state, and nothing else."""

    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> list[int]:
        self.count += 1
        return [self.count]

    def get_state(self) -> dict[str, int]:
        return {"last_seen_index": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.count = state["last_seen_index"]


def test_states_of_other_iterators_cannot_be_counted_in(tmp_path):
    root = tmp_path / "run"
    with training(root, data=Counter()) as trainer:
        trainer.resume()
        trainer.train(10)
    options = ("--to", 5, "--skip-steps", "7:8", "--reason", "x", "--yes")
    message = refusal("rewind", root, *options, code=2)
    assert "iterator 'data'" in message
    assert "rewind without skipping" in message
    assert answer("rewind", root, "--to", 5, "--reason", "x", "--yes")["to"]["step"] == 5


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--to", 15, "--skip-steps", "10:20"), 2, "or go back to step 9 or earlier"),
        (("--to", 15, "--skip-batches", "14:16"), 2, "skip nothing before step 16"),
        (("--to", 17), 3, "newest steps there: 5, 10, 15, 20, 25, 30"),
        (("--to", 5, "--skip-steps", "0:4"), 2, "count from 1"),
        (("--to", 5, "--skip-steps", "7:9", "--skip-batches", "7:9"), 2, "not both"),
    ],
)
def test_rewinds_that_make_no_sense(run, options, code, told):
    before = contents(run)
    assert told in refusal("rewind", run, *options, "--reason", "x", "--yes", code=code)
    assert "reason" in refusal("rewind", run, "--to", 5, "--reason", " ", "--yes", code=2)
    assert contents(run) == before


@pytest.mark.parametrize("given", ["7", "9:7", "7:7", "a:b", "7:9:2", "-1:4", "٣:٤", ":9"])
def test_ranges_are_half_open_pairs(run, given):
    result = ckpt_command("rewind", run, "--to", 5, "--reason", "x", f"--skip-steps={given}")
    assert result.exit_code == 2
    assert "A:B" in result.stderr


def test_nobody_to_ask_means_no(run):
    before = contents(run)
    result = ckpt_command("rewind", run, "--to", 5, "--reason", "x")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert "go back to" in result.stdout
    assert "--yes" in refusal("rewind", run, "--to", 5, "--reason", "x", "--json", code=2)
    assert contents(run) == before


def test_a_damaged_step_is_passed_over_and_told(run):
    image = next((run / "branch-1" / "15" / "state" / "d").glob("*.image"))
    data = bytearray(image.read_bytes())
    data[-100] ^= 1
    kernel = data.find(b"\x00\x00\x80\x3f" * 4)
    data[kernel] ^= 1
    image.write_bytes(data)
    done = answer("rewind", run, "--to", 15, "--reason", "x", "--yes", code=1)
    assert (done["plan"]["to"]["step"], done["to"]["step"]) == (15, 10)


def test_a_step_without_its_marker_is_damaged_not_absent(run):
    (run / "branch-1" / "15" / "commit_success.txt").unlink()
    before = contents(run)
    options = ("--to", 15, "--reason", "x", "--yes")
    assert "commit_success.txt" in refusal("rewind", run, *options, code=1)
    assert contents(run) == before


def test_a_live_trainer_is_refused(run):
    with training(run) as trainer:
        trainer.resume()
        message = refusal("rewind", run, "--to", 5, "--reason", "x", "--json", "--yes", code=5)
    assert str(os.getpid()) in message
    assert attempts.list_run(FileStore(run)).head.kind == "resume"


def at_a_terminal(arguments: list[Any], typed: bytes) -> tuple[int, str]:
    """Exit code and all that a terminal shows."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tools.cli", *map(str, arguments)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment
    ) as process:
        os.close(theirs)
        os.write(ours, typed)
        shown = b""
        while select.select([ours], [], [], 60)[0]:
            try:
                more = os.read(ours, 4096)
            except OSError:  # the terminal is gone with its last user
                break
            if not more:
                break
            shown += more
    os.close(ours)
    return process.returncode, shown.decode()


def test_at_a_terminal_it_asks(run):
    before = contents(run)
    arguments = ["rewind", run, "--to", 10, "--reason", "x"]
    code, shown = at_a_terminal(arguments, b"n\n")
    assert (code, contents(run)) == (130, before), shown
    assert "Do it?" in shown
    assert "\x1b[" in shown  # colours
    code, shown = at_a_terminal(arguments, b"y\n")
    assert code == 0, shown
    assert attempts.list_run(FileStore(run)).head.reason == "x"


def test_across_a_fork_the_command_and_the_manager_skip_the_same(tmp_path):
    """On either side of a fork other examples had been left out when the batches were counted."""
    root = tmp_path / "run"
    pipeline = Pipeline(Columns(97), batch_size=4, seed=3)
    manager = ckpt.CheckpointManager(root, arena=tmp_path / "arena")
    with manager, pipeline.iterator() as data:
        manager.resume(data=data)
        for step in range(1, 5):
            next(data)
            manager.save(step, {"step": step}, data=data)
        manager.rewind(2, skip_steps=range(4, 5), data=data)
        for step in range(3, 6):
            next(data)
            manager.save(step, {"step": step}, data=data).wait()
        planned = rewinding.plan(str(root), 1, reason="twice", skip_steps=range(2, 6))
        manager.rewind(1, skip_steps=range(2, 6), data=data)
        assert data.plan.skipped == [(4, 24)]
    assert planned.skips == {"data": [(4, 24)]}
    assert planned.new_skips == {"data": [(4, 12), (16, 24)]}


def test_records_that_do_not_come_back_are_counted_by_the_command_too(tmp_path):
    """In the second epoch it depends on the order where a batch ends."""
    root = tmp_path / "run"
    pipeline = Pipeline(Columns(21), batch_size=4, seed=3, skip_records=True)
    manager = ckpt.CheckpointManager(root, arena=tmp_path / "arena")
    with manager, pipeline.iterator() as data:
        manager.resume(data=data)
        for step in range(1, 4):
            next(data)
            manager.save(step, {"step": step}, data=data)
        manager.rewind(1, skip_steps=range(2, 4), data=data)
        for step in range(2, 12):
            next(data)
            manager.save(step, {"step": step}, data=data).wait()
        planned = rewinding.plan(str(root), 6, reason="twice", skip_steps=range(7, 10))
        manager.rewind(6, skip_steps=range(7, 10), data=data)
        assert planned.skips == {"data": data.plan.skipped}
        assert data.plan.skipped[0] == (4, 12)


def test_the_command_leaves_to_the_trainer_what_blocks_decide(tmp_path):
    root = tmp_path / "run"
    pipeline = Pipeline(Columns(21), batch_size=4, seed=3, skip_records=True, shuffle="blocks")
    manager = ckpt.CheckpointManager(root, arena=tmp_path / "arena")
    with manager, pipeline.iterator() as data:
        manager.resume(data=data)
        for step in range(1, 4):
            next(data)
            manager.save(step, {"step": step}, data=data).wait()
        with pytest.raises(ckpt.Misuse, match="where skipped records stand in later epochs"):
            rewinding.plan(str(root), 1, reason="x", skip_steps=range(2, 3))

"""What is done about damage: other names, damaged records, falling back to an older step."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckpt
from ckpt.errors import CheckpointError, Damaged, NotFound
from ckpt.manager import CheckpointManager
from ckpt.reader import Reader
from ckpt.retention import Keep
from ckpt.tiers import Shared
from tools.bench.bits import bits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Orbax and what it imports
from damaged_steps import (
    DAMAGES,
    Stream,
    flip,
    saved_run,
    state_of,
    tree_bytes,
)

SEED = int(os.environ.get("DAMAGE_SEED", time.time_ns() % 1_000_000))


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    with saved_run() as root:
        yield root


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


# --- directories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["branch-1/7", "branch-1/1", "branch-9/2", "branch-9/7"])
def test_a_step_directory_under_another_name(run: Path, to: str) -> None:
    shutil.rmtree(run / to, ignore_errors=True)
    (run / to).parent.mkdir(exist_ok=True)
    os.rename(run / "branch-1/2", run / to)
    report = ckpt.verify(run)
    (damaged,) = [each for each in report.steps if not each.intact]
    assert damaged.name == to
    assert "was renamed or its files were mixed up" in str(damaged.damage[0])
    with pytest.raises(Damaged, match="renamed"):
        ckpt.restore(run / to)
    restored = ckpt.restore(run)
    assert bits(restored.state) == bits(state_of(4))
    if to == "branch-1/7":
        assert [(lost.step, "renamed" in lost.reason) for lost in restored.report.lost] == [
            (7, True)
        ]
    else:
        assert restored.report.lost == ()
    wanted = 1 if to == "branch-1/1" else 2
    with pytest.raises(Damaged if to == "branch-1/1" else NotFound):
        ckpt.restore(run, step=wanted)


def test_a_copy_of_a_step_is_none(run: Path) -> None:
    shutil.copytree(run / "branch-1/4", run / "branch-1/5")
    (run / "branch-1/6").mkdir()
    shutil.copytree(run / "branch-1/4/state", run / "branch-1/8/state")
    before = tree_bytes(run)
    restored = ckpt.restore(run)
    assert restored.step == 4
    assert [lost.step for lost in restored.report.lost] == [8, 6, 5]
    assert "commit_success.txt is absent" in restored.report.lost[1].reason
    assert tree_bytes(run) == before


# --- records of attempts -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attempts/1.json", "attempts/1.from.json"])
def test_a_flipped_bit_in_any_byte_of_an_attempt_record(run: Path, name: str) -> None:
    rng = random.Random(SEED)
    size = (run / name).stat().st_size
    file = os.open(run / name, os.O_RDWR)
    for at in range(size):
        mask = 1 << rng.randrange(8)
        what = f"{name}: {mask} at byte {at} (seed {SEED})"
        flip(file, at, mask)
        report = ckpt.verify(run, shallow=True)
        assert not report.intact, what
        assert name in str(report.damage[0]), what
        # What a decision said is known from the steps of its attempt.
        if at % 16 == 0:
            assert ckpt.restore(run).step == 4, what
        flip(file, at, mask)
    os.close(file)
    assert ckpt.verify(run).intact


# --- falling back --------------------------------------------------------------------------------


def manager_of(run: Path, keep: Keep | None = None) -> CheckpointManager:
    return CheckpointManager(Shared(run, keep=keep or Keep()), arena=run.parent / "arena")


@pytest.mark.parametrize("newest", DAMAGES)
@pytest.mark.parametrize("before", ["image", "marker"])
def test_the_newest_two_of_four_are_damaged(run: Path, newest: str, before: str) -> None:
    for number, what in ((4, newest), (3, before)):
        DAMAGES[what](run / f"branch-1/{number}")
    damaged = {name: data for name, data in tree_bytes(run).items() if name[:10] >= "branch-1/3"}

    read = ckpt.restore(run)  # changes nothing
    assert (read.step, [lost.step for lost in read.report.lost]) == (2, [4, 3])
    assert len(list((run / "attempts").iterdir())) == 2

    stream = Stream()
    with manager_of(run, Keep(last=1)) as manager:
        restored = manager.resume(data=stream)
        assert bits(restored.state) == bits(state_of(2))
        assert (restored.step, stream.at, restored.extra) == (2, 2, {"step": 2})
        assert [lost.step for lost in restored.report.lost] == [4, 3]
        for lost, what in zip(restored.report.lost, (newest, before), strict=True):
            assert f"branch-1/{lost.step}" in lost.reason, what
        decision = json.loads((run / "attempts/2.from.json").read_bytes())
        assert (decision["kind"], decision["branch"]) == ("fallback", 2)
        assert decision["parent"] == {"attempt": 1, "branch": 1, "step": 2}
        assert decision["reason"] == "step 4 is damaged"
        for number in (3, 4, 5):
            stream.at = number
            manager.save(number, state_of(100 + number), data=stream)
        manager.wait_until_finished(60)

    left = tree_bytes(run)
    assert {name: data for name, data in left.items() if name in damaged} == damaged
    assert (run / "branch-1/4").is_dir()
    with manager_of(run) as manager:
        again = manager.resume(data=stream)
    assert (again.step, again.report.lost) == (5, ())
    assert bits(again.state) == bits(state_of(105))
    assert not ckpt.verify(run).intact  # it is still there, and still told


@pytest.mark.parametrize("what", DAMAGES)
def test_asked_for_by_number_a_damaged_step_is_an_error(run: Path, what: str) -> None:
    DAMAGES[what](run / "branch-1/4")
    before = tree_bytes(run)
    with pytest.raises(Damaged, match="branch-1/4"):
        ckpt.restore(run, step=4)
    with pytest.raises(Damaged, match="branch-1/4"):
        ckpt.restore(run / "branch-1/4")
    with manager_of(run) as manager:
        with pytest.raises(Damaged, match="branch-1/4"):
            manager.restore(4)
        with pytest.raises(NotFound, match="step 9 is not in the lineage"):
            manager.restore(9)
    after = {name: data for name, data in tree_bytes(run).items() if "attempts" not in name}
    assert after == {name: data for name, data in before.items() if "attempts" not in name}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_rewind_to_a_damaged_step_takes_the_one_before(run: Path, what: str) -> None:
    DAMAGES[what](run / "branch-1/3")
    with manager_of(run) as manager:
        restored = manager.rewind(3)
        assert (restored.step, [lost.step for lost in restored.report.lost]) == (2, [3])
        assert bits(restored.state) == bits(state_of(2))
    decision = json.loads((run / "attempts/2.from.json").read_bytes())
    assert (decision["kind"], decision["parent"]["step"]) == ("rewind", 2)


@pytest.mark.parametrize("what", DAMAGES)
def test_nothing_is_left(run: Path, what: str) -> None:
    """Never a fresh start where there was a run."""
    for number in range(1, 5):
        DAMAGES[what](run / f"branch-1/{number}")
    before = tree_bytes(run)
    with pytest.raises(Damaged, match=r"branch-1/4"):
        ckpt.restore(run)
    with manager_of(run) as manager:
        calls: list[Callable[[], object]] = [
            manager.resume,
            lambda: manager.resume(must_exist=True),
            manager.restore,
            lambda: manager.rewind(4),
        ]
        for call in calls:
            with pytest.raises(Damaged, match=r"branch-1/4"):
                call()
        with pytest.raises(CheckpointError):
            manager.save(5, state_of(5))
    left = tree_bytes(run)
    assert {name: left[name] for name in before} == before
    report = ckpt.verify(run)
    assert len([each for each in report.steps if not each.intact]) == 4


def test_what_only_orbax_needs_stops_no_start(run: Path) -> None:
    (run / "branch-1/4/state/_sharding").write_bytes(b"")
    read = ckpt.restore(run)
    assert (read.step, read.report.lost) == (4, ())
    assert [each.file for each in read.report.damage] == ["branch-1/4/state/_sharding"]
    with manager_of(run) as manager:
        restored = manager.resume()
        assert (restored.step, restored.report.damage) == (4, read.report.damage)
    assert ckpt.save(run, state_of(5), data={}) == 5  # which verifies, and does not load
    assert Reader(run).all_steps() == [1, 2, 3, 4, 5]
    assert not ckpt.verify(run).intact

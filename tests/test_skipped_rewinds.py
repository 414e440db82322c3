"""Rewinds that skip steps, by manager, guard and command, over changed batch sizes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import answer, ckpt_command, refusal
from rows import Rows
from skipping_data import iterator, members

import ckpt
from ckpt.errors import Misuse
from tools import rewinding

STATE = {"w": np.zeros(2)}


def manager(place: Path, **how: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(ckpt.Shared(place / "run", **how), arena=place / "arena")


def trained(m: ckpt.CheckpointManager, data: Any, steps: range) -> None:
    for step in steps:
        next(data)
        m.save(step, STATE, data=data)
    m.wait_until_finished()


def eight_then_six(place: Path) -> None:
    with manager(place) as m, iterator(8) as data:
        m.resume(data=data)
        trained(m, data, range(1, 17))
    with manager(place) as m, iterator(6) as data:
        m.resume(data=data)
        trained(m, data, range(17, 20))


@pytest.mark.parametrize(
    ("to", "steps", "wanted"),
    [
        (6, range(8, 12), [[56, 88]]),
        (14, range(15, 19), [[112, 140]]),  # two of each size
        (18, range(19, 22), [[140, 158]]),  # two that are still to come
    ],
)
def test_steps_before_a_change_of_the_batch_size(
    tmp_path: Path, to: int, steps: range, wanted: list[list[int]]
) -> None:
    """As the command says it, as the next trainer does it, and as the same one does."""
    eight_then_six(tmp_path)
    root = tmp_path / "run"
    option = f"{steps.start}:{steps.stop}"
    planned = answer(
        "rewind", root, "--to", to, "--skip-steps", option, "--reason", "x", "--dry-run"
    )
    assert (planned["new_skips"], planned["covering"]) == ({"data": wanted}, [])
    with manager(tmp_path) as m, iterator(6) as data:
        m.resume(data=data)
        m.rewind(to, skip_steps=steps, data=data)
        assert [list(each) for each in data.plan.skipped] == wanted


def test_steps_of_a_trainer_that_died_before_it_saved_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eight_then_six(tmp_path)
    with manager(tmp_path) as m, iterator(2) as data:
        m.resume(data=data)
        with caplog.at_level(logging.WARNING, "ckpt"):
            m.rewind(18, skip_steps=range(22, 24), data=data)
    # Six each they were [146 + 6, 146 + 18), two each [146 + 4, 146 + 8).
    assert data.plan.skipped == [(150, 170)]
    assert "steps 22 to 23 is not known for certain" in caplog.text


def test_a_commit_that_retention_took_from_the_border(tmp_path: Path) -> None:
    """What is left on either side tells what each of them served."""
    with manager(tmp_path, keep=ckpt.Keep(every=10, last=1)) as m, iterator(8) as data:
        m.resume(data=data)
        trained(m, data, range(1, 14))
    with manager(tmp_path, keep=ckpt.Keep(every=10, last=1)) as m, iterator(6) as data:
        m.resume(data=data)
        trained(m, data, range(14, 24))
        assert m.all_steps()[:2] == [10, 20]
        m.rewind(10, skip_steps=range(13, 16), data=data)
    assert data.plan.skipped == [(96, 116)]


def test_each_of_several_iterators_is_counted_with_its_own_sizes(tmp_path: Path) -> None:
    skipped = {}
    for sizes, steps in (((8, 3), range(1, 9)), ((6, 5), range(9, 12))):
        data = dict(zip(("text", "images"), map(iterator, sizes), strict=True))
        with manager(tmp_path) as m:
            m.resume(data=data)
            for step in steps:
                for each in data.values():
                    next(each)
                m.save(step, STATE, data=data)
            m.wait_until_finished()
            if steps.start == 9:
                m.rewind(4, skip_steps=range(8, 10), data=data)
                skipped = {name: each.plan.skipped for name, each in data.items()}
        for each in data.values():
            each.close()
    assert skipped == {"text": [(56, 70)], "images": [(21, 29)]}


def test_a_guard_leaves_out_what_was_served_before_the_change(tmp_path: Path) -> None:
    guard = ckpt.SpikeGuard(
        window=30, warm_up=10, cool_down=2, margin=8, skip_before=6, skip_after=3, consecutive=2
    )
    for size, steps in ((8, 20), (4, 30)):
        with (
            manager(tmp_path) as m,
            iterator(size) as data,
            ckpt.Run(m, STATE, data, guard=guard, steps=steps) as run,
        ):
            for step, _ in run:
                bad = step in (23, 24) and not run.rewinds
                run.update(run.state, loss=50.0 if bad else 1 + 0.01 * (step % 7))
    # Onset 23: steps 17 to 25, of which 17 to 20 had eight examples each.
    assert [each.skip for each in run.rewinds] == [range(17, 26)]
    assert data.plan.skipped == [(16 * 8, 20 * 8 + 5 * 4)]


@pytest.mark.parametrize("empty", [range(30, 25), range(8, 8)])
@pytest.mark.parametrize("name", ["skip_steps", "skip_batches"])
def test_an_empty_range_is_refused(tmp_path: Path, name: str, empty: range) -> None:
    with manager(tmp_path) as m, iterator(4) as data:
        m.resume(data=data)
        trained(m, data, range(1, 3))
        with pytest.raises(Misuse, match=rf"{name}: range\(\d+, \d+\) is empty"):
            m.rewind(1, data=data, **{name: empty})
        assert m.all_steps() == [1, 2]
        m.rewind(1, data=data)


class Threes(Rows):
    batch_size = 3


def test_an_iterator_that_counts_in_its_own_batches_only(tmp_path: Path) -> None:
    with manager(tmp_path) as m:
        data = Rows()
        m.resume(data=data)
        trained(m, data, range(1, 8))
        m.rewind(4, skip_steps=range(6, 7), data=data)
        assert members(data.skips) == {10, 11}
        trained(m, data, range(5, 9))
    with manager(tmp_path) as m:
        other = Threes()
        m.resume(data=other)
        with pytest.raises(Misuse, match=r"not known to have been 3 .*keyword batch_size"):
            m.rewind(4, skip_steps=range(6, 7), data=other)


def test_the_command_tells_the_two_meanings_of_a_step_by_its_number(tmp_path: Path) -> None:
    """After a rewind by hand the steps before it are those with their batch sizes."""
    eight_then_six(tmp_path)
    root = tmp_path / "run"
    answer("rewind", root, "--to", 15, "--reason", "x", "--yes")
    options = ("--to", 15, "--skip-steps", "18:19", "--reason", "y")
    told = refusal("rewind", root, *options, "--dry-run", code=2)
    assert "--seen-by 2" in told
    planned = answer("rewind", root, *options, "--seen-by", 2, "--dry-run")
    assert planned["new_skips"] == {"data": [[134, 140]]}
    planned = answer("rewind", root, *options, "--seen-by", 3, "--dry-run")
    assert planned["new_skips"] == {"data": [[136, 144]]}


def left(place: Path, sizes: tuple[int, ...]) -> Path:
    """After the nineteen steps two more of each size; then all from 16 on but the newest go."""
    eight_then_six(place)
    step = 19
    for size in sizes:
        with manager(place) as m, iterator(size) as data:
            m.resume(data=data)
            trained(m, data, range(step + 1, step + 3))
            step += 2
    with manager(place) as m:
        m.resume(data={})
        for each in range(16, step):
            m.delete(each)
    return place / "run"


def test_the_size_of_an_attempt_of_which_no_step_is_left_follows_from_its_neighbours(
    tmp_path: Path,
) -> None:
    planned = rewinding.plan(str(left(tmp_path, (4,))), 15, reason="x", skip_steps=range(18, 19))
    assert (planned.new_skips, planned.covering) == ({"data": [(134, 140)]}, ())


def test_of_several_such_attempts_all_is_left_out_and_told(tmp_path: Path) -> None:
    root = left(tmp_path, (4, 2))
    options = ("--to", 15, "--skip-steps", "18:19", "--reason", "x", "--dry-run")
    planned = answer("rewind", root, *options)
    assert (planned["new_skips"], planned["covering"]) == ({"data": [[128, 154]]}, [[17, 18]])
    assert "the batch size of batches 17:18" in ckpt_command("rewind", root, *options).stdout

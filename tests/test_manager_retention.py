"""Which steps a manager keeps, pins and deletes."""

from __future__ import annotations

from pathlib import Path

import pytest
from managed_run import manager, root, save_steps, state_of

import ckpt

__all__ = ["root"]  # a fixture


def test_keep_last_every_and_best(root: Path) -> None:
    keep = ckpt.Keep(last=2, every=4, best=ckpt.Best("loss"))
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 4.0, 5: float("nan"), 6: 3.0, 7: 3.0, 8: 3.0, 9: 3.0}
    with manager(root, keep=keep) as m:
        m.resume()
        for step, loss in losses.items():
            m.save(step, state_of(step), metrics={"loss": loss}).wait()
        m.wait_until_finished()
        m._tenure.finish_attempt()
        assert m.all_steps() == [2, 4, 8, 9]
        assert m.best_step() == 2


def test_a_worsening_metric_never_evicts_the_newest(root: Path) -> None:
    with manager(root, keep=ckpt.Keep(best=ckpt.Best("loss"))) as m:
        m.resume()
        for step in range(1, 11):
            m.save(step, state_of(step), metrics={"loss": step}).wait()
            assert m.latest_step() == step
        m._tenure.finish_attempt()
        assert m.all_steps() == [1, 10]


def test_pinned_steps_stay(root: Path) -> None:
    with manager(root, keep=ckpt.Keep(last=1)) as m:
        m.resume()
        m.save(1, state_of(1)).wait()
        ckpt.pin(root, 1)
        save_steps(m, [2, 3])
        m._tenure.finish_attempt()
        assert m.all_steps() == [1, 3]
        ckpt.unpin(root, 1)
        m.save(4, state_of(4)).wait()
        m._tenure.finish_attempt()
        assert m.all_steps() == [4]


def test_the_fork_point_stays_until_two_steps_of_its_branch(root: Path) -> None:
    with manager(root, keep=ckpt.Keep(last=1)) as m:
        m.resume()
        save_steps(m, [1, 2])
        m.rewind(2)
        save_steps(m, [3])
        m._tenure.finish_attempt()
        assert m.all_steps() == [2, 3]
        save_steps(m, [4])
        m._tenure.finish_attempt()
        assert m.all_steps() == [4]


def test_delete(root: Path) -> None:
    with manager(root) as m:
        m.resume()
        save_steps(m, [1, 2, 3])
        m.delete(2)
        assert m.all_steps() == [1, 3]
        with pytest.raises(ckpt.Misuse, match="newest of the run"):
            m.delete(3)

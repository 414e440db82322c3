"""Rewinds through a manager: skipped batches stay away, branches begin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from managed_run import assert_same, manager, pipeline, root, save_steps, state_of

import ckpt

__all__ = ["root"]  # a fixture


def trained(m: ckpt.CheckpointManager, data, steps) -> list[np.ndarray]:
    """Saves every step; returns the record ids of each batch."""
    seen = []
    for step in steps:
        seen.append(next(data)["id"].copy())
        m.save(step, state_of(step), data=data)
    m.wait_until_finished()
    return seen


def test_rewind_never_serves_the_skipped_batches_again(root: Path) -> None:
    with pipeline().iterator() as straight:
        order = [next(straight)["id"].copy() for _ in range(20)]
    with manager(root) as m, pipeline().iterator() as data:
        m.resume(data=data)
        assert_same(trained(m, data, range(1, 9)), order[:8])
        restored = m.rewind(3, skip_steps=range(6, 8), reason="spike at 6", data=data)
        assert restored.step == 3
        assert_same(restored.state["w"], np.asarray(state_of(3)["w"]))
        # Steps 6 and 7 had used batches 5 and 6.
        kept = order[3:5] + order[7:]
        assert_same(trained(m, data, range(4, 8)), kept[:4])
        assert m.all_steps() == [1, 2, 3, 4, 5, 6, 7]
    with manager(root) as m, pipeline(batch_size=2).iterator() as data:
        m.resume(data=data)
        rest = np.concatenate([next(data)["id"] for _ in range(10)])
        np.testing.assert_array_equal(rest, np.concatenate(kept[4:9]))


def test_rewind_by_batches_and_by_steps_agree(root: Path) -> None:
    for name, how in (("a", {"skip_steps": range(4, 6)}), ("b", {"skip_batches": range(3, 5)})):
        with manager(root / name) as m, pipeline().iterator() as data:
            m.resume(data=data)
            trained(m, data, range(1, 7))
            m.rewind(2, reason="", data=data, **how)
            assert data.plan.skipped == [(12, 20)]


def test_skips_are_kept_before_and_after_the_next_save(root: Path) -> None:
    with manager(root) as m, pipeline().iterator() as data:
        m.resume(data=data)
        trained(m, data, range(1, 7))
        m.rewind(4, skip_batches=range(5, 6), data=data)
    for steps in ([5], [6], []):
        with manager(root) as m, pipeline().iterator() as data:
            restored = m.resume(data=data)
            assert data.plan.skipped == [(20, 24)]
            assert m._tenure.attempt.decision.branch == 2
            trained(m, data, steps)
    with manager(root) as m, pipeline().iterator() as data:
        m.rewind(2, skip_batches=range(8, 9), data=data, reason="again")
        assert data.plan.skipped[0] == (20, 24)
        assert len(data.plan.skipped) == 2
        restored = m.resume(data=data)
        assert restored.step == 2
        assert len(data.plan.skipped) == 2


def test_abandoned_steps_stay_and_do_not_count(root: Path) -> None:
    with manager(root) as m:
        m.resume()
        save_steps(m, range(1, 6))
        m.rewind(2)
        save_steps(m, range(3, 5))
        assert m.all_steps() == [1, 2, 3, 4]
        assert_same(ckpt.restore(root, like=state_of(0)).state, state_of(4))
        with pytest.raises(ckpt.NotFound):
            m.rewind(5)
    assert ckpt.restore(root / "branch-1" / "5").step == 5
    assert (root / "branch-2" / "3").is_dir()


def test_a_rewind_needs_something_that_can_skip(root: Path) -> None:
    class Plain:
        def __init__(self):
            self.state = {"next": 0}

        def get_state(self):
            return dict(self.state)

        def set_state(self, state):
            self.state = dict(state)

    with manager(root) as m:
        data = Plain()
        m.resume(data=data)
        m.save(1, state_of(1), data=data).wait()
        with pytest.raises(ckpt.Misuse, match="Plain cannot skip batches"):
            m.rewind(1, skip_batches=range(1, 2), data=data)
        with pytest.raises(ckpt.Misuse, match="give `data`"):
            m.rewind(1, skip_batches=range(1, 2))
        with pytest.raises(ckpt.Misuse, match="not both"):
            m.rewind(1, skip_batches=range(1, 2), skip_steps=range(1, 2), data=data)
        m.rewind(1, data=data)


def test_an_older_step_opens_a_branch_and_the_newest_does_not(root: Path) -> None:
    with manager(root) as m:
        m.resume()
        save_steps(m, [1, 2, 3])
        m.restore()
        assert m._tenure.attempt.decision.branch == 1
        m.restore(3)
        assert m._tenure.attempt.decision.branch == 1
        m.restore(2)
        assert m._tenure.attempt.decision.branch == m._tenure.attempt.number
        save_steps(m, [3])
        m.resume()
        assert m.all_steps() == [1, 2, 3]

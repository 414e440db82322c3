"""What a manager saves: what is due, what travels along, and errors in the background."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from managed_run import assert_same, manager, pipeline, root, save_steps, state_of

import ckpt
from ckpt.store import FileStore

__all__ = ["root"]  # a fixture


class Untouchable:
    def get_state(self):
        raise AssertionError("touched")

    def set_state(self, state):
        raise AssertionError("touched")


def test_a_step_that_is_not_due_costs_nothing(root: Path) -> None:
    with manager(root, every=10) as m:
        assert m.save(7, state_of(7), data=Untouchable()) is None
        assert not m.should_save(7)
        assert m.should_save(20)
        assert m.save(7, state_of(7), force=True) is not None
    assert not root.with_name("run-arena").exists()


def test_the_state_may_be_donated_at_once(root: Path) -> None:
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    with manager(root) as m:
        x = jnp.arange(1 << 16, dtype=jnp.float32)
        for number in range(1, 9):
            x = step(x)
            wanted = np.array(x)
            m.save(number, {"x": x})
            for _ in range(5):
                x = step(x)
            m.wait_until_finished()
            np.testing.assert_array_equal(ckpt.restore(root).state["x"], wanted)


def test_host_arrays_are_copied(root: Path) -> None:
    array = np.arange(1000)
    with manager(root) as m:
        m.save(1, {"a": array})
        array[:] = 0
        m.wait_until_finished()
    np.testing.assert_array_equal(ckpt.restore(root).state["a"], np.arange(1000))


def test_steps_only_grow(root: Path) -> None:
    with manager(root) as m:
        first = m.save(5, state_of(5))
        assert m.save(5, state_of(5), force=True) is first
        with pytest.raises(ckpt.Misuse, match="already reached step 5"):
            m.save(4, state_of(4))
        m.wait_until_finished()
        m.resume(like=state_of(0))
        assert m.save(5, state_of(5)).done()  # what was restored is saved already
        with pytest.raises(ckpt.Misuse, match="whole number"):
            m.save(-1, state_of(1))


def test_pending_says_what_is_due(root: Path) -> None:
    with manager(root) as m:
        pending = m.save(1, state_of(1))
        assert pending.done("snapshot")
        pending.wait("snapshot")
        pending.wait("shared", timeout=60)
        assert pending.done()
        with pytest.raises(ckpt.Misuse, match="not due; due are: snapshot, shared"):
            pending.wait("bucket")


def test_data_that_ran_ahead_is_noticed(root: Path) -> None:
    with manager(root) as m, pipeline().iterator() as data:
        m.resume(data=data)
        save_steps(m, [1], data)
        next(data)
        next(data)
        with pytest.raises(ckpt.Misuse, match="moved 1 batches too far"):
            m.save(2, state_of(2), data=data)
        with pytest.raises(ckpt.Misuse, match="moved 1 batches too little"):
            m.save(4, state_of(4), data=data)
        m.save(3, state_of(3), data=data).wait()


def test_several_iterators(root: Path) -> None:
    def both():
        return {"text": pipeline(4).iterator(), "images": pipeline(2, seed=9).iterator()}

    with manager(root) as m:
        data = both()
        m.resume(data=data)
        for each in data.values():
            next(each)
        m.save(1, state_of(1), data=data).wait()
        coming = {name: next(each)["id"] for name, each in data.items()}
        data = both()
        m.resume(data=data)
        for name, each in data.items():
            np.testing.assert_array_equal(next(each)["id"], coming[name])
        with pytest.raises(ckpt.Mismatch, match=r"iterators audio .*saved: images, text"):
            m.resume(data={"audio": pipeline().iterator()})


def test_extra_metrics_and_environment_travel_along(root: Path) -> None:
    with manager(root) as m:
        m.save(1, state_of(1), metrics={"loss": jnp.float32(0.5)}, extra={"ramp": [1, None]}).wait()
        restored = m.resume()
        assert restored.metrics == {"loss": 0.5}
        assert restored.extra == {"ramp": [1, None]}
        with pytest.raises(ckpt.Misuse, match="extra: wanted a JSON value"):
            m.save(2, state_of(2), extra={"x": object()})
    found = ckpt.metadata(root)
    assert found.environment["jax"] == jax.__version__
    assert found.leaves["w"].shape == (64, 16)


def test_inside_a_running_event_loop(root: Path) -> None:
    async def main():
        with manager(root) as m:
            m.save(1, state_of(1)).wait()
            return m.resume(like=state_of(0)).step

    assert asyncio.run(main()) == 1


def test_leaving_without_waiting_loses_nothing(root: Path) -> None:
    script = f"""
import numpy as np, ckpt
m = ckpt.CheckpointManager({str(root)!r}, arena={str(root) + "-arena"!r})
m.save(1, {{"x": np.arange(1 << 20)}})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    np.testing.assert_array_equal(ckpt.restore(root).state["x"], np.arange(1 << 20))
    assert not root.with_name("run-arena").exists()


@pytest.fixture
def broken_disk(monkeypatch: pytest.MonkeyPatch):
    """Images cannot be written while the list is not empty."""
    faults = []
    good = FileStore.write_image

    def write(self, key, data, cuts=()):
        if faults:
            raise ckpt.StoreFailed(faults[0])
        good(self, key, data, cuts)

    monkeypatch.setattr(FileStore, "write_image", write)
    return faults


def test_a_failed_save_is_never_lost(root: Path, broken_disk: list) -> None:
    m = manager(root)
    broken_disk.append("disk on fire")
    pending = m.save(1, state_of(1))
    with pytest.raises(ckpt.StoreFailed, match="disk on fire"):
        pending.wait()
    m.save(2, state_of(2)).ended(None)
    with pytest.raises(ckpt.StoreFailed, match="disk on fire"):
        m.save(3, state_of(3))
    m.save(3, state_of(3)).ended(None)
    with pytest.raises(ckpt.StoreFailed, match="disk on fire"):
        m.close()
    broken_disk.clear()
    with manager(root) as m:
        assert ckpt.open(root).all_steps() == []
        restored = m.resume()  # the snapshot is still in the arena
        assert (restored.step, restored.report.tier) == (3, "memory")
        assert_same(restored.state, state_of(3))
        save_steps(m, [4])
        assert ckpt.open(root).all_steps() == [2, 3, 4]  # those of the two slots


def test_an_error_in_the_body_is_the_one_that_is_seen(root: Path, broken_disk: list) -> None:
    broken_disk.append("disk on fire")

    def train():
        with manager(root) as m:
            m.save(1, state_of(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()

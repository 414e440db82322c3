"""Tiers after a death or a rewind: what is gone on from, what is made up for."""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import pytest
from tier_runs import Place, check, die, place, state_of, store_fails, writer

import ckpt
from ckpt import log
from ckpt.store import FileStore

__all__ = ["place", "writer"]  # fixtures


def test_a_start_goes_on_from_memory_and_makes_up_for_the_rest(place: Place, writer: str) -> None:
    m = place.manager(writer=writer)
    m.resume()
    for step in range(1, 8):
        m.save(step, state_of(step))
    die(m)
    with place.manager(writer=writer) as m:
        check(m.resume(), 7, "memory")
        m.wait_until_finished(60)
        assert place.shared() == [4, 7]
        m.save(8, state_of(8))
        m.wait_until_finished(60)
        assert place.shared() == [4, 7, 8]


def test_without_the_arena_the_local_tier_is_next(place: Place) -> None:
    m = place.manager()
    m.resume()
    for step in range(1, 8):
        m.save(step, state_of(step))
    die(m)
    shutil.rmtree(place.root / "arena")
    with place.manager() as m:
        check(m.resume(), 6, "local")
    shutil.rmtree(place.root / "local")
    with place.manager() as m:
        check(m.resume(), 6, "shared")


def test_two_runs_with_the_same_local_directory_do_not_meet(place: Place) -> None:
    def tiers(name: str) -> tuple[Any, ...]:
        return ckpt.Local(place.root / "local"), ckpt.Shared(place.root / name, every=10)

    with ckpt.CheckpointManager(*tiers("a"), arena=place.root / "arena-a") as m:
        m.resume()
        m.save(3, state_of(3))
    with ckpt.CheckpointManager(*tiers("b"), arena=place.root / "arena-b") as m:
        assert m.resume().report.fresh
    with ckpt.CheckpointManager(*tiers("a"), arena=place.root / "arena-a") as m:
        check(m.resume(), 3, "local")


def test_memory_keeps_as_many_as_it_was_told_to(place: Place) -> None:
    tiers = ckpt.Memory(keep=ckpt.Keep(last=3)), ckpt.Shared(place.root / "run", every=100)
    m = place.manager(*tiers)
    m.resume()
    for step in range(1, 12):
        m.save(step, state_of(step))
        assert set(range(max(1, step - 2), step + 1)) <= set(m.all_steps())
        assert m.status().slots_free == 5 - min(step, 3)
    die(m)
    with place.manager(*tiers) as m:
        check(m.resume(), 11, "memory")
        check(m.restore(9), 9, "memory")


def test_metrics_that_come_late_decide_what_is_best(place: Place) -> None:
    best = ckpt.Keep(last=1, best=ckpt.Best("eval"))
    with place.manager(ckpt.Shared(place.root / "run", keep=best)) as m:
        m.resume()
        for step, value in ((1, 3.0), (2, 1.0), (3, 2.0)):
            m.save(step, state_of(step)).wait(timeout=60)  # type: ignore[union-attr]
            m.add_metrics(step, {"eval": value})
            m._saves.settle()
        m.save(4, state_of(4)).wait(timeout=60)  # type: ignore[union-attr]
        m._saves.settle()
        assert m.best_step() == 2
        with pytest.raises(ckpt.NotFound):
            m.add_metrics(17, {"eval": 1.0})
        with pytest.raises(ckpt.Misuse):
            m.add_metrics(4, {"eval": "good"})
    assert place.shared() == [2, 4]


def test_a_rewind_to_a_branch_that_was_left(place: Place) -> None:
    with place.manager(ckpt.Shared(place.root / "run")) as m:
        m.resume()
        for step in (1, 2, 3):
            m.save(step, state_of(step))
        check(m.rewind(1), 1, "memory" if 1 in _in_slots(m) else "shared")
        m.save(2, state_of(22))
        m.wait_until_finished(60)
        with pytest.raises(ckpt.Misuse, match="give the step"):
            m.restore(branch=1)
        restored = m.rewind(3, branch=1)
        assert restored.step == 3
        np.testing.assert_array_equal(restored.state["w"], state_of(3)["w"])
        assert m.all_steps() == [1, 2, 3]
        m.save(4, state_of(4))
    assert place.shared() == [1, 2, 3, 4]


def _in_slots(m: ckpt.CheckpointManager) -> set[int]:
    return {image.id.step for image in m._saves.host_images().images if image.slot is not None}


def test_the_writer_that_dies_is_replaced_and_nothing_is_lost(place: Place) -> None:
    with place.manager(ckpt.Shared(place.root / "run"), writer="process") as m:
        m.resume()
        m.save(1, state_of(1)).wait(timeout=60)  # type: ignore[union-attr]
        m._saves.settle()  # the log is written, too
        pid = m.status().writer_pid
        assert pid is not None
        os.kill(pid, 9)
        m.save(2, state_of(2)).wait(timeout=60)  # type: ignore[union-attr]
        status = m.status()
        assert status.writer_restarts == 1
        assert status.writer_pid != pid
        m.add_metrics(2, {"eval": 0.5})
        m.rewind(1, reason="to see what the log says")
    assert place.shared() == [1]
    store = FileStore(place.root / "run")
    first, second = (log.read(store, attempt).events for attempt in (1, 2))
    assert [each.kind for each in first] == ["save", "writer restarted", "save", "metrics"]
    assert f"pid {pid}" in first[1].members["reason"]
    assert [each.kind for each in second] == ["rewound"]
    assert second[0].members["reason"] == "to see what the log says"


def test_after_a_rewind_the_only_copy_of_the_newest_step_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That an abandoned branch reached a higher number says nothing of the new one."""
    tiers = (ckpt.Memory(every=10), ckpt.Shared(place.root / "run", every=100, patience_s=0.2))
    m = place.manager(*tiers)
    m.resume()
    for step in (100, 200):
        m.save(step, state_of(step)).wait(timeout=60)  # type: ignore[union-attr]
    m.rewind(100)
    assert m.status().tiers["shared"].newest == 100
    m.save(150, state_of(150)).wait(timeout=60)  # type: ignore[union-attr]
    with store_fails(monkeypatch), pytest.raises(ckpt.StoreFailed, match="the store is down"):
        m.close()
    with place.manager(*tiers) as m:
        check(m.resume(), 150, "memory")


def test_step_0_is_durable_like_any_other(place: Place) -> None:
    m = place.manager(ckpt.Memory(), ckpt.Shared(place.root / "run"))
    m.resume()
    m.save(0, state_of(0)).wait(timeout=60)  # type: ignore[union-attr]
    m.close()
    assert not (place.root / "arena").exists()


def test_a_local_tier_that_does_not_answer_stops_no_start(place: Place) -> None:
    m = place.manager()
    m.resume()
    for step in (4, 5):
        m.save(step, state_of(step)).wait(timeout=60)  # type: ignore[union-attr]
    die(m)
    (images,) = (place.root / "local").iterdir()
    images.chmod(0o755)
    with place.manager() as m:
        check(m.resume(), 5, "memory")
        assert m.status().tiers["local"].under_way == 0
        m.wait_until_finished(60)
        assert m.status().tiers["shared"].newest == 5
        images.chmod(0o700)


def test_what_a_tier_has_after_a_start(place: Place) -> None:
    """As `status` tells it: what this manager has brought there, or has gone on from."""
    m = place.manager()
    m.resume()
    for step in range(1, 7):
        m.save(step, state_of(step)).wait(timeout=60)  # type: ignore[union-attr]
    die(m)
    with place.manager() as m:
        m.resume()
        m.wait_until_finished(60)
        m.rewind(4)
        newest = {name: tier.newest for name, tier in m.status().tiers.items()}
        assert newest == {"memory": 4, "local": 4, "shared": 4}

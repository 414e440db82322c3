"""Memory and slots: as many as its snapshots need, or it gives back what others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arena_slots import Place

import ckpt
from ckpt import waiting
from ckpt.store import FileStore

MIB = 2**20


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).standard_normal(MIB // 8)}  # a slot takes 3 MiB


@pytest.fixture(params=["thread", "process"])
def options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    return {"writer": request.param, "arena": tmp_path / "arena"}


@pytest.fixture
def waits_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that would wait for ever fails instead."""
    monkeypatch.setattr(waiting, "PATIENT_S", 0.05)


@pytest.mark.parametrize(("slots", "kept"), [(1, 1), (1, 2), (2, 2), (3, 5)])
def test_slots_that_memory_would_keep_all_of_are_refused(
    tmp_path: Path, slots: int, kept: int
) -> None:
    memory = ckpt.Memory(keep=ckpt.Keep(last=kept))
    with pytest.raises(ckpt.Misuse, match=rf"slots: these tiers need {kept + 2}, found {slots}: "):
        ckpt.CheckpointManager(memory, tmp_path / "run", slots=slots)
    assert not (tmp_path / "run").exists()


def test_one_slot_beside_those_that_memory_keeps_will_do(
    tmp_path: Path, options: dict[str, Any], waits_briefly: None
) -> None:
    tiers = (
        ckpt.Memory(keep=ckpt.Keep(last=2)),
        ckpt.Shared(tmp_path / "run", every=2, patience_s=0),
    )
    with ckpt.CheckpointManager(*tiers, slots=3, timeout_s=20, **options) as m:
        m.resume()
        for step in range(1, 8):
            m.save(step, state_of(step))
        assert not m.status().degraded
    assert ckpt.open(tmp_path / "run").all_steps() == [2, 4, 6, 7]


def test_without_room_for_more_slots_memory_gives_its_own_back(
    tmp_path: Path,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    waits_briefly: None,
) -> None:
    Place(monkeypatch, tmp_path / "arena", 5 * MIB)
    tiers = (ckpt.Memory(), ckpt.Shared(tmp_path / "run", every=2, patience_s=0))
    with ckpt.CheckpointManager(*tiers, timeout_s=20, **options) as m:
        m.resume()
        for step in range(1, 6):
            pending = m.save(step, state_of(step))
            assert pending is not None
            pending.wait("memory", timeout=60)
        status = m.status()
        assert (status.slots, status.degraded) == (1, True)
        assert "room for 1 slot, and 3 are needed: 0 of 1 snapshot" in status.tiers["memory"].error
        assert status.tiers["memory"].newest == 5
        m.wait_until_finished(60)
    told = [text for text in caplog.messages if "tier memory" in text]
    assert len(told) == 1, told
    run = ckpt.open(tmp_path / "run")
    assert run.all_steps() == [2, 4, 5]
    for step in (2, 4, 5):
        np.testing.assert_array_equal(run.restore(step).state["w"], state_of(step)["w"])


def test_what_memory_still_has_room_for_stays(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, waits_briefly: None
) -> None:
    Place(monkeypatch, tmp_path / "arena", 7 * MIB)
    tiers = (
        ckpt.Memory(keep=ckpt.Keep(last=3)),
        ckpt.Shared(tmp_path / "run", every=100, patience_s=0),
    )
    with ckpt.CheckpointManager(*tiers, timeout_s=20, **options) as m:
        m.resume()
        for step in range(1, 6):
            m.save(step, state_of(step))
        assert m.status().slots == 2
        assert "1 of 3 snapshots" in m.status().tiers["memory"].error
        assert m.all_steps() == [4, 5]


def test_a_start_with_room_for_the_slot_it_finds_goes_on(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, waits_briefly: None
) -> None:
    Place(monkeypatch, tmp_path / "arena", 3 * MIB)  # a slot that is made for `like` takes 2
    tiers = (ckpt.Memory(), ckpt.Shared(tmp_path / "run", every=2, patience_s=0))
    for start in range(3):
        with ckpt.CheckpointManager(*tiers, timeout_s=20, **options) as m:
            assert m.resume(like=state_of(0)).step == 3 * start
            for step in range(3 * start + 1, 3 * start + 4):
                m.save(step, state_of(step))
            assert m.status().slots == 1
    assert ckpt.open(tmp_path / "run").all_steps() == [2, 3, 4, 6, 8, 9]


def test_skipping_does_not_skip_for_ever(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Place(monkeypatch, tmp_path / "arena", 5 * MIB)
    tiers = (ckpt.Memory(), ckpt.Shared(tmp_path / "run", every=2, patience_s=0))
    with ckpt.CheckpointManager(*tiers, busy="skip", timeout_s=20, **options) as m:
        m.resume()
        for step in range(1, 9):
            m.save(step, state_of(step))
            m.wait_until_finished(60)
        assert m.status().skipped == 0
    assert ckpt.open(tmp_path / "run").all_steps() == [2, 4, 6, 8]


@pytest.mark.parametrize(
    ("hinder", "cause"),
    [
        (
            lambda m: m._saves._in_memory._copied.update({None: m._saves.arena.claim(1)}),
            "1 of 2 hold snapshots that other processes have not copied yet",
        ),
        (lambda m: None, "another process still reads what lies in .*/arena, such as the writer"),
    ],
)
def test_a_save_that_waits_says_for_what(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waits_briefly: None,
    hinder: Callable[[ckpt.CheckpointManager], None],
    cause: str,
) -> None:
    with ckpt.CheckpointManager(
        ckpt.Shared(tmp_path / "run", patience_s=0), arena=tmp_path / "arena", timeout_s=0.1
    ) as m:
        m.resume()
        hinder(m)
        arena = m._saves.arena
        assert arena is not None
        held = [arena.claim(1) for _ in range(arena.free)]
        with pytest.raises(ckpt.StoreFailed, match=rf"no slot has come free for .* s: {cause}"):
            m.save(1, state_of(1))
        m._saves._in_memory.release()
        for slot in held:
            slot.release()


def test_a_save_that_waits_for_the_store_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_briefly: None
) -> None:
    goes_on = threading.Event()
    write = FileStore.write_image

    def slow(self: FileStore, *arguments: Any) -> None:
        goes_on.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(FileStore, "write_image", slow)
    shared = ckpt.Shared(tmp_path / "run", patience_s=0)
    arena = tmp_path / "arena"
    with ckpt.CheckpointManager(shared, arena=arena, writer="thread", timeout_s=0.1) as m:
        m.resume()
        m.save(1, state_of(1))
        m.save(2, state_of(2))
        wanted = r": 2 of 2 hold snapshots that are not written yet: the stores are slow"
        with pytest.raises(ckpt.StoreFailed, match=wanted):
            m.save(3, state_of(3))
        goes_on.set()

"""A store that fails at every write, and another attempt that takes over at every write."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_runs import (
    SCENARIOS,
    Run,
    abandon,
    after_death,
    copy_of,
    saved,
    state_of,
)
from faulty_store import Fault, FaultyStore
from rows import Rows

import ckpt
from ckpt import retention
from ckpt.errors import CheckpointError, StoreFailed, Superseded
from ckpt.lineage import StepId
from ckpt.reader import Reader, Restored
from ckpt.retention import Keep
from ckpt.store import FileStore

SEED = int(os.environ.get("CRASH_SEED", time.time_ns() % 1_000_000))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process dies here, not its host: nothing has to be on the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, if there is one: thousands of small files are made and removed."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lastgood-crash-") as name:
        yield Path(name)


# --- a store that fails, and a process that lives on ---------------------------------------------


@pytest.mark.parametrize("kind", ["fail", "fail after"])
@pytest.mark.parametrize("told", [True, False])
def test_a_failed_save_is_told_and_the_next_one_works(kind: str, told: bool, place: Path) -> None:
    before, operations = SCENARIOS["second save"].operations(place)
    starting = 1 + next(i for i, what in enumerate(operations) if "from.json" in what)
    failed = 0
    for at in range(starting + 1, len(operations) + 1):
        what = f"{kind} at {at}: {operations[at - 1]}"
        run = before.copy(place / f"{at}")
        store = FaultyStore(FileStore(run.location), [Fault(at, kind)])  # type: ignore[arg-type]
        rows = Rows()
        with run.manager(store) as manager:
            manager.resume(data=rows)
            rows.take()
            run.tags[2] = {102}
            pending = manager.save(2, state_of(102), data=rows)
            assert pending is not None
            rows.take()
            run.tags[3] = {103}
            error: CheckpointError | None = None
            if told:
                try:
                    pending.wait(timeout=60)
                except StoreFailed as caught:
                    error = caught
                manager._saves.settle()  # the fault may be one of retention
                third = manager.save(3, state_of(103), data=rows)
            else:
                manager._saves.settle()
                try:
                    third = manager.save(3, state_of(103), data=rows)
                except StoreFailed as caught:
                    error = caught
                    third = manager.save(3, state_of(103), data=rows)
            assert third is not None
            third.wait(timeout=60)
            failed += error is not None
            spared = "-deleted" in operations[at - 1] or operations[at - 1].startswith("append")
            assert (error is None) == spared, f"{what}: only retention and log may fail in silence"
            assert error is None or f"operation {at}" in str(error), what
        steps = Reader(run.location).all_steps()
        # What was named before the failure was reported may be there; it is then whole.
        assert steps == [3], f"{what}: {steps}"
        run.acked = 3
        after_death(run, what)
        shutil.rmtree(run.base)
    assert failed >= 10


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_write_that_fails_anywhere_spoils_nothing(name: str, place: Path) -> None:
    """Rewinds, deletions and starts, too. The process ends in order, and the next one goes on."""
    scenario = SCENARIOS[name]
    before, operations = scenario.operations(place)
    rng = random.Random(f"{SEED} {name}")
    told = 0
    # Long ones take long: there every second write is left out, other ones each time.
    every = 2 if len(operations) > 40 else 1
    for at in range(1 + rng.randrange(every), len(operations) + 1, every):
        kind = rng.choice(["fail", "fail after"])
        what = f"CRASH_SEED={SEED}: {name}, {kind} at {at}: {operations[at - 1]}"
        run = before.copy(place / f"{at}")
        store = FaultyStore(FileStore(run.location), [Fault(at, kind)])  # type: ignore[arg-type]
        manager = run.manager(store)
        errors = []
        for act in (lambda m=manager, r=run: scenario.act(r, m, Rows()), manager.close):
            try:
                act()
            except CheckpointError as error:
                errors.append(str(error))
        assert all(f"operation {at}" in error for error in errors), f"{what}: {errors}"
        told += bool(errors)
        after_death(run, what)
        shutil.rmtree(run.base)
    assert told >= len(operations) // every // 3, told


def test_an_error_nobody_asked_for_is_raised_by_close(place: Path) -> None:
    run = saved(place, 1)
    store = FaultyStore(FileStore(run.location), [Fault(3, "fail")])
    manager = run.manager(store)
    rows = Rows()
    manager.resume(data=rows)
    rows.take()
    manager.save(2, state_of(102), data=rows)
    with pytest.raises(StoreFailed, match="operation 3: write_image"):
        manager.close()
    manager.close()
    assert Reader(run.location).all_steps() == [1]


def test_what_goes_wrong_after_a_step_does_not_hold_up_the_next(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(place, 1, Keep(last=9))
    manager = run.manager()
    rows = Rows()
    manager.resume(data=rows)
    broken = [RuntimeError("a bug in retention")]

    def doomed(*_: Any, **__: Any) -> list[StepId]:
        if broken:
            raise broken.pop()
        return []

    monkeypatch.setattr(retention, "doomed", doomed)
    run.save(manager, 2, 102, rows)
    rows.take()
    while (
        not manager._background.unheard
    ):  # the writer comes to it a moment after the acknowledgement
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="a bug in retention"):
        manager.save(3, state_of(103), data=rows)
    manager.save(3, state_of(103), data=rows)
    manager.close()
    assert Reader(run.location).all_steps() == [1, 2, 3]


# --- another attempt takes over, at every write --------------------------------------------------


@pytest.mark.parametrize("name", ["second save", "rewind", "delete"])
def test_another_attempt_takes_over_at_every_write(name: str, place: Path) -> None:
    """The old process is paused just there, and wakes when the new one has saved a step."""
    scenario = SCENARIOS[name]
    before, operations = scenario.operations(place)
    outcomes: dict[str, int] = {}
    for at in range(2, len(operations) + 1):
        what = f"{name}, paused at {at}: {operations[at - 1]}"
        run = before.copy(place / f"{at}")
        new: list[Restored] = []
        kept: set[int] = set()

        def take_over(run: Run = run, new: list[Restored] = new, kept: set[int] = kept) -> None:
            rows = Rows()
            with run.manager() as manager:
                restored = manager.resume(data=rows)
                run.check(restored, copy_of(rows))
                new.append(restored)
                tag = 900 + restored.step
                run.tags.setdefault(restored.step + 1, set()).add(tag)
                rows.take()
                pending = manager.save(restored.step + 1, state_of(tag), data=rows)
                assert pending is not None
                pending.wait(timeout=60)
            kept.update(Reader(run.location).all_steps())

        store = FaultyStore(FileStore(run.location), [Fault(at, "pause", take_over)])
        manager = run.manager(store)
        outcome = "acknowledged"
        try:
            scenario.act(run, manager, Rows())
            manager.close()
        except Superseded:
            outcome = "superseded"
        finally:
            abandon(manager)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        assert new, what
        assert kept <= set(Reader(run.location).all_steps()), f"{what}: taken from the new one"
        found = ckpt.restore(run.location)
        newest = new[0].step + 1
        if outcome == "superseded":
            assert (found.step, found.state["tag"]) == (newest, 900 + newest - 1), what
        # What an old process was told is done is never undone by the new one.
        run.acked = newest
        after_death(run, what)
        shutil.rmtree(run.base)
    assert outcomes["superseded"] >= 3, outcomes

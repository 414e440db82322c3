"""The process dies at every single write, whatever it is doing: the next one finds all in order.

A store that counts its operations stops for ever at a chosen one, or does half of it first. The
manager is then left as it is, like a process that was killed, and another one starts.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from crash_runs import (
    KEEP_BEST,
    SCENARIOS,
    Run,
    after_death,
    decisions,
    dies,
    first_save,
    in_the_making,
    saved,
    start_and_save,
    state_of,
)
from faulty_store import Fault
from rows import Rows

import ckpt
from ckpt import layout
from ckpt.errors import Misuse, Superseded
from ckpt.reader import Reader, Restored
from ckpt.retention import Keep

SEED = int(os.environ.get("CRASH_SEED", "20260"))


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


@pytest.mark.parametrize("name", SCENARIOS)
def test_death_at_every_write(name: str, place: Path) -> None:
    scenario = SCENARIOS[name]
    rng = random.Random(f"{SEED} {name}")
    before, operations = scenario.operations(place)
    for at, operation in enumerate(operations, 1):
        # Long ones take long: there one kind of death is drawn for each write.
        for kind in ("stop", "torn") if len(operations) < 40 else [rng.choice(["stop", "torn"])]:
            what = f"{name}, {kind} at {at} of {len(operations)}: {operation}"
            run = before.copy(place / f"{kind}-{at}")
            store = dies(run, scenario.act, [Fault(at, kind)])  # type: ignore[arg-type]
            assert store.dead, what
            assert store.operations == operations[:at], what
            had_rewound = [d for d in decisions(run) if d["kind"] == "rewind"]
            restored = after_death(run, what)
            if had_rewound:
                assert restored.step in (1, 2, 3), what
                assert restored.state["tag"] // 100 in (1, len(had_rewound) + 1), what
                assert decisions(run)[-1]["skips"] == had_rewound[-1]["skips"], what
            elif name.startswith("rewind"):
                assert restored.state["tag"] == 103, what
            shutil.rmtree(run.base)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_next_attempt_dies_as_well(name: str, place: Path) -> None:
    """And the one after that, each at a random write; then one goes through."""
    rng = random.Random(f"{SEED} {name}")
    scenario = SCENARIOS[name]
    before, operations = scenario.operations(place)
    for drill in range(8):
        run = before.copy(place / f"drill-{drill}")
        history = []
        for act, count in ((scenario.act, len(operations)), *[(start_and_save, 45)] * 3):
            fault = Fault(rng.randint(1, count), rng.choice(["stop", "torn"]))
            store = dies(run, act, [fault])
            history.append(f"{fault.kind} at {fault.at}: {store.operations[-1:]}")
        after_death(run, f"{name}, seed {SEED}, {history}")
        shutil.rmtree(run.base)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_next_attempt_dies_at_every_write(name: str, place: Path) -> None:
    scenario = SCENARIOS[name]
    before, operations = scenario.operations(place)
    for at in range(1, len(operations) + 1):
        first = before.copy(place / f"first-{at}")
        dies(first, scenario.act, [Fault(at, "torn")])
        for then in range(1, 100):
            run = first.copy(place / f"then-{at}-{then}")
            store = dies(run, start_and_save, [Fault(then, "torn")])
            after_death(run, f"{name}, torn at {at}, then at {then}: {store.operations[-1]}")
            shutil.rmtree(run.base)
            if not store.dead:
                break
        shutil.rmtree(first.base)


# --- single cases --------------------------------------------------------------------------------


def test_saving_without_resume_does_not_bury_a_step_that_was_rolled_forward(
    place: Path,
) -> None:
    run = Run(place).begin()
    whole = dies(run.copy(place / "whole"), first_save, [])
    move = next(i for i, what in enumerate(whole.operations) if what.startswith("move"))
    dies(run, first_save, [Fault(move + 1, "stop")])
    with run.manager() as manager:
        with pytest.raises(Misuse, match=r"call resume\(\) or restore\(\)"):
            manager.save(1, state_of(999))
        assert manager.resume().state["tag"] == 101


def test_damaged_manifests_do_not_end_retention(place: Path) -> None:
    run = saved(place, 1, KEEP_BEST)
    rows = Rows()
    with run.manager() as manager:
        manager.resume(data=rows)
        for step in (2, 3):
            run.save(manager, step, 100 + step, rows)
    with run.manager() as manager:
        assert manager.resume(data=rows).step == 3
        # Before this one's retention looks: what it has read once of a step it does not read again.
        (run.root / "branch-1/3/manifest.json").write_bytes(b"{}")
        for step in (4, 5, 6):
            run.save(manager, step, 100 + step, rows)
    assert Reader(run.location).all_steps() == [3, 6]


def test_a_damaged_step_in_the_way_is_neither_replaced_nor_lost(place: Path) -> None:
    """Somebody copies a step to the place of the next one: it is theirs."""
    run = saved(place, 2)
    rows = Rows()
    with run.manager() as manager:
        manager.resume(data=rows)
        shutil.copytree(run.root / "branch-1/2", run.root / "branch-1/3")
        rows.take()
        pending = manager.save(3, state_of(103), data=rows)
        assert pending is not None
        with pytest.raises(ckpt.AlreadyExists, match=r"branch-1/3: what is there is damaged"):
            pending.wait(timeout=60)
        run.save(manager, 4, 104, rows)
    before = (run.root / "branch-1/3/commit_success.txt").read_bytes()
    with run.manager() as manager:
        assert manager.resume().step == 4
    assert (run.root / "branch-1/3/commit_success.txt").read_bytes() == before


def test_a_step_that_was_rolled_forward_onto_a_copy_stops_no_start(place: Path) -> None:
    run = in_the_making(place)
    shutil.copytree(run.root / "branch-1/1", run.root / "branch-1/2")
    with run.manager() as manager:
        restored = manager.resume()
    assert restored.step == 1
    assert any("left branch-1/2.orbax" in line for line in restored.report.rolled_forward)
    assert [lost.step for lost in restored.report.lost] == [2]
    assert list(run.root.glob("branch-1/2.orbax-checkpoint-tmp-a2/commit_success.txt"))


def test_a_run_whose_steps_are_gone_is_not_begun_anew(place: Path) -> None:
    run = saved(place, 2)
    with run.manager() as manager:
        manager.resume()
    for path in run.root.glob("branch-1/*"):
        if layout.parse_step_name(path.name) is not None:
            shutil.rmtree(path)
    with run.manager() as manager:
        for must_exist in (True, False):
            with pytest.raises(ckpt.Damaged, match=r"went on from step 2 .* is gone"):
                manager.resume(must_exist=must_exist)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_rewind_skips_what_was_served_on_either_side_of_a_fork(
    place: Path, *, damaged: bool
) -> None:
    run, rows = saved(place, 4), Rows()
    with run.manager() as manager:
        manager.resume(data=rows)
        manager.rewind(2, skip_steps=range(4, 5), data=rows)  # batch 3: examples 6 and 7
        for step in (3, 4, 5):
            run.save(manager, step, 200 + step, rows)
        assert rows.next_example == 12
        if damaged:
            for each in ("branch-1/2", f"branch-{manager._tenure.attempt.number}/3"):  # type: ignore[union-attr]
                (run.root / each / "manifest.json").write_bytes(b"{}")
        manager.rewind(1, skip_steps=range(2, 6), data=rows)
    assert rows.skips == [(2, 12)]
    assert rows.take() == [12, 13]


def test_a_rewind_skips_nothing_that_its_step_has_learnt_from(place: Path) -> None:
    run, rows = saved(place, 3), Rows()
    with run.manager() as manager:
        manager.resume(data=rows)
        for skip in ({"skip_steps": range(2, 3)}, {"skip_batches": range(1, 3)}):
            with pytest.raises(
                Misuse, match=r"step 2 has learnt from batch 1 already .* step 3, or"
            ):
                manager.rewind(2, data=rows, **skip)
        assert manager.rewind(1, data=rows, skip_steps=range(2, 3)).step == 1
    assert len(decisions(run)) == 3


def test_what_must_not_be_deleted_is_not(place: Path) -> None:
    run = saved(place, 3)
    ckpt.pin(run.location, 2)
    with run.manager() as manager:
        manager.resume()
        with pytest.raises(Misuse, match=r"step 3 is the newest of the run; rewind\(\)"):
            manager.delete(3)
        with pytest.raises(Misuse, match=r"step 2 is pinned; ckpt\.unpin\(\) it"):
            manager.delete(2)
        ckpt.unpin(run.location, 2)
        with pytest.raises(ckpt.NotFound, match="step 7 is not in the lineage"):
            manager.delete(7)
        manager.rewind(2)
        for step in (3, 4):
            pending = manager.save(step, state_of(200 + step), data={})
            assert pending is not None
            pending.wait()
            if step == 3:
                with pytest.raises(Misuse, match="step 2 is where branch 3 forked, which has few"):
                    manager.delete(2)
        manager.delete(2)
        assert manager.all_steps() == [1, 3, 4]


def test_steps_of_orbax_are_not_ours_to_delete(place: Path) -> None:
    run = Run(place).begin()
    for step in (1, 2):
        (run.root / f"{step}" / "default").mkdir(parents=True)
        (run.root / f"{step}" / layout.ORBAX_STEP).write_bytes(b"{}")
    with run.manager() as manager:
        manager._tenure.attempt = mock.Mock(line=Reader(run.location).listing().lineage)
        with pytest.raises(Misuse, match="step 1 was written by Orbax"):
            manager.delete(1)
    assert (run.root / "1/default").is_dir()


def test_a_reader_outruns_no_retention(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was listed is deleted before it is read, as the trainer saves on."""
    run = saved(place, 1, Keep(last=1))
    rows, real = Rows(), ckpt.reader.load
    saves = iter([2, 3, 4])
    with run.manager() as manager:
        manager.resume(data=rows)

        def load(*args: Any) -> Restored:
            if step := next(saves, None):
                run.save(manager, step, 100 + step, rows)
                while manager.all_steps() != [step]:
                    time.sleep(0.001)  # retention comes a moment after the acknowledgement
            return real(*args)

        monkeypatch.setattr("ckpt.reader.load", load)
        found = ckpt.restore(run.location)
        assert (found.step, found.state["tag"], found.report.lost) == (4, 104, ())
        monkeypatch.undo()

        again = iter([5])
        check = ckpt.verification.verify_step

        def verify_step(*args: Any, **options: Any) -> Any:
            if step := next(again, None):
                run.save(manager, step, 100 + step, rows)
                while manager.all_steps() != [step]:
                    time.sleep(0.001)
            return check(*args, **options)

        monkeypatch.setattr("ckpt.verification.verify_step", verify_step)
        report = ckpt.verify(run.location)
        assert (report.intact, report.steps) == (True, ())
        assert ckpt.verify(run.location).steps[0].intact


def test_a_superseded_writer_leaves_nothing(place: Path) -> None:
    """It has lost the run before it began to write: it does not even begin."""
    run = saved(place, 1)
    old, rows = run.manager(), Rows()
    old.resume(data=rows)
    with run.manager() as new:
        new.resume()
        rows.take()
        pending = old.save(2, state_of(102), data=rows)
        assert pending is not None
        with pytest.raises(Superseded, match=r"attempt 2 no longer owns the run: attempt 3"):
            pending.wait()
        assert not list(run.root.glob("branch-1/2.orbax-checkpoint-tmp-a2"))
    with pytest.raises(Superseded):
        old.rewind(1)
    old.close()
    assert len(list(run.root.glob("attempts/*.from.json"))) == 3

"""The process dies at every single write, whatever it is doing: the next one finds all in order.

A store that counts its operations stops for ever at a chosen one, or does half of it first. The
manager is then left as it is, like a process that was killed, and another one starts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from faulty_store import Died, Fault, FaultyStore
from rows import Rows

import ckpt
from ckpt import layout
from ckpt.errors import CheckpointError, Misuse, StoreFailed, Superseded
from ckpt.lineage import StepId
from ckpt.manager import CheckpointManager, Shared
from ckpt.reader import Reader, Restored
from ckpt.retention import Best, Keep
from ckpt.store import FileStore

SEED = int(os.environ.get("CRASH_SEED", "20260"))

FOREIGN = {
    "notes.txt": b"mine",
    "attempts/README": b"mine",
    "attempts/1.json.bak": b"mine",
    "log/old.txt": b"mine",
    "pins/README": b"mine",
    "branch-x/3/commit_success.txt": b"mine",
    "branch-01/3/commit_success.txt": b"mine",
    "branch-1/notes.txt": b"mine",
    "branch-1/007/manifest.json": b"mine",
    "branch-1/٣/manifest.json": b"mine",
    "branch-1/2 (copy)/commit_success.txt": b"mine",
    "branch-1/2.orbax-checkpoint-tmp/x": b"mine",
    "branch-1/2.orbax-checkpoint-tmp-1234/x": b"mine",
    "branch-1/2.orbax-checkpoint-tmp-a0/x": b"mine",
    "branch-1/2.orbax-checkpoint-tmp-a1-gone/x": b"mine",
    "2.orbax-checkpoint-tmp-a1/x": b"mine",
    "backup/branch-1/2/commit_success.txt": b"mine",
    ".snapshots/x": b"mine",
}


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


def state_of(tag: int) -> dict[str, Any]:
    rng = np.random.default_rng(tag)
    return {
        "w": rng.standard_normal((3, 4), np.float32),
        "b": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
        "layers": [rng.integers(0, 255, 7, np.uint8), np.zeros((0, 3), np.int8)],
        "tag": tag,
    }


def bits(state: dict[str, Any]) -> list[Any]:
    leaves = [state["w"], state["b"], *state["layers"]]
    arrays = [np.asarray(leaf) for leaf in leaves]
    return [*((str(a.dtype), a.shape, a.tobytes()) for a in arrays), state["tag"]]


@dataclass
class Run:
    """A root, with foreign things in it, and what is known to be in its steps."""

    base: Path
    keep: Keep = field(default_factory=Keep)
    tags: dict[int, set[int]] = field(default_factory=dict)
    """What the step of a number may hold: several, where branches have the same number."""
    acked: int = 0
    """The newest step that was acknowledged, since the last rewind."""
    tries: int = 0

    @property
    def root(self) -> Path:
        return self.base / "run"

    @property
    def location(self) -> str:
        return str(self.root)

    def begin(self) -> Run:
        for name, data in FOREIGN.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return self

    def copy(self, base: Path) -> Run:
        shutil.copytree(self.root, base / "run")
        tags = {step: set(known) for step, known in self.tags.items()}
        return Run(base, self.keep, tags, self.acked)

    def manager(self, store: FaultyStore | None = None) -> CheckpointManager:
        """A manager as on a host of its own. Whoever gets it has to close or to abandon it."""
        self.tries += 1
        tier = Shared(self.location, keep=self.keep)
        with mock.patch("ckpt.manager.open_store", return_value=store or FileStore(self.location)):
            return CheckpointManager(tier, arena=self.base / f"arena-{self.tries}", timeout_s=30)

    def save(self, manager: CheckpointManager, step: int, tag: int, rows: Rows) -> None:
        """A step, until it is acknowledged."""
        rows.take()
        self.tags.setdefault(step, set()).add(tag)
        pending = manager.save(step, state_of(tag), data=rows)
        assert pending is not None
        pending.wait(timeout=60)
        self.acked = step

    def check(self, restored: Restored, rows: Rows) -> None:
        """What was restored is one of the steps that were saved, exactly."""
        step = restored.step
        if step:
            assert restored.state["tag"] in self.tags[step]
            assert bits(restored.state) == bits(state_of(restored.state["tag"]))
        examples = [e for e in range(100) if not any(a <= e < b for a, b in rows.skips)]
        assert rows.take() == examples[2 * step : 2 * step + 2], f"{step=} {rows.skips=}"
        assert not restored.report.lost
        assert not restored.report.damage


def abandon(manager: CheckpointManager) -> None:
    """Leave a manager as a killed process does: only the kernel drops its lock."""
    if manager._writer is not None:
        manager._writer._jobs.put(None)
        manager._writer._thread.join(60)
        assert not manager._writer._thread.is_alive()
    if manager._arena is not None:
        manager._arena.close(remove=False)
    manager._closed = True


Act = Callable[[Run, CheckpointManager, Rows], None]


def dies(run: Run, act: Act, faults: Sequence[Fault]) -> FaultyStore:
    """`act` on a manager that dies of a fault, unless it gets through."""
    store = FaultyStore(FileStore(run.location), faults)
    manager = run.manager(store)
    try:
        act(run, manager, Rows())
        manager.close()
    except Died:
        assert store.dead
    finally:
        abandon(manager)
    return store


def names(root: Path) -> Iterator[str]:
    for path in root.rglob("*"):
        yield str(path.relative_to(root))


def after_death(run: Run, what: str) -> Restored:
    """Another process starts: everything is in order, and stays so when it goes on."""
    acked = run.acked
    rows = Rows()
    with run.manager() as manager:
        restored = manager.resume(data=rows)
        assert restored.step >= acked, f"{what}: an acknowledged step is gone"
        run.check(restored, rows)
        in_order(run, what)
        rows_now = Rows()
        rows_now.skip(rows.skips)
        rows_now.next_example = rows.next_example
        run.tags.setdefault(restored.step + 1, set()).add(777)
        pending = manager.save(restored.step + 1, state_of(777), data=rows_now)
        assert pending is not None
        pending.wait(timeout=60)
    in_order(run, what)
    found = ckpt.restore(run.location)
    assert (found.step, found.state["tag"]) == (restored.step + 1, 777), what
    assert bits(found.state) == bits(state_of(777)), what
    return restored


def in_order(run: Run, what: str) -> None:
    """No damage, nothing left over, nothing foreign touched, every step what it was."""
    report = ckpt.verify(run.location)
    assert report.intact, f"{what}: {report.damage}"
    assert report.unfinished == (), what
    for name, data in FOREIGN.items():
        assert (run.root / name).read_bytes() == data, f"{what}: {name}"
    for name in names(run.root):
        if name not in FOREIGN and name.startswith("branch-"):
            foreign = any(key == name or key.startswith(f"{name}/") for key in FOREIGN)
            assert foreign or "tmp" not in name, f"{what}: left behind: {name}"
    for each in report.steps:
        assert each.id is not None
        found = ckpt.restore(run.root / each.name)
        assert found.state["tag"] in run.tags[each.id.step], f"{what}: {each.name}"
        assert bits(found.state) == bits(state_of(found.state["tag"])), f"{what}: {each.name}"


def decisions(run: Run) -> list[dict[str, Any]]:
    found = []
    for path in (run.root / "attempts").glob("*.from.json"):
        found.append(json.loads(path.read_bytes()))
    return sorted(found, key=lambda d: int(d["attempt"]))


# --- the scenarios -------------------------------------------------------------------------------


def first_save(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    manager.resume(data=rows)
    run.save(manager, 1, 101, rows)


def second_save(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    assert manager.resume(data=rows).step == 1
    run.save(manager, 2, 102, rows)


def save_with_figures(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    """Three steps in a row, of which retention keeps the newest and the best."""
    manager.resume(data=rows)
    for step, loss in ((2, 3.0), (3, 1.0), (4, 2.0)):
        rows.take()
        run.tags[step] = {100 + step}
        manager.save(step, state_of(100 + step), data=rows, metrics={"loss": loss})
    manager.wait_until_finished(60)
    run.acked = 4


def rewind_and_save(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    assert manager.resume(data=rows).step == 3
    run.acked = 1
    restored = manager.rewind(1, skip_steps=range(2, 3), reason="a spike at 2", data=rows)
    assert (restored.step, rows.skips) == (1, [(2, 4)])
    run.save(manager, 2, 202, rows)


def rewind_twice(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    rewind_and_save(run, manager, rows)
    run.acked = 1
    manager.rewind(1, skip_steps=range(3, 4), data=rows)
    run.save(manager, 2, 302, rows)
    run.save(manager, 3, 303, rows)


def start_and_save(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    restored = manager.resume(data=rows)
    run.check(restored, copy_of(rows))
    run.save(manager, restored.step + 1, 500 + restored.step, rows)


def delete_one(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    assert manager.resume(data=rows).step == 3
    manager.delete(2)
    assert 2 not in manager.all_steps()


def copy_of(rows: Rows) -> Rows:
    copy = Rows()
    copy.set_state(rows.get_state())
    return copy


def saved(base: Path, count: int, keep: Keep | None = None) -> Run:
    """A run with steps 1 to `count` of one attempt."""
    run = Run(base, keep or Keep()).begin()
    rows = Rows()
    with run.manager() as manager:
        manager.resume(data=rows)
        for step in range(1, count + 1):
            run.save(manager, step, 100 + step, rows)
    return run


def in_the_making(base: Path) -> Run:
    """Step 1 is saved, step 2 complete and not published."""
    run = saved(base, 1)
    whole = dies(run.copy(base / "whole"), second_save, [])
    move = next(i for i, what in enumerate(whole.operations) if what.startswith("move"))
    dies(run, second_save, [Fault(move + 1, "stop")])
    assert list(run.root.glob("branch-1/2.orbax-checkpoint-tmp-a2/commit_success.txt"))
    run.acked = 2  # nobody was told, but all of it is there
    return run


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[Path], Run]
    act: Act
    at_least: int
    """So many operations it has: the test would see nothing if they were not counted."""

    def operations(self, base: Path) -> tuple[Run, list[str]]:
        """The run before the scenario, and what the scenario does to the store."""
        run = self.prepare(base / "before")
        store = dies(run.copy(base / "whole"), self.act, [])
        assert not store.dead
        assert len(store.operations) >= self.at_least, store.operations
        return run, store.operations


KEEP_BEST = Keep(last=1, best=Best("loss"))
SCENARIOS = {
    "first save": Scenario(lambda base: Run(base).begin(), first_save, 15),
    "second save": Scenario(lambda base: saved(base, 1, Keep(last=1)), second_save, 18),
    "retention": Scenario(lambda base: saved(base, 1, KEEP_BEST), save_with_figures, 40),
    "rewind": Scenario(lambda base: saved(base, 3), rewind_and_save, 17),
    "rewind twice": Scenario(lambda base: saved(base, 3), rewind_twice, 45),
    "roll forward": Scenario(in_the_making, start_and_save, 27),
    "delete": Scenario(lambda base: saved(base, 3), delete_one, 5),
}


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
                third = manager.save(3, state_of(103), data=rows)
            else:
                pending._done.wait(60)
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
    run = saved(place, 1)
    manager = run.manager()
    rows = Rows()
    manager.resume(data=rows)
    broken = [RuntimeError("a bug in retention")]

    def doomed(*_: Any) -> list[StepId]:
        if broken:
            raise broken.pop()
        return []

    monkeypatch.setattr(manager._keeper, "doomed", doomed)
    run.save(manager, 2, 102, rows)
    rows.take()
    while not manager._unheard:  # the writer comes to it a moment after the acknowledgement
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
            for each in ("branch-1/2", f"branch-{manager._attempt.number}/3"):  # type: ignore[union-attr]
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
            pending = manager.save(step, state_of(200 + step))
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
        manager._attempt = mock.Mock(line=Reader(run.location).listing().lineage)
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

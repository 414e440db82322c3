"""Runs to be killed: a root with foreign things in it, scenarios, and what holds after a death."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from faulty_store import Died, Fault, FaultyStore
from rows import Rows

import ckpt
from ckpt.manager import CheckpointManager
from ckpt.reader import Restored
from ckpt.retention import Best, Keep
from ckpt.store import FileStore
from ckpt.tiers import Shared

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
        manager._saves.settle()  # log and deletions come before the next save, each time

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
    manager._saves.close(in_order=True)
    if manager._saves.arena is not None:
        manager._saves.arena.close(remove=False)
    manager._tenure.is_closed = manager._ended = True


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
        manager._saves.settle()  # as in `Run.save`
    manager.wait_until_finished(60)
    run.acked = 4


def rewind_and_save(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    assert manager.resume(data=rows).step == 3
    run.acked = 1
    restored = manager.rewind(1, skip_steps=range(2, 3), reason="a spike at 2", data=rows)
    assert (restored.step, rows.skips) == (1, [(2, 4)])
    manager._saves.settle()  # its line in the log comes before the next save
    run.save(manager, 2, 202, rows)


def rewind_twice(run: Run, manager: CheckpointManager, rows: Rows) -> None:
    rewind_and_save(run, manager, rows)
    run.acked = 1
    manager.rewind(1, skip_steps=range(3, 4), data=rows)
    manager._saves.settle()
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

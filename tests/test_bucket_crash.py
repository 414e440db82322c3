"""A run in a bucket dies at every write; and what else may lie there when an attempt starts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tensorstore as ts
from bucket_runs import assert_same, save_steps, state_of
from faulty_store import Died

import ckpt
from ckpt import attempts, kv_requests, layout
from ckpt.reader import Reader
from ckpt.store import FileStore
from ckpt.store_kv import KvStore

SEED = int(os.environ.get("CRASH_SEED", time.time_ns() % 1_000_000))


class Requests:
    """A TensorStore KvStore that stops for ever at mutating request number `at`, counted from 1.

    With `carried_out` that request still happens: only its answer is lost.
    """

    def __init__(self, inner: ts.KvStore, at: int = 0, *, carried_out: bool = False) -> None:
        self.inner, self.at, self.carried_out = inner, at, carried_out
        self.count = 0
        self.keys: list[str] = []
        """Of the mutating requests, in order."""
        self.dead = False
        self._lock = threading.Lock()

    def write(self, *args: Any, **options: Any) -> Any:
        with self._lock:
            self._must_live()
            self.count += 1
            self.keys.append(str(args[0]))
            self.dead = self.count == self.at
            if not self.dead or self.carried_out:
                future = self.inner.write(*args, **options)
                future.result()
        self._must_live()
        return future

    def read(self, *args: Any, **options: Any) -> Any:
        self._must_live()
        return self.inner.read(*args, **options)

    def list(self, *args: Any) -> Any:
        self._must_live()
        return self.inner.list(*args)

    def _must_live(self) -> None:
        if self.dead:
            raise Died(f"request {self.count}")


SPEC = {"driver": "memory", "path": "run/"}
KEEP_TWO = ckpt.Keep(last=2)


class Memory:
    """A bucket in memory, and managers on it."""

    def __init__(self, tmp_path: Path, objects: dict[bytes, bytes] | None = None) -> None:
        self.context = ts.Context()
        self.tmp_path = tmp_path
        self.tries = 0
        kv = ts.KvStore.open(SPEC, context=self.context).result()
        for key, value in (objects or {}).items():
            kv.write(key, value).result()

    def objects(self) -> dict[bytes, bytes]:
        kv = ts.KvStore.open(SPEC, context=self.context).result()
        return {key: kv.read(key).result().value for key in kv.list().result()}

    def store(self) -> KvStore:
        return KvStore("memory://run", SPEC, self.context)

    def manager(
        self, store: KvStore | None = None, keep: ckpt.Keep = KEEP_TWO
    ) -> ckpt.CheckpointManager:
        self.tries += 1
        with mock.patch("ckpt.manager.open_store", return_value=store or self.store()):
            return ckpt.CheckpointManager(
                ckpt.Shared("memory://run", keep=keep),
                arena=self.tmp_path / f"arena-{self.tries}",
            )

    def requests(self, act: Act, at: int = 0, *, carried_out: bool = False) -> Requests:
        """`act` on a manager whose store dies at a request, unless it gets through."""
        store = self.store()
        kv_requests._told.discard(store.location)  # each run is the first of its process
        requests = Requests(store.requests._kv, at, carried_out=carried_out)
        store.requests._opened = requests  # type: ignore[assignment]
        m = self.manager(store)
        try:
            act(m)
            m.close()
        except Died:
            assert requests.dead
        finally:
            abandon(m)
        return requests


Act = Callable[[ckpt.CheckpointManager], None]


def abandon(m: ckpt.CheckpointManager) -> None:
    """Leave a manager as a killed process does."""
    m._saves.close(in_order=True)
    if m._saves.arena is not None:
        m._saves.arena.close(remove=True)
    m._tenure.is_closed = m._ended = True


def save_in_turn(m: ckpt.CheckpointManager, steps: Sequence[int]) -> None:
    """What follows a save in the background comes before the next, at the same place each time."""
    for step in steps:
        save_steps(m, [step])
        m._saves.settle()


def start_and_save(m: ckpt.CheckpointManager) -> None:
    step = m.resume().step
    save_in_turn(m, [step + 1, step + 2, step + 3])


def rewind_and_save(m: ckpt.CheckpointManager) -> None:
    m.rewind(2)
    m._saves.settle()
    save_in_turn(m, [3, 4])


def save_one(m: ckpt.CheckpointManager) -> None:
    save_in_turn(m, [m.resume().step + 1])


def delete_one(m: ckpt.CheckpointManager) -> None:
    m.resume()
    m.delete(2)
    assert m.all_steps() == [3]


# --- what lies there ------------------------------------------------------------------------------


def test_fallback_past_damage(tmp_path: Path) -> None:
    run = Memory(tmp_path)
    with run.manager(keep=ckpt.Keep()) as m:
        m.resume()
        save_steps(m, range(1, 5))
    store = run.store()
    store.put("branch-1/4/commit_success.txt", b"torn")
    store.delete("branch-1/3/state/d/a1-p0.image")
    with run.manager(keep=ckpt.Keep()) as m:
        restored = m.resume()
        assert restored.step == 2
        assert [lost.step for lost in restored.report.lost] == [4, 3]
        assert_same(restored.state, state_of(2))
        save_steps(m, [3])
        assert m.all_steps() == [1, 2, 3]
    # Nothing that is damaged was cleaned up.
    assert store.exists("branch-1/3/manifest.json")
    assert store.exists("branch-1/4/manifest.json")


def test_a_run_that_was_copied_from_a_file_system(tmp_path: Path) -> None:
    """Images in one piece, several attempts on one branch; it goes on in the bucket."""
    for steps in ([1, 2], [3]):
        with ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena") as m:
            m.resume()
            save_steps(m, steps)
    files, run = FileStore(tmp_path / "run"), Memory(tmp_path)
    for key, _ in files.walk(""):
        run.store().put(key, files.read(key))
    with run.manager(keep=ckpt.Keep()) as m:
        restored = m.resume()
        assert_same(restored.state, state_of(3))
        save_steps(m, [4])
        assert m.all_steps() == [1, 2, 3, 4]
    assert attempts.list_run(run.store()).damaged == ()


# --- the scenarios -------------------------------------------------------------------------------


def nothing(run: Memory) -> None:
    """A bucket without a run."""


def three_steps(run: Memory) -> None:
    run.requests(start_and_save)


def a_step_in_the_making(run: Memory) -> None:
    """Three steps, and a fourth that is complete and was not published."""
    run.requests(start_and_save)
    whole = Memory(run.tmp_path, run.objects())
    keys = whole.requests(save_one).keys
    publish = max(i for i, key in enumerate(keys, 1) if key.endswith(f"/4/{layout.MARKER}"))
    assert run.requests(save_one, publish).dead
    (remain,) = attempts.list_run(run.store()).remains
    assert (remain.step, remain.state) == (4, "making"), remain
    assert b'"published":false' in run.store().read(f"{remain.name}/{layout.MARKER}")


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[Memory], None]
    act: Act
    at_least: int = 0
    """The newest step that must be there afterwards, whenever the process died."""


SCENARIOS = {
    "a first start": Scenario(nothing, start_and_save),
    "a second start, retention": Scenario(three_steps, start_and_save, 3),
    "a rewind": Scenario(three_steps, rewind_and_save, 2),
    "a roll-forward": Scenario(a_step_in_the_making, save_one, 4),
    "a deletion": Scenario(three_steps, delete_one, 3),
}


def deaths(name: str, tmp_path: Path, every: int) -> int:
    """Die at every request in turn, or at some: each time other ones."""
    scenario = SCENARIOS[name]
    memory = Memory(tmp_path)
    scenario.prepare(memory)
    objects = memory.objects()
    total = memory.requests(scenario.act).count
    for at in range(1 + SEED % every, total + 1, every):
        for carried_out in (False, True):
            run = Memory(tmp_path, objects)
            what = f"CRASH_SEED={SEED}: {name}: request {at} of {total}, {carried_out=}"
            requests = run.requests(scenario.act, at, carried_out=carried_out)
            assert requests.dead, what
            after_death(run, scenario.at_least, what)
    return total


def after_death(run: Memory, at_least: int, what: str) -> None:
    """The next attempt finds the newest step, leaves order behind, and can go on."""
    with run.manager() as m:
        restored = m.resume()
        assert restored.step >= at_least, what
        assert not restored.report.lost, what
        if restored.step:
            assert_same(restored.state, state_of(restored.step))
        assert attempts.list_run(run.store()).remains == (), what
        save_steps(m, [restored.step + 1])
    listing = attempts.list_run(run.store())
    assert listing.counting[-1].step == restored.step + 1, what
    assert listing.damaged == (), what
    assert listing.remains == (), what
    for step in listing.steps:
        assert_same(Reader(run.store()).restore_step(step).state, state_of(step.step))
    for key in run.objects():
        branch, _, rest = key.decode().partition("/")
        if branch.startswith("branch-"):
            number = int(rest.split("/")[0])
            assert any(step.step == number for step in listing.steps), f"{what}: left: {key!r}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_death_at_a_write(name: str, tmp_path: Path) -> None:
    assert deaths(name, tmp_path, every=4) >= 5


@pytest.mark.soak
@pytest.mark.parametrize("name", SCENARIOS)
def test_death_at_every_write(name: str, tmp_path: Path) -> None:
    assert deaths(name, tmp_path, every=1) >= 5

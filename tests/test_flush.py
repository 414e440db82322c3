"""Which snapshot is flushed: all writers of a run decide alike, without asking anybody."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import image, layout
from ckpt.arena import Arena, Slot
from ckpt.errors import StoreFailed
from ckpt.flush import Holding, choose, clear, holding_name, newest_of_all
from ckpt.lineage import Reach, StepId
from ckpt.messages import Begin, Setup
from ckpt.slots import Slots
from ckpt.specs import ArraySpec, ShardSpec
from ckpt.store import FileStore
from ckpt.tiers import Shared

LINE = (Reach(3, 1, 40, None), Reach(1, 1, -1, 40))


def step(number: int) -> StepId:
    return StepId(number, 1, 3 if number > 40 else 1)


class Host:
    """One process: its arena, and what its writer would be told."""

    def __init__(self, place: Path, index: int, count: int, grace_s: float = 30.0) -> None:
        self.arena = Arena(place / f"arena-{index}", owner={"run": "tests"}, slots=3)
        self.home = FileStore(str(place / "run"))
        self.index, self.count = index, count
        tiers: dict[str, Any] = {"shared": Shared(self.home.location)}
        directory = str(self.arena.directory)
        self.setup = Setup(tiers, directory, index, count, 60.0, grace_s)
        self.begin = Begin(3, LINE)

    def fill(self, id: StepId, *, is_filled: bool = True, **other: Any) -> Slot:
        """A snapshot in a slot, which is held and locked unless it is filled."""
        meta = {
            "step": id.step,
            "branch": id.branch,
            "attempt": id.attempt,
            "process": self.index,
            "processes": self.count,
            **other,
        }
        source = np.arange(10, dtype=np.uint32) + id.step
        spec = ArraySpec("x", "uint32", (10,), (10,))
        plan = image.plan([spec], [ShardSpec(0, (0,), (10,))], meta)
        slot = self.arena.claim(plan.size_bytes)
        image.fill(plan, slot.buffer, [source])
        if is_filled:
            slot.filled()
            slot.release()
        return slot

    def choose(self) -> tuple[StepId, int] | None:
        slots = Slots(self.setup.arena)
        try:
            return choose(slots, self.begin, self.setup, self.home)
        finally:
            slots.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    found = [Host(tmp_path, index, 3) for index in range(3)]
    yield found
    for each in found:
        each.arena.close(remove=True)


def all_choose(hosts: list[Host], pauses_s: list[float] | None = None) -> list[Any]:
    """What they decide at the same time."""
    decided: list[Any] = [None] * len(hosts)

    def act(k: int) -> None:
        threading.Event().wait(0 if pauses_s is None else pauses_s[k])
        decided[k] = hosts[k].choose()

    threads = [threading.Thread(target=act, args=(k,)) for k in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return decided


def steps_of(decided: list[Any]) -> list[StepId | None]:
    return [None if each is None else each[0] for each in decided]


# --- one process ------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path, 0, 1)
    yield host
    host.arena.close(remove=True)


def test_alone_it_is_the_newest_that_counts(alone: Host) -> None:
    assert alone.choose() is None
    alone.fill(step(40))
    slot = alone.fill(step(41))
    alone.fill(StepId(50, 1, 1))  # beyond its attempt's reach
    assert alone.choose() == (step(41), slot.number)
    assert alone.home.list("") == [], "nobody else has to know"


@pytest.mark.parametrize("meta", [{"process": 1}, {"processes": 2}, {"step": "41"}, {"step": True}])
def test_what_is_not_ours_is_left_alone(meta: dict[str, Any], alone: Host) -> None:
    alone.fill(step(41), **meta)
    assert alone.choose() is None


def test_a_slot_that_is_being_filled_is_left_alone(alone: Host) -> None:
    older = alone.fill(step(41))
    slot = alone.fill(step(42), is_filled=False)
    assert alone.choose() == (step(41), older.number)
    slot.filled()
    assert alone.choose() == (step(42), slot.number)
    slot.release()


# --- several ------------------------------------------------------------------------------------


def test_all_flush_the_newest_that_all_have(hosts: list[Host]) -> None:
    for each in hosts:
        each.fill(step(41))
        each.fill(step(42))
    hosts[0].fill(step(43))
    hosts[1].fill(step(43))
    assert steps_of(all_choose(hosts)) == [step(42)] * 3


def test_without_a_common_one_there_is_none(hosts: list[Host]) -> None:
    for k, each in enumerate(hosts):
        each.fill(step(41 + k))
    assert steps_of(all_choose(hosts)) == [None] * 3


def test_who_does_not_answer_keeps_nobody_for_long(tmp_path: Path) -> None:
    host = Host(tmp_path, 0, 2, grace_s=0.4)
    host.fill(step(41))
    assert host.choose() is None
    host.arena.close(remove=True)


@pytest.mark.parametrize("seed", range(3))
def test_again_and_again_with_what_there_is_by_then(seed: int, hosts: list[Host]) -> None:
    """The second time nobody takes what was put down the first time for an answer."""
    rng = random.Random(seed)
    for number in range(41, 46):
        for each in hosts:
            each.fill(step(number))
        decided = all_choose(hosts, [rng.random() * 0.2 for _ in hosts])
        assert steps_of(decided) == [step(number)] * 3, f"{seed=}"


def test_one_that_was_told_twice_is_joined_by_the_others(hosts: list[Host]) -> None:
    for each in hosts:
        each.fill(step(41))
    hosts[0].setup = Setup(**{**vars(hosts[0].setup), "grace_s": 0.2})
    assert hosts[0].choose() is None
    assert hosts[0].choose() is None
    hosts[0].setup = Setup(**{**vars(hosts[0].setup), "grace_s": 30.0})
    for each in hosts:
        each.fill(step(42))
    assert steps_of(all_choose(hosts, [0.1, 0.0, 0.2])) == [step(42)] * 3


def test_what_is_damaged_or_of_others_is_no_answer(hosts: list[Host]) -> None:
    for each in hosts:
        each.fill(step(41))
    home = hosts[0].home
    home.put(holding_name(3, 1), b"{}")
    home.put(holding_name(3, 2), Holding(3, 2, 4, 99, (step(41),)).emit())
    home.put(holding_name(2, 1), Holding(2, 1, 3, 99, (step(41),)).emit())
    assert steps_of(all_choose(hosts)) == [step(41)] * 3


def test_a_store_that_fails_is_an_error(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreFailed("down")

    monkeypatch.setattr(hosts[0].home, "put", fail)
    with pytest.raises(StoreFailed, match="down"):
        hosts[0].choose()


# --- what is left behind ------------------------------------------------------------------------


def test_a_later_attempt_clears_what_is_older(tmp_path: Path, caplog: Any) -> None:
    home = FileStore(str(tmp_path / "run"))
    clear(home, 3)
    for owner in (1, 2, 3, 4):
        home.put(holding_name(owner, 0), Holding(owner, 0, 1, 1, ()).emit())
    home.put(f"{layout.FLUSH}/foreign.json", b"")
    clear(home, 3)
    assert [entry.name for entry in home.list(layout.FLUSH)] == [
        "a3-p0.json",
        "a4-p0.json",
        "foreign.json",
    ]
    assert not caplog.records


STEPS = st.lists(st.builds(step, st.integers(38, 44)), max_size=4)


@given(held=st.lists(STEPS, min_size=1, max_size=4))
def test_newest_of_all_by_hand(held: list[list[StepId]]) -> None:
    holdings = [Holding(3, k, len(held), 1, tuple(steps)) for k, steps in enumerate(held)]
    wanted = None
    for number in range(38, 45):
        if all(step(number) in steps for steps in held):
            wanted = step(number)
    assert newest_of_all(holdings) == wanted


@given(steps=STEPS, numbers=st.tuples(*[st.integers(0, 1 << 40)] * 4))
def test_it_comes_back_as_it_was_put(steps: list[StepId], numbers: tuple[int, ...]) -> None:
    holding = Holding(*numbers, tuple(steps))
    assert Holding.parse(holding.emit(), "here") == holding

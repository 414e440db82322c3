"""Managers, guards and commands go back to before a segment: the same examples stay away."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import answer
from segment_runs import opening, pipeline, rows, taken

import ckpt
from datapipe import Mismatch
from datapipe.integers import LIMIT

STATE = {"w": np.zeros(2)}


def test_spans_from_before_an_opening() -> None:
    one = opening()
    taken(one, 3)
    early = one.get_state()
    taken(one, 3)
    two = opening(weights=(1, 1))
    two.set_state(one.get_state())
    served = [two.plan.addresses([(at, at + 4)]) for at in range(12, 60, 4)]
    taken(two, 9)
    known = two.toward(early, two.get_state())
    assert [two.span(known, i, i + 1) for i in range(12)] == served
    assert two.position_after(known, 12) == 60
    assert _members(two.span(early, 0, 3)) == set().union(*map(_members, served[:3]))
    # What does not lie ahead, or is of another line, says nothing.
    assert two.toward(early, opening().get_state()) == early
    other = opening(weights=(7, 2))
    other.set_state(opening(weights=(1, 2)).get_state())
    other.seek(30)
    assert other.toward(early, other.get_state()) == early
    # As the iterator would go on from it.
    assert [s["first"] for s in two.toward(early, None)["segments"]] == [0, 12]
    assert pipeline(weights=(1, 1)).iterator(prefetch=0).toward(early, None) == early
    # A state of more than is known here can be counted with; one of other data cannot.
    assert one.span(two.get_state(), 0, 2) == two.span(two.get_state(), 0, 2)
    late = [(2 * LIMIT + 5, 2 * LIMIT + 9)]  # of a source that comes in later
    assert two.span(early, 0, 3, late) == two.span(early, 0, 3)
    with pytest.raises(Mismatch, match=r"plan.seed"):
        opening(seed=9).span(early, 0, 1)


def manager(place: Path) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(ckpt.Shared(place / "run"), arena=place / "arena")


class Trainer:
    """Writes down what each step was served."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.served: dict[int, set[tuple[int, int, int]]] = {}

    def train(self, m: ckpt.CheckpointManager, data: Any, steps: range) -> None:
        for step in steps:
            at = data.next_example
            held = data.plan.addresses(data.plan.span(at, 0, 1))
            batch = rows(next(data))
            self.served[step] = {
                divmod(address, LIMIT) for start, stop in held for address in range(start, stop)
            }
            assert Counter(s for s, _ in self.served[step]) == Counter(s for s, _ in batch)
            if step % 3 == 0:
                m.save(step, STATE, data=data)
        m.wait_until_finished()

    def of(self, steps: range) -> set[tuple[int, int]]:
        return set().union(*(self.served[step] for step in steps))


@pytest.mark.parametrize("steps", [range(14, 17), range(9, 15), range(17, 20), range(11, 14)])
def test_back_to_before_an_opening_and_the_same_examples_stay_away(
    tmp_path: Path, steps: range, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path)
    with manager(tmp_path) as m, opening() as data:
        m.resume(like=STATE, data=data)
        trainer.train(m, data, range(1, 13))
    changed = {"files": {"a": (20, 20, 6), "b": (11,), "c": (30,)}, "weights": (1, 1, 1)}
    with manager(tmp_path) as m, opening(**changed, batch_size=3) as data:
        assert m.resume(like=STATE, data=data).step == 12
        assert [s["first"] for s in data.get_state()["segments"]] == [0, 48]
        trainer.train(m, data, range(13, 20))  # 19 is not saved
        bad = trainer.of(steps)
        option = f"{steps.start}:{steps.stop}"
        if steps.stop <= 19:  # beyond it the command knows as much as the steps tell
            planned = answer(
                *("rewind", tmp_path / "run", "--to", 6, "--skip-steps", option),
                *("--reason", "x", "--dry-run"),
            )
            assert planned["covering"] == []
            assert _members(planned["new_skips"]["data"]) == bad
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            m.rewind(6, skip_steps=steps, reason="bad", like=STATE, data=data)
        told = [r.getMessage() for r in caplog.records if r.name == "datapipe"]
        assert len(told) == 1
        assert "a segment opens at example 24" in told[0]
        assert "what had been opened at example 48 is dropped" in told[0]
        assert "not known for certain" not in caplog.text
        assert _members(data.plan.skipped) == bad
        assert [s["first"] for s in data.get_state()["segments"]] == [0, 24]
        trainer.train(m, data, range(7, 31))
        assert not trainer.of(range(7, 31)) & bad
    with manager(tmp_path) as m, opening(**changed) as data:
        caplog.clear()
        assert m.resume(like=STATE, data=data).step == 30
        assert not [r for r in caplog.records if r.name == "datapipe"]
        assert [s["first"] for s in data.get_state()["segments"]] == [0, 24]
        assert _members(data.plan.skipped) == bad
        trainer.train(m, data, range(31, 50))
        assert not trainer.of(range(31, 50)) & bad
        whole = [each for step in range(1, 50) for each in trainer.served[step]]
        assert len({*whole}) == len(whole)
        assert not data.plan.skipped or {*whole} & bad == trainer.of(range(1, 7)) & bad


def _members(ranges: Any) -> set[tuple[int, int]]:
    return {divmod(address, LIMIT) for start, stop in ranges for address in range(start, stop)}


@pytest.mark.parametrize("weights", [(3, 1), (1, 3)])
def test_steps_of_a_trainer_that_died_before_it_saved_them(
    tmp_path: Path, weights: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows which weights it had: all is left out that they may have used."""
    trainer = Trainer(tmp_path)
    with manager(tmp_path) as m, opening() as data:
        m.resume(like=STATE, data=data)
        trainer.train(m, data, range(1, 7))
        state = data.get_state()
    died = opening(weights=weights)
    died.set_state(state)
    held = _members(died.span(died.get_state(), 1, 4))
    with manager(tmp_path) as m, opening(weights=(1, 3)) as data:
        with caplog.at_level(logging.WARNING, "ckpt"):
            m.rewind(6, skip_steps=range(8, 11), reason="bad", like=STATE, data=data)
        assert held <= _members(data.plan.skipped)
        assert "mixture of steps 8 to 10 is not known for certain" in caplog.text


def test_a_guard_goes_back_to_before_an_opening(tmp_path: Path) -> None:
    guard = ckpt.SpikeGuard(
        window=30, warm_up=10, cool_down=2, margin=8, skip_before=6, skip_after=3, consecutive=2
    )
    held: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for weights, steps in (((3, 1), 20), ((1, 2), 34)):
        with (
            manager(tmp_path) as m,
            opening(weights=weights) as data,
            ckpt.Run(m, STATE, data, guard=guard, steps=steps) as run,
        ):
            for step, batch in run:
                held.setdefault((len(run.rewinds), step), set()).update(rows(batch))
                bad = step in (23, 24) and not run.rewinds
                run.update(run.state, loss=50.0 if bad else 1 + 0.01 * (step % 7))
    assert [each.skip for each in run.rewinds] == [range(17, 26)]
    # Onset 23: steps 17 to 25, of which 17 to 20 had the old weights: 3 of each 4 from a.
    skipped = _members(data.plan.skipped)
    assert Counter(source for source, _ in skipped) == Counter({0: 4 * 3 + 7, 1: 4 * 1 + 13})
    assert len(data.get_state()["segments"]) == 2
    assert data.get_state()["segments"][1]["first"] < 20 * 4


def test_positions_are_checked_with_the_order_in_force(tmp_path: Path) -> None:
    """What is skipped lies elsewhere after an opening, and so do positions. Without a restart."""
    trainer = Trainer(tmp_path)
    with manager(tmp_path) as m, opening() as one, opening(weights=(1, 6)) as two:
        m.resume(like=STATE, data=one)
        one.skip([(10, 30)])
        trainer.train(m, one, range(1, 4))
        two.set_state(one.get_state())
        trainer.train(m, two, range(4, 7))
        next(two)
        next(two)
        with pytest.raises(ckpt.errors.Misuse, match="stands at example 34, wanted 29"):
            m.save(7, STATE, data=two)

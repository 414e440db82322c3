"""What saves cost the steps beside them: on times that are made up, so that it is known."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.step_times import _KEPT, _WAITING, Inflation, StepTimes, Stopwatch


def quiet(times: StepTimes, count: int, seconds: float = 0.008) -> None:
    for _ in range(count):
        assert times.passed(seconds) == []


def test_the_excess_over_the_median_of_the_quiet_steps_is_told_when_the_save_ends() -> None:
    times = StepTimes()
    quiet(times, 20)
    times.began(20)
    assert times.passed(0.108) == []
    assert times.passed(0.018) == []
    assert times.passed(0.008, ended=[20]) == [Inflation(20, pytest.approx(0.11), 3, 0)]
    quiet(times, 5)


def test_two_saves_at_a_time_share_what_they_cost() -> None:
    times = StepTimes()
    quiet(times, 20)
    times.began(20)
    times.passed(0.028)
    times.began(21)
    (first,) = times.passed(0.108, ended=[20])
    (second,) = times.passed(0.018, ended=[21])
    assert (first.step, first.inflation_s, first.steps) == (20, pytest.approx(0.07), 2)
    assert (second.step, second.inflation_s, second.steps) == (21, pytest.approx(0.06), 2)


@given(
    seed=st.integers(0, 10**6),
    base_s=st.floats(0.002, 5.0),
    noise=st.floats(0, 0.2),
)
def test_noise_and_compilations_do_not_hide_what_saves_cost(
    seed: int, base_s: float, noise: float
) -> None:
    rng = random.Random(seed)
    times = StepTimes()
    costs = {}
    for step in range(1, 400):
        duration_s = base_s * rng.uniform(1 - noise, 1 + noise)
        if step in (1, 2) or step % 90 == 0:
            duration_s += 40 * base_s  # compiled, or evaluated
        if step % 50 == 7:
            times.began(step)
        beside = step % 50 in (7, 8, 9)
        found = times.passed(
            duration_s + base_s * beside, ended=[step - 2] if step % 50 == 9 else []
        )
        costs |= {each.step: each for each in found}
    assert sorted(costs) == list(range(7, 400, 50))
    for step, cost in costs.items():
        assert cost.steps + cost.pauses == 3
        bound = 3 * noise * base_s * 2 + 1e-3 * base_s + 1e-5
        if cost.pauses == 0:
            assert abs(cost.inflation_s - 3 * base_s) <= bound, (seed, step, cost)


def test_a_pause_of_the_trainer_is_not_charged() -> None:
    times = StepTimes()
    quiet(times, 20)
    times.began(20)
    # Longer than a save would make a step.
    times.passed(3.0)
    assert times.passed(0.018, ended=[20]) == [Inflation(20, pytest.approx(0.01), 1, 1)]
    # As long as pauses that came without a save.
    for _ in range(2):
        times.passed(0.4)
        quiet(times, 10)
    times.began(30)
    times.passed(0.38)
    assert times.passed(0.018, ended=[30]) == [Inflation(30, pytest.approx(0.01), 1, 1)]
    # Not seen before, and not so long: that was the save.
    times.began(40)
    assert times.passed(0.18, ended=[40]) == [Inflation(40, pytest.approx(0.172), 1, 0)]


def test_steps_beside_a_save_at_the_start_wait_for_a_median() -> None:
    times = StepTimes()
    times.began(0)
    times.passed(0.020)
    times.passed(0.020)
    assert times.ended([]) == []
    times.began(2)
    assert times.passed(0.03, ended=[0]) == [Inflation(0, 0.0, 0, 0)]  # nothing is known
    (two,) = times.passed(0.02, ended=[2])
    assert two.steps == 0
    quiet(times, 5, 0.01)
    times.began(9)
    assert times.passed(0.02, ended=[9]) == [Inflation(9, pytest.approx(0.01), 1, 0)]


def test_a_save_that_never_ends_and_many_steps_keep_memory_bounded() -> None:
    times = StepTimes()
    times.began(1)
    for _ in range(1000):
        times.passed(0.01)
    assert len(times._waiting) <= _WAITING
    times.ended([1])
    assert times._waiting == []
    rng = random.Random(3)
    for _ in range(3000):
        times.passed(rng.choice([0.01, 0.011, 5.0]))
    assert len(times._quiet) == len(times._sorted) == _KEPT
    assert sorted(times._quiet) == times._sorted
    assert len(times._pauses) <= _KEPT


def test_only_a_few_lines_are_run_for_an_update() -> None:
    """Microseconds, without measuring them."""
    times = StepTimes()
    quiet(times, 500)
    times.began(1)
    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        times.passed(0.01)
    finally:
        sys.settrace(None)
    assert 0 < lines < 40


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Save:
    over = False

    def ended(self) -> bool:
        return self.over


def test_the_stopwatch_takes_laps_without_what_is_no_step() -> None:
    clock, told = Clock(), []
    watch = Stopwatch(told.append, clock)

    def lap(seconds: float) -> None:
        clock.now += seconds
        watch.lap()

    for _ in range(12):
        lap(0.01)
    save = Save()
    with watch.apart():
        clock.now += 0.5  # the copy: `blocking_s` has it
    watch.began(12, save)
    watch.began(12, save)  # the same step again is the same save
    lap(0.03)
    save.over = True
    lap(0.02)
    assert told == [Inflation(12, pytest.approx(0.03), 2, 0)]
    watch.began(14, Save())
    lap(0.015)
    watch.stop()
    assert told[1:] == [Inflation(14, pytest.approx(0.005), 1, 0)]
    lap(90.0)  # the first lap after a stop is no step
    watch.began(20, save)
    lap(0.01)
    assert told[2:] == [Inflation(20, pytest.approx(0.0), 1, 0)]


def test_the_time_apart_counts_when_an_error_ends_it() -> None:
    clock, told = Clock(), []
    watch = Stopwatch(told.append, clock)
    for _ in range(10):
        clock.now += 0.01
        watch.lap()

    def fail() -> None:
        with watch.apart():
            clock.now += 7
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    save = Save()
    save.over = True
    watch.began(1, save)
    clock.now += 0.01
    watch.lap()
    assert told == [Inflation(1, pytest.approx(0.0), 1, 0)]

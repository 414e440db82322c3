"""The guard on curves with and without real spikes; its state across restarts and rewinds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import Damaged, Misuse, NotFound
from ckpt.lineage import Decision, StepId
from ckpt.retention import Keep
from ckpt.spike import (
    GuardState,
    Rewind,
    Spike,
    SpikeGuard,
    TooManyRewinds,
    must_be_served,
    suspects,
)
from ckpt.tiers import Local, Memory, Shared, Tiers

SMALL = SpikeGuard(
    window=32, warm_up=20, cool_down=5, margin=10, skip_before=3, skip_after=8, max_rewinds=3
)


def curve(seed: int, *, noise: str, steps: int = 1500) -> np.ndarray:
    """A falling loss as it is recorded in practice: power law, learning-rate warm-up, noise."""
    rng = np.random.default_rng(seed)
    at = np.arange(1, steps + 1)
    clean = 1.8 + 6.0 * (1 + at / 15) ** -0.55 + 0.6 * np.exp(-(((at - 40) / 15) ** 2))
    if noise == "normal":
        return clean + 0.05 * rng.standard_normal(steps)
    if noise == "heavy":  # single batches far off, as with mixed sources
        return clean + 0.04 * rng.standard_t(3, steps)
    if noise == "bursts":  # one batch in a hundred is of another kind altogether
        return clean + 0.05 * rng.standard_normal(steps) + 3.0 * (rng.random(steps) < 0.01)
    if noise == "waves":  # sources that come in turns
        return clean + 0.1 * np.sin(at / 9) + 0.03 * rng.standard_normal(steps)
    if noise == "shrinking":  # the batch size was raised twice on the way
        return clean + 0.08 / (1 + at // 500) * rng.standard_normal(steps)
    raise AssertionError(noise)


def first_firing(guard: SpikeGuard, values: np.ndarray) -> Rewind | None:
    state = GuardState()
    for step, value in enumerate(values, 1):
        state, rewind = guard.observe(state, step, float(value))
        if rewind is not None:
            return rewind
    return None


@pytest.mark.parametrize("noise", ["normal", "heavy", "bursts", "waves", "shrinking"])
def test_no_false_alarm_in_thirty_thousand_quiet_updates(noise: str) -> None:
    alarms = [(seed, first_firing(SpikeGuard(), curve(seed, noise=noise))) for seed in range(20)]
    assert [(seed, fired) for seed, fired in alarms if fired is not None] == []


@pytest.mark.parametrize("noise", ["normal", "heavy", "bursts", "shrinking"])
@pytest.mark.parametrize("shape", ["jump", "ramp", "diverges", "decays"])
def test_every_real_spike_is_found_and_its_onset_is_near(noise: str, shape: str) -> None:
    for seed in range(12):
        values = curve(seed, noise=noise)
        start = 300 + 90 * seed  # the first bad step
        after = np.arange(values.size - start + 1, dtype=float)
        bump = {
            "jump": np.where(after < 30, 4.0, 0.0),
            "ramp": np.minimum(after * 0.25, 5.0),
            "diverges": 0.4 * 1.1 ** np.minimum(after, 60),
            "decays": 3.0 * np.exp(-after / 60),
        }[shape]
        values[start - 1 :] += bump
        fired = first_firing(SpikeGuard(), values)
        assert fired is not None, (seed, noise, shape)
        # What rises slowly has to climb out of the noise first; the margin is there to cover that.
        late = 16 if shape in ("ramp", "diverges") else 0
        assert -2 <= fired.onset - start <= late, (seed, noise, shape, fired)
        assert fired.skip.start <= start < fired.skip.stop


RECORDED = json.loads((Path(__file__).parent / "data/loss_curves.json").read_text())["runs"]


@pytest.mark.parametrize("run", RECORDED, ids=lambda run: f"bad from {run['first_bad']}")
@pytest.mark.parametrize("guard", [SpikeGuard(), SMALL], ids=["default", "small"])
def test_recorded_curves(run: dict, guard: SpikeGuard) -> None:
    fired = first_firing(guard, np.array(run["loss"]))
    assert (fired.onset if fired else None) == run["first_bad"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fires_at_once_even_in_warm_up(bad: float) -> None:
    state, rewind = SMALL.observe(GuardState(), 1, bad)
    assert rewind is not None
    assert rewind.onset == 1
    assert state.history[0].limit is None
    assert GuardState.from_json(json.loads(json.dumps(state.to_json(), allow_nan=False))).history[
        0
    ].value == pytest.approx(bad, nan_ok=True)


def test_the_onset_of_a_blow_up_is_its_first_suspicious_value() -> None:
    values = np.array([*([2.0, 2.1] * 20), 9.0, math.nan])
    rewind = first_firing(SMALL, values)
    assert rewind is not None
    assert (rewind.onset, rewind.spike.seen) == (41, 42)
    assert rewind.skip == range(38, 49)


def test_a_lone_outlier_is_no_spike_and_does_not_move_the_limit() -> None:
    state = GuardState()
    for step in range(1, 41):
        state, _ = SMALL.observe(state, step, 2.0 + 0.1 * (step % 2))
    before = SMALL.limit(state)
    state, rewind = SMALL.observe(state, 41, 50.0)
    assert rewind is None
    assert state.suspects == ((41, 50.0),)
    state, rewind = SMALL.observe(state, 42, 2.0)
    assert rewind is None
    assert state.suspects == ()
    assert SMALL.limit(state) == pytest.approx(before)


def test_equal_values_do_not_make_every_rise_a_spike() -> None:
    assert first_firing(SMALL, np.array([1.0] * 50 + [1.001] * 10)) is None
    assert first_firing(SMALL, np.array([1.0] * 50 + [1.2] * 3)) is not None


def test_warm_up_and_cool_down_silence_it() -> None:
    assert first_firing(SMALL, np.array([1.0] * 10 + [9.0] * 10)) is None
    state = GuardState(step=40, count=40, window=(1.0, 1.1) * 16, quiet_until=45)
    for step in range(41, 46):
        state, rewind = SMALL.observe(state, step, 9.0)
        assert rewind is None
    state = replace(state, window=(1.0, 1.1) * 16)
    fired = []
    for step in range(46, 49):
        state, rewind = SMALL.observe(state, step, 9.0)
        fired.append(rewind is not None)
    assert fired == [False, False, True]


def test_target_is_the_newest_step_far_enough_back_or_the_oldest() -> None:
    assert SMALL.target([40, 10, 20, 30], onset=41) == 30
    assert SMALL.target([40, 10, 20, 30], onset=50) == 40
    assert SMALL.target([20, 10, 11], onset=12) == 10
    with pytest.raises(NotFound, match=r"before step 10, .*found \[10, 20\]; save more often"):
        SMALL.target([20, 10], onset=10)
    with pytest.raises(NotFound, match="found none"):
        SMALL.target([], onset=12)


def test_after_a_rewind_the_window_goes_back_and_the_history_stays() -> None:
    values = [2.0 + 0.1 * (step % 3) for step in range(1, 41)] + [9.0] * 3
    state, saved = GuardState(), None
    for step, value in enumerate(values, 1):
        state, rewind = SMALL.observe(state, step, value)
        if step == 30:
            saved = state
    assert rewind is not None
    assert saved is not None
    assert SMALL.target([10, 20, 30, 40], rewind.onset) == 30
    again = SMALL.rewound(state, saved, 30)
    assert again == replace(saved, history=state.history, quiet_until=38 + 5 - 1)
    assert SMALL.rewound(state, None, 30).window == ()
    state, rewind = SMALL.observe(again, 31, 2.0)
    assert rewind is None


def test_one_rewind_too_many_raises_and_tells_all_of_them() -> None:
    state = GuardState()
    for step in (5, 10, 15):
        state, rewind = SMALL.observe(state, step, math.nan)
        assert rewind is not None
    with pytest.raises(TooManyRewinds, match="after 3 rewinds") as caught:
        SMALL.observe(state, 20, math.inf)
    assert [spike.onset for spike in caught.value.history] == [5, 10, 15, 20]
    for step in (5, 10, 15, 20):
        assert f"spike at step {step}: value" in str(caught.value)


@given(
    values=st.lists(st.floats(-5, 50, width=32), min_size=30, max_size=80),
    cut=st.integers(1, 79),
)
def test_a_restart_at_any_step_decides_the_same(values: list[float], cut: int) -> None:
    guard = replace(SMALL, max_rewinds=1000)
    straight, resumed, often = GuardState(), GuardState(), GuardState()
    for step, value in enumerate(values, 1):
        straight, one = guard.observe(straight, step, value)
        resumed, two = guard.observe(resumed, step, value)
        often, three = guard.observe(often, step, value)
        assert one == two == three
        often = reread(often)
        if step == cut:
            resumed = reread(resumed)
    assert straight == resumed == often


def reread(state: GuardState) -> GuardState:
    return GuardState.from_json(json.loads(json.dumps(state.to_json(), allow_nan=False)))


@given(
    values=st.lists(
        st.sampled_from([1.0, 1.1, 1.2, 9.0, 80.0, math.nan, math.inf]), min_size=40, max_size=120
    ),
    every=st.integers(1, 9),
)
def test_restarts_between_rewinds_decide_the_same(values: list[float], every: int) -> None:
    """A run that goes back on each firing, with the state of the step it goes back to."""
    guard = SpikeGuard(
        window=8, warm_up=4, cool_down=2, consecutive=2, margin=4, skip_before=1, skip_after=2
    )

    def play(keep: Any) -> list[Any]:
        state, saved, told = GuardState(), {0: GuardState()}, []
        for value in values:
            try:
                state, rewind = guard.observe(keep(state), state.step + 1, value)
            except TooManyRewinds as error:
                return [*told, [str(spike) for spike in error.history]]
            if rewind is not None:
                to = guard.target(saved, rewind.onset)
                saved = {step: each for step, each in saved.items() if step <= to}
                state = guard.rewound(keep(state), keep(saved[to]), to)
                told.append((str(rewind), to))
            elif state.step % every == 0:
                saved[state.step] = keep(state)
        return told

    assert play(lambda state: state) == play(reread)


def test_numbers_of_numpy_are_taken_as_they_are() -> None:
    guard = replace(SMALL, window=np.int64(16), margin=np.int32(10))
    assert type(guard.window) is int
    state = GuardState()
    for step in range(1, 40):
        state, _ = guard.observe(state, np.int64(step), np.float32(1.5))
    assert reread(state) == state


def test_any_tier_that_keeps_steps_long_enough_serves_the_guard() -> None:
    memory, local = Memory(every=1), Local("/ssd", every=2)
    near = Shared("/near", every=5, keep=Keep(last=2))

    def served(*tiers: Any) -> None:
        must_be_served(replace(SMALL, lag=2), Tiers.of(tiers))

    assert SMALL.reach == 12
    for enough in (
        Shared("/far", every=6, keep=Keep(last=3)),
        Shared("/far", every=100, keep=Keep(last=1, every=500)),
        Shared("/far"),
    ):
        served(memory, local, near, enough)
        served(enough)
    served(Local("/ssd", every=2, keep=Keep(last=7)), near)
    served(Memory(keep=Keep(last=13)), near)
    with pytest.raises(Misuse, match="goes back 12 steps") as caught:
        served(memory, local, near)
    assert "of the steps that shared saves every 5 only the last 2 are kept" in str(caught.value)
    assert "use Keep(last=4) there" in str(caught.value)
    with pytest.raises(Misuse, match=r"that local saves every 10 only the last 2 .*Keep\(last=3\)"):
        served(Local("/ssd", every=10), near)


def test_steps_saved_after_the_onset_are_suspect_on_the_branch_that_was_left() -> None:
    def spiked(*onsets: int) -> Any:
        history = tuple(Spike(onset, onset + 2, 9.0, 3.0) for onset in onsets)
        return GuardState(history=history).to_json()

    def step(number: int, branch: int, attempt: int) -> StepId:
        return StepId(number, branch, attempt)

    first = [step(n, 1, 1) for n in (10, 20, 30)] + [step(40, 1, 2)]
    second = [step(n, 3, 3) for n in (30, 40, 50)]
    last = [step(n, 5, 5) for n in (50, 60)]
    decisions = {
        1: Decision(1, "start", None, 1),
        2: Decision(2, "resume", step(30, 1, 1), 1),
        3: Decision(3, "rewind", step(20, 1, 1), 3, guard=spiked(30)),
        4: Decision(4, "rewind", step(40, 3, 3), 4, reason="by hand"),
        5: Decision(5, "rewind", step(40, 3, 3), 5, guard=spiked(30, 45)),
        7: Decision(7, "resume", step(60, 5, 5), 5, guard=spiked(30, 45)),
    }
    found = suspects(decisions, [*first, *second, *last])
    # Attempt 4 had left step 50 before the spike at 45 was seen: it is not on that lineage.
    assert {step: spike.onset for step, spike in found.items()} == {
        first[2]: 30,
        first[3]: 30,
    }
    del decisions[4]
    found = suspects(decisions, [*first, *second, *last])
    assert {step: spike.onset for step, spike in found.items()} == {
        first[2]: 30,
        first[3]: 30,
        second[2]: 45,
    }
    assert suspects({}, first) == {}
    with pytest.raises(Damaged):
        suspects({**decisions, 8: replace(decisions[5], attempt=8, guard={})}, first)


@given(st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists, max_leaves=5))
def test_a_state_that_is_none_is_damaged(value: object) -> None:
    with pytest.raises(Damaged, match="spike guard's state"):
        GuardState.from_json(value)


@pytest.mark.parametrize("field", ["step", "count", "window", "suspects", "history", "version"])
@pytest.mark.parametrize("bad", [None, -1, "x", [None], [[1]], math.nan])
def test_each_field_of_the_state_is_checked(field: str, bad: object) -> None:
    value = GuardState(step=3, count=3, window=(1.0,), suspects=((3, 2.0),)).to_json()
    with pytest.raises(Damaged):
        GuardState.from_json({**value, field: bad})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 1}, "window: wanted a whole number from 3 on, found 1"),
        ({"margin": 0, "skip_before": 0}, "margin"),
        ({"skip_before": 10}, "skip_before = 10 must be below margin = 10"),
        ({"threshold": math.nan}, "threshold: wanted a finite number"),
        ({"lag": True}, "lag"),
        ({"window": 12.0}, "window: wanted a whole number from 3 on, found float 12.0"),
        ({"threshold": True}, "threshold: wanted a finite number >= 0, found True"),
        ({"min_rise": "0.1"}, "min_rise: wanted a finite number >= 0, found str '0.1'"),
        ({"max_rewinds": -1}, "max_rewinds"),
    ],
)
def test_lengths_that_contradict_each_other_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        replace(SMALL, **wrong)


def test_steps_must_grow() -> None:
    state, _ = SMALL.observe(GuardState(), 5, 1.0)
    with pytest.raises(Misuse, match="seen step 5 already, then came step 5"):
        SMALL.observe(state, 5, 1.0)

"""The guard on recorded curves: real spikes are found soon, quiet runs are left alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from ckpt.spike import GuardState, Rewind, SpikeGuard

CURVES = Path(__file__).parent / "data/loss_curves"
LOSS, NORM = 0, 1
SOON = 8
"""A spike is seen within so many updates after its onset, but where it builds up."""
SLOW = {"diverges_slowly": 65}


@dataclass(frozen=True)
class Curve:
    name: str
    onset: int | None
    values: tuple[tuple[float, float], ...]


@cache
def curves() -> tuple[Curve, ...]:
    found = []
    for path in sorted(CURVES.glob("*.csv")):
        lines = path.read_text().splitlines()
        onset = lines[1].removeprefix("# onset: ")
        rows = tuple(tuple(map(float, line.split(","))) for line in lines[3:])
        found.append(Curve(path.stem, None if onset == "none" else int(onset), rows))  # type: ignore[arg-type]
    return tuple(found)


SPIKING = [curve for curve in curves() if curve.onset is not None]
QUIET = [curve for curve in curves() if curve.onset is None]


def firings(guard: SpikeGuard, curve: Curve, column: int, upto: int | None = None) -> list[Rewind]:
    """All firings of a guard whose run does not rewind, but is silent as if it had."""
    guard = replace(guard, max_rewinds=10**6)
    state, found = GuardState(), []
    for step, row in enumerate(curve.values[:upto], 1):
        state, rewind = guard.observe(state, step, row[column])
        if rewind is not None:
            found.append(rewind)
            state = replace(state, quiet_until=step + guard.cool_down)
    return found


def test_there_are_enough_of_both_kinds() -> None:
    assert len(SPIKING) >= 10
    assert len(QUIET) >= 10
    assert sum(path.stat().st_size for path in CURVES.iterdir()) < 200 * 1024


@pytest.mark.parametrize("curve", SPIKING, ids=lambda curve: curve.name)
@pytest.mark.parametrize("guard", [SpikeGuard(), SpikeGuard(window=64)], ids=["default", "short"])
def test_a_real_spike_is_found_soon_and_nothing_before_it(curve: Curve, guard: SpikeGuard) -> None:
    assert curve.onset is not None
    fired = firings(guard, curve, LOSS)
    assert fired, "missed"
    first = fired[0].spike
    late = SLOW.get(curve.name, SOON)
    print(f"{curve.name}: onset {curve.onset}, told {first.onset}, seen {first.seen}")
    assert curve.onset <= first.onset <= first.seen <= curve.onset + late
    assert first.onset - guard.margin < curve.onset
    # What is skipped begins at the first bad batch or before it, and goes beyond the last.
    assert curve.name in SLOW or fired[0].skip.start <= curve.onset < fired[0].skip.stop


@pytest.mark.parametrize(
    "guard",
    [SpikeGuard(), SpikeGuard(window=256), SpikeGuard(window=64), SpikeGuard(consecutive=2)],
    ids=["default", "long", "short", "two in a row"],
)
def test_quiet_curves_raise_no_alarm(guard: SpikeGuard) -> None:
    alarms = {curve.name: len(firings(guard, curve, LOSS)) for curve in QUIET}
    updates = sum(len(curve.values) for curve in QUIET)
    print(f"{sum(alarms.values())} false alarms in {updates} updates of {len(QUIET)} runs")
    # A shorter window than the default does not take the bend of a fast drop for noise.
    allowed = {"plateau_and_drop"} if guard.window < SpikeGuard().window else set()
    assert {name for name, count in alarms.items() if count} <= allowed
    assert sum(alarms.values()) <= len(allowed)


def test_before_a_spike_the_curves_are_quiet_too() -> None:
    for curve in SPIKING:
        assert firings(SpikeGuard(), curve, LOSS, upto=(curve.onset or 0) - 1) == [], curve.name


def test_a_more_nervous_guard_does_raise_false_alarms() -> None:
    """The curves are such that the defaults matter."""
    nervous = SpikeGuard(threshold=4.0, consecutive=1, min_rise=0.0, cool_down=0)
    alarms = sum(len(firings(nervous, curve, LOSS)) for curve in QUIET)
    print(f"{alarms} false alarms of the nervous guard")
    assert alarms > 20


def test_any_metric_will_do_as_the_norm_of_the_gradient() -> None:
    guard = SpikeGuard()
    alarms = {curve.name: len(firings(guard, curve, NORM)) for curve in QUIET}
    print(f"{sum(alarms.values())} false alarms on the norm, {alarms}")
    assert sum(alarms.values()) <= 1
    seen = {
        curve.name: fired[0].onset - curve.onset
        for curve in SPIKING
        if curve.onset is not None and (fired := firings(guard, curve, NORM))
    }
    print(f"seen by the norm, updates after the onset: {seen}")
    # Not every bad batch has a large gradient; those that damage the weights do.
    for name in ("by_itself", "bit_flip", "weights_scaled", "noise_batches"):
        assert 0 <= seen[name] <= SOON, name


@pytest.mark.parametrize("curve", SPIKING, ids=lambda curve: curve.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_where_the_spike_is_not_finite_it_fires_at_once(curve: Curve, bad: float) -> None:
    """As where the numbers of the run have no room for the spike."""
    assert curve.onset is not None
    values = list(curve.values)
    values[curve.onset - 1] = (bad, bad)
    fired = firings(SpikeGuard(), replace(curve, values=tuple(values)), LOSS)
    assert fired[0].spike.seen == curve.onset

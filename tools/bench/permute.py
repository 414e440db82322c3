"""How fast orders are: ours and Grain's in blocks, and Grain's own function, one index a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from grain.experimental import index_shuffle
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from datapipe.order.grain_order import GrainOrder
from datapipe.order.permute import Order, Permutation
from formats.errors import Misuse
from tools.bench.asking import WrongValuesError
from tools.bench.spreads import Spread
from tools.bench.table import closing, environment

SIZES: Final = (10**8, 10**9, 2**28 + 1, 2**40 + 1)
BLOCK: Final = 65_536
FORWARD, INVERSE, CPU, GRAIN_ORDER, GRAIN = (
    "forward",
    "inverse",
    "forward, CPU time",
    "grain order",
    "grain, index by index",
)
_SEED: Final = 42
_CALLS: Final = 4096  # of Grain's function for one rate: it takes one index each

_Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Result:
    """Indices a second at one n, for each side one figure a round, rounds in the same order.

    `GRAIN_ORDER` is missing where Grain's order is no bijection.
    """

    n: int
    rates: dict[str, tuple[float, ...]]

    def ratio(self) -> Spread:
        """Of our forward rate to that of Grain's function."""
        return Spread.of_ratios(self.rates[FORWARD], self.rates[GRAIN])

    def to_json(self) -> dict[str, Any]:
        rates = {side: Spread.of(rates).to_json() for side, rates in self.rates.items()}
        return {"n": self.n, "indices_per_s": rates, "ratio": self.ratio().to_json()}


def measure(n: int, rounds: int) -> Result:
    """Each round takes the next block of positions, from the middle of the epoch on; by wall time.

    Raises:
      WrongValuesError: an inverse does not lead back, or our Grain order is not Grain's.
    """
    ours = Permutation(n, seed=_SEED)
    theirs = _grain_order(n)
    rates: dict[str, list[float]] = {}
    for round_ in range(-1, rounds):  # the first makes keys and warms caches: not counted
        positions = (np.arange(BLOCK) + n // 2 + round_ * BLOCK) % n
        found = dict(_round(ours, theirs, positions))
        if round_ >= 0:
            for side, rate in found.items():
                rates.setdefault(side, []).append(rate)
    return Result(n, {side: tuple(each) for side, each in rates.items()})


def _round(
    ours: Permutation, theirs: Order | None, positions: _Indices
) -> Sequence[tuple[str, float]]:
    cpu = time.thread_time()
    records, forward = _timed(ours, positions)
    cpu = time.thread_time() - cpu
    back, inverse = _timed(ours.inverse, records)
    if not np.array_equal(back, positions):
        raise WrongValuesError(f"n={ours.n}: the inverse does not lead back (seed {_SEED})")
    some = positions[:_CALLS]
    of_grain, grain = _timed(lambda positions: _one_by_one(ours.n, positions), some)
    found = [
        (FORWARD, positions.size / forward),
        (INVERSE, positions.size / inverse),
        (CPU, positions.size / cpu),
        (GRAIN, some.size / grain),
    ]
    if theirs is not None:
        order, taken = _timed(theirs, positions)
        if not np.array_equal(order[:_CALLS], of_grain):
            raise WrongValuesError(f"n={ours.n}: another order than Grain's (seed {_SEED})")
        found.append((GRAIN_ORDER, positions.size / taken))
    return found


def _timed(order: Callable[[_Indices], _Indices], indices: _Indices) -> tuple[_Indices, float]:
    begun = time.perf_counter()
    images = order(indices)
    return images, time.perf_counter() - begun


def _one_by_one(n: int, positions: _Indices) -> _Indices:
    given = positions.tolist()
    return np.array([index_shuffle(each, n - 1, _SEED, 4) for each in given], np.int64)


def _grain_order(n: int) -> Order | None:
    try:
        return GrainOrder(n, seed=_SEED)
    except Misuse:
        return None


def to_json(results: Sequence[Result]) -> dict[str, Any]:
    """All results with what they depend on."""
    return {**environment(), "block": BLOCK, "sizes": [result.to_json() for result in results]}


def show(results: Sequence[Result], console: Console) -> None:
    """Print one table."""
    rounds = len(results[0].rates[FORWARD])
    console.print(
        f"[bold]permute[/]: M indices/s in blocks of {BLOCK:,}; medians (least to greatest) of "
        f"{rounds} blocks",
        highlight=False,
    )
    sides = (FORWARD, INVERSE, CPU, GRAIN_ORDER, GRAIN)
    table = Table()
    for heading in ("n", *sides, f"{FORWARD} / {GRAIN}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        cells = [_millions(result.rates.get(side)) for side in sides]
        table.add_row(f"{result.n:,}", *cells, f"{result.ratio().median:.1f}")
    console.print(table)
    worst = min(results, key=lambda result: Spread.of(result.rates[FORWARD]).median)
    console.print(
        f"the worst: {Spread.of(worst.rates[FORWARD]).median / 1e6:.1f} M/s at n = {worst.n:,}",
        highlight=False,
    )
    closing(console)


def _millions(rates: Sequence[float] | None) -> str:
    if rates is None:
        return "no bijection"
    spread = Spread.of(rates)
    figures = (spread.median / 1e6, spread.least / 1e6, spread.greatest / 1e6)
    return "{:.3g} ({:.3g} to {:.3g})".format(*figures)

"""Several sources in one sequence: who is next, in closed form.

A mixture repeats one block of at most 4,096 examples. Each source has an exact number of them, and
they are spread over the block as evenly as they go: the k-th of c examples of a source belongs at
(k + 1/2) / c of it. So after any number of examples every source has had its share, give or take
one, and where a far-away example comes from costs what a near one costs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from formats.errors import Misuse

BLOCK: Final = 4096
_EXACT: Final = 1e-9
_FINE: Final = 1 << 32  # places that differ do so by 1/4096^2 at least


@dataclass(frozen=True)
class Mixture:
    """How many of each block's examples come from each source.

    Args:
      counts: by source, from 0 on, with a sum from 1 to 4,096.

    Raises:
      Misuse: they are others.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        whole = all(isinstance(c, int) and not isinstance(c, bool) and c >= 0 for c in self.counts)
        if not whole or not 1 <= sum(self.counts) <= BLOCK:
            raise Misuse(
                f"a mixture wants counts from 0 on with a sum from 1 to {BLOCK}, "
                f"found {self.counts}"
            )

    @staticmethod
    def of(weights: Sequence[float]) -> Mixture:
        """The mixture nearest to `weights`, of any scale.

        They are met exactly where a block can hold them (3:1, 0.7:0.2:0.1, ...), and to 1/4096
        otherwise; a source with a weight above 0 gets one example of a block at least.

        Raises:
          Misuse: a weight is no number from 0 on, all are 0, or there are more than 1,000.
        """
        weights = [_weight(each) for each in weights]
        total = sum(weights)  # endless where it is too much for a float
        if not 0 < total < math.inf or len(weights) > 1000:
            raise Misuse(
                f"wanted up to 1000 weights with a sum above 0 and below 1.8e308, found "
                f"{len(weights)}: {weights[:8]}"
            )
        total = math.fsum(weights)
        # What is not 0 stays so, be it ever so little.
        shares = [weight and max(weight / total, sys.float_info.min) for weight in weights]
        for size in range(1, BLOCK + 1):
            counts = [round(share * size) for share in shares]
            near = (
                abs(c - s * size) <= _EXACT * size and (c > 0) == (s > 0)
                for c, s in zip(counts, shares, strict=True)
            )
            if sum(counts) == size and all(near):
                return _in_lowest_terms(counts)
        return _in_lowest_terms(_apportioned(shares))

    def raised(self, weights: Sequence[float]) -> list[tuple[int, float, float]]:
        """The sources that get more than twice what `weights` ask for: number, wanted, got.

        Shares of all examples, 0 to 1. It takes a weight for which one example of a block is far
        too many.
        """
        total = math.fsum(weights)
        pairs = zip(weights, self.counts, strict=True)
        shares = [(n, weight / total, count / self.size) for n, (weight, count) in enumerate(pairs)]
        return [each for each in shares if each[2] > 2 * each[1]]

    @property
    def size(self) -> int:
        """Examples in a block."""
        return sum(self.counts)

    def draw(self, examples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and ordinal of each example, counted from 0; int64, same shape."""
        block, at = np.divmod(examples, self.size)
        sources = self._sources[at]
        return sources, block * self._counts[sources] + self._ordinals[at]

    def ordinals(self, example: int) -> tuple[int, ...]:
        """By source: how many examples before this one come from it."""
        block, at = divmod(example, self.size)
        inside = np.bincount(self._sources[:at], minlength=len(self.counts)).tolist()
        return tuple(block * c + i for c, i in zip(self.counts, inside, strict=True))

    def example(self, source: int, ordinal: int) -> int | None:
        """The example that is this ordinal of a source; None where it is never drawn."""
        count = self.counts[source]
        if count == 0:
            return None
        block, at = divmod(ordinal, count)
        return block * self.size + int(self._places[source][at])

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return np.array(self.counts, np.int64)

    @cached_property
    def _sources(self) -> NDArray[np.int64]:
        """Of each example of a block."""
        sources = np.repeat(np.arange(len(self.counts)), self._counts)
        ordinals = np.concatenate([np.arange(count) for count in self.counts])
        # Whole numbers: floats would decide ties by rounding.
        place = (2 * ordinals + 1) * _FINE // self._counts[sources]
        return sources[np.lexsort((sources, place))].astype(np.int64)

    @cached_property
    def _places(self) -> list[NDArray[np.int64]]:
        """Of each source, where its examples stand in a block."""
        return [np.flatnonzero(self._sources == source) for source in range(len(self.counts))]

    @cached_property
    def _ordinals(self) -> NDArray[np.int64]:
        ordinals = np.empty(self.size, np.int64)
        for places in self._places:
            ordinals[places] = np.arange(len(places))
        return ordinals


def _weight(given: Any) -> float:
    is_number = isinstance(given, Real) and given is not True and given is not False
    try:
        weight = float(given) if is_number else -1.0
    except OverflowError:
        weight = math.inf
    if not 0 <= weight < math.inf:
        raise Misuse(f"a weight must be a number from 0 on, found {given!r:.40}")
    return weight


def _apportioned(shares: Sequence[float]) -> list[int]:
    """Whole numbers with the sum `BLOCK`, by largest remainder; none is 0 whose share is not."""
    ideal = [share * BLOCK for share in shares]
    counts = [max(int(x), 1 if x > 0 else 0) for x in ideal]
    while sum(counts) > BLOCK:
        above = [c - x if c > 1 else -BLOCK for c, x in zip(counts, ideal, strict=True)]
        counts[above.index(max(above))] -= 1
    for s in sorted(range(len(counts)), key=lambda s: (counts[s] - ideal[s], s)):
        if sum(counts) == BLOCK:
            break
        if ideal[s] > 0:
            counts[s] += 1
    return counts


def _in_lowest_terms(counts: Sequence[int]) -> Mixture:
    divisor = math.gcd(*counts)
    return Mixture(tuple(count // divisor for count in counts))

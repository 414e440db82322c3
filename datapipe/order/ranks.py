"""Examples by rank: an example's *rank* is how many before it are not left out.

Of one source that is arithmetic. Of several the ranks of their ordinals add up, and the example of
a rank is searched for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from datapipe.order.examples import Examples
from datapipe.order.skips import Excluded

_SPARSE: Final = 4  # examples looked at for each one that is served


@dataclass(frozen=True)
class Ranks:
    """The examples of a run that are not left out.

    Args:
      order: all examples.
      excluded: by source, which of its ordinals are left out.
    """

    order: Examples
    excluded: tuple[Excluded, ...]

    def rank(self, example: int) -> int:
        """How many examples before this one are not left out."""
        if self._is_single:
            return self.excluded[0].rank(example)
        ordinals = self.order.ordinals(example)
        return sum(
            each.rank(ordinal) for each, ordinal in zip(self.excluded, ordinals, strict=True)
        )

    def rank_floor(self, example: int) -> int:
        """A lower bound of `rank`; see `Excluded.rank_floor`."""
        ordinals = self.order.ordinals(example)
        return sum(
            each.rank_floor(ordinal) for each, ordinal in zip(self.excluded, ordinals, strict=True)
        )

    def select(self, rank: int) -> int:
        """The example that has a rank; there must be one."""
        if self._is_single:
            return int(self.excluded[0].select(np.array([rank], np.int64))[0])
        # Up to and with the example there are rank + 1. As each example counts for one at most,
        # what is missing at a place, or too much there, bounds the way to go from it.
        low, high, stride = rank, self.order.end - 1, 0
        while low < high:
            probe = min(low + stride, high)
            missing = rank + 1 - self.rank(probe + 1)
            if missing <= 0:
                high = probe + missing
                break
            low, stride = probe + missing, 2 * stride + 1
        while low < high:
            middle = (low + high) // 2
            missing = rank + 1 - self.rank(middle + 1)
            if missing <= 0:
                high = middle + missing
            else:
                low = middle + missing
        return low

    def examples(self, first_rank: int, stop_rank: int) -> NDArray[np.int64]:
        """The examples of these ranks, ascending; int64[stop_rank - first_rank]."""
        if self._is_single:
            return self.excluded[0].select(np.arange(first_rank, stop_rank, dtype=np.int64))
        ranges = self.ranges(first_rank, stop_rank)
        rows = [np.arange(start, stop, dtype=np.int64) for start, stop in ranges]
        return np.concatenate([np.zeros(0, np.int64), *rows])

    def ranges(self, first_rank: int, stop_rank: int) -> list[tuple[int, int]]:
        """The examples of these ranks as ascending ranges; the gaps are left out."""
        if first_rank == stop_rank:
            return []
        start, stop = self.select(first_rank), self.select(stop_rank - 1) + 1
        if self._is_single:
            gaps = self.excluded[0].between(start, stop)
            edges = [start, *itertools.chain.from_iterable(gaps), stop]
            return list(zip(edges[::2], edges[1::2], strict=True))
        count = stop_rank - first_rank
        if stop - start == count:
            return [(start, stop)]
        if stop - start > _SPARSE * count + 1024:  # too far apart to look at each one
            half = (first_rank + stop_rank) // 2
            if half > first_rank:
                return [*self.ranges(first_rank, half), *self.ranges(half, stop_rank)]
        return self._looked_at(start, stop)

    def _looked_at(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What is served of [start, stop), as ranges, by looking at each example."""
        examples = np.arange(start, stop, dtype=np.int64)
        sources, ordinals = self.order.draw(examples)
        left_out = np.empty(examples.shape, bool)
        for source, each in enumerate(self.excluded):
            there = sources == source
            left_out[there] = each.mask(ordinals[there])
        served = np.concatenate([[False], ~left_out, [False]])
        edges = start + np.flatnonzero(served[1:] != served[:-1])
        return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

    @property
    def _is_single(self) -> bool:
        return self.order.source_count == 1

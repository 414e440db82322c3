"""Sets of examples that are never served, and arithmetic on what is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from datapipe.integers import LIMIT, integer
from formats.errors import Misuse


class Excluded(Protocol):
    """A set of numbers in [0, 2^62) that are left out, and arithmetic on those that are left."""

    def rank(self, number: int) -> int:
        """How many numbers in [0, number) are left."""
        ...

    def rank_floor(self, number: int) -> int:
        """A lower bound of `rank`, for which nothing has to be worked out first."""
        ...

    def select(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers that have these ranks: the inverse of `rank`; int64, same shape."""
        ...

    def mask(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each, whether it is left out; same shape."""
        ...

    def between(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The numbers left out of [start, stop), as ranges: ascending, disjoint, not adjacent.

        `start` and `stop - 1` must not be among them.
        """
        ...


@dataclass(frozen=True)
class Skips:
    """A set of numbers as ascending, disjoint, non-adjacent half-open ranges; an `Excluded`.

    Build it with `Skips.of`, which takes ranges in any order and unites them.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(ranges: Iterable[tuple[int, int]]) -> Skips:
        """The union of `ranges`; empty ranges are left out.

        Raises:
          Misuse: a bound is no integer in [0, 2^62], or a range ends before it starts.
        """
        return Skips().union(ranges)

    def union(self, ranges: Iterable[tuple[int, int]]) -> Skips:
        """These and `ranges` together; see `of`."""
        pairs = [pair for pair in map(checked_range, listed(ranges)) if pair[0] < pair[1]]
        merged: list[tuple[int, int]] = []
        for start, stop in sorted([*self.ranges, *pairs]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return Skips(tuple(merged))

    def rank(self, number: int) -> int:
        """See `Excluded.rank`."""
        if not self.ranges:
            return number
        index = int(np.searchsorted(self._starts, number, side="right"))
        if index == 0:
            return number
        start, stop = self.ranges[index - 1]
        return number - int(self._before[index - 1]) - (min(stop, number) - start)

    def rank_floor(self, number: int) -> int:
        """See `Excluded.rank_floor`: the rank itself."""
        return self.rank(number)

    def select(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Excluded.select`."""
        if not self.ranges:
            return ranks
        index = np.searchsorted(self._start_ranks, ranks, side="right")
        return ranks + self._before[index]

    def mask(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Excluded.mask`."""
        index = np.searchsorted(self._starts, numbers, side="right")
        return numbers < self._stops_from_nothing[index]

    def between(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """See `Excluded.between`."""
        first, last = np.searchsorted(self._starts, [start, stop], side="left")
        return self.ranges[first:last]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.array([start for start, _ in self.ranges], np.int64)

    @cached_property
    def _stops_from_nothing(self) -> NDArray[np.int64]:
        """[i]: where the last of the first i ranges ends; 0 if i is 0."""
        return np.array([0, *(stop for _, stop in self.ranges)], np.int64)

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """[i]: how many numbers the first i ranges hold."""
        lengths = np.array([stop - start for start, stop in self.ranges], np.int64)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])

    @cached_property
    def _start_ranks(self) -> NDArray[np.int64]:
        return self._starts - self._before[:-1]


def listed(ranges: Iterable[Any]) -> list[Any]:
    """The ranges as a list, each unchecked. Raises Misuse: it is no iterable of ranges."""
    try:
        found = iter(ranges)
    except TypeError:
        found = None
    if found is None or isinstance(ranges, str | bytes | Mapping):
        raise Misuse(
            f"ranges are a list of pairs (start, stop), such as [(8, 12)], found {ranges!r:.80}"
        )
    return list(found)


def checked_range(given: tuple[int, int]) -> tuple[int, int]:
    """Start and stop of a range of examples, 0 to 2^62. Raises Misuse: it is no range."""
    try:
        start, stop = given
    except (TypeError, ValueError) as error:
        raise Misuse(f"a range is a pair (start, stop) of examples, found {given!r:.80}") from error
    start = integer("start of a range", start, 0, LIMIT)
    return start, integer("stop of a range", stop, start, LIMIT)

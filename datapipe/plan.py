"""Which record stands where: the whole run as one sequence of examples, computed, never stored.

Example `e` of a source of n records is position `e % n` of epoch `e // n`, and the record at
that position is given by the permutation of the epoch (or is the position itself). Examples are
counted through all epochs, and independently of the batch size. A *skip* is a range of examples
that no batch may hold. A batch is the next `batch_size` examples that are not skipped: it may run
over the border of two epochs, so that every record is served once per epoch whatever the sizes.
Only the very end of the last epoch may leave a short batch: `remainder` says what becomes of it.

With `rank` of an example = how many examples before it are not skipped, batch b is the ranks
[b * batch_size, (b + 1) * batch_size). All questions are arithmetic on ranks: a far-away batch
costs what a near one costs, and no data is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe.permute import LIMIT, Permutation
from formats.errors import Misuse

VERSION: Final = 1  # of the order of records: saved in states

Shuffle = Literal["global", "none"]
Remainder = Literal["drop", "keep"]


@dataclass(frozen=True)
class Skips:
    """A set of examples as sorted, disjoint, non-adjacent half-open ranges.

    Build it with `Skips.of`, which takes ranges in any order and unites them.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(ranges: Iterable[tuple[int, int]]) -> Skips:
        """The union of `ranges`; empty ranges are left out.

        Raises:
          Misuse: a bound is no integer in [0, 2^62], or a range ends before it starts.
        """
        pairs: list[tuple[int, int]] = []
        for given in ranges:
            start, stop = _range(given)
            if start < stop:
                pairs.append((start, stop))
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(pairs):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return Skips(tuple(merged))

    def union(self, ranges: Iterable[tuple[int, int]]) -> Skips:
        """These and `ranges` together."""
        return Skips.of([*self.ranges, *ranges])

    def rank(self, example: int) -> int:
        """How many examples in [0, example) are not skipped."""
        index = int(np.searchsorted(self._starts, example, side="right"))
        if index == 0:
            return example
        start, stop = self.ranges[index - 1]
        return example - int(self._before[index - 1]) - (min(stop, example) - start)

    def at(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The examples that have these ranks: the inverse of `rank`; int64, same shape."""
        index = np.searchsorted(self._start_ranks, ranks, side="right")
        return ranks + self._before[index]

    def holds(self, example: int) -> bool:
        """Is this example skipped?"""
        return self.rank(example + 1) == self.rank(example)

    def between(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """The ranges that start in [start, stop)."""
        first, last = np.searchsorted(self._starts, [start, stop], side="left")
        return self.ranges[first:last]

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        return np.array([start for start, _ in self.ranges], np.int64)

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """[i]: how many examples the first i ranges hold."""
        lengths = np.array([stop - start for start, stop in self.ranges], np.int64)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])

    @cached_property
    def _start_ranks(self) -> NDArray[np.int64]:
        return self._starts - self._before[:-1]


class Located(NamedTuple):
    """Where examples come from; both are int64 and have the shape of the examples."""

    epochs: NDArray[np.int64]
    records: NDArray[np.int64]


class BatchPlan(NamedTuple):
    """What one batch holds."""

    batch: int  # counted from example 0 under the skips of the plan
    examples: tuple[tuple[int, int], ...]  # half-open ranges
    epochs: tuple[int, int]  # half-open: one epoch, or two at a border
    records: NDArray[np.int64]  # in the order of the rows


@dataclass(frozen=True)
class Plan:
    """The order in which a source is served.

    Args:
      record_count: records of the source, at least 1.
      batch_size: examples per batch, over all processes.
      seed: of the shuffle, 0 to 2^64 - 1.
      shuffle: "global" (every epoch another permutation of all records) or "none".
      epochs: how often each record is served; None: without end.
      remainder: what becomes of a short batch at the end of the last epoch: "drop" or "keep".
      skips: examples that are not served.

    Raises:
      Misuse: an argument is out of range, or the plan would have more than 2^62 examples.
    """

    record_count: int
    batch_size: int
    seed: int
    shuffle: Shuffle = "global"
    epochs: int | None = None
    remainder: Remainder = "drop"
    skips: Skips = field(default_factory=Skips)

    def __post_init__(self) -> None:
        self._make_int("record_count", 1, LIMIT)
        self._make_int("batch_size", 1, LIMIT)
        self._make_int("seed", 0, (1 << 64) - 1)
        if self.shuffle not in ("global", "none"):
            raise Misuse(f"shuffle must be 'global' or 'none', found {self.shuffle!r}")
        if self.remainder not in ("drop", "keep"):
            raise Misuse(f"remainder must be 'drop' or 'keep', found {self.remainder!r}")
        if self.epochs is not None:
            self._make_int("epochs", 1, LIMIT // self.record_count)

    def _make_int(self, name: str, first: int, last: int) -> None:
        # A NumPy integer would overflow in the arithmetic below.
        object.__setattr__(self, name, _integer(name, getattr(self, name), first, last))

    # -- the whole plan ------------------------------------------------------------------------

    @property
    def batch_count(self) -> int | None:
        """Batches from example 0 to the end; None: without end."""
        return self.batches_left(0)

    @property
    def end(self) -> int:
        """One past the last example that can be named: the end, or 2^62 without one."""
        return LIMIT if self.epochs is None else self.epochs * self.record_count

    def skipping(self, ranges: Iterable[tuple[int, int]]) -> Plan:
        """This plan with more examples skipped: half-open ranges, united with those there."""
        return replace(self, skips=self.skips.union(ranges))

    def replacing(self, skips: Skips) -> Plan:
        """This plan with other skips in place of its own."""
        return replace(self, skips=skips)

    # -- forwards ------------------------------------------------------------------------------

    def batches_left(self, next_example: int) -> int | None:
        """How many batches follow a position; None: without end."""
        if self.epochs is None:
            self._position(next_example)
            return None
        return self._batches_after(next_example)

    def examples(self, next_example: int, batches: int = 1) -> NDArray[np.int64]:
        """The examples of the next `batches` batches, in order, as int64[k].

        k is batches * batch_size, or less at the end of the last epoch.
        """
        return self.skips.at(np.arange(*self._ranks(next_example, 0, batches), dtype=np.int64))

    def advance(self, next_example: int, batches: int = 1) -> int:
        """The position after that many batches: one past the last example they hold.

        At the end of the last epoch it stays behind the last batch.
        """
        first, stop = self._ranks(next_example, 0, batches)
        return next_example if first == stop else self._example(stop - 1) + 1

    def locate(self, examples: NDArray[np.int64]) -> Located:
        """Epoch and record id of each example; `examples` is int64[k], ascending."""
        epochs, positions = np.divmod(examples, np.int64(self.record_count))
        if self.shuffle == "none":
            return Located(epochs, positions)
        records = np.empty_like(positions)
        bounds = [0, *(np.flatnonzero(np.diff(epochs)) + 1).tolist(), epochs.size]
        for start, stop in itertools.pairwise(bounds):
            if start < stop:
                permutation = self._permutation(int(epochs[start]))
                records[start:stop] = permutation(positions[start:stop])
        return Located(epochs, records)

    def records(self, batches: int | range) -> NDArray[np.int64]:
        """Record ids of a batch, or of a range of batches one after another, as int64[k].

        Batches are counted from example 0 under the skips of this plan. Batches beyond the end
        hold nothing.
        """
        first, stop = _batch_range(batches)
        ranks = np.arange(*self._ranks(0, first, stop), dtype=np.int64)
        return self.locate(self.skips.at(ranks)).records

    def span(self, next_example: int, first: int, stop: int) -> list[tuple[int, int]]:
        """The examples held by batches first..stop-1, counted from a position.

        As half-open ranges, sorted, skipped examples left out. To skip those batches is to skip
        these ranges.
        """
        _integer("first", first, 0, LIMIT)
        _integer("stop", stop, first, LIMIT)
        return self._cut(*self._ranks(next_example, first, stop))

    def describe(self, batch: int, count: int = 1) -> tuple[BatchPlan, ...]:
        """What `count` batches from `batch` on hold, without reading data; fewer at the end."""
        _integer("batch", batch, 0, LIMIT)
        _integer("count", count, 0, LIMIT)
        found: list[BatchPlan] = []
        for index in range(batch, batch + count):
            first, stop = self._ranks(0, index, index + 1)
            if first == stop:
                break
            located = self.locate(self.skips.at(np.arange(first, stop, dtype=np.int64)))
            epochs = (int(located.epochs[0]), int(located.epochs[-1]) + 1)
            ranges = tuple(self._cut(first, stop))
            found.append(BatchPlan(index, ranges, epochs, located.records))
        return tuple(found)

    # -- backwards -----------------------------------------------------------------------------

    def batches(self, record: int, *, epochs: range | None = None) -> tuple[int, ...]:
        """The batches that hold a record, ascending, counted as by `records`.

        Args:
          record: record id.
          epochs: the epochs to look at; by default all of them.

        Raises:
          Misuse: no such record; or the plan has no end and `epochs` is not given.
        """
        _integer("record", record, 0, self.record_count - 1)
        if epochs is None:
            if self.epochs is None:
                raise Misuse("the plan has no end: say which epochs, such as epochs=range(3)")
            epochs = range(self.epochs)
        stop = self.end // self.record_count
        whole = self._batches_after(0)
        found = set()
        for epoch in epochs:
            if not 0 <= epoch < stop:
                continue
            example = epoch * self.record_count + self._position_in_epoch(epoch, record)
            batch = self.skips.rank(example) // self.batch_size
            if not self.skips.holds(example) and batch < whole:
                found.add(batch)
        return tuple(sorted(found))

    # -- arithmetic ----------------------------------------------------------------------------

    def _batches_after(self, next_example: int) -> int:
        left = self.skips.rank(self.end) - self.skips.rank(self._position(next_example))
        if self.remainder == "keep":
            return -(-left // self.batch_size)
        return left // self.batch_size

    def _ranks(self, next_example: int, first: int, stop: int) -> tuple[int, int]:
        """The ranks of batches first..stop-1 after a position, cut at the end of the plan."""
        whole = self._batches_after(next_example)
        base = self.skips.rank(next_example)
        first, stop = min(first, whole), min(stop, whole)
        last = self.skips.rank(self.end)
        return (
            min(base + first * self.batch_size, last),
            min(base + stop * self.batch_size, last),
        )

    def _cut(self, first_rank: int, stop_rank: int) -> list[tuple[int, int]]:
        """The examples of these ranks as ranges: the skips are the gaps."""
        if first_rank == stop_rank:
            return []
        start, stop = self._example(first_rank), self._example(stop_rank - 1) + 1
        ranges = []
        for gap_start, gap_stop in self.skips.between(start, stop):
            ranges.append((start, gap_start))
            start = gap_stop
        return [*ranges, (start, stop)]

    def _example(self, rank: int) -> int:
        return int(self.skips.at(np.array([rank], np.int64))[0])

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(self.record_count, seed=self.seed, epoch=epoch)

    def _position_in_epoch(self, epoch: int, record: int) -> int:
        if self.shuffle == "none":
            return record
        return int(self._permutation(epoch).inverse([record])[0])

    def _position(self, example: int) -> int:
        _integer("an example", example, 0, self.end)
        return example


def _range(given: tuple[int, int]) -> tuple[int, int]:
    try:
        start, stop = given
    except (TypeError, ValueError) as error:
        raise Misuse(f"a range is a pair (start, stop) of examples, found {given!r}") from error
    start = _integer("start of a range", start, 0, LIMIT)
    return start, _integer("stop of a range", stop, start, LIMIT)


def _batch_range(batches: int | range) -> tuple[int, int]:
    if isinstance(batches, range):
        if batches.step != 1:
            raise Misuse(f"a range of batches must have step 1, found {batches}")
        first = _integer("first batch", batches.start, 0, LIMIT)
        return first, _integer("stop", max(batches.stop, first), first, LIMIT)
    first = _integer("batch", batches, 0, LIMIT)
    return first, first + 1


def _integer(name: str, value: object, first: int, last: int) -> int:
    """`value` as a Python int; NumPy integers pass, bools and floats do not."""
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
        raise Misuse(f"{name} must be an integer in [{first}, {last}], found {value!r}")
    return value

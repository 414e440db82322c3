"""Which example stands in which batch, and back: arithmetic on what is not skipped.

A *skip* is an example that no batch may hold. It is remembered as ordinals of its source, so that
it stays in force for the same examples when weights or batch size change; in lists and states it is
an *address* (`datapipe.order.addresses`). With `skip_records` its item stays away in all later
epochs, too (`datapipe.order.lasting_skips`). The *rank* of an example is the number of examples
before it that are not left out; a batch is the next `batch_size` ranks. `remainder` says what
becomes of the end of an epoch:

    "carry"   batches run on into the next epoch; a short one at the very end is left out
    "keep"    every epoch ends with a short batch, if need be
    "drop"    every epoch ends with its last full batch; what is left over is not served

A position is the number of the first example that was not delivered. It does not depend on the
batch size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe.integers import LIMIT, fresh_indices, integer
from datapipe.order.addresses import addressed, parted
from datapipe.order.epoch_bounds import EpochBounds
from datapipe.order.examples import Examples
from datapipe.order.lasting_skips import lasting_skips
from datapipe.order.ranks import Ranks
from datapipe.order.rows import Rows
from datapipe.order.skips import Excluded, Skips, checked_range, listed
from datapipe.order.streams import Shuffle
from datapipe.texts import one_of
from formats.arguments import truth
from formats.errors import Misuse

VERSION: Final = 1  # of the order of records: saved in states

Remainder = Literal["carry", "keep", "drop"]
REMAINDERS: Final[tuple[Remainder, ...]] = ("carry", "keep", "drop")


class BatchPlan(NamedTuple):
    """What one batch holds."""

    batch: int
    """Its number, counted from example 0 under the skips of the plan."""
    ranges: tuple[tuple[int, int], ...]
    """Its examples, as half-open ranges."""
    rows: Rows
    """The same, row by row, and where they come from."""


@dataclass(frozen=True)
class Plan:
    """The batches of a run.

    Args:
      order: all examples.
      batch_size: examples per batch, over all processes.
      remainder: what becomes of the end of an epoch. "keep" and "drop" are for one source.
      skips: by source, the ordinals that are not served.
      skip_records: whether their items are not served in later epochs, either.

    Raises:
      Misuse: an argument is out of range.
    """

    order: Examples
    batch_size: int
    remainder: Remainder = "carry"
    skips: tuple[Skips, ...] = ()
    skip_records: bool = field(default=False, kw_only=True)

    @staticmethod
    def of(
        items: int,
        batch_size: int,
        *,
        seed: int,
        shuffle: Shuffle = "global",
        epochs: int | None = None,
        remainder: Remainder = "carry",
    ) -> Plan:
        """Of one source with that many items; see `Examples`."""
        return Plan(Examples.of(items, seed, shuffle, epochs), batch_size, remainder)

    def __post_init__(self) -> None:
        size = integer("batch_size", self.batch_size, 1, LIMIT)
        object.__setattr__(self, "batch_size", size)
        object.__setattr__(self, "remainder", one_of("remainder", self.remainder, REMAINDERS))
        object.__setattr__(self, "skip_records", truth("skip_records", self.skip_records))
        if not isinstance(self.order, Examples):
            raise Misuse(f"order: wanted Examples, found {self.order!r:.80}")
        if not isinstance(self.skips, tuple) or not all(isinstance(s, Skips) for s in self.skips):
            raise Misuse(f"skips: wanted a tuple of Skips, found {self.skips!r:.80}")
        sources = self.order.source_count
        if self.remainder != "carry" and sources > 1:
            raise Misuse(
                f"remainder={self.remainder!r} is for one source, here are {sources}, each with "
                "epochs of its own: take 'carry'"
            )
        if len(self.skips) > sources:
            raise Misuse(f"skips of {len(self.skips)} sources, here are {sources}")
        missing = (Skips(),) * (sources - len(self.skips))
        object.__setattr__(self, "skips", (*self.skips, *missing))
        self._excluded  # noqa: B018  (refuses what is too much)

    # -- the whole plan ------------------------------------------------------------------------

    @property
    def end(self) -> int:
        """One past the last example that can be named: the end, or 2^62 without one."""
        return self.order.end

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """What is skipped, as ranges of addresses, ascending."""
        return [
            addressed(source, start, stop)
            for source, skips in enumerate(self.skips)
            for start, stop in skips.ranges
        ]

    def skipping(self, addresses: Iterable[tuple[int, int]]) -> Plan:
        """This plan with more examples skipped, given as ranges of addresses.

        Raises:
          Misuse: a range is none, or of a source that the plan does not have.
        """
        more: list[list[tuple[int, int]]] = [[] for _ in self.skips]
        for source, start, stop in map(parted, listed(addresses)):
            if source >= len(more):
                raise Misuse(
                    f"a skip of source {source}, here are {len(more)}: a source of which examples "
                    "are skipped stays, be it with a weight of 0"
                )
            more[source].append((start, stop))
        both = (old.union(new) for old, new in zip(self.skips, more, strict=True))
        return replace(self, skips=tuple(both))

    def present(self, addresses: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ranges of addresses whose source the plan has: others may come in later.

        Raises:
          Misuse: a range is none.
        """
        return [each for each in listed(addresses) if parted(each)[0] < self.order.source_count]

    # -- forwards ------------------------------------------------------------------------------

    def batches_left(self, next_example: int) -> int | None:
        """How many batches follow a position; None: there is no end.

        Raises:
          Misuse: no position of this plan.
        """
        next_example = self._position(next_example)
        return None if self.order.epochs is None else self._batches_after(next_example)

    def examples(self, next_example: int, batches: int = 1) -> list[NDArray[np.int64]]:
        """The examples of each of the next batches, in order; fewer batches at the end.

        int64[batch_size] each, ascending; shorter where `remainder` is "keep".

        Raises:
          Misuse: no position of this plan.
        """
        batches = integer("batches", batches, 0, LIMIT)
        bounds = self._bounds(self._position(next_example), 0, batches)
        found: list[NDArray[np.int64]] = []
        for first, last in _united(bounds):  # one batch behind the other: all at once
            whole = self._ranks.examples(first, last)
            found += [whole[a - first : b - first] for a, b in bounds if first <= a < last]
        return found

    def advance(self, next_example: int, batches: int = 1) -> int:
        """The position after that many batches: one past the last example they hold.

        At the end of the last epoch it stays behind the last batch.

        Raises:
          Misuse: no position of this plan, or no number of batches.
        """
        next_example = self._position(next_example)
        batches = self._at_most(next_example, integer("batches", batches, 0, LIMIT))
        if batches == 0:
            return next_example
        ((_, stop),) = self._bounds(next_example, batches - 1, batches)
        return self._ranks.select(stop - 1) + 1

    def locate(self, examples: NDArray[np.int64]) -> Rows:
        """Source, epoch and item of each example, of any shape.

        Raises:
          Misuse: there is no such example.
        """
        return self.order.locate(fresh_indices(examples, self.end))

    def records(self, batches: int | range) -> NDArray[np.int64]:
        """The record numbers that batches hold, counted from example 0, row by row; int64[rows].

        Batches beyond the end hold nothing. `rows` says which source a number belongs to.

        Raises:
          Misuse: a range with steps, or a batch below 0.
        """
        return self.rows(batches).items

    def rows(self, batches: int | range) -> Rows:
        """Source, epoch and item of each row of these batches; see `records`."""
        first, stop = _batch_range(batches)
        rows = [self._ranks.examples(*ranks) for ranks in self._bounds(0, first, stop)]
        return self.order.locate(np.concatenate([np.zeros(0, np.int64), *rows]))

    def span(self, next_example: int, first: int, stop: int) -> list[tuple[int, int]]:
        """The examples held by batches first..stop-1, counted from a position.

        As half-open ranges, ascending, without skipped examples.

        Raises:
          Misuse: no position of this plan, or `stop` is below `first`.
        """
        next_example = self._position(next_example)
        first = integer("first", first, 0, LIMIT)
        stop = integer("stop", stop, first, LIMIT)
        found: list[tuple[int, int]] = []
        for start_rank, stop_rank in self._stretches(next_example, first, stop):
            found += self._ranks.ranges(start_rank, stop_rank)
        return found

    def addresses(self, examples: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Ranges of examples as ranges of addresses, which `skipping` takes.

        Raises:
          Misuse: a range is none.
        """
        found = []
        for start, stop in map(checked_range, listed(examples)):
            for source, (first, last) in enumerate(
                zip(self.order.ordinals(start), self.order.ordinals(stop), strict=True)
            ):
                if first < last:
                    found.append(addressed(source, first, last))
        return found

    def describe(self, batch: int, count: int = 1) -> tuple[BatchPlan, ...]:
        """What `count` batches from `batch` on hold, without reading data; fewer at the end.

        Raises:
          Misuse: a number is below 0.
        """
        batch = integer("batch", batch, 0, LIMIT)
        count = integer("count", count, 0, LIMIT)
        found: list[BatchPlan] = []
        for index, ranks in enumerate(self._bounds(0, batch, batch + count), start=batch):
            rows = self.order.locate(self._ranks.examples(*ranks))
            found.append(BatchPlan(index, tuple(self._ranks.ranges(*ranks)), rows))
        return tuple(found)

    # -- backwards -----------------------------------------------------------------------------

    def batches(
        self, item: int, *, source: int = 0, epochs: range | None = None
    ) -> tuple[int, ...]:
        """The batches that hold an item of a source, ascending, counted as by `records`.

        Args:
          item: its number in the source.
          source: the number of the source.
          epochs: the epochs of the source to look at; by default all of them.

        Raises:
          Misuse: no such item; or the plan has no end and `epochs` is not given.
        """
        source = integer("source", source, 0, self.order.source_count - 1)
        stream = self.order.streams[source]
        item = integer("an item", item, 0, stream.items - 1)
        found = set()
        for ordinal in stream.ordinals(item, self.epochs_within(source, epochs)):
            example = self.order.example(source, ordinal)
            if example is None or example >= self.end:
                continue
            if self._excluded[source].mask(np.array([ordinal], np.int64))[0]:
                continue
            batch = self._batch_of(example)
            if batch is not None:
                found.add(batch)
        return tuple(sorted(found))

    def epochs_within(self, source: int, epochs: range | None) -> range:
        """Those of `epochs` that a source has, ascending; None: all of them.

        Raises:
          Misuse: `epochs` is no range; or it is None and the plan has no end.
        """
        end = self.order.epochs
        if epochs is None:
            if end is None:
                raise Misuse("the plan has no end: say which epochs, such as epochs=range(3)")
            return range(end)
        if not isinstance(epochs, range):
            raise Misuse(f"epochs: wanted a range, such as range(3), found {epochs!r:.80}")
        if end is None:
            end = self.order.streams[source].epoch_of(LIMIT)
        rising = epochs if epochs.step > 0 else epochs[::-1]
        first = rising.start if rising.start >= 0 else rising.start % rising.step
        return range(first, min(rising.stop, end), rising.step)

    # -- batches as ranks ------------------------------------------------------------------------

    @cached_property
    def _excluded(self) -> tuple[Excluded, ...]:
        """By source."""
        if not self.skip_records:
            return self.skips
        pairs = zip(self.order.streams, self.skips, strict=True)
        return tuple(
            lasting_skips(stream, skips) if skips.ranges else skips for stream, skips in pairs
        )

    @cached_property
    def _ranks(self) -> Ranks:
        return Ranks(self.order, self._excluded)

    @cached_property
    def _by_epoch(self) -> EpochBounds | None:
        """None if batches run over the borders of epochs."""
        if self.remainder == "carry":
            return None
        short = self.remainder == "keep"
        (stream,), (skips,), (excluded,) = self.order.streams, self.skips, self._excluded
        return EpochBounds(stream, skips, excluded, self.batch_size, short, self.order.epochs)

    def _position(self, next_example: int) -> int:
        return integer("an example", next_example, 0, self.end)

    def _batches_after(self, next_example: int) -> int:
        if self._by_epoch is None:
            return (self._ranks.rank(self.end) - self._ranks.rank(next_example)) // self.batch_size
        if next_example == self.end:
            return 0
        epoch, rest = self._rest(self._by_epoch, next_example)
        before = self._by_epoch.batches_before
        return rest + before(self._by_epoch.last_epoch) - before(epoch)

    def _at_most(self, next_example: int, wanted: int) -> int:
        """The number of batches after a position, at most `wanted`."""
        if self._by_epoch is None:
            # Far from the end there is no need to know how much is left out up to there.
            needed = self._ranks.rank(next_example) + wanted * self.batch_size
            if needed <= self._floor:
                return wanted
        return min(wanted, self._batches_after(next_example))

    @cached_property
    def _floor(self) -> int:
        """A lower bound of the number of examples that are not left out."""
        return self._ranks.rank_floor(self.end)

    def _bounds(self, next_example: int, first: int, stop: int) -> list[tuple[int, int]]:
        """The ranks of batches first..stop-1 after a position, cut at the end of the plan."""
        stop = self._at_most(next_example, stop)
        first = min(first, stop)
        base, size = self._ranks.rank(next_example), self.batch_size
        if self._by_epoch is None:
            return [(base + i * size, base + (i + 1) * size) for i in range(first, stop)]
        return [self._bound(self._by_epoch, next_example, base, i) for i in range(first, stop)]

    def _stretches(self, next_example: int, first: int, stop: int) -> list[tuple[int, int]]:
        """The same ranks in as few ranges as possible: those of neighbouring batches are joined."""
        if self._by_epoch is not None:
            return _united(self._bounds(next_example, first, stop))
        stop = self._at_most(next_example, stop)
        base, size = self._ranks.rank(next_example), self.batch_size
        return [(base + min(first, stop) * size, base + stop * size)]

    def _bound(
        self, by_epoch: EpochBounds, next_example: int, base: int, batch: int
    ) -> tuple[int, int]:
        epoch, rest = self._rest(by_epoch, next_example)
        if batch < rest:
            start = base + batch * self.batch_size
        else:
            batch += by_epoch.batches_before(epoch) - rest
            epoch = by_epoch.epoch_of(batch) + 1
            start = by_epoch.rank(epoch - 1)
            start += (batch - by_epoch.batches_before(epoch - 1)) * self.batch_size
        return start, min(start + self.batch_size, by_epoch.rank(epoch))

    def _rest(self, by_epoch: EpochBounds, next_example: int) -> tuple[int, int]:
        """The epoch after that of a position, and the number of batches until it begins."""
        epoch = by_epoch.stream.epoch_of(next_example) + 1
        return epoch, by_epoch.batches(by_epoch.rank(epoch) - self._ranks.rank(next_example))

    def _batch_of(self, example: int) -> int | None:
        """The batch that holds an example that is not skipped; None: it is left over."""
        rank, by_epoch = self._ranks.rank(example), self._by_epoch
        if by_epoch is None:
            batch = rank // self.batch_size
            return batch if batch < self._at_most(0, batch + 1) else None
        epoch = by_epoch.stream.epoch_of(example)
        inside = (rank - by_epoch.rank(epoch)) // self.batch_size
        batch = by_epoch.batches_before(epoch) + inside
        return batch if batch < by_epoch.batches_before(epoch + 1) else None


def _united(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges, those that touch joined."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _batch_range(batches: int | range) -> tuple[int, int]:
    if isinstance(batches, range):
        if batches.step != 1:
            raise Misuse(f"a range of batches must have step 1, found {batches}")
        first = integer("first batch", batches.start, 0, LIMIT)
        return first, integer("stop", max(batches.stop, first), first, LIMIT)
    first = integer("batch", batches, 0, LIMIT)
    return first, first + 1

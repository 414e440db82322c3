"""Skips that last: an item that is skipped is left out of all later epochs of its source, too.

An epoch leaves out all items that were skipped before its end. So it is as long as the epoch before
unless it has skips of its own or the source grew, and a far-away example is found by arithmetic.
The inverse of the order of an epoch says at which positions those items would have stood: one
sorted table for each epoch that is looked at.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from datapipe.order.skips import Skips
from datapipe.order.streams import Stream
from datapipe.recent import Recent
from formats.errors import Misuse

LIMIT_ITEMS: Final = 1 << 24  # of a source: 8 bytes each, and 8 more in each table

_EPOCHS: Final = 4  # whose tables are held


class _Run(NamedTuple):
    """Epochs that are alike."""

    epoch: int  # the first one
    rank: int  # examples before it that are left
    each: int  # examples that are left in each of them
    left_out: int  # items that each of them leaves out: the first so many of `_items`


class _Table(NamedTuple):
    """What an epoch leaves out; int64[k] each."""

    positions: NDArray[np.int64]  # ascending
    ranks: NDArray[np.int64]  # of each: how many positions before it are left


@final
class LastingSkips:
    """The ordinals of a source that are left out; an `Excluded`. Safe to call from several threads.

    Args:
      stream: the source.
      skips: ordinals of it. Their items do not come back.

    Raises:
      Misuse: more than 2^24 items are skipped.
    """

    def __init__(self, stream: Stream, skips: Skips) -> None:
        self._stream = stream
        self._skipped = _by_epoch(stream, skips)
        count = sum(map(_size, self._skipped.values()))
        if count > LIMIT_ITEMS:
            raise Misuse(
                f"skip_records: wanted at most {LIMIT_ITEMS} skipped records of a source, found "
                f"{count}: leave them out with a filter"
            )
        self._skips = skips
        self._tables: Recent[int, _Table] = Recent(_EPOCHS)

    def __reduce__(self) -> tuple[Any, ...]:
        return LastingSkips, (self._stream, self._skips)

    def rank(self, number: int) -> int:
        """See `Excluded.rank`."""
        epoch, run, rank, position = self._stand(number)
        if position == 0 or run.left_out == 0:
            return rank + position
        return rank + position - int(np.searchsorted(self._table(epoch).positions, position))

    def rank_floor(self, number: int) -> int:
        """See `Excluded.rank_floor`."""
        _, run, rank, position = self._stand(number)
        return rank + max(0, position - run.left_out)

    def select(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Excluded.select`."""
        epochs, firsts, each = self._columns
        index = np.searchsorted(firsts, ranks, side="right") - 1
        done, inside = np.divmod(ranks - firsts[index], np.maximum(each[index], 1))
        epoch_of = epochs[index] + done
        found = np.empty_like(ranks)
        for epoch in np.unique(epoch_of).tolist():
            there = epoch_of == epoch
            before = np.searchsorted(self._table(epoch).ranks, inside[there], side="right")
            found[there] = self._stream.first_of(epoch) + inside[there] + before
        return found

    def mask(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `Excluded.mask`."""
        epochs, positions = self._stream.positions(numbers)
        found = np.zeros(numbers.shape, bool)
        for epoch in np.unique(epochs).tolist():
            there, table = epochs == epoch, self._table(epoch).positions
            at = np.searchsorted(table, positions[there])
            found[there] = np.append(table, -1)[at] == positions[there]
        return found

    def between(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """See `Excluded.between`."""
        found = [np.zeros(0, np.int64)]
        for epoch in range(self._stream.epoch_of(start), self._stream.epoch_of(stop - 1) + 1):
            found.append(self._table(epoch).positions + self._stream.first_of(epoch))
        numbers = np.concatenate(found)
        numbers = numbers[(numbers >= start) & (numbers < stop)]
        breaks = np.flatnonzero(np.diff(numbers) > 1) + 1
        parts = [part for part in np.split(numbers, breaks) if part.size]
        return tuple((int(part[0]), int(part[-1]) + 1) for part in parts)

    # -- epochs ----------------------------------------------------------------------------------

    def _stand(self, number: int) -> tuple[int, _Run, int, int]:
        """Of an ordinal: its epoch, the run of the epoch, the rank that begins it, its position."""
        epoch = self._stream.epoch_of(number)
        run = self._run(epoch)
        rank = run.rank + (epoch - run.epoch) * run.each
        return epoch, run, rank, number - self._stream.first_of(epoch)

    @cached_property
    def _items(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Items that are left out, in the order of their skips; the first epoch without each."""
        epochs, items = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for epoch in self._skipped:
            items.append(self._stream.order_of(epoch)(self._own(epoch).positions))
            epochs.append(np.full(items[-1].size, epoch))
        every = np.concatenate(items)
        if len(self._skipped) < 2:
            return every, epochs[-1]
        _, first = np.unique(every, return_index=True)
        first.sort()
        return every[first], np.concatenate(epochs)[first]

    @cached_property
    def _counts(self) -> dict[int, int]:
        """How many items are left out, by each epoch with more of them than the one before."""
        if len(self._skipped) < 2:  # their items need not be known
            return {epoch: _size(spans) for epoch, spans in self._skipped.items()}
        epochs, new = np.unique(self._items[1], return_counts=True)
        return dict(zip(epochs.tolist(), np.cumsum(new).tolist(), strict=True))

    def _own(self, epoch: int) -> _Table:
        """What is skipped in this very epoch."""
        starts, stops = np.array(self._skipped.get(epoch, []), np.int64).reshape(-1, 2).T
        counts = stops - starts
        ranks = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return _Table(ranks + np.arange(ranks.size), ranks)

    @cached_property
    def _runs(self) -> list[_Run]:
        stretches = {stretch.epoch: stretch.items for stretch in self._stream.stretches}
        marks = sorted({*stretches, *self._counts})
        runs: list[_Run] = []
        items = left_out = rank = 0
        for epoch, following in zip(marks, [*marks[1:], None], strict=True):
            items = stretches.get(epoch, items)
            left_out = self._counts.get(epoch, left_out)
            runs.append(_Run(epoch, rank, items - left_out, left_out))
            if following is not None:
                rank += (following - epoch) * (items - left_out)
        return runs

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """By run: first epoch, its rank, and how many examples each epoch has left."""
        epochs, ranks, each, _ = np.array(self._runs, np.int64).T
        return epochs, ranks, each

    def _run(self, epoch: int) -> _Run:
        return self._runs[bisect_right(self._runs, epoch, key=lambda run: run.epoch) - 1]

    def _table(self, epoch: int) -> _Table:
        return self._tables.get(epoch, self._made)

    def _made(self, epoch: int) -> _Table:
        left_out = self._run(epoch).left_out
        if _size(self._skipped.get(epoch, [])) == left_out:  # earlier epochs add nothing
            return self._own(epoch)
        items = self._items[0][:left_out]
        positions = np.sort(self._stream.order_of(epoch).inverse(items))
        return _Table(positions, positions - np.arange(positions.size))


@functools.lru_cache(maxsize=16)
def lasting_skips(stream: Stream, skips: Skips) -> LastingSkips:
    """Cached with its tables: plans that differ only in their batches share them."""
    return LastingSkips(stream, skips)


def _size(spans: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)


def _by_epoch(stream: Stream, skips: Skips) -> dict[int, list[tuple[int, int]]]:
    """Ranges of positions that are skipped, by epoch, ascending.

    Of epochs that are skipped as a whole, only those that leave out items that were not left out
    before.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    first = last = epoch = 0
    for start, stop in skips.ranges:
        if not first <= start < stop <= last:
            for epoch in _epochs(stream, stream.epoch_of(start), stream.epoch_of(stop - 1)):
                first, last = stream.first_of(epoch), stream.first_of(epoch + 1)
                span = (max(start, first) - first, min(stop, last) - first)
                found.setdefault(epoch, []).append(span)
        else:
            found[epoch].append((start - first, stop - first))
    return found


def _epochs(stream: Stream, first: int, last: int) -> list[int]:
    """Epochs in which a range from epoch `first` to `last` leaves out items for the first time."""
    grown = (stretch.epoch for stretch in stream.stretches)
    return sorted({first, last, *(e for e in (first + 1, *grown) if first < e < last)})

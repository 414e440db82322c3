"""Skips that last: an item that is skipped is left out of all later epochs of its source, too.

In an epoch as many items are left out as were skipped until its end; so an epoch has as many left
as the one before, but for those with skips of their own, and a far-away example is found by
arithmetic. Where in an epoch they would have been says the inverse of its order: one sorted table
of each epoch that is looked at.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from datapipe.skips import Skips
from datapipe.streams import Stream
from formats.errors import Misuse

LIMIT_ITEMS: Final = 1 << 24  # of a source: 8 bytes each, and as many in each table

_EPOCHS: Final = 4  # whose tables are held


class _Run(NamedTuple):
    """Epochs that are alike."""

    epoch: int  # the first one
    rank: int  # examples before it that are left
    each: int  # examples that are left of each of them
    left_out: int  # items that each of them leaves out: the first so many


@final
class Lasting:
    """What is left of a source: `LeftOut`, by items. Safe to call from several threads.

    Args:
      stream: the source.
      skips: ordinals of it. Their items do not come back.

    Raises:
      Misuse: they are more than 2^24.
    """

    def __init__(self, stream: Stream, skips: Skips) -> None:
        self._stream = stream
        self._skipped = _by_epoch(stream, skips)
        count = sum(stop - start for spans in self._skipped.values() for start, stop in spans)
        if count > LIMIT_ITEMS:
            raise Misuse(
                f"skip_records: wanted at most {LIMIT_ITEMS} skipped records of a source, found "
                f"{count}: leave them out with a filter"
            )
        self._skips = skips
        self._tables: dict[int, NDArray[np.int64]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lasting, (self._stream, self._skips)

    def rank(self, number: int) -> int:
        """See `LeftOut.rank`."""
        epoch = self._stream.epoch_of(number)
        run = self._run(epoch)
        rank = run.rank + (epoch - run.epoch) * run.each
        position = number - self._stream.first_of(epoch)
        if position == 0:
            return rank
        return rank + position - int(np.searchsorted(self._table(epoch), position))

    def at(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `LeftOut.at`."""
        epochs, firsts, each = self._columns
        index = np.searchsorted(firsts, ranks, side="right") - 1
        done, inside = np.divmod(ranks - firsts[index], np.maximum(each[index], 1))
        epoch_of = epochs[index] + done
        found = np.empty_like(ranks)
        for epoch in np.unique(epoch_of).tolist():
            there = epoch_of == epoch
            table = self._table(epoch)
            before = np.searchsorted(table - np.arange(table.size), inside[there], side="right")
            found[there] = self._stream.first_of(epoch) + inside[there] + before
        return found

    def mask(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See `LeftOut.mask`."""
        epochs, positions = self._stream.positions(numbers)
        found = np.zeros(numbers.shape, bool)
        for epoch in np.unique(epochs).tolist():
            there = epochs == epoch
            found[there] = np.isin(positions[there], self._table(epoch))
        return found

    def between(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """See `LeftOut.between`."""
        found = [np.zeros(0, np.int64)]
        for epoch in range(self._stream.epoch_of(start), self._stream.epoch_of(stop - 1) + 1):
            found.append(self._table(epoch) + self._stream.first_of(epoch))
        numbers = np.concatenate(found)
        numbers = numbers[(numbers >= start) & (numbers < stop)]
        breaks = np.flatnonzero(np.diff(numbers) > 1) + 1
        parts = [part for part in np.split(numbers, breaks) if part.size]
        return tuple((int(part[0]), int(part[-1]) + 1) for part in parts)

    # -- epochs ----------------------------------------------------------------------------------

    @cached_property
    def _items(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What is left out in the order of its coming, and the first epoch that leaves it out."""
        epochs, items = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for epoch, spans in sorted(self._skipped.items()):
            positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
            items.append(self._stream.order_of(epoch)(positions))
            epochs.append(np.full(positions.size, epoch))
        every = np.concatenate(items)
        _, first = np.unique(every, return_index=True)
        first.sort()
        return every[first], np.concatenate(epochs)[first]

    @cached_property
    def _runs(self) -> list[_Run]:
        _, since = self._items
        stretches = {stretch.epoch: stretch.items for stretch in self._stream.stretches}
        marks = sorted({*stretches, *np.unique(since).tolist()})
        counts = np.searchsorted(since, marks, side="right").tolist()
        runs: list[_Run] = []
        items = rank = 0
        for epoch, following, left_out in zip(marks, [*marks[1:], None], counts, strict=True):
            items = stretches.get(epoch, items)
            runs.append(_Run(epoch, rank, items - left_out, left_out))
            if following is not None:
                rank += (following - epoch) * (items - left_out)
        return runs

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of the runs: first epochs, ranks, and how many are left of each epoch."""
        epochs, ranks, each, _ = np.array(self._runs, np.int64).T
        return epochs, ranks, each

    def _run(self, epoch: int) -> _Run:
        return self._runs[bisect_right(self._runs, epoch, key=lambda run: run.epoch) - 1]

    def _table(self, epoch: int) -> NDArray[np.int64]:
        """The positions in an epoch that are left out, ascending."""
        with self._lock:
            table = self._tables.pop(epoch, None)
            if table is None:
                table = self._items[0][: self._run(epoch).left_out]
                if table.size:
                    table = np.sort(self._stream.order_of(epoch).inverse(table))
            self._tables[epoch] = table
            while len(self._tables) > _EPOCHS:
                del self._tables[next(iter(self._tables))]
            return table


@functools.lru_cache(maxsize=16)
def lasting(stream: Stream, skips: Skips) -> Lasting:
    """Kept with its tables: plans that differ in their batches have the same."""
    return Lasting(stream, skips)


def _by_epoch(stream: Stream, skips: Skips) -> dict[int, list[tuple[int, int]]]:
    """Positions that are skipped, by epoch.

    Of epochs that are skipped as a whole only those that leave out other items than before.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for start, stop in skips.ranges:
        for epoch in _epochs(stream, stream.epoch_of(start), stream.epoch_of(stop - 1)):
            first, last = stream.first_of(epoch), stream.first_of(epoch + 1)
            span = (max(start, first) - first, min(stop, last) - first)
            found.setdefault(epoch, []).append(span)
    return found


def _epochs(stream: Stream, first: int, last: int) -> Iterator[int]:
    """Where a range that begins and ends in these epochs leaves out other items than before."""
    grown = (stretch.epoch for stretch in stream.stretches)
    marks = {first, last, *(epoch for epoch in (first + 1, *grown) if first < epoch < last)}
    yield from sorted(marks)

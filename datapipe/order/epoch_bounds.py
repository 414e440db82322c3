"""Batches that end with their epoch: which epoch is a batch in?

Epochs differ only where examples of them are skipped or the source grew. Runs of epochs that are
alike have the same number of batches each, so that a far-away batch is found by arithmetic.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from datapipe.integers import LIMIT
from datapipe.order.skips import Excluded, Skips
from datapipe.order.streams import Stream


class _Run(NamedTuple):
    """Epochs first..stop-1, which have equally many batches."""

    first: int
    stop: int
    each: int  # batches of each of them
    before: int  # batches of all earlier epochs


@dataclass(frozen=True)
class EpochBounds:
    """The batches of one source, epoch by epoch. Ranks count its examples that are not skipped.

    Args:
      stream: the source.
      skips: ordinals of the source. From one epoch to the next the number of batches changes only
        beside epochs in which one of these ranges begins or ends.
      excluded: which ordinals are left out because of them.
      batch_size: examples of a batch.
      short: whether an epoch may end with a short batch; otherwise what is left over is not served.
      epochs: how many there are; None: no end.
    """

    stream: Stream
    skips: Skips
    excluded: Excluded
    batch_size: int
    short: bool
    epochs: int | None

    def batches_before(self, epoch: int) -> int:
        """Batches of the epochs before this one."""
        run = self._runs[bisect.bisect_right(self._runs, epoch, key=lambda run: run.first) - 1]
        return run.before + (min(epoch, run.stop) - run.first) * run.each

    def epoch_of(self, batch: int) -> int:
        """The epoch of a batch, counted from the first one of epoch 0."""
        run = self._runs[bisect.bisect_right(self._runs, batch, key=lambda run: run.before) - 1]
        return run.first + (batch - run.before) // run.each

    def batches(self, examples: int) -> int:
        """How many batches that many examples of one epoch make."""
        if self.short:
            return -(-examples // self.batch_size)
        return examples // self.batch_size

    def rank(self, epoch: int) -> int:
        """How many examples before an epoch are not skipped."""
        return self.excluded.rank(min(self.stream.first_of(epoch), LIMIT))

    @property
    def last_epoch(self) -> int:
        """One past the last epoch that can be named."""
        return self.stream.epoch_of(LIMIT) if self.epochs is None else self.epochs

    @cached_property
    def _runs(self) -> list[_Run]:
        marks = {0, self.last_epoch, *(stretch.epoch for stretch in self.stream.stretches)}
        for start, stop in self.skips.ranges:
            for ordinal in (start, stop - 1):
                epoch = self.stream.epoch_of(ordinal)
                marks |= {epoch, epoch + 1}
        edges = sorted(mark for mark in marks if mark <= self.last_epoch)
        runs: list[_Run] = []
        total = 0
        for first, stop in itertools.pairwise(edges):
            each = self.batches(self.rank(first + 1) - self.rank(first))
            runs.append(_Run(first, stop, each, total))
            total += each * (stop - first)
        return runs

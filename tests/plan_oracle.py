"""A plan written out example by example, by the slowest way there is."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from datapipe.integers import LIMIT
from datapipe.order.block_shuffle import BlockOrder
from datapipe.order.examples import Examples, Segment
from datapipe.order.permute import Permutation
from datapipe.order.plan import Plan


def block(counts: tuple[int, ...]) -> list[int]:
    """Sources of the examples of one block: each example at its share of the block."""
    places = [
        (Fraction(2 * k + 1, 2 * count), source)
        for source, count in enumerate(counts)
        for k in range(count)
    ]
    return [source for _, source in sorted(places)]


class Oracle:
    """The first examples of a plan in a list; knows nothing of ranks, ordinals or closed forms."""

    def __init__(self, plan: Plan, horizon: int) -> None:
        self.plan, order = plan, plan.order
        self._served: dict[int, int] = {}  # by source: ordinals so far
        self._epoch: dict[int, list[int]] = {}  # what is left of its epoch
        self._number: dict[int, int] = {}  # of its epoch, from 0 on
        self._gone: set[tuple[int, int]] = set()  # source and item: not to come back
        self.rows: list[tuple[int, int, int]] = []  # source, epoch, item
        self.skipped: list[bool] = []
        self.ended = False
        for first, stop, segment in self._segments(order.segments, horizon):
            cycle = block(segment.counts)
            for example in range(first, stop):
                source = cycle[(example - first) % len(cycle)]
                if not self._step(order, source, segment.items[source]):
                    return

    @staticmethod
    def _segments(segments: Any, horizon: int) -> list[tuple[int, int, Segment]]:
        stops = [*(s.first for s in segments[1:]), horizon]
        pairs = zip(segments, stops, strict=True)
        return [(s.first, min(stop, horizon), s) for s, stop in pairs]

    def _step(self, order: Examples, source: int, items: int) -> bool:
        if not self._epoch.get(source):
            number = self._number.get(source, -1) + 1
            if order.epochs is not None and number >= order.epochs:
                self.ended = True
                return False
            every = np.arange(items)
            if order.shuffle == "blocks":
                every = BlockOrder(order.blocks[source].leading(items), order.seed, number, source)(
                    every
                )
            if order.shuffle == "global":
                shuffle = Permutation(items, seed=order.seed, epoch=number, stream=source)
                every = shuffle(every)
            self._epoch[source], self._number[source] = every.tolist(), number
        ordinal = self._served.get(source, 0)
        self._served[source] = ordinal + 1
        self.rows.append((source, self._number[source], self._epoch[source].pop(0)))
        ranges = self.plan.skips[source].ranges
        skipped = any(a <= ordinal < b for a, b in ranges)
        item = (source, self.rows[-1][2])
        if skipped and self.plan.skip_records:
            self._gone.add(item)
        self.skipped.append(skipped or item in self._gone)
        return True

    @property
    def kept(self) -> list[int]:
        """The examples that are served."""
        return [e for e, skipped in enumerate(self.skipped) if not skipped]

    def batches(self, next_example: int) -> list[list[int]]:
        """Examples of each batch from a position on, as far as they are known to be complete."""
        rest = [e for e in self.kept if e >= next_example]
        size, remainder = self.plan.batch_size, self.plan.remainder
        if remainder == "carry":
            return [rest[at : at + size] for at in range(0, len(rest) - size + 1, size)]
        found = []
        last = max((epoch for _, epoch, _ in self.rows), default=-1)
        for epoch in range(last + 1):
            if epoch == last and not self.ended:
                break
            some = [e for e in rest if self.rows[e][1] == epoch]
            cut = [some[at : at + size] for at in range(0, len(some), size)]
            if cut and len(cut[-1]) < size and remainder == "drop":
                cut.pop()
            found += cut
        return found

    def addresses(self, examples: list[int]) -> set[int]:
        """Of examples, whatever is skipped."""
        ordinals: dict[int, int] = {}
        found = []
        for source, _, _ in self.rows:
            found.append(source * LIMIT + ordinals.get(source, 0))
            ordinals[source] = ordinals.get(source, 0) + 1
        return {found[e] for e in examples}

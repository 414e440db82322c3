"""The whole run as one sequence of examples: computed, never stored.

One source gives its ordinals in their order. Several are mixed: example `e` is drawn from one of
them by the mixture, and is the next ordinal of that source. A *segment* begins where the mixture
changed or a source grew or came in; every source goes on where it stood. All questions are
arithmetic: a far-away example costs what a near one costs, and no data is read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from datapipe.integers import LIMIT, integer
from datapipe.order.block_shuffle import Blocks
from datapipe.order.mixture import Mixture
from datapipe.order.rows import Rows
from datapipe.order.streams import SHUFFLES, Shuffle, Stream, Stretch
from datapipe.texts import one_of
from formats.errors import Misuse


@dataclass(frozen=True)
class Segment:
    """From example `first` on, source s has `items[s]` items, `counts[s]` examples of each block.

    A later segment has at least the sources of the one before.

    Raises:
      Misuse: a number is out of range, the counts are no mixture, or not as many as the items.
    """

    first: int
    items: tuple[int, ...]
    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", integer("first", self.first, 0, LIMIT))
        items = tuple(integer("items of a source", each, 1, LIMIT) for each in self.items)
        object.__setattr__(self, "items", items)
        if len(self.items) != len(self.counts):
            raise Misuse(
                f"wanted a count for each of {len(self.items)} sources, found {self.counts}"
            )
        self.mixture  # noqa: B018  (refuses what is no mixture)

    @property
    def mixture(self) -> Mixture:
        """Of the sources."""
        return _mixture(self.counts)


@dataclass(frozen=True)
class Examples:
    """The order of all examples of a run.

    Args:
      segments: the first one begins at example 0, each other one behind the one before.
      seed: of the shuffles, 0 to 2^64 - 1.
      shuffle: "global" (every epoch another order of all items), "blocks" (of blocks, and within
        a window of them), "grain" (the order that Grain has), or "none".
      epochs: how often each item is served; None: no end. Of several sources, the first one that
        has been served so often ends the run.
      blocks: by source, for shuffle="blocks"; may be those of the sources after they grew, and of
        sources that came in later, too.

    Raises:
      Misuse: an argument is out of range, or it would be more than 2^62 examples.
    """

    segments: tuple[Segment, ...]
    seed: int
    shuffle: Shuffle = "global"
    epochs: int | None = None
    blocks: tuple[Blocks, ...] = ()

    @staticmethod
    def of(
        items: int, seed: int, shuffle: Shuffle = "global", epochs: int | None = None
    ) -> Examples:
        """The order of one source with so many items."""
        return Examples((Segment(0, (items,), (1,)),), seed, shuffle, epochs)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", integer("seed", self.seed, 0, (1 << 64) - 1))
        object.__setattr__(self, "shuffle", one_of("shuffle", self.shuffle, SHUFFLES))
        if self.epochs is not None:
            object.__setattr__(self, "epochs", integer("epochs", self.epochs, 1, LIMIT))
        if not self.segments or self.segments[0].first != 0:
            raise Misuse("the first segment begins at example 0")
        sources = 0
        last = -1
        for number, segment in enumerate(self.segments):
            integer(f"segment {number}: first example", segment.first, last + 1, LIMIT)
            last = segment.first
            if len(segment.items) < sources:
                raise Misuse(
                    f"segment {number}: wanted {sources} sources or more, found "
                    f"{len(segment.items)}: a source stays, be it with a weight of 0"
                )
            sources = len(segment.items)
        if self.shuffle == "blocks":
            self._require_blocks()
        self.streams  # noqa: B018  (refuses a source that shrinks)
        self.end  # noqa: B018  (refuses what would end beyond 2^62)

    def _require_blocks(self) -> None:
        items = self.segments[-1].items
        there = [each.items for each in self.blocks]
        short = [s for s, count in enumerate(items) if s >= len(there) or there[s] < count]
        if short:
            raise Misuse(
                f"shuffle='blocks': wanted blocks of {items} items by source, found {there}"
            )

    # -- examples --------------------------------------------------------------------------------

    @property
    def source_count(self) -> int:
        """Number of sources of the last segment."""
        return len(self.segments[-1].items)

    @cached_property
    def end(self) -> int:
        """One past the last example that can be named: the end, or 2^62 without one."""
        if self.epochs is None:
            return LIMIT
        ends = [
            self.example(source, stream.end(self.epochs))
            for source, stream in enumerate(self.streams)
        ]
        return min(end for end in ends if end is not None)

    def draw(self, examples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and ordinal of each example; int64, same shape."""
        if len(self.segments) == 1 and self.source_count == 1:
            return np.zeros_like(examples), examples
        at = np.searchsorted(self._firsts, examples, side="right") - 1
        sources, ordinals = np.empty_like(examples), np.empty_like(examples)
        for number in np.unique(at).tolist():
            there = at == number
            segment = self.segments[number]
            drawn_from, drawn = segment.mixture.draw(examples[there] - segment.first)
            sources[there] = drawn_from
            base = np.array(self._bases[number], np.int64)
            ordinals[there] = drawn + base[drawn_from]
        return sources, ordinals

    def locate(self, examples: NDArray[np.int64]) -> Rows:
        """Source, epoch of the source, and item of each example; int64 of any shape."""
        sources, ordinals = self.draw(examples)
        if self.source_count == 1:
            return Rows(examples, sources, *self.streams[0].place(ordinals))
        epochs, items = np.empty_like(ordinals), np.empty_like(ordinals)
        for source in np.unique(sources).tolist():
            there = sources == source
            epochs[there], items[there] = self.streams[source].place(ordinals[there])
        return Rows(examples, sources, epochs, items)

    def ordinals(self, example: int) -> tuple[int, ...]:
        """By source: how many examples before this one come from it."""
        number = int(np.searchsorted(self._firsts, example, side="right")) - 1
        return self._ordinals(number, example)

    def example(self, source: int, ordinal: int) -> int | None:
        """The example that is this ordinal of a source; None where it is never drawn."""
        for number, segment in enumerate(self.segments):
            if source >= len(segment.items):
                continue
            beyond = number + 1 < len(self.segments)
            if beyond and ordinal >= self._bases[number + 1][source]:
                continue
            found = segment.mixture.example(source, ordinal - self._bases[number][source])
            return None if found is None else segment.first + found
        return None

    # -- sources ---------------------------------------------------------------------------------

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The sources, each through its epochs."""
        found: list[Stream] = []
        for segment, bases in zip(self.segments, self._bases, strict=True):
            for source, (items, ordinal) in enumerate(zip(segment.items, bases, strict=True)):
                if source < len(found):
                    found[source] = found[source].grown(ordinal, items)
                else:
                    whole = (Stretch(0, 0, items),)
                    blocks = self.blocks[source] if self.shuffle == "blocks" else None
                    found.append(Stream(whole, self.seed, self.shuffle, source, blocks))
        return tuple(found)

    @cached_property
    def _firsts(self) -> NDArray[np.int64]:
        return np.array([segment.first for segment in self.segments], np.int64)

    @cached_property
    def _bases(self) -> Sequence[tuple[int, ...]]:
        """By segment and source: the ordinal with which the segment begins."""
        bases: list[tuple[int, ...]] = [(0,) * len(self.segments[0].items)]
        for segment, following in zip(self.segments, self.segments[1:], strict=False):
            drawn = segment.mixture.ordinals(following.first - segment.first)
            there = [base + more for base, more in zip(bases[-1], drawn, strict=True)]
            bases.append((*there, *(0,) * (len(following.items) - len(there))))
        return bases

    def _ordinals(self, number: int, example: int) -> tuple[int, ...]:
        segment = self.segments[number]
        drawn = segment.mixture.ordinals(example - segment.first)
        there = [base + more for base, more in zip(self._bases[number], drawn, strict=True)]
        return (*there, *(0,) * (self.source_count - len(there)))


@functools.lru_cache(maxsize=256)
def _mixture(counts: tuple[int, ...]) -> Mixture:
    """Cached with its tables."""
    return Mixture(counts)

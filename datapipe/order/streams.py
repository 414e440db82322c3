"""One source through its epochs: which of its items is the k-th example that is taken from it?

An *ordinal* counts the examples of one source through all epochs, served or skipped. A source may
grow: the epoch under way then ends with the items it began with, and the next one is the first with
all of them. So no item comes twice within an epoch, and none is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from datapipe.integers import LIMIT
from datapipe.order.block_shuffle import Blocks
from datapipe.order.grain_order import GrainOrder
from datapipe.order.permute import Identity, Order, Permutation
from formats.errors import Misuse

Shuffle = Literal["global", "blocks", "grain", "none"]
SHUFFLES: Final[tuple[Shuffle, ...]] = ("global", "blocks", "grain", "none")

_BLOCK: Final = 1 << 15  # positions worked out together: a few at a time cost a multiple each
_AHEAD: Final = 16  # positions worked out for each one asked for, at most: a seek stays fast
_FEW: Final = 32  # so few positions are worked out alone
_SPARSE: Final = 4  # positions are worked out alone if fewer than one in so many is asked for


@dataclass(frozen=True)
class Stretch:
    """From ordinal `first` on, where `epoch` begins, the source has `items` items."""

    first: int
    epoch: int
    items: int


@dataclass(frozen=True)
class Stream:
    """The items of one source, epoch by epoch.

    Args:
      stretches: in rising order; the first one begins at ordinal 0 with epoch 0.
      seed: of the shuffle.
      shuffle: "global", "blocks", "grain" or "none".
      number: of the source: sources under one seed get different orders.
      blocks: for "blocks": of as many items as there are after the last growth, or more.
    """

    stretches: tuple[Stretch, ...]
    seed: int
    shuffle: Shuffle
    number: int = 0
    blocks: Blocks | None = None

    @property
    def items(self) -> int:
        """Number of items after the last growth."""
        return self.stretches[-1].items

    def grown(self, ordinal: int, items: int) -> Stream:
        """This stream with `items` items in all epochs that begin at `ordinal` or later.

        Replaces what the stream says about those epochs.

        Raises:
          Misuse: the source shrinks.
        """
        at = self._stretch(ordinal)
        done = -(-(ordinal - at.first) // at.items)
        first, epoch = at.first + done * at.items, at.epoch + done
        before = tuple(stretch for stretch in self.stretches if stretch.first < first)
        last = before[-1].items if before else items
        if items < last:
            raise Misuse(f"a source grows: it had {last} items and now has {items}")
        if before and items == last:
            return replace(self, stretches=before)
        return replace(self, stretches=(*before, Stretch(first, epoch, items)))

    def end(self, epochs: int | None) -> int:
        """One past the last ordinal of so many epochs; 2^62 if there is no end.

        Raises:
          Misuse: it is beyond 2^62.
        """
        if epochs is None:
            return LIMIT
        at = next(s for s in reversed(self.stretches) if s.epoch < epochs or s.epoch == 0)
        end = at.first + (epochs - at.epoch) * at.items
        if end > LIMIT:
            raise Misuse(
                f"epochs: {epochs} epochs of {self.items} items are more than 2^62 examples"
            )
        return end

    def place(self, ordinals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epoch and item of each ordinal; int64, same shape."""
        epochs, positions = self.positions(ordinals)
        if self.shuffle == "none" or not epochs.size:
            return epochs, positions
        if epochs.min() == epochs.max():
            return epochs, self._items(int(epochs.flat[0]), positions)
        items = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            there = epochs == epoch
            items[there] = self._items(epoch, positions[there])
        return epochs, items

    def _items(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The items at these positions of an epoch, int64; at least one position."""
        size, first, last = positions.size, int(positions.min()), int(positions.max())
        is_dense = _FEW <= size < _BLOCK and last - first < _SPARSE * size
        if not is_dense or self.shuffle == "blocks":
            return self.order_of(epoch)(positions)
        block = min(_BLOCK, 1 << (_AHEAD * size).bit_length() - 1)
        order = (self.shuffle, self._of_epoch(epoch).items, self.seed, epoch, self.number)
        numbers = range(first // block, last // block + 1)
        blocks = [_items(*order, number * block, (number + 1) * block) for number in numbers]
        items = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return items[positions - numbers.start * block]

    def positions(self, ordinals: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Epoch of each ordinal, and its position in it; int64, same shape."""
        if len(self.stretches) == 1:
            return np.divmod(ordinals, self.stretches[0].items)
        firsts, epochs, items = np.array(
            [(s.first, s.epoch, s.items) for s in self.stretches], np.int64
        ).T
        at = np.searchsorted(firsts, ordinals, side="right") - 1
        done, positions = np.divmod(ordinals - firsts[at], items[at])
        return epochs[at] + done, positions

    def order_of(self, epoch: int) -> Order:
        """The order of the items of an epoch.

        Raises:
          Misuse: `Orders` has none.
        """
        items = self._of_epoch(epoch).items
        return Orders(self.shuffle, items, self.seed, self.number, self.blocks)(epoch)

    def ordinals(self, item: int, epochs: range) -> Iterator[int]:
        """The ordinal of an item in each of these epochs, in their order, as far as it is there."""
        for epoch in epochs:
            at = self._of_epoch(epoch)
            if item < at.items:
                position = item
                if self.shuffle != "none":
                    position = int(self.order_of(epoch).inverse(np.array([item]))[0])
                yield at.first + (epoch - at.epoch) * at.items + position

    def first_of(self, epoch: int) -> int:
        """The ordinal with which an epoch begins."""
        at = self._of_epoch(epoch)
        return at.first + (epoch - at.epoch) * at.items

    def epoch_of(self, ordinal: int) -> int:
        """The epoch that an ordinal belongs to."""
        at = self._stretch(ordinal)
        return at.epoch + (ordinal - at.first) // at.items

    def _stretch(self, ordinal: int) -> Stretch:
        return next(s for s in reversed(self.stretches) if s.first <= ordinal)

    def _of_epoch(self, epoch: int) -> Stretch:
        return next(s for s in reversed(self.stretches) if s.epoch <= epoch)


@dataclass(frozen=True)
class Orders:
    """The order of the items of one source in each epoch: call it with the epoch.

    `blocks` is for shuffle="blocks", of `items` records or more: those behind came in later.

    Raises, when called:
      Misuse: there are no such blocks; or Grain's order of so many items is no bijection.
    """

    shuffle: Shuffle
    items: int
    seed: int
    number: int
    blocks: Blocks | None = None

    @property
    def name(self) -> str:
        """All that decides them, for a fingerprint, except the seed."""
        return self.shuffle if self.blocks is None else f"{self.shuffle} {self.blocks.signature}"

    def __call__(self, epoch: int) -> Order:
        if self.shuffle == "none":
            return Identity(self.items)
        if self.shuffle == "blocks":
            if self.blocks is None:
                raise Misuse("shuffle='blocks' needs the blocks of the source")
            return self.blocks.leading(self.items).order(self.seed, epoch, self.number)
        return _order(self.shuffle, self.items, self.seed, epoch, self.number)


@functools.lru_cache(maxsize=64)
def _order(shuffle: Shuffle, items: int, seed: int, epoch: int, number: int) -> Order:
    """Cached: making its keys, in Python, takes longer than a batch."""
    if shuffle == "grain":
        return GrainOrder(items, seed=seed, epoch=epoch)
    return Permutation(items, seed=seed, epoch=epoch, stream=number)


@functools.lru_cache(maxsize=64)
def _items(
    shuffle: Shuffle, items: int, seed: int, epoch: int, number: int, first: int, stop: int
) -> NDArray[np.int64]:
    """The items at positions first..stop-1, cut at the end; cached for the batches to come."""
    found = _order(shuffle, items, seed, epoch, number)(np.arange(first, min(items, stop)))
    found.flags.writeable = False
    return found

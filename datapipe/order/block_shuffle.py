"""A shuffle for sources where a record costs the block it lies in, such as a Parquet row group.

In each epoch the blocks are permuted, `window` neighbours in that order form a window, and the
records of each window are permuted. So the batches of a window need `window` blocks, and none of
these again in that epoch. Records of one block stay within one window: the smaller the window, the
less is shuffled.

The start of a window follows from the lengths of the blocks before it. Each epoch has a table of 16
bytes a block, made in O(blocks) at first use; the rest is arithmetic.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.integers import fresh_indices, integer
from datapipe.order.permute import Permutation, mix
from datapipe.recent import Recent
from formats.errors import Misuse
from formats.source import grouped

VERSION: Final = 1  # of the order: saved in states
WINDOW: Final = 16
BLOCKS_LIMIT: Final = 1 << 24

_EPOCHS: Final = (
    3  # whose orders are held: batches cross the border of two, a question may look further
)


@final
class Blocks:
    """How a source is cut into blocks, and how many of them are shuffled together.

    Safe to call from several threads; goes to other processes.

    Args:
      bounds: int64[blocks + 1], from 0 to the number of records, not falling; blocks without
        records are left out. At most 2^24 blocks.
      window: blocks of a window, 1 or more.

    Raises:
      Misuse: an argument is out of range.
    """

    def __init__(self, bounds: ArrayLike, window: int = WINDOW) -> None:
        given = np.asarray(bounds)
        if (
            given.ndim != 1
            or given.dtype.kind not in "iu"
            or given.size < 2
            or given[0] != 0
            or (given[1:] < given[:-1]).any()
            or given[-1] == 0
        ):
            raise Misuse(
                "blocks: wanted integers that rise from 0 to the number of records, found "
                f"{given.dtype} of shape {list(given.shape)}: {given.reshape(-1)[:8].tolist()}"
            )
        first = np.append(True, given[1:] > given[:-1])
        self.bounds: NDArray[np.int64] = given[first].astype(np.int64)
        self.bounds.flags.writeable = False
        if self.count > BLOCKS_LIMIT:
            raise Misuse(f"blocks: wanted at most {BLOCKS_LIMIT}, found {self.count}: make larger")
        self.window = integer("shuffle_window", window, 1, BLOCKS_LIMIT)
        self._shorter: dict[int, Blocks] = {}
        self._lock = threading.Lock()
        self._orders: Recent[tuple[int, int, int], BlockOrder] = Recent(_EPOCHS)

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, (self.bounds, self.window)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Blocks):
            return NotImplemented
        return (self.digest, self.window) == (other.digest, other.window)

    def __hash__(self) -> int:
        return hash((self.digest, self.window))

    def __repr__(self) -> str:
        return f"Blocks({self.count} of {self.items} records, windows of {self.window})"

    @property
    def signature(self) -> str:
        """All that decides an order beside seed, epoch and stream, in one line."""
        return f"{VERSION} {self.digest} {self.window}"

    @property
    def items(self) -> int:
        """Records of all blocks."""
        return int(self.bounds[-1])

    @property
    def count(self) -> int:
        """Number of blocks, none of which is empty."""
        return int(self.bounds.size) - 1

    @cached_property
    def digest(self) -> str:
        """Of the bounds: 32 hex digits."""
        return hashlib.sha256(self.bounds.astype("<i8").tobytes()).hexdigest()[:32]

    def leading(self, items: int) -> Blocks:
        """The blocks of the first `items` records: of the source before it grew.

        Raises:
          Misuse: there are fewer records.
        """
        integer("items", items, 1, self.items)
        if items == self.items:
            return self
        with self._lock:
            if items not in self._shorter:
                inside = self.bounds[: np.searchsorted(self.bounds, items)]
                self._shorter[items] = Blocks(np.append(inside, items), self.window)
            return self._shorter[items]

    def order(self, seed: int, epoch: int, stream: int) -> BlockOrder:
        """The order of the records in an epoch; those of the last few epochs are held."""
        return self._orders.get((seed, epoch, stream), lambda key: BlockOrder(self, *key))


@dataclass(frozen=True, eq=False)
class BlockOrder:
    """A bijection of [0, n) that keeps the records of a block together; an `Order`.

    The same arguments give the same bijection on every machine and in every release.

    Args:
      blocks: of n records, and how many of them are a window.
      seed, epoch, stream: as of a `Permutation`.
    """

    blocks: Blocks
    seed: int
    epoch: int = 0
    stream: int = 0

    @property
    def n(self) -> int:
        """Size of the domain."""
        return self.blocks.items

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Record ids at `positions` of the epoch; fresh int64, same shape."""
        values = fresh_indices(positions, self.n)
        flat = values.reshape(-1)
        places = np.empty_like(flat)
        for window, inside, slots in grouped(flat, self._windows):
            places[slots] = self._windows[window] + self._inner(window)(inside)
        ranks = np.searchsorted(self._starts, places, side="right") - 1
        flat[...] = self.blocks.bounds[self._order[ranks]] + (places - self._starts[ranks])
        return values

    def inverse(self, records: ArrayLike) -> NDArray[np.int64]:
        """Positions of `records` in the epoch; fresh int64, same shape."""
        values = fresh_indices(records, self.n)
        flat = values.reshape(-1)
        block = np.searchsorted(self.blocks.bounds, flat, side="right") - 1
        ranks = self._outer.inverse(block)
        places = self._starts[ranks] + (flat - self.blocks.bounds[block])
        for window, inside, slots in grouped(places, self._windows):
            flat[slots] = self._windows[window] + self._inner(window).inverse(inside)
        return values

    @cached_property
    def _outer(self) -> Permutation:
        """The order of the blocks."""
        return Permutation(self.blocks.count, mix(VERSION, self.seed, 0), self.epoch, self.stream)

    def _inner(self, window: int) -> Permutation:
        """The order of the records of a window."""
        size = int(self._windows[window + 1] - self._windows[window])
        return _permutation(size, mix(VERSION, self.seed, 1 + window), self.epoch, self.stream)

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        """The blocks in the order of the epoch."""
        return self._outer(np.arange(self.blocks.count))

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """By place in that order: how many records come before the block; at the end, all."""
        sizes = np.diff(self.blocks.bounds)[self._order]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])

    @cached_property
    def _windows(self) -> NDArray[np.int64]:
        """The first position of each window; at the end, the number of records."""
        return np.append(self._starts[: -1 : self.blocks.window], self._starts[-1])


@functools.lru_cache(maxsize=256)
def _permutation(size: int, seed: int, epoch: int, stream: int) -> Permutation:
    """Kept, since its keys are made in Python."""
    return Permutation(size, seed, epoch, stream)

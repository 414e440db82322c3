"""Documents laid end to end in the shuffled order of an epoch, and cut into rows.

There is no padding; a document is cut where its row ends. All epochs have equally many rows, which
are the items of a stream that is not shuffled again; what a row holds depends on the epoch. Each
epoch has an index: how many tokens come before every 4,096th document. Finding a row costs the
documents of its block, wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.integers import LIMIT, fresh_indices, integer
from datapipe.order.permute import Order
from datapipe.recent import Recent
from datapipe.sources.indexes import Lengths
from datapipe.sources.pieces import Pieces, checked_capacity, ranges
from datapipe.texts import one_of

VERSION: Final = 1  # of what rows hold: part of the fingerprint
BLOCK: Final = 4096

Remainder = Literal["drop", "keep"]

_REMAINDERS: Final[tuple[Remainder, ...]] = ("drop", "keep")
_CHUNK: Final = 256 * BLOCK  # documents looked at together while an index is built
_EPOCHS: Final = 2  # indexes that are held: a window of batches may lie across a border


@dataclass(frozen=True, eq=False)
class Cut:
    """The rows of one epoch.

    Its index is made at first use, by one pass over all documents: up to 200 ns each. It takes 8
    bytes per 4,096 documents beside the lengths.

    Args:
      lengths: tokens of each document, int[n].
      order: of the n documents in this epoch.
      capacity: tokens of a row.
      rows: number of rows; see `Concatenation`.
    """

    lengths: NDArray[np.integer[Any]]
    order: Order
    capacity: int
    rows: int

    def pieces(self, rows: ArrayLike) -> Pieces:
        """What these rows (int[k], any order, repeats allowed) hold.

        Raises:
          Misuse: a row is outside [0, self.rows).
        """
        wanted = fresh_indices(rows, self.rows).reshape(-1)
        first = wanted * self.capacity
        stop = np.minimum(first + self.capacity, self._before[-1])
        blocks = self._blocks(first, stop - 1)
        records, begins, ends = self._documents(blocks)
        # If several documents begin at one place, only the last one has tokens.
        at = np.searchsorted(begins, first, side="right") - 1
        counts = np.searchsorted(begins, stop, side="left") - at
        places = ranges(at, counts)
        row = np.repeat(np.arange(wanted.size), counts)
        begin = np.maximum(begins[places], first[row])
        length = np.minimum(ends[places], stop[row]) - begin
        full = np.flatnonzero(length)
        places, row, begin = places[full], row[full], begin[full]
        return Pieces(
            rows=row,
            records=records[places],
            starts=begin - begins[places],
            lengths=length[full],
            offsets=begin - first[row],
        )

    def rows_of(self, record: int) -> NDArray[np.int64]:
        """The rows that hold a document, int64, ascending; none if it has no tokens or is dropped.

        Raises:
          Misuse: there is no such document.
        """
        record = integer("a document", record, 0, self.lengths.size - 1)
        length = int(self.lengths[record])
        if not length:
            return np.zeros(0, np.int64)
        position = int(self.order.inverse(np.array([record]))[0])
        block = position // BLOCK
        _, begins, _ = self._documents(np.array([block]))
        begin = int(begins[position - block * BLOCK])
        stop = (begin + length - 1) // self.capacity + 1
        return np.arange(begin // self.capacity, min(stop, self.rows), dtype=np.int64)

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """[b]: tokens in front of block b; at the end, all of them."""
        sums: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        for start in range(0, self.lengths.size, _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, self.lengths.size))
            lengths = self.lengths[self.order(positions)]
            edges = np.arange(0, positions.size, BLOCK)
            sums.append(np.add.reduceat(lengths, edges, dtype=np.int64))
        return np.cumsum(np.concatenate(sums))

    def _blocks(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """The blocks that hold the tokens from `first` to `last` of each row, ascending."""
        low = np.searchsorted(self._before, first, side="right") - 1
        high = np.searchsorted(self._before, last, side="right") - 1
        return np.unique(ranges(low, high - low + 1))

    def _documents(
        self, blocks: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The documents of these blocks in their order: record, first token, one past the last.

        Tokens are counted from the start of the epoch; int64[k] each.
        """
        stops = np.minimum((blocks + 1) * BLOCK, self.lengths.size)
        counts = stops - blocks * BLOCK
        records = self.order(ranges(blocks * BLOCK, counts))
        lengths = self.lengths[records].astype(np.int64)
        ends = np.cumsum(lengths)
        # Blocks in between may be missing: each counts from its own base.
        firsts = np.cumsum(counts) - counts
        base = self._before[blocks] - (ends[firsts] - lengths[firsts])
        ends += np.repeat(base, counts)
        return records, ends - lengths, ends


@final
class Concatenation:
    """The rows of every epoch. Safe to call from several threads; goes to other processes.

    Args:
      lengths: of the documents.
      capacity: tokens of a row, 1 to 2^31 - 1.
      orders: the order of the documents in an epoch.
      remainder: what becomes of the tokens at the end of an epoch that fill no row: "drop", or
        "keep" them as a row with padding.

    Raises:
      Misuse: an argument is out of range.
    """

    def __init__(
        self,
        lengths: Lengths,
        capacity: int,
        orders: Callable[[int], Order],
        remainder: Remainder = "drop",
    ) -> None:
        remainder = one_of("remainder", remainder, _REMAINDERS)
        self.lengths = lengths
        self.capacity = checked_capacity(capacity)
        self.orders = orders
        self.remainder: Remainder = remainder
        self._cuts: Recent[int, Cut] = Recent(_EPOCHS)
        self._tokens = int(lengths.tokens.sum(dtype=np.int64))

    def __reduce__(self) -> tuple[Any, ...]:
        return Concatenation, (self.lengths, self.capacity, self.orders, self.remainder)

    def __len__(self) -> int:
        """Rows of an epoch."""
        spare = self.capacity - 1 if self.remainder == "keep" else 0
        return (self._tokens + spare) // self.capacity

    def pieces(self, epoch: int, rows: ArrayLike) -> Pieces:
        """What these rows of an epoch hold; see `Cut.pieces`."""
        return self.cut(epoch).pieces(rows)

    def rows(self, epoch: int, record: int) -> NDArray[np.int64]:
        """The rows of an epoch that hold a document; see `Cut.rows_of`."""
        return self.cut(epoch).rows_of(record)

    def cut(self, epoch: int) -> Cut:
        """The rows of one epoch, with their index; those of the last two epochs are held."""
        return self._cuts.get(integer("epoch", epoch, 0, LIMIT), self._made)

    def _made(self, epoch: int) -> Cut:
        cut = Cut(self.lengths.tokens, self.orders(epoch), self.capacity, len(self))
        cut._before  # noqa: B018  (built once, under the lock)
        return cut

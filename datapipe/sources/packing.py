"""Documents packed into rows of a fixed number of tokens, before the shuffle.

Packing goes through the documents in stored order, in *windows* of equally many documents. No row
holds documents of two windows, so that a row is read from a short stretch of the files; and the
result does not depend on order, hosts or workers. A row is a *bin*. Bins are numbered in the order
of the documents that opened them; they are the items that are shuffled.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.integers import LIMIT, fresh_indices, integer
from datapipe.sources import sidecar
from datapipe.sources.fitting import STRATEGIES, Strategy, openers
from datapipe.sources.indexes import Lengths
from datapipe.sources.pieces import Pieces, checked_capacity, ranges
from datapipe.sources.sidecar import Sidecar, Stored
from datapipe.texts import one_of
from formats.errors import Damaged, Mismatch, Misuse
from formats.files import Pattern
from formats.source import json_digest

VERSION: Final = 1

Oversize = Literal["split", "refuse"]

_KIND: Final = "bins"
_OVERSIZE: Final = ("split", "refuse")


@dataclass(frozen=True)
class Packed:
    """What decides the bins: equal values, equal bins.

    lengths: digest of the lengths of all documents.
    documents: number of documents.
    capacity, window, strategy, oversize: see `pack`.
    """

    lengths: str
    documents: int
    capacity: int
    window: int
    strategy: str
    oversize: str

    @staticmethod
    def of(
        lengths: Lengths, capacity: int, window: int, strategy: Strategy, oversize: Oversize
    ) -> Packed:
        """Checks them; see `pack`. Raises Misuse."""
        one_of("strategy", strategy, STRATEGIES)
        one_of("oversize", oversize, _OVERSIZE)
        return Packed(
            lengths.digest,
            len(lengths),
            checked_capacity(capacity),
            integer("window", window, 1, LIMIT),
            strategy,
            oversize,
        )

    @property
    def digest(self) -> str:
        """Hex, over all of it and the version of packing."""
        return json_digest([_KIND, VERSION, asdict(self)])


@dataclass(frozen=True, eq=False)
class Bins:
    """Which pieces of which documents each bin holds.

    Build it with `pack` or `Bins.load`. It holds 20 bytes a piece and 8 a bin; if loaded, these are
    the pages of its file, also in other processes. The first call of `bins` adds 8 bytes a piece.

    made: what decided them.
    bounds: int64[bins + 1]: bin b holds the pieces from bounds[b] to below bounds[b + 1].
    records, starts: int64[pieces], lengths: int32[pieces]; see `Pieces`.
    stored: the file they were loaded from, if any.
    """

    made: Packed
    bounds: NDArray[np.int64]
    records: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    stored: Stored | None = None

    def __len__(self) -> int:
        """Number of bins."""
        return int(self.bounds.size) - 1

    @property
    def capacity(self) -> int:
        """Tokens of a bin."""
        return self.made.capacity

    @cached_property
    def padding_share(self) -> float:
        """The share of padding in all bins, 0 to 1; 0 without bins."""
        room = len(self) * self.capacity
        return 1 - int(self.lengths.sum(dtype=np.int64)) / room if room else 0.0

    def pieces(self, bins: ArrayLike) -> Pieces:
        """What these bins (int[k], any order, repeats allowed) hold; row i is bin `bins[i]`.

        Raises:
          Misuse: a bin is outside [0, len(self)).
        """
        wanted = fresh_indices(bins, len(self)).reshape(-1)
        firsts = self.bounds[wanted]
        counts = self.bounds[wanted + 1] - firsts
        at = ranges(firsts, counts)
        lengths = self.lengths[at].astype(np.int64)
        before = np.cumsum(lengths) - lengths
        row_first = np.cumsum(counts) - counts
        return Pieces(
            rows=np.repeat(np.arange(wanted.size), counts),
            records=self.records[at],
            starts=self.starts[at],
            lengths=lengths,
            offsets=before - np.repeat(before[row_first], counts),
        )

    def bins(self, record: int) -> NDArray[np.int64]:
        """The bins that hold a document, int64, ascending; none for one without tokens.

        Raises:
          Misuse: there is no such document.
        """
        record = integer("a document", record, 0, self.made.documents - 1)
        order = self._by_record
        first, stop = np.searchsorted(self.records, [record, record + 1], sorter=order)
        found = np.searchsorted(self.bounds, order[first:stop], side="right") - 1
        return np.unique(found)

    @cached_property
    def _by_record(self) -> NDArray[np.int64]:
        return np.argsort(self.records, kind="stable")

    def save(self, path: Pattern) -> None:
        """Write them as a sidecar; see `sidecar.write` for what that raises."""
        arrays: dict[str, NDArray[Any]] = {
            "bounds": self.bounds,
            "records": self.records,
            "starts": self.starts,
            "lengths": self.lengths,
        }
        sidecar.write(path, Sidecar(_KIND, VERSION, asdict(self.made), arrays))

    @staticmethod
    def load(path: Pattern, made: Packed, lengths: Lengths) -> Bins:
        """Read a sidecar of the bins that `made` decides, of documents of these lengths.

        Raises:
          NotFound, StoreFailed: of the file.
          Damaged: it is no index, or not as it was written, or its bins cannot be.
          Mismatch: it is another kind of index, or was made from something else.
        """
        index = sidecar.read(path, _KIND, VERSION)
        differences = [
            f"{name}: wanted {wanted}, found {index.about.get(name)}"
            for name, wanted in asdict(made).items()
            if index.about.get(name) != wanted
        ]
        if differences:
            raise Mismatch(
                f"{os.fspath(path)} has bins that were made from something else; remove it, or "
                "name another file",
                differences,
            )
        dtypes = {name: array.dtype.name for name, array in index.arrays.items()}
        fault = f"its arrays are {dtypes}, wanted {_DTYPES}" if dtypes != _DTYPES else ""
        bins = None if fault else Bins(made, **index.arrays, stored=index.stored)
        if bins is None or (fault := _fault(bins, lengths)):
            raise Damaged(f"{os.fspath(path)}: {fault}; remove it, so that it is built again")
        return bins

    def __reduce__(self) -> tuple[Any, ...]:
        if self.stored is None:
            return Bins, (self.made, self.bounds, self.records, self.starts, self.lengths)
        return _bins_of, (self.stored, self.made)


def _bins_of(stored: Stored, made: Packed) -> Bins:
    return Bins(made, **sidecar.reopened(stored).arrays, stored=stored)


_DTYPES: Final = {"bounds": "int64", "records": "int64", "starts": "int64", "lengths": "int32"}


def pack(
    lengths: Lengths,
    capacity: int,
    *,
    window: int,
    strategy: Strategy = "first-fit",
    oversize: Oversize = "split",
) -> Bins:
    """Put documents into bins.

    Args:
      lengths: of the documents, in stored order. One without tokens is in no bin.
      capacity: tokens of a bin, 1 to 2^31 - 1.
      window: documents that are packed together, 1 or more.
      strategy: "first-fit": into the bin that was opened first of those with room; "best-fit":
        into the one with the least room of those, and of these the one that was opened first.
      oversize: "split": a document of more than `capacity` tokens becomes pieces that fill a bin
        each, and the rest, which is packed; "refuse": it is an error.

    It takes one to three microseconds a document, or a few tenths of one with "first-fit" in many
    windows, and about 60 bytes of memory a piece while it runs.

    Raises:
      Misuse: an argument is out of range, or a document is refused.
    """
    made = Packed.of(lengths, capacity, window, strategy, oversize)
    given = lengths.tokens
    capacity, window = made.capacity, made.window
    if oversize == "refuse" and given.size and given.max() > capacity:
        bad = int(np.flatnonzero(given > capacity)[0])
        raise Misuse(
            f"document {bad} has {given[bad]} tokens, a bin {capacity}: raise the capacity, "
            "filter it out, or take oversize='split'"
        )
    counts = -(-given.astype(np.int64) // capacity)
    records = np.repeat(np.arange(given.size), counts)
    starts = ranges(np.zeros_like(counts), counts) * capacity
    sizes = np.minimum(given[records] - starts, capacity)
    opened_by = _openers(records, sizes, capacity, window, strategy)
    opens = opened_by == np.arange(opened_by.size)
    bins = (np.cumsum(opens) - 1)[opened_by]
    order = np.argsort(bins, kind="stable")
    held = np.bincount(bins, minlength=int(opens.sum()))
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(held, dtype=np.int64)])
    return Bins(made, bounds, records[order], starts[order], sizes[order].astype(np.int32))


def _openers(
    records: NDArray[np.int64],
    sizes: NDArray[np.int64],
    capacity: int,
    window: int,
    strategy: Strategy,
) -> NDArray[np.int64]:
    """Of each piece, the piece that opened its bin; a piece that fills a bin has one alone."""
    found = np.arange(sizes.size)
    loose = np.flatnonzero(sizes < capacity)
    windows = records[loose] // window
    cuts = np.flatnonzero(np.diff(windows, prepend=-1, append=-1))
    found[loose] = loose[openers(sizes[loose], cuts, capacity, strategy)]
    return found


def _fault(bins: Bins, lengths: Lengths) -> str:
    """What is wrong with bins that `pack` cannot have made; empty: nothing."""
    bounds, pieces = bins.bounds, bins.records.size
    if not bounds.size or bounds[0] != 0 or bounds[-1] != pieces or (np.diff(bounds) < 1).any():
        return f"the bounds of bins do not part {pieces} pieces"
    if bins.starts.size != pieces or bins.lengths.size != pieces:
        return "its arrays are not of one size"
    if not pieces:
        return ""
    if bins.records.min() < 0 or bins.records.max() >= len(lengths):
        return f"a piece is of no document in [0, {len(lengths)})"
    if bins.starts.min() < 0 or bins.lengths.min() < 1:
        return "a piece begins before its document or is empty"
    if (bins.lengths > lengths.tokens[bins.records] - bins.starts).any():
        return "a piece ends behind its document"
    if np.add.reduceat(bins.lengths.astype(np.int64), bounds[:-1]).max() > bins.capacity:
        return f"a bin holds more than {bins.capacity} tokens"
    return ""

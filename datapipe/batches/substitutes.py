"""Records that are replaced, and by which others.

A record that is known to be bad is replaced wherever it comes up. Its substitute is the first of a
fixed sequence of records of its source that is not bad itself. The random numbers of the example
are those of the substitute in that epoch, so that it is the same example in both of its places.

The *id* of a record is its number in its source or, where the epoch decides what it is, its number
through all epochs (see `datapipe.sources.epoch_sources.keys`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from datapipe.order.permute import mix
from datapipe.order.rows import Rows
from datapipe.sources import epoch_sources

if TYPE_CHECKING:
    from formats.source import Source

CANDIDATES: Final = 64  # for one record; more than one or two are looked at only if most are bad


def ids_of(source: Source, rows: Rows) -> NDArray[np.int64]:
    """The ids of the records of rows of one source, int64[rows]."""
    return epoch_sources.keys(source, rows.items, rows.epochs)


def candidates(source: int, id: int, items: int) -> Iterator[int]:
    """The items that may stand in for a record, in their order; repeats are possible.

    A saved position depends on this order: it never changes.

    Args:
      source: its number.
      id: of the record.
      items: number of items of the source.
    """
    for attempt in range(CANDIDATES):
        yield mix(source, id, attempt) % items


@dataclass(frozen=True)
class Replaced:
    """A set of records; build it with `Replaced.of`.

    ids: by the number of the source, sorted and distinct; no empty ones at the end.
    """

    ids: tuple[tuple[int, ...], ...] = ()

    @staticmethod
    def of(records: Iterable[tuple[int, int]]) -> Replaced:
        """The set of these (source, id) pairs."""
        return Replaced().union(records)

    def union(self, records: Iterable[tuple[int, int]]) -> Replaced:
        """This set and more (source, id) pairs."""
        pairs = sorted({*self.pairs(), *records})
        found: list[tuple[int, ...]] = []
        for source, members in itertools.groupby(pairs, lambda pair: pair[0]):
            found += [()] * (source - len(found))
            found.append(tuple(id for _, id in members))
        return Replaced(tuple(found))

    def pairs(self) -> Iterator[tuple[int, int]]:
        """All of them as (source, id), ascending."""
        return ((source, id) for source, ids in enumerate(self.ids) for id in ids)

    def __contains__(self, pair: object) -> bool:
        return pair in self._members

    def __len__(self) -> int:
        return sum(map(len, self.ids))

    def mask(self, source: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """For each id of a source, whether it is in the set; same shape."""
        known = self._sorted[source] if source < len(self.ids) else np.zeros(0, np.int64)
        if not known.size:
            return np.zeros(ids.shape, bool)
        at = np.searchsorted(known, ids)
        return known[np.minimum(at, known.size - 1)] == ids

    @cached_property
    def _members(self) -> frozenset[tuple[int, int]]:
        return frozenset(self.pairs())

    @cached_property
    def _sorted(self) -> list[NDArray[np.int64]]:
        return [np.array(ids, np.int64) for ids in self.ids]

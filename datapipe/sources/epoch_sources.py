"""Sources whose items differ from epoch to epoch."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from datapipe.order.streams import Shuffle
from formats.errors import Misuse
from formats.source import Batch, Source


class EpochSource(Source):
    """A source with equally many items in every epoch, which may differ from epoch to epoch."""

    @property
    def varies(self) -> bool:
        """Whether items can differ from epoch to epoch."""
        return True

    @abc.abstractmethod
    def read_epochs(self, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Item `items[i]` of epoch `epochs[i]`, int64[n] each, in that order; see `Source.read`."""

    @final
    def read(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """See `Source.read`; for items that are the same in every epoch.

        Raises:
          Misuse: they are not, so that the epoch must be given: see `read_epochs`.
        """
        if self.varies:
            raise Misuse(
                f"{self!r:.200} has other items in every epoch: say which epoch, with "
                "read_epochs(items, epochs); a pipeline does so by itself, and no index can be made"
            )
        items = np.asarray(indices)
        return self.read_epochs(items, np.zeros(items.shape, np.int64))


class OrderedSource(EpochSource):
    """An `EpochSource` that shuffles itself: a plan serves its items in their own order."""

    @abc.abstractmethod
    def shuffled(self, shuffle: Shuffle, seed: int, number: int, window: int) -> OrderedSource:
        """This source in the order of that shuffle.

        Args:
          number: of the source: sources under one seed get different orders.
          window: blocks that are shuffled together; for "blocks".

        Raises:
          Misuse: there is no such order.
        """


def varies(source: Source) -> bool:
    """Whether items of a source can differ from epoch to epoch."""
    return isinstance(source, EpochSource) and source.varies


def keys(source: Source, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each item of an epoch, equal only for what reads the same; int64[n].

    The item itself or, if items differ from epoch to epoch, its number through all epochs.
    """
    return epochs * len(source) + items if varies(source) else items


def read(source: Source, wanted: NDArray[np.int64]) -> Batch:
    """The items of these `keys`, int64[n]; see `Source.read`."""
    if isinstance(source, EpochSource) and source.varies:
        epochs, items = np.divmod(wanted, len(source))
        return source.read_epochs(items, epochs)
    return source.read(wanted)

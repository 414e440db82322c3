"""Sources whose items are other ones in every epoch."""

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
    """A source with as many items in every epoch, which the epoch decides as well."""

    @property
    def varies(self) -> bool:
        """Whether an item can be another one in another epoch."""
        return True

    @abc.abstractmethod
    def read_epochs(self, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """Item `items[i]` of epoch `epochs[i]`, int64[n] each, in that order; see `Source.read`."""

    @final
    def read(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """Items that are the same in every epoch; see `Source.read`.

        Raises:
          Misuse: they are not: whoever asks has to say of which epoch.
        """
        if self.varies:
            raise Misuse(
                f"{self!r:.200} has other items in every epoch: say which epoch, with "
                "read_epochs(items, epochs); a pipeline does so by itself, and no index can be made"
            )
        items = np.asarray(indices)
        return self.read_epochs(items, np.zeros(items.shape, np.int64))


class OrderedSource(EpochSource):
    """One with an order of its own in each epoch, which is served as it stands."""

    @abc.abstractmethod
    def shuffled(self, shuffle: Shuffle, seed: int, number: int, window: int) -> OrderedSource:
        """The same with that order in its epochs.

        Args:
          number: tells apart sources under one seed.
          window: blocks that are shuffled together; for "blocks".
        """


def varies(source: Source) -> bool:
    """Whether an item of a source can be another one in another epoch."""
    return isinstance(source, EpochSource) and source.varies


def keys(source: Source, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each item to read, different where they are; int64[n].

    The item itself or, where the epoch decides what it is, its number through all epochs.
    """
    return epochs * len(source) + items if varies(source) else items


def read(source: Source, wanted: NDArray[np.int64]) -> Batch:
    """What these keys, int64[n], name; see `Source.read`."""
    if isinstance(source, EpochSource) and source.varies:
        epochs, items = np.divmod(wanted, len(source))
        return source.read_epochs(items, epochs)
    return source.read(wanted)

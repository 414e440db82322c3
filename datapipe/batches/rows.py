"""Where the rows of a batch come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe.sources import epoch_sources as by_epoch

if TYPE_CHECKING:
    from formats.source import Source


class Rows(NamedTuple):
    """Some rows; int64[k] each."""

    examples: NDArray[np.int64]
    sources: NDArray[np.int64]
    epochs: NDArray[np.int64]
    records: NDArray[np.int64]

    @property
    def size(self) -> int:
        """How many rows."""
        return self.examples.size

    def take(self, which: Any) -> Rows:
        """Those of a mask or of indices."""
        examples, sources, epochs, records = self
        return Rows(examples[which], sources[which], epochs[which], records[which])

    def of(self, source: int) -> Rows:
        """Those of one source."""
        return self.take(self.sources == source)

    def ids(self, source: Source) -> NDArray[np.int64]:
        """Of rows of one source: the ids of their records, int64[k]."""
        return by_epoch.keys(source, self.records, self.epochs)

    def numbers(self) -> list[int]:
        """Of the sources that they come from, ascending."""
        return np.unique(self.sources).tolist()  # type: ignore[no-any-return]

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Those of all of them, one behind the other."""
        return Rows(*(np.concatenate(each) for each in zip(*parts, strict=True)))

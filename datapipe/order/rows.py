"""Where the rows of batches come from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    """Some examples, and where they come from; int64, of one shape."""

    examples: NDArray[np.int64]
    sources: NDArray[np.int64]
    """Their numbers."""
    epochs: NDArray[np.int64]
    """Of the source."""
    items: NDArray[np.int64]
    """Of the source: records, unless it is filtered or packed."""

    @property
    def size(self) -> int:
        """How many there are."""
        return self.examples.size

    def take(self, which: Any) -> Rows:
        """Those of a mask or of indices."""
        return Rows(*(column[which] for column in self))

    def of(self, source: int) -> Rows:
        """Those of one source."""
        return self.take(self.sources == source)

    def numbers(self) -> list[int]:
        """Of the sources that they come from, ascending."""
        return np.unique(self.sources).tolist()  # type: ignore[no-any-return]

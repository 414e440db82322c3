"""Where the rows of batches come from."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rows(NamedTuple):
    """Some examples, and where they come from; int64 columns of one shape."""

    examples: NDArray[np.int64]
    """Numbers of the examples in the run."""
    sources: NDArray[np.int64]
    """Number of the source of each."""
    epochs: NDArray[np.int64]
    """Epoch of that source."""
    items: NDArray[np.int64]
    """Item of that source: a record, unless it is filtered or packed."""

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.examples.size

    def take(self, which: Any) -> Rows:
        """The rows that a mask, a slice or indices select."""
        return Rows(*(column[which] for column in self))

    def of(self, source: int) -> Rows:
        """The rows of one source."""
        return self.take(self.sources == source)

    def numbers(self) -> list[int]:
        """The numbers of the sources that occur, ascending."""
        return np.unique(self.sources).tolist()  # type: ignore[no-any-return]

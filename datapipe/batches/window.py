"""The coming batches: read together, in the order of the files, and made one by one.

A `Window` is a few consecutive batches of a plan. When the first of them is made, the records of
all are read by one call, and each batch gets its part of them without another copy. A batch is a
pure function of plan, sources and transforms: it does not depend on its window.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from datapipe.batches.batch import Made, Recipe, make
from datapipe.batches.cost import Cost
from datapipe.batches.faults import Fault
from datapipe.batches.reading import ReadRows, read, split
from datapipe.batches.replacing import Replacing
from datapipe.batches.substitutes import Replaced
from datapipe.order.plan import Plan
from datapipe.order.rows import Rows
from formats.errors import BadRecord

AT_ONCE_S: Final = 2e-3
"""A window that takes less of the processor costs a trainer less than a thread to read it would."""
_WAITED: Final = 5
"""So many times as long it may take by the clock: threads wait for each other, too."""


class Window:
    """A few batches of a plan from a position on. Safe to call from several threads.

    Args:
      recipe: sources and transforms.
      plan: the order.
      next_example: the position of the first batch.
      count: number of batches; fewer at the end of the plan.
      rows: which rows of each batch to make, int64, ascending; None: all of them.
      replaced: the records that are replaced.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        next_example: int,
        count: int,
        rows: NDArray[np.int64] | None,
        replaced: Replaced,
    ) -> None:
        self._recipe = recipe
        self._plan = plan
        self._rows = rows
        self._replaced = replaced
        self._examples = plan.examples(next_example, count)
        self._lock = threading.Lock()
        self._shares: list[tuple[Rows, ReadRows | None]] | None = None
        self._is_quick = False

    @property
    def count(self) -> int:
        """Number of batches."""
        return len(self._examples)

    def position_after(self, index: int) -> int:
        """The position when batch `index` is delivered."""
        return int(self._examples[index][-1]) + 1

    def is_at_hand(self, index: int) -> bool:
        """Whether batch `index` is read, and making it takes less time than a thread is worth."""
        if self._shares is None or self._shares[index][1] is None:
            return False
        return self._recipe.only_reads

    @property
    def was_quick(self) -> bool:
        """Whether making all of it took less time than a thread is worth."""
        return self._is_quick and self._recipe.only_reads

    def batch(self, index: int) -> Made:
        """Batch `index` of the window. Ask once: the caller owns its arrays.

        Raises:
          BadRecord: a record of *this* batch is bad and not to be replaced.
          Whatever `make` raises.
        """
        cost = Cost()
        with self._lock:
            if self._shares is None:
                begun = time.thread_time()
                with cost.of("reading"):
                    self._shares = self._read()
                worked_s = time.thread_time() - begun
                self._is_quick = worked_s < AT_ONCE_S and cost.reading_s < _WAITED * AT_ONCE_S
        planned, done = self._shares[index]
        try:
            return make(self._recipe, planned, self._replaced, done, cost)
        except StopIteration as error:  # from a function of the user: it would look like the end
            raise RuntimeError("a function of the pipeline raised StopIteration") from error

    def holds(self, index: int, faults: Sequence[Fault], replaced: Replaced) -> bool:
        """Whether batch `index`, as it was made, is right if these records are replaced.

        `faults` are the bad records that were found in it. Records that counted as good when it was
        made may be in `replaced` by now, in their own places or as substitutes.
        """
        if replaced is self._replaced:
            return True
        planned = self._located(self._examples[index : index + 1])
        found = [fault.pair for fault in faults]
        recipe = self._recipe
        try:
            then, now = (
                Replacing(recipe.sources, recipe.tolerance, each.union(found)).rows(planned)
                for each in (self._replaced, replaced)
            )
        except BadRecord:  # nothing can stand in for one of them any more
            return False
        return np.array_equal(then.items, now.items)

    def _read(self) -> list[tuple[Rows, ReadRows | None]]:
        """The rows of each batch, and what was read for it.

        None if reading failed: each batch then reads for itself, and only those at fault raise.
        """
        whole = self._located(self._examples)
        planned = self._cut(whole)
        recipe = self._recipe
        try:
            replacing = Replacing(recipe.sources, recipe.tolerance, self._replaced)
            rows = replacing.rows(whole)
            reads = read(recipe.sources, rows)
        except Exception:
            return [(batch, None) for batch in planned]
        parts = planned if rows is whole else self._cut(rows)
        return list(zip(planned, split(recipe.sources, parts, reads), strict=True))

    def _located(self, batches: Sequence[NDArray[np.int64]]) -> Rows:
        """The rows of batches, one batch after the other."""
        if self._rows is not None:
            batches = [batch[self._rows] for batch in batches]
        examples = np.concatenate(batches)
        return self._plan.order.locate(examples)

    def _cut(self, rows: Rows) -> list[Rows]:
        """These rows by batch."""
        sizes = [len(each if self._rows is None else self._rows) for each in self._examples]
        bounds = itertools.pairwise(itertools.accumulate(sizes, initial=0))
        return [rows.take(slice(*ends)) for ends in bounds]

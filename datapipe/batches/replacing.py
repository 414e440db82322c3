"""The bad records that come up while one batch is made, and its rows without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from datapipe.batches.faults import Fault, Tolerance, too_many
from datapipe.batches.substitutes import CANDIDATES, Replaced, candidates, ids_of
from datapipe.order.rows import Rows
from formats.errors import BadRecord

if TYPE_CHECKING:
    from formats.source import Source


class Replacing:
    """The bad records of one batch. For one thread.

    Args:
      sources: of the pipeline.
      tolerance: what becomes of bad records that are found.
      known: records that are replaced whatever the policy says.
    """

    def __init__(self, sources: Sequence[Source], tolerance: Tolerance, known: Replaced) -> None:
        self._sources = sources
        self._tolerance = tolerance
        self._known = known
        self._found: dict[tuple[int, int], Fault] = {}

    @property
    def found(self) -> tuple[Fault, ...]:
        """The bad records that were found and not known before."""
        return tuple(self._found.values())

    def told(self, rows: Rows, row: int, what: str, reason: Exception) -> str:
        """A note on what went wrong with a row by no fault of its record."""
        fault = self._fault(rows, row, what, reason)
        return f"{fault}: mend the function, or leave it out with {_skip(fault.example)}"

    def note(self, rows: Rows, row: int, what: str, reason: Exception) -> None:
        """Takes down that the record of a row is bad.

        Raises:
          BadRecord: it is not to be replaced, or there are too many; `reason` is its cause.
        """
        fault = self._fault(rows, row, what, reason)
        if self._tolerance.policy == "raise":
            raise fault.error(self._cure(fault.example)) from reason
        self._found[fault.pair] = fault
        if len(self._known) + len(self._found) > self._tolerance.limit:
            raise too_many(len(self._known), self.found, self._tolerance.limit) from reason

    def rows(self, planned: Rows) -> Rows:
        """The rows, with substitutes for all records that are known or found to be bad.

        Raises:
          BadRecord: there is no substitute.
        """
        if not len(self._known) and not self._found:
            return planned
        items = planned.items.copy()
        for number in planned.numbers():
            there = np.flatnonzero(planned.sources == number)
            ids = ids_of(self._sources[number], planned.take(there))
            for at in np.flatnonzero(self._bad(number, ids)).tolist():
                row = int(there[at])
                items[row] = self._substitute(planned, row, int(ids[at]))
        return planned._replace(items=items)

    def _bad(self, number: int, ids: np.ndarray) -> np.ndarray:
        bad = self._known.mask(number, ids)
        new = [id for source, id in self._found if source == number]
        return bad | np.isin(ids, new) if new else bad

    def _substitute(self, planned: Rows, row: int, id: int) -> int:
        number = int(planned.sources[row])
        source = self._sources[number]
        one = planned.take([row])
        for item in candidates(number, id, len(source)):
            ids = ids_of(source, one._replace(items=np.array([item], np.int64)))
            if not self._bad(number, ids)[0]:
                return item
        record = int(planned.items[row])
        raise BadRecord(
            f"record {record} ({source.where(record)}) is bad, and so are all {CANDIDATES} records "
            "that could stand in for it: mend the source, or the .map that fails",
            index=record,
        )

    def _fault(self, rows: Rows, row: int, what: str, reason: Exception) -> Fault:
        number, record = int(rows.sources[row]), int(rows.items[row])
        source = self._sources[number]
        told = reason if isinstance(reason, BadRecord) else BadRecord("")
        return Fault(
            source=number,
            id=int(ids_of(source, rows.take([row]))[0]),
            record=record,
            where=source.where(record),
            file=told.file,
            position=told.position,
            example=int(rows.examples[row]),
            epoch=int(rows.epochs[row]),
            what=f"{what}: {type(reason).__name__}: {reason}",
        )

    def _cure(self, example: int) -> str:
        skip = _skip(example)
        if self._tolerance.policy == "replace":
            return f"mend it, or leave it out with {skip}"
        return (
            f"mend it, leave it out with {skip}, or let another record take its place with "
            'Pipeline(..., on_bad_record="replace")'
        )


def _skip(example: int) -> str:
    return f"iterator.skip(iterator.plan.addresses([({example}, {example + 1})]))"

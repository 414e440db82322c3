"""The coming batches: read together, in the order of the files, and made one by one.

A `Window` is a few consecutive batches of a plan. Their records are read by one call, sorted and
without repeats, when the first of the batches is made; each batch then takes its own. A batch is a
pure function of plan, source and transforms: which window it is in does not change it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe.plan import Plan
from datapipe.stack import objects, stack
from datapipe.transform import Transform, generator
from formats.errors import BadRecord, Damaged, DataError, Misuse

if TYPE_CHECKING:
    from formats.source import Batch, Source


@dataclass(frozen=True)
class Recipe:
    """What to read and what to do to it."""

    source: Source
    transforms: tuple[Transform, ...]
    seed: int


class _Rows(NamedTuple):
    """Where the rows of one batch come from; int64[k] each."""

    examples: NDArray[np.int64]
    epochs: NDArray[np.int64]
    records: NDArray[np.int64]


class _Read(NamedTuple):
    """Records as read: `raw[i]` is record `wanted[i]`; `wanted` is sorted."""

    wanted: NDArray[np.int64]
    raw: Batch


class Window:
    """`count` batches of a plan from a position on. Safe to call from several threads.

    Args:
      recipe: source and transforms.
      plan: the order.
      next_example: the position of the first batch.
      count: number of batches; the plan must have that many left.
      rows: which rows of each batch to make, int64, ascending; None: all of them.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        next_example: int,
        count: int,
        rows: NDArray[np.int64] | None,
    ) -> None:
        self.count = count
        self._recipe = recipe
        self._plan = plan
        self._next_example = next_example
        self._rows = rows
        self._lock = threading.Lock()
        self._batches: list[_Rows] | None = None
        self._read: _Read | None = None

    def batch(self, index: int) -> Any:
        """Batch `index` of the window, made anew at each call.

        Raises:
          BadRecord: a record of *this* batch cannot be read or mapped.
        """
        with self._lock:
            if self._batches is None:
                self._batches = self._locate()
                self._read = self._read_together(self._batches)
        rows = self._batches[index]
        return _make(self._recipe, rows, self._read or _read_alone(self._recipe.source, rows))

    def _locate(self) -> list[_Rows]:
        examples = self._plan.examples(self._next_example, self.count)
        size = self._plan.batch_size
        batches = [examples[start : start + size] for start in range(0, examples.size, size)]
        if self._rows is not None:
            batches = [batch[self._rows] for batch in batches]
        bounds = np.cumsum([batch.size for batch in batches])[:-1]
        located = self._plan.locate(np.concatenate(batches))
        epochs, records = np.split(located.epochs, bounds), np.split(located.records, bounds)
        return [_Rows(*parts) for parts in zip(batches, epochs, records, strict=True)]

    def _read_together(self, batches: Sequence[_Rows]) -> _Read | None:
        """None where that failed: each batch then reads alone, and the one at fault says so."""
        try:
            return _read(self._recipe.source, np.concatenate([rows.records for rows in batches]))
        except Exception:
            return None


# -- reading ---------------------------------------------------------------------------------------


def _read(source: Source, records: NDArray[np.int64]) -> _Read:
    wanted = np.unique(records)
    raw = source.read(wanted)
    lengths = {len(raw)} if isinstance(raw, list) else {len(column) for column in raw.values()}
    if lengths != {wanted.size}:
        raise Misuse(
            f"{type(source).__name__}.read was asked for {wanted.size} records and returned "
            f"{sorted(lengths)}: a source returns what it is asked for, or raises"
        )
    return _Read(wanted, raw)


def _read_alone(source: Source, rows: _Rows) -> _Read:
    try:
        return _read(source, rows.records)
    except Exception as error:
        blamed = _blame(source, rows, error)
        if blamed is None:
            raise
        raise blamed from blamed.__cause__


def _blame(source: Source, rows: _Rows, error: Exception) -> BadRecord | None:
    """The record at fault for a read that failed, as an error caused by that of the source."""
    if isinstance(error, BadRecord) and error.index in rows.records:
        return _bad_record(source, rows, error.index, "cannot be read", error)
    if not _may_be_one_record(error):
        return None
    for record in np.unique(rows.records).tolist():
        try:
            source.read(np.array([record], np.int64))
        except Exception as found:
            return _bad_record(source, rows, record, "cannot be read", found)
    return None


def _may_be_one_record(error: Exception) -> bool:
    """A store that does not answer, or a call that is wrong, is no fault of a record."""
    return not isinstance(error, DataError) or isinstance(error, BadRecord | Damaged)


def _bad_record(
    source: Source, rows: _Rows, record: int, what: str, reason: Exception
) -> BadRecord:
    row = int(np.flatnonzero(rows.records == record)[0])
    example = int(rows.examples[row])
    bad = BadRecord(
        f"record {record} ({source.where(record)}) {what}: {type(reason).__name__}: {reason}. "
        f"It is example {example}, in epoch {int(rows.epochs[row])}: mend it, or leave it out "
        f"with iterator.skip([({example}, {example + 1})])",
        index=record,
        file=getattr(reason, "file", ""),
        position=getattr(reason, "position", -1),
    )
    bad.__cause__ = reason
    return bad


# -- making ----------------------------------------------------------------------------------------


def _make(recipe: Recipe, rows: _Rows, read: _Read) -> Any:
    """One batch from the records that were read."""
    at = np.searchsorted(read.wanted, rows.records)
    each = [transform for transform in recipe.transforms if transform.kind != "map_batch"]
    if each:
        examples = [_example(recipe, each, rows, row, read, at) for row in range(at.size)]
        names = [f"record {record}" for record in rows.records.tolist()]
        batch = stack(examples, names)
    else:
        batch = _take(read.raw, at)
    for transform in recipe.transforms[len(each) :]:
        try:
            batch = transform.fn(batch)
        except Exception as error:
            first, last = int(rows.examples[0]), int(rows.examples[-1])
            error.add_note(f"in .{transform.label} of the batch of examples {first} to {last}")
            raise
    return batch


def _example(
    recipe: Recipe,
    transforms: Sequence[Transform],
    rows: _Rows,
    row: int,
    read: _Read,
    at: NDArray[np.int64],
) -> Any:
    """One record through the functions of examples."""
    place = int(at[row])
    value: Any
    if isinstance(read.raw, list):
        value = read.raw[place]
    else:
        value = {name: column[place] for name, column in read.raw.items()}
    epoch, record = int(rows.epochs[row]), int(rows.records[row])
    for position, transform in enumerate(transforms):
        try:
            if transform.kind == "map":
                value = transform.fn(value)
            else:
                rng = generator(recipe.seed, epoch, record, position)
                value = transform.fn(value, rng)
        except Exception as error:
            what = f"fails in .{transform.label}"
            raise _bad_record(recipe.source, rows, record, what, error) from error
    return value


def _take(raw: Batch, at: NDArray[np.int64]) -> Any:
    """The rows of a batch where no function of examples makes them; fresh arrays."""
    if isinstance(raw, list):
        return objects(raw[place] for place in at.tolist())
    return {name: _column(column, at) for name, column in raw.items()}


def _column(column: Any, at: NDArray[np.int64]) -> NDArray[Any]:
    if isinstance(column, np.ndarray):
        return column[at]
    return objects(column[place] for place in at.tolist())

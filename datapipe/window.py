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

from datapipe import epochs as by_epoch
from datapipe.plan import Plan
from datapipe.stack import objects, stack
from datapipe.transform import Transform, generator
from formats.errors import BadRecord, Damaged, DataError, Mismatch, Misuse

if TYPE_CHECKING:
    from formats.source import Batch, Source


@dataclass(frozen=True)
class Recipe:
    """What to read and what to do to it."""

    sources: tuple[Source, ...]
    transforms: tuple[Transform, ...]
    seed: int


class _Rows(NamedTuple):
    """Where the rows of one batch come from; int64[k] each."""

    examples: NDArray[np.int64]
    sources: NDArray[np.int64]
    epochs: NDArray[np.int64]
    records: NDArray[np.int64]

    def of(self, source: int) -> _Rows:
        """Those of one source."""
        return _Rows(*(each[self.sources == source] for each in self))


class _Read(NamedTuple):
    """Records of one source as read: `raw[i]` is that of key `wanted[i]`; `wanted` is sorted."""

    wanted: NDArray[np.int64]
    raw: Batch


_Reads = dict[int, _Read]
"""By the number of the source."""


class Window:
    """A few batches of a plan from a position on. Safe to call from several threads.

    Args:
      recipe: sources and transforms.
      plan: the order.
      next_example: the position of the first batch.
      count: number of batches; fewer at the end of the plan.
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
        self._recipe = recipe
        self._plan = plan
        self._rows = rows
        self._examples = plan.examples(next_example, count)
        self._lock = threading.Lock()
        self._batches: list[_Rows] | None = None
        self._reads: _Reads | None = None

    @property
    def count(self) -> int:
        """Number of batches."""
        return len(self._examples)

    def position_after(self, index: int) -> int:
        """The position when batch `index` is delivered."""
        return int(self._examples[index][-1]) + 1

    def batch(self, index: int) -> Any:
        """Batch `index` of the window, made anew at each call.

        Raises:
          BadRecord: a record of *this* batch cannot be read or mapped.
        """
        with self._lock:
            if self._batches is None:
                self._batches = self._locate()
                self._reads = self._read_together(self._batches)
        rows = self._batches[index]
        return _make(self._recipe, rows, self._reads or _read_alone(self._recipe, rows))

    def _locate(self) -> list[_Rows]:
        batches = self._examples
        if self._rows is not None:
            batches = [batch[self._rows] for batch in batches]
        bounds = np.cumsum([batch.size for batch in batches])[:-1]
        located = self._plan.locate(np.concatenate(batches))
        parts = (np.split(each, bounds) for each in located)
        return [_Rows(*each) for each in zip(batches, *parts, strict=True)]

    def _read_together(self, batches: Sequence[_Rows]) -> _Reads | None:
        """None where that failed: each batch then reads alone, and the one at fault says so."""
        rows = _Rows(*(np.concatenate(each) for each in zip(*batches, strict=True)))
        try:
            return _read(self._recipe, rows)
        except Exception:
            return None


# -- reading ---------------------------------------------------------------------------------------


def _read(recipe: Recipe, rows: _Rows) -> _Reads:
    if len(recipe.sources) == 1:
        return {0: _read_source(recipe.sources[0], rows)}
    return {
        number: _read_source(recipe.sources[number], rows.of(number))
        for number in np.unique(rows.sources).tolist()
    }


def _read_source(source: Source, rows: _Rows) -> _Read:
    wanted = np.unique(by_epoch.keys(source, rows.records, rows.epochs))
    raw = by_epoch.read(source, wanted)
    lengths = {len(raw)} if isinstance(raw, list) else {len(column) for column in raw.values()}
    if lengths != {wanted.size}:
        raise Misuse(
            f"{type(source).__name__}.read was asked for {wanted.size} records and returned "
            f"{sorted(lengths)}: a source returns what it is asked for, or raises"
        )
    return _Read(wanted, raw)


def _read_alone(recipe: Recipe, rows: _Rows) -> _Reads:
    found: _Reads = {}
    for number in np.unique(rows.sources).tolist():
        some = rows.of(number)
        try:
            found[number] = _read_source(recipe.sources[number], some)
        except Exception as error:
            blamed = _blame(recipe.sources[number], some, error)
            if blamed is None:
                raise
            raise blamed from blamed.__cause__
    return found


def _blame(source: Source, rows: _Rows, error: Exception) -> BadRecord | None:
    """The record at fault for a read that failed, as an error caused by that of the source."""
    if isinstance(error, BadRecord) and error.index in rows.records:
        return _bad_record(source, rows, error.index, "cannot be read", error)
    if not _may_be_one_record(error):
        return None
    _, firsts = np.unique(by_epoch.keys(source, rows.records, rows.epochs), return_index=True)
    for row in firsts.tolist():
        try:
            _read_source(source, _Rows(*(each[row : row + 1] for each in rows)))
        except Exception as found:
            return _bad_row(source, rows, row, "cannot be read", found)
    return None


def _may_be_one_record(error: Exception) -> bool:
    """A store that does not answer, or a call that is wrong, is no fault of a record."""
    return not isinstance(error, DataError) or isinstance(error, BadRecord | Damaged)


def _bad_record(
    source: Source, rows: _Rows, record: int, what: str, reason: Exception
) -> BadRecord:
    row = int(np.flatnonzero(rows.records == record)[0])
    return _bad_row(source, rows, row, what, reason)


def _bad_row(source: Source, rows: _Rows, row: int, what: str, reason: Exception) -> BadRecord:
    example, record = int(rows.examples[row]), int(rows.records[row])
    bad = BadRecord(
        f"record {record} ({source.where(record)}) {what}: {type(reason).__name__}: {reason}. "
        f"It is example {example}, in epoch {int(rows.epochs[row])}: mend it, or leave it out "
        f"with iterator.skip(iterator.plan.addresses([({example}, {example + 1})]))",
        index=record,
        file=getattr(reason, "file", ""),
        position=getattr(reason, "position", -1),
    )
    bad.__cause__ = reason
    return bad


# -- making ----------------------------------------------------------------------------------------


def _make(recipe: Recipe, rows: _Rows, reads: _Reads) -> Any:
    """One batch from the records that were read."""
    at = np.empty(rows.records.size, np.int64)
    for number, read in reads.items():
        there = rows.sources == number
        keys = by_epoch.keys(recipe.sources[number], rows.records[there], rows.epochs[there])
        at[there] = np.searchsorted(read.wanted, keys)
    each = [transform for transform in recipe.transforms if transform.kind != "map_batch"]
    if each:
        examples = [_example(recipe, each, rows, row, reads, at) for row in range(at.size)]
        names = [f"record {record}" for record in rows.records.tolist()]
        batch = stack(examples, names)
    elif len(recipe.sources) == 1:
        batch = _take(reads[0].raw, at)
    else:
        batch = _take_mixed(reads, rows.sources, at)
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
    reads: _Reads,
    at: NDArray[np.int64],
) -> Any:
    """One record through the functions of examples."""
    place, number = int(at[row]), int(rows.sources[row])
    raw = reads[number].raw
    value: Any
    if isinstance(raw, list):
        value = raw[place]
    else:
        value = {name: column[place] for name, column in raw.items()}
    epoch, record = int(rows.epochs[row]), int(rows.records[row])
    for position, transform in enumerate(transforms):
        try:
            if transform.kind == "map":
                value = transform.fn(value)
            else:
                rng = generator(recipe.seed, epoch, record, position, number)
                value = transform.fn(value, rng)
        except Exception as error:
            what = f"fails in .{transform.label}"
            raise _bad_row(recipe.sources[number], rows, row, what, error) from error
    return value


def _take_mixed(reads: _Reads, sources: NDArray[np.int64], at: NDArray[np.int64]) -> Any:
    """The rows of a batch of several sources, which must have the same columns."""
    numbers = sorted(set(sources.tolist()))
    parts = {number: _take(reads[number].raw, at[sources == number]) for number in numbers}
    forms = {number: _form(part) for number, part in parts.items()}
    for number, form in forms.items():
        if form != forms[numbers[0]]:
            raise Mismatch(
                "the sources do not fit in one batch; make their examples the same in .map, or "
                "read the same columns",
                [f"source {numbers[0]}: {forms[numbers[0]]}", f"source {number}: {form}"],
            )
    order = np.argsort(np.concatenate([np.flatnonzero(sources == n) for n in numbers]))
    first = parts[numbers[0]]
    if not isinstance(first, dict):
        return np.concatenate([parts[number] for number in numbers])[order]
    return {
        name: np.concatenate([parts[number][name] for number in numbers])[order] for name in first
    }


def _form(part: Any) -> str:
    if isinstance(part, dict):
        return ", ".join(f"{k}: {v.dtype}{list(v.shape[1:])}" for k, v in part.items())
    return "records of bytes"


def _take(raw: Batch, at: NDArray[np.int64]) -> Any:
    """The rows of a batch where no function of examples makes them; fresh arrays."""
    if isinstance(raw, list):
        return objects(raw[place] for place in at.tolist())
    return {name: _column(column, at) for name, column in raw.items()}


def _column(column: Any, at: NDArray[np.int64]) -> NDArray[Any]:
    if isinstance(column, np.ndarray):
        return column[at]
    return objects(column[place] for place in at.tolist())

"""Reading the records of rows: by one call of each source, in the order of the files."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe.batches.replacing import Replacing
from datapipe.batches.substitutes import ids_of
from datapipe.order.rows import Rows
from datapipe.sources import epoch_sources as by_epoch
from formats.errors import BadRecord, Misuse, is_of_a_record

if TYPE_CHECKING:
    from formats.source import Batch, Source


Reads = dict[int, "Batch"]
"""By number of the source: the records of its rows, in the order of the rows."""


def read(sources: Sequence[Source], rows: Rows) -> Reads:
    """The records of rows, by one call of each source.

    Raises:
      Misuse: a source returns another number of records than it was asked for.
      Whatever a source raises.
    """
    return {number: _read_source(sources[number], part) for number, part in _parts(sources, rows)}


def split(sources: Sequence[Source], parts: Sequence[Rows], reads: Reads) -> list[ReadRows]:
    """What was read for the rows of all `parts` together, by part, without a copy."""
    found: list[Reads] = [{} for _ in parts]
    for number, raw in reads.items():
        if len(sources) == 1:
            counts = [part.size for part in parts]
        else:
            counts = [int(np.count_nonzero(part.sources == number)) for part in parts]
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        for share, (start, stop) in zip(found, bounds, strict=True):
            if start < stop:
                share[number] = _cut(raw, start, stop)
    return [ReadRows(*each) for each in zip(parts, found, strict=True)]


def _cut(raw: Batch, start: int, stop: int) -> Batch:
    if isinstance(raw, list):
        return raw[start:stop]
    return {name: column[start:stop] for name, column in raw.items()}


def _parts(sources: Sequence[Source], rows: Rows) -> list[tuple[int, Rows]]:
    """The rows of each source."""
    if len(sources) == 1:
        return [(0, rows)]
    return [(number, rows.of(number)) for number in rows.numbers()]


class ReadRows(NamedTuple):
    """Rows whose records were read."""

    rows: Rows
    reads: Reads


def read_or_replace(sources: Sequence[Source], planned: Rows, replacing: Replacing) -> ReadRows:
    """The records of rows, with substitutes for those that cannot be read.

    Raises:
      BadRecord: see `Replacing.note`.
      Whatever a source raises that is no fault of a record.
    """
    while True:
        rows = replacing.rows(planned)
        found: Reads = {}
        parts = _parts(sources, rows)
        for number, part in parts:
            try:
                found[number] = _read_source(sources[number], part)
            except Exception as error:
                bad = False
                for row, reason in _unreadable(sources[number], part, error):
                    replacing.note(part, row, "cannot be read", reason)
                    bad = True
                if not bad:
                    raise  # each of them alone can be read
        if len(found) == len(parts):
            return ReadRows(rows, found)


def places(sources: Sequence[Source], done: ReadRows) -> NDArray[np.int64]:
    """Of each row, where its record is among those read of its source; int64[rows]."""
    if len(sources) == 1:
        return np.arange(done.rows.size)
    at = np.empty(done.rows.size, np.int64)
    for number in done.reads:
        there = done.rows.sources == number
        at[there] = np.arange(np.count_nonzero(there))
    return at


def _read_source(source: Source, rows: Rows) -> Batch:
    ids = ids_of(source, rows)
    wanted, back = ids, None
    crosses_epochs = bool(rows.size) and rows.epochs[0] != rows.epochs[-1]  # so records may repeat
    if crosses_epochs and not has_trees(source):
        wanted, back = np.unique(ids, return_inverse=True)
    raw = by_epoch.read(source, wanted)
    lengths = {len(raw)} if isinstance(raw, list) else {len(column) for column in raw.values()}
    if lengths != {wanted.size}:
        raise Misuse(
            f"{type(source).__name__}.read was asked for {wanted.size} records and returned "
            f"{sorted(lengths)}: a source returns what it is asked for, or raises"
        )
    return raw if back is None else _repeated(raw, back)


def has_trees(source: Source) -> bool:
    """Whether its examples are trees of any form, of which only the source can make a copy."""
    spec = getattr(source, "spec", None)
    return spec is not None and spec.trees


def _repeated(raw: Batch, at: NDArray[np.int64]) -> Batch:
    """Records `at`, int64[n], of `raw`; repeats are copies, so that each may change in place."""
    if isinstance(raw, list):
        return _each(raw, at)
    return {
        name: column[at] if isinstance(column, np.ndarray) else _each(column, at)
        for name, column in raw.items()
    }


def _each(values: list[Any], at: NDArray[np.int64]) -> list[Any]:
    found = [values[place] for place in at.tolist()]
    again = np.ones(at.size, np.bool_)
    again[np.unique(at, return_index=True)[1]] = False
    for row in np.flatnonzero(again).tolist():
        found[row] = _copied(found[row])
    return found


def _copied(value: Any) -> Any:
    copied = copy.deepcopy(value)
    if isinstance(value, np.ndarray):
        copied.flags.writeable = value.flags.writeable
    return copied


def _unreadable(source: Source, rows: Rows, error: Exception) -> Iterator[tuple[int, Exception]]:
    """The rows of one source that cannot be read, one for each record, and why.

    Raises:
      Exception: what the source raises that is no fault of a record.
    """
    if not is_of_a_record(error):
        raise error
    _, firsts = np.unique(ids_of(source, rows), return_index=True)
    parts = [(firsts, error)]  # rows that cannot be read together, and what that raises
    while parts:
        part, reason = parts.pop()
        named = _named(rows.take(part), reason)
        if named.size == 1 or part.size == 1:
            at = int(named[0]) if named.size == 1 else 0
            yield int(part[at]), reason
            rest = [np.delete(part, at)]
        else:
            rest = np.array_split(part, 2)
        for each in reversed(rest):
            if not each.size:
                continue
            try:
                _read_source(source, rows.take(each))
            except Exception as found:
                if not is_of_a_record(found):
                    raise
                parts.append((each, found))


def _named(rows: Rows, error: Exception) -> NDArray[np.int64]:
    """The rows of the record that an error says is bad."""
    index = error.index if isinstance(error, BadRecord) else -1
    return np.flatnonzero(rows.items == index)

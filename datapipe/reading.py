"""Reading the records of rows: by one call of each source, in the order of the files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe import epochs as by_epoch
from datapipe.faults import is_of_a_record
from datapipe.replacing import Replacing
from datapipe.rows import Rows
from formats.errors import BadRecord, Misuse

if TYPE_CHECKING:
    from formats.source import Batch, Source


class Read(NamedTuple):
    """Records of one source as read: `raw[i]` is that of id `wanted[i]`; `wanted` is sorted."""

    wanted: NDArray[np.int64]
    raw: Batch


Reads = dict[int, Read]
"""By the number of the source."""


def read(sources: Sequence[Source], rows: Rows) -> Reads:
    """The records of rows, each once.

    Raises:
      Misuse: a source returns another number than it is asked for; what a source raises.
    """
    if len(sources) == 1:
        return {0: _read_source(sources[0], rows)}
    return {number: _read_source(sources[number], rows.of(number)) for number in rows.numbers()}


class Readable(NamedTuple):
    """Rows whose records were read."""

    rows: Rows
    reads: Reads


def readable(sources: Sequence[Source], planned: Rows, replacing: Replacing) -> Readable:
    """The records of rows, with substitutes for those that cannot be read.

    Raises:
      BadRecord: as `Replacing.note`; what a source raises that is no fault of a record.
    """
    while True:
        rows = replacing.rows(planned)
        found: Reads = {}
        for number in rows.numbers():
            part = rows.of(number)
            try:
                found[number] = _read_source(sources[number], part)
            except Exception as error:
                bad = False
                for row, reason in _unreadable(sources[number], part, error):
                    replacing.note(part, row, "cannot be read", reason)
                    bad = True
                if not bad:
                    raise  # each for itself they can be read
        if len(found) == len(rows.numbers()):
            return Readable(rows, found)


def places(sources: Sequence[Source], done: Readable) -> NDArray[np.int64]:
    """Where in the `raw` of its source the record of each row is; int64[k]."""
    if len(sources) == 1:
        return np.searchsorted(done.reads[0].wanted, done.rows.ids(sources[0]))
    at = np.empty(done.rows.size, np.int64)
    for number, each in done.reads.items():
        there = done.rows.sources == number
        ids = done.rows.take(there).ids(sources[number])
        at[there] = np.searchsorted(each.wanted, ids)
    return at


def _read_source(source: Source, rows: Rows) -> Read:
    wanted = np.unique(rows.ids(source))
    raw = by_epoch.read(source, wanted)
    lengths = {len(raw)} if isinstance(raw, list) else {len(column) for column in raw.values()}
    if lengths != {wanted.size}:
        raise Misuse(
            f"{type(source).__name__}.read was asked for {wanted.size} records and returned "
            f"{sorted(lengths)}: a source returns what it is asked for, or raises"
        )
    return Read(wanted, raw)


def _unreadable(source: Source, rows: Rows, error: Exception) -> Iterator[tuple[int, Exception]]:
    """Rows of one source that cannot be read, one of each record, and why.

    Raises:
      Exception: what the source raises that is no fault of a record.
    """
    if not is_of_a_record(error):
        raise error
    _, firsts = np.unique(rows.ids(source), return_index=True)
    parts = [(firsts, error)]  # together these raise that
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
    return np.flatnonzero(rows.records == index)

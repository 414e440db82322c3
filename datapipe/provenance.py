"""From a batch to the records that it holds, and back: through plan, packing and filter.

Nothing is read: the plan and the indexes of filter and packing say all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe.integers import LIMIT, integer
from datapipe.order.rows import Rows
from datapipe.sources.pieces import Pieces
from datapipe.sources.views import ConcatenatedRows, Filtered, PackedRows
from formats.errors import Misuse

if TYPE_CHECKING:
    from datapipe.order.plan import Plan
    from formats.source import Source


class Held(NamedTuple):
    """What the rows of batches are made of, piece by piece in the order of the rows; int64[k] each.

    A row of a source that is not packed is one piece: the whole record, with length -1.
    """

    rows: NDArray[np.int64]  # counted from 0 through all batches that were asked for
    sources: NDArray[np.int64]  # number of the source
    epochs: NDArray[np.int64]
    records: NDArray[np.int64]  # of the source as it was given to the pipeline
    starts: NDArray[np.int64]  # the first token of the record that is in the piece
    lengths: NDArray[np.int64]  # tokens
    offsets: NDArray[np.int64]  # where the piece begins in its row


def held(sources: Sequence[Source], rows: Rows) -> Held:
    """What these rows of a plan are made of."""
    parts = []
    for number in np.unique(rows.sources).tolist():
        there = np.flatnonzero(rows.sources == number)
        epochs = rows.epochs[there]
        pieces = _pieces(sources[number], rows.items[there], epochs)
        parts.append(
            Held(
                rows=there[pieces.rows],
                sources=np.full(pieces.rows.size, number),
                epochs=epochs[pieces.rows],
                records=_beneath(sources[number], pieces.records),
                starts=pieces.starts,
                lengths=pieces.lengths,
                offsets=pieces.offsets,
            )
        )
    if not parts:
        return Held(*(np.zeros(0, np.int64) for _ in Held._fields))
    together = Held(*(np.concatenate(each) for each in zip(*parts, strict=True)))
    order = np.argsort(together.rows, kind="stable")
    return Held(*(each[order] for each in together))


def holding(
    source: Source, number: int, record: int, token: int | None, epochs: range, plan: Plan
) -> tuple[int, ...]:
    """The batches that hold a record of a source, or one token of it, in these epochs; ascending.

    Raises:
      Misuse: there is no such record or token, or the source is not packed and has no tokens.
    """
    packed = source if isinstance(source, PackedRows | ConcatenatedRows) else None
    inner = source if packed is None else packed.documents.source
    record = _above(inner, record)
    if record < 0:
        return ()
    if packed is None:
        if token is not None:
            raise Misuse("token: the source is not packed, ask for its records")
        return plan.batches(record, source=number, epochs=epochs)
    if token is not None:
        length = int(packed.documents.lengths.tokens[record])
        token = integer("a token", token, 0, length - 1)
    found: set[int] = set()
    for epoch in epochs:
        for item in _items(packed, record, token, epoch):
            found.update(plan.batches(item, source=number, epochs=range(epoch, epoch + 1)))
    return tuple(sorted(found))


def _pieces(source: Source, items: NDArray[np.int64], epochs: NDArray[np.int64]) -> Pieces:
    if isinstance(source, PackedRows | ConcatenatedRows):
        return source.pieces(items, epochs)
    zeros = np.zeros_like(items)
    return Pieces(np.arange(items.size), items, zeros, zeros - 1, zeros)


def _beneath(source: Source, records: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of records in the source as it was given, before any filter; int64[n]."""
    inner = source.documents.source if isinstance(source, PackedRows | ConcatenatedRows) else source
    return inner.kept.ids[records] if isinstance(inner, Filtered) else records


def _above(source: Source, record: int) -> int:
    """The number of a record after the filter; -1: it is not kept."""
    total = source.kept.records if isinstance(source, Filtered) else len(source)
    record = integer("a record", record, 0, min(total, LIMIT) - 1)
    return int(source.kept.items(record)) if isinstance(source, Filtered) else record


def _items(
    source: PackedRows | ConcatenatedRows, record: int, token: int | None, epoch: int
) -> list[int]:
    """The rows of an epoch that hold a document, or one token of it."""
    items = source.items(record, epoch)
    if token is None or not items.size:
        return items.tolist()
    pieces = source.pieces(items, np.full(items.size, epoch))
    starts = pieces.starts
    has = (pieces.records == record) & (starts <= token) & (token < starts + pieces.lengths)
    return items[pieces.rows[has]].tolist()

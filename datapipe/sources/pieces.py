"""Rows of a fixed number of tokens, made of stretches of documents.

Packing and concatenation say which stretches a row is made of (`Pieces`); `assemble` makes the
arrays once the documents are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from datapipe.integers import integer

CAPACITY_LIMIT: Final = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class Pieces:
    """What rows are made of, by row and by offset in the row; int64[k] each.

    The pieces of a row follow each other from its start; padding is at its end.

    rows: which row, from 0 on, ascending.
    records: which document.
    starts: the first token of the document that is in the piece.
    lengths: tokens, 1 or more.
    offsets: where the piece begins in its row.
    """

    rows: NDArray[np.int64]
    records: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    offsets: NDArray[np.int64]


def assemble(
    pieces: Pieces,
    shape: tuple[int, int],
    records: NDArray[np.int64],
    tokens: Sequence[NDArray[Any]],
    dtype: str,
    pad: int,
) -> dict[str, NDArray[Any]]:
    """The rows as arrays, [rows, capacity] each.

    Args:
      pieces: what the rows are made of; each piece lies within its document.
      shape: rows and capacity.
      records: int64[m], ascending: the documents that were read, among them all of `pieces`.
      tokens: of each of these documents, one array of one dimension, of `dtype`.
      dtype: of tokens.
      pad: what stands behind the last piece of a row.

    Returns:
      `tokens`; `segment_ids`, int32: 1 for the first piece of a row, 2 for the second, ..., 0 for
      padding; `positions`, int32: 0, 1, ... in each piece, 0 for padding. A piece that continues a
      document begins at 0 as well, since nothing in its row comes before it.
    """
    rows, capacity = shape
    used = np.bincount(pieces.rows, pieces.lengths, minlength=rows).astype(np.int64)
    counts = np.bincount(pieces.rows, minlength=rows)
    ends = np.cumsum(counts)
    segment = np.arange(1, pieces.rows.size + 1) - (ends - counts)[pieces.rows]
    # A row is its pieces and padding behind them: stretches that one call puts together.
    segments = np.insert(segment, ends, 0).astype(np.int32)
    lengths = np.insert(pieces.lengths, ends, capacity - used)
    at = np.searchsorted(records, pieces.records)
    places = zip(at.tolist(), pieces.starts.tolist(), strict=True)
    longest = int(lengths.max(initial=0))
    padding, ramp = np.full(longest, pad, dtype), np.arange(longest, dtype=np.int32)
    zeros = np.zeros(longest, np.int32)
    stretches, positions = [padding[:0]], [zeros[:0]]
    for segment_id, length in zip(segments.tolist(), lengths.tolist(), strict=True):
        if segment_id:
            i, start = next(places)
            stretches.append(tokens[i][start : start + length])
            positions.append(ramp[:length])
        elif length:
            stretches.append(padding[:length])
            positions.append(zeros[:length])
    return {
        "tokens": np.concatenate(stretches).reshape(shape),
        "segment_ids": np.repeat(segments, lengths).reshape(shape),
        "positions": np.concatenate(positions).reshape(shape),
    }


def checked_capacity(capacity: int) -> int:
    """Tokens of a row. Raises Misuse: not from 1 to 2^31 - 1."""
    return integer("capacity", capacity, 1, CAPACITY_LIMIT)


def ranges(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[first, first + 1, ..., first + count - 1]` for each pair, joined; int64[counts.sum()]."""
    before = np.cumsum(counts) - counts
    return np.repeat(firsts - before, counts) + np.arange(int(counts.sum()))

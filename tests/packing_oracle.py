"""Packing and concatenation by the slowest way there is, token by token."""

from __future__ import annotations

import numpy as np


def packed_by_hand(lengths, capacity, window, strategy):
    """Bins as lists of (document, start, length), by trying every bin in turn."""
    found = []
    for first in range(0, len(lengths), window):
        opened = []
        for document in range(first, min(first + window, len(lengths))):
            start = 0
            while start < lengths[document]:
                size = min(capacity, lengths[document] - start)
                rooms = [capacity - sum(piece[2] for piece in there) for there in opened]
                fitting = [b for b, room in enumerate(rooms) if room >= size]
                if not fitting:
                    opened.append([])
                    fitting, rooms = [len(opened) - 1], [*rooms, capacity]
                by_room = strategy == "best-fit"
                best = min(fitting, key=lambda b: (rooms[b] if by_room else 0, b))
                opened[best].append((document, start, size))
                start += size
        found += opened
    return found


def rows_by_hand(lengths, order, capacity, remainder):
    """Rows of an epoch with this order of documents, as lists of (document, start, length)."""
    tokens = [(d, k) for d in order for k in range(lengths[d])]
    rows = []
    for first in range(0, len(tokens), capacity):
        held = tokens[first : first + capacity]
        if len(held) < capacity and remainder == "drop":
            break
        row = []
        for document, token in held:
            if row and row[-1][0] == document:
                row[-1][2] += 1
            else:
                row.append([document, token, 1])
        rows.append([tuple(piece) for piece in row])
    return rows


def as_lists(pieces, rows):
    """Pieces as lists of (document, start, length) by row; their offsets are looked at."""
    found = [[] for _ in range(rows)]
    columns = (pieces.rows, pieces.records, pieces.starts, pieces.lengths, pieces.offsets)
    for row, *piece, offset in zip(*(each.tolist() for each in columns), strict=True):
        assert offset == sum(length for _, _, length in found[row])
        found[row].append(tuple(piece))
    return found


def as_row(pieces, documents, capacity, pad):
    """Tokens, segments and positions of one row, written out."""
    tokens, segments, positions = [], [], []
    for segment, (document, start, length) in enumerate(pieces, start=1):
        tokens += documents[document][start : start + length].tolist()
        segments += [segment] * length
        positions += range(length)
    rest = capacity - len(tokens)
    return {
        "tokens": tokens + [pad] * rest,
        "segment_ids": segments + [0] * rest,
        "positions": positions + [0] * rest,
    }


def stacked(rows, dtype):
    """Rows as a batch."""
    dtypes = {"tokens": dtype, "segment_ids": np.int32, "positions": np.int32}
    return {name: np.array([row[name] for row in rows], dtypes[name]) for name in dtypes}

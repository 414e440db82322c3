"""Where an image is cut for a store of objects: a pure function of its chunk table.

A chunk is one range of one object, so that the index can point at it.
"""

from __future__ import annotations

import itertools

import numpy as np

from ckpt.grid import CRC_BYTES, PAGE_BYTES, round_up
from ckpt.image import Header


def cuts(header: Header, limit_bytes: int | None) -> list[int]:
    """Offsets between chunks at which a new object begins; none without a limit.

    An object holds as much as fits into `limit_bytes`; a chunk above it has one for itself.
    """
    if limit_bytes is None or header.size_bytes <= limit_bytes:
        return []
    columns = header.columns
    ends = columns.offset.astype(np.int64) + columns.stored.astype(np.int64) + CRC_BYTES
    behind = round_up(int(ends.max(initial=PAGE_BYTES)), PAGE_BYTES)
    borders = np.unique(np.append(columns.offset.astype(np.int64), behind))
    borders = borders[(borders > 0) & (borders < header.size_bytes)]
    found, start = [], 0
    while header.size_bytes - start > limit_bytes:
        fitting = int(np.searchsorted(borders, start + limit_bytes, "right")) - 1
        if fitting < 0 or borders[fitting] <= start:
            fitting = int(np.searchsorted(borders, start, "right"))
            if fitting == len(borders):
                break
        start = int(borders[fitting])
        found.append(start)
    return found


def piece_name(image: str, start: int, stop: int) -> str:
    """The name of an object that holds the bytes `start` to `stop` of an image."""
    return f"{image}.bytes-{start}-{stop}"


def objects(header: Header, image: str, limit_bytes: int | None) -> list[tuple[int, str]]:
    """(first byte, name) of each object of an image; the image itself when images stay whole."""
    if limit_bytes is None:
        return [(0, image)]
    borders = [0, *cuts(header, limit_bytes), header.size_bytes]
    return [(start, piece_name(image, start, stop)) for start, stop in itertools.pairwise(borders)]

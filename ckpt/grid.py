"""Where chunks lie: in their array, as cells of a regular grid, and in an image. Pure.

A cell is a chunk's row-major position in the grid of its array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt.errors import Misuse, Unsupported

PAGE_BYTES = 4096
CRC_BYTES = 4
_ALIGNED_FROM_BYTES = 64 * 1024
_PACKED_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, eq=False)
class Places:
    """Where chunks go: first byte, length, and room up to the next chunk, all i64[n] in bytes."""

    offset: np.ndarray
    nbytes: np.ndarray
    room: np.ndarray


def cells_of(
    shape: tuple[int, ...],
    chunk: tuple[int, ...],
    start: tuple[int, ...],
    size: tuple[int, ...],
) -> np.ndarray:
    """Cells of the part at `start` of shape `size`: i64[n], in row-major order of that part.

    Raises `Unsupported` when the part is not made of whole chunks, `Misuse` when it leaves it.
    """
    part = f"the part at {start} of shape {size}"
    if not len(start) == len(size) == len(shape):
        raise Misuse(f"{part} has not the rank of the array {shape}")
    cells = np.zeros((), np.int64)
    for begin, length, step, whole in zip(start, size, chunk, shape, strict=True):
        if begin < 0 or length < 0 or begin + length > whole:
            raise Misuse(f"{part} leaves the array {shape}")
        if begin % step or length % step:
            raise Unsupported(
                f"{part} of the array {shape} is not made of whole chunks of {chunk}; "
                "shard the array evenly"
            )
        along = np.arange(begin // step, (begin + length) // step)
        cells = cells[..., None] * (whole // step) + along
    return cells.reshape(-1)


def coordinates(
    grids: Sequence[tuple[int, ...]], array: np.ndarray, cell: np.ndarray
) -> np.ndarray:
    """Cells as coordinates, i64[n, widest rank], zero beyond the rank of a row's own grid."""
    width = max(map(len, grids), default=0)
    found = np.zeros((len(cell), width), np.int64)
    rows = np.flatnonzero(cell)  # cell 0 is all zeros, and most small arrays have no other
    if len(rows) == 0:
        return found
    used, index = np.unique(array[rows], return_inverse=True)
    sizes = np.ones((len(used), width), np.int64)
    rank = np.empty(len(used), np.int64)
    for i, a in enumerate(used):
        rank[i] = len(grids[a])
        sizes[i, : rank[i]] = grids[a]
    rest = cell[rows].astype(np.int64)
    for axis in reversed(range(width)):
        rest, found[rows, axis] = np.divmod(rest, sizes[index, axis])
    return found


def repeated(array: np.ndarray, cell: np.ndarray) -> int | None:
    """The row of a chunk that stands there twice, if any."""
    order = np.lexsort((cell, array))
    same = (array[order][1:] == array[order][:-1]) & (cell[order][1:] == cell[order][:-1])
    return int(order[1:][same][0]) if same.any() else None


def is_range(chunk: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether each chunk is one contiguous range of a row-major array: 1, ..., 1, k, whole axes."""
    cut = [i for i, (c, s) in enumerate(zip(chunk, shape, strict=True)) if c != s]
    return not cut or all(n == 1 for n in chunk[: cut[-1]])


def alignment(nbytes: np.ndarray) -> np.ndarray:
    """What the first byte of chunks of these lengths is a multiple of."""
    return np.where(nbytes < _ALIGNED_FROM_BYTES, _PACKED_ALIGNMENT_BYTES, PAGE_BYTES)


def place_chunks(nbytes: np.ndarray) -> tuple[Places, int]:
    """Places for chunks of these lengths (i64[n] bytes), and the first byte behind them all.

    Small ones come first, packed; the others start at pages, for direct I/O.
    """
    step = alignment(nbytes)
    small = step < PAGE_BYTES
    room = round_up(nbytes + CRC_BYTES, step)
    offset = np.empty_like(room)
    offset[small] = PAGE_BYTES + np.cumsum(room[small]) - room[small]
    aligned_at = round_up(PAGE_BYTES + int(room[small].sum()), PAGE_BYTES)
    offset[~small] = aligned_at + np.cumsum(room[~small]) - room[~small]
    end = aligned_at + int(room[~small].sum())
    if small.any():  # the last packed chunk also owns the gap up to the page
        last = np.flatnonzero(small)[-1]
        room[last] = aligned_at - offset[last]
    return Places(offset, nbytes, room), end


def round_up(n: Any, step: Any) -> Any:
    """`n` (a number or an array) rounded up to a multiple of `step`."""
    return (n + step - 1) // step * step

"""Which parts of which chunks fill the boxes of an array that are wanted; pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.grid import is_range
from ckpt.placement import Box


@dataclass(frozen=True, slots=True)
class Use:
    """A part of a chunk that a box needs: number of the box, index in it, index in the chunk.

    `in_place`: it is the whole chunk, in one piece of the box's buffer.
    """

    box: int
    target: tuple[Any, ...]
    part: tuple[Any, ...]
    in_place: bool


Uses = dict[tuple[int, ...], list[Use]]


def uses_of(chunk_shape: tuple[int, ...], wanted: tuple[Box, ...]) -> Uses:
    """What each chunk that is needed is needed for, by cell; pure."""
    found: Uses = {}
    for number, box in enumerate(wanted):
        shape = tuple(stop - start for start, stop in box)
        for cell in walk(cells_of(chunk_shape, box)):
            chunk = tuple((i * n, (i + 1) * n) for i, n in zip(cell, chunk_shape, strict=True))
            shared = tuple(
                (max(a, c), min(b, d)) for (a, b), (c, d) in zip(chunk, box, strict=True)
            )
            in_place = shared == chunk and is_range(chunk_shape, shape)
            use = Use(number, _index(shared, box), _index(shared, chunk), in_place)
            found.setdefault(cell, []).append(use)
    return found


remembered_uses = functools.lru_cache(maxsize=1024)(uses_of)
"""Models have many leaves of one shape."""


def cells_of(chunk_shape: tuple[int, ...], box: Box) -> list[range]:
    """The chunks that a box touches, along each axis."""
    return [
        range(start // step, -(-stop // step)) if stop > start else range(0)
        for (start, stop), step in zip(box, chunk_shape, strict=True)
    ]


def walk(axes: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """What itertools.product gives, which would first make lists of ranges of any length."""
    if not axes:
        yield ()
        return
    for i in axes[0]:
        for rest in walk(axes[1:]):
            yield (i, *rest)


def _index(part: Sequence[tuple[int, int]], inside: Box) -> tuple[Any, ...]:
    """The part as an index; with the ellipsis it gives a view also where there is no dimension."""
    slices = (slice(a - c, b - c) for (a, b), (c, _) in zip(part, inside, strict=True))
    return (*slices, ...)

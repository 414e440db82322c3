"""What the steps of one structure have in common, made once: most of their small files.

From step to step only digests, times and what the caller gave change. The shortcuts here give the
bytes that making everything anew gives; `tests/test_recurring.py` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, final

import numpy as np

from ckpt.errors import Damaged
from ckpt.image import Header

T = TypeVar("T")

_PLACEHOLDER = "#" * 32
_SPLIT = f'"digest":"{_PLACEHOLDER}"'.encode()


class Basis(Protocol):
    """All that something is made from."""

    def is_like(self, other: Any) -> bool:
        """Whether the same comes of both, which are of one class."""


@dataclass(frozen=True, eq=False)
class Contents:
    """What the recurring small files are made from, but for the index."""

    headers: tuple[Header, ...]
    """Of them only trees, arrays, and which chunks there are."""
    rest: tuple[Any, ...]
    """Whatever else there is, compared as it is."""

    def is_like(self, other: Contents) -> bool:
        """Whether the same comes of both."""
        return (
            self.rest == other.rest
            and len(self.headers) == len(other.headers)
            and all(map(_hold_alike, self.headers, other.headers))
        )


@dataclass(frozen=True, eq=False)
class Places:
    """What an index is made from. In compressed images chunks move from step to step."""

    of: object
    """What was made of the `Contents` of these headers: the very same thing."""
    headers: tuple[Header, ...]
    """Of them only the places of chunks."""
    rest: tuple[Any, ...]

    def is_like(self, other: Places) -> bool:
        """Whether the same comes of both."""
        return (
            self.of is other.of
            and self.rest == other.rest
            and all(map(_lie_alike, self.headers, other.headers))
        )


def _hold_alike(one: Header, other: Header) -> bool:
    a, b = one.columns, other.columns
    return (
        one.tree == other.tree
        and one.arrays == other.arrays
        and np.array_equal(a.array, b.array)
        and np.array_equal(a.grid, b.grid)
    )


def _lie_alike(one: Header, other: Header) -> bool:
    a, b = one.columns, other.columns
    if one.compression != other.compression or not np.array_equal(a.offset, b.offset):
        return False
    return one.compression is None or np.array_equal(a.stored, b.stored)


@final
class Recurring(Generic[T]):
    """The last value that was made, given again for as long as its basis is like the last."""

    def __init__(self) -> None:
        self._last: tuple[Basis, T] | None = None

    def get(self, basis: Basis, make: Callable[[], T]) -> T:
        """The value for `basis`."""
        if self._last is None or not self._last[0].is_like(basis):
            self._last = None  # never hold two at once
            self._last = (basis, make())
        return self._last[1]


@dataclass(frozen=True, eq=False)
class Template:
    """A canonical JSON text with gaps for digests."""

    pieces: Sequence[bytes]

    @classmethod
    def cut(cls, make: Callable[[str], bytes], gaps: int) -> Template | None:
        """Of the text that `make` writes with its argument for each of `gaps` digests.

        None if the text has the likes of it in other places, too.
        """
        pieces = make(_PLACEHOLDER).split(_SPLIT)
        return cls(pieces) if len(pieces) == gaps + 1 else None

    def fill(self, digests: Sequence[str]) -> bytes:
        """The text with these digests, in the order of the text."""
        if len(digests) != len(self.pieces) - 1:
            raise Damaged(f"wanted {len(self.pieces) - 1} digests, found {len(digests)}")
        between = [b'"digest":"%b"' % digest.encode() for digest in digests]
        woven: list[bytes] = [b""] * (2 * len(between) + 1)
        woven[::2], woven[1::2] = self.pieces, between
        return b"".join(woven)

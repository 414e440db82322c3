"""Which bin a piece goes into: first fit and best fit, over the pieces of windows.

Windows are independent of each other. First fit goes through many of them at once, placing a piece
of each at a time, which can take a tenth of the time that one window after the other takes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

Strategy = Literal["first-fit", "best-fit"]
STRATEGIES: Final = ("first-fit", "best-fit")

_FAN: Final = 16  # children of a node: their bits are the index into a table
_HELD: Final = 1 << 24  # pieces held at once, of all windows together
_MANY: Final = 32  # from so many windows on it is faster to go through them at once
_FIRST: Final = np.array([(bits & -bits).bit_length() - 1 for bits in range(1 << _FAN)], np.int8)
"""For 16 bits as an index, the number of the lowest one that is set."""


def openers(
    sizes: NDArray[np.int64], bounds: NDArray[np.int64], capacity: int, strategy: Strategy
) -> NDArray[np.int64]:
    """Of each piece, the piece that opened its bin; int64[n].

    Args:
      sizes: of the pieces, 1 to capacity, int64[n].
      bounds: int64[windows + 1], strictly ascending from 0 to n: window w has the pieces from
        bounds[w] to below bounds[w + 1].
      capacity: of a bin.
      strategy: see `datapipe.sources.packing.pack`.
    """
    found = np.empty(sizes.size, np.int64)
    windows = bounds.size - 1  # -1 where there are no pieces
    if strategy == "first-fit" and windows >= _MANY:
        held = windows * int(np.diff(bounds).max())
        groups = min(-(-held // _HELD), windows // _MANY)
        for first, stop in itertools.pairwise(np.linspace(0, windows, groups + 1, dtype=np.int64)):
            _first_fits(sizes, bounds[first : stop + 1], capacity, found)
        return found
    fit = _first_fit if strategy == "first-fit" else _best_fit
    for first, stop in itertools.pairwise(bounds.tolist()):
        found[first:stop] = fit(sizes[first:stop].tolist(), capacity)
        found[first:stop] += first
    return found


def _first_fits(
    sizes: NDArray[np.int64],
    bounds: NDArray[np.int64],
    capacity: int,
    found: NDArray[np.int64],
) -> None:
    """First fit of several windows at once, into `found`."""
    counts = np.diff(bounds)
    windows, longest = counts.size, int(counts.max())
    trees = _Trees(windows, longest, capacity)
    steps = np.zeros((longest, windows), trees.dtype)  # what is no piece takes no room
    at = np.arange(bounds[0], bounds[-1]) - np.repeat(bounds[:-1], counts)
    steps[at, np.repeat(np.arange(windows), counts)] = sizes[bounds[0] : bounds[-1]]
    bins = np.empty((longest, windows), np.int32)
    for step, of_each in enumerate(steps):
        bins[step] = trees.placed(of_each)
    for window, (first, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        numbers = bins[: stop - first, window]  # in the order in which bins are opened
        opens = np.flatnonzero(np.diff(np.maximum.accumulate(numbers), prepend=-1))
        found[first:stop] = first + opens[numbers]


@final
class _Trees:
    """The bins of several windows, a tree for each.

    A node has, for each of its 16 children, the most room of any bin below it. Comparing these with
    the size of a piece gives 16 bits, and a table gives the first child with room. Bins that are
    not open have all their room, so that opening one is no special case.
    """

    def __init__(self, windows: int, bins: int, capacity: int) -> None:
        """`bins`: of each window, 1 or more."""
        self.dtype: Final = np.int16 if capacity <= np.iinfo(np.int16).max else np.int32
        below = 1  # bins below a child of a root
        while below * _FAN < bins:
            below *= _FAN
        children = -(-bins // below)
        self._roots = np.arange(windows)
        self._below_roots = self._roots * children
        self._first_bins = self._below_roots * below if below > 1 else self._roots * _FAN
        root = np.zeros((windows, _FAN), self.dtype)
        root[:, :children] = capacity
        self._levels = [root]
        nodes = windows * children
        while below > 1:
            self._levels.append(np.full((nodes, _FAN), capacity, self.dtype))
            below //= _FAN
            nodes *= _FAN

    def placed(self, sizes: NDArray[Any]) -> NDArray[np.int64]:
        """Puts one piece into each window; returns the numbers of the bins, int64[windows]."""
        column = sizes[:, None]
        nodes, path = self._roots, []
        for rooms in self._levels:
            lines = rooms.take(nodes, 0)
            bits = np.packbits(lines >= column, bitorder="little").view(np.uint16)
            child = _FIRST.take(bits)
            at = nodes * _FAN
            at += child
            path.append((rooms, nodes, at))
            nodes = self._below_roots + child if nodes is self._roots else at
        left = rooms.reshape(-1).take(at) - sizes
        for rooms, nodes, there in reversed(path):
            rooms.reshape(-1)[there] = left
            if nodes is not self._roots:
                # NumPy takes the largest of columns much faster than that of lines.
                left = np.maximum.reduce(np.ascontiguousarray(rooms.take(nodes, 0).T))
        return at - self._first_bins


def _first_fit(sizes: list[int], capacity: int) -> list[int]:
    """Of each piece, the number of the one that opened its bin.

    A binary tree with the most room below each node finds the first bin with room. Bins that are
    not open have all their room, so that opening one is no special case.
    """
    leaves = 1 << max(0, len(sizes) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    opener: dict[int, int] = {}
    found: list[int] = []
    for piece, size in enumerate(sizes):
        node = 1
        while node < leaves:
            node += node
            if room[node] < size:
                node += 1
        found.append(opener.setdefault(node, piece))
        left = room[node] = room[node] - size
        while node > 1:
            other = room[node ^ 1]
            node >>= 1
            if other > left:
                left = other
            if room[node] == left:
                break
            room[node] = left
    return found


def _best_fit(sizes: list[int], capacity: int) -> list[int]:
    """The same for best fit: a sorted list of the rooms of open bins, with their openers."""
    bits = len(sizes).bit_length()
    opener_mask = (1 << bits) - 1
    open_bins: list[int] = []  # room << bits | opener
    found: list[int] = []
    for piece, size in enumerate(sizes):
        at = bisect_left(open_bins, size << bits)
        taken = open_bins.pop(at) if at < len(open_bins) else capacity << bits | piece
        found.append(taken & opener_mask)
        left = taken - (size << bits)
        if left >> bits:
            insort(open_bins, left)
    return found

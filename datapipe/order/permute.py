"""A shuffle as a function: the position in an epoch goes in, the record id comes out.

A `Permutation` is an exact bijection of [0, n) that needs no table: Feistel rounds on the
two halves of an index of ceil(log2(n)) bits, and *cycle walking*: an image outside [0, n) goes
through the rounds again until it falls inside. The domain is smaller than 2n, so that an index
takes fewer than two passes on average.

The outcome is part of the format of saved data states: `VERSION` names it, and the test vectors
in the tests may never change. Another algorithm is another version beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.integers import LIMIT, fresh_indices, integer

VERSION: Final = 1

_BLOCK: Final = 1 << 15  # indices at a time: the scratch stays in the caches
_U64: Final = (1 << 64) - 1
# Operands are arrays of no dimension: scalars take NumPy longer, and walks end in tiny arrays.
_Word = NDArray[np.uint32]
_Key = tuple[int, _Word, _Word]  # of a round: the half that changes, two key words
# The multipliers of Ettinger and Wellons' lowbias32:
_MUL_A: Final = np.array(0x7FEB352D, np.uint32)
_MUL_B: Final = np.array(0x846CA68B, np.uint32)
_DOWN_15: Final = np.array(15, np.uint32)
_DOWN_16: Final = np.array(16, np.uint32)


def mix(*words: int) -> int:
    """A 64-bit key from integers: every bit of every word, and their order, changes it.

    Each word goes through the finaliser of SplitMix64 into a running state. Words are reduced
    modulo 2^64.
    """
    state = 0x6C617374676F6F64  # any constant that is no small number
    for word in words:
        state = _finalise(((state + 0x9E3779B97F4A7C15) & _U64) ^ _finalise(word & _U64))
    return state


def _finalise(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


class Order(Protocol):
    """A bijection of [0, n): what a plan needs to know of a shuffle.

    Both directions take integers of any shape and return fresh int64 of that shape.
    """

    @property
    def n(self) -> int:
        """Size of the domain."""
        ...

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Record ids at `positions` of the epoch."""
        ...

    def inverse(self, records: ArrayLike) -> NDArray[np.int64]:
        """Positions of `records` in the epoch."""
        ...


@dataclass(frozen=True)
class Permutation:
    """A bijection of [0, n), keyed by (seed, epoch, stream) and by n itself.

    Call it on positions to get record ids; `inverse` takes record ids back to positions. Both
    take an integer array of any shape and return a fresh int64 array of that shape. The same
    arguments give the same bijection on every machine and in every release.

    Args:
      n: size of the domain, 1 to 2^62.
      seed: 0 to 2^64 - 1.
      epoch: 0 or more; neighbours are unrelated.
      stream: 0 or more; tells apart several sources under one seed.

    Raises:
      Misuse: an argument, or an index, is out of range.
    """

    n: int
    seed: int
    epoch: int = 0
    stream: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("n", self.n, 1, LIMIT))
        for name in ("seed", "epoch", "stream"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 0, _U64))

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Record ids at `positions` of the epoch; int64, same shape."""
        return self._walk(positions, self._keys)

    def inverse(self, records: ArrayLike) -> NDArray[np.int64]:
        """Positions of `records` in the epoch; int64, same shape."""
        return self._walk(records, self._keys[::-1])

    @cached_property
    def _keys(self) -> tuple[_Key, ...]:
        key = mix(VERSION, self.n, self.seed, self.epoch, self.stream)
        # Short halves have few round functions: it takes more rounds to reach all orders evenly.
        rounds = 6 if (self.n - 1).bit_length() >= 16 else 24
        words = [mix(key, round_) for round_ in range(rounds)]
        return tuple(
            (round_ % 2, np.array(word & 0xFFFFFFFF, np.uint32), np.array(word >> 32, np.uint32))
            for round_, word in enumerate(words)
        )

    def _walk(self, indices: ArrayLike, keys: tuple[_Key, ...]) -> NDArray[np.int64]:
        values = fresh_indices(indices, self.n)
        bits = (self.n - 1).bit_length()
        if bits:
            cycle_walk(values.reshape(-1), self.n, lambda some: _feistel(some, bits, keys))
        return values


@dataclass(frozen=True)
class Identity:
    """[0, n) as it stands: the order of what is not shuffled."""

    n: int

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """The positions themselves; fresh int64, same shape."""
        return fresh_indices(positions, self.n)

    def inverse(self, records: ArrayLike) -> NDArray[np.int64]:
        """The records themselves; fresh int64, same shape."""
        return fresh_indices(records, self.n)


def cycle_walk(
    values: NDArray[np.int64], n: int, once: Callable[[NDArray[np.int64]], None]
) -> None:
    """Cycle walking, in place: `once`, a bijection of more than [0, n), until all are in [0, n).

    `once` works in place. From [0, n) every walk comes back to it, since the walk is a cycle.
    """
    once(values)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        again = values[outside]
        once(again)
        values[outside] = again
        # By places, not by a mask: half of the answers are yes, which no branch prediction learns.
        outside = outside[np.flatnonzero(again >= n)]


def _feistel(values: NDArray[np.int64], bits: int, keys: Sequence[_Key]) -> None:
    """All rounds, in place; the high half has bits // 2 bits, the low one the rest."""
    blocks = max(1, round(values.size / _BLOCK))  # none of them short: each costs its calls
    size = -(-values.size // blocks)
    for start in range(0, values.size, size or 1):
        _feistel_block(values[start : start + size], bits, keys)


def _feistel_block(values: NDArray[np.int64], bits: int, keys: Sequence[_Key]) -> None:
    high_bits = bits // 2
    low_bits = bits - high_bits
    downs = tuple(np.array(32 - width, np.uint32) for width in (high_bits, low_bits))
    halves = (
        (values >> low_bits).astype(np.uint32),
        (values & ((1 << low_bits) - 1)).astype(np.uint32),
    )
    h, t = np.empty((2, values.size), np.uint32)
    for changes, key_a, key_b in keys:
        if downs[changes] == 32:
            continue  # a half without bits
        np.bitwise_xor(halves[1 - changes], key_a, h)
        np.multiply(h, _MUL_A, h)
        np.right_shift(h, _DOWN_15, t)
        np.bitwise_xor(h, t, h)
        np.add(h, key_b, h)
        np.multiply(h, _MUL_B, h)
        np.right_shift(h, _DOWN_16, t)
        np.bitwise_xor(h, t, h)
        np.multiply(h, _MUL_A, h)
        # The high bits of a product depend on all bits of its factor.
        np.right_shift(h, downs[changes], h)
        np.bitwise_xor(halves[changes], h, halves[changes])
    values[...] = halves[0]
    values <<= low_bits
    values |= halves[1]

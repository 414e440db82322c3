"""The order in which Grain's global shuffle serves an epoch, computed for many positions at once.

For runs that began with Grain and go on with this project's pipeline. What Grain does is a cipher
of the position: four rounds of the Simon block cipher's round function on two halves of a block of
at least 16 bits, an even number, keyed by the words of C++'s `std::seed_seq`; an image outside
[0, n) is enciphered again until it falls inside.

Grain takes ceil(log2(n - 1)) for the bits that n - 1 needs. That is one too few for n - 1 = 2^k,
and, since a logarithm in double precision is rounded, for some numbers above 2^50 as well. Where
the block is too small for n by this, records are left out and others come twice: such an n is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.integers import LIMIT, fresh_indices, integer
from datapipe.order.permute import cycle_walk
from formats.errors import Misuse

_ROUNDS: Final = 4
_LEAST_BITS: Final = 16  # of a block
_BLOCK: Final = 1 << 15  # indices at a time: the scratch stays in the caches
_U32: Final = (1 << 32) - 1
_LOG2_SLACK: Final = 11 * 2.0**-52  # log2(2^k (1 + this)) is still k in double precision, k >= 32
_Key = tuple[int, np.uint32]  # of a round: the half that changes, the key word


@dataclass(frozen=True)
class GrainOrder:
    """The bijection of [0, n) by which Grain 0.2 shuffles an epoch; an `Order`.

    It is that of `MapDataset.shuffle(seed=seed)` with `repeat`, and of `IndexSampler(shuffle=True,
    seed=seed)`: epoch e is shuffled with seed + e modulo 2^32. So epoch 1 of one seed is epoch 0 of
    the next, and sources of like sizes get like orders: `Permutation` has neither fault.
    `MapDataset.seed(s).shuffle()` derives another seed from s, which is not done here.

    Args:
      n: size of the domain, 1 to 2^62.
      seed: 0 to 2^32 - 1.
      epoch: 0 to 2^64 - 1.

    Raises:
      Misuse: an argument, or an index, is out of range; or Grain's order of n is no bijection.
    """

    n: int
    seed: int
    epoch: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("n", self.n, 1, LIMIT))
        object.__setattr__(self, "seed", integer("seed", self.seed, 0, (1 << 32) - 1))
        object.__setattr__(self, "epoch", integer("epoch", self.epoch, 0, (1 << 64) - 1))
        reached = 1 << _grain_bits(self.n)
        if reached < self.n:
            raise Misuse(
                f"shuffle='grain' with n={self.n}: wanted an order of all records, found that "
                f"Grain's reaches none from {reached} on and serves others twice; use "
                f"shuffle='global', or leave out the last {self.n - reached} of the records, "
                "which Grain never served"
            )

    def __call__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Record ids at `positions` of the epoch; int64, same shape."""
        values = fresh_indices(positions, self.n)
        if self._is_small:
            return self._table[values]
        return self._walk(values, self._keys)

    def inverse(self, records: ArrayLike) -> NDArray[np.int64]:
        """Positions of `records` in the epoch; int64, same shape."""
        values = fresh_indices(records, self.n)
        if self._is_small:
            return self._inverse_table[values]
        return self._walk(values, self._keys[::-1])

    @property
    def _is_small(self) -> bool:
        """Whether a table is cheaper: of few records, an image is one only after many rounds."""
        return self.n <= 1 << _LEAST_BITS

    @cached_property
    def _keys(self) -> tuple[_Key, ...]:
        half_mask = (1 << _grain_bits(self.n) // 2) - 1
        words = _seed_words((self.seed + self.epoch) & _U32)
        return tuple(((i + 1) % 2, np.uint32(word & half_mask)) for i, word in enumerate(words))

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        """The record of each position."""
        ahead = np.arange(1 << _LEAST_BITS)
        _encipher(ahead, _LEAST_BITS, self._keys)
        # Each pass doubles how far an image outside has walked; cycles wholly outside never end.
        for _ in range(_LEAST_BITS):
            outside = ahead >= self.n
            ahead = np.where(outside, ahead[ahead], ahead)
        return ahead[: self.n].copy()

    @cached_property
    def _inverse_table(self) -> NDArray[np.int64]:
        """The position of each record."""
        inverse = np.empty_like(self._table)
        inverse[self._table] = np.arange(self.n)
        return inverse

    def _walk(self, values: NDArray[np.int64], keys: tuple[_Key, ...]) -> NDArray[np.int64]:
        bits = _grain_bits(self.n)
        cycle_walk(values.reshape(-1), self.n, lambda some: _encipher(some, bits, keys))
        return values


def _grain_bits(n: int) -> int:
    """Bits of Grain's block: the even ceiling of log2(n - 1) in double precision, 16 or more.

    Of exact integers, so that no machine's logarithm has a say.
    """
    largest = n - 1
    bits = largest.bit_length()
    below = 1 << max(bits - 1, 0)
    if bits > _LEAST_BITS and float(largest) <= below * (1 + _LOG2_SLACK):
        bits -= 1
    return max(bits + bits % 2, _LEAST_BITS)


def _seed_words(seed: int) -> list[int]:
    """The first words, one a round, of `std::seed_seq{seed}` ([rand.util.seedseq] of C++)."""
    count = _ROUNDS
    nearer, farther = 1, 2  # p and q of the standard for four words
    words = [0x8B8B8B8B] * count

    def mixed(value: int, factor: int) -> int:
        value &= _U32
        return (value ^ (value >> 27)) * factor & _U32

    for k in range(count):
        at_p, at_q = (k + nearer) % count, (k + farther) % count
        first = mixed(words[k] ^ words[at_p] ^ words[k - 1], 1664525)
        second = first + (1, 1 + seed, 2, 3)[k]  # the number of seeds, then they, then none
        words[at_p] = (words[at_p] + first) & _U32
        words[at_q] = (words[at_q] + second) & _U32
        words[k] = second & _U32
    for k in range(count):
        at_p, at_q = (k + nearer) % count, (k + farther) % count
        first = mixed(words[k] + words[at_p] + words[k - 1], 1566083941)
        second = (first - k) & _U32
        words[at_p] ^= first
        words[at_q] ^= second
        words[k] = second
    return words


def _encipher(values: NDArray[np.int64], bits: int, keys: tuple[_Key, ...]) -> None:
    """All rounds, once, in place."""
    for start in range(0, values.size, _BLOCK):
        _encipher_block(values[start : start + _BLOCK], bits // 2, keys)


def _encipher_block(values: NDArray[np.int64], width: int, keys: tuple[_Key, ...]) -> None:
    mask = np.uint32((1 << width) - 1)
    halves = ((values & mask).astype(np.uint32), (values >> width).astype(np.uint32))
    f, t = np.empty((2, values.size), np.uint32)
    for changes, key in keys:
        given, changed = halves[1 - changes], halves[changes]
        _rotate(given, 1, width, f, t)
        eight = _rotate(given, 8, width, np.empty_like(f), t)
        np.bitwise_and(f, eight, out=f)
        _rotate(given, 2, width, eight, t)
        np.bitwise_xor(f, eight, out=f)
        np.bitwise_and(f, mask, out=f)  # rotations leave bits above the half
        np.bitwise_xor(f, key, out=f)
        np.bitwise_xor(changed, f, out=changed)
    values[...] = halves[1]
    values <<= width
    values |= halves[0]


def _rotate(
    values: NDArray[np.uint32],
    by: int,
    width: int,
    out: NDArray[np.uint32],
    scratch: NDArray[np.uint32],
) -> NDArray[np.uint32]:
    """To the left within `width` bits; the bits above them are not cleared."""
    np.left_shift(values, np.uint32(by), out=out)
    np.right_shift(values, np.uint32(width - by), out=scratch)
    return np.bitwise_or(out, scratch, out=out)

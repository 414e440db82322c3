"""The permutation: exact, frozen, and as good as a random one."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.permute import LIMIT, Permutation, mix
from formats.errors import Misuse

AWKWARD = sorted(
    {2**k + d for k in (3, 4, 5, 8, 13, 16, 17) for d in (-1, 0, 1)} | {100_003, 131_071, 60_000}
)
HUGE = (10**9, 2**28 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**40 + 1, 2**53 + 1, LIMIT - 1, LIMIT)

# Published: saved positions mean these numbers. They may never change; another order is another
# version beside this one.
VECTORS = [
    ((1, 0, 0, 0), [0]),
    ((2, 0, 0, 0), [0, 1]),
    ((10, 0, 0, 0), [3, 4, 7, 2, 5, 6, 1, 9]),
    ((10, 17, 0, 0), [2, 6, 7, 1, 5, 0, 9, 8]),
    ((10, 17, 1, 0), [8, 9, 6, 1, 0, 2, 4, 7]),
    ((10, 17, 0, 1), [5, 8, 4, 3, 2, 1, 9, 0]),
    ((1000, 17, 3, 0), [749, 415, 610, 306, 889, 860, 502, 478]),
    ((65_536, 1, 0, 0), [32756, 13952, 14701, 43222, 6523, 9960, 4209, 3397]),
    ((65_537, 1, 0, 0), [61980, 32375, 48605, 39556, 19441, 29981, 47253, 15858]),
    (
        (10**9, 42, 7, 2),
        [374269066, 403764408, 233250483, 491666277, 87901473, 832027343, 165553797, 290855373],
    ),
    (
        (2**40 + 1, 2**64 - 1, 0, 0),
        [
            15917553252,
            96879153336,
            817353864707,
            862122251893,
            290156748996,
            120244258905,
            81341672414,
            734023600288,
        ],
    ),
    (
        (LIMIT, 5, 2**63, 1),
        [
            4289319456543716669,
            887078671560505533,
            3879861943602190599,
            3801594750020536783,
            2077009159771387964,
            4482905974655473092,
            34408331153038197,
            1780271303249954484,
        ],
    ),
]


@pytest.mark.parametrize(("key", "head"), VECTORS, ids=lambda value: str(value)[:40])
def test_published_vectors(key, head):
    n, seed, epoch, stream = key
    permutation = Permutation(n, seed=seed, epoch=epoch, stream=stream)
    assert permutation(np.arange(min(n, 8))).tolist() == head


def test_mix_is_frozen_and_sees_order():
    assert mix(1, 2) == 0xB313CF8F0A122B5C
    assert mix(1, 2) != mix(2, 1)
    assert mix(0) != mix(0, 0) != mix()


def test_bijection_for_every_small_n():
    for n in range(1, 2001):
        every = np.arange(n)
        permutation = Permutation(n, seed=n * 7919, epoch=n % 5)
        order = permutation(every)
        assert np.array_equal(np.sort(order), every), f"n={n}"
        assert np.array_equal(permutation.inverse(order), every), f"n={n}"


@pytest.mark.parametrize("n", AWKWARD)
def test_bijection_at_awkward_n(n):
    every = np.arange(n)
    permutation = Permutation(n, seed=3)
    order = permutation(every)
    assert np.array_equal(np.sort(order), every)
    assert np.array_equal(permutation.inverse(order), every)


@pytest.mark.parametrize("n", HUGE)
def test_inverse_and_distinctness_at_huge_n(n):
    ends = np.concatenate([np.arange(2000), np.arange(n - 2000, n), n // 2 + np.arange(2000)])
    positions = np.unique(np.concatenate([ends, np.random.default_rng(n).integers(0, n, 60_000)]))
    permutation = Permutation(n, seed=11, epoch=2)
    records = permutation(positions)
    assert records.min() >= 0
    assert records.max() < n
    assert np.unique(records).size == positions.size
    assert np.array_equal(permutation.inverse(records), positions)
    assert np.array_equal(permutation(permutation.inverse(positions)), positions)
    # All of the range is reached: the largest of 60,000 lies near the end.
    assert records.max() > 0.999 * n
    assert records.min() < 0.001 * n


@given(st.integers(1, LIMIT), st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.data())
def test_inverse_undoes_it(n, seed, epoch, data):
    permutation = Permutation(n, seed=seed, epoch=epoch)
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    records = permutation(positions)
    assert records.dtype == np.int64
    assert permutation.inverse(records).tolist() == positions


def test_one_by_one_is_the_same_as_all_at_once():
    permutation = Permutation(100_003, seed=9)
    together = permutation(np.arange(100_003))
    for position in (0, 1, 999, 32_767, 32_768, 65_536, 100_002):
        assert permutation(position) == together[position]
    assert permutation(np.zeros((2, 3), np.int32)).shape == (2, 3)
    assert permutation([]).size == 0


def test_the_argument_is_left_alone():
    positions = np.arange(10)
    Permutation(10, seed=1)(positions)
    assert positions.tolist() == list(range(10))


# -- independence ----------------------------------------------------------------------------------


def neighbours():
    n = 50_021
    base = Permutation(n, seed=100, epoch=10, stream=5)
    for field in ("seed", "epoch", "stream"):
        for step in (1, 2, 16):
            changed = {"seed": 100, "epoch": 10, "stream": 5}
            changed[field] += step
            yield f"{field}+{step}", n, base, Permutation(n, **changed)
    yield "seed and epoch swapped", n, base, Permutation(n, seed=10, epoch=100, stream=5)
    yield "seed+1, epoch-1", n, base, Permutation(n, seed=101, epoch=9, stream=5)
    yield "n+1", n, base, Permutation(n + 1, seed=100, epoch=10, stream=5)


@pytest.mark.parametrize("case", list(neighbours()), ids=lambda case: case[0])
def test_neighbouring_keys_are_unrelated(case):
    _, n, one, other = case
    first, second = one(np.arange(n)), other(np.arange(n))
    assert np.count_nonzero(first == second) < 12  # 1 is expected
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(n)
    # Nor is one a shifted copy of the other: differences spread evenly over [0, n).
    assert excess(np.bincount((second - first) % n * 64 // n, minlength=64)[:64]) < 6


def test_a_record_has_every_position_equally_often_over_seeds():
    n, seeds = 64, 6400
    for position in (0, 1, 63):
        found = [int(Permutation(n, seed=seed)(position)) for seed in range(seeds // 4)]
        assert excess(np.bincount(found, minlength=n)) < 6, f"position {position}"


def test_all_orders_of_a_tiny_source_occur_equally_often():
    for n, seeds in ((3, 300), (4, 1200), (5, 2400)):
        orders = Counter(
            tuple(Permutation(n, seed=1, epoch=epoch)(np.arange(n)).tolist())
            for epoch in range(seeds)
        )
        assert len(orders) == math.factorial(n)
        assert excess(np.array(list(orders.values()))) < 6, f"n={n}"


# -- quality of the shuffle ------------------------------------------------------------------------


def excess(counts):
    """How many standard deviations chi-squared of equal cells lies above its mean."""
    expected = counts.sum() / counts.size
    chi2 = float(((counts - expected) ** 2).sum() / expected)
    return (chi2 - (counts.size - 1)) / math.sqrt(2 * (counts.size - 1))


def defects(order):
    """What tells `order` from a random one; empty for a good shuffle."""
    n = order.size
    found = []
    for lag in (*range(1, 17), 64, 256, 1024):
        correlation = np.corrcoef(order[:-lag], order[lag:])[0, 1]
        if abs(correlation) > 5 / math.sqrt(n):
            found.append(f"serial correlation {correlation:.3f} at lag {lag}")
    cells = (np.arange(n) * 32 // n) * 32 + order * 32 // n
    if abs(excess(np.bincount(cells, minlength=1024))) > 5:
        found.append("uneven: some stretches of the source stay together")
    for modulus in (2, 16):
        pairs = (order[:-1] % modulus) * modulus + order[1:] % modulus
        if excess(np.bincount(pairs, minlength=modulus**2)) > 6:
            found.append(f"low bits of neighbours depend on each other (mod {modulus})")
    distances = np.sort(np.abs(np.diff(order))) / n
    wanted = 1 - (1 - distances) ** 2  # of two independent uniform numbers
    gap = np.abs(wanted - np.arange(1, n) / n).max()
    if gap > 2.2 / math.sqrt(n):
        found.append(f"distances of neighbours are off by {gap:.3f}")
    return found


@pytest.mark.parametrize("n", [20_011, 2**15, 2**15 + 1, 2**16 + 1])
def test_quality_of_the_shuffle(n):
    for seed in range(12):
        order = Permutation(n, seed=seed, epoch=seed % 3)(np.arange(n))
        assert defects(order) == [], f"n={n} seed={seed}"


def test_the_measure_passes_a_random_order():
    for seed in range(12):
        assert defects(np.random.default_rng(seed).permutation(20_011)) == [], f"seed={seed}"


def bad_orders():
    n = 2**15
    every = np.arange(n)
    rng = np.random.default_rng(0)
    yield "identity", every
    yield "reversed", every[::-1]
    yield "affine", (every * 12_345 + 678) % n
    yield "golden ratio", (every * 20_251 + 1) % n
    yield "bit reversal", np.array([int(f"{i:015b}"[::-1], 2) for i in every])
    yield "xor with a constant", every ^ 0x5A5A
    yield "blocks of 1024 shuffled inside", rng.permuted(every.reshape(-1, 1024), axis=1).ravel()
    yield "blocks of 64 permuted whole", rng.permutation(every.reshape(-1, 64)).ravel()
    halves = np.stack([every[: n // 2], every[n // 2 :]])
    yield "two interleaved shards", halves.T.ravel()
    yield "high half shuffled only", (rng.permutation(256)[every >> 7] << 7) | (every & 127)


@pytest.mark.parametrize("case", list(bad_orders()), ids=lambda case: case[0])
def test_the_measure_catches_a_bad_order(case):
    name, order = case
    assert np.array_equal(np.sort(order), np.arange(order.size)), name
    assert defects(order)


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 0, "seed": 1},
        {"n": LIMIT + 1, "seed": 1},
        {"n": 2.0, "seed": 1},
        {"n": 5, "seed": -1},
        {"n": 5, "seed": 2**64},
        {"n": 5, "seed": True},
        {"n": 5, "seed": 1, "epoch": -1},
        {"n": 5, "seed": 1, "stream": -1},
    ],
)
def test_refuses_what_is_out_of_range(arguments):
    with pytest.raises(Misuse, match="must be an integer in"):
        Permutation(**arguments)


def test_refuses_indices_outside():
    permutation = Permutation(10, seed=1)
    for bad in (-1, 10, [3, 11], np.uint64(2**63)):
        with pytest.raises(Misuse, match=r"outside \[0, 10\)"):
            permutation(bad)
    with pytest.raises(Misuse, match="dtype float64"):
        permutation([0.5])

"""The permutation: exact, frozen, and as good as a random one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from datapipe.integers import LIMIT
from datapipe.order.permute import Order, Permutation, mix
from formats.errors import Misuse

Indices = NDArray[np.int64]

AWKWARD = sorted({2**k + d for k in range(10, 19) for d in (-1, 0, 1)} | {100_003, 60_000})
HUGE = (10**9, 2**28 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**40 + 1, 2**53 + 1, LIMIT - 1, LIMIT)

# The bound on |z| for what is standard normal of a random order: beyond it lie 6e-7 of all. The
# figures looked at below are about 2,000, with seeds that stay: a random order passes all of them
# with 99.8 %.
FAR = 5.0

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
def test_published_vectors(key: tuple[int, int, int, int], head: list[int]) -> None:
    n, seed, epoch, stream = key
    permutation = Permutation(n, seed=seed, epoch=epoch, stream=stream)
    assert permutation(np.arange(min(n, 8))).tolist() == head


def test_mix_is_frozen_and_sees_order() -> None:
    assert mix(1, 2) == 0xB313CF8F0A122B5C
    assert mix(1, 2) != mix(2, 1)
    assert mix(0) != mix(0, 0) != mix()


# -- a bijection -----------------------------------------------------------------------------------


def assert_bijection(permutation: Permutation) -> None:
    every = np.arange(permutation.n)
    order = permutation(every)
    assert np.array_equal(np.sort(order), every), permutation
    assert np.array_equal(permutation.inverse(order), every), permutation


def test_bijection_for_every_small_n() -> None:
    for n in range(1, 1101):
        assert_bijection(Permutation(n, seed=n * 7919, epoch=n % 5))


@pytest.mark.parametrize("n", AWKWARD)
def test_bijection_at_awkward_n(n: int) -> None:
    assert_bijection(Permutation(n, seed=3))


@pytest.mark.parametrize("n", HUGE)
def test_inverse_and_distinctness_at_huge_n(n: int) -> None:
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


def test_inverse_around_every_power_of_two() -> None:
    for n in (2**k + d for k in range(19, 63) for d in (-1, 0, 1) if 2**k + d <= LIMIT):
        sample = np.random.default_rng(n).integers(0, n, 300)
        positions = np.unique(np.append(sample, [0, 1, n - 2, n - 1]))
        permutation = Permutation(n, seed=n % 1000)
        records = permutation(positions)
        assert np.unique(records).size == positions.size, permutation
        assert records.min() >= 0, permutation
        assert records.max() < n, permutation
        assert np.array_equal(permutation.inverse(records), positions), permutation
        assert np.array_equal(permutation(permutation.inverse(positions)), positions), permutation


@given(
    st.integers(0, 62).flatmap(lambda bits: st.integers(2**bits // 2 + 1, 2**bits)),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.data(),
)
def test_inverse_undoes_it(n: int, seed: int, epoch: int, stream: int, data: st.DataObject) -> None:
    permutation = Permutation(n, seed=seed, epoch=epoch, stream=stream)
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    records = permutation(positions)
    assert records.dtype == np.int64
    assert permutation.inverse(records).tolist() == positions
    assert permutation(permutation.inverse(positions)).tolist() == positions


def test_one_by_one_is_the_same_as_all_at_once() -> None:
    permutation = Permutation(100_003, seed=9)
    together = permutation(np.arange(100_003))
    for position in (0, 1, 999, 32_767, 32_768, 65_536, 100_002):
        assert permutation(position) == together[position]
    # However many at a time: they are worked on in blocks.
    for count in (1, 2, 32_767, 32_769, 49_153, 65_536, 81_921):
        assert np.array_equal(permutation(np.arange(count)), together[:count]), count


def test_arrays_of_any_shape() -> None:
    order: Order = Permutation(100_003, seed=9)
    positions = np.arange(12, dtype=np.int32).reshape(3, 4).T
    before = positions.copy()
    records = order(positions)
    assert records.shape == (4, 3)
    assert records.dtype == order.inverse(records).dtype == np.int64
    assert np.array_equal(records.ravel(), order(positions.ravel()))
    assert np.array_equal(order.inverse(records), positions)
    assert np.array_equal(positions, before)
    assert order([]).size == 0


# -- independence ----------------------------------------------------------------------------------


def z_of_chi2(counts: NDArray[Any], expected: float, freedom: int) -> float:
    """Standard normal where chi-squared of `freedom` degrees is (Wilson and Hilferty)."""
    chi2 = float(((counts - expected) ** 2).sum() / expected)
    width = 2 / (9 * freedom)
    return float((math.cbrt(chi2 / freedom) - (1 - width)) / math.sqrt(width))


def z_of_even_cells(cells: Indices, count: int) -> float:
    """Of independent draws out of `count` equally likely cells."""
    return z_of_chi2(np.bincount(cells, minlength=count), cells.size / count, count - 1)


def z_of_grid(one: Indices, other: Indices, n: int, side: int) -> float:
    """Of pairs in [0, n)^2 over side x side cells. In orders all rows and columns are equally full:
    that leaves (side - 1)^2 degrees of freedom."""
    cells = one // -(-n // side) * side + other // -(-n // side)
    counts = np.bincount(cells, minlength=side**2)
    return z_of_chi2(counts, one.size / side**2, (side - 1) ** 2)


def z_of_correlation(one: Indices, other: Indices) -> float:
    """The correlation of two independent orders has the variance 1 / (size - 1)."""
    return float(np.corrcoef(one, other)[0, 1]) * math.sqrt(one.size - 1)


def neighbours() -> Iterator[tuple[str, Permutation, Permutation]]:
    key = {"n": 50_021, "seed": 100, "epoch": 10, "stream": 5}
    base = Permutation(**key)
    for field in ("seed", "epoch", "stream"):
        for bit in (*range(8), 31, 32, 63):
            yield f"{field} ^ 2^{bit}", base, Permutation(**key | {field: key[field] ^ 1 << bit})
        yield f"{field} + 1", base, Permutation(**key | {field: key[field] + 1})
    # An epoch is no other seed's, a stream no other epoch's.
    yield "seed <-> epoch", base, Permutation(**key | {"seed": 10, "epoch": 100})
    yield "epoch <-> stream", base, Permutation(**key | {"epoch": 5, "stream": 10})
    yield "seed + 1, epoch - 1", base, Permutation(**key | {"seed": 101, "epoch": 9})
    yield "epoch + 1, stream - 1", base, Permutation(**key | {"epoch": 11, "stream": 4})
    yield "n + 1", base, Permutation(**key | {"n": 50_022})
    for small in (1009, 4096):  # these have short halves, and more rounds
        yield f"seed + 1, n={small}", *(Permutation(small, seed=seed) for seed in (100, 101))
        yield (
            f"epoch + 1, n={small}",
            *(Permutation(small, seed=100, epoch=epoch) for epoch in (10, 11)),
        )


@pytest.mark.parametrize("case", list(neighbours()), ids=lambda case: case[0])
def test_neighbouring_keys_are_unrelated(case: tuple[str, Permutation, Permutation]) -> None:
    _, one, other = case
    n = one.n
    first, second = one(np.arange(n)), other(np.arange(n))
    # As many agree as Poisson's law of mean 1 has it: 12 or more with 8e-10.
    assert np.count_nonzero(first == second) < 12, case
    assert abs(z_of_correlation(first, second)) < FAR, case
    assert z_of_grid(first, np.minimum(second, n - 1), n, 16) < FAR, case
    # Nor is one a shifted copy of the other: differences spread evenly over [0, n).
    assert z_of_even_cells((second - first) % n * 64 // n, 64) < FAR, case
    # Nor do they undo each other.
    composed = one.inverse(np.minimum(second, n - 1))
    assert abs(z_of_correlation(composed, np.arange(n))) < FAR, case


@pytest.mark.parametrize("n", [10**9, 2**40 + 1])
def test_neighbouring_keys_of_a_huge_source_are_unrelated(n: int) -> None:
    positions = np.arange(n // 3, n // 3 + 50_000)
    base = Permutation(n, seed=100, epoch=10, stream=5)(positions)
    for field in ("seed", "epoch", "stream"):
        key = {"seed": 100, "epoch": 10, "stream": 5}
        key[field] += 1
        found = Permutation(n, **key)(positions)
        assert abs(z_of_correlation(base, found)) < FAR, key
        assert z_of_grid(base, found, n, 16) < FAR, key
        assert z_of_even_cells(((found - base) % n) // -(-n // 64), 64) < FAR, key


@pytest.mark.parametrize("field", ["seed", "epoch", "stream"])
def test_neighbouring_keys_agree_as_often_as_chance_has_it(field: str) -> None:
    """Over 800 pairs of neighbours: the agreements of one have mean and variance 1."""
    n, pairs = 200, 800
    orders = [
        Permutation(n, **{"seed": 4, "epoch": 4, "stream": 4} | {field: each})(np.arange(n))
        for each in range(pairs + 1)
    ]
    agree = np.array([np.count_nonzero(a == b) for a, b in itertools.pairwise(orders)])
    # Of Poisson's law with mean 1: the variance of a square of a deviation is 3.
    assert abs(agree.mean() - 1) < FAR * math.sqrt(1 / pairs), field
    assert abs(((agree - 1) ** 2).mean() - 1) < FAR * math.sqrt(3 / pairs), field


@pytest.mark.parametrize("position", [0, 1, 63])
@pytest.mark.parametrize("field", ["seed", "epoch", "stream"])
def test_a_position_has_every_record_equally_often(field: str, position: int) -> None:
    n, keys = 64, 1280
    fixed = {"seed": 8, "epoch": 8, "stream": 8}
    found = np.array(
        [int(Permutation(n, **fixed | {field: each})(position)) for each in range(keys)]
    )
    assert abs(z_of_even_cells(found, n)) < FAR, f"{field} from 0 to {keys}, the others 8"
    # Nor does it depend on what it was before.
    pairs = found[:-1] // 8 * 8 + found[1:] // 8
    assert z_of_even_cells(pairs, 64) < FAR, f"{field} from 0 to {keys}, the others 8"


@pytest.mark.parametrize(("n", "epochs"), [(2, 200), (3, 300), (4, 1200), (5, 2400)])
def test_all_orders_of_a_tiny_source_occur_equally_often(n: int, epochs: int) -> None:
    orders = Counter(
        tuple(Permutation(n, seed=1, epoch=epoch)(np.arange(n)).tolist()) for epoch in range(epochs)
    )
    assert len(orders) == math.factorial(n)
    found = np.array(list(orders.values()))
    assert abs(z_of_chi2(found, epochs / found.size, found.size - 1)) < FAR, f"n={n} seed=1"


# -- quality of the shuffle ------------------------------------------------------------------------

LAGS = (*range(1, 17), 64, 256, 1024)
LARGEST_GAP = 2.7  # of Kolmogorov, times sqrt(size): 2 exp(-2 x^2), beyond it lie 9e-7


def scores(order: Indices) -> dict[str, float]:
    """What would be standard normal of a random order."""
    n = order.size
    found = {
        f"serial correlation, lag {lag}": z_of_correlation(order[:-lag], order[lag:])
        for lag in LAGS
        if lag < n // 2
    }
    # Each stretch of positions has records of each stretch of the source.
    found["stretches"] = z_of_grid(np.arange(n), order, n, 16)
    for modulus in (2, 16):
        pairs = (order[:-1] % modulus) * modulus + order[1:] % modulus
        counts = np.bincount(pairs, minlength=modulus**2)
        freedom = (modulus - 1) ** 2
        found[f"neighbours mod {modulus}"] = z_of_chi2(counts, pairs.size / modulus**2, freedom)
    return found


def gap_of_distances(order: Indices) -> float:
    """How far the distances of neighbours are from those of independent uniform numbers.

    |x - y| lies below d with 1 - (1 - d)^2. The largest difference, times sqrt(size)."""
    n = order.size
    distances = np.sort(np.abs(np.diff(order))) / n
    wanted = 1 - (1 - distances) ** 2
    return float(np.abs(wanted - np.arange(1, n) / n).max()) * math.sqrt(n)


def defects(order: Indices) -> list[str]:
    """What tells `order` from a random one; empty for a good shuffle."""
    found = [f"{name}: z={z:.1f}" for name, z in scores(order).items() if abs(z) > FAR]
    if (gap := gap_of_distances(order)) > LARGEST_GAP:
        found.append(f"distances of neighbours: {gap:.1f}")
    return found


@pytest.mark.parametrize("n", [20_011, 2**15, 2**15 + 1, 2**16 + 1])
def test_quality_of_the_shuffle(n: int) -> None:
    for seed in range(12):
        order = Permutation(n, seed=seed, epoch=seed % 3)(np.arange(n))
        assert defects(order) == [], f"n={n} seed={seed}"


@pytest.mark.parametrize("n", [2**19 - 1, 2**19, 2**19 + 1])
def test_quality_of_a_large_shuffle(n: int) -> None:
    assert defects(Permutation(n, seed=77)(np.arange(n))) == [], f"n={n} seed=77"


def test_the_measure_passes_a_random_order() -> None:
    for seed in range(12):
        assert defects(np.random.default_rng(seed).permutation(20_011)) == [], f"seed={seed}"


@pytest.mark.parametrize("n", [1000, 2**11 + 1])
def test_scores_are_spread_like_those_of_numpy(n: int) -> None:
    """Over 200 orders, so that one that is more even than chance would be seen, too.

    Two samples of m from one law have a gap above x sqrt(2 / m) with 2 exp(-2 x^2): 9e-7 here.
    """
    many = 200

    def table(orders: Iterator[Indices]) -> NDArray[np.float64]:
        rows = [[*scores(order).values(), gap_of_distances(order)] for order in orders]
        return np.sort(np.array(rows), axis=0)

    ours = table(Permutation(n, seed=5, epoch=epoch)(np.arange(n)) for epoch in range(many))
    theirs = table(np.random.default_rng(seed).permutation(n) for seed in range(many))
    names = [*scores(np.arange(n)), "distances"]
    for name, one, other in zip(names, ours.T, theirs.T, strict=True):
        both = np.concatenate([one, other])
        below = [np.searchsorted(each, both, side="right") / many for each in (one, other)]
        gap = float(np.abs(below[0] - below[1]).max())
        assert gap < LARGEST_GAP * math.sqrt(2 / many), f"{name}: n={n} seed=5"


def bad_orders() -> Iterator[tuple[str, Indices]]:
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
def test_the_measure_catches_a_bad_order(case: tuple[str, Indices]) -> None:
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
def test_refuses_what_is_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(Misuse, match="must be an integer in"):
        Permutation(**arguments)


def test_refuses_indices_outside() -> None:
    permutation = Permutation(10, seed=1)
    for bad in (-1, 10, [3, 11], np.uint64(2**63)):
        with pytest.raises(Misuse, match=r"outside \[0, 10\)"):
            permutation(bad)
    with pytest.raises(Misuse, match="dtype float64"):
        permutation([0.5])

"""Grain's order: exactly Grain's, or refused."""

from __future__ import annotations

import pickle

import grain
import numpy as np
import pytest
from grain.experimental import index_shuffle
from hypothesis import assume, given
from hypothesis import strategies as st

from datapipe.integers import LIMIT
from datapipe.order.grain_order import GrainOrder
from datapipe.order.permute import Order
from formats.errors import Misuse

SEEDS = (0, 1, 7, 2**31, 2**32 - 1)
AWKWARD = sorted(
    {2**k + d for k in (14, 15, 16, 17, 18) for d in (-1, 0, 1, 2)} - {2**16 + 1, 2**18 + 1}
)

# What n - 1 Grain takes for too small a block: from 2^k, k even, as far as log2 rounds to k. Up to
# k = 48 it is 2^k alone. Found by bisection in `index_shuffle`, whose record 2^k is record 0 there.
LAST_REFUSED = dict.fromkeys(range(16, 50, 2), 0) | {
    50: 2,
    52: 11,
    54: 45,
    56: 183,
    58: 735,
    60: 2943,
}

# Saved positions mean these numbers, whatever later releases of Grain do.
VECTORS = [
    ((1, 0, 0), [0]),
    ((2, 0, 0), [0, 1]),
    ((10, 17, 0), [9, 2, 7, 0, 4, 3]),
    ((10, 17, 1), [1, 0, 6, 3, 5, 4]),
    ((1000, 17, 3), [876, 944, 89, 633, 432, 568]),
    ((65_536, 0, 0), [31105, 2851, 35587, 53747, 58419, 44751]),
    ((10**9, 42, 7), [281560260, 351876885, 161612727, 94072930, 843864227, 914172386]),
    ((2**32, 0, 0), [3683145887, 3670826263, 3641496229, 3628913461, 3657490154, 3678722914]),
    (
        (2**40 + 2, 2**32 - 1, 0),
        [361373419078, 902379933023, 718137682601, 760422677771, 333694263473, 341915104744],
    ),
    (
        (LIMIT, 5, 2**63),
        [
            336707345575359709,
            337274311323744012,
            336689066196646655,
            337255757067106606,
            334422010386559641,
            334990075646571336,
        ],
    ),
]


def of_grain(n: int, seed: int, positions: list[int]) -> list[int]:
    return [index_shuffle(each, max_index=n - 1, seed=seed, rounds=4) for each in positions]


def is_refused(n: int) -> bool:
    try:
        GrainOrder(n, seed=0)
    except Misuse:
        return True
    return False


@pytest.mark.parametrize(("key", "head"), VECTORS, ids=lambda value: str(value)[:40])
def test_frozen_vectors(key: tuple[int, int, int], head: list[int]) -> None:
    n, seed, epoch = key
    assert GrainOrder(n, seed=seed, epoch=epoch)(np.arange(min(n, 6))).tolist() == head


def test_every_position_of_small_n() -> None:
    for n in (*range(1, 40), 63, 64, 65, 199, 255, 256, 257, 1000):
        seed = n * 7919
        order = GrainOrder(n, seed=seed)(np.arange(n))
        assert order.tolist() == of_grain(n, seed, list(range(n))), f"n={n} seed={seed}"


@given(st.integers(0, 62), st.integers(0, 2**32 - 1), st.integers(0, 2**33), st.data())
def test_it_is_grains_order(bits: int, seed: int, epoch: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(2**bits // 2 + 1, 2**bits), label="n")
    assume(not is_refused(n))
    inside = st.integers(0, n - 1) | st.sampled_from([0, n - 1, n // 2])
    positions = data.draw(st.lists(inside, min_size=1, max_size=6), label="positions")
    order = GrainOrder(n, seed=seed, epoch=epoch)
    records = order(positions)
    assert records.dtype == np.int64
    assert records.tolist() == of_grain(n, (seed + epoch) % 2**32, positions)
    assert order.inverse(records).tolist() == positions
    assert order(order.inverse(positions)).tolist() == positions


@pytest.mark.parametrize("n", AWKWARD)
def test_bijection_at_awkward_n(n: int) -> None:
    every = np.arange(n)
    order = GrainOrder(n, seed=3)
    records = order(every)
    assert np.array_equal(np.sort(records), every)
    assert np.array_equal(order.inverse(records), every)
    sample = np.random.default_rng(n).integers(0, n, 200).tolist()
    assert records[sample].tolist() == of_grain(n, 3, sample), f"n={n}"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [10**8, 10**9, 2**31, 2**32 + 1000, 2**40 + 2, 2**61 + 1, LIMIT])
def test_many_positions_of_a_huge_n(n: int, seed: int) -> None:
    positions = np.unique(np.random.default_rng(seed).integers(0, n, 40_000))
    order = GrainOrder(n, seed=seed)
    records = order(positions)
    assert np.unique(records).size == positions.size
    assert np.array_equal(order.inverse(records), positions)
    some = positions[:: positions.size // 50]
    assert order(some).tolist() == of_grain(n, seed, some.tolist()), f"n={n} seed={seed}"


# -- as Grain's own loaders serve it ---------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 5, 1000, 70_001])
@pytest.mark.parametrize("seed", [3, 2**32 - 2])
def test_epochs_of_a_map_dataset(n: int, seed: int) -> None:
    served = grain.MapDataset.range(n).shuffle(seed=seed).repeat(4)
    positions = np.random.default_rng(n).integers(0, n, 100 if n > 100 else 8)
    for epoch in range(4):
        order = GrainOrder(n, seed=seed, epoch=epoch)
        of_theirs = [served[int(each) + epoch * n] for each in positions]
        assert order(positions).tolist() == of_theirs, f"n={n} seed={seed} epoch={epoch}"


def test_epochs_of_an_index_sampler() -> None:
    n, seed = 37, 2**32 - 1
    sampler = grain.samplers.IndexSampler(
        n, shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=3, seed=seed
    )
    theirs = [sampler[index].record_key for index in range(3 * n)]
    ours = [GrainOrder(n, seed=seed, epoch=epoch)(np.arange(n)) for epoch in range(3)]
    assert np.concatenate(ours).tolist() == theirs


# -- where Grain's is no bijection -----------------------------------------------------------------


def test_what_grain_leaves_out_is_why_it_is_refused() -> None:
    n = 2**16 + 1
    served = np.bincount(of_grain(n, 3, list(range(n))), minlength=n)
    assert served[2**16] == 0
    assert served.max() == 2
    with pytest.raises(Misuse, match=r"n=65537.*reaches none from 65536 on.*shuffle='global', or"):
        GrainOrder(n, seed=3)
    # The cure: without the last record, the others stay where Grain had them.
    assert GrainOrder(n - 1, seed=3)([0, 1, 99]).tolist() == of_grain(n, 3, [0, 1, 99])


@pytest.mark.parametrize("k", LAST_REFUSED)
def test_refused_as_far_as_grain_repeats_itself_and_no_farther(k: int) -> None:
    first, last = 2**k + 1, 2**k + 1 + LAST_REFUSED[k]
    for n in {first, last}:
        assert of_grain(n, 3, [n - 1]) == of_grain(n, 3, [n - 1 - 2**k]), f"n={n}"
        with pytest.raises(Misuse, match=f"leave out the last {n - 2**k} of the records"):
            GrainOrder(n, seed=3)
    for n in (first - 2, first - 1, last + 1):
        there = sorted({0, n - 1 - min(n - 1, 2**k), n - 2, n - 1})
        records = of_grain(n, 3, there)
        assert len(set(records)) == len(there)
        assert GrainOrder(n, seed=3)(there).tolist() == records, f"n={n}"


def test_odd_powers_are_served() -> None:
    for k in range(1, 62, 2):
        n = 2**k + 1
        assert GrainOrder(n, seed=3)([0, n - 1]).tolist() == of_grain(n, 3, [0, n - 1]), f"n={n}"


def test_a_bijection_below_two_to_the_sixteen_whatever_n() -> None:
    for n in (2, 3, 5, 17, 257, 4097, 16_385, 65_535):
        order = GrainOrder(n, seed=n)
        assert np.array_equal(np.sort(order(np.arange(n))), np.arange(n)), f"n={n}"
        assert np.array_equal(order.inverse(order(np.arange(n))), np.arange(n)), f"n={n}"


# -- use -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [100, 100_003])
def test_arrays_of_any_shape(n: int) -> None:
    order: Order = GrainOrder(n, seed=9)
    positions = np.arange(12, dtype=np.int32).reshape(3, 4).T
    before = positions.copy()
    records = order(positions)
    assert records.shape == (4, 3)
    assert records.dtype == order.inverse(records).dtype == np.int64
    assert np.array_equal(records.ravel(), order(positions.ravel()))
    assert order(5) == records[1, 1]
    assert order([]).size == 0
    assert np.array_equal(positions, before)
    assert np.array_equal(pickle.loads(pickle.dumps(order))(positions), records)


@pytest.mark.parametrize(
    "arguments",
    [
        {"n": 0, "seed": 1},
        {"n": LIMIT + 1, "seed": 1},
        {"n": 5, "seed": -1},
        {"n": 5, "seed": 2**32},
        {"n": 5, "seed": True},
        {"n": 5, "seed": 1, "epoch": -1},
    ],
)
def test_refuses_what_is_out_of_range(arguments: dict[str, int]) -> None:
    with pytest.raises(Misuse, match="must be an integer in"):
        GrainOrder(**arguments)


@pytest.mark.parametrize("n", [10, 100_003])
def test_refuses_indices_outside(n: int) -> None:
    order = GrainOrder(n, seed=1)
    for bad in (-1, n, [3, n + 1], np.uint64(2**63)):
        with pytest.raises(Misuse, match=rf"outside \[0, {n}\)"):
            order(bad)
        with pytest.raises(Misuse, match=rf"outside \[0, {n}\)"):
            order.inverse(bad)
    with pytest.raises(Misuse, match="dtype float64"):
        order([0.5])

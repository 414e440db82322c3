"""First fit of many windows at once against one window by itself."""

from __future__ import annotations

import numpy as np
import pytest
from packing_oracle import as_lists, packed_by_hand

from datapipe.sources import fitting
from datapipe.sources.fitting import openers
from datapipe.sources.indexes import Lengths
from datapipe.sources.packing import pack

SEED = 17


def one_by_one(sizes, bounds, capacity):
    found = []
    for first, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        found += [first + each for each in fitting._first_fit(sizes[first:stop].tolist(), capacity)]
    return found


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """How many windows had a piece placed, by step."""
    found: list[int] = []
    real = fitting._Trees.placed

    def placed(self, sizes):
        found.append(sizes.size)
        return real(self, sizes)

    monkeypatch.setattr(fitting._Trees, "placed", placed)
    return found


@pytest.mark.parametrize("capacity", [2, 20, 2048, 32767, 32768, 2**31 - 1])
@pytest.mark.parametrize("pieces", [1, 15, 16, 17, 256, 257, 300])
def test_windows_at_once_are_windows_one_by_one(capacity, pieces):
    rng = np.random.default_rng([SEED, capacity, pieces])
    counts = rng.integers(1, pieces + 1, fitting._MANY + 3)
    counts[5] = pieces
    bounds = np.concatenate([[0], np.cumsum(counts)])
    sizes = 1 + (rng.random(bounds[-1]) ** 3 * (capacity - 1)).astype(np.int64)
    sizes[:: max(1, sizes.size // 7)] = capacity - 1  # hardly any room is left
    found = openers(sizes, bounds, capacity, "first-fit")
    assert found.tolist() == one_by_one(sizes, bounds, capacity), f"seed {SEED}"


def test_deep_trees():
    rng = np.random.default_rng(SEED)
    bounds = np.arange(fitting._MANY + 1) * 4200
    sizes = rng.integers(500, 1000, bounds[-1])  # one or two in a bin: most bins of all
    found = openers(sizes, bounds, 1000, "first-fit")
    some = slice(0, 2 * 4200)
    assert found[some].tolist() == one_by_one(sizes, bounds[:3], 1000), f"seed {SEED}"
    assert (found >= np.repeat(bounds[:-1], 4200)).all()
    assert np.bincount(found, sizes).max() <= 1000


def test_groups_of_windows(monkeypatch, steps):
    rng = np.random.default_rng(SEED)
    windows = 3 * fitting._MANY + 5
    bounds = np.arange(windows + 1) * 10
    sizes = rng.integers(1, 100, bounds[-1])
    monkeypatch.setattr(fitting, "_HELD", 400)
    found = openers(sizes, bounds, 100, "first-fit")
    assert found.tolist() == one_by_one(sizes, bounds, 100), f"seed {SEED}"
    assert len(steps) == 3 * 10
    assert sum(steps) == sizes.size


def test_steps_do_not_grow_with_documents(steps):
    for documents in (4_000, 40_000):
        steps.clear()
        pack(Lengths.of(np.arange(documents) % 37), 64, window=100)
        assert len(steps) <= 100
    steps.clear()
    pack(Lengths.of(np.arange(4_000) % 37), 64, window=1000)
    assert steps == [], "a few windows are faster one by one"


@pytest.mark.parametrize("oversized", [0, 3])
def test_bins_are_those_of_a_packer_that_tries_all(steps, oversized):
    rng = np.random.default_rng([SEED, oversized])
    lengths = rng.integers(0, 40, 50 * 8).tolist()
    for document in rng.integers(0, len(lengths), 10 * oversized).tolist():
        lengths[document] = int(rng.integers(40, 200))
    bins = pack(Lengths.of(lengths), 40, window=8)
    wanted = packed_by_hand(lengths, 40, 8, "first-fit")
    assert as_lists(bins.pieces(range(len(bins))), len(bins)) == wanted, f"seed {SEED}"
    assert steps


@pytest.mark.parametrize("lengths", [[], [0] * 99, [8] * 99, [0, 8] * 99])
def test_nothing_to_fit(lengths):
    bins = pack(Lengths.of(lengths), 8, window=2)
    assert len(bins) == lengths.count(8)

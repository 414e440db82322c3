"""Bins against a packer that tries every bin in turn; their sidecar."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_oracle import as_lists, packed_by_hand

from datapipe import Damaged, Mismatch, Misuse, NotFound
from datapipe.sources import sidecar
from datapipe.sources.indexes import Lengths
from datapipe.sources.packing import VERSION, Bins, Packed, pack
from datapipe.sources.sidecar import Sidecar

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


@given(LENGTHS, st.integers(1, 30), st.integers(1, 70), st.sampled_from(["first-fit", "best-fit"]))
def test_bins_are_those_of_a_packer_that_tries_all(lengths, capacity, window, strategy):
    bins = pack(Lengths.of(lengths), capacity, window=window, strategy=strategy)
    wanted = packed_by_hand(lengths, capacity, window, strategy)
    assert as_lists(bins.pieces(range(len(bins))), len(bins)) == wanted
    room = len(wanted) * capacity
    assert bins.padding_share == pytest.approx(1 - sum(lengths) / room if room else 0)
    for document in range(len(lengths)):
        holding = [b for b, held in enumerate(wanted) if document in {piece[0] for piece in held}]
        assert bins.bins(document).tolist() == holding


@given(LENGTHS, st.data())
def test_any_bins_in_any_order(lengths, data):
    bins = pack(Lengths.of(lengths), 16, window=8)
    every = as_lists(bins.pieces(range(len(bins))), len(bins))
    some = data.draw(st.lists(st.integers(0, len(bins) - 1)) if len(bins) else st.just([]))
    found = as_lists(bins.pieces(np.array(some, np.int64)), len(some))
    assert found == [every[b] for b in some]


def test_wide_lengths_and_bins():
    bins = pack(Lengths.of([2**33, 5]), 2**31 - 1, window=2)
    assert as_lists(bins.pieces([0, 4]), 2) == [
        [(0, 0, 2**31 - 1)],
        [(0, 4 * (2**31 - 1), 4), (1, 0, 5)],
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"capacity": 0}, "capacity must be an integer in [1, 2147483647], found 0"),
        ({"capacity": True}, "found True"),
        ({"window": 0}, "window must be an integer in [1,"),
        ({"strategy": "worst-fit"}, "strategy must be one of first-fit, best-fit, found 'worst"),
        ({"oversize": "drop"}, "oversize must be one of split, refuse, found 'drop'"),
        ({"oversize": "refuse"}, "document 1 has 9 tokens, a bin 8: raise the capacity"),
    ],
)
def test_wrong_use(change, told):
    options = {"capacity": 8, "window": 4} | change
    with pytest.raises(Misuse) as caught:
        pack(Lengths.of([8, 9]), **options)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("given_lengths", "told"),
    [
        ([1, -2], "document 1 has a length of -2"),
        ([0.5], "one integer for each document, found float64"),
        ([[1]], "of shape [1, 1]"),
        (np.array([2**60] * 3), "2^61 tokens or more"),
        (np.array([2**63], np.uint64), "2^61 tokens or more"),
    ],
)
def test_what_is_no_length(given_lengths, told):
    with pytest.raises(Misuse) as caught:
        Lengths.of(given_lengths)
    assert told in str(caught.value)


# -- the sidecar -----------------------------------------------------------------------------------


@pytest.fixture
def lengths():
    rng = np.random.default_rng(3)
    return Lengths.of(rng.integers(0, 50, 200))


def made(lengths, **change):
    options = {"capacity": 32, "window": 64, "strategy": "first-fit", "oversize": "split"}
    return Packed.of(lengths, **(options | change))


def test_saved_bins_are_the_same(tmp_path, lengths):
    bins = pack(lengths, 32, window=64)
    bins.save(tmp_path / "bins")
    again = Bins.load(tmp_path / "bins", made(lengths), lengths)
    for name in ("bounds", "records", "starts", "lengths"):
        np.testing.assert_array_equal(getattr(again, name), getattr(bins, name))
    assert again.made == bins.made
    assert [path.name for path in tmp_path.iterdir()] == ["bins"]


def test_bins_of_other_lengths_or_settings_are_refused(tmp_path, lengths):
    pack(lengths, 32, window=64).save(tmp_path / "bins")
    with pytest.raises(Mismatch) as caught:
        Bins.load(tmp_path / "bins", made(lengths, capacity=31, strategy="best-fit"), lengths)
    assert caught.value.differences == (
        "capacity: wanted 31, found 32",
        "strategy: wanted best-fit, found first-fit",
    )
    others = Lengths.of([*lengths.tokens[:-1].tolist(), 51])
    with pytest.raises(Mismatch, match="lengths: wanted"):
        Bins.load(tmp_path / "bins", made(others), others)
    with pytest.raises(NotFound):
        Bins.load(tmp_path / "none", made(lengths), lengths)


def test_bins_that_cannot_be(tmp_path, lengths):
    """Written with a good digest, by somebody who means harm."""
    bins = pack(lengths, 32, window=64)
    about = {name: getattr(bins.made, name) for name in bins.made.__dataclass_fields__}
    good = {n: getattr(bins, n) for n in ("bounds", "records", "starts", "lengths")}

    def changed(name, at, value):
        array = good[name].copy()
        array[at] = value
        return good | {name: array}

    for arrays, told in [
        (changed("bounds", 0, 1), "do not part"),
        (changed("bounds", -1, 10**9), "do not part"),
        (changed("bounds", 1, 0), "do not part"),
        (good | {"bounds": good["bounds"][:0]}, "do not part"),
        (changed("records", 3, 200), "no document in [0, 200)"),
        (changed("records", 3, -1), "no document"),
        (changed("starts", 3, -1), "begins before"),
        (changed("starts", 3, 2**63 - 1), "ends behind"),
        (changed("lengths", 3, 0), "is empty"),
        (changed("lengths", 3, 2**31 - 1), "ends behind"),
        (good | {"lengths": good["lengths"][1:]}, "not of one size"),
        (good | {"lengths": good["lengths"].astype(np.int64)}, "its arrays are"),
        ({"bounds": good["bounds"]}, "its arrays are"),
    ]:
        sidecar.write(tmp_path / "bins", Sidecar("bins", VERSION, about, arrays))
        with pytest.raises(Damaged) as caught:
            Bins.load(tmp_path / "bins", made(lengths), lengths)
        assert told in str(caught.value)
        assert "remove it" in str(caught.value)

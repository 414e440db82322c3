"""Rows of an epoch against documents laid end to end in a list."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_oracle import as_lists, rows_by_hand

from datapipe import Misuse
from datapipe.order.streams import Orders
from datapipe.sources import concatenation
from datapipe.sources.concatenation import Concatenation
from datapipe.sources.indexes import Lengths


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(concatenation, "BLOCK", 4)
    monkeypatch.setattr(concatenation, "_CHUNK", 12)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60),
    st.integers(1, 40),
    st.sampled_from(["drop", "keep"]),
    st.sampled_from(["global", "none"]),
    st.data(),
)
def test_rows_are_those_of_a_list(lengths, capacity, remainder, shuffle, data):
    seed = data.draw(st.integers(0, 2**64 - 1))
    orders = Orders(shuffle, len(lengths), seed, 1)
    laid = Concatenation(Lengths.of(lengths), capacity, orders, remainder)
    for epoch in (0, 1, 7):
        order = orders(epoch)(np.arange(len(lengths))).tolist()
        wanted = rows_by_hand(lengths, order, capacity, remainder)
        assert len(laid) == len(wanted)
        assert as_lists(laid.pieces(epoch, np.arange(len(wanted))), len(wanted)) == wanted
        if wanted:
            some = data.draw(st.lists(st.integers(0, len(wanted) - 1), max_size=5))
            found = as_lists(laid.pieces(epoch, np.array(some, np.int64)), len(some))
            assert found == [wanted[row] for row in some]
        for document in range(len(lengths)):
            holding = [r for r, held in enumerate(wanted) if document in {p[0] for p in held}]
            assert laid.rows(epoch, document).tolist() == holding


def test_a_far_row_looks_at_its_own_blocks_only():
    asked = []

    class Counting:
        n = 4000

        def __call__(self, positions):
            asked.append(np.asarray(positions).size)
            return np.asarray(positions)

    laid = Concatenation(Lengths.of([10] * 4000), 25, lambda _: Counting())
    laid.pieces(0, [0])
    assert sum(asked) == 4000 + 4  # the index, once, and one block
    asked.clear()
    laid.pieces(0, [1234])
    assert sum(asked) <= 8


def test_the_index_of_an_epoch_is_built_once():
    built = []
    barrier = threading.Barrier(4)

    def orders(epoch):
        built.append(epoch)
        return Orders("global", 50, 3, 0)(epoch)

    laid = Concatenation(Lengths.of([7] * 50), 8, orders)
    wanted = laid.pieces(5, np.arange(len(laid)))

    def ask(_):
        barrier.wait(30)
        return laid.pieces(6, np.arange(len(laid)))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert built == [5, 6]
    for each in found[1:]:
        np.testing.assert_array_equal(each.records, found[0].records)
    np.testing.assert_array_equal(laid.pieces(5, np.arange(len(laid))).records, wanted.records)
    assert built == [5, 6]
    for epoch in (7, 5, 6):  # two are held
        laid.cut(epoch)
    assert built == [5, 6, 7, 6]


def test_goes_to_other_processes():
    laid = Concatenation(Lengths.of([3, 9, 4]), 5, Orders("global", 3, 1, 0), "keep")
    again = pickle.loads(pickle.dumps(laid))
    np.testing.assert_array_equal(again.pieces(2, [0, 3]).records, laid.pieces(2, [0, 3]).records)
    assert len(again) == len(laid) == 4


def test_wrong_use():
    with pytest.raises(Misuse, match="remainder must be one of drop, keep, found 'carry'"):
        Concatenation(Lengths.of([3]), 5, Orders("global", 1, 1, 0), "carry")
    laid = Concatenation(Lengths.of([30]), 5, Orders("global", 1, 1, 0))
    with pytest.raises(Misuse, match=r"index 6 is outside \[0, 6\)"):
        laid.pieces(0, [6])
    with pytest.raises(Misuse, match="epoch must be an integer"):
        laid.pieces(-1, [0])
    with pytest.raises(Misuse, match="a document must be an integer"):
        laid.rows(0, 1)

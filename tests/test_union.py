"""States of several processes that differ in what each has found for itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streams import Stream

import ckpt
from ckpt import states
from ckpt.union import can_be_united, common_state

ASCENDING = st.sets(st.integers(0, 2**70), max_size=5).map(sorted)


def entry(state: Any, *, elastic: bool = True, united: list[str] | None = None) -> dict[str, Any]:
    found = {"state": state, "batch_size": 4, "elastic": elastic}
    return found if united is None else {**found, "united": united}


@given(st.lists(ASCENDING, min_size=1, max_size=4))
def test_a_list(found: list[list[int]]) -> None:
    taken = [entry({"at": 3, "bad": each, "end": 0}, united=["bad"]) for each in found]
    state = common_state(taken)
    assert state == {"at": 3, "bad": sorted(set(itertools.chain(*found))), "end": 0}
    assert list(state) == ["at", "bad", "end"]  # the same bytes as if all had known
    assert all(can_be_united(value) for value in (*found, state["bad"]))


@given(st.lists(st.lists(ASCENDING, max_size=3), min_size=1, max_size=4))
def test_lists_by_place(found: list[list[list[int]]]) -> None:
    state = common_state([entry({"bad": each}, united=["bad"]) for each in found])
    places = max(map(len, found))
    wanted = [
        sorted({id for each in found if place < len(each) for id in each[place]})
        for place in range(places)
    ]
    assert state == {"bad": wanted}


@pytest.mark.parametrize(
    "taken",
    [
        [entry({"at": 3, "bad": []}, united=["bad"]), entry({"at": 4, "bad": [1]}, united=["bad"])],
        [entry({"at": 3, "bad": []}), entry({"at": 3, "bad": [1]})],
        [entry({"at": 3, "bad": []}, united=["bad"]), entry({"at": 3, "bad": [1]})],
        [entry({"at": 3, "bad": []}, united=["bad"]), entry({"bad": [1]}, united=["bad"])],
        [entry({"bad": [1, 2]}, united=["bad"]), entry({"bad": [[1]]}, united=["bad"])],
        [entry({"bad": []}, elastic=False, united=["bad"])] * 2,
    ],
)
def test_states_that_have_nothing_in_common(taken: list[dict[str, Any]]) -> None:
    assert common_state(taken) is None


@pytest.mark.parametrize(
    "value", [None, 3, "12", [2, 1], [1, 1], [True], [1.0], [[1], 2], [[2, 1]]]
)
def test_what_cannot_be_united_is_refused_when_it_is_saved(value: Any) -> None:
    assert not can_be_united(value)
    data = Stream({"at": 3, "bad": value})
    data.united = ["bad"]  # type: ignore[attr-defined]
    with pytest.raises(ckpt.Misuse, match="`united` of Stream names 'bad': wanted a list of"):
        states.take(data)


def test_a_member_that_is_not_there() -> None:
    data = Stream([1, 2])
    data.united = ["bad"]  # type: ignore[attr-defined]
    with pytest.raises(ckpt.Misuse, match="names 'bad'"):
        states.take(data)

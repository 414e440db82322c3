"""States of iterators in JSON: exactly what they were, types included, whatever a file says."""

from __future__ import annotations

import collections
import datetime
import enum
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckpt.errors import Damaged, Misuse
from ckpt.stored_states import MAX_BYTES, loaded, stored

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**2000), 2**2000)
    | st.floats()
    | st.text()
    | st.binary()
    | arrays.scalar_dtypes().filter(lambda d: d.kind in "biuf").flatmap(arrays.from_dtype)
    | arrays.arrays(st.sampled_from(["<i8", ">u4", "<f4", "|b1", "<U3", "|S2"]), (2, 0, 3))
    | arrays.arrays(st.sampled_from(["<i8", "<f8"]), st.integers(0, 3))
)
KEYS = st.text() | st.integers() | st.just("$") | st.binary() | st.booleans()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal with all types: 1, 1.0, True and an array of 1 are four values, nan is itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, dict):
        keys = {(type(key), key) for key in one} == {(type(key), key) for key in other}
        return keys and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one != other != other


@given(VALUES)
def test_what_comes_back_is_what_it_was(value: Any) -> None:
    found = stored(value, "state")
    assert same(loaded(json.loads(json.dumps(found)), "here"), value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(),
        lambda v: st.lists(v) | st.dictionaries(st.text().filter(lambda key: key != "$"), v),
    )
)
def test_json_stays_as_it_is(value: Any) -> None:
    assert stored(value, "state") == value


def test_subclasses_come_back_as_what_they_derive_from() -> None:
    class Color(enum.IntEnum):
        RED = 3

    value = {"a": Color.RED, "b": collections.OrderedDict(x=1), "c": collections.Counter("aa")}
    assert same(loaded(stored(value, "state"), "here"), {"a": 3, "b": {"x": 1}, "c": {"a": 2}})


Pair = collections.namedtuple("Pair", "one other")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"at": [0, Pair(1, 2)]}, r"state\['at'\]\[1\]: .*found .*Pair"),
        ({"at": datetime.date(2020, 1, 1)}, r"state\['at'\]: .*found datetime.date"),
        ({"at": {1, 2}}, "found builtins.set"),
        ({"at": np.array([object()])}, "wanted numbers or texts in a NumPy array, found object"),
        ({"at": np.datetime64("2020-01-01")}, "found datetime64"),
        (b"x" * (MAX_BYTES + 1), f"at most {MAX_BYTES} bytes in JSON, found"),
    ],
)
def test_what_has_no_form_is_named(value: Any, told: str) -> None:
    with pytest.raises(Misuse, match=told):
        stored(value, "state")


HOSTILE = [
    {"$": ["pickle", "gASVAAAA"]},
    {"$": ["tuple", [1]], "more": 1},
    {"$": "tuple"},
    {"$": []},
    {"$": None},
    {"$": ["int", "12z"]},
    {"$": ["bytes", "***"]},
    {"$": ["utf-8", "\ud800"]},
    {"$": ["dict", [[1, 2, 3]]]},
    {"$": ["dict", [[[1], 2]]]},
    {"$": ["dict", 5]},
    {"$": ["scalar", "|O8", "AAAAAAAAAAA="]},
    {"$": ["scalar", "<i8", "AAAA"]},
    {"$": ["scalar", "<i8,<i8", "AAAAAAAAAAA="]},
    {"$": ["scalar", "<U999999", ""]},
    {"$": ["array", "<i8", [2**40, 2**40], ""]},
    {"$": ["array", "<i8", [0, 2**62], ""]},
    {"$": ["array", "<i8", [-1], "AAAAAAAAAAA="]},
    {"$": ["array", "<i8", [True], "AAAAAAAAAAA="]},
    {"$": ["array", "<i8", [0] * 100, ""]},
    {"a": [{"$": ["array", "<i8", [1], "AAAAAAAAAAA=", 0]}]},
    json.loads("[" * 300 + "]" * 300),
    json.loads('{"a":' * 300 + "1" + "}" * 300),
]


@pytest.mark.parametrize("value", HOSTILE)
def test_what_is_never_stored_is_damage(value: Any) -> None:
    with pytest.raises(Damaged, match="here: no state of an iterator"):
        loaded(value, "here")


JSON = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["<i8", "array", "$", "AAAA"]),
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.sampled_from(["$", "a"]), v),
)


@given(JSON)
def test_any_json_is_a_state_or_damage(value: Any) -> None:
    try:
        found = loaded(value, "here")
    except Damaged:
        return
    assert same(loaded(stored(found, "state"), "here"), found)

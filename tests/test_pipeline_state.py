"""States of pipelines: what they tell, how they are parsed, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
from base_pipeline import base
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Records, number

import datapipe
from datapipe import Damaged, Mismatch, Pipeline, Unsupported
from datapipe.batches.substitutes import Replaced
from datapipe.identity import identity_of, mismatch
from datapipe.order.plan import Plan
from datapipe.state import State


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (lambda: base(seed=2), "plan.seed: saved 1, here 2"),
        (lambda: base(shuffle=False), "plan.shuffle: saved 'global', here 'none'"),
        (lambda: base(source=Records(21)), "segment.items: saved [20], here [21]"),
        (
            lambda: base(source=Records(20, name="b")),
            "sources.source.name: saved 'memory', here 'b'",
        ),
        (
            lambda: Pipeline(Records(20), batch_size=4, seed=1).map(number, version="2"),
            "transforms[0]: saved 'map 1', here 'map 2'",
        ),
        (
            lambda: base().map_batch(lambda b: b, version="1"),
            "transforms[1]: saved nothing, here 'map_batch 1'",
        ),
        (
            lambda: Pipeline(Records(20), batch_size=4, seed=1),
            "transforms[0]: saved 'map 1', here nothing",
        ),
    ],
)
def test_a_state_of_other_data_is_refused(other, line):
    iterator = base().iterator(prefetch=0)
    next(iterator)
    changed = other().iterator(prefetch=0)
    before = changed.get_state()
    with pytest.raises(Mismatch, match="the saved position belongs to other data") as caught:
        changed.set_state(iterator.get_state())
    assert line in caught.value.differences
    assert line in str(caught.value)
    assert changed.get_state() == before


def test_all_differences_are_told_at_once():
    state = base().iterator().get_state()
    with pytest.raises(Mismatch) as caught:
        base(seed=2, shuffle=False, source=Records(30)).iterator().set_state(state)
    told = " ".join(caught.value.differences)
    for part in ("plan.seed", "plan.shuffle", "sources.source.fingerprint", "segment.items"):
        assert part in told


def test_batch_size_and_length_of_the_run_are_no_part_of_it():
    state = base().iterator().get_state()
    for changes in ({"batch_size": 7}, {"epochs": 5}, {"epochs": None}, {"remainder": "keep"}):
        iterator = base(**changes).iterator()
        iterator.set_state(state)
        told = {"remainder": "keep"} if "remainder" in changes else {}
        assert json.dumps(iterator.get_state()) == json.dumps({**state, **told})


def test_a_position_beyond_the_end_is_refused():
    iterator = base(epochs=3).iterator(prefetch=0)
    iterator.seek(50)
    with pytest.raises(Mismatch, match=r"saved 50, here the last epoch ends at 40; give more"):
        base(epochs=2).iterator().set_state(iterator.get_state())


def test_the_state_is_small_and_plain_json():
    class Wide(Records):
        def fingerprint(self):
            files = [{"name": f"shard-{i:05d}", "digest": "f" * 32} for i in range(4000)]
            many = {f"field-{i}": "v" * 20 for i in range(100)}
            return {"files": files, "digest": "d" * 32, **many}

    iterator = base(source=Wide(20)).iterator()
    state = iterator.get_state()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) <= 1024
    iterator.skip((3 * 10**9 + 100 * i, 3 * 10**9 + 100 * i + 10) for i in range(100))
    skipped = json.dumps(iterator.get_state(), separators=(",", ":"))
    assert len(skipped) <= 1024 + 32 * 100


def test_a_state_is_a_copy():
    iterator = base().iterator()
    state = iterator.get_state()
    state["plan"]["seed"] = 99
    state["skips"].append(1)
    state["transforms"].clear()
    assert iterator.get_state() == base().iterator().get_state()


def good():
    known = identity_of(Plan.of(20, 4, seed=1), {"source": {"a": 1}}, ["map 1"])
    return State(8, ((9, 12), (15, 16)), Replaced.of([(0, 5), (0, 17)]), known, "carry").to_json()


def test_parse_is_the_inverse_of_emit():
    assert State.from_json(good()).to_json() == good()
    assert State.from_json(json.loads(json.dumps(good()))).to_json() == good()
    assert mismatch(State.from_json(good()).identity, good()) == []


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        ((), None, Damaged, "not a data state"),
        ((), [], Damaged, "not a data state"),
        ((), {"next_index": 3}, Damaged, "states of other loaders do not fit"),
        (("format",), 5, Unsupported, "format 5: this release reads formats 2 to 4"),
        (("format",), 1, Unsupported, "format 1: this release reads formats 2 to 4"),
        (("format",), "2", Damaged, "format: wanted an integer"),
        (("format",), 2, Damaged, "unknown fields.*replaced"),
        (("next_example",), -1, Damaged, "next_example"),
        (("next_example",), 2**63, Damaged, "next_example"),
        (("next_example",), True, Damaged, "next_example"),
        (("next_example",), 1.0, Damaged, "next_example"),
        (("skips",), "ab", Damaged, "skips: wanted a list"),
        (("skips",), [9], Damaged, "wanted pairs of gap and length"),
        (("skips", 0), -1, Damaged, r"skips\[0\], a gap"),
        (("skips", 0), [12, 9], Damaged, r"skips\[0\], a gap"),
        (("skips", 1), 0, Damaged, r"skips\[1\], a length"),
        (("skips", 2), 0, Damaged, r"skips\[2\], a gap"),  # adjacent: would be one range
        (("skips", 1), 2**62, Damaged, "is of two sources"),
        (("replaced",), 7, Damaged, "replaced: wanted a list"),
        (("replaced", 0), "ab", Damaged, r"replaced\[0\]: wanted a list"),
        (("replaced", 0), [-1], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [2**62], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [True], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [5, 5], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [5, 4], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [], Damaged, "the last of which has some"),
        (("replaced",), [[], [3]], Damaged, "records of 1 sources or fewer"),
        (("segments",), [], Damaged, "begins at example 0"),
        (("segments", 0), {"first": 1, "items": [20], "counts": [1]}, Damaged, "example 0"),
        (("segments", 0), {"first": 0, "items": [20], "counts": [0]}, Damaged, "a mixture wants"),
        (("segments", 0), {"first": 0, "items": [20], "counts": [1, 1]}, Damaged, "a count for"),
        (("segments", 0), {"first": 0, "items": [2, 2], "counts": [1, 1]}, Damaged, "1 sources"),
        (("segments", 0), {"first": 0}, Damaged, "missing fields"),
        (("segments", 0), 7, Damaged, "wanted an object"),
        (("plan",), [], Damaged, "plan: wanted an object"),
        (("plan", "seed"), None, Damaged, "plan: wanted names"),
        (("sources",), {}, Damaged, "sources: wanted a list"),
        (("sources",), [], Damaged, "items of 0 sources"),
        (("sources", 0), ["a"], Damaged, "wanted a new name and an object"),
        (("sources", 0), [1, {}], Damaged, "wanted a new name and an object"),
        (("sources", 0, 1), {1: 2}, Damaged, "wanted names"),
        (("transforms",), [3], Damaged, "transforms: wanted texts"),
        (("extra",), 3, Damaged, "unknown fields"),
    ],
)
def test_a_state_is_parsed_as_hostile(path, value, error, text):
    state = copy.deepcopy(good())
    if path:
        *inner, last = path
        place = state
        for key in inner:
            place = place[key]
        place[last] = value
    else:
        state = value
    with pytest.raises(error, match=text):
        State.from_json(state)


def test_states_of_earlier_formats_are_read():
    third = {**good(), "format": 3}
    assert State.from_json(third).to_json() == third
    second = {**good(), "format": 2}
    del second["replaced"]
    assert State.from_json(second).to_json() == {**third, "replaced": []}


@pytest.mark.parametrize("field", sorted(good()))
def test_a_missing_field_is_named(field):
    state = good()
    del state[field]
    with pytest.raises(Damaged, match=field):
        State.from_json(state)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(good())), JSON_VALUES)
def test_no_value_gets_past_the_parser_unseen(field, value):
    """Either an error of ours, or a state that means what it says."""
    state = {**good(), field: value}
    try:
        parsed = State.from_json(state)
    except datapipe.DataError:
        return
    assert json.dumps(parsed.to_json()) == json.dumps(state)

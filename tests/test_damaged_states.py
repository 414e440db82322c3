"""Any field of a real state gone or altered: what may come of it is what `set_state` says."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_source import Records

from datapipe import Damaged, Mismatch, Pipeline, Unsupported
from datapipe.integers import LIMIT

TOLD = (Damaged, Mismatch, Unsupported)


def made(**options: Any) -> Pipeline:
    return Pipeline(
        {"web": Records(40), "code": Records(30, name="code")},
        batch_size=4,
        seed=3,
        weights={"web": 3, "code": options.pop("weight", 1)},
        on_bad_record="replace",
        **options,
    ).map(lambda value: value, version="1")


def real(**options: Any) -> Any:
    """With skips of both sources, two segments and records that are replaced."""
    iterator = made(**options).iterator()
    iterator.skip([(2, 5), (LIMIT + 3, LIMIT + 4)])
    for _ in range(3):
        next(iterator)
    state = {**iterator.get_state(), "replaced": [[5, 17], [2]]}
    iterator.close()
    changed = made(weight=2, **options).iterator(on_change="segment")
    changed.set_state(state)
    for _ in range(3):
        next(changed)
    state = changed.get_state()
    changed.close()
    assert len(state["segments"]) == 2
    return state


STATES = {shuffle: real(shuffle=shuffle) for shuffle in ("global", "blocks")}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All fields and items, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(inner):
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


def taken(state: Any, shuffle: str) -> None:
    """By pipelines of now and of before, with and without leave to open a segment."""
    for weight in (1, 2):
        for on_change in ("raise", "segment"):
            with made(weight=weight, shuffle=shuffle).iterator(on_change=on_change) as iterator:
                before = iterator.get_state()
                try:
                    iterator.set_state(state)
                except TOLD:
                    assert iterator.get_state() == before
                else:
                    json.dumps(iterator.get_state())


@pytest.mark.parametrize("shuffle", STATES)
def test_a_field_that_is_gone(shuffle: str) -> None:
    for path in places(STATES[shuffle]):
        state = copy.deepcopy(STATES[shuffle])
        place = state
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        taken(state, shuffle)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 50)
    | st.sampled_from([LIMIT - 1, LIMIT, LIMIT + 1, 7 * LIMIT, 2**63])
    | st.floats()
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=300)
@given(st.data())
def test_a_field_that_is_another(data: st.DataObject) -> None:
    shuffle = data.draw(st.sampled_from(sorted(STATES)))
    state = copy.deepcopy(STATES[shuffle])
    path = data.draw(st.sampled_from(sorted(places(state), key=repr)))
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = data.draw(JSON_VALUES)
    taken(state, shuffle)


def test_a_skip_of_a_source_that_is_not_there() -> None:
    state = {**STATES["global"], "skips": [7 * LIMIT + 2, 3]}
    with made().iterator() as iterator, pytest.raises(Damaged, match="found source 7"):
        iterator.set_state(state)


@pytest.mark.parametrize("value", [None, 7])
def test_a_source_without_a_fingerprint(value: Any) -> None:
    state = copy.deepcopy(STATES["global"])
    source = state["sources"][1][1]
    del source["fingerprint"]
    if value is not None:
        source["fingerprint"] = value
    with (
        made(weight=2).iterator(on_change="segment") as iterator,
        pytest.raises(Damaged, match="wanted a text as fingerprint"),
    ):
        iterator.set_state(state)

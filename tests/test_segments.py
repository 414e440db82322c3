"""Weights, sources and their lengths change on the way: nothing jumps, repeats or gets lost."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from segment_runs import opening, pipeline, rows, segments, taken

import formats
from datapipe import Mismatch, Pipeline, Where
from datapipe.integers import LIMIT
from datapipe.order.mixture import Mixture


def test_blocks_begin_at_the_opening_and_are_exact() -> None:
    one = opening()
    taken(one, 5)
    two = opening(weights=(1, 4))
    two.set_state(one.get_state())
    after = taken(two, 25)
    for start in range(0, 100, 5):
        assert Counter(source for source, _ in after[start : start + 5]) == {0: 1, 1: 4}


# -- openings --------------------------------------------------------------------------------------


def test_an_opening_is_told_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    one = opening()
    before = taken(one, 5)
    two = opening({"a": (20, 20, 5), "b": (11,), "c": (7,)}, (1, 1, 2))
    with caplog.at_level(logging.WARNING, "datapipe"):
        two.set_state(one.get_state())
    assert [record.getMessage() for record in caplog.records] == [
        "a segment opens at example 20: a 75% -> 25% of the examples, a 40 -> 45 items, the new "
        "ones from its epoch 1 on, c is new, 7 items, 50% of the examples"
    ]
    assert segments(two) == [(0, [40, 11], [3, 1]), (20, [45, 11, 7], [1, 1, 2])]
    after = taken(two, 25)
    ids = Counter([*before, *after])
    assert {ids[0, item] for item in range(40)} == {1}  # 15 in the first segment, 25 in the second
    assert not any(ids[0, item] for item in range(40, 45))
    assert Counter(i for s, i in after if s == 0 and i >= 40) == Counter()
    assert [name for name, _ in two.get_state()["sources"]] == ["a", "b", "c"]
    caplog.clear()
    three = opening({"a": (20, 20, 5), "b": (11,), "c": (7,)}, (1, 1, 2))
    three.set_state(two.get_state())
    assert segments(three) == segments(two)
    plain = pipeline({"a": (20, 20, 5), "b": (11,), "c": (7,)}, (1, 1, 2)).iterator(prefetch=0)
    plain.set_state(two.get_state())  # raises at changes, and there are none
    assert taken(plain, 9) == taken(three, 9)
    assert caplog.records == []
    assert {i for s, i in taken(three, 60) if s == 0} >= {*range(40, 45)}


def test_no_segment_is_empty() -> None:
    one = opening()
    taken(one, 5)
    two = opening(weights=(1, 1))
    two.set_state(one.get_state())
    three = opening(weights=(1, 5))
    three.set_state(two.get_state())
    assert segments(three) == [(0, [40, 11], [3, 1]), (20, [40, 11], [1, 5])]
    four = opening(weights=(3, 1))
    four.set_state(three.get_state())
    assert segments(four) == segments(one)
    fresh = opening(weights=(2, 1))
    fresh.set_state(opening().get_state())
    assert segments(fresh) == [(0, [40, 11], [2, 1])]


def test_going_back_drops_what_was_opened(caplog: pytest.LogCaptureFixture) -> None:
    one = opening()
    taken(one, 3)
    early = one.get_state()
    taken(one, 3)
    two = opening(weights=(1, 1))
    two.set_state(one.get_state())
    taken(two, 2)
    later = two.get_state()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "datapipe"):
        two.set_state(early)
    assert segments(two) == [(0, [40, 11], [3, 1]), (12, [40, 11], [1, 1])]
    assert [record.getMessage() for record in caplog.records] == [
        "a segment opens at example 12: a 75% -> 50% of the examples, b 25% -> 50% of the "
        "examples; what had been opened at example 24 is dropped"
    ]
    caplog.clear()
    three = opening()  # the old weights again
    three.set_state(later)
    assert [first for first, _, _ in segments(three)] == [0, 24, 32]
    with caplog.at_level(logging.WARNING, "datapipe"):
        three.set_state(early)
    assert segments(three) == [(0, [40, 11], [3, 1])]
    assert [record.getMessage() for record in caplog.records][-1] == (
        "what had been opened at example 24, 32 is dropped"
    )


def test_a_position_before_the_last_opening_of_its_own_state() -> None:
    """Saved after a seek."""
    one = opening()
    taken(one, 6)
    two = opening(weights=(1, 1))
    two.set_state(one.get_state())
    two.seek(8)
    same = opening(weights=(1, 1))
    same.set_state(two.get_state())
    assert segments(same) == segments(two)
    assert taken(same, 9) == taken(two, 9)
    two.seek(8)
    other = opening(weights=(5, 1))
    other.set_state(two.get_state())
    assert [first for first, _, _ in segments(other)] == [0, 8]


@pytest.mark.parametrize("remainder", ["carry", "keep", "drop"])
def test_one_source_grows(remainder: str) -> None:
    one = opening({"a": (10,)}, (1,), remainder=remainder, epochs=3)
    taken(one, 1)
    two = opening({"a": (10, 6)}, (1,), remainder=remainder, epochs=3)
    two.set_state(one.get_state())
    assert two.plan.end == 10 + 16 + 16
    found = Counter(item for batch in two for _, item in rows(batch))
    left_out = {"carry": 2, "keep": 0, "drop": 2}[remainder]
    assert sum(found.values()) == 38 - left_out
    assert max(found.values()) <= 3
    assert {item for item in found if item >= 10} <= {*range(10, 16)}
    assert all(found[item] <= 2 for item in range(10, 16))


def test_new_records_that_no_epoch_will_have_are_told(caplog: pytest.LogCaptureFixture) -> None:
    one = opening({"a": (10,)}, (1,), epochs=1)
    taken(one, 1)
    with caplog.at_level(logging.WARNING, "datapipe"):
        opening({"a": (10, 6)}, (1,), epochs=1).set_state(one.get_state())
    assert "from its epoch 1 (with epochs=1 there is none: give more) on" in caplog.text


# -- files -----------------------------------------------------------------------------------------


def test_shards_are_appended(tmp_path: Path) -> None:
    """Nothing is lost, nothing repeats; and records are those of the files."""

    def write(name: str, first: int, count: int) -> None:
        records = [b"%d" % number for number in range(first, first + count)]
        formats.write_array_record(tmp_path / name, records)

    def iterator() -> Any:
        source = formats.open_source(tmp_path / "*.array_record")
        return Pipeline(source, batch_size=4, seed=1).iterator(on_change="segment")

    write("a.array_record", 0, 10)
    with iterator() as data:
        before = [int(record) for _ in range(4) for record in next(data)]
        state = data.get_state()
    write("b.array_record", 10, 7)
    with iterator() as data:
        data.set_state(state)
        after = [int(record) for _ in range(5) for record in next(data)]
    served = [*before, *after]
    assert sorted(served[:10]) == sorted(served[10:20]) == [*range(10)]
    assert len({*served[20:36]}) == 16
    write("a.array_record", 0, 11)
    with iterator() as data, pytest.raises(Mismatch, match=r"sources\.source: grown from 10 to 18"):
        data.set_state(state)


def test_what_is_filtered_takes_other_weights_and_cannot_grow(tmp_path: Path) -> None:
    def write(name: str, first: int, count: int) -> None:
        formats.write_parquet(tmp_path / name, {"id": np.arange(first, first + count)})

    def iterator(weights: dict[str, int]) -> Any:
        both = {name: formats.open_source(tmp_path / f"{name}-*.parquet") for name in weights}
        kept = {"a": Where("id", "<", 30)}
        pipe = Pipeline(both, batch_size=4, seed=1, weights=weights, filter=kept)
        return pipe.iterator(prefetch=0, on_change="segment")

    write("a-0.parquet", 0, 40)
    write("b-0.parquet", 100, 30)
    with iterator({"a": 1, "b": 1}) as data:
        before = [i for _ in range(5) for i in next(data)["id"].tolist()]
        state = data.get_state()
    write("b-1.parquet", 130, 30)
    with iterator({"a": 2, "b": 1}) as data:
        data.set_state(state)
        served = before + [i for _ in range(6) for i in next(data)["id"].tolist()]
        state = data.get_state()
    assert Counter(i >= 100 for i in served) == {False: 10 + 16, True: 10 + 8}
    assert len({*served}) == len(served)
    write("a-1.parquet", 0, 8)
    with (
        iterator({"a": 2, "b": 1}) as data,
        pytest.raises(Mismatch, match=r"sources\.a: grown from 30 to 38 records, and its files"),
    ):
        data.set_state(state)


# -- cost ------------------------------------------------------------------------------------------


def test_far_away_costs_what_near_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    one = opening()
    taken(one, 5)
    pipe = pipeline({"a": (20, 20, 9), "b": (11,), "c": (10**6,)}, (5, 1, 2), batch_size=256)
    two = pipe.iterator(prefetch=0, on_change="segment")
    two.set_state(one.get_state())
    two.skip([(5, 900), (LIMIT + 7, LIMIT + 3000), (2 * LIMIT + 10**12, 2 * LIMIT + 10**13)])
    calls: Counter[str] = Counter()
    for name in ("draw", "ordinals", "example"):
        monkeypatch.setattr(Mixture, name, _counting(calls, name, getattr(Mixture, name)))
    costs = []
    for at in (10**4, 10**8, 10**12, 10**15, 10**17):
        calls.clear()
        two.seek(at)
        state = two.get_state()
        two.set_state(state)
        two.span(state, 10**3, 10**3 + 2)
        two.position_after(state, 10**6)
        two.plan.describe(at // 256, 2)
        costs.append(calls.total())
    assert max(costs[1:]) <= 2 * costs[0] + 400, costs
    assert not any(source.calls for source in pipe.sources.values())


def _counting(calls: Counter[str], name: str, call: Any) -> Any:
    def counted(*args: Any) -> Any:
        calls[name] += 1
        return call(*args)

    return counted


def test_a_state_grows_by_its_segments_only() -> None:
    data = opening()
    empty = len(json.dumps(data.get_state(), separators=(",", ":")))
    for number in range(20):
        taken(data, 1)
        state = data.get_state()
        data = opening(weights=(1 + number % 3, 1))
        data.set_state(state)
    assert len(segments(data)) == 21
    assert len(json.dumps(data.get_state(), separators=(",", ":"))) <= empty + 20 * 64

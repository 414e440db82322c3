"""Changes that are refused: without leave, or since no segment can say them."""

from __future__ import annotations

from typing import Any

import pytest
from memory_source import Records
from segment_runs import opening, pipeline, taken

from datapipe import Damaged, Mismatch, Misuse, Pipeline
from datapipe.integers import LIMIT


@pytest.mark.parametrize(
    ("files", "weights", "difference"),
    [
        ({"a": (20, 20), "b": (11,)}, (1, 1), "segment.counts: saved [3, 1], here [1, 1]"),
        ({"a": (20, 20), "b": (11, 2)}, (3, 1), "segment.items: saved [40, 11], here [40, 13]"),
        (
            {"a": (20, 20), "b": (11,), "c": (4,)},
            (3, 1, 0),
            "sources: saved ['a', 'b'], here ['a', 'b', 'c']",
        ),
    ],
)
def test_without_leave_the_cure_is_named(files: Any, weights: Any, difference: str) -> None:
    one = opening()
    taken(one, 2)
    two = pipeline(files, weights).iterator(prefetch=0)
    before = two.get_state()
    with pytest.raises(Mismatch, match=r'pipeline.iterator\(on_change="segment"\)') as caught:
        two.set_state(one.get_state())
    assert difference in caught.value.differences
    assert two.get_state() == before


@pytest.mark.parametrize(
    ("files", "options", "difference"),
    [
        ({"a": (20, 20), "b": (11,)}, {"seed": 4}, "plan.seed: saved 3, here 4"),
        (
            {"b": (11,), "a": (20, 20)},
            {},
            "sources: those that were there stay, under their names and in their order, be it with "
            "a weight of 0; new ones come behind them",
        ),
        ({"c": (9,), "a": (20, 20), "b": (11,)}, {}, "sources: those that were there stay"),
        ({"a": (40,)}, {}, "sources: those that were there stay"),
        (
            {"a": (20,), "b": (11,)},
            {},
            "sources.a: 40 records were saved, here are 20 others: a source can only grow",
        ),
        (
            {"a": (25, 15), "b": (11,)},
            {},
            "sources.a: 40 records were saved, here are 40 others: a source can only grow",
        ),
        (
            {"a": (20, 25), "b": (11,)},
            {},
            "sources.a: grown from 40 to 45 records, and its first 40 records are no whole number "
            "of files (a-1 lies across): a file that was there has changed or is gone, or another "
            "one now stands before it",
        ),
        (
            {"a": (25, 15, 5), "b": (11,)},
            {},
            "sources.a: grown from 40 to 45 records, and the first 40 are not those that were "
            "saved: 2 files, a-0 to a-1; new files stand behind those that were there, which keep "
            "their names and contents",
        ),
    ],
)
def test_what_no_segment_can_say(files: Any, options: Any, difference: str) -> None:
    one = opening()
    taken(one, 2)
    for on_change in ("raise", "segment"):
        other = pipeline(files, (3, 1, 1)[: len(files)], **options)
        two = other.iterator(prefetch=0, on_change=on_change)
        before = two.get_state()
        with pytest.raises(Mismatch, match="belongs to other data:\n") as caught:
            two.set_state(one.get_state())
        assert any(line.startswith(difference) for line in caught.value.differences)
        assert len({*caught.value.differences}) == len(caught.value.differences)
        assert two.get_state() == before


def test_a_source_without_files_cannot_grow() -> None:
    one = Pipeline(Records(20), batch_size=4, seed=1).iterator(prefetch=0)
    two = Pipeline(Records(21), batch_size=4, seed=1).iterator(prefetch=0, on_change="segment")
    with pytest.raises(
        Mismatch, match=r"sources\.source: grown from 20 to 21 records, and its fing"
    ):
        two.set_state(one.get_state())


def test_wrong_use() -> None:
    with pytest.raises(Misuse, match="on_change must be one of raise, segment, found 'open'"):
        pipeline().iterator(on_change="open")  # type: ignore[arg-type]
    data = opening()
    with pytest.raises(Misuse, match="here are 2: a source of which examples are skipped stays"):
        data.skip([(2 * LIMIT, 2 * LIMIT + 1)])
    with pytest.raises(Damaged, match="not a data state"):
        data.toward({}, None)

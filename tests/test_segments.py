"""Weights, sources and their lengths change on the way: nothing jumps, repeats or gets lost."""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import answer
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Records
from plan_oracle import block

import ckpt
import formats
from datapipe import Damaged, Mismatch, Misuse, Pipeline, Where
from datapipe.integers import LIMIT
from datapipe.order.mixture import Mixture
from datapipe.order.permute import Permutation
from formats.source import sealed

STATE = {"w": np.zeros(2)}


class Shards(Records):
    """A source of files in memory; its rows are its number and theirs."""

    def __init__(self, name: str, files: tuple[int, ...]) -> None:
        super().__init__(sum(files), name=name)
        self.files = files

    def read(self, indices: Any) -> Any:
        super().read(indices)
        return {"of": np.full(len(indices), ord(self.name[-1])), "id": np.array(indices)}

    def fingerprint(self) -> dict[str, Any]:
        files = [
            {"name": f"{self.name}-{number}", "records": count, "sample": f"{count}"}
            for number, count in enumerate(self.files)
        ]
        return sealed({"format": "memory", "records": self.count, "files": files})


def pipeline(
    files: dict[str, tuple[int, ...]] | None = None,
    weights: tuple[int, ...] = (3, 1),
    **options: Any,
) -> Pipeline:
    files = {"a": (20, 20), "b": (11,)} if files is None else files
    sources = {name: Shards(name, each) for name, each in files.items()}
    shares = dict(zip(sources, weights, strict=True))
    options = {"batch_size": 4, "seed": 3, **options}
    return Pipeline(sources, weights=shares, **options)


def opening(*args: Any, **options: Any) -> Any:
    return pipeline(*args, **options).iterator(prefetch=0, on_change="segment")


def rows(batch: Any) -> list[tuple[int, int]]:
    return list(zip((batch["of"] - ord("a")).tolist(), batch["id"].tolist(), strict=True))


def taken(iterator: Any, batches: int) -> list[tuple[int, int]]:
    return [row for _ in range(batches) for row in rows(next(iterator))]


def segments(iterator: Any) -> list[tuple[int, list[int], list[int]]]:
    found = iterator.get_state()["segments"]
    return [(each["first"], each["items"], each["counts"]) for each in found]


# -- any history, against one that draws example by example ----------------------------------------


class Drawing:
    """Draws example by example; knows epochs, blocks and what is left out. No arithmetic."""

    def __init__(self, items: tuple[int, ...], weights: tuple[int, ...]) -> None:
        self.config = (items, weights)
        self.at = 0
        self.block: list[int] = []
        self.left: list[list[int]] = [[] for _ in items]
        self.epochs = [-1] * len(items)
        self.ordinals = [0] * len(items)
        self.skips: set[tuple[int, int]] = set()
        self.served: list[tuple[int, int, int, int]] = []
        """Source, ordinal, epoch, item."""
        self.blocks: list[tuple[tuple[int, ...], list[int]]] = []
        """Weights, and the sources of each block that was begun."""
        self.before = (-1, self.config, self.block)
        """Where the last change was, and what was in force until there."""

    def change(self, items: tuple[int, ...], weights: tuple[int, ...]) -> None:
        """As a restart finds it. What was changed at this very place was never in force."""
        if self.config == (items, weights):
            return
        if self.before[0] != self.at:
            self.before = (self.at, self.config, self.block)
        new = len(items) - len(self.ordinals)
        self.config, self.block = (items, weights), []
        if self.config == self.before[1]:
            self.block = [*self.before[2]]
        self.left += [[] for _ in range(new)]
        self.epochs += [-1] * new
        self.ordinals += [0] * new

    def batch(self, size: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while len(found) < size:
            source, ordinal, epoch, item = self.draw()
            if (source, ordinal) not in self.skips:
                self.served.append((source, ordinal, epoch, item))
                found.append((source, item))
        return found

    def draw(self) -> tuple[int, int, int, int]:
        items, weights = self.config
        if not self.block:
            self.block = block(Mixture.of(weights).counts)
            self.blocks.append((weights, [*self.block]))
        source = self.block.pop(0)
        if not self.left[source]:
            self.epochs[source] += 1
            order = Permutation(items[source], seed=3, epoch=self.epochs[source], stream=source)
            self.left[source] = order(np.arange(items[source])).tolist()
        ordinal = self.ordinals[source]
        self.ordinals[source] += 1
        self.at += 1
        return source, ordinal, self.epochs[source], self.left[source].pop(0)


class History:
    """One run of many starts: what the pipeline serves, next to what is drawn."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        count = draw(st.integers(1, 2), label="sources")
        self.files = {name: (self.length(),) for name in "ab"[:count]}
        self.weights = self.shares()
        self.size = 3
        self.skips: list[tuple[int, int]] = []
        self.skipped: set[tuple[int, int]] = set()
        self.saved: list[tuple[Any, Drawing]] = []
        self.told: list[str] = []
        self.data = self.iterator()
        self.model = Drawing(*self.config)
        self.save()

    def length(self) -> int:
        return int(self.draw(st.integers(1, 9), label="records"))

    def shares(self) -> tuple[int, ...]:
        least = st.lists(
            st.integers(0, 4), min_size=len(self.files), max_size=len(self.files)
        ).filter(any)
        return tuple(self.draw(least, label="weights"))

    @property
    def config(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        counts = self.data.plan.order.segments[-1].counts
        return tuple(sum(each) for each in self.files.values()), counts

    def iterator(self) -> Any:
        size = min(self.size, sum(sum(each) for each in self.files.values()))
        return opening(self.files, self.weights, batch_size=size)

    def serve(self) -> None:
        for _ in range(self.draw(st.integers(1, 6), label="batches")):
            found = rows(next(self.data))
            assert found == self.model.batch(self.data.batch_size), self.told
        assert self.data.next_example == self.model.at, self.told

    def save(self) -> None:
        self.saved.append(
            (json.loads(json.dumps(self.data.get_state())), copy.deepcopy(self.model))
        )

    def restart(self, number: int) -> None:
        """From a saved state, with the code of now and all that was ever left out."""
        state, model = self.saved[number]
        self.data = self.iterator()
        self.data.set_state(state)
        self.data.skip(self.skips)
        self.model = copy.deepcopy(model)
        self.model.change(*self.config)
        self.model.skips |= self.skipped
        self.told.append(f"on from {state['next_example']}: {self.files} {self.data.get_state()}")

    def skip(self) -> None:
        """Of what is to come."""
        state = self.data.get_state()
        first = self.draw(st.integers(0, 5), label="first")
        spans = self.data.span(state, first, first + self.draw(st.integers(1, 3), label="length"))
        self.data.skip(spans)
        self.skips += spans
        self.skipped |= {
            divmod(address, LIMIT) for start, stop in spans for address in range(start, stop)
        }
        self.model.skips |= self.skipped
        self.told.append(f"skips {spans}")

    def play(self, operation: str) -> None:
        if operation == "serve":
            self.serve()
        elif operation == "save":
            self.save()
        elif operation == "weights":
            self.weights = self.shares()
        elif operation == "grow":
            name = self.draw(st.sampled_from([*self.files]), label="grows")
            self.files[name] = (*self.files[name], self.length())
        elif operation == "append" and len(self.files) < 3:
            self.files["abc"[len(self.files)]] = (self.length(),)
            self.weights = self.shares()
        elif operation == "size":
            self.size = self.draw(st.integers(1, 5), label="size")
        elif operation == "restart":
            self.save()
            self.restart(-1)
        elif operation == "rewind":
            self.restart(self.draw(st.integers(0, len(self.saved) - 1), label="to"))
        elif operation == "skip":
            self.skip()


CHANGES = ["weights", "grow", "append", "size", "restart", "rewind", "skip", "save"]


@given(st.data())
def test_any_history_serves_what_is_drawn_example_by_example(data: st.DataObject) -> None:
    run = History(data.draw)
    for operation in data.draw(st.lists(st.sampled_from(CHANGES), max_size=14), label="played"):
        run.play(operation)
        run.play("serve")
    run.play("restart")
    run.play("serve")
    served, skipped = run.model.served, run.model.skips
    ids = [(source, epoch, item) for source, _, epoch, item in served]
    assert len({*ids}) == len(ids), "an id came twice within an epoch"
    for source, epoch in enumerate(run.model.epochs):
        ordinals = [o for s, o, e, _ in served if s == source and e < epoch]
        known = {*ordinals} | {o for s, o in skipped if s == source}
        assert {*range(max(ordinals, default=-1) + 1)} <= known, "one was lost"
    for weights, drawn in run.model.blocks:
        shares = [Counter(drawn)[source] for source in range(len(weights))]
        assert all(c * sum(weights) == w * len(drawn) for c, w in zip(shares, weights, strict=True))
    again = run.iterator()
    again.set_state(run.data.get_state())
    assert again.get_state() == run.data.get_state(), "nothing opens without a change"


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


# -- what is refused -------------------------------------------------------------------------------


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
    for name in ("draw", "before", "number"):
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


# -- spans -----------------------------------------------------------------------------------------


def test_spans_from_before_an_opening() -> None:
    one = opening()
    taken(one, 3)
    early = one.get_state()
    taken(one, 3)
    two = opening(weights=(1, 1))
    two.set_state(one.get_state())
    served = [two.plan.addresses([(at, at + 4)]) for at in range(12, 60, 4)]
    taken(two, 9)
    known = two.toward(early, two.get_state())
    assert [two.span(known, i, i + 1) for i in range(12)] == served
    assert two.position_after(known, 12) == 60
    assert _members(two.span(early, 0, 3)) == set().union(*map(_members, served[:3]))
    # What does not lie ahead, or is of another line, says nothing.
    assert two.toward(early, opening().get_state()) == early
    other = opening(weights=(7, 2))
    other.set_state(opening(weights=(1, 2)).get_state())
    other.seek(30)
    assert other.toward(early, other.get_state()) == early
    # As the iterator would go on from it.
    assert [s["first"] for s in two.toward(early, None)["segments"]] == [0, 12]
    assert pipeline(weights=(1, 1)).iterator(prefetch=0).toward(early, None) == early
    # A state of more than is known here can be counted with; one of other data cannot.
    assert one.span(two.get_state(), 0, 2) == two.span(two.get_state(), 0, 2)
    late = [(2 * LIMIT + 5, 2 * LIMIT + 9)]  # of a source that comes in later
    assert two.span(early, 0, 3, late) == two.span(early, 0, 3)
    with pytest.raises(Mismatch, match=r"plan.seed"):
        opening(seed=9).span(early, 0, 1)


# -- with a manager --------------------------------------------------------------------------------


def manager(place: Path) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(ckpt.Shared(place / "run"), arena=place / "arena")


class Trainer:
    """Writes down what each step was served."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.served: dict[int, set[tuple[int, int, int]]] = {}

    def train(self, m: ckpt.CheckpointManager, data: Any, steps: range) -> None:
        for step in steps:
            at = data.next_example
            held = data.plan.addresses(data.plan.span(at, 0, 1))
            batch = rows(next(data))
            self.served[step] = {
                divmod(address, LIMIT) for start, stop in held for address in range(start, stop)
            }
            assert Counter(s for s, _ in self.served[step]) == Counter(s for s, _ in batch)
            if step % 3 == 0:
                m.save(step, STATE, data=data)
        m.wait_until_finished()

    def of(self, steps: range) -> set[tuple[int, int]]:
        return set().union(*(self.served[step] for step in steps))


@pytest.mark.parametrize("steps", [range(14, 17), range(9, 15), range(17, 20), range(11, 14)])
def test_back_to_before_an_opening_and_the_same_examples_stay_away(
    tmp_path: Path, steps: range, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(tmp_path)
    with manager(tmp_path) as m, opening() as data:
        m.resume(like=STATE, data=data)
        trainer.train(m, data, range(1, 13))
    changed = {"files": {"a": (20, 20, 6), "b": (11,), "c": (30,)}, "weights": (1, 1, 1)}
    with manager(tmp_path) as m, opening(**changed, batch_size=3) as data:
        assert m.resume(like=STATE, data=data).step == 12
        assert [s["first"] for s in data.get_state()["segments"]] == [0, 48]
        trainer.train(m, data, range(13, 20))  # 19 is not saved
        bad = trainer.of(steps)
        option = f"{steps.start}:{steps.stop}"
        if steps.stop <= 19:  # beyond it the command knows as much as the steps tell
            planned = answer(
                *("rewind", tmp_path / "run", "--to", 6, "--skip-steps", option),
                *("--reason", "x", "--dry-run"),
            )
            assert planned["covering"] == []
            assert _members(planned["new_skips"]["data"]) == bad
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            m.rewind(6, skip_steps=steps, reason="bad", like=STATE, data=data)
        told = [r.getMessage() for r in caplog.records if r.name == "datapipe"]
        assert len(told) == 1
        assert "a segment opens at example 24" in told[0]
        assert "what had been opened at example 48 is dropped" in told[0]
        assert "not known for certain" not in caplog.text
        assert _members(data.plan.skipped) == bad
        assert [s["first"] for s in data.get_state()["segments"]] == [0, 24]
        trainer.train(m, data, range(7, 31))
        assert not trainer.of(range(7, 31)) & bad
    with manager(tmp_path) as m, opening(**changed) as data:
        caplog.clear()
        assert m.resume(like=STATE, data=data).step == 30
        assert not [r for r in caplog.records if r.name == "datapipe"]
        assert [s["first"] for s in data.get_state()["segments"]] == [0, 24]
        assert _members(data.plan.skipped) == bad
        trainer.train(m, data, range(31, 50))
        assert not trainer.of(range(31, 50)) & bad
        whole = [each for step in range(1, 50) for each in trainer.served[step]]
        assert len({*whole}) == len(whole)
        assert not data.plan.skipped or {*whole} & bad == trainer.of(range(1, 7)) & bad


def _members(ranges: Any) -> set[tuple[int, int]]:
    return {divmod(address, LIMIT) for start, stop in ranges for address in range(start, stop)}


@pytest.mark.parametrize("weights", [(3, 1), (1, 3)])
def test_steps_of_a_trainer_that_died_before_it_saved_them(
    tmp_path: Path, weights: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows which weights it had: all is left out that they may have used."""
    trainer = Trainer(tmp_path)
    with manager(tmp_path) as m, opening() as data:
        m.resume(like=STATE, data=data)
        trainer.train(m, data, range(1, 7))
        state = data.get_state()
    died = opening(weights=weights)
    died.set_state(state)
    held = _members(died.span(died.get_state(), 1, 4))
    with manager(tmp_path) as m, opening(weights=(1, 3)) as data:
        with caplog.at_level(logging.WARNING, "ckpt"):
            m.rewind(6, skip_steps=range(8, 11), reason="bad", like=STATE, data=data)
        assert held <= _members(data.plan.skipped)
        assert "mixture of steps 8 to 10 is not known for certain" in caplog.text


def test_a_guard_goes_back_to_before_an_opening(tmp_path: Path) -> None:
    guard = ckpt.SpikeGuard(
        window=30, warm_up=10, cool_down=2, margin=8, skip_before=6, skip_after=3, consecutive=2
    )
    held: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for weights, steps in (((3, 1), 20), ((1, 2), 34)):
        with (
            manager(tmp_path) as m,
            opening(weights=weights) as data,
            ckpt.Run(m, STATE, data, guard=guard, steps=steps) as run,
        ):
            for step, batch in run:
                held.setdefault((len(run.rewinds), step), set()).update(rows(batch))
                bad = step in (23, 24) and not run.rewinds
                run.update(run.state, loss=50.0 if bad else 1 + 0.01 * (step % 7))
    assert [each.skip for each in run.rewinds] == [range(17, 26)]
    # Onset 23: steps 17 to 25, of which 17 to 20 had the old weights: 3 of each 4 from a.
    skipped = _members(data.plan.skipped)
    assert Counter(source for source, _ in skipped) == Counter({0: 4 * 3 + 7, 1: 4 * 1 + 13})
    assert len(data.get_state()["segments"]) == 2
    assert data.get_state()["segments"][1]["first"] < 20 * 4


def test_positions_are_checked_with_the_order_in_force(tmp_path: Path) -> None:
    """What is skipped lies elsewhere after an opening, and so do positions. Without a restart."""
    trainer = Trainer(tmp_path)
    with manager(tmp_path) as m, opening() as one, opening(weights=(1, 6)) as two:
        m.resume(like=STATE, data=one)
        one.skip([(10, 30)])
        trainer.train(m, one, range(1, 4))
        two.set_state(one.get_state())
        trainer.train(m, two, range(4, 7))
        next(two)
        next(two)
        with pytest.raises(ckpt.errors.Misuse, match="stands at example 34, wanted 29"):
            m.save(7, STATE, data=two)

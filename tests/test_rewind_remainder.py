"""States tell what became of the ends of epochs; whoever counts batches behind them goes by it."""

from __future__ import annotations

import pytest
from cli_runs import answer, training
from memory_source import Records, number

from datapipe import Damaged, Pipeline
from datapipe.state import State
from tools import rewinding

RECORDS = 10


def iterator(remainder, size=4, *, skip_records=False):
    """Examples in their order: the record r of epoch e is example 10 e + r."""
    pipe = Pipeline(
        Records(RECORDS),
        batch_size=size,
        seed=1,
        shuffle=False,
        remainder=remainder,
        skip_records=skip_records,
    )
    return pipe.map(number, version="1").iterator(prefetch=0)


def served(data):
    """The examples of the next batch, by the records that come."""
    records = next(data).tolist()
    epoch = (data.next_example - 1) // RECORDS
    before = [epoch - (later > records[-1]) for later in records]
    return {RECORDS * e + r for e, r in zip(before, records, strict=True)}


def members(ranges):
    return {each for start, stop in ranges for each in range(start, stop)}


@pytest.mark.parametrize("skip_records", [False, True])
@pytest.mark.parametrize("size", [3, 4, 7])
@pytest.mark.parametrize("remainder", ["carry", "keep", "drop"])
def test_batches_behind_a_state_are_counted_as_they_are_served(remainder, size, skip_records):
    data = iterator(remainder, size, skip_records=skip_records)
    data.skip([(5, 7), (24, 25)])
    states, batches, ends = [], [], []
    for _ in range(14):
        states.append(data.get_state())
        batches.append(served(data))
        ends.append(data.next_example)
    tool = rewinding._Saved()
    others = [iterator(other, 5, skip_records=skip_records) for other in ("carry", "keep", "drop")]
    for number_, state in enumerate(states):
        assert state.get("remainder", "carry") == remainder
        for stop in range(1, 14 - number_):
            wanted = set().union(*batches[number_ : number_ + stop])
            assert members(tool.span(state, 0, stop, (), size)) == wanted
            assert tool.after(state, stop, (), size) == ends[number_ + stop - 1]
        wanted = batches[number_]
        for each in others:  # whatever they do themselves
            assert members(each.span(state, 0, 1, batch_size=size)) == wanted
            assert each.position_after(state, 1, batch_size=size) == ends[number_]


def test_a_state_is_resumed_with_the_remainder_of_the_pipeline():
    data = iterator("keep")
    before = [served(data) for _ in range(4)]
    assert sorted(map(len, before)) == [2, 4, 4, 4]
    other = iterator("carry")
    other.set_state(data.get_state())
    assert "remainder" not in other.get_state()
    assert [served(other) for _ in range(2)] == [{14, 15, 16, 17}, {18, 19, 20, 21}]
    data.set_state(other.get_state())
    assert data.get_state()["remainder"] == "keep"


@pytest.mark.parametrize("remainder", ["keep", "drop"])
def test_the_command_leaves_out_what_the_steps_were_served(tmp_path, remainder):
    wanted = {}
    with training(tmp_path / "run", data=iterator(remainder)) as trainer:
        trainer.resume()
        for step in range(1, 31):
            first = trainer.data.next_example
            trainer.train(step)
            epoch = (trainer.data.next_example - 1) // RECORDS
            assert first // RECORDS in (epoch - 1, epoch)
            wanted[step] = {RECORDS * epoch + record for record in trainer.used[step]}
    options = ("--to", 5, "--skip-steps", "12:18", "--reason", "spike")
    planned = answer("rewind", tmp_path / "run", *options, "--dry-run")
    bad = set().union(*(wanted[step] for step in range(12, 18)))
    assert members(planned["new_skips"]["data"]) == bad
    answer("rewind", tmp_path / "run", *options, "--yes")
    with training(tmp_path / "run", data=iterator(remainder)) as trainer:
        assert trainer.resume() == 5
        again = [served(trainer.data) for _ in range(25)]
    assert not bad & set().union(*again)


def test_a_run_that_changed_its_remainder_is_counted_by_each_part(tmp_path):
    wanted = {}
    for remainder, last in (("keep", 10), ("carry", 20), ("drop", 30)):
        with training(tmp_path / "run", data=iterator(remainder)) as trainer:
            trainer.resume()
            while trainer.step < last:
                first = trainer.data.next_example
                trainer.train(trainer.step + 1)
                stop = trainer.data.next_example
                # Of ten records all of these numbers are of one epoch, or of two one by one.
                last_epoch = (stop - 1) // RECORDS
                records = trainer.used[trainer.step]
                wanted[trainer.step] = {
                    RECORDS * (last_epoch - (record > records[-1])) + record for record in records
                }
                assert min(wanted[trainer.step]) >= first
    for first, stop in ((8, 13), (10, 22), (16, 29), (21, 22), (11, 21)):
        options = ("--to", 5, "--skip-steps", f"{first}:{stop}", "--reason", "spike", "--dry-run")
        planned = answer("rewind", tmp_path / "run", *options)
        bad = set().union(*(wanted[step] for step in range(first, stop)))
        assert members(planned["new_skips"]["data"]) == bad, (first, stop)


def test_what_a_state_may_say_of_it():
    state = iterator("drop").get_state()
    for wrong in ("Keep", "", 1, True, None, ["keep"], {}):
        with pytest.raises(Damaged, match="remainder: wanted one of carry, keep, drop"):
            State.from_json({**state, "remainder": wrong})
    with pytest.raises(Damaged, match=r"unknown fields \[\"'remainder'\"\]"):
        State.from_json({**state, "format": 3})
    two = Pipeline({"a": Records(8), "b": Records(9)}, batch_size=4, seed=1).iterator().get_state()
    with pytest.raises(Damaged, match="several sources have 'carry' only, found 'keep' with 2"):
        State.from_json({**two, "remainder": "keep"})
    # An earlier release told nothing: as it was counted then.
    untold = {key: value for key, value in state.items() if key != "remainder"} | {"format": 3}
    assert iterator("drop").span(untold, 0, 3) == [(0, 8), (10, 14)]
    assert rewinding._Saved().span(untold, 0, 3, (), 4) == [(0, 12)]

"""The iterator: exact positions, with Grain, in new processes, after crashes, over files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from memory_source import number
from number_batches import numbers

import formats
from datapipe import Mismatch, Pipeline

HERE = Path(__file__).parent


# -- Grain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["carry", "drop", "keep"])
@pytest.mark.parametrize(("count", "batch_size"), [(12, 4), (13, 4), (3, 3), (1, 1)])
def test_grain_restores_it_at_every_state(count, batch_size, remainder):
    pipe = numbers(count, batch_size=batch_size, remainder=remainder, epochs=2)
    grain.experimental.assert_equal_output_after_checkpoint(pipe)
    grain.experimental.assert_equal_output_after_checkpoint(pipe.dataset(prefetch=0))


def test_grain_transformations_go_behind_it():
    wanted = list(numbers())
    assert isinstance(numbers().iterator(), grain.DatasetIterator)
    mapped = numbers().dataset().map(lambda batch: batch["n"] * 2)
    grain.experimental.assert_equal_output_after_checkpoint(mapped)
    np.testing.assert_equal(list(mapped), [batch["n"] * 2 for batch in wanted])
    device = jax.devices()[1]
    placed = grain.experimental.device_put(
        numbers().dataset(prefetch=1).map(lambda batch: {"n": batch["n"].astype(np.int32)}), device
    )
    first = next(iter(placed))["n"]
    assert first.devices() == {device}
    grain.experimental.assert_equal_output_after_checkpoint(placed.map(jax.device_get))
    limited = grain.experimental.LimitIterDataset(numbers(epochs=None).dataset(), 5)
    np.testing.assert_equal(list(limited), wanted[:5])


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("remainder", ["carry", "drop", "keep"])
@pytest.mark.parametrize(("count", "batch_size"), [(12, 4), (13, 4), (7, 5)])
def test_state_at_every_batch_of_three_epochs(count, batch_size, remainder):
    pipe = numbers(count, batch_size=batch_size, remainder=remainder)
    wanted = list(pipe)
    straight = pipe.iterator()
    for at in range(len(wanted) + 1):
        state = json.loads(json.dumps(straight.get_state()))
        restored = pipe.iterator()
        restored.set_state(state)
        assert restored.get_state() == state
        np.testing.assert_equal(list(restored), wanted[at:], f"state {state}")
        assert restored.next_example == straight.plan.advance(0, len(wanted))
        if at < len(wanted):
            next(straight)


def test_the_end_is_the_end_and_can_be_restored():
    pipe = numbers()
    iterator = pipe.iterator()
    list(iterator)
    state = iterator.get_state()
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    assert iterator.get_state() == state
    again = pipe.iterator()
    again.set_state(state)
    assert list(again) == []
    again.seek(0)  # and back
    np.testing.assert_equal(list(again), list(pipe))
    longer = numbers(epochs=4).iterator()  # more epochs go on where the shorter run ended
    longer.set_state(state)
    np.testing.assert_equal(list(longer), list(numbers(epochs=4))[len(list(pipe)) :])


CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from number_batches import numbers
for line in sys.stdin:
    arguments, state = json.loads(line)
    iterator = numbers(**arguments).iterator()
    iterator.set_state(state)
    rest = [[batch["n"].tolist(), batch["r"].tolist()] for batch in iterator]
    print(json.dumps([rest, iterator.get_state()]))
"""


def test_a_new_process_goes_on_exactly():
    cases = []
    for remainder in ("carry", "drop", "keep"):
        for shuffle in (True, False):
            arguments = {"remainder": remainder, "shuffle": shuffle, "count": 10, "epochs": 2}
            iterator = numbers(**arguments).iterator()
            iterator.skip([(5, 7)])
            whole = numbers(**arguments).iterator()
            whole.skip([(5, 7)])
            wanted = [[batch["n"].tolist(), batch["r"].tolist()] for batch in whole]
            for at in range(len(wanted) + 1):
                cases.append((arguments, iterator.get_state(), wanted[at:], whole.get_state()))
                if at < len(wanted):
                    next(iterator)
    asked = "".join(json.dumps([arguments, state]) + "\n" for arguments, state, _, _ in cases)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(HERE)],
        input=asked,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    answers = [json.loads(line) for line in child.stdout.splitlines()]
    for answer, (arguments, state, rest, end) in zip(answers, cases, strict=True):
        assert answer == [rest, end], f"{arguments} from {state}"


@pytest.mark.parametrize("seed", range(6))
def test_three_crashes_equal_one_straight_run(seed):
    rng = random.Random(seed)
    pipe = numbers(rng.randrange(5, 40), batch_size=rng.randrange(1, 6), remainder="keep")
    wanted = list(pipe)
    state, served = None, []
    for _ in range(3):
        iterator = pipe.iterator(prefetch=rng.randrange(4), window=rng.randrange(1, 5))
        if state is not None:
            iterator.set_state(state)
        saved_at = len(served)
        for _ in range(rng.randrange(1, 9)):
            batch = next(iterator, None)
            if batch is None:
                break
            served.append(batch)
            if rng.random() < 0.5:
                state, saved_at = iterator.get_state(), len(served)
        if state is None:
            state = pipe.iterator().get_state()
        del served[saved_at:]  # a crash: what came after the last save is done again
        del iterator
    iterator = pipe.iterator()
    iterator.set_state(state)
    np.testing.assert_equal(served + list(iterator), wanted, f"seed {seed}")


# -- files -----------------------------------------------------------------------------------------


def test_array_record_files(tmp_path):
    for shard in range(3):
        formats.write_array_record(
            tmp_path / f"part-{shard}.array_record",
            [b"%d" % (shard * 10 + i) + b"." * i for i in range(10)],
        )
    with formats.open_source(str(tmp_path / "*.array_record")) as source:
        pipe = Pipeline(source, batch_size=7, seed=2, epochs=2).map(number, version="1")
        grain.experimental.assert_equal_output_after_checkpoint(pipe)
        served = [n for batch in pipe for n in batch.tolist()]
        assert served == pipe.plan.records(range(pipe.plan.batches_left(0))).tolist()
        state = pipe.iterator().get_state()
    formats.write_array_record(tmp_path / "part-3.array_record", [b"30"])
    with formats.open_source(str(tmp_path / "*.array_record")) as source:
        grown = Pipeline(source, batch_size=7, seed=2, epochs=2).map(number, version="1")
        with pytest.raises(Mismatch, match=r"source\.records: saved 30, here 31"):
            grown.iterator().set_state(state)


def test_parquet_files(tmp_path):
    rows = {"id": np.arange(30), "text": ["x" * i for i in range(30)]}
    formats.write_parquet(tmp_path / "a.parquet", rows)
    with formats.open_source(str(tmp_path / "*.parquet")) as source:
        pipe = Pipeline(source, batch_size=8, seed=2, epochs=1, remainder="keep")
        grain.experimental.assert_equal_output_after_checkpoint(pipe)
        for batch in pipe:
            assert batch["text"].tolist() == ["x" * i for i in batch["id"].tolist()]
        served = [n for batch in pipe for n in batch["id"].tolist()]
        assert sorted(served) == list(range(30))

"""What an iterator tells of itself, by clocks that the tests move, and feeding devices ahead."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memory_source import Columns, Records, number
from waiting import eventually

import ckpt
from datapipe import Pipeline, Stats
from datapipe.batches.cost import Cost
from datapipe.prefetch.device_feed import Feed
from datapipe.prefetch.pace import Pace
from datapipe.prefetch.stats import SILENT_S, WATCHED_S, Meter
from datapipe.sizes import size_of


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def trained(meter, clock, batches, *, waits, steps, cost):
    """Batches that are waited for and then trained on, in seconds each."""
    for _ in range(batches):
        asked = clock.now
        clock.now += waits
        meter.delivered(asked, cost)
        clock.now += steps


# -- the policy ------------------------------------------------------------------------------------


def test_a_meter_counts():
    clock = Clock()
    meter = Meter(Pace(), clock)
    assert meter.stats().batches == 0
    assert meter.stats().records_per_s == 0
    cost = Cost(records=8, size_bytes=100, reading_s=0.5, functions_s=0.25)
    trained(meter, clock, 10, waits=1, steps=3, cost=cost)
    found = meter.stats()
    assert (found.batches, found.records, found.bytes) == (10, 80, 1000)
    assert found.elapsed_s == 37  # up to the last delivery
    assert found.waited_s == 10
    assert found.wait_share == pytest.approx(10 / 37)
    assert found.records_per_s == pytest.approx(80 / 37)
    assert (found.reading_s, found.functions_s) == (5, 2.5)
    assert found.bottleneck == "reading"
    with pytest.raises(FrozenInstanceError):
        found.batches = 3


def test_nobody_waits_so_the_trainer_is_the_bottleneck():
    clock = Clock()
    meter = Meter(Pace(), clock)
    trained(meter, clock, 50, waits=0.001, steps=1, cost=Cost(records=8, functions_s=3))
    assert meter.stats().bottleneck == "trainer"


@pytest.mark.parametrize(
    ("cost", "pace", "told"),
    [
        (Cost(reading_s=2), Pace(), "reading the source (60.0 s): take threads=2 or a window"),
        (Cost(reading_s=2), Pace(workers=3), "take workers=4 or a window larger than 16; or bring"),
        (Cost(functions_s=2), Pace(), "the functions of the pipeline (60.0 s): take workers=2 or"),
        (Cost(functions_s=2), Pace(workers=3), "take more than workers=3, or make them faster"),
        (Cost(functions_s=2), Pace(prefetch=0), "or more, and prefetch=2, so that they are made"),
        (Cost(stacking_s=2), Pace(), "putting examples together (60.0 s): take workers=2"),
        (Cost(placing_s=2), Pace(), "bringing them to devices (60.0 s): let the functions return"),
    ],
)
def test_a_starving_trainer_is_told_the_stage_and_a_cure(cost, pace, told, caplog):
    clock = Clock()
    trained(Meter(pace, clock), clock, 32, waits=0.5, steps=0.5, cost=cost)
    (record,) = caplog.records
    assert record.name == "datapipe"
    assert record.levelname == "WARNING"
    assert told in record.getMessage()
    assert "waited for data for 50 % of the last 30 s, in which it got 30 batches" in caplog.text


def test_a_starving_trainer_is_told_once_a_minute(caplog):
    clock = Clock()
    meter = Meter(Pace(), clock)
    trained(meter, clock, 600, waits=0.5, steps=0.5, cost=Cost(functions_s=1))
    assert 600 / (SILENT_S + WATCHED_S) - 1 <= len(caplog.records) <= 600 / SILENT_S


def test_who_does_not_starve_is_told_nothing(caplog):
    clock = Clock()
    meter = Meter(Pace(), clock)
    trained(meter, clock, 1, waits=100, steps=1, cost=Cost())  # the start takes long
    trained(meter, clock, 200, waits=0.1, steps=1, cost=Cost(functions_s=1))
    for _ in range(5):  # and so does every change of position
        meter.restart()
        trained(meter, clock, 1, waits=100, steps=1, cost=Cost())
        trained(meter, clock, 20, waits=0.1, steps=1, cost=Cost())
    assert not caplog.records


# -- iterators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"threads": 2}, {"workers": 1}])
def test_an_iterator_tells(options):
    pipe = Pipeline(Columns(40), batch_size=4, seed=1, epochs=2).map(slowed, version="1")
    with pipe.iterator(**options) as iterator:
        assert iterator.stats().bottleneck == "trainer"
        batches = list(iterator)
        found = iterator.stats()
    assert isinstance(found, Stats)
    assert (found.batches, found.records) == (20, 80)
    assert found.bytes == sum(size_of(batch) for batch in batches) > 0
    assert found.functions_s > found.reading_s > 0
    assert found.stacking_s > 0
    assert found.placing_s == 0
    assert 0 < found.waited_s <= found.elapsed_s
    assert found.bottleneck == "functions"


def slowed(example):
    end = time.thread_time() + 0.002
    while time.thread_time() < end:
        pass
    return example


def test_sizes():
    batch = {
        "a": np.zeros((3, 2), np.float32),
        "b": [np.array([b"xx", b"y", None], object), (np.array(["abc"], object), None)],
    }
    assert size_of(batch) == 24 + 3 + 3
    assert size_of([b"xx", "y"]) == 3
    assert size_of([b"xx", batch, np.zeros(2)]) == 2 + 30 + 16


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"prefetch": 6}, 2),
        ({"prefetch": 6, "threads": 3}, 2),
        ({"prefetch": 1}, 1),
        ({"prefetch": 6, "workers": 1}, 2),
        ({"prefetch": 0}, 0),
    ],
    ids=str,
)
def test_the_next_two_batches_are_on_their_way(options, ahead, monkeypatch):
    """Transfers start while the trainer uses a batch, and devices hold no more than two beyond."""
    placed = []
    place = Feed.place

    def counted(self, batch):
        found = place(self, batch)
        placed.append(found)
        return found

    monkeypatch.setattr(Feed, "place", counted)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    pipe = Pipeline(Records(80), batch_size=8, seed=1).map(number, version="1")
    with pipe.iterator(sharding=sharding, **options) as iterator:
        iterator.start_prefetch()
        for delivered in range(1, 5):
            batch = next(iterator)
            assert batch is placed[delivered - 1]
            eventually(lambda delivered=delivered: len(placed) == delivered + ahead)
            time.sleep(0.03)
            assert len(placed) == delivered + ahead
        assert iterator.stats().placing_s > 0


# -- restoring -------------------------------------------------------------------------------------


def test_a_restore_starts_to_read_ahead(tmp_path):
    source = Records(80)
    pipe = Pipeline(source, batch_size=8, seed=1).map(number, version="1")
    state = {"w": np.zeros(3)}
    with ckpt.CheckpointManager(tmp_path / "run") as manager:
        assert manager.resume(like=state, data=pipe.iterator()).report.fresh
        iterator = pipe.iterator()
        next(iterator)
        manager.save(1, state, data=iterator, force=True).wait()
        wanted = next(iterator)
        iterator.close()
    source.calls.clear()
    with ckpt.CheckpointManager(tmp_path / "run") as manager, pipe.iterator() as restored:
        manager.resume(like=state, data=restored)
        eventually(lambda: source.calls)  # nobody asked for a batch
        np.testing.assert_array_equal(next(restored), wanted)

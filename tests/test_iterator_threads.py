"""Several threads on one iterator: each batch goes to one of them, and positions are whole."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from iterator_threads import WAYS, Slow, in_threads, small
from memory_source import Records, number
from number_batches import numbers, taken
from waiting import eventually
from worker_traces import no_traces  # noqa: F401 - a fixture

from datapipe import Pipeline

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("no_traces")


@pytest.mark.parametrize("way", WAYS)
def test_each_batch_goes_to_one_thread(way):
    pipe = Pipeline(Slow(200), batch_size=2, seed=1, epochs=1).map(small, version="1")
    wanted = [pipe.plan.records(batch).tolist() for batch in range(100)]
    found: list[list[int]] = []
    orders: list[list[int]] = [[] for _ in range(4)]
    at = {tuple(records): batch for batch, records in enumerate(wanted)}
    watched = []
    with pipe.iterator(**WAYS[way]()) as iterator:
        iterator.skip([(196, 200)])

        def take(index):
            if index == 4:  # looks on, and never waits for those who wait
                while len(found) < 98:
                    state = iterator.get_state()
                    watched.append(state["next_example"])
                    stats = iterator.stats()
                    assert 0 <= stats.batches <= 98
                    time.sleep(0.001)
                return
            for batch in iterator:
                records = np.asarray(batch).tolist()
                found.append(records)
                orders[index].append(at[tuple(records)])

        in_threads(5, take)
        assert iterator.next_example == 196
        assert iterator.stats().batches == 98
    assert Counter(map(tuple, found)) == Counter(map(tuple, wanted[:98]))
    assert all(order == sorted(order) for order in orders)
    assert watched == sorted(watched)
    assert all(position % 2 == 0 for position in watched)


@pytest.mark.parametrize("way", ["plain", "threads", "workers"])
def test_moves_and_batches_of_several_threads(way):
    """Whatever comes in between, a batch is the one at some position, and none comes from two."""
    pipe = Pipeline(Slow(800), batch_size=2, seed=1, epochs=1).map(small, version="1")
    batches = {tuple(pipe.plan.records(batch).tolist()) for batch in range(400)}
    with pipe.iterator(**WAYS[way]()) as iterator:
        start = iterator.get_state()

        def call(index):
            for turn in range(12):
                if index == 0:
                    iterator.seek(20 * turn)
                elif index == 1:
                    iterator.set_state({**start, "next_example": 2 * turn})
                else:
                    for batch in taken(iterator, 4):
                        assert tuple(np.asarray(batch).tolist()) in batches
                    assert iterator.get_state()["next_example"] % 2 == 0

        in_threads(4, call)
        iterator.seek(100)
        assert np.asarray(next(iterator)).tolist() == pipe.plan.records(50).tolist()


def test_a_state_is_never_of_two_positions():
    """Position and skips change together: a reader sees both or neither."""
    pipe = numbers(400, batch_size=2)
    with pipe.iterator(prefetch=0) as iterator:
        states = []
        for turn in range(2):
            iterator.skip([(300 + turn, 301 + turn)])
            iterator.seek(20 + turn)
            states.append(iterator.get_state())
        done = threading.Event()

        def call(index):
            if index == 0:
                for turn in range(300):
                    iterator.set_state(states[turn % 2])
                done.set()
            while not done.is_set():
                assert iterator.get_state() in states
                assert str(iterator) in {f"datapipe.Iterator(next_example={n})" for n in (20, 21)}

        in_threads(3, call)


@pytest.mark.parametrize("way", ["plain", "threads", "workers"])
def test_executors_of_asyncio(way):
    pipe = Pipeline(Slow(80), batch_size=2, seed=1, epochs=1).map(small, version="1")

    async def main(iterator):
        calls = [asyncio.to_thread(next, iterator, None) for _ in range(45)]
        return [batch.tolist() for batch in await asyncio.gather(*calls) if batch is not None]

    with pipe.iterator(**WAYS[way]()) as iterator:
        found = asyncio.run(main(iterator))
    assert sorted(found) == sorted(pipe.plan.records(batch).tolist() for batch in range(40))


def test_a_source_that_fails_ahead_of_a_move():
    source = Records(40, bad=[], says_which=False)
    pipe = Pipeline(source, batch_size=2, seed=1, epochs=1).map(number, version="1")
    source.bad = set(pipe.plan.records(range(3, 5)).tolist())
    with pipe.iterator(prefetch=6, threads=2, window=1) as iterator:
        taken(iterator, 1)
        eventually(lambda: len(source.calls) >= 6)
        iterator.seek(10)
        assert next(iterator).tolist() == pipe.plan.records(5).tolist()
        iterator.seek(4)
        assert next(iterator).tolist() == pipe.plan.records(2).tolist()
        for _ in range(2):
            with pytest.raises(Exception, match="the decoder choked"):
                next(iterator)
            assert iterator.next_example == 6
        source.bad = set()
        assert next(iterator).tolist() == pipe.plan.records(3).tolist()

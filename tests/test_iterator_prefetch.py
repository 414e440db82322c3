"""Working ahead: positions, closing and interrupts while batches are made."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from memory_source import Columns, Gate, Records, number
from number_batches import numbers, taken
from waiting import eventually

from datapipe import Misuse, Pipeline
from datapipe.prefetch.prefetcher import Prefetcher


def test_the_state_is_that_of_what_was_delivered():
    iterator = numbers().iterator(prefetch=5, window=4, threads=2)
    iterator.start_prefetch()
    iterator.start_prefetch()
    for delivered in range(10):
        assert iterator.next_example == 4 * delivered
        assert iterator.get_state()["next_example"] == 4 * delivered
        next(iterator)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_set_state_before_during_and_after(prefetch):
    pipe = numbers()
    wanted = list(pipe)
    iterator = pipe.iterator(prefetch=prefetch)
    states = []
    for batch in wanted:
        states.append(iterator.get_state())
        np.testing.assert_equal(next(iterator), batch)
    for at in (0, 7, len(wanted) - 1, 3, 3):  # after the end, then in the midst of it
        iterator.set_state(states[at])
        assert iterator.get_state() == states[at]
        np.testing.assert_equal(taken(iterator, 1), wanted[at : at + 1])
    iterator.set_state(states[5])
    np.testing.assert_equal(list(iterator), wanted[5:])


def test_set_state_while_a_read_hangs_drops_what_it_brings():
    source = Gate(40)
    pipe = Pipeline(source, batch_size=4, seed=1, epochs=1).map(number, version="1")
    iterator = pipe.iterator(prefetch=2)
    state = pipe.iterator().get_state() | {"next_example": 20}
    iterator.start_prefetch()
    assert source.entered.wait(60)
    iterator.set_state(state)
    source.opened.set()
    plan = pipe.plan
    assert [batch.tolist() for batch in iterator] == [
        plan.records(b).tolist() for b in range(5, 10)
    ]
    iterator.close()


def test_prefetch_really_works_ahead_and_no_further(monkeypatch):
    monkeypatch.setattr("datapipe.batches.window.AT_ONCE_S", 0.0)  # every window is worth a thread
    source = Records(400)
    pipe = Pipeline(source, batch_size=4, seed=1, epochs=1)
    with pipe.iterator(prefetch=3, window=1) as iterator:
        next(iterator)
        eventually(lambda: len(source.calls) == 4)  # one delivered, three ahead
        time.sleep(0.05)
        assert len(source.calls) == 4
    lazy = Records(400)
    iterator = Pipeline(lazy, batch_size=4, seed=1, epochs=1).iterator(prefetch=0, window=1)
    taken(iterator, 2)
    assert len(lazy.calls) == 2


def workers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("datapipe")}


def test_two_hundred_lives():
    """Close, drop, restore and iterate again: no deadlock, no thread left behind."""
    pipe = numbers(40, epochs=None)
    wanted = taken(pipe.iterator(prefetch=0), 6)
    before = workers()
    for life in range(200):
        iterator = pipe.iterator(prefetch=1 + life % 4, window=1 + life % 3, threads=1 + life % 2)
        state = iterator.get_state()
        np.testing.assert_equal(taken(iterator, life % 5), wanted[: life % 5])
        if life % 3 == 0:
            iterator.set_state(state)
            np.testing.assert_equal(taken(iterator, 2), wanted[:2])
        if life % 4 == 0:
            del iterator  # collected with work in flight
        else:
            iterator.close()
    gc.collect()
    eventually(lambda: workers() <= before)


def test_close_waits_and_is_final():
    source = Gate(40)
    before = workers()
    iterator = Pipeline(source, batch_size=4, seed=1).iterator(prefetch=2)
    iterator.start_prefetch()
    assert source.entered.wait(60)
    threading.Timer(0.1, source.opened.set).start()
    iterator.close()
    assert source.opened.is_set()
    assert workers() <= before
    iterator.close()
    assert iterator.get_state()["next_example"] == 0
    for call in (
        lambda: next(iterator),
        lambda: iterator.seek(0),
        lambda: iterator.skip([(0, 1)]),
        lambda: iterator.set_state(iterator.get_state()),
        iterator.start_prefetch,
    ):
        with pytest.raises(Misuse, match="this iterator is closed; take a new one"):
            call()


def test_the_context_closes():
    with numbers(epochs=None).iterator() as iterator:
        next(iterator)
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


def test_an_interrupt_while_waiting_loses_nothing():
    pipe = numbers()
    for prefetch in (0, 2):
        interrupts = iter([True])

        def once(batch, interrupts=interrupts):
            if next(interrupts, False):
                raise KeyboardInterrupt
            return batch

        iterator = pipe.map_batch(once, version="1").iterator(prefetch=prefetch)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert iterator.next_example == 0
        iterator.seek(0)  # the interrupt hit the work itself
        np.testing.assert_equal(list(iterator), list(pipe))


@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"prefetch": 3}, {"prefetch": 3, "threads": 2}]
)
@pytest.mark.parametrize("at", [1, 6, 17])
def test_an_interrupt_within_functions_that_change_arrays_in_place(options, at):
    calls = 0

    def tenfold(example):
        nonlocal calls
        calls += 1
        example["row"] *= 10
        if calls == at:
            raise KeyboardInterrupt
        return example

    pipe = Pipeline(Columns(23), batch_size=4, seed=7, epochs=2)
    plain = list(pipe.map(lambda e: e | {"row": e["row"] * 10}, version="1"))
    with pipe.map(tenfold, version="1").iterator(**options) as iterator:
        found = []
        interrupts = 0
        while len(found) < len(plain):
            try:
                found.append(next(iterator))
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1
    np.testing.assert_equal(found, plain)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("name", ["start", "replace", "restart", "_fill", "_coming"])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_batch_counts_as_delivered_when_it_is(monkeypatch, name, error, is_before):
    """Whatever fails on the way, before or after its work, and at every call of it."""
    pipe = Pipeline(Records(23, bad=[3, 9, 20]), batch_size=4, seed=7, epochs=1)
    pipe = replace(pipe, on_bad_record="replace").map(number, version="1")
    plain = pipe.iterator(prefetch=0)
    wanted = [(plain.get_state(), next(plain).tolist()) for _ in range(pipe.plan.batches_left(0))]
    whole = getattr(Prefetcher, name)
    for at in range(12):
        calls = 0
        iterator = pipe.iterator(prefetch=2, window=2)

        def failing(ahead, *args, at=at):
            nonlocal calls
            calls += 1
            if is_before and calls - 1 == at:
                raise error("on the way")
            result = whole(ahead, *args)
            if not is_before and calls - 1 == at:
                raise error("on the way")
            return result

        found = []
        with monkeypatch.context() as patched, iterator:
            patched.setattr(Prefetcher, name, failing)
            while len(found) < len(wanted):
                with contextlib.suppress(error):
                    state = iterator.get_state()
                    found.append((state, next(iterator).tolist()))
        assert found == wanted, f"at {at}"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_move_that_is_interrupted_is_done_all_the_same(monkeypatch, prefetch):
    def interrupted(*args):
        raise KeyboardInterrupt

    pipe = numbers()
    for move in (
        lambda iterator: iterator.seek(20),
        lambda iterator: iterator.skip([(12, 20)]),
        lambda iterator: iterator.set_state({**iterator.get_state(), "next_example": 20}),
    ):
        with pipe.iterator(prefetch=prefetch) as iterator:
            taken(iterator, 3)
            with monkeypatch.context() as patched:
                patched.setattr(iterator._prefetcher, "restart", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    move(iterator)
            np.testing.assert_equal(next(iterator), list(pipe)[5])

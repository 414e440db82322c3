"""The end of an iterator: closed by others, by signal handlers, with the program."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from iterator_threads import WAYS, Slow, device, hang, in_threads, small
from memory_source import Gate, Records, number
from number_batches import numbers, taken
from waiting import eventually
from worker_traces import no_traces  # noqa: F401 - a fixture

from datapipe import Misuse, Pipeline

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("no_traces")


@pytest.mark.parametrize("waiting", [1, 5])
@pytest.mark.parametrize("way", ["threads", "devices"])
def test_a_close_ends_the_waiting_for_a_source_that_hangs(way, waiting):
    source = Gate(40)
    pipe = Pipeline(source, batch_size=2, seed=1).map(small, version="1")
    iterator = pipe.iterator(**WAYS[way]())
    refused = []

    def wait():
        with pytest.raises(Misuse, match="this iterator is closed; take a new one"):
            next(iterator)
        refused.append(True)

    threads = [threading.Thread(target=wait) for _ in range(waiting)]
    for thread in threads:
        thread.start()
    assert source.entered.wait(60)
    time.sleep(0.02)
    closing = threading.Thread(target=iterator.close)
    closing.start()
    for thread in threads:
        thread.join(60)
    assert len(refused) == waiting
    assert closing.is_alive()  # the read is still going on, and may use what comes next
    source.opened.set()
    closing.join(60)
    assert not closing.is_alive()
    assert iterator.next_example == 0
    iterator.close()


def test_a_close_ends_the_waiting_for_workers_that_hang():
    for options in ({}, device()):
        pipe = Pipeline(Records(40), batch_size=2, seed=1).map(hang, version="1")
        iterator = pipe.iterator(workers=2, **options)
        closing = threading.Timer(0.5, iterator.close)
        closing.start()
        with pytest.raises(Misuse, match="this iterator is closed; take a new one"):
            next(iterator)
        closing.join(60)
        assert not closing.is_alive()


def test_a_close_waits_for_who_makes_a_batch_itself():
    source = Gate(40)
    pipe = Pipeline(source, batch_size=2, seed=1).map(number, version="1")
    iterator = pipe.iterator(prefetch=0)
    events = []

    def wait():
        with pytest.raises(Misuse, match="this iterator is closed; take a new one"):
            next(iterator)
        events.append("refused")

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert source.entered.wait(60)
    threading.Timer(0.1, source.opened.set).start()
    iterator.close()
    assert source.opened.is_set()
    waiting.join(60)
    assert events == ["refused"]
    assert iterator.next_example == 0  # what was not delivered is not counted


@pytest.mark.parametrize("way", WAYS)
def test_closed_at_any_time(way):
    """Threads take what they can get; each batch that one of them has is counted, and no other."""
    pipe = Pipeline(Slow(4000), batch_size=2, seed=1, epochs=1).map(small, version="1")
    for delay_s in (0, 0.001, 0.003, 0.01, 0.03):
        iterator = pipe.iterator(**WAYS[way]())
        found = []

        def take(index, iterator=iterator, found=found, delay_s=delay_s):
            if index == 0:
                time.sleep(delay_s)
                iterator.close()
                return
            with pytest.raises(Misuse, match="this iterator is closed"):
                found.extend(np.asarray(batch).tolist() for batch in iterator)

        in_threads(4, take)
        assert iterator.next_example == 2 * len(found)
        wanted = [pipe.plan.records(batch).tolist() for batch in range(len(found))]
        assert sorted(found) == sorted(wanted)


def test_close_again_after_ctrl_c(monkeypatch):
    iterator = numbers().iterator(prefetch=3)
    next(iterator)
    closes = iterator._prefetcher.close

    def interrupted(**options):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(iterator._prefetcher, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iterator.close()
    assert iterator._prefetcher.close == closes
    iterator.close()
    assert not any(t.name.startswith("datapipe_") for t in threading.enumerate())


# -- signal handlers -------------------------------------------------------------------------------


@pytest.fixture
def handled_soon():
    """Has something called by a signal handler, in the main thread, after a moment."""

    def call(function):
        signal.signal(signal.SIGUSR1, lambda *_: function())
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()

    before = signal.getsignal(signal.SIGUSR1)
    yield call
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_signal_handler_closes_while_a_batch_is_waited_for(handled_soon, prefetch):
    source = Gate(40)
    pipe = Pipeline(source, batch_size=2, seed=1).map(number, version="1")
    iterator = pipe.iterator(prefetch=prefetch)

    def close():
        source.opened.set()
        iterator.close()

    handled_soon(close)
    with pytest.raises(Misuse, match="this iterator is closed"):
        next(iterator)
    assert iterator.next_example == 0


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("move", ["next", "seek"])
def test_a_signal_handler_moves_while_a_batch_is_waited_for(handled_soon, prefetch, move):
    """Nothing is delivered twice: the call that was interrupted says so, and the next goes on."""
    source = Gate(40)
    pipe = Pipeline(source, batch_size=2, seed=1, epochs=1).map(number, version="1")
    wanted = [pipe.plan.records(batch).tolist() for batch in range(20)]
    found = []
    with pipe.iterator(prefetch=prefetch) as iterator:

        def handle():
            source.opened.set()
            if move == "next":
                found.append(next(iterator).tolist())
            else:
                iterator.seek(2)

        handled_soon(handle)
        with pytest.raises(Misuse, match=r"moved from within next\(\), by a signal handler"):
            next(iterator)
        found += [batch.tolist() for batch in iterator]
    assert found == (wanted if move == "next" else wanted[1:])


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 3}])
def test_an_interrupt_as_the_lock_is_let_go(options):
    """The caller has no batch then, so none counts as delivered."""
    pipe = numbers()
    with pipe.iterator(**options) as iterator:
        lock = iterator._lifetime._lock

        class Interrupted:
            def __enter__(self):
                return lock.__enter__()

            def __exit__(self, *exc_info):
                iterator._lifetime._lock = lock
                lock.__exit__(*exc_info)
                raise KeyboardInterrupt

        found = taken(iterator, 3)
        iterator._lifetime._lock = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert iterator.next_example == 12
        np.testing.assert_equal(found + list(iterator), list(pipe))


def test_collected_while_its_threads_read():
    source = Gate(40)
    iterator = Pipeline(source, batch_size=2, seed=1).iterator(prefetch=3, threads=2)
    iterator.start_prefetch()
    assert source.entered.wait(60)
    del iterator
    gc.collect()
    source.opened.set()
    eventually(lambda: not any(t.name.startswith("datapipe_") for t in threading.enumerate()))
    assert len(source.calls) <= 2  # what was not begun is not made


ENDING = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
from memory_source import Records, number
from datapipe import Misuse, Pipeline

class Slow(Records):
    def read(self, indices):
        time.sleep(0.05)
        return super().read(indices)

source = Slow(4000)
pipe = Pipeline(source, batch_size=2, seed=1).map(number, version="1")
options = eval(sys.argv[2])
iterator, other = pipe.iterator(**options), pipe.iterator(**options)
other.start_prefetch()

def take():
    try:
        while True:
            next(iterator)
    except Misuse as error:
        print(error, flush=True)

threading.Thread(target=take, daemon=sys.argv[3] == "daemon").start()
while iterator.next_example == 0:
    time.sleep(0.01)

import atexit
atexit.register(lambda: print("calls", len(source.calls), flush=True))
"""


@pytest.mark.parametrize("kind", ["daemon", "thread"])
@pytest.mark.parametrize(
    "options", [{"prefetch": 0}, {"prefetch": 400, "window": 1}, {"workers": 1}]
)
def test_a_program_that_ends_does_not_make_what_is_ahead(options, kind):
    """Live iterators at the end of a program, one of them in use by another thread."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(HERE), repr(options), kind],
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout.split()[-1]) < 100
    if kind == "thread":
        assert done.stdout.startswith("this iterator is closed")

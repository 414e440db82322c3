"""Worker processes that die, hang or are not wanted any more: nothing is lost, nothing is left."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from memory_source import Records, number
from number_batches import columns, numbers
from waiting import eventually
from worker_traces import no_traces, processes  # noqa: F401 - a fixture

from datapipe import Misuse, Pipeline, WorkerFailed
from datapipe.prefetch.worker_pool import WorkerPool

HERE = Path(__file__).parent
REPOSITORY = HERE.parent
pytestmark = pytest.mark.usefixtures("no_traces")


# -- deaths ----------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced(caplog):
    pipe = columns(epochs=30)
    wanted = list(pipe)
    with pipe.iterator(workers=2, window=2) as iterator:
        for index, plain in enumerate(wanted):
            if index % 60 == 59:
                os.kill(min(iterator._prefetcher._pool.pids()), signal.SIGKILL)
            np.testing.assert_array_equal(next(iterator)["row"], plain["row"])
        eventually(lambda: caplog.records)
    text = caplog.text
    assert "of the pipeline was killed by SIGKILL (by hand, or for want of memory)" in text
    assert "Another one does it" in text


def die_at(record):
    n = number(record)
    if n == 17:
        os.kill(os.getpid(), signal.SIGKILL)
    return n


def test_a_batch_that_kills_again_and_again_is_an_error(caplog):
    pipe = Pipeline(Records(40), batch_size=4, seed=1, epochs=1).map(die_at, version="1")
    (batch,) = pipe.plan.batches(17)
    with pipe.iterator(workers=2, window=3) as iterator:
        for index in range(batch):
            assert next(iterator).tolist() == pipe.plan.records(index).tolist()
        with pytest.raises(WorkerFailed, match=r"death 3 without a batch in between.*workers=0"):
            next(iterator)
        assert iterator.next_example == 4 * batch
        iterator.skip([(4 * batch, 4 * batch + 4)])  # and goes on
        rest = [b.tolist() for b in iterator]
    assert rest == [pipe.plan.records(b).tolist() for b in range(batch + 1, 10)]
    told = [r for r in caplog.records if r.name == "datapipe" and r.levelno == logging.WARNING]
    assert len(told) >= 2
    assert f"batches from example {4 * batch} to" in told[0].getMessage()


def leave(record):
    os._exit(3)


def test_a_worker_that_ends_by_itself():
    pipe = Pipeline(Records(40), batch_size=4, seed=1).map(leave, version="1")
    with (
        pipe.iterator(workers=1) as iterator,
        pytest.raises(WorkerFailed, match="ended with exit status 3"),
    ):
        next(iterator)


def test_a_crew_that_cannot_be_led_leaves_nothing(monkeypatch):
    def fail(pool):
        raise RuntimeError("no such luck")

    def late(pool, leave=WorkerPool._leave):
        time.sleep(0.1)
        leave(pool)

    iterator = numbers().iterator(workers=2)
    next(iterator)
    pool = weakref.ref(iterator._prefetcher._pool)
    monkeypatch.setattr(WorkerPool, "_give_out", fail)
    monkeypatch.setattr(WorkerPool, "_leave", late)
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="cannot be led any more: RuntimeError"):
            list(iterator)
    iterator.close()
    assert not processes()
    del iterator
    gc.collect()
    assert pool() is None


# -- lives -----------------------------------------------------------------------------------------


def slow(record):
    time.sleep(1000)


def test_close_does_not_wait_for_a_function_that_hangs():
    pipe = Pipeline(Records(40), batch_size=4, seed=1).map(slow, version="1")
    iterator = pipe.iterator(workers=2)
    iterator.start_prefetch()
    eventually(lambda: len(processes()) == 2)
    iterator.seek(8)
    iterator.close()
    assert not processes()
    iterator.close()
    with pytest.raises(Misuse, match="closed"):
        next(iterator)


def test_interrupts_while_waiting_lose_nothing():
    pipe = numbers(40, epochs=1)
    wanted = list(pipe)
    with pipe.iterator(workers=1, window=2) as iterator:
        found = []
        interrupts = 0
        waits = iterator._prefetcher._pool.batch

        def waiting(job, index):  # Ctrl-C comes here and not between the lines of this test
            nonlocal interrupts
            if interrupts < 5:
                interrupts += 1
                signal.raise_signal(signal.SIGINT)
            return waits(job, index)

        iterator._prefetcher._pool.batch = waiting
        while len(found) < len(wanted):
            with contextlib.suppress(KeyboardInterrupt):
                found.append(next(iterator))
        assert interrupts == 5
    np.testing.assert_equal(found, wanted)


def test_many_lives():
    """Close, collect, kill, move and iterate again: no deadlock, and the same batches."""
    pipe = numbers(40, epochs=None)
    plain = pipe.iterator(prefetch=0)
    wanted = [next(plain) for _ in range(6)]
    ends = time.monotonic() + 5
    lives = 0
    while lives < 200 and (lives < 8 or time.monotonic() < ends):
        iterator = pipe.iterator(workers=1 + lives % 2, window=1 + lives % 3)
        state = iterator.get_state()
        np.testing.assert_equal([next(iterator) for _ in range(lives % 5)], wanted[: lives % 5])
        if lives % 3 == 0:
            iterator.set_state(state)
            np.testing.assert_equal([next(iterator) for _ in range(2)], wanted[:2])
        if lives % 4 == 1:
            for pid in iterator._prefetcher._pool.pids():
                os.kill(pid, signal.SIGKILL)
        if lives % 4 == 0:
            del iterator  # collected with work in flight
        else:
            iterator.close()
        lives += 1
    print("lives", lives)


PARENT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from memory_source import Records
from datapipe import Pipeline

class Held:
    "By value: it is of the program itself."

def work(record):
    if sys.argv[2] == "hang" and b"3" in record:
        time.sleep(1000)
    return [Held.__doc__, len(record)]

pipes = [Pipeline(Records(40), batch_size=2, seed=s).map(work, version="1") for s in (1, 2)]
options = {}
if sys.argv[2] == "hang":  # a thread waits for a batch that never comes
    import jax
    options = {"sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0])}
iterators = [pipe.iterator(workers=2, **options) for pipe in pipes]
for iterator in iterators:
    iterator.start_prefetch()
batch = None if sys.argv[2] == "hang" else next(iterators[0])
pools = [iterator._prefetcher._pool for iterator in iterators]
while any(len(pool.pids()) < 2 for pool in pools):
    time.sleep(0.01)
print(*(pid for pool in pools for pid in pool.pids()), flush=True)
if sys.argv[3] != "end":
    time.sleep(1000)
"""


def lives(pid):
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"datapipe.prefetch.worker" in command
    return False


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("idle", signal.SIGKILL),
        ("hang", signal.SIGKILL),
        ("hang", signal.SIGTERM),
        ("idle", None),
        ("hang", None),
    ],
)
def test_workers_go_with_their_program(how, what):
    """Two pipelines on one machine; the program is killed, in whatever state, or simply ends."""
    program = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(HERE), how, "wait" if what else "end"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
    )
    with program:
        assert program.stdout is not None
        pids = [int(pid) for pid in program.stdout.readline().split()]
        assert len(set(pids)) == 4
        if what is not None:
            assert all(map(lives, pids))
            program.send_signal(what)
        assert program.wait(60) == (-what if what else 0)
    eventually(lambda: not any(map(lives, pids)))


def test_a_worker_knows_nothing_of_jax():
    def loaded(record):
        return sorted({name.split(".")[0] for name in sys.modules} & {"jax", "grain"})

    def environment(record):
        return json.dumps([os.environ.get("JAX_PLATFORMS"), signal.getsignal(signal.SIGINT)])

    pipe = Pipeline(Records(8), batch_size=2, seed=1)
    with pipe.map(loaded, version="1").iterator(workers=1) as iterator:
        assert next(iterator) == []
    with pipe.map(environment, version="1").iterator(workers=1) as iterator:
        assert json.loads(next(iterator)[0]) == ["cpu", signal.SIG_IGN]


FORKING = """
import os, sys
sys.path.insert(0, sys.argv[1])
from memory_source import Records, number
from datapipe import Misuse, Pipeline

with Pipeline(Records(400), batch_size=2, seed=1).map(number, version="1").iterator(
    workers=1, window=2
) as iterator:
    next(iterator)
    child = os.fork()
    if child == 0:
        refused = 0
        while refused < 3:
            try:
                next(iterator)
            except Misuse:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    for _ in range(150):
        next(iterator)
print("went on")
"""


def test_a_forked_child_takes_nothing_from_its_parent():
    """Workers look at memory that a child of their program shares."""
    program = subprocess.run(
        [sys.executable, "-c", FORKING, str(HERE)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
        check=True,
        capture_output=True,
        text=True,
    )
    assert program.stdout == "went on\n"


def test_not_after_a_fork(monkeypatch):
    with numbers().iterator(workers=1) as iterator:
        next(iterator)
        here = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(Misuse, match=r"used in process \d+, a fork of it"):
            list(itertools.islice(iterator, 20))
        iterator.close()  # it is not his to close
        monkeypatch.undo()
        assert len(processes()) == 1

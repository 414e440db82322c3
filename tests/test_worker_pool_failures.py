"""A pool of workers that fails in this process: it is told once, and the next call starts anew."""

from __future__ import annotations

import contextlib
import errno
import os
import threading

import numpy as np
import pytest
from number_batches import numbers
from worker_traces import no_traces, processes  # noqa: F401 - a fixture

from datapipe import WorkerFailed
from datapipe.prefetch import worker_pool
from datapipe.prefetch.worker_pool import WorkerPool

pytestmark = pytest.mark.usefixtures("no_traces")


def failing_at(call, error, real):
    """The same function, but one call of it fails."""
    calls = 0

    def act(*args, **named):
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return real(*args, **named)

    return act


@pytest.mark.parametrize("call", [1, 2, 4])
@pytest.mark.parametrize("name", ["_hire", "_give_out", "_poll", "_send", "_hear", "_take"])
def test_workers_that_cannot_be_led_are_replaced_by_others(monkeypatch, name, call):
    pipe = numbers(40, epochs=1)
    wanted = list(pipe)
    error = OSError(errno.EMFILE, "too many open files")
    monkeypatch.setattr(WorkerPool, name, failing_at(call, error, getattr(WorkerPool, name)))
    found = []
    failures = []
    with pipe.iterator(workers=2, window=1) as iterator:
        while len(found) < len(wanted):
            try:
                found.append(next(iterator))
            except WorkerFailed as failed:
                failures.append((failed, iterator.next_example, 4 * len(found)))
    np.testing.assert_equal(found, wanted)
    assert not processes()
    ((failed, position, delivered),) = failures
    assert "cannot be led any more: OSError" in str(failed)
    assert "the next call starts others" in str(failed)
    assert failed.__cause__ is error
    assert position == delivered


@pytest.mark.parametrize("move", ["seek", "set_state", "skip"])
def test_a_move_starts_anew(monkeypatch, move):
    pipe = numbers(40, epochs=1)
    wanted = list(pipe)
    with pipe.iterator(workers=1) as iterator:
        next(iterator)
        state = iterator.get_state()
        with monkeypatch.context() as patched:
            patched.setattr(WorkerPool, "_give_out", failing_at(1, MemoryError(), None))
            with pytest.raises(WorkerFailed, match="cannot be led any more: MemoryError"):
                list(iterator)
        if move == "seek":
            iterator.seek(4)
        elif move == "set_state":
            iterator.set_state(state)
        else:
            iterator.seek(0)
            iterator.skip([(0, 4)])
        np.testing.assert_equal(list(iterator), wanted[1:])


def test_while_none_can_be_started_again_each_call_says_so(monkeypatch):
    pipe = numbers(40, epochs=1)
    wanted = list(pipe)
    with pipe.iterator(workers=1) as iterator:
        found = [next(iterator)]
        with monkeypatch.context() as patched:
            patched.setattr(WorkerPool, "_give_out", failing_at(1, MemoryError(), None))
            with contextlib.suppress(WorkerFailed):
                while True:
                    found.append(next(iterator))
        with monkeypatch.context() as patched:

            def refuse(*args):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

            patched.setattr(worker_pool, "anonymous", refuse)
            for _ in range(2):
                with pytest.raises(WorkerFailed, match=r"cannot be started again: .*Too many open"):
                    next(iterator)
                iterator.seek(iterator.next_example)
        found += list(iterator)
    np.testing.assert_equal(found, wanted)


def test_where_there_is_no_thread_to_be_had(monkeypatch):
    pipe = numbers(40, epochs=1)
    with pipe.iterator(workers=1) as iterator:
        with monkeypatch.context() as patched:
            error = RuntimeError("can't start new thread")
            patched.setattr(threading.Thread, "start", failing_at(1, error, None))
            with pytest.raises(RuntimeError, match="can't start new thread"):
                next(iterator)
        np.testing.assert_equal(list(iterator), list(pipe))
    never = pipe.iterator(workers=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", failing_at(1, error, None))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            never.start_prefetch()
    never.close()

"""An iterator that a forked child inherits: refused there in words, and its parent's all the same.

A child that hangs is ended by an alarm, which shows as its exit status.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worker_traces import no_traces  # noqa: F401 - a fixture

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("no_traces")

BEGIN = """
import gc, os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
from memory_source import Gate, Records, number
from datapipe import Misuse, Pipeline

OPTIONS = eval(sys.argv[2])
pipe = Pipeline(Records(40), batch_size=2, seed=1, epochs=1).map(number, version="1")
wanted = [batch.tolist() for batch in pipe.iterator(prefetch=0)]


def refuse(parent, iterator):
    state = iterator.get_state()
    calls = [
        lambda: next(iterator),
        lambda: list(iterator),
        lambda: iterator.seek(0),
        lambda: iterator.skip([(1, 2)]),
        lambda: iterator.set_state(state),
        iterator.start_prefetch,
        iterator.stats,
    ]
    told = f"opened in process {parent} and is used in process {os.getpid()}"
    for call in calls:
        try:
            call()
        except Misuse as error:
            assert told in str(error) and "pipe.iterator(), and set_state" in str(error), error
        else:
            raise AssertionError("not refused")
    assert iterator.get_state() == state


def wait_for(child):
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
"""

INHERITED = """
parent = os.getpid()
iterator = pipe.iterator(**OPTIONS)
assert next(iterator).tolist() == wanted[0]
for turn in range(2):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        refuse(parent, iterator)
        state = iterator.get_state()
        if turn:
            with iterator:
                pass
            iterator.close()
            del iterator
            gc.collect()
        with pipe.iterator(**OPTIONS) as mine:
            mine.set_state(state)
            assert [batch.tolist() for batch in mine] == wanted[turn + 1:]
        sys.exit()  # and not os._exit, which leaves out what is done at the end
    wait_for(child)
    assert next(iterator).tolist() == wanted[turn + 1]
assert [batch.tolist() for batch in iterator] == wanted[3:]
print("went on")
"""

WHILE_A_THREAD_WAITS = """
parent = os.getpid()
source = Gate(40)
pipe = Pipeline(source, batch_size=2, seed=1, epochs=1).map(number, version="1")
iterator = pipe.iterator(**OPTIONS)
found = []
thread = threading.Thread(target=lambda: found.append(next(iterator).tolist()))
thread.start()
assert source.entered.wait(30)
child = os.fork()
if child == 0:
    signal.alarm(30)
    refuse(parent, iterator)
    iterator.close()
    del iterator
    gc.collect()
    sys.exit()
wait_for(child)
source.opened.set()
thread.join()
found += [batch.tolist() for batch in iterator]
assert found == wanted
print("went on")
"""

MULTIPROCESSING = """
import multiprocessing

parent = os.getpid()
iterator = pipe.iterator(**OPTIONS)
next(iterator)
for method in ("fork", "spawn"):
    context = multiprocessing.get_context(method)
    child = context.Process(target=refuse, args=(parent, iterator))
    try:
        child.start()
    except Misuse as error:  # it would have to be pickled
        assert method == "spawn" and "cannot be copied or sent to another process" in str(error)
    else:
        child.join()
        assert method == "fork" and child.exitcode == 0, child.exitcode
assert [batch.tolist() for batch in iterator] == wanted[1:]
print("went on")
"""


@pytest.mark.parametrize(
    ("program", "options"),
    [
        (INHERITED, {"prefetch": 0}),
        (INHERITED, {"prefetch": 3, "threads": 2}),
        (INHERITED, {"workers": 1, "window": 2}),
        (WHILE_A_THREAD_WAITS, {"prefetch": 0}),
        (WHILE_A_THREAD_WAITS, {"prefetch": 3}),
        (MULTIPROCESSING, {"prefetch": 2}),
        (MULTIPROCESSING, {"workers": 1}),
    ],
)
def test_a_forked_child(program, options):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, str(HERE), repr(options)],
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")

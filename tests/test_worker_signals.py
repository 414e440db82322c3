"""Signals to a whole group of processes, as Ctrl-C and schedulers send them: the trainer decides.

A worker is held up before it has imported anything, where it cannot ignore a signal yet.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from memory_source import Records
from waiting import eventually
from worker_traces import no_traces, processes  # noqa: F401 - a fixture

from datapipe import Pipeline
from datapipe.prefetch.worker import IGNORED

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("no_traces")

HELD_UP = """
import os, pathlib, sys, time

if any("datapipe.prefetch.worker" in each for each in sys.orig_argv):
    place = pathlib.Path(os.environ["PLACE"])
    (place / f"began {os.getpid()}").touch()
    while not (place / "go on").exists():
        time.sleep(0.01)
"""

TRAINER = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from memory_source import Records, number
from datapipe import Pipeline

for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, lambda number, frame: print("told", flush=True))
pipe = Pipeline(Records(40), batch_size=2, seed=1, epochs=1).map(number, version="1")
wanted = [batch.tolist() for batch in pipe.iterator(prefetch=0)]
found = []
with pipe.iterator(workers=2) as iterator:
    while len(found) < len(wanted):
        try:
            found.append(next(iterator).tolist())
        except KeyboardInterrupt:
            assert iterator.next_example == 0
            print("told", flush=True)
print("the same" if found == wanted else found)
"""

DEFAULT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""A shell that starts the tests in the background has it ignored."""


@pytest.mark.parametrize("sent", IGNORED)
def test_a_signal_to_the_group_while_workers_start(tmp_path, sent):
    (tmp_path / "sitecustomize.py").write_text(HELD_UP)
    path = os.pathsep.join([str(tmp_path), str(HERE.parent)])
    program = subprocess.Popen(
        [sys.executable, "-c", DEFAULT + TRAINER, str(HERE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "PLACE": str(tmp_path)},
        text=True,
        start_new_session=True,
    )
    with program:
        try:
            eventually(lambda: list(tmp_path.glob("began *")))
            began = {int(each.name.split()[1]) for each in tmp_path.glob("began *")}
            for _ in range(3):  # as many deaths would be an error
                os.killpg(program.pid, sent)
                assert program.stdout is not None
                assert program.stdout.readline() == "told\n"
                time.sleep(0.1)
            assert began <= processes(program.pid)
        finally:
            (tmp_path / "go on").touch()
        assert program.communicate(timeout=60) == ("the same\n", "")
        assert program.returncode == 0


def test_workers_ignore_them_and_hold_none_back():
    """What a function starts in a worker can be ended like anything else."""

    def held(record):
        are_ignored = all(signal.getsignal(each) == signal.SIG_IGN for each in IGNORED)
        return f"{are_ignored} {sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))}"

    pipe = Pipeline(Records(8), batch_size=2, seed=1).map(held, version="1")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with pipe.iterator(workers=1) as iterator:
        assert next(iterator).tolist() == ["True []"] * 2
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before

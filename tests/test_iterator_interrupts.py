"""Interrupts at any time, thousands of them: nothing is lost or served twice, and nothing hangs."""

from __future__ import annotations

import random
import signal

import numpy as np
import pytest
from iterator_threads import WAYS, small
from memory_source import Records
from worker_traces import no_traces  # noqa: F401 - a fixture

from datapipe import Pipeline

pytestmark = pytest.mark.usefixtures("no_traces")


class Interrupt(BaseException):
    """As KeyboardInterrupt, but of this test."""


class Interrupts:
    """A signal handler that raises while it is armed."""

    def __init__(self):
        self.is_armed = False
        self.count = 0

    def __call__(self, *args):
        if self.is_armed:
            self.is_armed = False
            self.count += 1
            raise Interrupt


@pytest.fixture
def interrupts():
    handler = Interrupts()
    before = signal.signal(signal.SIGALRM, handler)
    yield handler
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# Python drops what is raised in a callback of its collector, of which JAX has one.
@pytest.mark.timeout(120, method="thread")  # by default it would be by the same timer
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_interrupts_at_any_time(interrupts, way, seed):
    rng = random.Random(seed)
    print("seed", seed)
    pipe = Pipeline(Records(397), batch_size=2, seed=seed).map(small, version="1")
    wanted = [pipe.plan.records(batch).tolist() for batch in range(700)]
    list(Pipeline(Records(2), batch_size=1, seed=1, epochs=1).dataset())  # Grain wraps iterators
    kept = []
    found = 0
    with pipe.iterator(**WAYS[way]()) as iterator:
        while found < len(wanted):
            batch = None
            try:
                delay_s = rng.choice([3e-5, 1e-4, 3e-4, 1e-3]) * rng.random() + 1e-6
                signal.setitimer(signal.ITIMER_REAL, delay_s)
                interrupts.is_armed = True
                # Nothing can come in before the batch has its name, as it can behind next().
                for batch in iterator:  # noqa: B007
                    interrupts.is_armed = False
                    break
            except Interrupt:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            if iterator.next_example == 2 * found:
                continue
            assert batch is not None, f"{iterator} after {found} batches of 2"
            assert np.asarray(batch).tolist() == wanted[found]
            found += 1
            assert iterator.next_example == 2 * found
            kept = [*kept[-rng.randrange(8) :], (batch, wanted[found - 1])]
            for batch_kept, records in kept:  # nobody writes to what the user has
                assert np.asarray(batch_kept).tolist() == records
    assert interrupts.count > 100
    print("interrupts", interrupts.count)

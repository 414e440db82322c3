"""The loop helper and SIGTERM."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from loop_in_memory import GUARD, Batches, MemoryManager, plain, reference, run_to, start, train

from ckpt.run import Run


@pytest.fixture
def manager() -> MemoryManager:
    return MemoryManager()


def test_sigterm_saves_the_current_step_and_leaves(manager: MemoryManager) -> None:
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        installed = signal.getsignal(signal.SIGTERM)
        data = Batches()
        with Run(manager, start(), data, steps=100, guard=GUARD) as run:
            for step, batch in run:
                if step == 8:
                    os.kill(os.getpid(), signal.SIGTERM)
                state, loss = train(run.state, batch, frozenset())
                run.update(state, loss=loss)
        assert run.preempted
        assert run.step == 8
        assert manager.all_steps() == [0, 5, 8]
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is installed
    finally:
        signal.signal(signal.SIGTERM, before)
    run, _ = run_to(manager, 23)
    assert not run.preempted
    assert plain(run.state) == reference(23, set())


def test_the_handler_is_put_back_after_an_error(manager: MemoryManager) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_to(manager, 9, crash_after=2)
    assert signal.getsignal(signal.SIGTERM) is before
    assert manager.all_steps() == [0]  # an exception saves nothing more


def test_it_works_off_the_main_thread(manager: MemoryManager) -> None:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(run_to(manager, 7)[0]))
    thread.start()
    thread.join()
    assert runs[0].step == 7

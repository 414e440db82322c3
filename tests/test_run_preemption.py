"""The loop helper and SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

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


def test_further_signals_while_the_step_is_saved_change_nothing(manager: MemoryManager) -> None:
    class Slow(MemoryManager):
        def save(self, step: int, *args: Any, **given: Any) -> Any:
            self.forced = given["force"]
            os.kill(os.getpid(), signal.SIGTERM)
            return super().save(step, *args, **given)

        def wait_until_finished(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().wait_until_finished()

    before = signal.getsignal(signal.SIGTERM)
    slow: Any = Slow(every=10_000)
    with Run(slow, start(), Batches(), steps=100) as run:
        for step, batch in run:
            if step == 8:
                os.kill(os.getpid(), signal.SIGTERM)
            state, loss = train(run.state, batch, frozenset())
            run.update(state, loss=loss)
    assert (run.preempted, run.step, slow.all_steps(), slow.forced) == (True, 8, [8], True)
    assert slow.log[-1] == ("waited",)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_between_two_updates_saves_the_step_before(manager: MemoryManager) -> None:
    any_manager: Any = manager
    with Run(any_manager, start(), Batches(), steps=100) as run:
        for step, _ in run:
            run.update(run.state, loss=1.0)
            if step == 8:
                os.kill(os.getpid(), signal.SIGTERM)
    assert (run.preempted, run.step, manager.all_steps()) == (True, 8, [5, 8])

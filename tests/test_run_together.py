"""The loop helper in several processes, played by threads: local metrics, and where all stop."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any

import pytest
from board_members import Board, Member, at_once
from loop_in_memory import GUARD, Batches, MemoryManager, plain, reference, start, train

from ckpt.errors import Misuse, PeerFailed
from ckpt.run import Run
from ckpt.spike import GuardState, SpikeGuard


class TogetherManager(MemoryManager):
    """One for each process; none of them waits for another."""

    def __init__(self, member: Member, every: int = 5) -> None:
        super().__init__(every)
        self.processes, self.timeout_s = member, 20.0


class Paced(Batches):
    """Batches that the processes take in step, as those do whose devices work together."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def __next__(self) -> int:
        self.barrier.wait(30)
        time.sleep(0.001)
        return super().__next__()


def own_loss(member: Member, loss: float) -> float:
    """The batch of each process is another, their mean is that of all."""
    return loss + (member.index - (member.count - 1) / 2) * 0.125


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lag", [0, 2, 5])
def test_a_spike_that_one_process_sees_rewinds_all_at_the_same_update(seed: int, lag: int) -> None:
    guard = SpikeGuard(**{**vars(GUARD), "lag": lag})
    board = Board()

    def act(member: Member) -> Any:
        manager = TogetherManager(member)
        with Run(manager, start(), Batches(), steps=60, guard=guard, metric_is_local=True) as run:  # type: ignore[arg-type]
            for _, batch in run:
                bad = {22, 23} if member.index == 1 else set()
                state, _ = train(run.state, batch, frozenset({22, 23}))
                loss = 2.0 + 0.1 * (batch % 3) + 30.0 * (batch in bad)
                run.update(state, loss=own_loss(member, loss))
        saved = {step: each[0].metrics["loss"] for step, each in manager.lineage.items() if step}
        return plain(run.state), manager.log, run.rewinds, saved, manager.lineage[60][0].guard

    found = at_once(act, 3, seed=seed, board=board)
    assert not isinstance(found[0], Exception), (seed, found)
    assert found[1:] == found[:-1], seed
    state, _, rewinds, saved, guard_state = found[0]
    assert [(each.onset, each.to) for each in rewinds] == [(23, 15)]
    assert state == reference(60, set(range(20, 28)))
    assert [spike.onset for spike in GuardState.from_json(guard_state).history] == [23]
    # What is saved is the mean, not what one process saw: `Keep(best=...)` goes by it.
    assert saved[10] == pytest.approx(2.0)
    assert len(board.texts) < 20


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_value_that_is_not_finite_in_one_is_so_for_all(culprit: int) -> None:
    def act(member: Member) -> Any:
        manager = TogetherManager(member)
        with Run(manager, start(), Batches(), steps=12, guard=GUARD, metric_is_local=True) as run:  # type: ignore[arg-type]
            for _, batch in run:
                state, _ = train(run.state, batch, frozenset())
                poisoned = batch == 6 and member.index == culprit
                run.update(state, loss=math.nan if poisoned else 1.0)
        return [(each.onset, each.to) for each in run.rewinds], plain(run.state)

    assert at_once(act) == [([(7, 0)], reference(12, set(range(4, 12))))] * 3


def test_a_process_whose_loop_fails_ends_the_others() -> None:
    def act(member: Member) -> Any:
        manager = TogetherManager(member)
        with Run(manager, start(), Batches(), steps=500, guard=GUARD, metric_is_local=True) as run:  # type: ignore[arg-type]
            for step, _ in run:
                if (member.index, step) == (1, 9):
                    raise KeyError("a bug")
                run.update(run.state, loss=1.0)

    zero, one, two = at_once(act)
    assert type(one) is KeyError
    for error in (zero, two):
        assert type(error) is PeerFailed
        assert "process 1 failed: KeyError: 'a bug'" in str(error)


def test_one_process_alone_needs_no_others() -> None:
    manager: Any = MemoryManager()
    with Run(manager, start(), Batches(), steps=40, guard=GUARD, metric_is_local=True) as run:
        for _, batch in run:
            state, loss = train(run.state, batch, frozenset({22, 23}))
            run.update(state, loss=loss)
    assert plain(run.state) == reference(40, set(range(20, 28)))


@pytest.mark.parametrize("error", [PeerFailed("process 1 was not heard of"), Misuse("same calls")])
def test_where_the_values_differ_without_the_option_the_error_names_it(error: Exception) -> None:
    def act(member: Member) -> Any:
        manager = TogetherManager(member)
        manager.refuses_rewind = error
        with Run(manager, start(), Batches(), steps=40, guard=GUARD) as run:  # type: ignore[arg-type]
            for step, _ in run:
                run.update(run.state, loss=math.nan if step == 9 else 1.0)

    (found,) = at_once(act, 2)[:1]
    assert type(found) is type(error)
    assert str(found).startswith(f"{error}; the guard must see the same loss in all processes")
    assert "Run(..., metric_is_local=True)" in str(found)
    manager: Any = MemoryManager()
    manager.refuses_rewind = error
    run = Run(manager, start(), Batches(), steps=40, guard=GUARD)

    def alone() -> None:
        with run:
            for step, _ in run:
                run.update(run.state, loss=math.nan if step == 9 else 1.0)

    with pytest.raises(type(error)) as caught:
        alone()
    assert caught.value is error


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_signal_to_one_stops_all_after_the_same_step_which_is_saved(
    seed: int, local: bool
) -> None:
    barrier = threading.Barrier(3)

    def act(member: Member) -> Any:
        manager = TogetherManager(member, every=10_000)
        options: Any = {"guard": GUARD, "metric_is_local": True} if local else {}
        with Run(manager, start(), Paced(barrier), steps=5000, **options) as run:  # type: ignore[arg-type]
            for step, _ in run:
                if (member.index, step) == (seed, 8):
                    run._preemption._note()
                run.update(run.state, loss=1.0)
        return run.preempted, run.step, manager.all_steps()

    found = at_once(act, seed=seed)
    assert found[1:] == found[:-1], (seed, found)
    preempted, step, steps = found[0]
    assert preempted
    assert 8 <= step < 5000
    assert steps == ([0, step] if local else [step])


def test_a_signal_to_the_program_reaches_the_board() -> None:
    """In the main thread, where handlers are; the peer is a thread."""
    board = Board()
    barrier = threading.Barrier(2)
    before = signal.getsignal(signal.SIGTERM)

    def loop(member: Member) -> Any:
        manager = TogetherManager(member, every=10_000)
        with Run(manager, start(), Paced(barrier), steps=5000) as run:  # type: ignore[arg-type]
            for step, _ in run:
                if member.index == 0 and step in (8, 9):
                    os.kill(os.getpid(), signal.SIGTERM)
                run.update(run.state, loss=1.0)
        return run.preempted, run.step, manager.all_steps()

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(loop(Member(board, 1, 2))))
    thread.start()
    found.append(loop(Member(board, 0, 2)))
    thread.join()
    assert found[0] == found[1]
    assert found[0][0]
    assert signal.getsignal(signal.SIGTERM) is before

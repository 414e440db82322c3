"""SIGTERM: handlers above and below, and the one update after which all processes stop."""

from __future__ import annotations

import faulthandler
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from board_members import Board, Member, at_once

import ckpt
from ckpt import signals
from ckpt.preemption import Agreement, Sigterm


class Lockstep:
    """Nobody begins an update before all have begun the one that is `depth` back.

    As processes whose devices work together, and that run ahead of them by so much.
    """

    def __init__(self, count: int, depth: int) -> None:
        self._begun = [0] * count
        self._depth = depth
        self._changed = threading.Condition()

    def begin(self, index: int, update: int) -> None:
        with self._changed:
            self._begun[index] = update
            self._changed.notify_all()
            assert self._changed.wait_for(
                lambda: min(self._begun) >= update - self._depth, timeout=30
            ), f"stuck: {self._begun}"


def drive(
    member: Member, lockstep: Lockstep, wanted_at: dict[int, int], *, seed: int, updates: int
) -> tuple[int, bool]:
    rng = random.Random(seed * 31 + member.index)
    agreement = Agreement(member, 20.0)
    try:
        for update in range(1, updates + 1):
            lockstep.begin(member.index, update)
            if wanted_at.get(member.index) == update:
                agreement.wanted = True
            time.sleep(rng.choice([0, 0, 0.001, 0.004]))
            if agreement.after_update(last=update == updates):
                return update, True
        return updates, False
    finally:
        agreement.close()


@pytest.mark.parametrize("depth", [0, 1, 7])
@pytest.mark.parametrize("seed", range(5))
def test_all_stop_after_the_same_update(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    count = rng.choice([2, 3, 5])
    lockstep = Lockstep(count, depth)
    senders = rng.sample(range(count), rng.choice([1, 1, count]))
    wanted_at = {index: rng.randrange(1, 40) for index in senders}
    found = at_once(
        lambda member: drive(member, lockstep, wanted_at, seed=seed, updates=5000),
        count,
        seed=seed,
    )
    assert len(set(map(str, found))) == 1, (seed, found)
    update, stopped = found[0]
    assert stopped, seed
    assert min(wanted_at.values()) <= update < 5000, seed


@pytest.mark.parametrize("seed", range(6))
def test_a_signal_just_before_the_end_holds_nobody(seed: int) -> None:
    """Whether they still agree or not: all end, together."""
    lockstep = Lockstep(3, 2)
    found = at_once(
        lambda member: drive(member, lockstep, {seed % 3: 28}, seed=seed, updates=30), seed=seed
    )
    assert len(set(map(str, found))) == 1, (seed, found)


def test_without_a_signal_nobody_stops_and_little_is_said() -> None:
    board, lockstep = Board(), Lockstep(3, 1)
    found = at_once(lambda member: drive(member, lockstep, {}, seed=1, updates=100), board=board)
    assert found == [(100, False)] * 3
    assert board.texts == {}


def stopped(member: Member, completed: int = 0) -> str:
    """Wants to stop, and updates until it may."""
    agreement = Agreement(member, 20.0)
    agreement._completed += completed
    try:
        agreement.wanted = True
        while not agreement.after_update(last=False):
            time.sleep(0.005)
        return "stopped"
    finally:
        agreement.close()


def test_one_that_fails_while_the_others_hold_is_told() -> None:
    def act(member: Member) -> Any:
        if member.index == 2:
            time.sleep(0.3)
            member.leave("it raised KeyError")
            return None
        return stopped(member)

    zero, one, _ = at_once(act)
    for error in (zero, one):
        assert type(error) is ckpt.PeerFailed
        assert "process 2 takes no part in the run any more: it raised KeyError" in str(error)


def test_one_that_had_gone_too_far_to_hold_is_told_of_it_too() -> None:
    def act(member: Member) -> Any:
        if member.index == 2:
            time.sleep(0.3)
            member.leave("it raised KeyError")
            return None
        return stopped(member, completed=10**6 * member.index)

    for error in at_once(act)[:2]:
        assert type(error) is ckpt.PeerFailed
        assert "process 2 takes no part in the run any more" in str(error)


def test_a_board_that_is_gone_ends_no_run_that_nobody_wants_to_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Board()
    board.gone = True

    def act(member: Member) -> Any:
        agreement = Agreement(member, 20.0)
        try:
            agreement._thread.join(20)
            return [agreement.after_update(last=False) for _ in range(3)]
        finally:
            agreement.close()

    assert at_once(act, 2, board=board) == [[False] * 3] * 2
    assert "will not stop after a common step: the board is gone" in caplog.text


def test_one_that_is_silent_while_the_others_hold_is_told_in_time() -> None:
    def act(member: Member) -> Any:
        if member.index == 1:
            return None
        agreement = Agreement(member, 0.4)
        try:
            agreement.wanted = True
            while not agreement.after_update(last=False):
                time.sleep(0.005)
        finally:
            agreement.close()

    zero, _ = at_once(act, 2)
    assert type(zero) is ckpt.PeerFailed
    assert "found no update after which to stop within 0 s" in str(zero)


def test_no_thread_stays() -> None:
    assert not [each for each in threading.enumerate() if each.name == "ckpt-stop"]


# --- handlers -------------------------------------------------------------------------------------


@pytest.fixture
def noted() -> Any:
    """What was called, in order; the handler of the test process is put back."""
    before = signal.getsignal(signal.SIGTERM)
    called: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: called.append("below"))
    yield called
    signal.signal(signal.SIGTERM, before)


def test_the_handler_below_is_called_and_put_back(noted: list[str]) -> None:
    below = signal.getsignal(signal.SIGTERM)
    ours = Sigterm(lambda: noted.append("ours"))
    ours.install()
    for _ in range(2):
        signal.raise_signal(signal.SIGTERM)
    ours.put_back()
    ours.put_back()
    assert signal.getsignal(signal.SIGTERM) is below
    assert noted == ["ours", "below"] * 2


def test_a_c_handler_below_is_called_and_put_back(tmp_path: Path) -> None:
    """Such as that of faulthandler, of which Python does not tell; no writer is beside it."""
    with open(tmp_path / "stacks", "w") as file:
        faulthandler.register(signal.SIGTERM, file=file, all_threads=False)
        try:
            below = signals._installed_action().handler
            called: list[str] = []
            ours = Sigterm(lambda: called.append("ours"))
            ours.install()
            signal.raise_signal(signal.SIGTERM)
            assert called == ["ours"]
            assert (tmp_path / "stacks").read_text().count("most recent call first") == 1
            ours.put_back()
            assert signals._installed_action().handler == below
            signal.raise_signal(signal.SIGTERM)
            assert called == ["ours"]
            assert (tmp_path / "stacks").read_text().count("most recent call first") == 2
        finally:
            faulthandler.unregister(signal.SIGTERM)


def test_a_handler_that_was_installed_above_stays(noted: list[str]) -> None:
    below = signal.getsignal(signal.SIGTERM)
    ours = Sigterm(lambda: noted.append("ours"))
    ours.install()
    inner: Any = signal.getsignal(signal.SIGTERM)

    def above(number: int, frame: Any) -> None:
        noted.append("above")
        inner(number, frame)

    signal.signal(signal.SIGTERM, above)
    signal.raise_signal(signal.SIGTERM)
    ours.put_back()
    assert signal.getsignal(signal.SIGTERM) is above
    signal.raise_signal(signal.SIGTERM)
    assert noted == ["above", "ours", "below", "above", "below"]
    # The one above puts back what it found: ours, which is out of use and then makes way.
    signal.signal(signal.SIGTERM, inner)
    signal.raise_signal(signal.SIGTERM)
    assert noted[5:] == ["below"]
    assert signal.getsignal(signal.SIGTERM) is below


def test_it_may_be_put_back_in_another_thread(noted: list[str]) -> None:
    below = signal.getsignal(signal.SIGTERM)
    ours = Sigterm(lambda: noted.append("ours"))
    ours.install()
    thread = threading.Thread(target=ours.put_back)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGTERM)
    assert noted == ["below"]
    assert signal.getsignal(signal.SIGTERM) is below


@pytest.mark.parametrize(
    "moves",
    [
        ("manager", "run", "run back", "manager back"),
        ("run", "run back"),
        ("manager", "run", "second", "run back", "second back", "manager back"),
        ("manager", "run", "second", "manager back", "run back", "second back"),
        ("manager", "run", "second", "second back", "manager back", "run back"),
        ("run", "manager", "run back", "manager back"),
    ],
    ids=" ".join,
)
def test_with_the_handlers_of_managers_the_program_dies_of_sigterm_as_ever(
    moves: tuple[str, ...],
) -> None:
    """Writers come and go beside a run; when the run is over, SIGTERM ends the program."""
    code = f"""
import signal, socket
from ckpt import signals
from ckpt.preemption import Sigterm
noted, there = [], {{}}
pair = socket.socketpair()
for each in pair:
    each.setblocking(False)
for move in {moves!r}:
    name, _, back = move.partition(" ")
    if back:
        there.pop(name).put_back()
    elif name == "run":
        there[name] = Sigterm(lambda: noted.append(1))
        there[name].install()
    else:
        there[name] = signals.install(pair[0].fileno())
    if "run" in there:
        before = len(noted)
        signal.raise_signal(signal.SIGTERM)
        assert len(noted) == before + 1
print("over", flush=True)
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("over\n", -signal.SIGTERM), done.stderr

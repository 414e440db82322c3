"""SIGTERM reaches the socket of a writer, and whoever it would have reached without us."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ckpt import signals

CHILD = Path(__file__).with_name("signals_child.py")
TERM = bytes([signal.SIGTERM])


@contextlib.contextmanager
def trainer(state: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A trainer that is ready, and the socket on which its writer would listen."""
    here, there = socket.socketpair()
    there.setblocking(False)
    here.settimeout(60)
    with here, there:
        process = subprocess.Popen(
            [sys.executable, str(CHILD), state, str(there.fileno()), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(there.fileno(),),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            try:
                assert process.stdout.readline() == "ready\n"
                yield process, here
            finally:
                process.kill()


def rest_of(process: subprocess.Popen[str]) -> list[str]:
    """What it says when it may go on."""
    out, _ = process.communicate("go on\n", timeout=60)
    return out.splitlines()


def test_the_byte_is_out_while_a_c_call_keeps_the_lock() -> None:
    with trainer("keeps the lock") as (process, wake):
        process.send_signal(signal.SIGTERM)
        assert wake.recv(1) == TERM
        process.kill()
        assert "handler" not in process.communicate(timeout=60)[0]


def test_where_nothing_was_installed_the_trainer_dies_of_it() -> None:
    with trainer("default") as (process, wake):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        assert set(wake.recv(16)) == set(TERM)


def test_the_handler_from_before_is_called() -> None:
    with trainer("handler") as (process, wake):
        process.send_signal(signal.SIGTERM)
        assert wake.recv(1) == TERM
        assert rest_of(process) == [f"handler {signal.SIGTERM:d}", "lives"]


def test_ignored_stays_ignored() -> None:
    with trainer("ignored") as (process, wake):
        process.send_signal(signal.SIGTERM)
        assert wake.recv(1) == TERM
        assert rest_of(process) == ["lives"]


def test_asyncio_hears_all_its_signals() -> None:
    with trainer("asyncio") as (process, wake):
        assert process.stdout is not None
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "usr1\n"
        process.send_signal(signal.SIGTERM)
        assert wake.recv(1) == TERM
        assert rest_of(process) == ["asyncio", "put back True"]


def test_a_forked_child_dies_of_it_and_tells_nobody() -> None:
    with trainer("forked") as (process, wake):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert rest_of(process) == [f"child {-signal.SIGTERM:d}", "lives"]
        wake.setblocking(False)
        with pytest.raises(BlockingIOError):
            wake.recv(1)


def a_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_the_notifier_of_jax_learns_of_it() -> None:
    with trainer("jax", a_port()) as (process, wake):
        process.send_signal(signal.SIGTERM)
        assert wake.recv(1) == TERM
        assert rest_of(process) == ["jax", "put back True"]


def test_without_the_notifier_of_jax_the_trainer_dies_of_it() -> None:
    with trainer("jax off", a_port()) as (process, wake):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        assert set(wake.recv(16)) == set(TERM)


# --- in this process ------------------------------------------------------------------------


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """What a handler from before sees; all is as it was in the end."""
    found: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        del number, frame
        found.append("before")

    previous = signal.signal(signal.SIGTERM, note)
    yield found
    assert signal.getsignal(signal.SIGTERM) is note
    signal.signal(signal.SIGTERM, previous)
    assert signal.set_wakeup_fd(-1) == -1
    assert not signals._told
    assert not signals._takeovers


@pytest.fixture
def writers() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    pairs = [socket.socketpair() for _ in range(3)]
    for end in itertools.chain(*pairs):
        end.setblocking(False)
    yield pairs
    for end in itertools.chain(*pairs):
        end.close()


def was_told(pair: tuple[socket.socket, socket.socket]) -> bool:
    try:
        return pair[1].recv(100).count(TERM) > 0
    except BlockingIOError:
        return False


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_managers_come_and_go_in_any_order(
    order: tuple[int, ...],
    seen: list[str],
    writers: list[tuple[socket.socket, socket.socket]],
) -> None:
    installed = [signals.install(pair[0].fileno()) for pair in writers]
    left = {0, 1, 2}
    for number in order:
        signal.raise_signal(signal.SIGTERM)
        assert {k for k in range(3) if was_told(writers[k])} == left
        assert seen == ["before"]
        seen.clear()
        installed[number].put_back()
        installed[number].put_back()
        left.remove(number)
    signal.raise_signal(signal.SIGTERM)
    assert seen == ["before"]
    assert not any(map(was_told, writers))


def test_whoever_comes_later_and_chains_keeps_their_place(
    seen: list[str], writers: list[tuple[socket.socket, socket.socket]]
) -> None:
    first = signals.install(writers[0][0].fileno())
    chained = signal.getsignal(signal.SIGTERM)
    assert callable(chained)

    def later(number: int, frame: FrameType | None) -> None:
        seen.append("later")
        chained(number, frame)

    signal.signal(signal.SIGTERM, later)
    second = signals.install(writers[1][0].fileno())
    signal.raise_signal(signal.SIGTERM)
    assert seen == ["later", "before"]
    assert all(map(was_told, writers[:2]))
    second.put_back()
    first.put_back()
    assert signal.getsignal(signal.SIGTERM) is later
    signal.raise_signal(signal.SIGTERM)
    assert seen == ["later", "before"] * 2
    assert not any(map(was_told, writers))
    signal.signal(signal.SIGTERM, chained)
    third = signals.install(writers[2][0].fileno())
    third.put_back()


def test_under_a_handler_that_chains_the_trainer_does_not_die(
    writers: list[tuple[socket.socket, socket.socket]],
) -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    installed = signals.install(writers[0][0].fileno())
    chained = signal.getsignal(signal.SIGTERM)
    assert callable(chained)
    signal.signal(signal.SIGTERM, lambda number, frame: chained(number, frame))
    signal.raise_signal(signal.SIGTERM)
    assert was_told(writers[0])
    signal.signal(signal.SIGTERM, chained)
    installed.put_back()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_put_back_in_another_thread_is_done_with_the_next_signal(
    seen: list[str], writers: list[tuple[socket.socket, socket.socket]]
) -> None:
    installed = signals.install(writers[0][0].fileno())
    thread = threading.Thread(target=installed.put_back)
    thread.start()
    thread.join()
    assert not installed.is_active
    signal.raise_signal(signal.SIGTERM)
    assert seen == ["before"]
    assert not signals._takeovers
    assert not signals._gone


def test_elsewhere_nothing_is_done_and_it_says_so(
    writers: list[tuple[socket.socket, socket.socket]], caplog: pytest.LogCaptureFixture
) -> None:
    made: list[signals.Installed] = []
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: made.append(signals.install(writers[0][0].fileno())))
    thread.start()
    thread.join()
    assert not made[0].is_active
    made[0].put_back()
    assert "not made in the main thread" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_manager_made_under_a_chaining_handler_leaves_the_first_in_charge(
    writers: list[tuple[socket.socket, socket.socket]],
) -> None:
    """As when a run inside which another manager came and went is over: SIGTERM still ends us."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        first = signals.install(writers[0][0].fileno())
        chained = signal.getsignal(signal.SIGTERM)
        assert callable(chained)

        def run(number: int, frame: FrameType | None) -> None:
            chained(number, frame)

        signal.signal(signal.SIGTERM, run)
        second = signals.install(writers[1][0].fileno())
        assert signal.getsignal(signal.SIGTERM) is run
        signal.raise_signal(signal.SIGTERM)
        assert was_told(writers[0])
        assert was_told(writers[1])
        second.put_back()
        signal.signal(signal.SIGTERM, chained)
        first.put_back()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)

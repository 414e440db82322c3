"""The writer as its trainer sees it: a process that is started, told, heard, and started again.

::

    tell ──> outbox ── (thread "ckpt-tell") ──socket──> python -m ckpt.writer_process
    reports <────────── thread "ckpt-companion" <───────┘   one at a time, started by this thread

Nobody who tells something waits for the writer: it may be starting, stopped, or dead. What the
socket takes at once is sent by the teller, for whom the very next step may be the last; the thread
sends the rest. What a writer has not ended when it dies is told again to the next one.

A child forked by the trainer has no part in it; its copies of the sockets are closed, or the writer
would not notice the death of the trainer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from ckpt import launching, messages
from ckpt.errors import Damaged, StoreFailed
from ckpt.launching import HELD_BACK, LEAVE_S, MODULE, absolute, collect, reports_of
from ckpt.messages import (
    Close,
    Done,
    Failed,
    Job,
    Released,
    Report,
    Settled,
    Setup,
    Tell,
    ToWriter,
)
from ckpt.unfinished import Unfinished
from ckpt.writer_process import OTHER_RELEASE

_ATTEMPTS = 3
"""So many writers in a row may die without having ended anything."""
_PAUSE_S = 0.2
_POLL_S = 0.25
_MOMENT_S = 0.1
_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class _Link:
    """The socket to a writer that was just started."""

    socket: socket.socket


@dataclass(frozen=True)
class _Death:
    how: str
    progressed: bool = False
    """It has ended something that it was told."""
    is_clean: bool = False
    is_final: bool = False
    """No other one would do better."""


_Item = ToWriter | _Link | Callable[[], None] | None


@final
class Companion:
    """A writer in a process of its own.

    Args:
        tell: called with every report, one after the other, in a thread.
        module: what is run; it gets the numbers of two sockets as arguments.

    Raises:
        StoreFailed: this process may not have more files or threads.
    """

    def __init__(self, setup: Setup, tell: Tell, *, module: str = MODULE) -> None:
        self._setup = absolute(setup)
        self._deliver = tell
        self._module = module
        self._home = os.getpid()
        # SimpleQueues: `leave` may come in the middle of a `put`, from the garbage collector.
        self._outbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._look: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each item: the thread that sends is to look into the outbox."""
        self._sending = threading.Lock()
        """Held by who takes from the outbox and sends; of the three that follow."""
        self._link: socket.socket | None = None
        self._rest = b""
        """What is still to be sent of messages that have left the outbox."""
        self._is_over = False
        self._lock = threading.Lock()
        """Of what follows."""
        self._unfinished = Unfinished()
        self._wanted = threading.Event()
        """There is something to do for a new writer, after all."""
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._last: Callable[[], None] | None = None
        self._sockets: set[socket.socket] = set()
        try:
            self._wake, self._wake_end = self._socketpair()
            self._wake.setblocking(False)
            self._thread = threading.Thread(target=self._run, name="ckpt-companion", daemon=True)
            self._sender = threading.Thread(target=self._send_all, name="ckpt-tell", daemon=True)
            self._sender.start()
            self._thread.start()
        except (OSError, RuntimeError) as error:
            self._put(None)
            self._close_sockets()
            raise StoreFailed(f"cannot have a writer: {error}; {_CURE}") from error
        _live.add(self)

    def tell(self, message: ToWriter) -> None:
        """Tell the writer something; never waits."""
        if self._is_here():
            self._put(message)
            # Held for moments only; but a handler of signals may have come in the middle of one.
            if self._sending.acquire(timeout=_MOMENT_S):
                try:
                    self._send_outbox()
                finally:
                    self._sending.release()

    def close(self) -> None:
        """Finish everything, end the writer, and wait for that."""
        if self._is_here():
            self._put(Close())
            self._thread.join()

    def leave(self, last: Callable[[], None]) -> threading.Thread:
        """As `close`, without waiting: the thread, which calls `last` when it is done."""
        if self._is_here():
            self._put(last)
        return self._thread

    @property
    def is_alive(self) -> bool:
        """Is there somebody to tell? Not after `close`, and not in a forked child."""
        return self._is_here() and self._thread.is_alive()

    @property
    def pid(self) -> int | None:
        """Of the process; None before the first one was started."""
        return None if self._process is None else self._process.pid

    @property
    def restarts(self) -> int:
        """How many writers died and had a successor."""
        return max(0, self._starts - 1)

    @property
    def wake_fd(self) -> int:
        """Where a handler of signals writes their numbers: `ckpt.signals.install` takes it."""
        return self._wake.fileno()

    def _is_here(self) -> bool:
        return os.getpid() == self._home

    def _put(self, item: _Item) -> None:
        self._outbox.put(item)
        self._look.put(None)

    # --- one thread: the life of the process, and its reports ---------------------------------

    def _run(self) -> None:
        # The writer is born with these held back, too, and heeds them once it can.
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        deaths = 0
        try:
            while True:
                death = self._one_life()
                deaths = 1 if death.progressed else deaths + 1
                given_up = death.is_final or deaths >= _ATTEMPTS
                with self._lock:
                    reports = self._unfinished.at_death()
                    if given_up:
                        self._wanted.clear()
                    is_over = self._unfinished.closing and not self._unfinished.jobs
                if not (is_over and death.is_clean):
                    self._lament(death, given_up=given_up)
                self._deliver_all(reports)
                if given_up:
                    with self._lock:
                        reports = self._unfinished.failed(_given_up(death))
                    self._deliver_all(reports)
                with self._lock:
                    left = self._unfinished
                    is_over = left.closing and not left.jobs
                    is_over &= death.is_clean or not left.metrics
                    reports = left.failed(_given_up(death)) if is_over else []
                self._deliver_all(reports)
                if is_over:
                    break
                if given_up:
                    self._wanted.wait()
                    deaths = 0
                    with self._lock:
                        left = self._unfinished
                        if left.closing and not (left.jobs or left.metrics):
                            break
                elif deaths > 1:
                    time.sleep(_PAUSE_S * (deaths - 1))
        finally:
            self._put(None)
            self._sender.join()
            self._close_sockets()
            if self._last is not None:
                self._last()

    def _one_life(self) -> _Death:
        """Start a writer and hear it until it is dead."""
        try:
            process, link = self._start()
        except OSError as error:
            return _Death(f"it cannot be started: {error}")
        self._put(_Link(link))
        progressed, fault = False, None
        try:
            for report in reports_of(link):
                with self._lock:
                    self._unfinished.heard(report)
                progressed |= isinstance(report, Done | Failed | Released | Settled)
                self._deliver_all([report])
        except Damaged as error:
            fault = error
            process.kill()
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)  # whoever waits to send stops
        how = collect(process)
        with self._sending:
            if self._link is link:
                self._link, self._rest = None, b""
        self._close(link)
        if fault is not None:
            return _Death(f"it sent what is no message: {fault}", is_final=True)
        code = process.returncode
        return _Death(how, progressed, is_clean=code == 0, is_final=code == OTHER_RELEASE)

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        link, end = self._socketpair()
        try:
            process = launching.start(self._module, end, self._wake_end)
        except BaseException:
            self._close(link)
            raise
        finally:
            self._close(end)
        with self._lock:
            self._process = process
        self._starts += 1
        return process, link

    def _lament(self, death: _Death, *, given_up: bool) -> None:
        with self._lock:
            jobs, closing = self._unfinished.jobs, self._unfinished.closing
        then = "they fail" if given_up else "" if closing and not jobs else "another one goes on"
        _log.warning(
            "the writer (pid %s) has ended: %s; saves that it has not ended: %d %s",
            self.pid,
            death.how,
            jobs,
            then and f"({then})",
        )

    def _deliver_all(self, reports: list[Report]) -> None:
        for report in reports:
            try:
                self._deliver(report)
            except Exception:  # the reports behind this one are waited for
                _log.exception("a report of the writer was not taken: %s", report)

    # --- another thread: what the writer is told ------------------------------------------------

    def _send_all(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        idle_since: float | None = None
        while not self._is_over:
            try:
                self._look.get(timeout=_POLL_S if self._unfinished.closing else None)
            except queue.Empty:
                idle_since = self._see_it_off(idle_since)
                continue
            while True:
                with self._sending:
                    full = self._send_outbox()
                if full is None:
                    break
                _wait_until_writable(full)

    def _send_outbox(self) -> socket.socket | None:
        """Send what the socket takes without waiting; the socket, if that was not all."""
        while True:
            if not self._send():
                return self._link
            try:
                item = self._outbox.get_nowait()
            except queue.Empty:
                return None
            if item is None:
                self._is_over = True
                return None
            if isinstance(item, _Link):
                self._link = item.socket
                with self._lock:
                    again = self._unfinished.again()
                self._rest = b"".join(map(messages.emit, (self._setup, *again)))
                continue
            if not isinstance(item, ToWriter):
                self._last = item
                item = Close()
            with self._lock:
                self._unfinished.told(item, reachable=self._link is not None)
                if isinstance(item, Job | Close):
                    self._wanted.set()
            if self._link is not None:
                self._rest = messages.emit(item)

    def _send(self) -> bool:
        """Send the rest of what was begun; false when the socket is full."""
        while self._rest:
            assert self._link is not None
            try:
                count = self._link.send(self._rest, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:  # it has died: the next one is told again
                self._link, self._rest = None, b""
                return True
            self._rest = self._rest[count:]
        return True

    def _see_it_off(self, idle_since: float | None) -> float | None:
        """Since when it has had nothing left to do but to go; ends one that does not."""
        with self._lock:
            is_idle = not self._unfinished.jobs
        now = time.monotonic()
        if not is_idle or idle_since is None:
            return now if is_idle else None
        if now - idle_since > LEAVE_S and self._process is not None:
            self._process.kill()
        return idle_since

    # --- sockets, which a forked child must not keep --------------------------------------------

    def _socketpair(self) -> tuple[socket.socket, socket.socket]:
        with _forking:
            pair = socket.socketpair()
            self._sockets.update(pair)
        return pair

    def _close(self, each: socket.socket) -> None:
        with _forking:
            self._sockets.discard(each)
            each.close()

    def _close_sockets(self) -> None:
        for each in list(self._sockets):
            self._close(each)

    def _forget(self) -> None:
        """In a forked child: nothing of this is ours."""
        for each in self._sockets:
            each.close()
        if self._process is not None:
            self._process.returncode = 0  # not our child: nothing to wait for
        self._outbox = queue.SimpleQueue()


def _wait_until_writable(link: socket.socket) -> None:
    """For a while; also true of one whose other end is dead."""
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        poll = select.poll()
        poll.register(link, select.POLLOUT)
        poll.poll(1000 * _POLL_S)


_CURE = (
    "standard error may tell more; with writer='thread' the saves go on without a process of "
    "their own"
)


def _given_up(death: _Death) -> StoreFailed:
    return StoreFailed(f"the writer does not work: {death.how}; {_CURE}")


# --- a fork of the trainer -------------------------------------------------------------------

_live: weakref.WeakSet[Companion] = weakref.WeakSet()
_forking = threading.RLock()
"""No fork between the making of sockets and the note that they are there."""


def _after_fork_in_child() -> None:
    global _forking
    _forking = threading.RLock()
    for companion in list(_live):
        companion._forget()
    _live.clear()


os.register_at_fork(
    before=lambda: _forking.acquire() and None,
    after_in_parent=lambda: _forking.release(),
    after_in_child=_after_fork_in_child,
)

"""The writer in a process of its own: `python -m ckpt.writer_process <socket> <wake socket>`.

It is there for what its trainer does not live to see. Over the socket come the messages of
`ckpt/messages.py`; what comes over the other one are numbers of signals, written by the handler of
the trainer in C, when no Python can run there. When the socket ends without a `Close`, the trainer
has died: what is queued is finished, the newest snapshot is flushed, for as long as the setup says.

Signals sent to it do not end it: SIGTERM is a `Flush`, and it goes when its trainer goes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Protocol, final

from ckpt import messages
from ckpt.errors import Damaged
from ckpt.lines import Lines
from ckpt.messages import Close, Flush, Ready, Report, Said, Setup, Tell, ToWriter

OTHER_RELEASE = 76
"""Exit status: not even the first message could be understood."""
NO_MESSAGE = 65
"""Exit status: what came was none."""
GRACE_OVER = 75
"""Exit status: the trainer died, and not everything could be finished."""

_NICENESS = 10
_READ_BYTES = 1 << 18
_OVER = b"\0"
"""Among the numbers of signals: the writer has closed."""


class Writes(Protocol):
    """A writer, as this process uses it."""

    def tell(self, message: ToWriter, /) -> None: ...
    def close(self) -> None: ...


Make = Callable[[Setup, Tell], Writes]


@final
class Service:
    """Between the sockets and the writer, from the setup to the end."""

    def __init__(self, link: socket.socket, wake: socket.socket, make: Make) -> None:
        self._link, self._wake, self._make = link, wake, make
        self._own, self._own_end = socket.socketpair()
        for end in (self._own, self._own_end):
            end.setblocking(False)
        wake.setblocking(False)
        self._writer: Writes | None = None
        self._grace_s = 0.0
        self._end: float | None = None
        """When to go, whatever is not finished; the trainer is dead."""
        self._closing = False
        # A queue of its own: a trainer that does not read must not hold up what is written.
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="ckpt-reports", daemon=True)

    def run(self) -> int:
        """Serve until the end; the exit status."""
        self._heed_signals()
        self._sender.start()
        lines = Lines()
        with selectors.DefaultSelector() as selector:
            for each in (self._link, self._wake, self._own_end):
                selector.register(each, selectors.EVENT_READ)
            while True:
                left_s = None if self._end is None else max(0.0, self._end - time.monotonic())
                ready = {key.fileobj for key, _ in selector.select(left_s)}
                if self._own_end in ready:
                    numbers = _received(self._own_end)
                    if _OVER in numbers:
                        return 0
                    self._heed(numbers)
                if self._link in ready:
                    data = _received(self._link)
                    if not data:
                        selector.unregister(self._link)
                        if self._writer is None:
                            return 0
                        self._be_orphaned()
                    try:
                        for line in lines.feed(data):
                            self._handle(messages.parse(line))
                    except Damaged as error:
                        _print(f"{error}")
                        return OTHER_RELEASE if self._writer is None else NO_MESSAGE
                if self._wake in ready:
                    numbers = _received(self._wake)
                    if not numbers:
                        selector.unregister(self._wake)
                    self._heed(numbers)
                if self._end is not None and time.monotonic() >= self._end:
                    _print("its trainer has died, and not all could be written in time")
                    return GRACE_OVER

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, Setup) and self._writer is None:
            self._grace_s = message.grace_s
            self._writer = self._make(message, self._reports.put)
            self._reports.put(Ready(os.getpid()))
        elif isinstance(message, ToWriter) and self._writer is not None:
            if isinstance(message, Close):
                self._close()
            else:
                self._writer.tell(message)
        else:
            raise Damaged(f"wanted a setup and then other messages, found {message}")

    def _heed_signals(self) -> None:
        signal.signal(signal.SIGTERM, _noted)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._own.fileno(), warn_on_full_buffer=False)
        # The trainer had them held back until there was somebody to heed them.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    def _heed(self, numbers: bytes) -> None:
        # When it closes, what is there is on its way.
        if signal.SIGTERM in numbers and self._writer is not None and not self._closing:
            self._writer.tell(Flush())

    def _be_orphaned(self) -> None:
        assert self._writer is not None
        self._end = time.monotonic() + self._grace_s
        if not self._closing:
            self._writer.tell(Flush())
            self._close()

    def _close(self) -> None:
        if not self._closing:
            self._closing = True
            # In a thread: the death of the trainer must still be noticed.
            threading.Thread(target=self._finish, name="ckpt-closing", daemon=True).start()

    def _finish(self) -> None:
        assert self._writer is not None
        try:
            self._writer.close()
        except BaseException:
            _print(traceback.format_exc())
        self._reports.put(None)
        self._sender.join()
        self._own.send(_OVER)

    def say(self, level: int, text: str) -> None:
        """A line for the log of the trainer; for whoever reads standard error when it is dead."""
        if self._end is None:
            self._reports.put(Said(level, text))
        else:
            _print(text)

    def _send_all(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                self._link.sendall(messages.emit(report))
            except OSError:  # the trainer is dead, which is noticed where its messages are read
                continue
            except Exception as error:  # a report that has no form as JSON: this is a fault of ours
                _print(f"{report} could not be reported: {error}")


@final
class _ToTrainer(logging.Handler):
    def __init__(self, say: Callable[[int, str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(record.levelno, self.format(record))
        except Exception:
            _print(f"a line for the log is lost: {record.msg!r}")


def _noted(number: int, frame: FrameType | None) -> None:
    """Python writes the number to the wakeup socket before this is called."""
    del number, frame


def _received(end: socket.socket) -> bytes:
    """What is there; empty when it has ended."""
    try:
        return end.recv(_READ_BYTES)
    except BlockingIOError:  # somebody else has read it: the trainer has the wake socket, too
        return b"?"
    except OSError:
        return b""


def _print(text: str) -> None:
    with contextlib.suppress(Exception):  # standard error is that of the trainer, and may be gone
        os.write(2, f"ckpt: writer, pid {os.getpid()}: {text.rstrip()}\n".encode(errors="replace"))


def _be_alone() -> None:
    """As a process that takes nothing away from its trainer, and does not go with its terminal."""
    os.nice(_NICENESS)
    os.chdir("/")
    with contextlib.suppress(OSError):  # it is the leader of a session already
        os.setsid()
    for standard in (0, 1, 2):
        try:
            os.fstat(standard)
        except OSError:  # closed in the trainer: no file of ours may take its place
            os.dup2(os.open(os.devnull, os.O_RDWR), standard)


def serve(arguments: list[str], make: Make) -> int:
    """Serve the sockets whose numbers the arguments are; the exit status."""
    _be_alone()
    link, wake = (socket.socket(fileno=int(number)) for number in arguments)
    service = Service(link, wake, make)
    log = logging.getLogger("ckpt")
    log.setLevel(logging.INFO)
    log.addHandler(_ToTrainer(service.say))
    try:
        return service.run()
    except BaseException:
        _print(traceback.format_exc())
        return 1


def _make(setup: Setup, tell: Tell) -> Writes:
    from ckpt.flush import choose
    from ckpt.writer import Writer

    return Writer(setup, tell, flush_choice=choose)


if __name__ == "__main__":
    # Whatever its threads are stuck in: nothing is left to be done when this returns.
    os._exit(serve(sys.argv[1:], _make))

"""SIGTERM of the trainer, brought to the writer at once, whatever the trainer is in the middle of.

Python runs handlers between two steps of its main thread, which may be minutes away: compiling, or
in a C call that keeps the lock of the interpreter. What Python does at once, in C, is to write the
number of the signal to the *wakeup descriptor*: that is the socket of a writer here.

The handler that Python runs later calls the one that was there before: a Python function, or a C
function like that of JAX's preemption notifier, which Python does not know of. Where there was
none, the trainer dies of SIGTERM as it would have; where it was ignored, it is.

There is one wakeup descriptor in a process. One that is there already (that of asyncio) stays,
since it gets the numbers of all signals; the writer is then told by the Python handler, as are the
writers of all managers but the newest.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, final

_log = logging.getLogger("ckpt")

_SIGTERM = signal.SIGTERM
_SA_SIGINFO = 4


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux: that of glibc and of musl on 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_sigaction = ctypes.CDLL(None, use_errno=True).sigaction
_sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def _installed_action() -> _Action:
    found = _Action()
    if _sigaction(_SIGTERM, None, ctypes.byref(found)) != 0:
        raise OSError(ctypes.get_errno(), "sigaction: cannot tell who handles SIGTERM")
    return found


@final
class Installed:
    """That a writer is told of SIGTERM, until `put_back`."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._home = os.getpid()

    @property
    def is_active(self) -> bool:
        """Not where signals cannot be handled, nor after `put_back`, nor in a forked child."""
        return self._fd is not None and self._home == os.getpid()

    def put_back(self) -> None:
        """Undo it. Idempotent; in any order and thread.

        A handler that somebody installed over this one stays. In other threads than the main one
        ours stays until the next signal, which it passes on, or the next call in the main thread.
        """
        if not self.is_active:
            return
        fd, self._fd = self._fd, None
        assert fd is not None
        with _lock:
            _told.remove(fd)
            _gone.append(fd)
            if is_main_thread():
                _settle()


def install(wake_fd: int) -> Installed:
    """From now on SIGTERM is written to a socket, as a byte of its number.

    The socket must not block, and may be closed at any time: a copy of it is used. Only in the main
    thread, where alone Python handles signals; elsewhere nothing is done, which the log says.
    """
    if not is_main_thread():
        _log.warning(
            "the writer will not be told of SIGTERM: this manager was not made in the main thread; "
            "it still flushes the newest snapshot when this program has died"
        )
        return Installed(None)
    fd = os.dup(wake_fd)
    with _lock:
        alone = not _told
        _told.append(fd)
        # Under a handler of Python's that was installed over ours, ours is still called by it; a
        # second one on top would leave SIG_DFL to that one, and that one to the second.
        is_ours = any(each.is_on_top() for each in _takeovers)
        chains = not alone and _takeovers and callable(signal.getsignal(_SIGTERM))
        if not (is_ours or chains):
            _takeovers.append(Takeover(_tell_writers, _settle, may_end=True))
        _settle()
    return Installed(fd)


@final
class Takeover:
    """Our handler of SIGTERM over the one that was there, in Python or in C; in the main thread.

    Args:
        act: what to do with a signal, of which the number is told; False: nobody wants it any more.
        make_way: called by the handler when it is not wanted and no handler is over it. Is to
            `restore`.
        may_end: where nobody handled the signal before, the program ends after `act` as it would
            have.
    """

    def __init__(
        self, act: Callable[[int], bool], make_way: Callable[[], None], *, may_end: bool
    ) -> None:
        self._act, self._make_way, self._may_end = act, make_way, may_end
        self._action = _installed_action()
        self._previous: Any = signal.getsignal(_SIGTERM)
        self._handler = self._handle  # one object, by which it is found again
        signal.signal(_SIGTERM, self._handler)
        self._python = _installed_action().handler
        before = self._action.handler or 0
        if before in (signal.SIG_DFL, signal.SIG_IGN):
            self._previous = signal.Handlers(before)
        self._foreign = before not in (signal.SIG_DFL, signal.SIG_IGN, self._python)

    def is_on_top(self) -> bool:
        """Is it this one that the signal comes to first?"""
        mine = signal.getsignal(_SIGTERM) is self._handler
        return mine and _installed_action().handler == self._python

    def restore(self) -> None:
        """Put back the one before; in the main thread, while this one is on top."""
        signal.signal(_SIGTERM, self._previous or signal.SIG_DFL)
        if self._foreign:
            _sigaction(_SIGTERM, ctypes.byref(self._action), None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._act(number) and self.is_on_top():
            # Those that were installed above are gone, and whoever is below is to find itself on
            # top: it may want to end the program.
            self._make_way()
            signal.raise_signal(number)
        elif self._foreign:
            self._call(number)
        elif callable(self._previous):
            self._previous(number, frame)
        elif (
            self._may_end
            and self._previous == signal.SIG_DFL
            and signal.getsignal(_SIGTERM) is self._handler
        ):
            # Called by another handler, that one decides whether the program goes on.
            signal.signal(_SIGTERM, signal.SIG_DFL)
            signal.raise_signal(_SIGTERM)
            signal.signal(_SIGTERM, self._handler)  # the first process of a container lives on

    def _call(self, number: int) -> None:
        address = self._action.handler or 0
        if self._action.flags & _SA_SIGINFO:
            with_details = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
            details, context = (ctypes.create_string_buffer(4096) for _ in range(2))
            with_details(address)(number, ctypes.addressof(details), ctypes.addressof(context))
        else:
            ctypes.CFUNCTYPE(None, ctypes.c_int)(address)(number)


_lock = threading.RLock()
# Lists that are only added to and removed from: the garbage collector may put back in passing.
_told: list[int] = []
"""Copies of the sockets of the writers that are told; the newest is the wakeup descriptor."""
_gone: list[int] = []
"""Those that are told no more, and closed once they surely are not the wakeup descriptor."""
_takeovers: list[Takeover] = []


def is_main_thread() -> bool:
    """Where alone Python sets and runs handlers."""
    return threading.current_thread() is threading.main_thread()


def _tell_writers(number: int) -> bool:
    for fd in list(_told):
        with contextlib.suppress(OSError):  # full, or nobody is there to read it
            os.write(fd, bytes([number]))
    return bool(_told)


def _settle() -> None:
    """Wakeup descriptor and handler for those who are told now; in the main thread."""
    ours = {-1, *_told, *_gone}
    found = signal.set_wakeup_fd(_told[-1] if _told else -1, warn_on_full_buffer=False)
    if found not in ours:
        signal.set_wakeup_fd(found)
    while not _told and (on_top := [each for each in _takeovers if each.is_on_top()]):
        on_top[0].restore()
        _takeovers.remove(on_top[0])
    while _gone:
        os.close(_gone.pop())


def _after_fork_in_child() -> None:
    """A child handles SIGTERM as if there had been no manager."""
    global _lock
    _lock = threading.RLock()
    _gone.extend(_told)
    _told.clear()
    _settle()


os.register_at_fork(after_in_child=_after_fork_in_child)

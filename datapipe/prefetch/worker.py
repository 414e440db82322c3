"""What runs in a worker process: it takes tasks from a socket and says where their batches lie.

A worker has no state that matters: it may be killed at any time, and is when it is not wanted any
more. It ends with the process that started it. It knows nothing of JAX unless a function does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import select
import signal
import socket
import threading
from array import array
from typing import Any, Final, NamedTuple

import numpy as np

from datapipe.batches.batch import Made
from datapipe.batches.substitutes import Replaced
from datapipe.batches.window import Window
from datapipe.order.plan import Plan
from datapipe.prefetch.exceptions import packed
from datapipe.prefetch.ring import Parcel, anonymous, enclosed, opened
from formats.errors import Mismatch

MESSAGE_BYTES: Final = 1 << 16
CONTROL_BYTES: Final = mmap.PAGESIZE  # the first 8 hold the generation that is wanted

IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What people and schedulers send to whole groups of processes. The trainer decides what becomes of
its workers."""


class Hello(NamedTuple):
    """The first message; its descriptors are the control page and a parcel: recipe and rows."""

    work_bytes: int


class Order(NamedTuple):
    """What decides beside the recipe what batches hold."""

    plan: Plan
    replaced: Replaced


class NewOrder(NamedTuple):
    """The order of the tasks that follow; its descriptor holds it pickled."""

    order_bytes: int


class NewRing(NamedTuple):
    """Slots for the tasks that follow, in place of those before; with a descriptor."""

    slots: int
    slot_bytes: int


class Task(NamedTuple):
    """Batches first..stop-1 of a window, of which batch `first` begins at `next_example`."""

    number: int
    generation: int
    next_example: int
    first: int
    stop: int
    slots: tuple[int, ...]  # one for each batch, or none at all


class Result(NamedTuple):
    """A batch lies in its slot or, where `size_bytes` is too much for it, in the descriptor."""

    number: int
    batch: int
    size_bytes: int
    is_error: bool
    is_enclosed: bool


class Dropped(NamedTuple):
    """The rest of a task is not made: it is of a generation that nobody wants any more."""

    number: int


def send(link: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Sends one message, which is small, with descriptors."""
    socket.send_fds(link, [pickle.dumps(message)], fds)


def receive(link: socket.socket, flags: int = 0) -> tuple[Any, list[int]]:
    """One message and its descriptors, which belong to the caller. EOFError: the end."""
    room = socket.CMSG_SPACE(2 * array("i").itemsize)
    data, rights, _, _ = link.recvmsg(MESSAGE_BYTES, room, flags | socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise EOFError
    fds = array("i")
    for _, _, sent in rights:
        fds.frombytes(sent)
    return pickle.loads(data), fds.tolist()


def laid_down(pickled: bytes) -> int:
    """Bytes in memory without a name."""
    fd = anonymous(max(1, len(pickled)))
    with mmap.mmap(fd, max(1, len(pickled))) as memory:
        memory[: len(pickled)] = pickled
    return fd


def main(fd: int, parent: int) -> None:
    """Serves the other end of this socket until it is closed."""
    for each in IGNORED:
        signal.signal(each, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # blocked since before this program began
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    link = socket.socket(fileno=fd)
    with contextlib.suppress(EOFError, ConnectionError):
        _Worker(link).serve()


def _leave_with(parent: int) -> None:
    """Ends this process when its parent has ended, whatever it is doing."""
    try:
        pidfd = os.pidfd_open(parent)
    except OSError:
        pidfd = -1
    ended = select.poll()
    if pidfd >= 0:
        ended.register(pidfd, select.POLLIN)
    while os.getppid() == parent and not ended.poll(None if pidfd >= 0 else 1000):
        pass
    os._exit(1)


class _Worker:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._slots: memoryview | None = None
        self._slot_bytes = 0

    def serve(self) -> None:
        message, (control, work) = receive(self._link)
        self._control = memoryview(mmap.mmap(control, CONTROL_BYTES)).cast("q")
        os.close(control)
        self._trouble: BaseException | None = None
        try:
            # Large arrays in it are there once for all workers, until one writes to them.
            private = mmap.mmap(work, message.work_bytes, flags=mmap.MAP_PRIVATE)
            self._recipe, self._rows = opened(np.frombuffer(private, np.uint8))
        except BaseException as error:
            error.add_note(
                "A worker process could not load the pipeline. Functions and classes must be in "
                "modules that can be imported there, or in the program itself"
            )
            self._trouble = error
        while True:
            message, fds = receive(self._link)
            if isinstance(message, NewOrder):
                self._order: Order = pickle.loads(_read(fds[0], message.order_bytes))
            elif isinstance(message, NewRing):
                size = message.slots * message.slot_bytes
                self._slots = memoryview(mmap.mmap(fds[0], size))
                self._slot_bytes = message.slot_bytes
                os.close(fds[0])
            else:
                self._make(message)

    def _make(self, task: Task) -> None:
        window: Window | None = None
        for index in range(task.first, task.stop):
            if self._control[0] != task.generation:
                send(self._link, Dropped(task.number))
                return
            try:
                if self._trouble is not None:
                    raise self._trouble
                if window is None:
                    window = self._window(task)
                parcel = _parcel(window.batch(index - task.first))
                is_error = False
            except BaseException as error:
                parcel = Parcel.of(packed(error, f"worker process {os.getpid()}"))
                is_error = True
            self._deliver(task, index, parcel, is_error)

    def _window(self, task: Task) -> Window:
        plan, replaced = self._order
        count = task.stop - task.first
        return Window(self._recipe, plan, task.next_example, count, self._rows, replaced)

    def _deliver(self, task: Task, index: int, parcel: Parcel, is_error: bool) -> None:
        size = parcel.size_bytes
        result = Result(task.number, index, size, is_error, is_enclosed=False)
        if task.slots and size <= self._slot_bytes:
            assert self._slots is not None
            start = task.slots[index - task.first] * self._slot_bytes
            parcel.write(self._slots[start : start + self._slot_bytes])
            send(self._link, result)
            return
        fd = enclosed(parcel)
        send(self._link, result._replace(is_enclosed=True), (fd,))
        os.close(fd)


def _parcel(made: Made) -> Parcel:
    """A batch to be sent. Raises Mismatch: it holds what cannot be."""
    try:
        return Parcel.of(made)
    except Exception as error:
        raise Mismatch(
            f"the functions of the pipeline made a batch that cannot be sent from a worker process "
            f"({type(error).__name__}: {error}): return arrays, texts and bytes, or take threads= "
            "in place of workers="
        ) from error


def _read(fd: int, size_bytes: int) -> bytes:
    with mmap.mmap(fd, size_bytes) as memory:
        os.close(fd)
        return memory[:]

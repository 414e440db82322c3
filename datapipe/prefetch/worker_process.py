"""A worker process as its trainer sees it: how it is started, sent things, and found dead."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from datapipe.batches.batch import Recipe
from datapipe.prefetch import worker as child
from datapipe.prefetch.ring import Parcel, Ring, enclosed
from formats.errors import Misuse

_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[3:]; from datapipe.prefetch.worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)
_QUIET_S: Final = 5.0  # for a process to end that has closed its socket


class Work(NamedTuple):
    """A parcel in memory: the recipe, and which rows of each batch to make."""

    fd: int
    size_bytes: int


def pickled_work(recipe: Recipe, rows: NDArray[np.int64] | None) -> Work:
    """What workers must know, in memory that all of them read.

    Raises:
      Misuse: a source or a function cannot be pickled; names it.
    """
    try:
        work = Parcel.of((recipe, rows))
    except Exception as error:
        raise _named(recipe, error) from error
    return Work(enclosed(work), work.size_bytes)


def _named(recipe: Recipe, error: Exception) -> Misuse:
    parts: list[tuple[str, Any]] = [
        (f"source {number} ({type(source).__name__})", source)
        for number, source in enumerate(recipe.sources)
    ]
    parts += [(f"the function of .{each.label}", each.fn) for each in recipe.transforms]
    name = "the pipeline"
    for at_fault, part in parts:
        try:
            cloudpickle.dumps(part)
        except Exception as found:
            name, error = at_fault, found
            break
    return Misuse(
        f"{name} cannot be sent to worker processes: {type(error).__name__}: {error}. Let it make "
        "what cannot be sent at its first call instead of holding it, or take threads= in place "
        "of workers="
    )


class WorkerProcess:
    """A worker process, its socket, and what it is at work on."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.process = process
        self.link = link
        self.jobs: dict[int, Any] = {}  # by number, in the order given out
        self.order: child.Order | None = None
        self.ring = -1  # number of the ring it has
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:  # the socket tells, too, unless the worker has children of its own
            self._pidfd = -1

    @property
    def fds(self) -> list[int]:
        """What becomes readable when there is news."""
        return [self.link.fileno(), *([self._pidfd] if self._pidfd >= 0 else [])]

    def heard_of(self, ready: set[int]) -> bool:
        """Whether there is news, by the descriptors that are readable."""
        return not ready.isdisjoint(self.fds)

    def has_ended(self) -> bool:
        """Whether the process is dead."""
        return self.process.poll() is not None

    def send_order(self, order: child.Order) -> None:
        """What the tasks that follow are of."""
        pickled = pickle.dumps(order)
        fd = child.laid_down(pickled)
        try:
            child.send(self.link, child.NewOrder(len(pickled)), (fd,))
        finally:
            os.close(fd)
        self.order = order

    def send_ring(self, ring: Ring) -> None:
        """The slots of the tasks that follow."""
        child.send(self.link, child.NewRing(ring.slots, ring.slot_bytes), (ring.fd,))
        self.ring = ring.number

    def collect(self) -> str:
        """Waits for a process that is dead or about to be; how it ended, in words."""
        self.link.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        try:
            code = self.process.wait(_QUIET_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code >= 0:
            return f"ended with exit status {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}" + (
            " (by hand, or for want of memory)" if -code == signal.SIGKILL else ""
        )


def start_worker(control: int, work: Work) -> WorkerProcess:
    """Starts a worker process.

    Raises:
      OSError: there is no Python, or no process to be had.
    """
    if not sys.executable:
        raise FileNotFoundError("sys.executable does not say where Python is")
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        arguments = [str(theirs.fileno()), str(os.getpid()), *_paths()]
        # The process inherits it, and ignores them once it has read as much Python as that takes.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, child.IGNORED)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A function that imports JAX must not take the accelerator away from the trainer.
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    except BaseException:
        link.close()
        raise
    finally:
        theirs.close()
    with contextlib.suppress(ConnectionError):  # it is dead already, and will be found so
        child.send(link, child.Hello(work.size_bytes), (control, work.fd))
    return WorkerProcess(process, link)


def _paths() -> list[str]:
    """Where a worker finds modules: where this program does."""
    found = [path for path in sys.path if isinstance(path, str)]
    package = str(Path(__file__).resolve().parent.parent)
    return found if package in found else [*found, package]

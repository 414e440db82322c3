"""Child processes of the suite: one function each, its answers line by line.

A child is started with the import path of this process and imports nothing of its `__main__`. What
it is to do comes pickled through a pipe from the process that started it, and its answers are
lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

_PROGRAM: Final = "from datapipe.conformance.children import serve; serve()"
ANSWER_S: Final = 100.0
_GRACE_S: Final = 3.0


class Tell(Protocol):
    """Sends one JSON value to the parent."""

    def __call__(self, value: Any) -> None: ...


class NoAnswerError(Exception):
    """A child ended, or took too long, without an answer."""


class Child:
    """A running `function(tell, *args)` in a process group of its own."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        task = pickle.dumps((function, args))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the child)
        self._read, write = os.pipe()
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(write)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[write],
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        except BaseException:
            os.close(self._read)
            self._stderr.close()
            raise
        finally:
            os.close(write)
        self._buffer = b""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(task)

    def answer(self, limit_s: float) -> Any:
        """The next value it tells.

        Raises:
          NoAnswerError: it ended, or told nothing for that long.
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise NoAnswerError(f"no answer after {limit_s:g} s")
            more = os.read(self._read, 1 << 16)
            if not more:
                raise NoAnswerError(f"the process ended: {self._last_words()}")
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.returncode}"

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Ends it and all that it started."""
        end_group(self.process)
        os.close(self._read)
        self._stderr.close()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a group, and all in it.

    The trackers of multiprocessing among them end by themselves when the others have: they know the
    blocks and semaphores that these have made, also those on their way from one process to another
    that none maps, and remove them. Killed with the others they would leave them behind.
    """
    leader = process.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGTERM)  # which the trackers ignore
    _wait_until(lambda: process.poll() is not None and not any(group(leader)))
    for pid in group(leader):
        if not _is_tracker(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _wait_until(lambda: process.poll() is not None and not any(group(leader)))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    process.wait()


def _wait_until(is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GRACE_S
    while not is_over() and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return b"multiprocessing.resource_tracker" in stream.read()
    except OSError:
        return False


def ask(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, a JSON value, in a new process.

    Raises:
      NoAnswerError: it failed or took too long.
    """
    with Child(_answer, function, args) as child:
        return child.answer(ANSWER_S)


def _answer(tell: Tell, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    tell(function(*args))


def serve() -> None:
    """What a child does: the program of `Child`."""
    function, args = pickle.load(sys.stdin.buffer)
    with os.fdopen(int(sys.argv[1]), "w") as answers:

        def tell(value: Any) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        function(tell, *args)


def group(leader: int) -> Iterator[int]:
    """The living processes of a group, by id."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat") as stream:
                    fields = stream.read().rpartition(")")[2].split()
                if int(fields[2]) == leader and fields[0] not in "ZX":
                    yield int(name)

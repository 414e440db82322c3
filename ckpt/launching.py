"""How the process of a writer is started, what is read from it, and how it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ckpt import messages
from ckpt.errors import Damaged
from ckpt.lines import Lines
from ckpt.messages import Message, Ready, Report, Setup
from ckpt.store import absolute_location
from ckpt.writer_process import GRACE_OVER, NO_MESSAGE, OTHER_RELEASE

MODULE = "ckpt.writer_process"
LEAVE_S = 10.0
"""A writer that has nothing left to do may take so long to go."""
HELD_BACK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that must not end a writer before it can heed them: who starts one holds them back."""
_READ_BYTES = 1 << 18


def start(module: str, link: socket.socket, wake: socket.socket) -> subprocess.Popen[bytes]:
    """Start a writer that has these ends of two sockets.

    Raises:
        OSError: there is no Python, or no process to be had.
    """
    if not sys.executable:
        raise FileNotFoundError("sys.executable does not say where Python is")
    try:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(link.fileno()), str(wake.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(link.fileno(), wake.fileno()),
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths())},
        )
    except OSError:
        raise
    except Exception as error:  # subprocess raises more than that
        raise OSError(str(error)) from error


def _paths() -> list[str]:
    """Where the writer finds modules: as this program does, but its own first, and those of Python
    before any that lie beside the user's script and have the same names."""
    standard = os.path.dirname(os.__file__)
    absolute = [path for path in sys.path if os.path.isabs(path)]
    of_python = [p for p in absolute if p in (standard, os.path.join(standard, "lib-dynload"))]
    others = [path for path in absolute if path not in of_python]
    package = str(Path(__file__).resolve().parent.parent)
    if package not in others:
        others.insert(0, package)
    return [*of_python, *others]


def reports_of(link: socket.socket) -> Iterator[Report]:
    """What the writer reports until it is dead. Raises Damaged."""
    lines = Lines()
    is_first = True
    while True:
        try:
            data = link.recv(_READ_BYTES)
        except OSError:
            return
        if not data:
            return
        for line in lines.feed(data):
            report: Message = messages.parse(line)
            if not isinstance(report, Report) or is_first != isinstance(report, Ready):
                raise Damaged(f"wanted a report, the first one Ready, found {report}")
            is_first = False
            yield report


def collect(process: subprocess.Popen[bytes]) -> str:
    """Wait for a process that has closed its socket; how it has ended."""
    try:
        code = process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " (by hand, or for want of memory)" if -code == signal.SIGKILL else ""
            return f"killed by {name}{hint}"
        return f"killed by signal {-code}"
    return f"exit status {code}{_REASONS.get(code, '')}"


_REASONS = {
    OTHER_RELEASE: ": it is of another release; was the package replaced while this program ran? "
    "start the program anew",
    NO_MESSAGE: ": it was sent what is no message",
    GRACE_OVER: ": it took this program for dead",
}


def absolute(setup: Setup) -> Setup:
    """The writer has a working directory of its own."""
    tiers = {
        name: replace(tier, location=absolute_location(tier.location))
        for name, tier in setup.tiers.items()
    }
    return replace(setup, tiers=tiers, arena=os.path.abspath(setup.arena))

"""Processes that each measure one thing, and print the answer as one line of JSON."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tools.bench.memory import Watch

_TIMEOUT_S = 1800.0


class WrongValuesError(Exception):
    """A side restored something else than what was saved: its times mean nothing."""


class WorkerFailedError(Exception):
    """A process did not do what it was asked for."""


def ask(command: Sequence[str], what: str, *, sampled: bool = False) -> tuple[dict[str, Any], int]:
    """The answer of a process, and its peak of memory in bytes if that is `sampled`, else 0.

    Raises WorkerFailedError, with the end of what it printed and with `what` it was to do.
    """
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    watch = Watch(child.pid)
    try:
        with watch if sampled else contextlib.nullcontext():
            output, trouble = child.communicate(timeout=_TIMEOUT_S)
    except BaseException:
        child.kill()
        child.wait()
        raise
    if child.returncode:
        raise WorkerFailedError(f"{what}: exit {child.returncode}\n{trouble[-4000:]}")
    return json.loads(output.splitlines()[-1]), watch.peak_bytes


def progress(text: str) -> None:
    """A line of what is being done, for a terminal."""
    print(text, file=sys.stderr, flush=True)

"""The trainer as a process: started, listened to, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_MESSAGE_LINES = 20


class TrainerFailed(Exception):
    """The trainer ended although nobody killed it; the message has the end of its output."""


def last_words(log: str) -> str:
    """What a log says in the end: the message of its last traceback, or else its last line."""
    lines = log.rstrip().splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith("Traceback (most recent")]
    if not begins:
        return lines[-1] if lines else "it said nothing"
    after = (at for at in range(begins[-1] + 1, len(lines)) if lines[at][:1].strip())
    message = lines[next(after, begins[-1]) :]
    shown = message[:_MESSAGE_LINES]
    return "\n".join(shown if len(message) == len(shown) else [*shown, "..."])


class Trainer:
    """A running `tools.demo.train`. Leaves no process behind when used with `with`."""

    def __init__(self, arguments: Sequence[str], *, cache: Path, log: Path) -> None:
        self._log = log
        self._killed = False
        # Every process runs the very same machine code: compiled once, then read from the cache.
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.demo.train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._process.communicate()

    def events(self) -> Iterator[Event]:
        """Every event up to the end of the process. Raises `TrainerFailed` if it ends by itself."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:  # cut off by the kill
                continue
            if isinstance(event, dict) and "event" in event:
                yield event
        status = self._process.wait()
        if status and not self._killed:
            words = last_words(self._log.read_text(errors="replace"))
            raise TrainerFailed(f"the trainer ended with status {status}: {words}")

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self._process.poll() is None:
            self._killed = True
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

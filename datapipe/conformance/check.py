"""A check: a named function of a loader that passes, fails with a reason, or is not offered."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from datapipe.conformance.loader import Loader
from datapipe.conformance.trial import FailedError, Trial

LIMIT_S: Final = 120.0

Status = Literal["passed", "failed", "not offered"]


@dataclass(frozen=True)
class Result:
    """What a check found. `detail`: what was wanted and what was found, or what is not offered."""

    check: str
    status: Status
    detail: str = ""
    is_stuck: bool = False  # the check was left running

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """One row of the matrix.

    name: in words.
    symptom: what is seen in the field where it fails.
    body: raises `FailedError`, or whatever the loader raises.
    needs: features without which it says nothing.
    """

    name: str
    symptom: str
    body: Callable[[Trial], None]
    needs: frozenset[str] = frozenset()

    def run(self, loader: Loader, *, seed: int = 0, limit_s: float = LIMIT_S) -> Result:
        """Runs it in a thread of this process, for at most `limit_s` seconds.

        One that does not end is left behind in that thread; `datapipe.conformance.run` ends it.
        """
        missing = sorted(self.needs - loader.offers)
        if missing:
            return Result(self.name, "not offered", ", ".join(missing))
        trial = Trial(loader, zlib.crc32(f"{self.name} {seed}".encode()))
        caught: list[BaseException] = []

        def body() -> None:
            try:
                self.body(trial)
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=body, name=self.name, daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            return Result(self.name, "failed", _stuck(thread, limit_s), is_stuck=True)
        if not caught:
            return Result(self.name, "passed")
        return Result(self.name, "failed", f"{_told(caught[0])} (seed {seed})")


def check(*needs: str) -> Callable[[Callable[[Trial], None]], Check]:
    """Makes a check of a function: its name and its docstring become those of the check."""

    def made(body: Callable[[Trial], None]) -> Check:
        symptom = " ".join((inspect.getdoc(body) or "").split())
        name = body.__name__.lstrip("_").replace("_", " ")
        return Check(name, symptom, body, frozenset(needs))

    return made


def _told(error: BaseException) -> str:
    if isinstance(error, FailedError):
        return str(error)
    told = " ".join(f"{type(error).__name__}: {error}".split())
    return told if len(told) <= 300 else f"{told[:297]}..."


def _stuck(thread: threading.Thread, limit_s: float) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    at = traceback.extract_stack(frame)[-1] if frame is not None else None
    where = f" in {at.name} ({at.filename}:{at.lineno})" if at is not None else ""
    return f"no end after {limit_s:g} s: it stands{where}"

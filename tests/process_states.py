"""Whether processes run, stand still or are gone."""

from __future__ import annotations

import contextlib
from pathlib import Path


def state_of(pid: int) -> str:
    """The letter of its state; empty without such a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def is_gone(pid: int) -> bool:
    """Dead; whoever takes over the children of dead trainers may take a while to collect it."""
    return state_of(pid) in ("", "Z")


def assert_gone(pid: int | None) -> None:
    assert pid is None or state_of(pid) == "", "not even a zombie"

"""Arenas of managers of this process that were dropped, and are about to be let go of."""

from __future__ import annotations

import atexit
import threading
from pathlib import Path

_leaving: list[tuple[Path, threading.Thread]] = []
"""Arenas, and the threads that will let go of them."""


def add(arena: Path, thread: threading.Thread) -> None:
    """The thread lets go of the arena at its end."""
    _leaving.append((arena, thread))


def wait_until_gone(arena: Path) -> None:
    """Wait for managers of this process that were dropped and are about to let go of an arena."""
    for directory, thread in list(_leaving):
        if directory == arena.absolute():
            thread.join()
    _leaving[:] = [each for each in _leaving if each[1].is_alive()]


@atexit.register
def _wait_for_all() -> None:
    """A trainer that ends must not lose the last save of a manager that was dropped before."""
    for _, thread in list(_leaving):
        thread.join()

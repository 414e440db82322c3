"""Where a manager has its arena, and those of managers that were dropped, which are about to go."""

from __future__ import annotations

import atexit
import logging
import threading
from pathlib import Path

from ckpt.owning import default_directory, remove_stale
from ckpt.processes import Processes

_log = logging.getLogger("ckpt")

_leaving: list[tuple[Path, threading.Thread]] = []
"""Arenas, and the threads that will let go of them."""


def place_of(given: Path | None, run: str, processes: Processes) -> Path:
    """The directory of the arena of this process: below the given one for each of several, or a
    private one, from whose neighbours those of dead runs are removed."""
    if given is not None:
        # Given alike to all, also to those on one host.
        return given if processes.count == 1 else given / f"p{processes.index}"
    place = default_directory(run, processes.index)
    for stale in remove_stale(place.parent, keep=place):
        _log.info("freed %d bytes of a dead run at %s", stale.size_bytes, stale.directory)
    return place


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

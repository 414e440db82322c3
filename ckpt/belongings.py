"""What a manager must let go of, also one that nobody closed and nobody holds any more.

The garbage collector may run in any thread, in the middle of anything, so nothing is waited for
there: the writer's thread finishes what is queued and then lets go.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from pathlib import Path
from typing import final

from ckpt.arena import Arena
from ckpt.pending import Background
from ckpt.processes import Processes
from ckpt.writer import Writer

_log = logging.getLogger("ckpt")
_leaving: list[tuple[Path, threading.Thread]] = []
"""Arenas of collected managers, and the threads that will let go of them."""


@final
class Belongings:
    """Arena and writer of a manager, without the manager."""

    def __init__(self, location: str, processes: Processes, background: Background) -> None:
        self._location, self._processes = location, processes
        self._background = background
        self._pid = os.getpid()
        self.arena: Arena | None = None
        self.writer: Writer | None = None

    def let_go(self) -> None:
        """Finish all saves and free the arena, without waiting for it."""
        if self.arena is None or os.getpid() != self._pid:
            return
        _log.warning("%s: a manager was dropped without close()", self._location)
        if self.writer is not None and self.writer.is_alive:
            _leaving.append((self.arena.directory, self.writer.leave(self._end)))
        else:
            self._end()

    def _end(self) -> None:
        assert self.arena is not None
        try:
            for error in self._background.untold():
                _log.error("%s: a save failed and nobody asked for it: %s", self._location, error)
            self._processes.leave("its manager was dropped")
        except Exception:
            _log.exception("%s: while a dropped manager let go", self._location)
        finally:
            self.arena.close(remove=True)


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

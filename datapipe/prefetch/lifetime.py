"""Who may use an iterator: one thread at a time, where it was made, until it is closed."""

from __future__ import annotations

import os
import threading
from typing import Final

from datapipe.prefetch.makers import Bell
from formats.errors import Misuse

MOVED: Final = (
    "the position was moved from within next(), by a signal handler or a function of the pipeline; "
    "call next() again to go on from where it is now"
)


class Lifetime:
    """Of an iterator, with its threads and worker processes.

    A forked child has a copy of it, but none of the threads, and workers only in common with its
    parent. So it may do nothing with that copy; it must not even wait for a lock, which a thread
    may have held that is not there.
    """

    def __init__(self) -> None:
        self.is_closed = False  # set at any time, by any thread
        self.bell = Bell()  # rung when it is closed, and whenever a batch was made
        self._pid = os.getpid()
        # Entered as it is: one that Python code enters for it would stay locked after an interrupt.
        self._lock = threading.RLock()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that it belongs to."""
        return self._pid == os.getpid()

    def turn(self) -> threading.RLock:  # type: ignore[valid-type]
        """A lock, for one thread at a time. What closes in a signal handler may come in between.

        Raises:
          Misuse: this is another process.
        """
        if self._pid != os.getpid():
            raise Misuse(
                f"this iterator was opened in process {self._pid} and is used in process "
                f"{os.getpid()}, a fork of it, which has none of its threads and workers: make "
                "another one here with pipe.iterator(), and set_state(get_state()) of this one"
            )
        return self._lock

    def refuse_closed(self) -> None:
        """Raises Misuse where it is closed."""
        if self.is_closed:
            raise Misuse("this iterator is closed; take a new one from the pipeline")

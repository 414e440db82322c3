"""Parts of files that were costly to decode, kept for the next read."""

from __future__ import annotations

import os
import threading
from typing import Any, final


@final
class Decoded:
    """Decoded parts of files, the most recently used ones within a budget in bytes.

    A part above the budget is not kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[int, Any] = {}
        self._bytes = 0
        self._pid = os.getpid()

    def get(self, part: int) -> Any | None:
        """The table of a part; None if it is not kept."""
        if self._pid != os.getpid():  # forked: another thread may have held the lock
            self._start()
        with self._lock:
            table = self._tables.pop(part, None)
            if table is not None:
                self._tables[part] = table
            return table

    def put(self, part: int, table: Any) -> None:
        """Keeps `table`, which has `nbytes`; the least recently used ones make room for it."""
        if table.nbytes > self._limit_bytes:
            return
        with self._lock:
            before = self._tables.pop(part, None)  # two threads may decode the same part
            if before is not None:
                self._bytes -= before.nbytes
            self._tables[part] = table
            self._bytes += table.nbytes
            while self._bytes > self._limit_bytes:
                self._bytes -= self._tables.pop(next(iter(self._tables))).nbytes

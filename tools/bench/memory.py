"""Proportional set size of a process and all its descendants."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

_INTERVAL_S = 0.02


def pss_bytes(pid: int) -> int:
    """PSS of a process and its descendants; 0 for those that are gone."""
    total = 0
    for each in family(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


def family(pid: int) -> list[int]:
    """A process and its descendants, as far as they are there."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                for child in (task / "children").read_text().split():
                    found += family(int(child))
    return found


class Watch:
    """Samples the memory of a process in a thread while it is entered; `peak_bytes` afterwards.

    Walking the page tables of a large process costs it time: do not measure both at once.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="bench-memory", daemon=True)
        self.peak_bytes = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, pss_bytes(self._pid))

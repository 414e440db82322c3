"""What tests of worker processes look at: who is there, and what is left when a test is over."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

import pytest
from waiting import eventually


def processes(parent=None):
    """The children of a process, by default of this one, that are workers; zombies included."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                fields = stat.rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
                is_ours = int(fields[1]) == (parent or os.getpid())
                if is_ours and (b"datapipe.prefetch.worker" in command or fields[0] == "Z"):
                    found.add(int(entry.name))
    return found


@pytest.fixture
def no_traces():
    before = processes(), set(os.listdir("/dev/shm"))
    yield
    gc.collect()
    eventually(lambda: not any(t.name == "datapipe-workers" for t in threading.enumerate()))
    assert processes() <= before[0]
    assert {name for name in os.listdir("/dev/shm") if "datapipe" in name} <= before[1]

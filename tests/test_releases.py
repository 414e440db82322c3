"""When is a slot free again?"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.arena import Arena
from ckpt.grid import PAGE_BYTES
from ckpt.messages import Released
from ckpt.saves import Saves

STATE = {"x": np.arange(3.0)}


def test_a_release_that_comes_late_frees_its_own_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is brought out from a second slot before it is heard that the first is free."""
    report, heard = Saves._report, threading.Event()
    late: list[Any] = []

    def hold_back(saves: Saves, message: Any) -> None:
        if isinstance(message, Released) and not late:
            late.append(message)
            heard.set()
        else:
            report(saves, message)

    monkeypatch.setattr(Saves, "_report", hold_back)
    tiers = (ckpt.Local(tmp_path / "local"), ckpt.Shared(tmp_path / "run", every=100))
    with ckpt.CheckpointManager(*tiers, arena=tmp_path / "arena", writer="thread") as m:
        m.resume()
        m.save(1, STATE).wait(timeout=60)  # type: ignore[union-attr]
        assert heard.wait(60)
        m.save(1, STATE, force=True).wait(timeout=60)  # type: ignore[union-attr]
        report(m._saves, late[0])
        m._saves.settle()
        status = m.status()
        assert status.slots_free == status.slots


def test_a_slot_that_somebody_still_reads_is_not_free(tmp_path: Path) -> None:
    """With `busy="skip"` a save must not wait for a writer that outlived its trainer."""
    with contextlib.closing(Held(tmp_path / "arena")) as held:
        assert held.arena.free == 2
        with held.reading():
            assert held.arena.free == 1
        assert held.arena.free == 2


class Held:
    """An arena of two slots, one with an image."""

    def __init__(self, place: Path) -> None:
        self.arena = Arena(place, owner={"run": "r"}, slots=2)
        slot = self.arena.claim(PAGE_BYTES)
        self.path = slot.path
        slot.filled()
        slot.release()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """As another process does, with a descriptor of its own."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    def close(self) -> None:
        self.arena.close(remove=True)

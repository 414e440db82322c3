"""When is a slot free again?"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
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

"""Measurements that are told to stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tools.bench.commands import own_place


def test_sigterm_ends_a_measurement_and_is_what_it_was_afterwards(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        _told_to_stop(tmp_path)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
    with own_place(tmp_path):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def _told_to_stop(directory: Path) -> None:
    with own_place(directory) as place:
        (place / "written").touch()
        os.kill(os.getpid(), signal.SIGTERM)

"""A close that is interrupted can be gone on with, and starts that were overtaken say so."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt import arena as arena_module
from ckpt import clearing, disk, owning
from ckpt.arena import Arena
from ckpt.writer import Writer


def once(real: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, but interrupted when it is called for the first time."""
    calls: list[int] = []

    def call(*args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*args, **named)

    return call


@pytest.fixture
def descriptors() -> Iterator[None]:
    """None is left open."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


STATE = {"x": np.arange(3.0)}
INTERRUPTED: dict[str, tuple[Any, str]] = {
    "waiting for the writer": (Writer, "close"),
    "removing the slots": (arena_module, "remove_files"),
    "closing the arena": (Arena, "close"),
}


@pytest.mark.parametrize("where", INTERRUPTED)
def test_close_again_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None, where: str
) -> None:
    manager = ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena")
    pending = manager.save(1, STATE)
    assert pending is not None
    owner, name = INTERRUPTED[where]
    monkeypatch.setattr(owner, name, once(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    with pytest.raises(ckpt.Misuse, match="closed"):
        manager.save(2, STATE)
    manager.close()
    assert pending.done()
    with ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena") as manager:
        assert manager.resume().step == 1
    assert not any(thread.name.startswith("ckpt") for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["_is_current", "_owner_text", "_patiently"])
def test_a_start_again_after_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: None, name: str
) -> None:
    monkeypatch.setattr(owning, name, once(getattr(owning, name)))
    manager = ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena")
    with pytest.raises(KeyboardInterrupt):
        manager.resume()
    manager.close()
    with ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena") as manager:
        manager.resume()


def test_a_start_that_is_overtaken_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start removes what this one is about to roll forward, under its hands."""
    root = tmp_path / "run"
    with ckpt.CheckpointManager(root, arena=tmp_path / "first") as manager:
        manager.save(1, STATE)
    real = clearing.roll_forward

    def overtaken(*args: Any) -> list[str]:
        monkeypatch.setattr(clearing, "roll_forward", real)
        with ckpt.CheckpointManager(root, arena=tmp_path / "second") as other:
            assert other.resume().step == 1
        raise ckpt.StoreFailed("its directory vanished while it was written")

    monkeypatch.setattr(clearing, "roll_forward", overtaken)
    with (
        ckpt.CheckpointManager(root, arena=tmp_path / "third") as manager,
        pytest.raises(ckpt.Superseded, match="attempt 2 no longer owns the run"),
    ):
        manager.resume()


def test_on_a_full_disk_what_may_go_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that a longer Keep had left would be in the way of every save of a shorter one."""
    root = tmp_path / "run"
    with ckpt.CheckpointManager(root, arena=tmp_path / "arena") as manager:
        for step in range(1, 5):
            manager.save(step, STATE)
    real = disk.write_bulk

    def full(path: Path, data: memoryview) -> None:
        if len(list((root / "branch-1").glob("[0-9]"))) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, data)

    monkeypatch.setattr(disk, "write_bulk", full)
    tier = ckpt.Shared(root, keep=ckpt.Keep(last=2))
    with ckpt.CheckpointManager(tier, arena=tmp_path / "arena") as manager:
        assert manager.resume().step == 4
        pending = manager.save(5, STATE)
        assert pending is not None
        with pytest.raises(ckpt.StoreFailed, match="keep fewer steps"):
            pending.wait()
        manager.save(6, STATE)
    assert ckpt.open(root).all_steps() == [4, 6]

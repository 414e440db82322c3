"""A run with tiers: its place, its states, its death, and stores that fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.store import FileStore


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).standard_normal(5000), "step": step}


def check(restored: ckpt.Restored, step: int, tier: str) -> None:
    assert (restored.step, restored.report.tier) == (step, tier)
    np.testing.assert_array_equal(restored.state["w"], state_of(step)["w"])


class Place:
    """Where a run and its tiers lie."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def manager(self, *tiers: Any, **options: Any) -> ckpt.CheckpointManager:
        given = tiers or (
            ckpt.Memory(every=1),
            ckpt.Local(self.root / "local", every=2),
            ckpt.Shared(self.root / "run", every=4),
        )
        return ckpt.CheckpointManager(*given, arena=self.root / "arena", **options)

    def shared(self) -> list[int]:
        return ckpt.open(self.root / "run").all_steps()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(params=["thread", "process"])
def writer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def die(manager: ckpt.CheckpointManager) -> None:
    """As after SIGKILL: the slots stay, and only the kernel drops the lock."""
    manager.wait_until_finished()
    manager._saves.settle()
    assert manager._saves.arena is not None
    if manager._saves._signals is not None:
        manager._saves._signals.put_back()
    manager._saves.arena.close(remove=False)
    assert manager._saves._backend is not None
    manager._saves._backend.close()
    manager._tenure.is_closed = manager._ended = True
    manager._collected.detach()


@contextlib.contextmanager
def store_fails(monkeypatch: pytest.MonkeyPatch, text: str = "the store is down") -> Iterator[None]:
    """Every write of an image to a shared tier fails."""
    write = FileStore.write_image

    def fail(self: FileStore, *arguments: Any) -> None:
        if self.location.endswith("run"):
            raise ckpt.StoreFailed(text)
        write(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "write_image", fail)
        yield

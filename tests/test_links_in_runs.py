"""A link to nowhere in place of one file of a run: damage of that file, and of no other."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ckpt

STEPS = (1, 2, 3)


def state_of(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(8.0) + step}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three attempts, of a step each."""
    place = tmp_path_factory.mktemp("links")
    for step in STEPS:
        with ckpt.CheckpointManager(place / "run", arena=place / "arena", writer="thread") as m:
            m.resume(like=state_of(0))
            m.save(step, state_of(step))
    return place / "run"


@pytest.mark.parametrize("target", ["itself", "nothing"])
def test_a_start_goes_on(run: Path, tmp_path: Path, target: str) -> None:
    files = sorted(path for path in run.rglob("*") if path.is_file())
    assert len(files) > 30
    for path in files:
        data = path.read_bytes()
        path.unlink()
        path.symlink_to(path if target == "itself" else tmp_path / "nothing")
        before = _entries(run)
        newest = ckpt.restore(run, like=state_of(0))
        is_of_newest = path.is_relative_to(run / "branch-1/3")
        assert newest.step in ((2, 3) if is_of_newest else (3,)), path
        for _ in range(2):  # nothing that a start does makes the next one fail
            with ckpt.CheckpointManager(run, arena=tmp_path / "a", writer="thread") as m:
                restored = m.resume(like=state_of(0))
                assert restored.step == newest.step, path
                np.testing.assert_array_equal(restored.state["w"], state_of(newest.step)["w"])
        for new in _entries(run) - before:
            new.unlink()
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _entries(run: Path) -> set[Path]:
    return {path for path in run.rglob("*") if os.path.islink(path) or path.is_file()}

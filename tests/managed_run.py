"""A run under one manager, in slots on disk; its states and its data."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from memory_source import Columns

import ckpt
from datapipe import Pipeline


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def manager(root: Path, **options) -> ckpt.CheckpointManager:
    """With slots on disk, where no other test looks."""
    tier = options.pop("tier", None) or ckpt.Shared(root, **options)
    return ckpt.CheckpointManager(tier, arena=root.with_name(f"{root.name}-arena"))


def state_of(step: int) -> dict:
    key = jax.random.fold_in(jax.random.key(7), step)
    return {"w": jax.random.normal(key, (64, 16)), "key": key, "step": step, "np": np.full(5, step)}


def assert_same(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, jax.Array) and jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def pipeline(batch_size: int = 4, seed: int = 3) -> Pipeline:
    return Pipeline(Columns(97), batch_size=batch_size, seed=seed)


def save_steps(m: ckpt.CheckpointManager, steps, data=None) -> None:
    for step in steps:
        if data is not None:
            next(data)
        m.save(step, state_of(step), data=data)
    m.wait_until_finished()

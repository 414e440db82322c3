"""What the tests of runs in buckets share: states, and how they are saved and compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

import ckpt


def state_of(step: int) -> dict[str, Any]:
    key = jax.random.fold_in(jax.random.key(3), step)
    return {"w": jax.random.normal(key, (32, 16)), "b": np.full(7, step), "step": step}


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_steps(m: ckpt.CheckpointManager, steps: Iterable[int], data: Any = None) -> None:
    for step in steps:
        if data is not None:
            next(data)
        m.save(step, state_of(step), data=data)
    m.wait_until_finished()

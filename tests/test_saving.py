"""What may be given to `save`, and what is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
from ckpt import layout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def manager(root: Path, **options) -> ckpt.CheckpointManager:
    """With slots on disk, where no other test looks."""
    slots = options.pop("slots", 2)
    tier = ckpt.Shared(root, **options)
    return ckpt.CheckpointManager(tier, arena=root.with_name(f"{root.name}-arena"), slots=slots)


def state_of(step: int) -> dict:
    key = jax.random.fold_in(jax.random.key(7), step)
    return {"w": jax.random.normal(key, (64, 16)), "key": key, "step": step, "np": np.full(5, step)}


# --- step numbers ------------------------------------------------------------------------------


def test_the_largest_step_number_can_be_named_and_the_next_is_refused(root: Path) -> None:
    assert layout.parse_step_name(str(layout.MAX_STEP)) == layout.MAX_STEP
    assert layout.parse_step_name(str(layout.MAX_STEP + 1)) is None
    with manager(root) as m:
        for step in (layout.MAX_STEP + 1, 10**19, 2**63, 10**10_000):
            for call in (
                lambda step=step: m.save(step, state_of(1)),
                lambda step=step: m.restore(step),
                lambda step=step: m.rewind(step),
                lambda step=step: m.delete(step),
                lambda step=step: ckpt.save(root, state_of(1), step=step),
            ):
                with pytest.raises(ckpt.Misuse, match=f"at most {layout.MAX_STEP}, .*18 digits"):
                    call()
        assert not root.exists()
        m.save(layout.MAX_STEP, state_of(1)).wait()
        assert m.all_steps() == [layout.MAX_STEP]
    with manager(root) as m:
        assert m.resume().step == layout.MAX_STEP
    with pytest.raises(ckpt.Misuse, match="at most"):
        ckpt.save(root, state_of(2))

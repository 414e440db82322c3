"""The loop helper with the real manager and real data: kills, rewinds, the end of all of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_in_memory import GUARD
from memory_source import Records

from ckpt.manager import CheckpointManager
from ckpt.retention import Keep
from ckpt.run import Run
from ckpt.spike import GuardState, SpikeGuard
from ckpt.tiers import Shared
from datapipe import Pipeline

STEPS = 60
BAD = range(22, 26)  # batches


def really_run(
    root: Path, *, crash_after: int | None = None, skips: Any = (), bad: Any = BAD
) -> Any:
    """60 updates with keys, donation and dropout-like noise; the state and the data at the end."""
    pipe = Pipeline(Records(2000), batch_size=4, seed=9).map(int_of, version="1")
    noise = set(pipe.plan.records(bad).tolist())
    data = pipe.iterator()
    data.skip(skips)
    start = {"key": jax.random.key(3), "sum": jnp.zeros(4), "poison": jnp.float32(0)}

    @jax.jit(donate_argnums=0)
    def step_fn(state: Any, batch: jax.Array, bad: jax.Array) -> tuple[Any, jax.Array]:
        key, use = jax.random.split(state["key"])
        total = state["sum"] * 0.9 + batch + jax.random.uniform(use, (4,))
        poison = state["poison"] * 0.9 + 9 * bad
        return {"key": key, "sum": total, "poison": poison}, 2 + 1e-4 * total.mean() + poison

    done = 0
    tier = Shared(root, every=5, keep=Keep(last=3))
    with CheckpointManager(tier) as manager:
        with Run(manager, start, data, steps=STEPS, guard=GUARD) as run:
            for _, batch in run:
                is_bad = bool(noise & set(batch.tolist()))
                state, loss = step_fn(run.state, batch.astype(np.float32), jnp.float32(is_bad))
                run.update(state, loss=loss, extra={"done": run.step + 1})
                done += 1
                if done == crash_after:
                    raise KeyboardInterrupt
        guard = GuardState.from_json(manager.restore(like=run.state).guard)
    end = {**run.state, "key": jax.random.key_data(run.state["key"])}
    return jax.tree.map(lambda x: np.asarray(x).tobytes(), end), data.get_state(), guard, run


def int_of(record: bytes) -> np.int64:
    return np.int64(record.rstrip(b"."))


@pytest.mark.parametrize("crashes", [(), (17, 3, 9), (26, 1, 1), (24, 2, 20, 4)])
def test_kills_and_rewinds_end_in_the_bits_of_the_undisturbed_run(
    tmp_path: Path, crashes: tuple[int, ...]
) -> None:
    for crash_after in crashes:
        with pytest.raises(KeyboardInterrupt):
            really_run(tmp_path / "run", crash_after=crash_after)
    state, position, guard, _ = really_run(tmp_path / "run")
    assert [spike.onset for spike in guard.history] == [23]
    # The skipped batches are those of steps 21 to 28, on the lineage where the spike was seen.
    assert position["skips"] == [80, 32]
    expected, where, _, run = really_run(tmp_path / "reference", skips=[(80, 112)])
    assert run.rewinds == []
    assert position == where
    assert state == expected


def test_one_bad_loss_early_does_not_end_the_run_of_the_readme(tmp_path: Path) -> None:
    data = Pipeline(Records(2000), batch_size=4, seed=9).map(int_of, version="1").iterator()
    tier = Shared(tmp_path / "run", every=100, keep=Keep(last=3))
    seen = []
    with (
        CheckpointManager(tier, arena=tmp_path / "arena") as manager,
        Run(manager, {"w": jnp.ones(2)}, data, guard=SpikeGuard(), steps=40) as run,
    ):
        for step, _ in run:
            seen.append(step)
            run.update(run.state, loss=math.nan if step == 21 and seen.count(21) == 1 else 1.0)
        assert [rewound.to for rewound in run.rewinds] == [0]
        assert manager._reader.listing().head.reason == run.rewinds[0].reason
    assert seen[-40:] == [*range(1, 41)]
    assert data.plan.skipped == [(0, 220 * 4)]

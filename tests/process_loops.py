"""Scenes of the loop helper in which the processes talk beside the training."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from process_scenes import preempted_in_one
from process_stage import Stage, data_sharding, pipeline, shardings, spread

import ckpt


def guarded_alone(stage: Stage) -> dict[str, Any]:
    """Each process has a loss of its own; only process 1 sees the spike."""
    poison = set(np.array(pipeline().plan.records(range(40, 43))).ravel().tolist())
    guard = ckpt.SpikeGuard(
        window=16, warm_up=8, cool_down=3, consecutive=2, margin=4, skip_before=2, skip_after=6
    )
    zeros = {"w": spread(np.zeros((16, 2), np.float32), shardings()["rows"])}
    add = jax.jit(lambda weights, ids: weights + ids.sum().astype(np.float32))
    with (
        stage.manager(every=5) as m,
        pipeline().iterator(sharding=data_sharding()) as data,
        ckpt.Run(m, zeros, data, steps=60, guard=guard, metric_is_local=True) as run,
    ):
        for _, batch in run:
            mine = [np.asarray(shard.data) for shard in batch["id"].addressable_shards]
            bad = stage.index == 1 and set(np.concatenate(mine).tolist()) <= poison
            own = 1 + 0.01 * float(np.concatenate(mine).sum() % 7)
            run.update({"w": add(run.state["w"], batch["id"])}, loss=math.nan if bad else own)
    stage.meet()
    steps = ckpt.open(stage.root).all_steps()
    return {
        "rewinds": [str(each) for each in run.rewinds],
        "saved": {step: ckpt.metadata(stage.root, step=step).metrics for step in steps},
        "weight": float(run.state["w"].addressable_data(0)[0, 0]),
    }


def preempted_without_jax(stage: Stage) -> dict[str, Any]:
    """As `preempted_in_one`, where JAX's preemption service is switched off."""
    from jax._src import distributed

    service = distributed.global_state.preemption_sync_manager
    distributed.global_state.preemption_sync_manager = None
    before = signal.getsignal(signal.SIGTERM)
    found = preempted_in_one(stage)
    distributed.global_state.preemption_sync_manager = service
    return {**found, "handler_is_back": signal.getsignal(signal.SIGTERM) == before}


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    scene.__name__: scene for scene in (guarded_alone, preempted_without_jax)
}

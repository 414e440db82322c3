"""Scenes of several processes whose data is Grain's, each with its own share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain
from grain_kinds import digest, elastic, loader, sliced
from process_stage import Stage

BEFORE, AFTER = 4, 5


def shares(index: int, count: int) -> dict[str, Callable[[], Any]]:
    """What one of several processes draws from."""
    shard = grain.sharding.ShardOptions(shard_index=index, shard_count=count)
    return {
        "sliced": lambda: sliced(index, count),
        "loader": lambda: loader(shard_options=shard),
        "elastic": lambda: elastic(8, index, count),
    }


def grain_shares(stage: Stage) -> dict[str, Any]:
    """Drawn from, saved, and drawn from again by new iterators."""
    makers = shares(stage.index, stage.count)
    found: dict[str, Any] = {name: [] for name in makers}
    for first, stop in ((1, BEFORE + 1), (BEFORE + 1, BEFORE + AFTER + 1)):
        data = {name: iter(make()) for name, make in makers.items()}
        with stage.manager() as m:
            restored = m.resume(data=data)
            assert restored.step == first - 1
            for step in range(first, stop):
                for name, each in data.items():
                    found[name].append(digest(next(each)))
                if step == BEFORE:
                    m.save(step, {"step": step}, data=data)
            m.wait_until_finished()
    return found


def grain_out_of_step(stage: Stage) -> dict[str, Any]:
    """An elastic iterator that stands elsewhere in one process has no common position."""
    data = iter(elastic(8, stage.index, stage.count))
    for _ in range(1 + stage.index):
        next(data)
    with stage.manager() as m:
        m.resume(data=data)
        for _ in range(1 + stage.index):
            next(data)
        m.save(1, {"step": 1}, data=data)
        m.wait_until_finished()
    return {}


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    scene.__name__: scene for scene in (grain_shares, grain_out_of_step)
}

"""Scenes in which one of several processes dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from process_stage import (
    Stage,
    data_sharding,
    differences,
    error_of,
    like,
    pipeline,
    state,
)

from ckpt import commit, start
from ckpt.store import FileStore
from ckpt.windows import Source, size_of, window_of


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def killed_before_its_part(stage: Stage) -> dict[str, Any]:
    """Process 1 dies while it writes its image of step 3."""
    good = FileStore.write_image

    def write(self: FileStore, key: str, data: Source) -> None:
        if stage.index == 1 and "/3.orbax" in key:
            path = stage.root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(window_of(data, 0, size_of(data) // 2))
            die()
        good(self, key, data)

    FileStore.write_image = write  # type: ignore[method-assign]
    with stage.manager(timeout_s=2.0) as m, pipeline().iterator(sharding=data_sharding()) as data:
        m.resume(like=like(), data=data)
        for step in (1, 2):
            next(data)
            m.save(step, state(step), data=data).wait()
        next(data)
        error = error_of(lambda: m.save(3, state(3), data=data).wait())
        return {"error": error, "steps": m.all_steps()}


def killed_while_restoring(stage: Stage) -> dict[str, Any]:
    """Process 1 dies while it reads the newest step."""
    with stage.manager(timeout_s=2.0) as m:
        m.resume()
        m.save(1, state(1)).wait()
        stage.meet()
        if stage.index == 1:
            start.load = lambda *args: die()
        error = error_of(lambda: m.resume(like=like()))
        return {"error": error, "steps": m.all_steps()}


def killed_at_random(stage: Stage) -> dict[str, Any]:
    """Goes on from what is there and saves every step until somebody is killed from outside."""
    told = stage.root.with_name(f"{stage.scene}.told-{stage.index}")
    with stage.manager(timeout_s=2.0) as m, pipeline().iterator(sharding=data_sharding()) as data:
        restored = m.resume(like=like(), data=data)
        found = {"restored": restored.step, "wrong": [], "error": None}
        if not restored.report.fresh:
            found["wrong"] = differences(restored.state, restored.step)
        found["position"] = data.get_state()["next_example"]
        (stage.root.parent / f"{stage.scene}.began-{stage.index}").write_text(json.dumps(found))
        for step in range(restored.step + 1, restored.step + 1000):
            next(data)
            pending = m.save(step, state(step), data=data)
            if error := error_of(pending.wait):
                return {**found, "error": error}
            told.write_text(str(step))
    return found


def killed_before_finishing(stage: Stage) -> dict[str, Any]:
    """Process 0 dies when both parts of step 3 are there, and none of the small files."""
    return _killed_in(stage, "finish")


def killed_before_publishing(stage: Stage) -> dict[str, Any]:
    """Process 0 dies when everything of step 3 is there but its name."""
    return _killed_in(stage, "publish")


def _killed_in(stage: Stage, function: str) -> dict[str, Any]:
    good = getattr(commit, function)
    saving = 0

    def patched(*args: Any, **options: Any) -> None:
        if saving == 3:
            die()
        good(*args, **options)

    setattr(commit, function, patched)
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        m.resume(like=like(), data=data)
        for saving in (1, 2, 3):
            next(data)
            m.save(saving, state(saving), data=data).wait()
        return {}


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    scene.__name__: scene
    for scene in (
        killed_before_its_part,
        killed_while_restoring,
        killed_at_random,
        killed_before_finishing,
        killed_before_publishing,
    )
}

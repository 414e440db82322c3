"""Scenes with all kinds of tiers, in which each of several processes has a writer process.

All of them give the same directory for the arena, as the same code on all hosts does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pauses.sitecustomize import PAUSE
from process_stage import Stage, data_sharding, differences, like, pipeline, rows_of, state

import ckpt
from ckpt.local import LocalImages
from ckpt.slots import Slots, step_of
from ckpt.status import Status

LIMIT_S = 60.0
LAST_SHARED, LAST_LOCAL, LAST_COMMON, LAST_OF_ZERO = 4, 6, 7, 9
"""Where `until_killed` stops: the newest step of each tier, of all memories, of process 0's."""


def tiered(root: Path, *, timeout_s: float = 60.0) -> ckpt.CheckpointManager:
    """The manager of a run with every kind of tier; all lie beside the run."""
    return ckpt.CheckpointManager(
        ckpt.Memory(every=1),
        ckpt.Local(root.with_name(f"{root.name}.local"), every=2),
        ckpt.Shared(root, every=LAST_SHARED),
        arena=root.with_name(f"{root.name}.arena"),
        timeout_s=timeout_s,
    )


def wait_until(what: Callable[[], Any], text: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end, text
        time.sleep(0.01)


def told_by(stage: Stage) -> Path:
    """Where a process of a scene says how far it is."""
    return stage.root.with_name(f"{stage.scene}.told-{stage.index}")


@contextlib.contextmanager
def begun(stage: Stage, **options: Any) -> Iterator[tuple[ckpt.CheckpointManager, Any]]:
    """A manager and an iterator that have resumed."""
    with (
        tiered(stage.root, **options) as m,
        pipeline().iterator(sharding=data_sharding()) as data,
    ):
        m.resume(like=like(), data=data)
        yield m, data


def levels(stage: Stage) -> dict[str, Any]:
    """What is acknowledged at a level is there, for both processes."""
    with begun(stage) as (m, data):
        assert m._saves.arena is not None
        arena = m._saves.arena.directory
        seen, there = [], []
        for step in range(1, 6):
            seen.append(rows_of(next(data)))
            pending = m.save(step, state(step), data=data, metrics={"loss": step})
            assert pending is not None
            for tier in pending.tiers:
                pending.wait(tier, timeout=LIMIT_S)
                there.append([step, tier, _holders(stage, m, tier, step)])
            stage.meet()  # nobody fills a slot again while the other one looks at it
        return {
            "there": there,
            "seen": seen,
            "arena": str(arena),
            "writer": _writer_of(m),
            "steps": m.all_steps(),
        }


def _writer_of(m: ckpt.CheckpointManager) -> int:
    """The pid of its writer, once it is ready."""
    wait_until(lambda: m.status().writer_pid, "the writer is not ready")
    pid = m.status().writer_pid
    assert pid is not None
    return pid


def _holders(stage: Stage, m: ckpt.CheckpointManager, tier: str, step: int) -> list[int]:
    """The processes whose image of a step a tier has."""
    if tier == "shared":
        return [0, 1] if step in ckpt.open(stage.root).all_steps() else []
    if tier == "local":
        place = m.tiers.local["local"].location
        tiers = [LocalImages(place, m.location, index) for index in range(stage.count)]
        return [k for k, each in enumerate(tiers) if step in [i.id.step for i in each.list()]]
    assert m._saves.arena is not None
    found = []
    for index in range(stage.count):
        slots = Slots(m._saves.arena.directory.with_name(f"p{index}"))
        if any(step_of(header).step == step for _, header in slots.valid()):
            found.append(index)
        slots.close()
    return found


def writer_killed(stage: Stage) -> dict[str, Any]:
    """The writer of process 1 dies in the middle of step 2, with more to do."""
    paused = stage.root.with_name(f"{stage.scene}.paused")
    if stage.index == 1:
        sys.path.insert(0, str(Path(__file__).parent / "pauses"))
        os.environ[PAUSE] = f"FileStore.write_image:2:{paused}"
    with begun(stage) as (m, data):
        first = _writer_of(m)
        os.environ.pop(PAUSE, None)  # its successor does not stop there
        pendings = []
        for step in (1, 2, 3):
            next(data)
            pendings.append(m.save(step, state(step), data=data, force=True))
        if stage.index == 1:
            wait_until(paused.exists, "the writer does not come to its second image")
            os.kill(first, signal.SIGKILL)
        for pending in pendings:
            assert pending is not None
            pending.wait(timeout=LIMIT_S)
        status: Status = m.status()
        return {
            "restarts": status.writer_restarts,
            "is_another": status.writer_pid != first,
            "newest": {name: tier.newest for name, tier in status.tiers.items()},
            "free": status.slots_free,
            "steps": ckpt.open(stage.root).all_steps(),
        }


# --- until somebody dies --------------------------------------------------------------------------


def until_killed(stage: Stage) -> dict[str, Any]:
    """Every tier ends at another step; the newest is in the memory of process 0 alone."""
    wait = _stuck if stage.scene == "terminated" else lambda: time.sleep(2 * LIMIT_S)
    os.setpgid(0, 0)
    with begun(stage) as (m, data):
        for step in range(1, LAST_COMMON + 1):
            next(data)
            pending = m.save(step, state(step), data=data)
            assert pending is not None
            pending.wait(timeout=LIMIT_S)
        if stage.index == 0:
            while (step := step + 1) <= LAST_OF_ZERO:
                next(data)
            m.save(LAST_OF_ZERO, state(LAST_OF_ZERO), data=data)
        _say(stage, {"writer": _writer_of(m), "trainer": os.getpid()})
        wait()
    return {}


def _say(stage: Stage, what: dict[str, Any]) -> None:
    """All of it or nothing."""
    new = told_by(stage).with_name(f"{told_by(stage).name}.new")
    new.write_text(json.dumps(what))
    new.replace(told_by(stage))


def _stuck() -> None:
    """In a call that keeps the lock of the interpreter and that no signal ends."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


def going_on(scene: str) -> Callable[[Stage], dict[str, Any]]:
    """A scene that goes on with the run of another one."""

    def play(stage: Stage) -> dict[str, Any]:
        other = Stage(scene, stage.root.parent, stage.index, stage.count)
        with (
            tiered(other.root) as m,
            pipeline().iterator(sharding=data_sharding()) as data,
        ):
            restored = m.resume(like=like(turned=True), data=data)
            found = {
                "restored": restored.step,
                "wrong": differences(restored.state, restored.step, turned=True),
                "tier": restored.report.tier,
                "lost": [str(lost) for lost in restored.report.lost],
                "position": data.get_state()["next_example"],
                "coming": [rows_of(next(data))],
            }
            step = restored.step + 1
            pending = m.save(step, state(step), data=data, force=True)
            assert pending is not None
            pending.wait(timeout=LIMIT_S)
            return {**found, "steps": m.all_steps()}

    return play


def at_random(stage: Stage) -> dict[str, Any]:
    """Goes on from what is there and saves every step, until it or a writer is killed."""
    with (
        tiered(stage.root, timeout_s=5.0) as m,
        pipeline(epochs=200).iterator(sharding=data_sharding()) as data,
    ):
        restored = m.resume(like=like(), data=data)
        wrong = [] if restored.report.fresh else differences(restored.state, restored.step)
        position = data.get_state()["next_example"]
        found = {"restored": restored.step, "wrong": wrong, "position": position}
        _say(stage, {**found, "acked": restored.step, "writer": _writer_of(m)})
        for step in range(restored.step + 1, restored.step + 100):
            next(data)
            pending = m.save(step, state(step), data=data)
            assert pending is not None
            pending.wait("memory", timeout=LIMIT_S)
            _say(stage, {**found, "acked": step, "writer": m.status().writer_pid})
            time.sleep(0.01)
    return found


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    "levels": levels,
    "writer_killed": writer_killed,
    "orphaned": until_killed,
    "all_dead": until_killed,
    "terminated": until_killed,
    **{f"after_{name}": going_on(name) for name in ("levels", "orphaned", "all_dead")},
    **{f"after_{name}": going_on(name) for name in ("terminated", "of_one")},
    "at_random": at_random,
}

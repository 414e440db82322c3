"""A trainer that fills slots and dies: `dying_trainer.py <json>`, a process of a run. Without JAX.

Of the steps 1 to `steps`, those in `due` are saved in all tiers, the others only lie in a slot. It
says "writer <pid>" when it has one, "filled <step>" after each, "done <step> <tier>" when it hears
so.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from ckpt import image, signals
from ckpt.arena import Arena, Slot
from ckpt.companion import Companion
from ckpt.lineage import Reach, StepId
from ckpt.messages import Begin, Done, Failed, Job, Ready, Released, Report, Setup
from ckpt.retention import Keep
from ckpt.specs import ArraySpec, ShardSpec
from ckpt.tiers import Durable, Local, Shared


def state_of(step: int, size: int) -> dict[str, np.ndarray]:
    """The state after a step, of `size` numbers."""
    return {"b": np.arange(7) * step, "w": np.random.default_rng(step).standard_normal(size)}


def tiers_in(root: Path) -> dict[str, Durable]:
    return {"local": Local(root / "local", keep=Keep()), "shared": Shared(root / "shared")}


def fill(arena: Arena, id: StepId, index: int, count: int, size: int, tree: bytes) -> Slot:
    """As a snapshot does it; of NumPy arrays process 0 has all."""
    arrays = state_of(id.step, size)
    specs = [
        ArraySpec(param, value.dtype.name, value.shape, value.shape)
        for param, value in arrays.items()
    ]
    record = {"parent": None, "decision": None, "device": "TFRT_CPU_0", "environment": {}}
    meta = {
        "step": id.step,
        "attempt": id.attempt,
        "branch": id.branch,
        "process": index,
        "processes": count,
        "time_ns": 1_790_000_000_000_000_000 + id.step,
        "data": {},
        **({"record": record} if index == 0 else {}),
    }
    mine = list(arrays.values()) if index == 0 else []
    shards = [ShardSpec(k, (0,), value.shape) for k, value in enumerate(mine)]
    plan = image.plan(specs, shards, {}).with_meta(meta, tree if index == 0 else b"")
    slot = arena.claim(plan.size_bytes)
    image.fill(plan, slot.buffer, mine)
    slot.filled()
    return slot


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def play(
    root: str,
    index: int,
    count: int,
    owner: int,
    line: list[list[Any]],
    steps: int,
    due: list[int],
    size: int,
    tree: str,
) -> None:
    reaches = tuple(Reach(*each) for each in line)
    arena = Arena(Path(root) / f"arena-p{index}", owner={"run": root}, slots=3)
    writing: dict[StepId, Slot] = {}
    ready = threading.Event()

    def hear(report: Report) -> None:
        match report:
            case Ready():
                say(f"writer {report.pid}")
                ready.set()
            case Released():
                writing.pop(report.id).release()
            case Done():
                say(f"done {report.id.step} {report.tier}")
            case Failed():
                say(f"failed {report.id} {report.error}")

    tiers = tiers_in(Path(root))
    companion = Companion(Setup(tiers, str(arena.directory), index, count, 30.0, 20.0), hear)
    signals.install(companion.wake_fd)
    companion.tell(Begin(owner, reaches))
    ready.wait(60)
    for step in range(1, steps + 1):
        id = StepId(step, reaches[0].branch, owner)
        slot = fill(arena, id, index, count, size, tree.encode())
        if step in due:
            writing[id] = slot
            companion.tell(Job(id, tuple(tiers), slot.number))
        else:
            slot.release()
        say(f"filled {step}")
    time.sleep(600)


if __name__ == "__main__":
    play(**json.loads(sys.argv[1]))

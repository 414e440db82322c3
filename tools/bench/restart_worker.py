"""The trainer that is killed, and the process that goes on from what it left."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench import limits
from tools.bench.cases import Case, cases_of, digest

STEP = 2
"""The step that is saved, so many train steps from the seed."""


@dataclass(frozen=True)
class Task:
    """What the process is to do."""

    what: str
    """`train`: save to all tiers, say so, and train until killed. `restore`, or `limits`."""
    directory: str
    arena: str
    scale: float
    seed: int

    @property
    def case(self) -> Case:
        """The 1.1 GiB of 144 leaves, at scale 1."""
        return cases_of("model", self.scale)[0]

    @property
    def local(self) -> Path:
        return Path(self.directory, "local")

    @property
    def run(self) -> Path:
        return Path(self.directory, "run")

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tools.bench.restart_worker", json.dumps(asdict(self))]


def main() -> None:
    """Read the task from the command line, do it, print the answer."""
    task = Task(**json.loads(sys.argv[1]))
    os.environ["JAX_PLATFORMS"] = "cpu"
    if task.what == "train":
        _train(task)
    elif task.what == "restore":
        print(json.dumps(_restore(task)))
    else:
        found = limits.measure(Path(task.directory, "limit"), task.case.nbytes)
        memory = Path(task.arena, "limit")
        memory.parent.mkdir(parents=True, exist_ok=True)
        copy_s = limits.read_written(memory, task.case.nbytes)
        print(json.dumps({**found, "memory_s": copy_s}))


def _manager(task: Task) -> Any:
    import ckpt

    tiers: Any = (ckpt.Memory(), ckpt.Local(task.local), ckpt.Shared(task.run))
    return ckpt.CheckpointManager(*tiers, arena=task.arena)


def _train(task: Task) -> None:
    from tools.bench.worlds import Jax

    world = Jax(1)
    manager = _manager(task)
    manager.resume()
    state = world.state(task.case, task.seed)
    for _ in range(STEP):
        state = world.train(state)
    manager.save(STEP, state).wait()
    print("saved", flush=True)
    while True:
        state = world.train(state)


def _restore(task: Task) -> dict[str, Any]:
    import jax
    import numpy as np

    from tools.bench.worlds import Jax

    world = Jax(1)
    jax.block_until_ready(jax.device_put(np.ones(8)))
    template = world.template(task.case)
    manager = _manager(task)
    before = _read_bytes()
    begun = time.perf_counter()
    restored = manager.resume(like=template, data=None)
    state = world.ready(restored.state)
    restore_s = time.perf_counter() - begun
    report = restored.report
    answer = {
        "restore_s": restore_s,
        "step": restored.step,
        "tier": report.tier,
        "plan_s": report.plan_s,
        "read_s": report.read_s,
        "place_s": report.place_s,
        "from_disk_bytes": _read_bytes() - before,
        "digest": digest(world.leaves(state)),
    }
    manager.close()
    return answer


def _read_bytes() -> int:
    """What this process has had read from disks."""
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


if __name__ == "__main__":
    main()

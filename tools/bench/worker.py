"""The process in which one side saves, or restores: prints one line of JSON when it is done."""

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
from tools.bench.memory import pss_bytes


@dataclass(frozen=True)
class Task:
    """What a worker is to do."""

    what: str
    """`save`, `restore` or `limits`."""
    side: str
    case: str
    """Name of the case, and the name in `cases.NAMES` that it belongs to."""
    group: str
    scale: float
    seed: int
    directory: str

    def find_case(self) -> Case:
        return next(c for c in cases_of(self.group, self.scale) if c.name == self.case)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tools.bench.worker", json.dumps(asdict(self))]


def main() -> None:
    """Read the task from the command line, do it, print the answer."""
    task = Task(**json.loads(sys.argv[1]))
    case, directory = task.find_case(), Path(task.directory)
    answer: dict[str, Any]
    if task.what == "limits":
        answer = limits.measure(directory / "limit", case.nbytes)
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={case.devices}"
        answer = _save(task, case) if task.what == "save" else _restore(task, case)
    print(json.dumps(answer))


def _save(task: Task, case: Case) -> dict[str, Any]:
    from tools.bench.sides import side_of

    side = side_of(task.side, Path(task.directory), case.devices, case.keep)
    state = side.world.state(case, task.seed)
    side.open()
    found: dict[str, list[Any]] = {"blocking_s": [], "durable_s": [], "step_s": [], "pss_bytes": []}
    state = side.world.train(state)
    for step in range(1, case.saves + 1):
        begun = time.perf_counter()
        side.save(step, state)
        blocked = time.perf_counter()
        if step < case.saves:
            state = side.world.train(state)
        trained = time.perf_counter()
        side.wait()
        found["durable_s"].append(time.perf_counter() - begun)
        found["blocking_s"].append(blocked - begun)
        found["step_s"].append(trained - blocked)
        if case.watched:
            found["pss_bytes"].append(pss_bytes(os.getpid()))
    side.close()
    return found


def _restore(task: Task, case: Case) -> dict[str, Any]:
    from tools.bench.sides import side_of

    side = side_of(task.side, Path(task.directory), case.devices, case.keep)
    template = side.world.template(case)
    begun = time.perf_counter()
    state = side.world.ready(side.restore(case.saves, template))
    restored = time.perf_counter() - begun
    return {"restore_s": restored, "digest": digest(side.world.leaves(state))}


if __name__ == "__main__":
    main()

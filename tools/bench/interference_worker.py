"""The process in which one side saves while a loop goes on: what each save cost the loop."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench.cases import Case

_TIMEOUT_S = 600.0  # of one save


@dataclass(frozen=True)
class Task:
    """What the process is to do."""

    side: str
    """A name in `sides`; empty: find `rounds` for steps of `step_s`, and save nothing."""
    directory: str
    scale: float
    seed: int
    saves: int
    quiet: int
    """Undisturbed steps before and after each save."""
    tail: int
    """Steps after a save is durable that are still taken to be disturbed by it."""
    step_s: float
    rounds: int

    @property
    def case(self) -> Case:
        """102 leaves of 8 MiB, at scale 1."""
        rows = max(1, round(2048 * self.scale))
        shapes = {f"layer{i:03}/weight": (rows, 1024) for i in range(102)}
        about = f"{len(shapes)} leaves"
        return Case("interference", about, dict[str, tuple[int, ...]](shapes), saves=self.saves)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tools.bench.interference_worker", json.dumps(asdict(self))]


@dataclass(frozen=True)
class Save:
    """What one save cost."""

    blocking_s: float
    """Inside `save`."""
    durable_s: float
    """From the call until the loop saw, between two steps, that it was acknowledged."""
    steps: int
    """That ran meanwhile."""
    longest_s: float
    """Of these steps."""
    whole_s: float
    """From the call until the last step had ended that is taken to be disturbed."""
    disturbed: int
    """So many steps."""
    step_s: float
    """Mean of the undisturbed steps before and after it."""

    @property
    def lost_s(self) -> float:
        """By how much later all steps ended than they would have without the save."""
        return self.whole_s - self.disturbed * self.step_s

    @property
    def inflation_s(self) -> float:
        """What is lost beside `blocking_s`."""
        return self.lost_s - self.blocking_s


def main() -> None:
    """Read the task from the command line, do it, print the answer."""
    task = Task(**json.loads(sys.argv[1]))
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(_measure(task) if task.side else _calibrate(task)))


def _calibrate(task: Task) -> dict[str, Any]:
    from tools.bench.loops import Loop
    from tools.bench.worlds import Jax

    loop = Loop(Jax(1), task.case, task.seed, 0)
    loop.calibrate(task.step_s)
    return {"rounds": loop.rounds, "step_s": statistics.median(loop.train(task.quiet))}


def _measure(task: Task) -> dict[str, Any]:
    from tools.bench.loops import Loop, digest_of
    from tools.bench.sides import side_of

    side = side_of(task.side, Path(task.directory), 1, None)
    loop = Loop(side.world, task.case, task.seed, task.rounds)
    side.open()
    loop.train(task.quiet)
    found: list[Save] = []
    before, wanted = loop.train(task.quiet), ""
    steps = list(before)
    for number in range(task.saves):
        if number == task.saves - 1:
            wanted = loop.digest()
        begun = time.perf_counter()
        side.save(loop.steps, loop.state)
        blocked = time.perf_counter()
        meanwhile = loop.train()
        while not side.done():
            meanwhile += loop.train()
            if time.perf_counter() - begun > _TIMEOUT_S:
                raise TimeoutError(f"{task.side}: not durable after {_TIMEOUT_S:.0f} s")
        side.wait()
        durable = time.perf_counter()
        loop.train(task.tail)
        ended = time.perf_counter()
        saved = loop.steps - len(meanwhile) - task.tail
        after = loop.train(task.quiet)
        found.append(
            Save(
                blocking_s=blocked - begun,
                durable_s=durable - begun,
                steps=len(meanwhile),
                longest_s=max(meanwhile),
                whole_s=ended - begun,
                disturbed=len(meanwhile) + task.tail,
                step_s=statistics.mean(before + after),
            )
        )
        before = after
        steps += after
    side.close()
    template = side.world.template(task.case)
    restored = digest_of(side.world.ready(side.restore(saved, template)))
    return {
        "saves": [asdict(save) for save in found],
        "step_s": statistics.median(steps),
        "wanted": wanted,
        "restored": restored,
    }


if __name__ == "__main__":
    main()

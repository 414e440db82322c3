"""The run whose store is away for a while: it goes on, and writes down what it notices."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.cases import STEP_S, Case, cases_of

_PATIENCE_S = 600.0
_CAUGHT_UP_S = 300.0  # within which everything must be in place again
_LOOKS_EVERY_S = 0.05  # at how the run is doing


@dataclass(frozen=True)
class Task:
    """What the process is to do."""

    directory: str
    arena: str
    scale: float
    seed: int
    before_s: float
    """Seconds until the store goes away."""
    away_s: float
    save_s: float
    """Seconds between saves, to all tiers."""

    @property
    def case(self) -> Case:
        """16 leaves, 64 MiB at scale 1."""
        return cases_of("soak", self.scale)[0]

    @property
    def store(self) -> Store:
        return Store(Path(self.directory))

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tools.bench.outage_worker", json.dumps(asdict(self))]


@dataclass(frozen=True)
class Store:
    """A directory that can go away as a whole, at once, so that every access to it fails."""

    place: Path

    @property
    def run(self) -> Path:
        """The location of the run."""
        return self.place / "store" / "run"

    def make(self) -> None:
        (self.place / "disk" / "run").mkdir(parents=True)
        self._lead("disk")

    def go_away(self) -> None:
        """A link that leads to itself: neither there nor not there, but an error."""
        self._lead("store")

    def come_back(self) -> None:
        self._lead("disk")

    def _lead(self, target: str) -> None:
        link, new = self.place / "store", self.place / "store.new"
        os.symlink(target, new)
        os.replace(new, link)


@dataclass
class Phase:
    """A part of the run."""

    lasted_s: float = 0.0
    steps: list[float] = field(default_factory=list)
    """Seconds of each."""
    blocked: list[float] = field(default_factory=list)
    """Seconds inside each `save`."""
    local: list[float] = field(default_factory=list)
    """Seconds from the call of each save until the loop saw that the local disk has it."""

    def to_json(self) -> dict[str, Any]:
        return {
            "lasted_s": self.lasted_s,
            "steps": len(self.steps),
            "step_s": statistics.median(self.steps) if self.steps else 0.0,
            "saves": len(self.blocked),
            "blocking_s": statistics.median(self.blocked) if self.blocked else 0.0,
            "longest_blocking_s": max(self.blocked, default=0.0),
            "blocked_s": sum(self.blocked),
            "local_s": statistics.median(self.local) if self.local else 0.0,
        }


@dataclass
class _Save:
    step: int
    begun: float
    phase: Phase
    pending: Any
    is_local: bool = False


def main() -> None:
    """Read the task from the command line, do it, print the answer."""
    task = Task(**json.loads(sys.argv[1]))
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(json.dumps(_measure(task)))


def _measure(task: Task) -> dict[str, Any]:
    store = task.store
    store.make()
    trainer = _Trainer(task)

    trainer.train("before", lambda s: s < task.before_s or len(trainer.due) < 2)
    store.go_away()
    trainer.train("away", lambda s: s < task.away_s)
    noticed_s = trainer.status_changed_s
    backlog = [save.step for save in trainer.under_way]
    store.come_back()

    def is_behind(seconds: float) -> bool:
        if seconds > _CAUGHT_UP_S:
            raise TimeoutError(f"not caught up {seconds:.0f} s after the store was back")
        return any(save.step in backlog for save in trainer.under_way)

    caught_up_s = trainer.train("catching up", is_behind)
    trainer.train("after", lambda s: s < task.before_s)
    return {
        "phases": {name: phase.to_json() for name, phase in trainer.phases.items()},
        "every": trainer.every,
        "backlog": len(backlog),
        "noticed_s": noticed_s,
        "caught_up_s": caught_up_s,
        **trainer.end(),
    }


class _Trainer:
    """A loop that saves, and looks now and then at how its saves are doing."""

    def __init__(self, task: Task) -> None:
        import ckpt
        from tools.bench.loops import Loop
        from tools.bench.worlds import Jax

        self._run, self._world = task.store.run, Jax(1)
        self._template = self._world.template(task.case)
        self._loop = Loop(self._world, task.case, task.seed, 0)
        self._loop.calibrate(STEP_S)
        self.every = max(1, round(task.save_s / statistics.median(self._loop.train(20))))
        self._manager = ckpt.CheckpointManager(
            ckpt.Local(Path(task.directory, "local"), every=self.every, patience_s=_PATIENCE_S),
            ckpt.Shared(self._run, every=self.every, patience_s=_PATIENCE_S),
            arena=task.arena,
            writer="process",
        )
        self._manager.resume()
        self.due: list[int] = []
        """Steps that were saved."""
        self.under_way: list[_Save] = []
        """Saves that are not in all tiers."""
        self.phases: dict[str, Phase] = {}
        self.status_changed_s: float | None = None
        """Into the phase, when the manager first said that a tier fails."""

    def train(self, name: str, goes_on: Callable[[float], bool]) -> float:
        """Make steps while `goes_on` says so of the seconds since the start; returns those."""
        phase = self.phases[name] = Phase()
        self.status_changed_s = None
        begun = looked = time.perf_counter()
        while goes_on(seconds := time.perf_counter() - begun):
            phase.steps += self._loop.train()
            if self._loop.steps % self.every == 0:
                self._save(phase)
            if (now := time.perf_counter()) - looked >= _LOOKS_EVERY_S:
                looked = now
                self._look()
                if self.status_changed_s is None and self._manager.status().degraded:
                    self.status_changed_s = now - begun
        phase.lasted_s = seconds
        return seconds

    def _save(self, phase: Phase) -> None:
        begun = time.perf_counter()
        pending = self._manager.save(self._loop.steps, self._loop.state)
        phase.blocked.append(time.perf_counter() - begun)
        if pending is not None:
            self.due.append(self._loop.steps)
            self.under_way.append(_Save(self._loop.steps, begun, phase, pending))

    def _look(self) -> None:
        """Raises what went wrong with a save."""
        now = time.perf_counter()
        for save in list(self.under_way):
            if not save.is_local and save.pending.done("local"):
                save.is_local = True
                save.phase.local.append(now - save.begun)
            if save.pending.done():
                self.under_way.remove(save)

    def end(self) -> dict[str, Any]:
        """Save once more, close, and see what is there."""
        import ckpt
        from tools.bench.loops import digest_of

        wanted = self._loop.digest()
        self._manager.save(self._loop.steps, self._loop.state, force=True)
        self.due = sorted({*self.due, self._loop.steps})
        self._manager.close()
        with ckpt.open(self._run) as reader:
            there = reader.all_steps()
            restored = reader.restore(like=self._template)
        found = digest_of(self._world.ready(restored.state))
        return {
            "due": self.due,
            "missing": sorted(set(self.due) - set(there)),
            "damaged": [str(each) for step in ckpt.verify(self._run).steps for each in step.damage],
            "is_newest_right": (restored.step, found) == (self._loop.steps, wanted),
        }


if __name__ == "__main__":
    main()

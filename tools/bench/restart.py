"""How fast a run goes on after its trainer was killed: from the arena, from a cold image on the
local disk, from the cold step on the same disk.

Every time anew: a trainer saves one step to all tiers and is killed while it trains on; its writer
ends by itself. Then what is nearer than the tier in question is removed, the page cache of the rest
is dropped, and a fresh process resumes. What counts is the call, after imports and the start of the
backend.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench import files
from tools.bench.asking import WorkerFailedError, WrongValuesError, ask
from tools.bench.cases import truth
from tools.bench.memory import family
from tools.bench.restart_worker import STEP, Task
from tools.bench.spreads import Spread
from tools.bench.table import closing, environment, seconds, times

TIERS = ("memory", "local", "shared")
SCALES = (1.0, 0.224)
"""Of the states: 1.1 and 0.25 GiB."""
_GONE_S = 60.0  # within which the writer of a killed trainer ends


@dataclass(frozen=True)
class Run:
    """One restart."""

    restore_s: float
    tier: str
    """From which it restored, as it says itself."""
    plan_s: float
    read_s: float
    place_s: float
    from_disk_bytes: int
    """Read from disks by the process meanwhile, as the system says."""
    cache: str
    """Page cache of the files on disk before it."""


@dataclass(frozen=True)
class Result:
    """One size, done."""

    nbytes: int
    leaves: int
    runs: dict[str, tuple[Run, ...]]
    """By tier, one a pair."""
    limits: tuple[dict[str, Any], ...]
    """Of each pair: `limits.measure`, and `memory_s`, a copy out of a file in memory."""

    def spread(self, tier: str) -> Spread:
        """Seconds."""
        return Spread.of([run.restore_s for run in self.runs[tier]])

    def ratio(self, tier: str, other: str) -> Spread:
        """How many times faster one tier is than another one."""
        return Spread.of_ratios(
            [run.restore_s for run in self.runs[other]],
            [run.restore_s for run in self.runs[tier]],
        )

    def limit(self, figure: str) -> Spread:
        """Of a figure of `limits`."""
        return Spread.of([found[figure] for found in self.limits])

    @property
    def limit_ratio(self) -> Spread:
        """How many times faster memory is than the cold disk in bare reads."""
        return Spread.of([found["read_s"] / found["memory_s"] for found in self.limits])

    def to_limit(self, tier: str) -> Spread:
        """By the bare read of the same bytes from where they are."""
        figure = "memory_s" if tier == "memory" else "read_s"
        return Spread.of_ratios(
            [run.restore_s for run in self.runs[tier]], [found[figure] for found in self.limits]
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, with the summaries."""
        return {
            "bytes": self.nbytes,
            "leaves": self.leaves,
            "tiers": {
                tier: {
                    "restore_s": self.spread(tier).to_json(),
                    "to_limit": self.to_limit(tier).to_json(),
                    "runs": [asdict(run) for run in runs],
                }
                for tier, runs in self.runs.items()
            },
            "times faster": {
                f"memory than {tier}": self.ratio("memory", tier).to_json() for tier in TIERS[1:]
            },
            "times faster, bare reads": self.limit_ratio.to_json(),
            "limits": list(self.limits),
        }


@dataclass(frozen=True)
class Plan:
    """How it is measured."""

    directory: Path
    """Where everything is written; what a restart wrote is removed after it."""
    scale: float = 1.0
    pairs: int = 5
    seed: int = 17
    tell: Callable[[str], None] = lambda text: None

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self._task("", self.directory, self.directory).case.nbytes

    def measure(self) -> Result:
        """All tiers in turn, pair by pair.

        Raises:
            WrongValuesError: other values came back than were saved.
            WorkerFailedError: a process failed, or restored from another tier than was meant.
        """
        case = self._task("", self.directory, self.directory).case
        wanted = truth(case, self.seed, STEP)
        runs: dict[str, list[Run]] = {tier: [] for tier in TIERS}
        limits = []
        for pair in range(self.pairs):
            first = pair % len(TIERS)
            for tier in (*TIERS[first:], *TIERS[:first]):
                self.tell(f"{case.about}: pair {pair + 1} of {self.pairs}: {tier}")
                runs[tier].append(self._restart(tier, wanted))
            with files.scratch(self.directory) as place, files.memory(place) as arena:
                limits.append(ask(self._task("limits", place, arena).command(), "limits")[0])
        counted = {tier: tuple(each) for tier, each in runs.items()}
        return Result(case.nbytes, len(case.shapes), counted, tuple(limits))

    def _task(self, what: str, place: Path, arena: Path) -> Task:
        return Task(what, str(place), str(arena / "arena"), self.scale, self.seed)

    def _restart(self, tier: str, wanted: str) -> Run:
        with files.scratch(self.directory) as place, files.memory(place) as arena:
            task = self._task("train", place, arena)
            _train_and_kill(task.command())
            if tier != "memory":
                shutil.rmtree(task.arena, ignore_errors=True)
            if tier == "shared":
                shutil.rmtree(task.local)
            cache = files.drop_cache(place)
            found, _ = ask(self._task("restore", place, arena).command(), f"restart from {tier}")
        if (found.pop("digest"), found.pop("step")) != (wanted, STEP):
            raise WrongValuesError(
                f"restart from {tier}: wanted step {STEP} and values of digest {wanted}, restored "
                f"others (seed {self.seed}, scale {self.scale})"
            )
        if found["tier"] != tier:
            raise WorkerFailedError(f"wanted a restart from {tier}, found {found['tier']}")
        return Run(cache=cache, **found)


def _train_and_kill(command: Sequence[str]) -> None:
    """Kill a trainer that has saved, and wait until those it started are gone, too."""
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert trainer.stdout is not None
        if trainer.stdout.readline() != "saved\n":
            trainer.kill()
            raise WorkerFailedError(f"trainer: {trainer.communicate()[1][-4000:]}")
        others = [pid for pid in family(trainer.pid) if pid != trainer.pid]
    finally:
        trainer.kill()
        trainer.wait()
        for pipe in (trainer.stdout, trainer.stderr):
            if pipe is not None:
                pipe.close()
    end = time.monotonic() + _GONE_S
    while left := [pid for pid in others if _is_running(pid)]:
        if time.monotonic() > end:
            raise WorkerFailedError(f"processes {left} outlive their trainer by {_GONE_S:.0f} s")
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def to_json(results: Sequence[Result]) -> dict[str, Any]:
    """All results with what they depend on."""
    return {**environment(), "cases": [result.to_json() for result in results]}


def show(results: Sequence[Result], console: Console) -> None:
    """Print one table per size."""
    for result in results:
        cache = sorted({run.cache for tier in TIERS[1:] for run in result.runs[tier]})
        console.print(
            f"[bold]restart[/]: {result.leaves} leaves, {result.nbytes / 2**20:,.0f} MiB; median "
            f"(least to greatest) of {len(result.limits)}; page cache: {', '.join(cache)}",
            highlight=False,
        )
        table = Table()
        for heading in ("from", "resume", "memory is faster", "bare read", "by that", "from disk"):
            side = "left" if heading == "from" else "right"
            table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
        for tier in TIERS:
            disk = max(run.from_disk_bytes for run in result.runs[tier])
            table.add_row(
                tier,
                seconds(result.spread(tier)),
                "" if tier == "memory" else f"{times(result.ratio('memory', tier))} times",
                seconds(result.limit("memory_s" if tier == "memory" else "read_s")),
                times(result.to_limit(tier)),
                f"{disk / 2**20:,.0f} MiB",
            )
        console.print(table)
        console.print(
            f"of bare reads memory is {times(result.limit_ratio)} times faster than the cold disk",
            highlight=False,
        )
    console.print(
        "bare read: the same bytes into fresh memory by two threads, out of a file in memory, or "
        "on disk and cold",
        highlight=False,
    )
    closing(console)

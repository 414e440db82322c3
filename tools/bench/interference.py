"""What a save costs a training loop: the time inside `save`, and by how much the steps that run
while it is under way take longer than undisturbed ones of the same process.

All sides in turn, each in a fresh process, pair by pair. The first save of a process is reported by
itself. All files are on disk when a save counts as durable: each side syncs its own.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench import files
from tools.bench.asking import WrongValuesError, ask
from tools.bench.cases import STEP_S
from tools.bench.interference_worker import Save, Task
from tools.bench.sides import ORBAX, PROCESS, THREAD
from tools.bench.spreads import Spread
from tools.bench.table import closing, environment, milliseconds, times

SIDES = (ORBAX, THREAD, PROCESS)
FIGURES = ("blocking_s", "inflation_s", "lost_s", "durable_s", "longest_s")
RATIOS = ("lost_s", "blocking_s", "durable_s")
_QUIET, _TAIL = 100, 30


@dataclass(frozen=True)
class Run:
    """What one side did in one pair."""

    first: Save
    saves: tuple[Save, ...]
    """The others, which count."""
    step_s: float
    """Median of all undisturbed steps."""

    def figure(self, name: str) -> float:
        """Median of one of `FIGURES` over the saves that count."""
        return statistics.median(getattr(save, name) for save in self.saves)


@dataclass(frozen=True)
class Result:
    """All pairs."""

    nbytes: int
    leaves: int
    runs: dict[str, tuple[Run, ...]]
    """By side, one a pair."""

    def spread(self, side: str, figure: str) -> Spread:
        """Of the medians of all pairs."""
        return Spread.of([run.figure(figure) for run in self.runs[side]])

    def every(self, side: str, figure: str) -> Spread:
        """Of all saves that count, in all pairs."""
        saves = [save for run in self.runs[side] for save in run.saves]
        return Spread.of([getattr(save, figure) for save in saves])

    def first(self, side: str) -> Spread:
        """What the first save of a process loses."""
        return Spread.of([run.first.lost_s for run in self.runs[side]])

    def step(self, side: str) -> Spread:
        """Undisturbed steps."""
        return Spread.of([run.step_s for run in self.runs[side]])

    def ratio(self, side: str, figure: str) -> Spread | None:
        """By Orbax in the same pair; None where it took no part."""
        if ORBAX not in self.runs:
            return None
        ours, theirs = self.runs[side], self.runs[ORBAX]
        return Spread.of_ratios(
            [run.figure(figure) for run in ours], [run.figure(figure) for run in theirs]
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, with the summaries and the environment."""
        return {
            **environment(),
            "bytes": self.nbytes,
            "leaves": self.leaves,
            "sides": {
                side: {
                    **{figure: self.spread(side, figure).to_json() for figure in FIGURES},
                    "every_lost_s": self.every(side, "lost_s").to_json(),
                    "first_lost_s": self.first(side).to_json(),
                    "step_s": self.step(side).to_json(),
                    "runs": [
                        {
                            "step_s": run.step_s,
                            "saves": [
                                {
                                    **asdict(save),
                                    "lost_s": save.lost_s,
                                    "inflation_s": save.inflation_s,
                                }
                                for save in (run.first, *run.saves)
                            ],
                        }
                        for run in runs
                    ],
                }
                for side, runs in self.runs.items()
            },
            "ratios": {
                side: {
                    figure: found.to_json()
                    for figure in RATIOS
                    if (found := self.ratio(side, figure)) is not None
                }
                for side in self.runs
                if side != ORBAX
            },
        }


@dataclass(frozen=True)
class Plan:
    """How it is measured."""

    directory: Path
    """Where everything is written; what a side wrote is removed after it."""
    scale: float = 1.0
    pairs: int = 5
    saves: int = 4
    sides: tuple[str, ...] = SIDES
    step_s: float = STEP_S
    seed: int = 17
    tell: Callable[[str], None] = lambda text: None

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self._task.case.nbytes

    @property
    def _task(self) -> Task:
        few = min(1.0, max(0.1, self.scale))
        return Task(
            side="",
            directory="",
            scale=self.scale,
            seed=self.seed,
            saves=self.saves,
            quiet=round(_QUIET * few),
            tail=round(_TAIL * few),
            step_s=self.step_s,
            rounds=0,
        )

    def measure(self) -> Result:
        """Run all pairs.

        Raises:
            WrongValuesError: a side restored other values than it saved.
            WorkerFailedError: a side failed; with the end of what it printed.
        """
        self.tell("the length of a step")
        found, _ = ask(self._task.command(), "calibration")
        task = replace(self._task, rounds=found["rounds"])
        self.tell(f"{found['step_s'] * 1e3:.1f} ms, with {task.rounds} matrix products in it")
        runs: dict[str, list[Run]] = {side: [] for side in self.sides}
        for pair in range(self.pairs):
            first = pair % len(self.sides)
            for side in (*self.sides[first:], *self.sides[:first]):
                self.tell(f"pair {pair + 1} of {self.pairs}: {side}")
                runs[side].append(self._run(task, side))
        return Result(
            self.nbytes,
            len(task.case.shapes),
            {side: tuple(each) for side, each in runs.items()},
        )

    def _run(self, task: Task, side: str) -> Run:
        with files.scratch(self.directory) as place:
            os.sync()  # what others wrote is not to be paid by this one
            mine = replace(task, side=side, directory=str(place / "run"))
            found, _ = ask(mine.command(), side)
        if found["restored"] != found["wanted"]:
            raise WrongValuesError(
                f"{side}: wanted values of digest {found['wanted']}, restored "
                f"{found['restored']} (seed {self.seed}, scale {self.scale})"
            )
        first, *others = (Save(**save) for save in found["saves"])
        return Run(first, tuple(others) or (first,), found["step_s"])


def show(result: Result, console: Console) -> None:
    """Print one table."""
    pairs = len(next(iter(result.runs.values())))
    console.print(
        f"[bold]interference[/]: {result.leaves} leaves, {result.nbytes / 2**20:,.0f} MiB; "
        f"ms: medians of each process, their median (least to greatest) over {pairs} pairs",
        highlight=False,
    )
    table = Table()
    for heading in (
        "",
        "blocking",
        "inflation",
        "lost in all",
        "of any save",
        "first save",
        "durable",
        "step alone",
    ):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for side in result.runs:
        table.add_row(
            side,
            *(milliseconds(result.spread(side, each)) for each in FIGURES[:3]),
            milliseconds(result.every(side, "lost_s")),
            milliseconds(result.first(side)),
            milliseconds(result.spread(side, "durable_s")),
            f"{1e3 * result.step(side).median:.3g}",
        )
    table.add_section()
    for side in result.runs:
        if side != ORBAX and ORBAX in result.runs:
            found = {figure: times(result.ratio(side, figure)) for figure in RATIOS}
            row = (found["blocking_s"], "", found["lost_s"], "", "", found["durable_s"], "")
            table.add_row(f"{side} / {ORBAX}", *row)
    console.print(table)
    console.print(
        "lost in all: by how much later the loop is than without the save; of any save: the same, "
        "of all saves but first ones, not of medians",
        highlight=False,
    )
    closing(console)

"""All sides in turn, pair by pair, each in fresh processes; and what the figures come to.

The first pair warms up: its times are dropped (unless it is the only one), and memory is sampled in
it alone, because sampling takes time from what it looks at.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench import files
from tools.bench.asking import WrongValuesError, ask
from tools.bench.cases import Case, truth
from tools.bench.sides import ORBAX, OURS
from tools.bench.spreads import Spread
from tools.bench.worker import Task

FIGURES = ("blocking_s", "first_blocking_s", "durable_s", "first_durable_s", "restore_s")
RATIOS = ("blocking_s", "durable_s", "restore_s")


@dataclass(frozen=True)
class Run:
    """What one side did in one pair."""

    blocking_s: float
    """Inside `save`: median of all saves but the first."""
    first_blocking_s: float
    durable_s: float
    """From the call until acknowledged: likewise."""
    first_durable_s: float
    restore_s: float
    cache: str
    """Page cache of the files that were restored."""
    disk_bytes: int
    """All steps that are kept, per step."""
    peak_save_bytes: int
    """PSS; 0 where it was not sampled."""
    peak_restore_bytes: int
    pss_bytes: tuple[int, ...]
    """After each save, where the case asks for it."""


@dataclass(frozen=True)
class Result:
    """One case, done."""

    case: Case
    pairs: int
    """All that were run."""
    runs: dict[str, tuple[Run, ...]]
    """By side; those that count."""
    limits: tuple[dict[str, Any], ...]
    """`limits.measure` of each pair that counts."""
    peaks: dict[str, tuple[int, int]]
    """By side: PSS at most while it saved and restored, in bytes."""

    def spread(self, side: str, figure: str) -> Spread:
        """Of a figure of `Run`."""
        return Spread.of([getattr(run, figure) for run in self.runs[side]])

    def limit(self, figure: str) -> Spread:
        """Of a figure of `limits.measure`."""
        return Spread.of([found[figure] for found in self.limits])

    def ratio(self, figure: str, side: str = ORBAX) -> Spread | None:
        """Ours by that of another side, pair by pair; None where one of them took no part."""
        if OURS not in self.runs or side not in self.runs:
            return None
        both = zip(self.runs[OURS], self.runs[side], strict=True)
        return Spread.of([getattr(a, figure) / getattr(b, figure) for a, b in both])

    def to_limit(self, figure: str, limit: str) -> Spread | None:
        """A figure of ours by a limit of the same pair."""
        if OURS not in self.runs:
            return None
        both = zip(self.runs[OURS], self.limits, strict=True)
        return Spread.of([getattr(run, figure) / found[limit] for run, found in both])

    def growth_bytes(self, side: str) -> float | None:
        """Slope of PSS over the saves from the second on, in bytes per save."""
        slopes = []
        for run in self.runs[side]:
            if len(run.pss_bytes) > 2:
                later = run.pss_bytes[1:]
                slopes.append(statistics.linear_regression(range(len(later)), later).slope)
        return statistics.median(slopes) if slopes else None

    def to_json(self) -> dict[str, Any]:
        """Everything, with the summaries."""
        return {
            "case": self.case.name,
            "about": self.case.about,
            "leaves": len(self.case.shapes),
            "bytes": self.case.nbytes,
            "saves": self.case.saves,
            "devices": self.case.devices,
            "pairs": self.pairs,
            "sides": {
                side: {
                    **{figure: asdict(self.spread(side, figure)) for figure in FIGURES},
                    "disk_bytes": runs[-1].disk_bytes,
                    "peak_save_bytes": self.peaks[side][0],
                    "peak_restore_bytes": self.peaks[side][1],
                    "growth_bytes_per_save": self.growth_bytes(side),
                    "runs": [asdict(run) for run in runs],
                }
                for side, runs in self.runs.items()
            },
            "limits": {
                "runs": list(self.limits),
                **{name: asdict(self.limit(name)) for name in ("write_s", "read_s", "copy_s")},
            },
            "ratios": {
                side: {figure: _maybe(self.ratio(figure, side)) for figure in RATIOS}
                for side in self.runs
                if side != OURS and OURS in self.runs
            },
            "to_limits": {
                "durable / O_DIRECT write": _maybe(self.to_limit("durable_s", "write_s")),
                "restore / bare read": _maybe(self.to_limit("restore_s", "read_s")),
                "blocking / warm copy": _maybe(self.to_limit("blocking_s", "copy_s")),
            },
        }


@dataclass(frozen=True)
class Plan:
    """How cases are measured."""

    directory: Path
    """Where everything is written; what a pair wrote is removed after it."""
    scale: float
    pairs: int
    sides: tuple[str, ...]
    seed: int = 17
    tell: Callable[[str], None] = lambda text: None

    def measure(self, case: Case, group: str) -> Result:
        """Run all pairs of a case.

        Raises:
            WrongValuesError: a side restored other values than were saved.
            WorkerFailedError: a side failed; with the end of what it printed.
        """
        wanted = truth(case, self.seed, case.saves)
        count = self.pairs if case.pairs is None else min(self.pairs, case.pairs)
        done: list[tuple[dict[str, Run], dict[str, Any]]] = []
        for pair in range(count):
            sampled = pair == 0
            first = pair % len(self.sides)
            runs = {}
            for side in (*self.sides[first:], *self.sides[:first]):
                self.tell(f"{case.name}: pair {pair + 1} of {count}: {side}")
                runs[side] = self._run(case, group, side, wanted, sampled=sampled)
            with files.scratch(self.directory) as place:
                task = self._task("limits", "", case, group, place)
                done.append((runs, self._ask(task, sampled=False)[0]))
        counted = done[1:] if count > 1 else done
        return Result(
            case,
            count,
            {side: tuple(runs[side] for runs, _ in counted) for side in self.sides},
            tuple(found for _, found in counted),
            {
                side: (run.peak_save_bytes, run.peak_restore_bytes)
                for side, run in done[0][0].items()
            },
        )

    def _task(self, what: str, side: str, case: Case, group: str, place: Path) -> Task:
        return Task(what, side, case.name, group, self.scale, self.seed, str(place))

    def _ask(self, task: Task, *, sampled: bool) -> tuple[dict[str, Any], int]:
        what = f"{task.side} {task.what} of {task.case}"
        return ask(task.command(), what, sampled=sampled)

    def _run(self, case: Case, group: str, side: str, wanted: str, *, sampled: bool) -> Run:
        with files.scratch(self.directory) as place:
            os.sync()  # what others wrote is not to be paid by this one
            task = self._task("save", side, case, group, place)
            saved, save_bytes = self._ask(task, sampled=sampled)
            disk_bytes = files.size_bytes(place)
            cache = files.drop_cache(place)
            task = self._task("restore", side, case, group, place)
            restored, restore_bytes = self._ask(task, sampled=sampled)
        if restored["digest"] != wanted:
            raise WrongValuesError(
                f"{side}, {case.name}: wanted values of digest {wanted}, restored "
                f"{restored['digest']} (seed {self.seed}, scale {self.scale})"
            )
        steady = slice(1, None) if case.saves > 1 else slice(None)
        return Run(
            blocking_s=statistics.median(saved["blocking_s"][steady]),
            first_blocking_s=saved["blocking_s"][0],
            durable_s=statistics.median(saved["durable_s"][steady]),
            first_durable_s=saved["durable_s"][0],
            restore_s=restored["restore_s"],
            cache=cache,
            disk_bytes=disk_bytes // min(case.saves, case.keep or case.saves),
            peak_save_bytes=save_bytes,
            peak_restore_bytes=restore_bytes,
            pss_bytes=tuple(saved["pss_bytes"]),
        )


def _maybe(spread: Spread | None) -> dict[str, float] | None:
    return None if spread is None else asdict(spread)

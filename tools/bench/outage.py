"""A run with a local and a shared tier whose shared store is away for a while: it must not stop,
and must end with everything due in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench import files
from tools.bench.asking import ask
from tools.bench.outage_worker import Task
from tools.bench.table import closing, environment


@dataclass(frozen=True)
class Result:
    """What the run noticed."""

    nbytes: int
    away_s: float
    found: dict[str, Any]
    """The answer of `outage_worker`."""

    @property
    def is_in_place(self) -> bool:
        """Is all there that was due, intact, and the newest as it was saved?"""
        found = self.found
        return found["is_newest_right"] and not found["missing"] and not found["damaged"]

    def to_json(self) -> dict[str, Any]:
        """Everything, with the environment."""
        return {
            **environment(),
            "bytes": self.nbytes,
            "away_s": self.away_s,
            "is_in_place": self.is_in_place,
            **self.found,
        }


@dataclass(frozen=True)
class Plan:
    """How it is measured."""

    directory: Path
    """Where everything is written; removed afterwards."""
    scale: float = 1.0
    away_s: float = 30.0
    before_s: float = 5.0
    save_s: float = 1.0
    seed: int = 17
    tell: Callable[[str], None] = lambda text: None

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self._task(self.directory, self.directory).case.nbytes

    @property
    def needed_bytes(self) -> int:
        """On disk, at most: every step in the store, and on the local disk those not there."""
        saves = (2 * self.before_s + 2 * self.away_s) / self.save_s + 10
        return round(2 * saves * self.nbytes)

    def measure(self) -> Result:
        """Run it.

        Raises:
            WorkerFailedError: the run stopped; with the end of what it printed.
        """
        self.tell(f"a run with a store that is away for {self.away_s:g} s")
        with files.scratch(self.directory) as place, files.memory(place) as arena:
            found, _ = ask(self._task(place, arena).command(), "the run stopped")
        return Result(self.nbytes, self.away_s, found)

    def _task(self, place: Path, arena: Path) -> Task:
        return Task(
            str(place),
            str(arena / "arena"),
            self.scale,
            self.seed,
            self.before_s,
            self.away_s,
            self.save_s,
        )


def show(result: Result, console: Console) -> None:
    """Print a table, and what is in place."""
    found = result.found
    console.print(
        f"[bold]outage[/]: {result.nbytes / 2**20:,.1f} MiB saved every {found['every']} steps to "
        f"a local and a shared tier; the store of the shared one is away for {result.away_s:g} s",
        highlight=False,
    )
    table = Table()
    columns = ("seconds", "steps", "step", "saves", "blocking", "longest", "in all", "local after")
    for heading in ("store", *columns):
        table.add_column(heading, justify="right" if heading != "store" else "left")  # type: ignore[arg-type]
    for name, phase in found["phases"].items():
        times = ("blocking_s", "longest_blocking_s", "blocked_s", "local_s")
        table.add_row(
            name,
            f"{phase['lasted_s']:.1f}",
            f"{phase['steps']:,}",
            _ms(phase["step_s"]),
            f"{phase['saves']:,}",
            *(_ms(phase[each]) for each in times),
        )
    console.print(table)
    noticed = found["noticed_s"]
    console.print(
        f"status() said so {'never' if noticed is None else f'after {noticed:.2f} s'}; "
        f"{found['backlog']} saves were behind when the store was back, and there "
        f"{found['caught_up_s']:.2f} s later",
        highlight=False,
    )
    due, missing, damaged = len(found["due"]), found["missing"], found["damaged"]
    console.print(
        f"of {due} steps due, {due - len(missing)} are in the store"
        + (f"; missing: {', '.join(map(str, missing))}" if missing else "")
        + (f"; damaged: {'; '.join(damaged)}" if damaged else ", intact")
        + ("" if found["is_newest_right"] else "; WRONG VALUES in the newest"),
        highlight=False,
    )
    closing(console)


def _ms(found_s: float) -> str:
    return f"{1e3 * found_s:.3g} ms" if found_s else "-"

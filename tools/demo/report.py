"""What came of a demo: as a value, as tables, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ckpt.wording import counted
from tools.demo.compare import Compared
from tools.demo.script import Script


@dataclass(frozen=True)
class Kill:
    """A SIGKILL of the trainer while a save was in flight, and what its successor found."""

    step: int  # whose save was in flight
    after_s: float  # since the save began
    saved_before: int  # newest step known to be durable at that moment
    resumed: int  # step the next process came back with


@dataclass(frozen=True)
class Rewound:
    """The guard's rewind as the trainer reported it."""

    onset: int
    to: int
    skip: tuple[int, int]  # steps, half-open
    reason: str
    skips: tuple[tuple[int, int], ...]  # examples, half-open


@dataclass
class Story:
    """What was seen of one run, in order."""

    losses: list[tuple[int, float]] = field(default_factory=list)  # (step, loss) as they came
    saves: list[tuple[int, float]] = field(default_factory=list)  # (step, seconds until durable)
    kills: list[Kill] = field(default_factory=list)
    misses: int = 0  # kills that came just after a save was durable
    rewinds: list[Rewound] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """One thing that had to happen, and whether it did."""

    what: str
    ok: bool
    found: str


@dataclass(frozen=True)
class Outcome:
    """The whole demo."""

    script: Script
    format: str
    run: Story
    reference: Story
    checks: tuple[Check, ...]
    compared: tuple[Compared, ...]
    picture: Path
    directory: Path | None  # where everything was kept, if it was
    seconds: float
    picture_problem: str = ""  # why there is no picture

    @property
    def equal(self) -> bool:
        """All that had to happen did, and both runs ended in the same bits."""
        return all(check.ok for check in self.checks) and all(part.equal for part in self.compared)

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "seed": self.script.seed,
            "steps": self.script.steps,
            "format": self.format,
            "poisoned_batches": [self.script.poison.start, self.script.poison.stop],
            "kills": [vars(kill) for kill in self.run.kills],
            "rewinds": [vars(rewound) for rewound in self.run.rewinds],
            "checks": [vars(check) for check in self.checks],
            "compared": [part.to_json() for part in self.compared],
            "picture": None if self.picture_problem else str(self.picture),
            "picture_problem": self.picture_problem or None,
            "directory": None if self.directory is None else str(self.directory),
            "seconds": round(self.seconds, 1),
        }


def checks(script: Script, story: Story, poisoned: list[tuple[int, int]]) -> tuple[Check, ...]:
    """What must be true of the disturbed run. `poisoned`: examples that hold noise."""
    rewinds, kills = story.rewinds, story.kills
    found = [
        Check(
            "killed twice in the middle of a save, the second time after the rewind",
            len(kills) == 2 and bool(rewinds),
            ", ".join(f"step {kill.step}" for kill in kills) or "never",
        )
    ]
    found += [
        Check(
            f"kill {number}: the newest durable step came back, or the one in flight",
            kill.resumed in (kill.saved_before, kill.step),
            f"durable {kill.saved_before}, in flight {kill.step}, resumed {kill.resumed}",
        )
        for number, kill in enumerate(kills, 1)
    ]
    found.append(
        Check(
            "the guard fired by itself, once, when the poisoned batches came",
            len(rewinds) == 1 and abs(rewinds[0].onset - 1 - script.poison.start) <= 2,
            "; ".join(rewound.reason for rewound in rewinds) or "it did not fire",
        )
    )
    if rewinds:
        rewound = rewinds[0]
        found += [
            Check(
                "it went back to a step before the poison",
                rewound.to <= script.poison.start,
                f"step {rewound.to}, first poisoned batch {script.poison.start}",
            ),
            Check(
                "every poisoned example is skipped from now on",
                all(
                    any(a <= start and stop <= b for a, b in rewound.skips)
                    for start, stop in poisoned
                ),
                f"poisoned {poisoned}, skipped {[list(skip) for skip in rewound.skips]}",
            ),
        ]
    return tuple(found)


def show(outcome: Outcome, console: Console) -> None:
    """Print the tables."""
    run = outcome.run
    events = Table(title="What happened to the run", title_justify="left")
    for heading in ("", "at", "details"):
        events.add_column(heading)
    rows = [_killed(kill) for kill in run.kills[:1]]
    rows += [_rewound(rewound) for rewound in run.rewinds]
    rows += [_killed(kill) for kill in run.kills[1:]]
    for row in rows:
        events.add_row(*row)
    console.print(events)

    done = Table(title="What had to happen", title_justify="left")
    for heading in ("", "", "found"):
        done.add_column(heading)
    for check in outcome.checks:
        done.add_row(_mark(ok=check.ok), check.what, check.found)
    console.print(done)

    parts = Table(title="The two runs at their end", title_justify="left")
    for heading in ("", "part", "pieces", "bytes", "disturbed run", "reference"):
        parts.add_column(heading, justify="right" if heading in ("pieces", "bytes") else "left")
    for part in outcome.compared:
        sizes = (str(part.count), f"{part.size_bytes:,}")
        parts.add_row(_mark(ok=part.equal), part.part, *sizes, part.ours[:16], part.theirs[:16])
    console.print(parts)
    for part in outcome.compared:
        if part.differences:
            names = ", ".join(part.differences[:5])
            console.print(
                f"{part.part}: {counted(len(part.differences), 'difference')}: {names}",
                markup=False,
            )
    if not outcome.picture_problem:
        console.print(f"Picture: {outcome.picture}", soft_wrap=True, highlight=False)
    if outcome.directory is not None:
        console.print(f"Kept: {outcome.directory}", soft_wrap=True, highlight=False)
    verdict = "[bold green]Equal, bit for bit.[/]" if outcome.equal else "[bold red]NOT equal.[/]"
    console.print(f"{verdict} {outcome.seconds:.0f} s, seed {outcome.script.seed}")


def _killed(kill: Kill) -> tuple[str, str, str]:
    how = f"SIGKILL {kill.after_s * 1e3:.1f} ms into the save of step {kill.step}"
    return "kill", f"step {kill.step}", f"{how}; resumed by itself from step {kill.resumed}"


def _rewound(rewound: Rewound) -> tuple[str, str, str]:
    first, stop = rewound.skip
    left_out = f"batches of steps {first} to {stop - 1} left out"
    what = f"{rewound.reason}; back to step {rewound.to}, {left_out}"
    return "rewind", f"step {rewound.onset}", what


def _mark(*, ok: bool) -> str:
    return "[green]✓[/]" if ok else "[red]✗[/]"

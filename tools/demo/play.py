"""The main job, played for real: kills in the middle of saves, a loss spike, and the comparison."""

from __future__ import annotations

import importlib.util
import json
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ckpt.errors import CheckpointError, StoreFailed
from ckpt.wording import counted
from tools.demo import corpus, picture, report
from tools.demo.corpus import Format
from tools.demo.disturbed import Disturbed
from tools.demo.place import is_full, prepared
from tools.demo.report import Outcome, Story
from tools.demo.script import Script
from tools.demo.trainer import Event, Trainer, TrainerFailed

PICTURE = "lastgood-demo.png"


def demo(
    *,
    steps: int = 300,
    seed: int | None = None,
    format: Format = "array_record",
    directory: Path | None = None,
    keep: bool = False,
    break_restored: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Play the whole demo; `Outcome.equal` says whether it proved what it is to prove.

    steps: updates of each run. seed: of everything drawn; None draws one.
    directory: a new or empty one for all files; None uses a temporary one. Afterwards only the
        picture stays there (without `directory`: in the current one), or everything with `keep`.
    break_restored: flips one bit of one parameter when the run is resumed for the last time.
    console: shows progress and tables; None shows nothing.

    A picture that cannot be drawn takes nothing from the rest: see `Outcome.picture_problem`.

    Raises: `TrainerFailed`; `StoreFailed` for a place that cannot be written or is full; ValueError
    for arguments that make no sense; ModuleNotFoundError without the packages of the extra `demo`.
    """
    begun = time.monotonic()
    for package in ("optax", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"the demo needs {package}: pip install 'lastgood[demo]'")
    script = Script.drawn(steps, secrets.randbelow(10_000) if seed is None else seed)
    picture_path = (directory or Path.cwd()) / PICTURE
    place = prepared(directory, picture_path)
    try:
        with _progress(console) as progress:
            stage = Stage(script, place, format, break_restored, progress)
            outcome = stage.play(picture_path, kept=place if keep else None, begun=begun)
        if console is not None:
            report.show(outcome, console)
    except (OSError, CheckpointError, TrainerFailed) as error:
        if is_full(place, error):
            raise StoreFailed(
                f"{place}: the disk is full, so the demo could not go on; make room, or give --dir "
                "a directory on another disk"
            ) from error
        raise
    finally:
        if not keep:
            _cleared(place, picture_path)
            if directory is None:
                place.rmdir()
    return outcome


def _cleared(place: Path, picture_path: Path) -> None:
    for path in place.iterdir():
        if path != picture_path:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass(frozen=True)
class Stage:
    """Where the demo is played: its directory, and the terminal."""

    script: Script
    place: Path
    format: Format
    break_restored: bool
    progress: Progress

    def play(self, picture_path: Path, *, kept: Path | None, begun: float) -> Outcome:
        script = self.script
        self._say(f"seed {script.seed}: play the same again with --seed {script.seed}")
        pattern, poisoned = self._corpus()
        run = self._disturbed(pattern)
        skips = [list(skip) for rewound in run.rewinds[-1:] for skip in rewound.skips]
        reference = self._undisturbed(pattern, skips)
        # The optimizer's types are needed here, and jax with them: not before the runs are over.
        from tools.demo.compare import compare

        compared = compare(
            str(self.place / "run"), str(self.place / "reference"), pattern, script.seed
        )
        outcome = Outcome(
            script=script,
            format=self.format,
            run=run,
            reference=reference,
            checks=report.checks(script, run, poisoned),
            compared=tuple(compared),
            picture=picture_path,
            directory=kept,
            seconds=time.monotonic() - begun,
        )
        return picture.drawn(outcome)

    def _corpus(self) -> tuple[str, list[tuple[int, int]]]:
        """Write the corpus with noise where the plan will serve the poisoned batches.

        Returns its pattern and the poisoned examples.
        """
        script = self.script
        # Several times what both runs read, so that no record comes twice.
        records = corpus.pieces(limit=max(50_000, 4 * script.steps * corpus.BATCH_ROWS))
        pattern = corpus.write(self.place / "corpus", records, self.format)
        plan = corpus.pipeline(pattern, script.seed).plan
        bad = [int(record) for record in plan.records(script.poison)]
        corpus.write(self.place / "corpus", corpus.poisoned(records, bad, script.seed), self.format)
        size = sum(map(len, records)) / 1e6
        self._say(
            f"corpus: {len(records):,} records ({size:.1f} MB) of the standard library's source as "
            f"{self.format}; the {counted(len(bad), 'record')} that batches "
            f"{script.poison.start} to {script.poison.stop - 1} will hold are noise now"
        )
        return pattern, plan.span(0, script.poison.start, script.poison.stop)

    def _disturbed(self, pattern: str) -> Story:
        watch = self._watch("run")
        return Disturbed(
            self.script,
            start=lambda damage: self._trainer("run", pattern, ["--damage"] if damage else []),
            watch=watch,
            damage=self.break_restored,
        ).play()

    def _undisturbed(self, pattern: str, skips: list[list[int]]) -> Story:
        """The reference run: from scratch, knowing from the start what to leave out."""
        story, watch, begun = Story(), self._watch("reference"), time.monotonic()
        with self._trainer("reference", pattern, ["--skip", json.dumps(skips)]) as trainer:
            for event in trainer.events():
                watch(event)
                if event["event"] == "loss":
                    story.losses.append((event["step"], event["value"]))
                elif event["event"] == "saved":
                    story.saves.append((event["step"], event["seconds"]))
        story.seconds = time.monotonic() - begun
        return story

    def _trainer(self, run: str, pattern: str, more: list[str]) -> Trainer:
        script = self.script
        arguments = ["--corpus", pattern, "--run", str(self.place / run)]
        for name in ("steps", "every", "seed"):
            arguments += [f"--{name}", str(getattr(script, name))]
        return Trainer(
            [*arguments, *more], cache=self.place / "compiled", log=self.place / f"{run}.log"
        )

    def _watch(self, run: str) -> Callable[[Event], None]:
        """Shows the events of one run: a bar that moves, and a line for what is worth one."""
        task = self.progress.add_task(run, total=self.script.steps, loss="")

        def watch(event: Event) -> None:
            kind = event["event"]
            if kind == "loss":
                loss = f"loss {event['value']:.3f}"
                self.progress.update(task, completed=event["step"], loss=loss)
            elif kind == "resumed":
                self.progress.update(task, completed=event["step"])
                self._say(f"{run}: started, stands at step {event['step']}")
            elif kind == "rewound":
                first, stop = event["skip"]
                self.progress.update(task, completed=event["to"])
                self._say(
                    f"{run}: [bold magenta]{event['reason']}[/]; the guard went back to step "
                    f"{event['to']}, batches of steps {first} to {stop - 1} are left out"
                )
            elif kind == "killed":
                self._say(
                    f"{run}: [bold red]SIGKILL[/] {event['after_s'] * 1e3:.1f} ms into the save of "
                    f"step {event['step']}"
                )
            elif kind == "failed":
                # Without its saves the run proves nothing.
                raise TrainerFailed(f"{run}: a save failed: {event['message']}")
            elif kind == "done":
                self._say(f"{run}: done, {counted(event['step'], 'step')}")

        return watch

    def _say(self, text: str) -> None:
        self.progress.console.print(text, highlight=False)


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console or Console(quiet=True),
        disable=console is None,
    )

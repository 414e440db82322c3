"""Commands that measure training runs which save: what a save costs the loop, what comes back how
fast after a kill, and what an outage of the store does; and commands that measure the data plan."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tools.bench import interference as interfering
from tools.bench import outage as outages
from tools.bench import restart as restarts
from tools.bench.asking import WorkerFailedError, WrongValuesError, progress
from tools.bench.cases import STEP_S
from tools.bench.table import console

Directory = Annotated[
    Path | None, typer.Option("--dir", help="Where to write; default: a temporary directory.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
_PIPELINES = ("records", "rows", "tokens", "workers")
_PIPELINE_BYTES = 2 << 30
Scale = Annotated[float, typer.Option(min=1e-4, help="Of bytes.")]


def interference(
    pairs: Annotated[int, typer.Option(min=1)] = 5,
    saves: Annotated[int, typer.Option(min=1, help="Of a process; the first is apart.")] = 4,
    side: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(interfering.SIDES)}; may be given again."),
    ] = None,
    step_ms: Annotated[float, typer.Option(min=0.1, help="Of a step.")] = STEP_S * 1e3,
    scale: Scale = 1.0,
    as_json: AsJson = False,
    directory: Directory = None,
) -> None:
    """What a save costs a training loop that donates its state, ours and Orbax in turn.

    Exit codes: 0 done, 1 a side failed or restored wrong values, 2 wrong use.
    """
    sides = tuple(side or interfering.SIDES)
    for name in sides:
        if name not in interfering.SIDES:
            raise typer.BadParameter(
                f"wanted one of {', '.join(interfering.SIDES)}, found {name!r}"
            )
    with own_place(directory) as place, failures():
        plan = interfering.Plan(
            place, scale, pairs, saves, sides, step_s=step_ms / 1e3, tell=progress
        )
        must_fit(place, (saves + 1) * plan.nbytes)
        result = plan.measure()
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1))
    else:
        interfering.show(result, console())


def restart(
    pairs: Annotated[int, typer.Option(min=1)] = 5,
    scale: Scale = 1.0,
    as_json: AsJson = False,
    directory: Directory = None,
) -> None:
    """How fast a killed run goes on, from the arena, a cold local image, and a cold step.

    Exit codes: 0 done, 1 a process failed or restored wrong values, 2 wrong use.
    """
    with own_place(directory) as place, failures():
        plans = [
            restarts.Plan(place, scale * each, pairs, tell=progress) for each in restarts.SCALES
        ]
        must_fit(place, 4 * max(plan.nbytes for plan in plans))
        results = [plan.measure() for plan in plans]
    if as_json:
        typer.echo(json.dumps(restarts.to_json(results), indent=1))
    else:
        restarts.show(results, console())


def outage(
    away_s: Annotated[float, typer.Option(min=0.1, help="Seconds without the store.")] = 30.0,
    before_s: Annotated[float, typer.Option(min=0.1, help="Before it, and once more after.")] = 5.0,
    save_s: Annotated[float, typer.Option(min=0.01, help="Seconds between two saves.")] = 1.0,
    scale: Scale = 1.0,
    as_json: AsJson = False,
    directory: Directory = None,
) -> None:
    """A run whose shared store goes away while it trains, with a local tier before it.

    Exit codes: 0 everything due is in place, 1 it is not, or the run stopped, 2 wrong use.
    """
    with own_place(directory) as place, failures():
        plan = outages.Plan(place, scale, away_s, before_s, save_s, tell=progress)
        must_fit(place, plan.needed_bytes)
        result = plan.measure()
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=1))
    else:
        outages.show(result, console())
    if not result.is_in_place:
        raise typer.Exit(1)


def permute(
    rounds: Annotated[int, typer.Option(min=1, help="Blocks measured at each size.")] = 40,
    as_json: AsJson = False,
) -> None:
    """How many positions of a shuffled epoch a second: ours, Grain's order, and Grain itself.

    Exit codes: 0 done, 1 an order was wrong, 2 wrong use.
    """
    from tools.bench import permute as permuting  # Grain brings JAX, which others set up first

    with failures():
        results = [permuting.measure(n, rounds) for n in permuting.SIZES]
    if as_json:
        typer.echo(json.dumps(permuting.to_json(results), indent=1))
    else:
        permuting.show(results, console())


def packing(
    documents: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of an index; may be given again. Default: 1 and 10 million."),
    ] = None,
    packed: Annotated[int, typer.Option(min=1, help="Documents that Grain packs, too.")] = 20_000,
    as_json: AsJson = False,
) -> None:
    """Padding of packed rows, ours and Grain's; and what an index costs, once and at a seek.

    Exit codes: 0 done, 1 rows lost tokens, 2 wrong use.
    """
    from tools.bench import packing as packs  # Grain brings JAX, which others set up first

    with failures():
        padding = packs.paddings(packed)
        cost = [each for n in documents or (10**6, 10**7) for each in packs.costs(n)]
    if as_json:
        typer.echo(json.dumps(packs.to_json(padding, cost), indent=1))
    else:
        packs.show(padding, cost, console())


def seek(
    rounds: Annotated[int, typer.Option(min=1, help="Of each case.")] = 21,
    as_json: AsJson = False,
) -> None:
    """How long it takes to go to an example far into a run and to know its batch.

    Exit codes: 0 done, 1 data was read, or it was another batch, 2 wrong use.
    """
    from tools.bench import seek as seeking  # Grain brings JAX, which others set up first

    with failures():
        results = [seeking.measure(case, rounds) for case in seeking.CASES]
    if as_json:
        typer.echo(json.dumps(seeking.to_json(results), indent=1))
    else:
        seeking.show(results, console())


def pipeline(
    case: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(_PIPELINES)}; may be given again."),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1)] = 5,
    peers: Annotated[
        bool, typer.Option("--peers", help="Hugging Face datasets and MosaicML streaming, too.")
    ] = False,
    scale: Annotated[float, typer.Option(min=1e-4, help="Of records and batches.")] = 1.0,
    as_json: AsJson = False,
    directory: Directory = None,
) -> None:
    """Batches a second from the same files: ours, Grain, bare readers.

    Exit codes: 0 done, 1 a side served something else, 2 wrong use.
    """
    from tools.bench import pipeline as pipelines  # Grain brings JAX, which others set up first

    names = case or list(_PIPELINES)
    for name in names:
        if name not in _PIPELINES:
            raise typer.BadParameter(f"wanted one of {', '.join(_PIPELINES)}, found {name!r}")
    if peers and importlib.util.find_spec("datasets") is None:
        raise typer.BadParameter("--peers needs pip install -e '.[peers]'")
    with own_place(directory) as place, failures():
        must_fit(place, round(scale * _PIPELINE_BYTES))
        results = []
        for name in names:
            found = pipelines.case_of(name, place, scale, peers=peers)
            results.append(pipelines.measure(found, pairs, progress))
    if as_json:
        typer.echo(json.dumps(pipelines.to_json(results), indent=1))
    else:
        pipelines.show(results, console())


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Ended from outside: workers are stopped and what was written is removed, as by Ctrl-C."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def own_place(directory: Path | None) -> Iterator[Path]:
    """A directory of our own, removed at the end, also when we are told to stop."""
    with stoppable():
        place = Path(tempfile.mkdtemp(prefix="lastgood-bench-", dir=directory))
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    try:
        yield
    except (WrongValuesError, WorkerFailedError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def must_fit(place: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise typer.BadParameter(f"{place}: wanted {needed_bytes} bytes free, found {free}")

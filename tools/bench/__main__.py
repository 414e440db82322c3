"""The command line: `python -m tools.bench checkpoint`, and so on."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tools.bench.asking import progress
from tools.bench.cases import NAMES, cases_of
from tools.bench.commands import (
    failures,
    interference,
    must_fit,
    outage,
    own_place,
    packing,
    permute,
    pipeline,
    restart,
    seek,
    stoppable,
)
from tools.bench.conformance import conformance
from tools.bench.pairs import Plan
from tools.bench.sides import ORBAX, OURS, PEERS, PLAIN_ORBAX
from tools.bench.table import console, show, to_json

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
_DISK_FACTOR = 5  # bytes that one side may have on disk at a time, by those of the state


@app.callback()
def main() -> None:
    """Measure this project against others, on this machine, with the same bytes."""


@app.command()
def checkpoint(
    case: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(NAMES)}; may be given again.")
    ] = None,
    pairs: Annotated[
        int, typer.Option(min=1, help="The first is dropped, unless it is the only one.")
    ] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="PyTorch DCP and safetensors, too.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where to write; default: a temporary directory.")
    ] = None,
    scale: Annotated[float, typer.Option(min=1e-4, help="Of bytes, leaves and saves.")] = 1.0,
) -> None:
    """Save and restore, ours and Orbax in turn, each in fresh processes.

    Exit codes: 0 done, 1 a side failed or restored wrong values, 2 wrong use.
    """
    names = case or list(NAMES)
    for name in names:
        if name not in NAMES:
            raise typer.BadParameter(f"wanted one of {', '.join(NAMES)}, found {name!r}")
    found = [(name, each) for name in names for each in cases_of(name, scale)]
    with own_place(directory) as place, failures():
        must_fit(place, _DISK_FACTOR * max(each.nbytes for _, each in found))
        results = []
        for name, each in found:
            sides = [OURS]
            if each.rivals:
                sides.append(ORBAX)
            if each.rivals and not each.watched:
                sides.append(PLAIN_ORBAX)
                if peers and each.devices == 1:
                    sides += PEERS
            plan = Plan(place, scale, pairs, tuple(sides), tell=progress)
            results.append(plan.measure(each, name))
    if as_json:
        typer.echo(json.dumps(to_json(results), indent=1))
    else:
        show(results, console())


@app.command()
def damage(
    damages: Annotated[int, typer.Option(min=1, help="To our step, and to one of Orbax.")] = 1000,
    seed: Annotated[int | None, typer.Option(help="Default: another one each time.")] = None,
    zstd: Annotated[bool, typer.Option("--zstd", help="Compress the chunks of our step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """Damage the files of a step, and see who finds it: ours, TensorStore, Orbax.

    Exit codes: 0 all was found in our steps, 1 something was not, 2 wrong use.
    """
    # Before JAX is there: a leaf in several chunks, and no accelerator needed.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FOUR_DEVICES}".strip()
    from tools.bench import damage_table
    from tools.bench.damaged_run import survey

    drawn = time.time_ns() % 1_000_000 if seed is None else seed
    quiet = Console(stderr=True)
    with (
        stoppable(),
        tempfile.TemporaryDirectory(prefix="lastgood-damage-") as name,
        Progress(console=quiet, transient=True, disable=not quiet.is_terminal) as progress,
    ):
        task = progress.add_task("damages looked at", total=5 * damages)
        found = survey(
            Path(name),
            damages,
            drawn,
            compression="zstd" if zstd else None,
            tell=lambda: progress.advance(task),
        )
    if as_json:
        typer.echo(json.dumps(damage_table.to_json(found), indent=1))
    else:
        damage_table.show(found, console())
    if not all(each.is_found for each in found.ours):
        raise typer.Exit(1)


for command in (interference, restart, outage, permute, pipeline, packing, seek, conformance):
    app.command()(command)


if __name__ == "__main__":
    app(prog_name="python -m tools.bench")

"""Which faults of the field a data loader is free of: ours, Grain, and other loaders by wish."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from typing import Annotated, Final

import typer
from rich.console import Console

from datapipe.conformance import Loader, Report, Result, checks, run, table
from datapipe.conformance.check import LIMIT_S
from datapipe.conformance.ours import LOADER
from tools.bench.table import environment

_NAMES: Final = [check.name for check in checks]


def conformance(
    check: Annotated[
        list[str] | None, typer.Option(help="By name; may be given again. Default: all.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers", help="torchdata, too, if installed.")] = False,
    seed: Annotated[int, typer.Option(help="Of what the checks draw.")] = 0,
    limit_s: Annotated[float, typer.Option(min=0.1, help="Seconds for each check.")] = LIMIT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """Run the checks of `datapipe.conformance` on our loader and on others.

    Exit codes: 0 ours passes, 1 it fails a check, 2 wrong use.
    """
    for name in check or ():
        if name not in _NAMES:
            raise typer.BadParameter(f"wanted one of {', '.join(_NAMES)}, found {name!r}")
    os.environ["JAX_PLATFORMS"] = "cpu"  # in the processes of the checks, too
    chosen = [each for each in checks if not check or each.name in check]
    quiet = Console(stderr=True)
    reports: list[Report] = []
    for loader in _loaders(peers=peers):
        name = loader.name

        def tell(result: Result, name: str = name) -> None:
            quiet.print(f"{name}: {result.check}: {result.status}", highlight=False)

        reports.append(run(loader, seed=seed, limit_s=limit_s, checks=chosen, tell=tell))
    if as_json:
        found = {**environment(), "loaders": [report.to_json() for report in reports]}
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(table(reports))
    if not reports[0].is_conformant:
        raise typer.Exit(1)


def _loaders(*, peers: bool) -> Iterator[Loader]:
    from tools.bench import conformance_peers

    yield LOADER
    yield conformance_peers.GRAIN
    yield conformance_peers.ELASTIC
    if peers and importlib.util.find_spec("torchdata"):
        from tools.bench.conformance_torch import TORCHDATA

        yield TORCHDATA

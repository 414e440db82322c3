"""Results as tables for people, and as one JSON value."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.bench.pairs import RATIOS, Result
from tools.bench.sides import OURS
from tools.bench.spreads import Spread

_PACKAGES = (
    "lastgood",
    "jax",
    "jaxlib",
    "orbax-checkpoint",
    "tensorstore",
    "numpy",
    "grain",
    "torch",
    "safetensors",
    "array_record",
    "pyarrow",
    "datasets",
    "mosaicml-streaming",
)


def environment() -> dict[str, Any]:
    """Versions and machine."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def to_json(results: Sequence[Result]) -> dict[str, Any]:
    """All results with what they depend on."""
    return {**environment(), "cases": [result.to_json() for result in results]}


WIDTH = 170
"""Columns that a table needs."""

_LEGEND = (
    "first: the blocking part of the first save of a process, which blocking and durable leave "
    "out; limit: the same bytes copied (as blocking), written and read by hand"
)


def console() -> Console:
    """As wide as a table needs; narrower only where COLUMNS asks for it, not in a terminal."""
    found = Console()
    asked = os.environ.get("COLUMNS", "").isdigit() and not found.is_terminal
    return found if asked or found.width >= WIDTH else Console(width=WIDTH)


def show(results: Sequence[Result], console: Console) -> None:
    """Print one table per case."""
    for result in results:
        _show(result, console)
    console.print(_LEGEND, highlight=False)
    closing(console)


def closing(console: Console) -> None:
    """Print what the figures depend on."""
    where = environment()
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    console.print(f"{where['cpus']} CPUs, Python {where['python']}, {versions}", highlight=False)


def _show(result: Result, console: Console) -> None:
    cache = sorted({run.cache for runs in result.runs.values() for run in runs})
    counted = len(result.limits)
    console.print(
        f"[bold]{result.case.name}[/]: {result.case.about}; median (least to greatest) of "
        f"{counted} of {result.pairs} pairs; page cache at restore: {', '.join(cache)}",
        highlight=False,
    )
    table = Table()
    for heading in ("", "blocking", "first", "durable", "restore", "peak PSS", "on disk"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for side in result.runs:
        peak = max(result.peaks[side])
        table.add_row(
            side,
            seconds(result.spread(side, "blocking_s")),
            seconds(result.spread(side, "first_blocking_s")),
            seconds(result.spread(side, "durable_s")),
            seconds(result.spread(side, "restore_s")),
            _size(peak),
            _size(result.runs[side][-1].disk_bytes),
        )
    table.add_section()
    for side in result.runs:
        if side != OURS and OURS in result.runs:
            found = {figure: times(result.ratio(figure, side)) for figure in RATIOS}
            row = (found["blocking_s"], "", found["durable_s"], found["restore_s"])
            table.add_row(f"{OURS} / {side}", *row, "", "")
    table.add_section()
    table.add_row(
        f"limit ({result.limits[-1]['write']})",
        seconds(result.limit("copy_s")),
        "",
        seconds(result.limit("write_s")),
        seconds(result.limit("read_s")),
        "",
        _size(result.case.nbytes),
    )
    table.add_row(
        f"{OURS} / limit",
        times(result.to_limit("blocking_s", "copy_s")),
        "",
        times(result.to_limit("durable_s", "write_s")),
        times(result.to_limit("restore_s", "read_s")),
        "",
        "",
    )
    console.print(table)
    for side in result.runs:
        growth = result.growth_bytes(side)
        if growth is not None:
            pss = result.runs[side][-1].pss_bytes
            console.print(
                f"{side}: PSS {_size(pss[1])} after the second save, {_size(pss[-1])} "
                f"after save {len(pss)}: {growth / 2**20:+.3f} MiB a save",
                highlight=False,
            )


def seconds(spread: Spread) -> str:
    """Median and range, in the unit of the median."""
    figures = (spread.median, spread.least, spread.greatest)
    scale, unit = (1.0, "s") if spread.median >= 1 else (1e3, "ms")
    median, least, greatest = (f"{scale * figure:.3g}" for figure in figures)
    return f"{median} {unit} ({least}..{greatest})"


def milliseconds(spread: Spread) -> str:
    """Median and range, if there is one, where the heading says the unit."""
    figures = [1e3 * found for found in (spread.median, spread.least, spread.greatest)]
    median, least, greatest = (f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}" for ms in figures)
    return median if spread.least == spread.greatest else f"{median} ({least}..{greatest})"


def times(spread: Spread | None) -> str:
    """A ratio."""
    if spread is None:
        return ""
    return f"{spread.median:.3g} ({spread.least:.3g}..{spread.greatest:.3g})"


def _size(nbytes: float) -> str:
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:,.0f} MiB"
    return f"{nbytes / 2**10:,.1f} KiB" if nbytes else "-"

"""Batches a second of whole pipelines: ours, others, and what can be done by hand.

Beside wall time it measures processor time, over all threads: on a machine with other work a side
with more threads gets more of the processor, and only processor times can be compared.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grain
import numpy as np
from rich.console import Console
from rich.table import Table

import formats
from datapipe import Pipeline
from datapipe.prefetch.pace import Pace
from tools.bench import pipeline_sides as sides
from tools.bench.asking import WrongValuesError
from tools.bench.pipeline_sides import Side
from tools.bench.spreads import Spread
from tools.bench.table import closing, environment, times

BATCH_SIZE: Final = 256
RECORDS: Final = 200_000
BATCHES: Final = 1500
OURS: Final = "lastgood"
NAMES: Final = ("records", "rows", "tokens", "workers")
_SLOW_BATCH_SIZE: Final = 32  # of the case in which an example takes a millisecond
_SLOW_PART: Final = 1 / 20


@dataclass(frozen=True)
class Case:
    """Sides that serve the same data; the first one is ours.

    batch_size: examples of a batch.
    batches: that a side with `part` 1 makes.
    planning: the pipeline whose times of planning and of reading are compared; None: neither is.
    """

    name: str
    about: str
    batch_size: int
    sides: tuple[Side, ...]
    batches: int
    planning: Pipeline | None = None


@dataclass(frozen=True)
class Result:
    """What was measured, by side: one figure for each pair, in the order of the pairs.

    rates: batches a second.
    cpu_s: processor time of a batch, without that of workers.
    planning_share: time of planning by time of reading, each measured alone; None: not measured.
    window_bytes: of the records of one window of our iterator.
    """

    case: Case
    rates: dict[str, tuple[float, ...]]
    cpu_s: dict[str, tuple[float, ...]]
    planning_share: Spread | None
    window_bytes: int

    def ratio(self, side: str) -> Spread:
        """Of our rate to that of a side."""
        return Spread.of_ratios(self.rates[self.case.sides[0].name], self.rates[side])

    def cpu_ratio(self, side: str) -> Spread:
        """Of the processor time of a side to ours."""
        return Spread.of_ratios(self.cpu_s[side], self.cpu_s[self.case.sides[0].name])

    def to_json(self) -> dict[str, Any]:
        """A JSON value; each figure as least, median and greatest."""
        first, *others = self.rates
        share = self.planning_share
        return {
            "case": self.case.name,
            "about": self.case.about,
            "batch_size": self.case.batch_size,
            "batches_per_s": {side: Spread.of(each).to_json() for side, each in self.rates.items()},
            "cpu_s": {side: Spread.of(each).to_json() for side, each in self.cpu_s.items()},
            "cpu_ratios": {f"{x} / {first}": self.cpu_ratio(x).to_json() for x in others},
            "ratios": {f"{first} / {side}": self.ratio(side).to_json() for side in others},
            "planning_share": None if share is None else share.to_json(),
            "window_bytes": self.window_bytes,
        }


# -- cases -----------------------------------------------------------------------------------------


def case_of(name: str, place: Path, scale: float, *, peers: bool) -> Case:
    """The case of a name in `NAMES`, with its files in `place`."""
    records = max(4 * BATCH_SIZE * Pace().window, round(RECORDS * scale))
    batches = max(8, round(BATCHES * scale))
    directory = place / name
    directory.mkdir()
    return _CASES[name](directory, records, batches, peers)


def _records(directory: Path, records: int, batches: int, peers: bool) -> Case:
    sides.write_records(directory, records)
    source = formats.open_source(directory / "*.array_record")
    pipe = Pipeline(source, batch_size=BATCH_SIZE, seed=sides.SEED)
    few = grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)
    found = [
        sides.ours(OURS, pipe),
        sides.of_grain("grain", directory, BATCH_SIZE),
        sides.of_grain("grain, 2 threads", directory, BATCH_SIZE, few),
        sides.bare_records("array_record, a read a batch", directory, BATCH_SIZE),
        sides.reads("our source, a read a batch", source, BATCH_SIZE),
    ]
    about = f"ArrayRecord, {len(source):,} records of 1 KiB in {sides.FILES} files"
    if peers and importlib.util.find_spec("streaming") is not None:
        shards = directory / "shards"
        sides.write_shards(shards, records)
        found.append(sides.of_streaming("streaming", shards, BATCH_SIZE))
    elif peers:
        about += "; MosaicML streaming is not installed"
    return Case("records", about, BATCH_SIZE, tuple(found), batches, pipe)


def _rows(directory: Path, records: int, batches: int, peers: bool) -> Case:
    path = directory / "rows.parquet"
    sides.write_rows(path, records)
    cache = directory / "cache"
    source = formats.open_source(path, cache=cache)
    pipe = Pipeline(source, batch_size=BATCH_SIZE, seed=sides.SEED)
    found = [
        sides.ours(OURS, pipe),
        sides.reads("our source, a read a batch", source, BATCH_SIZE),
    ]
    if peers:
        found += [
            sides.of_datasets("datasets", path, BATCH_SIZE, None),
            sides.of_datasets("datasets, as arrow", path, BATCH_SIZE, "arrow"),
        ]
    about = f"Parquet through the cache, {len(source):,} rows of 1 KiB"
    return Case("rows", about, BATCH_SIZE, tuple(found), batches, pipe)


def _tokens(directory: Path, records: int, batches: int, peers: bool) -> Case:
    path = directory / "tokens.bin"
    sides.write_tokens(path, records)
    source = formats.open_source(path, window=sides.WINDOW)
    pipe = Pipeline(source, batch_size=BATCH_SIZE, seed=sides.SEED)
    found = (
        sides.ours(OURS, pipe),
        sides.ours(f"{OURS}, prefetch=0", pipe, prefetch=0),
        sides.bare_tokens("numpy, mapped, a gather a batch", path, BATCH_SIZE),
        sides.reads("our source, a read a batch", source, BATCH_SIZE),
    )
    about = f"token file, {len(source):,} windows of {sides.WINDOW} uint16"
    return Case("tokens", about, BATCH_SIZE, found, 2 * batches, pipe)


def _workers(directory: Path, records: int, batches: int, peers: bool) -> Case:
    sides.write_records(directory, records)
    source = formats.open_source(directory / "*.array_record")
    pipe = Pipeline(source, batch_size=_SLOW_BATCH_SIZE, seed=sides.SEED)
    pipe = pipe.map(sides.burn, version="1")
    found = (
        sides.ours(f"{OURS}, workers=2", pipe, workers=2),
        sides.ours(f"{OURS}, in-process", pipe),
    )
    about = f"a function of {1e3 * sides.BURN_S:g} ms an example"
    return Case("workers", about, _SLOW_BATCH_SIZE, found, max(8, round(batches * _SLOW_PART)))


_CASES: Final[dict[str, Callable[[Path, int, int, bool], Case]]] = {
    "records": _records,
    "rows": _rows,
    "tokens": _tokens,
    "workers": _workers,
}


# -- measuring -------------------------------------------------------------------------------------


def measure(case: Case, pairs: int, tell: Callable[[str], None] = lambda text: None) -> Result:
    """Measures all sides in turn, each from a fresh start; the first batch does not count.

    Raises:
      WrongValuesError: a batch has another number of rows.
    """
    rates: dict[str, list[float]] = {side.name: [] for side in case.sides}
    cpu_s: dict[str, list[float]] = {side.name: [] for side in case.sides}
    for pair in range(pairs):
        first = pair % len(case.sides)
        for side in (*case.sides[first:], *case.sides[:first]):
            tell(f"{case.name}: pair {pair + 1} of {pairs}: {side.name}")
            rate, cpu = _rate(side, case)
            rates[side.name].append(rate)
            cpu_s[side.name].append(cpu)
    shares = []
    if case.planning is not None:
        shares = [_planning_share(case.planning, case.batches) for _ in range(pairs)]
    return Result(
        case,
        {name: tuple(each) for name, each in rates.items()},
        {name: tuple(each) for name, each in cpu_s.items()},
        Spread.of(shares) if shares else None,
        Pace().window * case.batch_size * sides.RECORD_BYTES,
    )


def _rate(side: Side, case: Case) -> tuple[float, float]:
    """Batches a second, and seconds of the processor for a batch.

    The side has just been started. What its threads have made ahead when the first batch is there
    costs it no time: a tenth of all batches at most with Grain's defaults, a percent with ours.
    """
    count = max(4, round(case.batches * side.part))
    with side.open() as make:
        found = _size(make())
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            batch = make()
        taken, cpu = time.perf_counter() - begun, time.process_time() - cpu
    if {found, _size(batch)} != {case.batch_size}:
        raise WrongValuesError(
            f"{side.name}, {case.name}: wanted batches of {case.batch_size}, "
            f"found {found} and {_size(batch)}"
        )
    return count / taken, cpu / count


def _size(batch: Any) -> int:
    """Rows."""
    return len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch)


def _planning_share(pipe: Pipeline, batches: int) -> float:
    """Time to plan windows by the time to read their records, as processor time of this thread."""
    (source,) = pipe.sources.values()
    size, position = Pace().window, 0
    planning = reading = 0.0
    for _ in range(-(-batches // size)):
        begun = time.thread_time()
        examples = pipe.plan.examples(position, size)
        items = pipe.plan.locate(np.concatenate(examples)).items
        planned = time.thread_time()
        source.read(items)
        planning += planned - begun
        reading += time.thread_time() - planned
        position = int(examples[-1][-1]) + 1
    return planning / reading


# -- reporting -------------------------------------------------------------------------------------


def to_json(results: Sequence[Result]) -> dict[str, Any]:
    """All results with what they depend on."""
    return {**environment(), "cases": [result.to_json() for result in results]}


def show(results: Sequence[Result], console: Console) -> None:
    """Print one table per case."""
    for result in results:
        case = result.case
        pairs = len(next(iter(result.rates.values())))
        console.print(
            f"[bold]{case.name}[/]: {case.about}, batches of {case.batch_size}; medians (least to "
            f"greatest) of {pairs} pairs",
            highlight=False,
        )
        first = case.sides[0].name
        table = Table()
        for heading in ("", "batches/s", f"{first} / this", "CPU ms a batch", "this / ours, CPU"):
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for side, rates in result.rates.items():
            spread = Spread.of(rates)
            ratio = "" if side == first else times(result.ratio(side))
            cpu_ratio = "" if side == first else times(result.cpu_ratio(side))
            table.add_row(
                side,
                f"{spread.median:,.0f} ({spread.least:,.0f} to {spread.greatest:,.0f})",
                ratio,
                f"{1e3 * Spread.of(result.cpu_s[side]).median:.3g}",
                cpu_ratio,
            )
        console.print(table)
        text = (
            f"a window holds {result.window_bytes / 2**20:.2g} MiB of records, two are held at most"
        )
        if result.planning_share is not None:
            text += f"; planning takes {100 * result.planning_share.median:.2g} % of reading"
        console.print(text, highlight=False)
    closing(console)

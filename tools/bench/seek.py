"""What it costs to go to an example far into a run: to restore a state there, and to plan on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from datapipe.iterator import Iterator
from datapipe.pipeline import Pipeline
from formats.source import BLOCK, Source, Spec
from tools.bench.asking import WrongValuesError
from tools.bench.spreads import Spread
from tools.bench.table import closing, environment

RECORDS: Final = 10**9
EXAMPLE: Final = 256 * 10**6
SKIPS: Final = 1000
BAR_S: Final = 5e-3
RESTORE, AGAIN = "restored and planned", "another seek"
_BATCH: Final = 256
_SKIP_LENGTH: Final = 256


class Numbered(Source):
    """So many records that nobody has: reading is counted."""

    def __init__(self, records: int) -> None:
        self._records = records
        self.reads = 0

    def __len__(self) -> int:
        return self._records

    def read(self, indices: NDArray[Any] | Sequence[int]) -> list[bytes]:
        """As many empty records."""
        self.reads += 1
        return [b""] * len(indices)

    @property
    def spec(self) -> Spec:
        """No columns."""
        return Spec()

    def fingerprint(self) -> dict[str, Any]:
        """Its length."""
        return {"format": "numbered", "records": self._records, "digest": str(self._records)}

    def where(self, index: int) -> str:
        """Its number."""
        return f"record {index}"

    def close(self) -> None:
        """Nothing is open."""


def _single() -> dict[str, Source]:
    return {"web": Numbered(RECORDS)}


def _mixed() -> dict[str, Source]:
    shares = {"web": 6, "code": 3, "books": 1}
    return {name: Numbered(RECORDS // 10 * share) for name, share in shares.items()}


CASES: Final[Mapping[str, tuple[Callable[[], dict[str, Source]], dict[str, Any], int]]] = {
    "plain": (_single, {}, 0),
    "plain, skips": (_single, {}, SKIPS),
    "plain, skipped records": (_single, {"skip_records": True}, SKIPS),
    "mixed": (_mixed, {}, 0),
    "mixed, skips": (_mixed, {}, SKIPS),
    "mixed, skipped records": (_mixed, {"skip_records": True}, SKIPS),
    "blocks": (_single, {"shuffle": "blocks"}, 0),
}
"""By name: sources, options of the pipeline, and skips of a batch each before the example."""


@dataclass(frozen=True)
class Result:
    """Seconds of a case, for each step one figure a round.

    `RESTORE`: a state is set in a new pipeline, and the records of the next batch are known.
    `AGAIN`: the same iterator seeks to somewhere else, and the records of a batch there are known.
    """

    case: str
    seconds: dict[str, tuple[float, ...]]
    state_bytes: int

    @property
    def meets(self) -> bool:
        """Whether the slower of the two, by their medians, is within the bar."""
        return max(Spread.of(each).median for each in self.seconds.values()) <= BAR_S

    def to_json(self) -> dict[str, Any]:
        seconds = {step: Spread.of(each).to_json() for step, each in self.seconds.items()}
        return {
            "case": self.case,
            "seconds": seconds,
            "state_bytes": self.state_bytes,
            "meets": self.meets,
        }


def measure(case: str, rounds: int) -> Result:
    """Each round has a seed of its own, so that nothing is known from the one before.

    Raises:
      WrongValuesError: data was read, or a batch is not the one at its example.
    """
    made, options, skips = CASES[case]
    seconds: dict[str, list[float]] = {RESTORE: [], AGAIN: []}
    state_bytes = 0
    for round_ in range(-1, rounds):  # the first one imports and warms up: not counted
        sources = made()
        pipe = Pipeline(sources, batch_size=_BATCH, seed=1 + round_, **options)
        with pipe.iterator(prefetch=0) as iterator:
            state = _state(iterator, skips)
            state_bytes = len(json.dumps(state, separators=(",", ":")))
            restore = partial(iterator.set_state, state)
            seek = partial(iterator.seek, EXAMPLE // 3 + round_)
            found = {
                RESTORE: _timed(iterator, restore, case),
                AGAIN: _timed(iterator, seek, case),
            }
        if any(source.reads for source in sources.values() if isinstance(source, Numbered)):
            raise WrongValuesError(f"{case}: a seek read data")
        if round_ >= 0:
            for step, taken in found.items():
                seconds[step].append(taken)
    return Result(case, {step: tuple(each) for step, each in seconds.items()}, state_bytes)


def _state(iterator: Iterator, skips: int) -> dict[str, Any]:
    """One at the example, with skips spread over all that comes before."""
    gap = EXAMPLE // (skips + 1) - _SKIP_LENGTH
    return {**iterator.get_state(), "next_example": EXAMPLE, "skips": [gap, _SKIP_LENGTH] * skips}


def _timed(iterator: Iterator, go: Callable[[], None], case: str) -> float:
    begun = time.perf_counter()
    go()
    plan, at = iterator.plan, iterator.next_example
    (examples,) = plan.examples(at)
    located = plan.locate(examples)
    taken = time.perf_counter() - begun
    source, item, epoch = (
        int(each[0]) for each in (located.sources, located.items, located.epochs)
    )
    ordinal = plan.order.ordinals(int(examples[0]))[source]
    back = list(plan.order.streams[source].ordinals(item, range(epoch, epoch + 1)))
    if examples.size != _BATCH or examples[0] < at or back != [ordinal]:
        raise WrongValuesError(f"{case}: not the batch at example {at}")
    if np.unique(np.stack([located.sources, located.items]), axis=1).shape[1] != _BATCH:
        raise WrongValuesError(f"{case}: a record comes twice in the batch at example {at}")
    return taken


def to_json(results: Sequence[Result]) -> dict[str, Any]:
    """All results with what they depend on."""
    return {
        **environment(),
        "records": RECORDS,
        "example": EXAMPLE,
        "bar_s": BAR_S,
        "cases": [result.to_json() for result in results],
    }


def show(results: Sequence[Result], console: Console) -> None:
    """Print one table."""
    rounds = len(results[0].seconds[RESTORE])
    console.print(
        f"[bold]seek[/]: ms to example {EXAMPLE:,} of {RECORDS:,} records until the records of the "
        f"next batch are known, nothing read; medians (least to greatest) of {rounds} rounds; the "
        f"bar is {BAR_S * 1e3:g} ms",
        highlight=False,
    )
    table = Table()
    table.add_column("case", no_wrap=True)
    for heading in (RESTORE, AGAIN, "state, bytes", "within the bar"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        cells = [_milliseconds(result.seconds[step]) for step in (RESTORE, AGAIN)]
        within = "yes" if result.meets else "no"
        table.add_row(result.case, *cells, f"{result.state_bytes:,}", within)
    console.print(table)
    console.print(
        f"skips: {SKIPS:,} of {_SKIP_LENGTH} examples each; blocks: of {BLOCK:,} records, whose "
        "order is an index, made once an epoch",
        highlight=False,
    )
    closing(console)


def _milliseconds(seconds: Sequence[float]) -> str:
    spread = Spread.of(seconds)
    figures = (spread.median * 1e3, spread.least * 1e3, spread.greatest * 1e3)
    return "{:.3g} ({:.3g} to {:.3g})".format(*figures)

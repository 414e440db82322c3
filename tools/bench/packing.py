"""Packing: the share of padding, ours and Grain's, and what the index costs, once and at a seek."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import grain
import numpy as np
from grain.experimental import BestFitPackIterDataset, FirstFitPackIterDataset
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from datapipe.order.plan import Plan
from datapipe.order.streams import Orders
from datapipe.sources.concatenation import Concatenation
from datapipe.sources.indexes import Lengths
from datapipe.sources.packing import Bins, Strategy, pack
from datapipe.sources.pieces import Pieces
from tools.bench.asking import WrongValuesError
from tools.bench.spreads import Spread
from tools.bench.table import closing, environment

CAPACITY: Final = 2048
WINDOWS: Final = (512, 4096, 16384)
GRAIN_BINS: Final = (64, 256, 1024)
STRATEGIES: Final[tuple[Strategy, ...]] = ("first-fit", "best-fit")
_GRAIN: Final = {"first-fit": FirstFitPackIterDataset, "best-fit": BestFitPackIterDataset}
_SEED: Final = 7
_BATCH: Final = 256
_SEEKS: Final = 21


@dataclass(frozen=True)
class Padding:
    """One way to pack: `scope` is our window in documents, or Grain's number of bins."""

    side: str
    strategy: str
    scope: int
    share: float
    """Padding in all tokens of all rows, 0 to 1."""
    seconds: float
    """To pack: ours is the index alone, Grain's makes the rows."""


@dataclass(frozen=True)
class Cost:
    """What an index of so many documents takes."""

    index: str
    documents: int
    rows: int
    build_s: float
    seek_s: Spread
    """From an example to the pieces of its batch of 256 rows, in the index that is built."""
    file_bytes: int
    load_s: float
    """Of a saved index, checked; 0 where it is not saved."""


def drawn(documents: int) -> NDArray[np.int64]:
    """Tokens of documents as in crawled text: log-normal, median 490, and a tenth above 2,048."""
    rng = np.random.default_rng(_SEED)
    return np.minimum(rng.lognormal(6.2, 1.1, documents).astype(np.int64) + 1, 100_000)


def paddings(documents: int) -> list[Padding]:
    """Ours and Grain's over the same documents, cut to a row, since Grain takes no longer ones.

    Raises:
      WrongValuesError: rows do not hold the tokens of the documents.
    """
    lengths = np.minimum(drawn(documents), CAPACITY)
    found = []
    for strategy, window in itertools.product(STRATEGIES, WINDOWS):
        bins, taken = _timed(
            partial(pack, Lengths.of(lengths), CAPACITY, window=window, strategy=strategy)
        )
        if int(bins.lengths.sum()) != int(lengths.sum()):
            raise WrongValuesError(f"{strategy}, window {window}: other tokens (seed {_SEED})")
        found.append(Padding("lastgood", strategy, window, bins.padding_share, taken))
    for strategy, bins_count in itertools.product(STRATEGIES, GRAIN_BINS):
        rows, taken = _timed(partial(_grain_rows, lengths, strategy, bins_count))
        share = 1 - int(lengths.sum()) / (rows * CAPACITY)
        found.append(Padding("grain", strategy, bins_count, share, taken))
    return found


def _grain_rows(lengths: NDArray[np.int64], strategy: str, bins: int) -> int:
    tokens = np.ones(CAPACITY, np.int32)
    documents = [{"tokens": tokens[:length]} for length in lengths.tolist()]
    packed = _GRAIN[strategy](
        grain.MapDataset.source(documents).to_iter_dataset(),
        length_struct={"tokens": CAPACITY},
        num_packing_bins=bins,
        shuffle_bins=False,
    )
    rows = held = 0
    for row in packed:
        rows += 1
        held += int(row["tokens"].sum())
    if held != int(lengths.sum()):
        raise WrongValuesError(f"Grain, {strategy}, {bins} bins: {held} tokens (seed {_SEED})")
    return rows


def costs(documents: int) -> list[Cost]:
    """Of bins, and of concatenation with its index of an epoch."""
    lengths = Lengths.of(drawn(documents))
    found = []
    for strategy in STRATEGIES:
        bins, build_s = _timed(
            partial(pack, lengths, CAPACITY, window=WINDOWS[-1], strategy=strategy)
        )
        plan = Plan.of(len(bins), _BATCH, seed=_SEED)
        seek_s = _seeks(plan, partial(_of_bins, bins))
        size, load_s = _saved(bins, lengths)
        found.append(Cost(strategy, documents, len(bins), build_s, seek_s, size, load_s))
    laid = Concatenation(lengths, CAPACITY, Orders("global", documents, _SEED, 0))
    _, build_s = _timed(lambda: laid.cut(0))
    plan = Plan.of(len(laid), _BATCH, seed=_SEED, shuffle="none")
    seek_s = _seeks(plan, lambda epochs, items: laid.pieces(int(epochs[0]), items))
    found.append(Cost("concatenate", documents, len(laid), build_s, seek_s, 0, 0.0))
    return found


def _seeks(plan: Plan, pieces: Callable[[NDArray[np.int64], NDArray[np.int64]], Pieces]) -> Spread:
    """From examples all over the first epoch."""
    places = np.linspace(0, plan.order.streams[0].items - _BATCH, _SEEKS, dtype=np.int64).tolist()
    taken = []
    for place in [places[0], *places]:  # the first makes keys and warms caches: not counted
        begun = time.perf_counter()
        located = plan.locate(plan.examples(place)[0])
        pieces(located.epochs, located.items)
        taken.append(time.perf_counter() - begun)
    return Spread.of(taken[1:])


def _of_bins(bins: Bins, epochs: NDArray[np.int64], items: NDArray[np.int64]) -> Pieces:
    return bins.pieces(items)


def _saved(bins: Bins, lengths: Lengths) -> tuple[int, float]:
    with tempfile.TemporaryDirectory(prefix="lastgood-bench-") as place:
        path = Path(place) / "bins"
        bins.save(path)
        _, load_s = _timed(lambda: Bins.load(path, bins.made, lengths))
        return path.stat().st_size, load_s


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begun = time.perf_counter()
    return work(), time.perf_counter() - begun


def to_json(padding: Sequence[Padding], cost: Sequence[Cost]) -> dict[str, Any]:
    """All figures with what they depend on."""
    return {
        **environment(),
        "capacity": CAPACITY,
        "padding": [vars(each) for each in padding],
        "cost": [vars(each) | {"seek_s": each.seek_s.to_json()} for each in cost],
    }


def show(padding: Sequence[Padding], cost: Sequence[Cost], console: Console) -> None:
    """Print two tables."""
    console.print(f"[bold]packing[/]: rows of {CAPACITY:,} tokens", highlight=False)
    _print(
        console,
        ("side", "strategy", "window, or bins of Grain", "padding", "seconds"),
        [
            (
                each.side,
                each.strategy,
                f"{each.scope:,}",
                f"{each.share:.2%}",
                f"{each.seconds:.2f}",
            )
            for each in padding
        ],
    )
    _print(
        console,
        ("index", "documents", "rows", "build", "a document", "seek", "file", "load"),
        [
            (
                each.index,
                f"{each.documents:,}",
                f"{each.rows:,}",
                f"{each.build_s:.2f} s",
                f"{each.build_s / each.documents * 1e6:.2f} us",
                f"{each.seek_s.median * 1e3:.2f} ms (to {each.seek_s.greatest * 1e3:.2f})",
                f"{each.file_bytes / 1e6:.0f} MB" if each.file_bytes else "none",
                f"{each.load_s:.2f} s" if each.file_bytes else "",
            )
            for each in cost
        ],
    )
    closing(console)


def _print(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)

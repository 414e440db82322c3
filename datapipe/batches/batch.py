"""Making a batch from its rows: records through the functions of the user into one tree.

The records are read (`datapipe.batches.reading`), each goes through the functions of examples, the
examples are stacked, and the batch goes through the functions of batches. A record that turns out
to be bad on the way gives its row to a substitute, which starts from the beginning; the other rows
stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe.batches.cost import Cost
from datapipe.batches.faults import Fault, Tolerance
from datapipe.batches.reading import ReadRows, Reads, has_trees, places, read_or_replace
from datapipe.batches.replacing import Replacing
from datapipe.batches.returned import USUAL, refuse_no_example, refuse_other_rows
from datapipe.batches.stack import objects, stack
from datapipe.batches.transforms import Transform, generator
from datapipe.order.rows import Rows
from datapipe.sizes import size_of
from formats.errors import Mismatch, is_of_a_record

if TYPE_CHECKING:
    from datapipe.batches.substitutes import Replaced
    from formats.source import Batch, Source


@dataclass(frozen=True)
class Recipe:
    """What to read, what to do to it, and what to do about bad records.

    sources: by number.
    transforms: functions of examples, then functions of batches.
    seed: of `.random_map`.
    """

    sources: tuple[Source, ...]
    transforms: tuple[Transform, ...]
    seed: int
    tolerance: Tolerance = field(default_factory=Tolerance)

    @cached_property
    def has_trees(self) -> bool:
        """Whether a source gives trees, which are stacked example by example."""
        return any(map(has_trees, self.sources))

    @cached_property
    def only_reads(self) -> bool:
        """Whether a batch is what was read: no function is called and nothing is stacked."""
        return not (self.transforms or self.has_trees)


class Made(NamedTuple):
    """A batch, the bad records that were found in making it, and what it cost."""

    batch: Any
    faults: tuple[Fault, ...]
    cost: Cost


def make(recipe: Recipe, planned: Rows, known: Replaced, done: ReadRows | None, cost: Cost) -> Made:
    """One batch.

    Args:
      recipe: sources and transforms.
      planned: its rows.
      known: the records that are replaced.
      done: these rows with substitutes for `known`, read already; None: they are read here.
      cost: what the batch has cost so far; it is added to.

    Raises:
      BadRecord: a record is bad and not to be replaced.
      Mismatch: see `stack`; or a function returns what it must not (`datapipe.batches.returned`).
      Whatever sources and functions raise that is no fault of a record, with a note on the place.
    """
    replacing = Replacing(recipe.sources, recipe.tolerance, known)
    each = [transform for transform in recipe.transforms if transform.kind != "map_batch"]
    if each or recipe.has_trees:
        batch = _mapped(recipe, each, planned, replacing, done, cost)
    else:
        if done is None:
            with cost.of("reading"):
                done = read_or_replace(recipe.sources, planned, replacing)
        with cost.of("stacking"):
            batch = _as_read(recipe.sources, done)
    for number, transform in enumerate(recipe.transforms[len(each) :], start=len(each) + 1):
        try:
            with cost.of("functions"):
                batch = transform.fn(batch)
                refuse_other_rows(batch, planned.size, transform.told(number))
        except Exception as error:
            first, last = int(planned.examples[0]), int(planned.examples[-1])
            error.add_note(f"in .{transform.label} of the batch of examples {first} to {last}")
            raise
    cost.records = planned.size
    cost.size_bytes = size_of(batch)
    return Made(batch, replacing.found, cost)


# -- examples --------------------------------------------------------------------------------------


def _mapped(
    recipe: Recipe,
    transforms: Sequence[Transform],
    planned: Rows,
    replacing: Replacing,
    done: ReadRows | None,
    cost: Cost,
) -> Any:
    """The batch, example by example, stacked."""
    steady = len(list(takewhile(lambda transform: transform.kind == "map", transforms)))
    examples: list[Any] = [None] * planned.size
    items = planned.items.copy()
    left = np.arange(planned.size)  # rows whose examples are not made yet
    while left.size:
        if done is None:
            with cost.of("reading"):
                done = read_or_replace(recipe.sources, planned.take(left), replacing)
        rows, reads = done
        items[left] = rows.items
        at, numbers = places(recipe.sources, done).tolist(), rows.sources.tolist()
        bad: list[int] = []
        with cost.of("functions"):
            for row, goal in enumerate(left.tolist()):
                raw = _record(reads[numbers[row]], at[row])
                failed = None
                try:
                    examples[goal] = _example(recipe.seed, transforms, rows, row, raw)
                except _Failed as error:
                    failed = error
                if failed is not None:
                    what, reason = f"fails in .{transforms[failed.position].label}", failed.reason
                    if failed.position >= steady or not is_of_a_record(reason):
                        reason.add_note(replacing.told(rows, row, what, reason))
                        raise reason
                    replacing.note(rows, row, what, reason)
                    bad.append(row)
        left, done = left[bad], None
    with cost.of("stacking"):
        by = transforms[-1].told(len(transforms)) if transforms else "the source"
        return stack(examples, [f"record {record}" for record in items.tolist()], by)


class _Failed(Exception):
    """A function of examples raised."""

    def __init__(self, position: int, reason: Exception) -> None:
        super().__init__(position, reason)
        self.position = position
        self.reason = reason


def _example(seed: int, transforms: Sequence[Transform], rows: Rows, row: int, value: Any) -> Any:
    """One record through the functions of examples."""
    for position, transform in enumerate(transforms):
        try:
            if transform.kind == "map":
                value = transform.fn(value)
            else:
                epoch, record = int(rows.epochs[row]), int(rows.items[row])
                rng = generator(seed, epoch, record, position, int(rows.sources[row]))
                value = transform.fn(value, rng)
        except Exception as error:
            raise _Failed(position, error) from error
        if type(value) not in USUAL:
            refuse_no_example(value, transform.told(position + 1))
    return value


def _record(raw: Batch, place: int) -> Any:
    if isinstance(raw, list):
        return raw[place]
    return {name: column[place] for name, column in raw.items()}


# -- whole batches ---------------------------------------------------------------------------------


def _as_read(sources: Sequence[Source], done: ReadRows) -> Any:
    """The batch without functions of examples: the columns or records that were read."""
    if len(sources) == 1:
        return _arrays(done.reads[0])
    return _mixed(done.reads, done.rows.sources)


def _mixed(reads: Reads, sources: NDArray[np.int64]) -> Any:
    """A batch of several sources, which must have the same columns.

    Raises:
      Mismatch: they do not.
    """
    numbers = sorted(reads)
    parts = {number: _arrays(reads[number]) for number in numbers}
    forms = {number: _form(part) for number, part in parts.items()}
    for number, form in forms.items():
        if form != forms[numbers[0]]:
            raise Mismatch(
                "the sources do not fit in one batch; make their examples the same in .map, or "
                "read the same columns",
                [f"source {numbers[0]}: {forms[numbers[0]]}", f"source {number}: {form}"],
            )
    order = np.argsort(np.concatenate([np.flatnonzero(sources == n) for n in numbers]))
    first = parts[numbers[0]]
    if not isinstance(first, dict):
        return np.concatenate([parts[number] for number in numbers])[order]
    return {
        name: np.concatenate([parts[number][name] for number in numbers])[order] for name in first
    }


def _form(part: Any) -> str:
    if isinstance(part, dict):
        return ", ".join(f"{k}: {v.dtype}{list(v.shape[1:])}" for k, v in part.items())
    return "records of bytes"


def _arrays(raw: Batch) -> Any:
    """What a source returned, as arrays: lists become arrays of objects."""
    if isinstance(raw, list):
        return objects(raw)
    return {
        name: column if isinstance(column, np.ndarray) else objects(column)
        for name, column in raw.items()
    }

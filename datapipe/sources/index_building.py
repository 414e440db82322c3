"""Indexes made by a function of each record: the one way that reads all of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datapipe.sources.indexes import Kept, Lengths
from datapipe.sources.scanning import batches
from formats.arguments import as_integer
from formats.errors import BadRecord, Misuse

if TYPE_CHECKING:
    from formats.source import Batch, Source

Progress = Callable[[int, int], None]
"""Is called with the number of records done, and of all records."""


def kept_by(
    source: Source, function: Callable[[Any], Any], progress: Progress | None = None
) -> Kept:
    """The records for which `function(record)` is true; a record is bytes or a dict of columns.

    Raises:
      BadRecord: the function fails for a record.
      Misuse: it returns no boolean.
      Whatever the source raises.
    """
    found = np.zeros(len(source), np.bool_)
    _each(source, function, _boolean, found, progress)
    return Kept.of_mask(found)


def lengths_by(
    source: Source, function: Callable[[Any], Any], progress: Progress | None = None
) -> Lengths:
    """Tokens of each document, as `function(record)` says; see `kept_by`.

    Raises:
      BadRecord: the function fails for a record.
      Misuse: it returns no integer from 0 on.
      Whatever the source raises.
    """
    found = np.zeros(len(source), np.int64)
    _each(source, function, _count, found, progress)
    return Lengths.of(found)


def _each(
    source: Source,
    function: Callable[[Any], Any],
    checked: Callable[[Any], Any],
    found: NDArray[Any],
    progress: Progress | None,
) -> None:
    done = 0
    for first, batch in batches(source):
        for record, value in enumerate(_examples(batch), start=first):
            try:
                answer = function(value)
            except Exception as error:
                raise BadRecord(
                    f"record {record} ({source.where(record)}): the function fails: "
                    f"{type(error).__name__}: {error}",
                    index=record,
                ) from error
            try:
                found[record] = checked(answer)
            except ValueError as error:
                place = source.where(record)
                raise Misuse(
                    f"record {record} ({place}): the function must return {error}, it returned "
                    f"{answer!r:.80}"
                ) from None
            done += 1
        if progress is not None:
            progress(done, len(source))


def _examples(batch: Batch) -> Any:
    if not isinstance(batch, dict):
        return batch
    return (dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True))


def _boolean(answer: Any) -> bool:
    if not isinstance(answer, bool | np.bool_):
        raise ValueError("True or False")
    return bool(answer)


def _count(answer: Any) -> int:
    found = as_integer(answer)
    if found is None:
        raise ValueError("a number of tokens")
    if not 0 <= found < 1 << 61:
        raise ValueError("a number of tokens from 0 on")
    return found

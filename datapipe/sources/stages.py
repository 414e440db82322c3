"""What `Pipeline(filter=..., pack=...)` takes, and the sources that result.

The order of stages is fixed: source -> filter -> pack -> shuffle -> mix -> batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.integers import integer
from datapipe.order.streams import Orders
from datapipe.sources.concatenation import Concatenation
from datapipe.sources.concatenation import Remainder as RowRemainder
from datapipe.sources.documents import Documents
from datapipe.sources.indexes import Kept, Lengths
from datapipe.sources.packing import Bins, Oversize, Packed, Strategy, pack
from datapipe.sources.scanning import Values, Where, answers, meeting_all, narrowed
from datapipe.sources.views import ConcatenatedRows, Filtered, PackedRows
from formats.arguments import checked_path
from formats.errors import Misuse
from formats.files import Pattern

if TYPE_CHECKING:
    from formats.source import Source


@dataclass(frozen=True, eq=False)
class Pack:
    """Whole documents in rows of `capacity` tokens, before the shuffle, with padding at their ends.

    The documents are packed once, in stored order. That takes up to three microseconds a document
    (a few tenths of one with "first-fit" and many windows) and 28 bytes of memory each. Every
    trainer does it for itself unless `index` is given: the pages of that file are shared by all
    processes of a host. Without a file the workers of a trainer share one copy.

    Args:
      capacity: tokens of a row, 1 to 2^31 - 1.
      lengths: tokens of each document of the source, before any filter: the name of a column of
        integers; the path of a sidecar that `ckpt data index` has written (a column of that name
        comes first); or the numbers.
      tokens: the column that holds the tokens; ignored if records are plain bytes.
      dtype: of a token if documents are bytes, such as "uint16"; little-endian.
      strategy: "first-fit" or "best-fit"; see `datapipe.sources.packing.pack`.
      window: documents that are packed together. No row holds documents of two windows, so that
        a row is read from a short stretch of the files.
      oversize: what to do with a document longer than a row: "split" or "refuse".
      pad: the token that stands for padding.
      index: a file for the bins: written by the first pipeline, loaded by all later ones, refused
        if lengths or settings have changed. It must stay as long as the pipeline is used.

    Raises:
      Misuse: an argument is of another kind. `Pipeline` checks what else there is to check.
    """

    capacity: int
    _: KW_ONLY
    lengths: Pattern | ArrayLike
    tokens: str = "tokens"
    dtype: str | None = None
    strategy: Strategy = "first-fit"
    window: int = 16384
    oversize: Oversize = "split"
    pad: int = 0
    index: Pattern | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.index is not None:
            checked_path("index", self.index)


@dataclass(frozen=True, eq=False)
class Concatenate:
    """Documents end to end in the shuffled order of each epoch, cut into rows without padding.

    An index is made once an epoch, in up to 0.2 microseconds a document; batches that were made
    ahead are served meanwhile.

    Args:
      capacity, lengths, tokens, dtype, pad: as in `Pack`.
      remainder: what to do with tokens at the end of an epoch that fill no row: "drop" them, or
        "keep" them as a row with padding.

    Raises:
      Misuse: an argument is of another kind. `Pipeline` checks what else there is to check.
    """

    capacity: int
    _: KW_ONLY
    lengths: Pattern | ArrayLike
    tokens: str = "tokens"
    dtype: str | None = None
    remainder: RowRemainder = "drop"
    pad: int = 0

    def __post_init__(self) -> None:
        _check(self)


def _check(given: Pack | Concatenate) -> None:
    """Raises Misuse: an argument is of another kind. Ranges are checked later."""
    if not isinstance(given.tokens, str):
        raise Misuse(f"tokens: wanted the name of a column, found {given.tokens!r:.80}")
    if isinstance(given.lengths, str | bytes | os.PathLike):
        checked_path("lengths", given.lengths)
    try:
        np.dtype(given.dtype)
    except (TypeError, ValueError) as error:
        raise Misuse(
            f"dtype: wanted integers such as 'uint16', found {given.dtype!r:.80}"
        ) from error


Filter: TypeAlias = "Kept | Where | Sequence[Where] | Pattern"
Packing: TypeAlias = "Pack | Concatenate"


def staged(
    sources: Mapping[str, Source],
    filter: Filter | Mapping[str, Filter] | None,
    pack: Packing | Mapping[str, Packing] | None,
) -> dict[str, Source]:
    """The sources with filter and packing over them, in their order.

    Reads columns and sidecars, no documents.

    Raises:
      Misuse: no source has a name; a filter or packing is none, or does not fit its source.
      Mismatch: a sidecar is of other data.
      NotFound, Damaged, StoreFailed: a sidecar cannot be read.
    """
    filters = _by_name("filter", filter, sources)
    packs = _by_name("pack", pack, sources)
    found: dict[str, Source] = {}
    for name, source in sources.items():
        try:
            kept, lengths = _indexes(source, filters.get(name), packs.get(name))
            view: Source = source if kept is None else Filtered(source, kept)
            found[name] = view if lengths is None else _packed(view, kept, lengths, packs[name])
        except Misuse as error:
            raise type(error)(f"{name}: {error}") from error
    return found


def _by_name(argument: str, given: Any, sources: Mapping[str, Source]) -> dict[str, Any]:
    """What was given for each source."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(sources, given)
    unknown = [name for name in given if name not in sources]
    if unknown:
        raise Misuse(f"{argument}: no source {unknown[0]!r}, here are {', '.join(sources)}")
    return dict(given)


def _indexes(
    source: Source, filter: Filter | None, pack: Packing | None
) -> tuple[Kept | None, Lengths | None]:
    """Which records are kept, and how long documents are; columns for both are read together."""
    if pack is not None and not isinstance(pack, Pack | Concatenate):
        raise Misuse(f"pack: wanted a Pack or a Concatenate, found {pack!r}")
    conditions = _conditions(filter)
    column = None if pack is None else _column(source, pack.lengths)
    found = _answers(source, conditions, column) if conditions or column else []
    kept = meeting_all(found[: len(conditions)]) if conditions else None
    if isinstance(filter, Kept):
        kept = filter
    elif isinstance(filter, str | os.PathLike):
        kept = Kept.load(checked_path("filter", filter), source)
    if pack is None:
        return kept, None
    return kept, _lengths(source, pack.lengths) if column is None else _of_column(column, found[-1])


def _conditions(given: Filter | None) -> tuple[Where, ...]:
    """The conditions of a filter by columns; () for another filter."""
    if given is None or isinstance(given, Kept | str | os.PathLike):
        return ()
    conditions = (given,) if isinstance(given, Where) else given
    if (
        not isinstance(conditions, Sequence)
        or not conditions
        or not all(isinstance(each, Where) for each in conditions)
    ):
        raise Misuse(
            f"filter: wanted a Where or several, a Kept, or the path of a sidecar, found {given!r}"
        )
    return tuple(conditions)


def _column(source: Source, lengths: Pattern | ArrayLike) -> str | None:
    """The column that has the lengths, if one has."""
    if not isinstance(lengths, str):
        return None
    columns = getattr(getattr(source, "spec", None), "columns", ())
    if any(each.name == lengths for each in columns) or not os.path.exists(lengths):
        return lengths
    return None


def _answers(source: Source, conditions: Sequence[Where], column: str | None) -> list[NDArray[Any]]:
    """The answers to the conditions, then the values of the column."""
    if column is None:
        return answers(source, conditions)
    lengths = Values(column)
    try:
        return answers(source, [*conditions, lengths])
    except Misuse:
        try:  # whose mistake is it?
            with narrowed(source, [column]) as narrow:
                lengths(narrow.read(np.arange(min(1, len(source)))))
        except Misuse as error:
            raise _no_lengths(column, error) from error
        raise


def _of_column(column: str, values: NDArray[Any]) -> Lengths:
    try:
        return Lengths.of(values)
    except Misuse as error:
        raise _no_lengths(column, error) from error


def _no_lengths(column: str, error: Misuse) -> Misuse:
    return Misuse(
        f"lengths: {column!r} is no sidecar, which `ckpt data index` writes, and no column "
        f"that is one: {error}"
    )


def _packed(view: Source, kept: Kept | None, lengths: Lengths, given: Packing) -> Source:
    if kept is not None:
        lengths = lengths.of_kept(kept)
    documents = Documents.of(view, lengths, given.tokens, given.dtype)
    limits = np.iinfo(documents.dtype)
    pad = integer("pad", given.pad, int(limits.min), int(limits.max))
    if isinstance(given, Pack):
        return PackedRows(documents, _bins(lengths, given), pad)
    orders = Orders("none", len(view), 0, 0)
    laid = Concatenation(lengths, given.capacity, orders, given.remainder)
    return ConcatenatedRows(documents, laid, pad)


def _lengths(source: Source, given: Pattern | ArrayLike) -> Lengths:
    """Lengths from a sidecar, or from the numbers given."""
    if isinstance(given, str | os.PathLike):
        return Lengths.load(given, source)
    found = Lengths.of(given)
    if len(found) != len(source):
        raise Misuse(f"lengths: wanted one for each of {len(source)} documents, found {len(found)}")
    return found


def _bins(lengths: Lengths, given: Pack) -> Bins:
    made = Packed.of(lengths, given.capacity, given.window, given.strategy, given.oversize)
    if given.index is not None and os.path.exists(given.index):
        return Bins.load(given.index, made, lengths)
    bins = pack(
        lengths,
        given.capacity,
        window=given.window,
        strategy=given.strategy,
        oversize=given.oversize,
    )
    if given.index is None:
        return bins
    bins.save(given.index)
    return Bins.load(given.index, made, lengths)

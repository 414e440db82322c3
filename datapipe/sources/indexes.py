"""Which records of a source pass a filter, and how many tokens each document has.

Both are made from a column, or come from a sidecar that `ckpt data index` has written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from datapipe.integers import LIMIT, fresh_indices, integer
from datapipe.sources import sidecar
from datapipe.sources.origin import Origin
from datapipe.sources.sidecar import Sidecar, Stored
from formats.errors import Damaged, Misuse
from formats.files import Pattern
from formats.source import json_digest

if TYPE_CHECKING:
    from formats.source import Source

VERSION: Final = 1

_KEPT: Final = "kept"
_LENGTHS: Final = "lengths"
_TOTAL_LIMIT: Final = float(1 << 61)


@dataclass(frozen=True, eq=False)
class Kept:
    """The records that a filter keeps; item k of the filtered source is the k-th of them.

    Build it with `Kept.of_mask`, `Kept.of_ids` or `Kept.load`. It holds 8 bytes for each record
    that is kept; those of a loaded one are the pages of its file, also in other processes.

    ids: int64[k], strictly ascending, read-only.
    records: number of records of the source.
    stored: the file it was loaded from, if any.
    """

    ids: NDArray[np.int64]
    records: int
    stored: Stored | None = None

    def __post_init__(self) -> None:
        ids = self.ids
        if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
            raise Misuse(f"Kept.ids: wanted int64[k], found {ids!r:.80}; build it by Kept.of_ids")
        object.__setattr__(self, "records", integer("Kept.records", self.records, 0, LIMIT))

    @staticmethod
    def of_mask(mask: ArrayLike) -> Kept:
        """From bool[records]: true where the record is kept.

        Raises:
          Misuse: not one dimension of booleans.
        """
        try:
            given = np.asarray(mask)
        except (TypeError, ValueError) as error:
            raise Misuse(f"a mask has one boolean per record ({error})") from error
        if given.ndim != 1 or given.dtype != np.bool_:
            raise Misuse(
                f"a mask has one boolean per record, found {given.dtype} of shape "
                f"{list(given.shape)}: compare the column first, such as column > 0.5"
            )
        return Kept.of_ids(np.flatnonzero(given), given.size)

    @staticmethod
    def of_ids(ids: ArrayLike, records: int) -> Kept:
        """From the numbers of those that are kept, int[k], strictly ascending.

        Raises:
          Misuse: they are no such numbers, or one is outside [0, records).
        """
        records = integer("records", records, 0, LIMIT)
        found = fresh_indices(ids, records)
        _check_ids(found, records)
        found.flags.writeable = False
        return Kept(found, records)

    def __len__(self) -> int:
        """How many are kept."""
        return int(self.ids.size)

    def items(self, records: ArrayLike) -> NDArray[np.int64]:
        """Items of records, -1 where a record is not kept; int64, same shape.

        Raises:
          Misuse: a record is outside [0, self.records).
        """
        wanted = fresh_indices(records, self.records)
        if not self.ids.size:
            return np.full_like(wanted, -1)
        at = np.minimum(np.searchsorted(self.ids, wanted), self.ids.size - 1)
        return np.where(self.ids[at] == wanted, at, -1)

    @cached_property
    def digest(self) -> str:
        """Hex: equal exactly where the same records of as many are kept."""
        return json_digest([_KEPT, self.records, sidecar.array_digest(self.ids)])

    def save(self, path: Pattern, origin: Origin) -> None:
        """Write it as a sidecar; see `sidecar.write` for what that raises."""
        about = {"records": self.records, **origin.to_json()}
        sidecar.write(path, Sidecar(_KEPT, VERSION, about, {"ids": self.ids}))

    @staticmethod
    def load(path: Pattern, source: Source) -> Kept:
        """Read a sidecar of the records of `source`.

        Raises:
          NotFound, StoreFailed: of the file.
          Damaged: it is no index, or not as it was written.
          Mismatch: it is another kind of index, or of other data.
        """
        index = sidecar.read(path, _KEPT, VERSION)
        Origin.from_json(index.about, path).require(source, path)
        ids = _only_array(index, "ids", path)
        records = sidecar.number(index.about, "records", path, len(source), len(source))
        try:
            _check_ids(ids, records)
        except Misuse as error:
            raise Damaged(f"{os.fspath(path)}: {error}; build it again") from error
        return Kept(ids, records, index.stored)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.stored is None:
            return Kept, (self.ids, self.records)
        return _kept_of, (self.stored, self.records)


def _kept_of(stored: Stored, records: int) -> Kept:
    return Kept(sidecar.reopened(stored).arrays["ids"], records, stored)


def _check_ids(ids: NDArray[np.integer[Any]], records: int) -> None:
    """See `Kept.of_ids`."""
    if ids.ndim != 1 or ids.dtype != np.int64 or not (ids[1:] > ids[:-1]).all():
        raise Misuse("the numbers of kept records must be one list of int64, strictly ascending")
    for end in ids[:1].tolist() + ids[-1:].tolist():
        if not 0 <= end < records:
            raise Misuse(f"the number {end} of a kept record is outside [0, {records})")


@dataclass(frozen=True, eq=False)
class Lengths:
    """Tokens of each document of a source.

    Build it with `Lengths.of` or `Lengths.load`; loaded ones are the pages of their file.

    tokens: int[n], read-only; int32 if that is enough.
    stored: the file they were loaded from, if any.
    """

    tokens: NDArray[np.integer[Any]]
    stored: Stored | None = None

    @staticmethod
    def of(tokens: ArrayLike) -> Lengths:
        """From one integer for each document.

        Raises:
          Misuse: they are no such integers, one is below 0, or their sum is 2^61 or more.
        """
        try:
            given = np.asarray(tokens)
        except (TypeError, ValueError) as error:
            raise Misuse(f"lengths are one integer for each document ({error})") from error
        _check_lengths(given)
        fits = not given.size or given.max() <= np.iinfo(np.int32).max
        found: NDArray[np.integer[Any]] = given.astype(np.int32 if fits else np.int64)
        found.flags.writeable = False
        return Lengths(found)

    def __len__(self) -> int:
        """How many documents there are."""
        return int(self.tokens.size)

    def of_kept(self, kept: Kept) -> Lengths:
        """The lengths of the documents that are kept."""
        return Lengths.of(self.tokens[kept.ids])

    @cached_property
    def digest(self) -> str:
        """Hex: equal exactly where all lengths are."""
        found = sidecar.array_digest(self.tokens.astype(np.int64, copy=False))
        return json_digest([_LENGTHS, self.tokens.size, found])

    def save(self, path: Pattern, origin: Origin) -> None:
        """Write it as a sidecar; see `sidecar.write` for what that raises."""
        about = {"records": len(self), **origin.to_json()}
        sidecar.write(path, Sidecar(_LENGTHS, VERSION, about, {"tokens": self.tokens}))

    @staticmethod
    def load(path: Pattern, source: Source) -> Lengths:
        """Read a sidecar of the documents of `source`; raises what `Kept.load` raises."""
        index = sidecar.read(path, _LENGTHS, VERSION)
        Origin.from_json(index.about, path).require(source, path)
        tokens = _only_array(index, "tokens", path)
        records = sidecar.number(index.about, "records", path, len(source), len(source))
        if tokens.size != records:
            raise Damaged(
                f"{os.fspath(path)}: wanted {records} lengths, found {tokens.size}; build it again"
            )
        try:
            _check_lengths(tokens)
        except Misuse as error:
            raise Damaged(f"{os.fspath(path)}: {error}; build it again") from error
        return Lengths(tokens, index.stored)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.stored is None:
            return Lengths, (self.tokens,)
        return _lengths_of, (self.stored,)


def _lengths_of(stored: Stored) -> Lengths:
    return Lengths(sidecar.reopened(stored).arrays["tokens"], stored)


def _check_lengths(given: NDArray[Any]) -> None:
    """See `Lengths.of`."""
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise Misuse(
            f"lengths are one integer for each document, found {given.dtype} of shape "
            f"{list(given.shape)}"
        )
    if given.size and given.min() < 0:
        bad = int(np.flatnonzero(given < 0)[0])
        raise Misuse(f"document {bad} has a length of {given[bad]}")
    if given.sum(dtype=np.float64) >= _TOTAL_LIMIT:
        raise Misuse("the documents have 2^61 tokens or more")


def _only_array(index: Sidecar, name: str, path: Pattern) -> NDArray[Any]:
    if set(index.arrays) != {name}:
        raise Damaged(
            f"{os.fspath(path)}: wanted one array, {name}, found {sorted(index.arrays)}; "
            "build it again"
        )
    return index.arrays[name]

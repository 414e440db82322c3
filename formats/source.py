"""What every source of records promises, and the few pieces that all of them share.

A source is an immutable sequence of records, numbered from 0 in the order of its files. It hands
out any set of them in one call, in any order, and can say what it is made of.
"""

from __future__ import annotations

import abc
import itertools
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypeVar, final

import numpy as np
import xxhash

from formats.arguments import LIMIT, as_integer
from formats.errors import Misuse, OutOfRange

Batch: TypeAlias = "list[Any] | dict[str, np.ndarray | list[Any]]"
T = TypeVar("T")

BLOCK: Final = 16_384
"""Records of a block where the files have none of their own."""


@dataclass(frozen=True)
class Column:
    """One column of a columnar source: what `Source.read` returns under its name.

    kind: `array` an ndarray `[n, *shape]` of `dtype`; `ragged` a list of n 1-D ndarrays of
        `dtype`; `str`, `bytes` a list of n of them; `object` a list of n plain Python values.
        In lists a null is None.
    dtype: a NumPy dtype name, empty where there is none.
    shape: of one row.
    """

    name: str
    kind: Literal["array", "ragged", "str", "bytes", "object"]
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Spec:
    """What one `read` returns: columns by name or, where there are none, a list of bytes.

    trees: without columns, whether the list is one of examples instead, of any form.
    """

    columns: tuple[Column, ...] = ()
    trees: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON value that is equal exactly where the specs are."""
        columns = [asdict(c) | {"shape": list(c.shape)} for c in self.columns]
        return {"columns": columns} | ({"trees": True} if self.trees else {})


class Source(abc.ABC):
    """A finite sequence of records with batched random access.

    May be shared by threads, forked and pickled; open files belong to one process and are opened
    again in another. Grain takes it as it is: `grain.MapDataset.source(source)`.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of records."""

    @abc.abstractmethod
    def read(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """The records `indices` (int64[n], any order, repeats allowed), in that order.

        A list of n bytes for sources of records, a dict of n-row columns for columnar ones. This
        is one call per batch: reads are grouped by file and sorted by position. The result
        belongs to the caller.

        Raises: OutOfRange; BadRecord for a record that cannot be read; Damaged or StoreFailed for
        a file that cannot.
        """

    @property
    @abc.abstractmethod
    def spec(self) -> Spec:
        """What `read` returns."""

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What the source is made of, as a JSON value; `digest` stands for all the rest.

        Keys: `format`, `records`, `files` (each with `name` relative to the fixed part of the
        pattern, `bytes`, `records`, and digests `tail` of its last 128 KiB, where footer and
        index lie, and `sample` of 16 pages spread over it), `columns` (those that are read, as in
        `spec`), `digest`. Neither modification times nor the place of the files enter.
        It reads at most 192 KiB a file, once; it is no digest over all bytes.

        Raises: Mismatch when a file changed since the source was opened.
        """

    @abc.abstractmethod
    def where(self, index: int) -> str:
        """File and position of one record, for messages."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close the files of this process. Reading afterwards raises Misuse."""

    @property
    def blocks(self) -> np.ndarray:
        """How the records lie together: int64[blocks + 1], from 0 to the number of records.

        For `shuffle="blocks"`, which reads a few blocks at a time. Records that are added behind
        the others leave those bounds where they are. By default there is one every 16,384 records.
        """
        return fixed_blocks(len(self))

    def __getitem__(self, index: int) -> Any:
        """One record: bytes, or a dict of one value per column. Negative numbers are refused."""
        batch = self.read(np.array([_number(index)], np.int64))
        if isinstance(batch, dict):
            return {name: column[0] for name, column in batch.items()}
        return batch[0]

    def _getitems(self, indices: Sequence[int]) -> list[Any]:
        """Records by one call: Grain asks for this name where it reads batches."""
        batch = self.read(np.asarray(indices, None if len(indices) else np.int64))
        if isinstance(batch, dict):
            rows = zip(*batch.values(), strict=True)
            return [dict(zip(batch, row, strict=True)) for row in rows]
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@final
class Handles(Generic[T]):
    """Open files by number: the `limit` most recently used ones of this process.

    A forked child starts with none, since file positions and locks of the parent are not its own.
    A handle that falls out is closed when its last user lets go of it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, T] = {}
        self._closed = False
        self._pid = os.getpid()

    def get(self, number: int, opener: Callable[[int], T]) -> T:
        """The open handle of file `number`, opened at need."""
        if self._pid != os.getpid():
            was_closed = self._closed
            self._start()
            self._closed = was_closed
        with self._lock:
            if self._closed:
                raise Misuse("this source is closed; open it again to read from it")
            handle = self._open.pop(number, None)
            if handle is not None:
                self._open[number] = handle
                return handle
        handle = opener(number)
        with self._lock:
            kept = self._open.setdefault(number, handle)
            while len(self._open) > self._limit:
                del self._open[next(iter(self._open))]
            return kept

    def drop(self, number: int, handle: T) -> None:
        """Forget `handle`, unless another thread has put a new one in its place."""
        with self._lock:
            if self._open.get(number) is handle:
                del self._open[number]

    def close(self) -> None:
        """Forget all handles and refuse new ones."""
        if self._pid != os.getpid():
            self._start()
        with self._lock:
            self._open.clear()
            self._closed = True


def blocks_of(source: Source) -> np.ndarray:
    """The blocks of a source, which need not say where they are; see `Source.blocks`."""
    found = getattr(source, "blocks", None)
    return fixed_blocks(len(source)) if found is None else np.asarray(found)


def fixed_blocks(records: int) -> np.ndarray:
    """Bounds of blocks of `BLOCK` records."""
    return np.append(np.arange(0, records, BLOCK, dtype=np.int64), records)


def open_files() -> int:
    """How many files a source may keep open: half of those that the process is allowed."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 65536 if allowed == resource.RLIM_INFINITY else allowed // 2


def as_rows(indices: np.ndarray | Sequence[int], length: int) -> np.ndarray:
    """`indices` as int64[n], each checked against [0, length).

    Raises: Misuse for anything but a one-dimensional sequence of integers; OutOfRange.
    """
    try:
        rows = np.asarray(indices)
    except (TypeError, ValueError) as error:
        raise Misuse(f"read wants a one-dimensional sequence of integers ({error})") from error
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise Misuse(
            f"read wants a one-dimensional sequence of integers, found {rows.dtype}"
            f" of shape {list(rows.shape)}"
        )
    rows = rows.astype(np.int64, copy=False)
    if rows.size and rows.view(np.uint64).max() >= length:  # a negative one is above 2^63
        bad = int(rows[(rows < 0) | (rows >= length)][0])
        there = f"has records 0 to {length - 1}" if length else "has no records"
        raise OutOfRange(f"record {bad} asked for, the source {there}")
    return rows


def _number(index: object) -> int:
    """The number of a record. Raises: Misuse; OutOfRange for one that no source has."""
    found = as_integer(index)
    if found is None:
        raise Misuse(f"the number of a record is an integer, found {index!r:.80}")
    if not 0 <= found < LIMIT:
        raise OutOfRange(f"record {index!r:.80} asked for: they are numbered from 0 to their end")
    return found


def grouped(rows: np.ndarray, starts: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Split a batch by part (file, row group): part, positions in it (rising), places in the batch.

    `starts` is int64[parts + 1]: the first row of each part, then the number of rows.
    """
    if not rows.size:
        return
    rising = rows.size < 2 or bool((rows[1:] >= rows[:-1]).all())
    order = np.arange(rows.size) if rising else np.argsort(rows, kind="stable")
    ranked = rows if rising else rows[order]
    # The last of several equal starts is the part that is not empty.
    parts = np.searchsorted(starts, ranked, side="right") - 1
    cuts = np.flatnonzero(parts[1:] != parts[:-1]) + 1
    bounds = [0, *cuts.tolist(), len(rows)]
    for first, last in itertools.pairwise(bounds):
        part = int(parts[first])
        yield part, ranked[first:last] - starts[part], order[first:last]


def sealed(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """`fingerprint` with `digest` added: hex xxh3-128 over its canonical JSON."""
    return fingerprint | {"digest": json_digest(fingerprint)}


def json_digest(value: Any) -> str:
    """Hex xxh3-128 over the canonical JSON of `value`."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value))


def canonical_json(value: Any) -> bytes:
    """The same bytes for equal JSON values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

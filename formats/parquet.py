"""Parquet files: exact random access to rows, by row group, with column projection."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from formats.arguments import checked_path, whole
from formats.columns import as_table, convert, first_bad, taken
from formats.contents import Contents
from formats.decoded import Decoded
from formats.errors import BadRecord, Damaged, DataError, Mismatch, StoreFailed, Unsupported
from formats.files import THREADS, File, Pattern, as_found, naming, open_binary, replacing
from formats.projection import Projection, check_schema, told
from formats.source import Handles, Source, Spec, as_rows, grouped

if TYPE_CHECKING:
    from formats.cache import CachedParquetSource

_OPEN_FILES = 128
_CACHE_BYTES = 256 * 1024 * 1024
_BATCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class _Footer:
    """What one file's footer says: rows of each row group, and its columns."""

    rows: tuple[int, ...]
    schema: pa.Schema


@final
class ParquetSource(Source):
    """Rows of Parquet files as columns, numbered through the files in their order.

    columns: the top-level columns to read, in the order of the result; None reads all of them.
        Only what is read must agree between files.
    fill_null: column name to the value that stands for null in a column of numbers (in fixed-size
        lists of them: for a null element, or for each element of a null row). Without it a null
        there is a BadRecord, because NumPy has no null and a result type that follows the data
        would differ from batch to batch. In columns read as lists a null is None.
    cache_bytes: budget for decoded row groups that are kept, the most recently used ones. A row
        group above the budget is decoded at each read that needs it.

    Result types are in `spec`: numbers, dates and times as `[n]`, fixed-size lists of them as
    `[n, size]`, lists of numbers as n 1-D arrays, text as str, binary as bytes, the rest as plain
    Python values; dictionaries are decoded. A timestamp with a time zone is given in UTC.

    Cost: a read decodes each row group that holds one of its rows, unless it is cached; random
    rows of a source much larger than the cache decode a row group each. `shuffle="blocks"` decodes
    each of them about once an epoch, if `cache_bytes` holds those of a few of its windows. Pages
    written with a checksum (`write_parquet` does) are verified.

    Raises: Misuse for an unknown column; Mismatch when files differ in their columns; Damaged,
    NotFound or StoreFailed for a file that cannot be read.
    """

    def __init__(
        self,
        files: Sequence[File],
        *,
        columns: Sequence[str] | None = None,
        fill_null: Mapping[str, Any] | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self.files = as_found(files)
        with ThreadPoolExecutor(THREADS) as pool:
            footers = list(pool.map(_footer, self.files))
        schemas = [footer.schema for footer in footers]
        self.projection = Projection.of(self.files, schemas, columns, fill_null)
        groups = [
            (number, group, rows)
            for number, footer in enumerate(footers)
            for group, rows in enumerate(footer.rows)
        ]
        self._groups = np.array([group[:2] for group in groups], np.int64).reshape(-1, 2)
        self._starts = np.concatenate([[0], np.cumsum([g[2] for g in groups])]).astype(np.int64)
        self._file_starts = np.concatenate([[0], np.cumsum([sum(f.rows) for f in footers])])
        self._cache_bytes = whole("cache_bytes", cache_bytes, 0, "bytes")
        self._contents = Contents(self.files)
        self._start()

    def _start(self) -> None:
        """Begin with no open file and nothing decoded."""
        self._handles: Handles[_OpenFile] = Handles(_OPEN_FILES)
        self._decoded = Decoded(self._cache_bytes)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        names = ", ".join(self.projection.names)
        return f"ParquetSource({len(self.files)} files, {len(self)} rows, columns {names})"

    @property
    def spec(self) -> Spec:
        """The columns that are read."""
        return Spec(self.projection.columns)

    def read(self, indices: np.ndarray | Sequence[int]) -> dict[str, np.ndarray | list[Any]]:
        """See `Source.read`: column name to n rows, as `spec` says."""
        rows = as_rows(indices, len(self))
        pieces: dict[str, list[tuple[np.ndarray, Any]]] = {
            name: [] for name in self.projection.names
        }
        for part, positions, slots in grouped(rows, self._starts):
            picked = taken(self._group(part, positions), positions)
            for column in self.projection.columns:
                array = picked.column(column.name).combine_chunks()
                fill = self.projection.fill.get(column.name)
                try:
                    values = convert(array, column, fill)
                except (ValueError, pa.ArrowException) as error:  # a null, or text that is no UTF-8
                    first = int(positions[first_bad(array, column, fill)])
                    raise self._bad(part, first, told(error, column.name)) from error
                pieces[column.name].append((slots, values))
        return self.projection.gathered(pieces, len(rows))

    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        about = self.projection.in_fingerprint()
        return self._contents.fingerprint("parquet", self.file_rows, about)

    def where(self, index: int) -> str:
        """See `Source.where`."""
        rows = as_rows([index], len(self))
        ((part, positions, _),) = grouped(rows, self._starts)
        number, group = self._groups[part].tolist()
        return (
            f"{self.files[number].path}, row {self._row(part, int(positions[0]))}"
            f" (row group {group})"
        )

    @property
    def blocks(self) -> np.ndarray:
        """Row groups: see `Source.blocks`."""
        return self._starts

    def close(self) -> None:
        """See `Source.close`."""
        self._handles.close()
        self._decoded = Decoded(self._cache_bytes)

    def select(self, columns: Sequence[str]) -> ParquetSource:
        """The same rows with these columns, whether or not they are read here. Raises: Misuse."""
        return ParquetSource(
            self.files, cache_bytes=self._cache_bytes, **self.projection.arguments(columns)
        )

    def cached(self, directory: Pattern) -> CachedParquetSource:
        """The same rows from memory-mapped Arrow files in `directory`, built where missing.

        Any row then costs what a row costs in memory: made for the exact shuffle of all rows.
        Only the columns that are read are copied, uncompressed. The first call decodes every
        Parquet file once, with progress on a terminal; later ones decode what was added or has
        changed since. What a killed call has finished is kept, and several processes share the
        work. What no source has opened for 30 days is removed when something is built. The
        directory should be on a local disk, and can be shared by any number of sources.

        The fingerprint stays that of the Parquet files, so states fit with and without the cache.

        Raises: BadRecord for a row group that cannot be decoded; Unsupported for a column that
        Arrow files cannot hold; StoreFailed, also for a full disk; Damaged, Mismatch, NotFound.
        """
        from formats.cache import cached  # it needs the Arrow reader, which few need

        return cached(self, directory)

    @property
    def file_rows(self) -> list[int]:
        """Number of rows of each file."""
        counts: list[int] = np.diff(self._file_starts).tolist()
        return counts

    def file_of(self, index: int) -> int:
        """Which of `files` holds row `index`."""
        return int(np.searchsorted(self._file_starts, index, side="right") - 1)

    def batches(self, number: int) -> Iterator[pa.RecordBatch]:
        """The rows of one file in their order, the columns that are read, a few MiB at a time.

        Raises: BadRecord naming the first row that did not come; the errors of opening the file.
        """
        opened = self._open(number)
        first = int(np.searchsorted(self._groups[:, 0], number))
        for part in range(first, first + opened.parquet.metadata.num_row_groups):
            done = 0
            batches = opened.batches(int(self._groups[part, 1]), self.projection.names)
            while True:
                try:
                    batch = next(batches, None)
                except Exception as error:
                    raise self._failed(part, done, error) from error
                if batch is None:
                    break
                done += batch.num_rows
                yield batch

    def _group(self, part: int, positions: np.ndarray) -> pa.Table:
        """One decoded row group, the columns that are read."""
        number, group = self._groups[part].tolist()
        opened = self._handles.get(number, self._open)
        cached = self._decoded.get(part)
        if cached is not None:
            return cached
        with opened.lock:
            cached = self._decoded.get(part)  # another thread may have decoded it meanwhile
            if cached is not None:
                return cached
            try:
                table = opened.decode(group, self.projection.names)
            except DataError:
                raise
            except Exception as error:
                self._handles.drop(number, opened)
                raise self._failed(part, int(positions[0]), error) from error
            wanted = int(self._starts[part + 1] - self._starts[part])
            if table.num_rows != wanted:
                # A flipped bit in a page header, which has no checksum, can look like this.
                cause = f"the footer says {wanted} rows, found {table.num_rows}"
                raise self._bad(part, int(positions[0]), cause)
            self._decoded.put(part, table)
            return table

    def _open(self, number: int) -> _OpenFile:
        file = self.files[number]
        opened = _OpenFile(file)
        wanted = int(self._file_starts[number + 1] - self._file_starts[number])
        if opened.parquet.metadata.num_rows != wanted:
            raise Mismatch(
                f"{file.path} changed since the source was opened; open it again",
                [f"{file.name}: wanted {wanted} rows, found {opened.parquet.metadata.num_rows}"],
            )
        return opened

    def _row(self, part: int, position: int) -> int:
        """The number of a row inside its file."""
        number = int(self._groups[part, 0])
        return int(self._starts[part] - self._file_starts[number]) + position

    def _failed(self, part: int, position: int, error: Exception) -> DataError:
        """The error for a row group that cannot be decoded."""
        if isinstance(error, pa.ArrowNotImplementedError):
            return Unsupported(f"{self.files[int(self._groups[part, 0])].path}: {error}")
        if _is_arrow(error):
            return self._bad(part, position, str(error))
        path = self.files[int(self._groups[part, 0])].path
        return StoreFailed(f"{path}: cannot be read ({type(error).__name__}: {error})")

    def _bad(self, part: int, position: int, cause: str) -> BadRecord:
        """The error for one row."""
        number, group = self._groups[part].tolist()
        path, row = self.files[number].path, self._row(part, position)
        index = int(self._starts[part]) + position
        return BadRecord(
            f"{path}, row {row} (row group {group}; record {index} of the source): {cause}",
            index=index,
            file=path,
            position=row,
        )

    def __getstate__(self) -> dict[str, Any]:
        own = ("_handles", "_decoded")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


@final
class _OpenFile:
    """A Parquet file opened by this process; one thread decodes at a time."""

    def __init__(self, file: File) -> None:
        self.lock = threading.Lock()
        if file.is_url:
            stream: Any = open_binary(file)
        else:
            with naming(file.path):
                stream = pa.OSFile(file.path, "rb")
        try:
            self.parquet = pq.ParquetFile(stream, page_checksum_verification=True)
        except Exception as error:
            if not _is_arrow(error):
                with naming(file.path):
                    raise
            raise Damaged(f"{file.path} is cut short or no Parquet file: {error}") from error

    def decode(self, group: int, columns: list[str]) -> pa.Table:
        """A row group as a table of one chunk per column."""
        table = self.parquet.read_row_group(group, columns=columns, use_threads=False)
        return table.combine_chunks()

    def batches(self, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The same in pieces of about `_BATCH_BYTES`."""
        about = self.parquet.metadata.row_group(group)
        row_bytes = max(1, about.total_byte_size // max(1, about.num_rows))
        rows = min(max(1, _BATCH_BYTES // row_bytes), 1 << 16)
        yield from self.parquet.iter_batches(rows, row_groups=[group], columns=columns)


def write_parquet(
    path: Pattern, columns: Mapping[str, Any] | pa.Table, *, row_group_size: int | None = None
) -> int:
    """Write one local Parquet file and return its number of rows.

    `columns` is an Arrow table, or a mapping from name to what `pyarrow.array` takes or an ndarray
    `[n, ...]`, whose rows become fixed-size lists. Row groups hold `row_group_size` rows (Arrow's
    default without), pages carry checksums. A file that is there is replaced, durably and all at
    once; on an error it stays as it was.

    Raises: Misuse for columns of different lengths, values that no Arrow type holds, or a row
    group size below 1; NotFound for an absent directory; StoreFailed.
    """
    if row_group_size is not None:
        row_group_size = whole("row_group_size", row_group_size, 1, "rows")
    table = columns if isinstance(columns, pa.Table) else as_table(columns)
    with replacing(path) as temporary, naming(checked_path("path", path), "written"):
        pq.write_table(table, temporary, row_group_size=row_group_size, write_page_checksum=True)
    return int(table.num_rows)


def _footer(file: File) -> _Footer:
    metadata = (opened := _OpenFile(file)).parquet.metadata
    rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise Damaged(
            f"{file.path}: its footer says {metadata.num_rows} rows,"
            f" and row groups of {list(rows)} rows"
        )
    schema = opened.parquet.schema_arrow
    check_schema(file, schema)
    return _Footer(rows, schema)


def _is_arrow(error: Exception) -> bool:
    """Whether Arrow could not make sense of the bytes, as against failing to get them."""
    if isinstance(error, OSError):
        return error.errno is None
    return isinstance(error, (pa.ArrowException, ValueError))

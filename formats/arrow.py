"""Arrow IPC files: exact random access to rows of memory-mapped columns."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from formats.arguments import checked_path, whole
from formats.arrow_layout import BadLayout, Layout, checked_rows, is_file, read_layout
from formats.columns import as_table, convert, first_bad, gather, taken
from formats.contents import Contents
from formats.decoded import Decoded
from formats.errors import BadRecord, Damaged, Unsupported
from formats.files import THREADS, File, Pattern, as_found, naming, replacing
from formats.mapped import Mapped, only_local
from formats.projection import Projection, check_schema, told
from formats.regions import BadRow, Rows, Values, mapped_rows
from formats.source import Column, Handles, Source, Spec, as_rows, grouped, open_files

_CACHE_BYTES = 256 * 1024 * 1024
_REFUSALS = (pa.ArrowException, ValueError, OSError, MemoryError, OverflowError)
"""What Arrow raises for bytes that it cannot make sense of; the file is in memory by then."""


@dataclass(frozen=True)
class Outline:
    """What one file says of itself: rows of each record batch, and its columns."""

    layout: Layout
    schema: pa.Schema


@final
class ArrowSource(Source):
    """Rows of Arrow IPC files (`.arrow`, Feather version 2) as columns, numbered through the files.

    columns, fill_null and result types: as for `ParquetSource`.
    cache_bytes: budget for record batches of compressed files, which are decompressed whole; the
        most recently used ones are kept.

    The file format and the stream format are both read. Files are mapped into memory: opening
    reads their metadata, and a read touches the pages of its rows. Columns of numbers, lists of
    numbers, text and binary are gathered without Arrow, with each place in the file checked; of
    other columns (dictionaries, structs, nested lists, views), and of compressed files, Arrow
    validates a record batch in full when it is first used. Arrow files carry no checksums: a
    flipped bit in a value goes unnoticed.

    Raises: Misuse for an unknown column; Mismatch when files differ in their columns; Damaged,
    NotFound or StoreFailed for a file that cannot be read; Unsupported for URLs, Feather version 1
    and compressed streams.
    """

    def __init__(
        self,
        files: Sequence[File],
        *,
        columns: Sequence[str] | None = None,
        fill_null: Mapping[str, Any] | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self._files = as_found(files)
        only_local(self._files, "Arrow files")
        with ThreadPoolExecutor(THREADS) as pool:
            outlines = list(pool.map(outline, self._files))
        schemas = [each.schema for each in outlines]
        self._projection = Projection.of(self._files, schemas, columns, fill_null)
        self._layouts = tuple(each.layout for each in outlines)
        counts = [sum(layout.rows) for layout in self._layouts]
        self._starts = np.array([0, *np.cumsum(checked_rows(counts), dtype=np.int64)], np.int64)
        batches = [len(layout.rows) for layout in self._layouts]
        self._first_batches = np.array([0, *np.cumsum(batches)], np.int64)
        self._cache_bytes = whole("cache_bytes", cache_bytes, 0, "bytes")
        self._contents = Contents(self._files)
        self._start()

    def _start(self) -> None:
        """Begin with no open file and nothing decoded."""
        self._handles: Handles[_OpenFile] = Handles(open_files())
        self._decoded = Decoded(self._cache_bytes)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        names = ", ".join(self._projection.names)
        return f"ArrowSource({len(self._files)} files, {len(self)} rows, columns {names})"

    @property
    def spec(self) -> Spec:
        """The columns that are read."""
        return Spec(self._projection.columns)

    def read(self, indices: np.ndarray | Sequence[int]) -> dict[str, np.ndarray | list[Any]]:
        """See `Source.read`: column name to n rows, as `spec` says."""
        rows = as_rows(indices, len(self))
        pieces: dict[str, list[tuple[np.ndarray, Any]]] = {
            name: [] for name in self._projection.names
        }
        for number, positions, slots in grouped(rows, self._starts):
            opened = self._handles.get(number, self._open)
            opened.mapped.check()
            parts = np.searchsorted(opened.starts, positions, side="right") - 1
            inside = positions - opened.starts[parts]
            for column in self._projection.columns:
                direct = opened.direct[column.name]
                try:
                    if direct is None:
                        values = self._through_arrow(number, opened, column, positions)
                    else:
                        values = direct.take(parts, inside)
                except BadRow as error:
                    position = int(positions[error.row])
                    raise self._bad(number, position, told(error.cause, column.name)) from error
                pieces[column.name].append((slots, values))
        return self._projection.gathered(pieces, len(rows))

    def select(self, columns: Sequence[str]) -> ArrowSource:
        """The same rows with these columns, whether or not they are read here. Raises: Misuse."""
        return ArrowSource(
            self._files, cache_bytes=self._cache_bytes, **self._projection.arguments(columns)
        )

    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        counts = np.diff(self._starts).tolist()
        return self._contents.fingerprint("arrow", counts, self._projection.in_fingerprint())

    def where(self, index: int) -> str:
        """See `Source.where`."""
        rows = as_rows([index], len(self))
        ((number, positions, _),) = grouped(rows, self._starts)
        return f"{self._files[number].path}, row {positions[0]}"

    def close(self) -> None:
        """See `Source.close`."""
        self._handles.close()
        self._decoded = Decoded(self._cache_bytes)

    def _open(self, number: int) -> _OpenFile:
        return _OpenFile(self._files[number], self._layouts[number], self._projection)

    def _through_arrow(
        self, number: int, opened: _OpenFile, column: Column, positions: np.ndarray
    ) -> Values:
        """Rows of one file, from record batches that Arrow has validated."""
        fill = self._projection.fill.get(column.name)
        pieces: list[tuple[np.ndarray, Any]] = []
        for part, inside, slots in grouped(positions, opened.starts):
            try:
                array = self._batch(number, opened, part).column(column.name)
                opened.validate(part, column.name, array)
            except _REFUSALS as error:
                cause = ValueError(f"record batch {part} is damaged: {error}")
                raise BadRow(int(slots[0]), cause) from error
            picked = taken(array, inside)
            try:
                pieces.append((slots, convert(picked, column, fill)))
            except (ValueError, pa.ArrowException) as error:
                raise BadRow(int(slots[first_bad(picked, column, fill)]), error) from error
        return gather(pieces, column, len(positions))

    def _batch(self, number: int, opened: _OpenFile, part: int) -> pa.RecordBatch:
        if opened.batches:
            return opened.batches[part]
        key = int(self._first_batches[number]) + part
        with opened.lock:
            batch = self._decoded.get(key)
            if batch is None:
                batch = opened.decode(part)
                self._decoded.put(key, batch)
            return batch

    def _bad(self, number: int, position: int, cause: str) -> BadRecord:
        path = self._files[number].path
        index = int(self._starts[number]) + position
        return BadRecord(
            f"{path}, row {position} (record {index} of the source): {cause}",
            index=index,
            file=path,
            position=position,
        )

    def __getstate__(self) -> dict[str, Any]:
        own = ("_handles", "_decoded")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


@final
class _OpenFile:
    """A file mapped by this process.

    starts: int64[batches + 1], first row of each record batch, then the number of rows.
    direct: by column, None where Arrow has to read it.
    batches: of a file whose buffers are used where they lie; empty for others.
    """

    def __init__(self, file: File, layout: Layout, projection: Projection) -> None:
        self.lock = threading.Lock()
        self.mapped = Mapped(file)
        self.starts = np.array([0, *np.cumsum(layout.rows)], np.int64)
        self._rows = layout.rows
        self._valid: set[tuple[int, str]] = set()
        self.batches: list[pa.RecordBatch] = []
        self.direct: dict[str, Rows | None] = dict.fromkeys(projection.names)
        try:
            # Arrow copies what it projects, and without that slices the mapped file.
            names = None if layout.as_stored else projection.names
            self._reader = _reader(self.mapped, names)
            if layout.as_stored:
                self.batches = _all_batches(self._reader)
        except _REFUSALS as error:
            raise Damaged(f"{file.path} cannot be read as Arrow: {error}") from error
        if layout.as_stored:
            found = tuple(batch.num_rows for batch in self.batches)
            if found != layout.rows:
                raise Damaged(
                    f"{file.path}: its record batches are said to have {sum(layout.rows)} rows,"
                    f" and have {sum(found)}"
                )
            for column in projection.columns:
                arrays = [batch.column(column.name) for batch in self.batches]
                fill = projection.fill.get(column.name)
                self.direct[column.name] = mapped_rows(
                    column, arrays, self.mapped.bytes, self.mapped.raw, fill
                )

    def decode(self, part: int) -> pa.RecordBatch:
        """A record batch of a compressed file. Raises what Arrow raises."""
        batch = self._reader.get_batch(part)
        if batch.num_rows != self._rows[part]:
            raise ValueError(f"{self._rows[part]} rows wanted, found {batch.num_rows}")
        batch.validate(full=True)
        return batch

    def validate(self, part: int, name: str, array: pa.Array) -> None:
        """Let Arrow look at all of a column of a mapped record batch, once."""
        if self.batches and (part, name) not in self._valid:
            array.validate(full=True)
            self._valid.add((part, name))


def outline(file: File) -> Outline:
    """What `file` says of itself. Raises: Damaged, Unsupported, NotFound, StoreFailed, Mismatch."""
    mapped = Mapped(file)
    data = memoryview(mapped.raw)
    try:
        if is_file(data):
            layout = read_layout(data)
            schema = _reader(mapped, None).schema
        elif bytes(data[:4]) == b"FEA1":
            raise Unsupported(
                f"{file.path} is Feather version 1; write it anew, as version 2, with"
                " pyarrow.feather.write_feather"
            )
        else:
            layout, schema = _stream_layout(file, mapped)
        check_schema(file, schema)
    except _REFUSALS as error:
        raise Damaged(
            f"{file.path} holds {file.size_bytes} bytes and is cut short or no Arrow file: {error}"
        ) from error
    return Outline(layout, schema)


def _stream_layout(file: File, mapped: Mapped) -> tuple[Layout, pa.Schema]:
    reader = _reader(mapped, None)
    batches = list(reader)
    base, size = mapped.bytes.ctypes.data, mapped.bytes.size
    for batch in batches:
        for array in batch.columns:
            for buffer in array.buffers():
                if buffer and buffer.size and not 0 <= buffer.address - base <= size - buffer.size:
                    raise Unsupported(
                        f"{file.path} is a compressed Arrow stream, which has no random access;"
                        " write it as a file (pyarrow.ipc.new_file), best without compression"
                    )
    return Layout(checked_rows([batch.num_rows for batch in batches]), True), reader.schema


def _reader(mapped: Mapped, names: Sequence[str] | None) -> Any:
    """A reader of the columns `names`, or all of them, of a mapped file or stream."""
    if not mapped.bytes.size:
        raise BadLayout("it is empty")
    buffer = pa.py_buffer(mapped.raw)
    if not is_file(memoryview(mapped.raw)):
        return pa.ipc.open_stream(pa.BufferReader(buffer))
    whole = pa.ipc.open_file(pa.BufferReader(buffer))
    if names is None:
        return whole
    fields = [whole.schema.get_field_index(name) for name in names]
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    return pa.ipc.open_file(pa.BufferReader(buffer), options=options)


def _all_batches(reader: Any) -> list[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    return list(reader)


def write_arrow(
    path: Pattern, columns: Mapping[str, Any] | pa.Table, *, batch_size: int | None = None
) -> int:
    """Write one local Arrow IPC file, uncompressed, and return its number of rows.

    `columns`: as for `write_parquet`. Record batches hold `batch_size` rows; without, each chunk
    of the table is one. A file that is there is replaced, durably and all at once; on an error it
    stays as it was.

    Raises: Misuse for columns of different lengths, values that no Arrow type holds, or a batch
    size below 1; NotFound for an absent directory; StoreFailed.
    """
    if batch_size is not None:
        batch_size = whole("batch_size", batch_size, 1, "rows")
    table = columns if isinstance(columns, pa.Table) else as_table(columns)
    table = table.unify_dictionaries()  # a file holds one for each column
    with (
        naming(checked_path("path", path), "written"),
        replacing(path) as temporary,
        pa.ipc.new_file(temporary, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=batch_size)
    return int(table.num_rows)

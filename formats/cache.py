"""Parquet rows in any order at memory speed: a local copy as memory-mapped Arrow files.

A cache directory holds one directory per entry, named by a digest of what is in it: which Parquet
files, which columns. Each Parquet file becomes one Arrow file, complete under its final name or not
there at all, so that what a killed process has finished is kept. One process builds an entry at a
time; the others wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from formats.arrow import ArrowSource, outline
from formats.columns import cached_type
from formats.errors import BadRecord, Damaged, DataError, StoreFailed, Unsupported
from formats.files import File, Pattern, naming, replacing
from formats.source import Source, Spec, sealed

if TYPE_CHECKING:
    from formats.parquet import ParquetSource

_LAYOUT = 1
"""Raised when entries of an earlier release can no longer be used."""
_LOCK = "lock"
_log = logging.getLogger("formats")


@final
class CachedParquetSource(Source):
    """A Parquet source that reads from its Arrow cache; made by `ParquetSource.cached`.

    Records, result types, errors and fingerprint are those of the Parquet source, so a state fits
    whether or not the cache is used. The Parquet files stay needed: for the fingerprint, and to
    know that the cache is still theirs.
    """

    def __init__(self, parquet: ParquetSource, arrow: ArrowSource) -> None:
        self._parquet = parquet
        self._arrow = arrow

    def __len__(self) -> int:
        return len(self._parquet)

    def __repr__(self) -> str:
        return f"{self._parquet!r}.cached()"

    @property
    def spec(self) -> Spec:
        """See `ParquetSource.spec`."""
        return self._parquet.spec

    def read(self, indices: np.ndarray | Sequence[int]) -> dict[str, np.ndarray | list[Any]]:
        """See `Source.read`."""
        try:
            return self._arrow.read(indices)
        except BadRecord as error:
            place = self._parquet.where(error.index)
            raise BadRecord(
                f"{place} (record {error.index} of the source; from its cache): {error}",
                index=error.index,
                file=self._parquet.files[self._parquet.file_of(error.index)].path,
                position=error.position,
            ) from error

    def select(self, columns: Sequence[str]) -> ParquetSource:
        """See `ParquetSource.select`; read from the Parquet files."""
        return self._parquet.select(columns)

    def fingerprint(self) -> dict[str, Any]:
        """That of the Parquet files."""
        return self._parquet.fingerprint()

    def where(self, index: int) -> str:
        """See `ParquetSource.where`."""
        return self._parquet.where(index)

    @property
    def blocks(self) -> np.ndarray:
        """Those of the Parquet files: an order is the same with and without the cache."""
        return self._parquet.blocks

    def close(self) -> None:
        """See `Source.close`."""
        self._arrow.close()
        self._parquet.close()


def cached(source: ParquetSource, directory: Pattern) -> CachedParquetSource:
    """`source` with what is missing in the cache built. See `ParquetSource.cached`."""
    key = _key(source)
    entry = os.path.join(os.path.abspath(os.fspath(directory)), key)
    with naming(entry, "made"):
        os.makedirs(entry, mode=0o700, exist_ok=True)
    with _locked(entry):
        files = _complete(source, entry)
    names = [column.name for column in source.spec.columns]
    arrow = ArrowSource(files, columns=names, fill_null=source.fill_null)
    if arrow.spec != source.spec:
        raise Damaged(f"{entry} holds other columns than its name says; delete it")
    return CachedParquetSource(source, arrow)


def _key(source: ParquetSource) -> str:
    """Digest of all that decides what is in an entry; what stands for null is put in later."""
    found = source.fingerprint()
    types = {name: str(kind) for name, kind in source.types.items()}
    fields = {"layout": _LAYOUT, "files": found["files"], "types": types}
    return str(sealed(fields)["digest"])


def _complete(source: ParquetSource, entry: str) -> list[File]:
    """The Arrow files of an entry, those that are missing built; its lock is held."""
    targets = [os.path.join(entry, f"{number:06d}.arrow") for number in range(len(source.files))]
    for name in os.listdir(entry):
        if name.startswith(".") and name.endswith(".tmp"):  # of a process that was killed
            os.unlink(os.path.join(entry, name))
    # Sorted, so that the same columns in another order are the same entry.
    types = sorted(source.types.items())
    schema = pa.schema([(name, cached_type(kind)) for name, kind in types])
    rows = source.file_rows
    missing = [
        number
        for number, target in enumerate(targets)
        if not _is_whole(target, rows[number], schema)
    ]
    if missing:
        done = sum(rows) - sum(rows[number] for number in missing)
        with _progress(entry, done, sum(rows)) as advance:
            for number in missing:
                _convert(source, number, targets[number], schema, advance)
    return [_file(target) for target in targets]


def _file(path: str) -> File:
    with naming(path):
        return File(path, os.path.basename(path), os.stat(path).st_size)


def _is_whole(path: str, rows: int, schema: pa.Schema) -> bool:
    """Whether a finished file is there and is what it should be."""
    if not os.path.exists(path):
        return False
    try:
        found = outline(_file(path))
    except DataError:
        return False  # damaged since: it is built again
    return sum(found.layout.rows) == rows and found.schema.equals(schema)


def _convert(
    source: ParquetSource,
    number: int,
    target: str,
    schema: pa.Schema,
    advance: Callable[[int], None],
) -> None:
    """One Parquet file to one Arrow file; its final name appears when all of it is on disk."""
    found = 0
    with _writing(target), replacing(target) as temporary:
        options = pa.ipc.IpcWriteOptions(compression=None)
        with (
            pa.OSFile(temporary, "wb") as sink,
            pa.ipc.new_file(sink, schema, options=options) as out,
        ):
            for batch in source.batches(number):
                out.write_batch(_cast(batch, schema, source.files[number]))
                found += batch.num_rows
                advance(batch.num_rows)
        if found != source.file_rows[number]:
            path = source.files[number].path
            raise Damaged(f"{path}: its footer says {source.file_rows[number]} rows, found {found}")


def _cast(batch: pa.RecordBatch, schema: pa.Schema, file: File) -> pa.RecordBatch:
    columns = []
    for field in schema:
        array = batch.column(field.name)
        try:
            columns.append(array if array.type == field.type else array.cast(field.type))
        except pa.ArrowException as error:
            raise Unsupported(
                f"{file.path}: column {field.name!r} of type {array.type} cannot be cached"
                f" ({error}); leave it out with columns=[...], or read without cache="
            ) from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@contextlib.contextmanager
def _writing(target: str) -> Iterator[None]:
    try:
        with naming(target, "written"):
            yield
    except StoreFailed as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFailed(
                f"{target}: no room to write it ({cause}); what was finished is kept: free some"
                " room, or give another cache=, and open the source again"
            ) from error
        raise


@contextlib.contextmanager
def _locked(entry: str) -> Iterator[None]:
    """Hold the lock of an entry, which a process loses when it ends in whatever way."""
    path = os.path.join(entry, _LOCK)
    with naming(path, "locked"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with naming(path, "locked"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("%s is being built by another process; waiting for it", entry)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _progress(entry: str, done: int, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal that a person is watching, and a line in the log."""
    _log.info("building %s: %d of %d rows to go", entry, total - done, total)
    if not sys.stderr.isatty():
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("caching rows"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=done)
        yield lambda rows: bar.advance(task, rows)

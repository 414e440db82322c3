"""Parquet rows in any order at memory speed: a local copy as memory-mapped Arrow files.

A cache directory holds *parts*: of each Parquet file one Arrow file with the columns that are read,
named by a digest of what is in it. So a file that is added to a source costs one more part, and
sources share the parts that they have in common. A part is there whole or not at all. A builder
writes to `.<digest>.tmp` and holds a lock on it, which ends with the process; other builders make
other parts meanwhile, and wait for this one in the end.

The modification time of a part is the last time that a source with it was opened. Building removes
parts that no source has used for long, and what killed builders have left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import posixpath
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from formats.arguments import checked_path
from formats.arrow import ArrowSource, outline
from formats.columns import cached_type
from formats.errors import BadRecord, Damaged, DataError, NotFound, StoreFailed, Unsupported
from formats.files import File, Pattern, naming, replacing
from formats.source import Source, Spec, json_digest

if TYPE_CHECKING:
    from formats.parquet import ParquetSource

_LAYOUT = 2
"""Raised when parts of an earlier release can no longer be used."""
_UNUSED_S = 30 * 86400.0
"""Parts that no source has had for so long are removed when others are made."""
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp")
_PART = re.compile(r"[0-9a-f]{32}\.arrow")
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
        except NotFound as error:
            raise NotFound(
                f"{error}: it was removed from the cache; open the source again"
            ) from error

    def select(self, columns: Sequence[str]) -> Source:
        """See `ParquetSource.select`; from the cache where it has all of the columns."""
        parquet = self._parquet.select(columns)
        if {*columns} <= {column.name for column in self.spec.columns}:
            return CachedParquetSource(parquet, self._arrow.select(columns))
        return parquet

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
    place = os.path.abspath(checked_path("cache", directory))
    with naming(place, "made"):
        os.makedirs(place, mode=0o700, exist_ok=True)
    parts = [os.path.join(place, f"{key}.arrow") for key in _keys(source)]
    _take_over(source, place, parts)
    _complete(source, place, parts)
    names = source.projection.names
    arrow = ArrowSource(list(map(_file, parts)), **source.projection.arguments(names))
    if arrow.spec != source.spec:
        raise Damaged(f"{place}: parts hold other columns than their names say; delete it")
    return CachedParquetSource(source, arrow)


def _keys(source: ParquetSource) -> list[str]:
    """By file, a digest of all that decides what is in its part.

    The values of `fill_null` do not enter, and of the name of the file only the last component: the
    others change if the pattern does.
    """
    about = {"layout": _LAYOUT, "types": _types(source)}
    return [
        json_digest(about | file | {"name": posixpath.basename(file["name"])})
        for file in source.fingerprint()["files"]
    ]


def _types(source: ParquetSource) -> dict[str, str]:
    return {name: str(kind) for name, kind in source.projection.types.items()}


def _complete(source: ParquetSource, place: str, parts: Sequence[str]) -> None:
    """Build the parts that are missing."""
    # Sorted, so that the same columns in another order are the same parts.
    types = sorted(source.projection.types.items())
    schema = pa.schema([(name, cached_type(kind)) for name, kind in types])
    rows = source.file_rows
    for part in parts:
        with contextlib.suppress(OSError):  # it is missing, or not ours to mark
            os.utime(part)
    # Files that are the same have one part.
    missing = {
        part: number
        for number, part in enumerate(parts)
        if not _is_whole(part, rows[number], schema)
    }
    if not missing:
        return
    to_go = sum(rows[number] for number in missing.values())
    with _progress(place, sum(rows) - to_go, sum(rows)) as advance:
        for wait in (False, True):
            for part, number in list(missing.items()):
                with _claimed(part, wait=wait) as temporary:
                    if temporary is None:
                        continue
                    if _is_whole(part, rows[number], schema):  # another one has made it meanwhile
                        advance(rows[number])
                    else:
                        _convert(source, number, part, temporary, schema, advance)
                del missing[part]
    _remove_unused(place)


@contextlib.contextmanager
def _claimed(part: str, *, wait: bool) -> Iterator[str | None]:
    """The temporary file of a part, locked; None where another one has it and `wait` is false.

    A process loses the lock when it ends in whatever way. The file is gone afterwards.
    """
    directory, name = os.path.split(part)
    temporary = os.path.join(directory, f".{name.removesuffix('.arrow')}.tmp")
    descriptor = _locked(temporary, os.O_CREAT, wait=wait)
    if descriptor is None:
        yield None
        return
    try:
        yield temporary
    finally:
        if _is_at(temporary, descriptor):  # it has not become the part
            os.unlink(temporary)
        os.close(descriptor)


def _locked(path: str, flags: int, *, wait: bool) -> int | None:
    """A descriptor of `path` with its lock; None where another one has it and `wait` is false."""
    while True:
        with naming(path, "locked"):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            with naming(path, "locked"):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not wait:
                        os.close(descriptor)
                        return None
                    _log.info("%s is being built by another process; waiting for it", path)
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(path, descriptor):
                return descriptor
            os.close(descriptor)  # the builder before has renamed or removed it
        except BaseException:
            os.close(descriptor)
            raise


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_unused(place: str) -> None:
    """Removes parts that no source has used for long, and temporary files of killed builders."""
    oldest = time.time() - _UNUSED_S
    with naming(place), os.scandir(place) as entries:
        for entry in entries:
            with contextlib.suppress(OSError, DataError):  # another one was faster, or has it
                if _TEMPORARY.fullmatch(entry.name):
                    part = os.path.join(place, f"{entry.name[1:-4]}.arrow")
                    with _claimed(part, wait=False):
                        pass
                elif _PART.fullmatch(entry.name) and entry.stat().st_mtime < oldest:
                    _log.info("%s was not used for long, and is removed", entry.path)
                    os.unlink(entry.path)


def _take_over(source: ParquetSource, place: str, parts: Sequence[str]) -> None:
    """Makes parts of an entry of layout 1, which had one directory for all files of a source."""
    fields = {"layout": 1, "files": source.fingerprint()["files"], "types": _types(source)}
    old = os.path.join(place, json_digest(fields))
    if not os.path.isdir(old):
        return
    try:
        descriptor = _locked(os.path.join(old, "lock"), 0, wait=True)
    except NotFound:
        return  # another one has just taken it over
    assert descriptor is not None
    try:
        with naming(old, "taken over"):
            for number, part in enumerate(parts):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(os.path.join(old, f"{number:06d}.arrow"), part)
            shutil.rmtree(old)
    finally:
        os.close(descriptor)


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
    part: str,
    temporary: str,
    schema: pa.Schema,
    advance: Callable[[int], None],
) -> None:
    """One Parquet file to one Arrow file; its final name appears when all of it is on disk."""
    found = 0
    with _writing(part), replacing(part, temporary):
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
def _progress(place: str, done: int, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal that a person is watching, and a line in the log."""
    _log.info("building %s: %d of %d rows to go", place, total - done, total)
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

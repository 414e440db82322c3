"""ArrayRecord files: random access to records of bytes."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import numpy as np
from array_record.python import array_record_module

from formats.arguments import checked_path, whole
from formats.contents import Contents
from formats.errors import BadRecord, Damaged, Mismatch, Misuse, StoreFailed
from formats.files import (
    THREADS,
    File,
    Pattern,
    as_found,
    naming,
    open_binary,
    replacing,
)
from formats.mapped import only_local
from formats.source import Handles, Source, Spec, as_rows, grouped, open_files

# No readahead by threads: records in sequence are read in the thread that asks for them.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_STEP = 64  # records read before it is looked whether they had to be waited for
_COLD_CALLS = 16
_FOOTER_BLOCK_BYTES = 64 * 1024


@final
class ArrayRecordSource(Source):
    """Records of bytes from ArrayRecord files, numbered through the files in their order.

    Opening reads the footer of each file. Records of files that are in memory are read one by one
    in the calling thread; where they have to be waited for, by one call per file, which asks for
    many at a time and leaves the interpreter to others. Each chunk carries a hash of its own (group
    size 1: each record), so a flipped bit is an error, never another record. At most half of the
    allowed file descriptors are kept open.

    Raises: Damaged, NotFound or StoreFailed for a file that cannot be read; Unsupported for URLs.
    """

    def __init__(self, files: Sequence[File]) -> None:
        self._files = as_found(files)
        only_local(self._files, "ArrayRecord files")
        with ThreadPoolExecutor(THREADS) as pool:
            counts = list(pool.map(_count, self._files))
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._contents = Contents(self._files)
        self._handles: Handles[_OpenFile] = Handles(open_files())

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __repr__(self) -> str:
        return f"ArrayRecordSource({len(self._files)} files, {len(self)} records)"

    @property
    def spec(self) -> Spec:
        """No columns: `read` returns a list of bytes."""
        return Spec()

    def read(self, indices: np.ndarray | Sequence[int]) -> list[bytes]:
        """See `Source.read`."""
        rows = as_rows(indices, len(self))
        records = np.empty(len(rows), object)
        for number, positions, slots in grouped(rows, self._starts):
            records[slots] = self._read_file(number, positions.tolist())
        found: list[bytes] = records.tolist()
        return found

    def fingerprint(self) -> dict[str, Any]:
        """See `Source.fingerprint`."""
        counts = np.diff(self._starts).tolist()
        return self._contents.fingerprint("array_record", counts, {"columns": []})

    def where(self, index: int) -> str:
        """See `Source.where`."""
        rows = as_rows([index], len(self))
        ((number, positions, _),) = grouped(rows, self._starts)
        return f"{self._files[number].path}, record {positions[0]}"

    def close(self) -> None:
        """See `Source.close`."""
        self._handles.close()

    def _read_file(self, number: int, positions: list[int]) -> list[bytes]:
        opened = self._handles.get(number, self._open_file)
        try:
            records = opened.read(positions)
        except RuntimeError:
            records = []
        # A reader that is not ok hands out empty records instead of raising.
        if len(records) == len(positions) and opened.reader.ok():
            return records
        self._handles.drop(number, opened)
        return self._one_by_one(number, positions)

    def _one_by_one(self, number: int, positions: list[int]) -> list[bytes]:
        """The same records through a fresh reader, each alone, to name the one that is bad."""
        file = self._files[number]
        reader = self._open(number)
        records: list[bytes] = []
        for position in positions:
            index = int(self._starts[number]) + position
            try:
                (record,) = reader.read([position])
            except RuntimeError as error:
                raise BadRecord(
                    f"{file.path}, record {position} (record {index} of the source): {error}",
                    index=index,
                    file=file.path,
                    position=position,
                ) from error
            if not reader.ok():
                raise Damaged(f"{file.path}: the reader failed at record {position}")
            records.append(record)
        return records

    def _open_file(self, number: int) -> _OpenFile:
        return _OpenFile(self._open(number))

    def _open(self, number: int) -> Any:
        file = self._files[number]
        reader = _reader(file)
        wanted = int(self._starts[number + 1] - self._starts[number])
        if reader.num_records() != wanted:
            raise Mismatch(
                f"{file.path} changed since the source was opened; open it again",
                [f"{file.name}: wanted {wanted} records, found {reader.num_records()}"],
            )
        return reader

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_handles"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._handles = Handles(open_files())


@final
class _OpenFile:
    """A file opened by this process, and the way in which its records are read.

    The reader has two. One by one costs the same few microseconds for each, but the interpreter
    stands still until a record is there. A call for many starts tasks for them in threads of the
    library, and goes through all chunks of the file: that only pays where there is waiting to do.
    """

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self._lock = threading.Lock()  # the reader has one position
        self._cold_calls = 0  # that are still to be made for many

    def read(self, positions: list[int]) -> list[bytes]:
        """Records at rising positions; fewer, or RuntimeError, where one cannot be read."""
        found: list[bytes] = []
        with self._lock:
            if self._cold_calls:
                self._cold_calls -= 1
            else:
                found = self._in_memory(positions)
                if len(found) < len(positions):
                    self._cold_calls = _COLD_CALLS
        if len(found) < len(positions):
            found += self.reader.read(positions[len(found) :])
        return found

    def _in_memory(self, positions: list[int]) -> list[bytes]:
        """The records until an eighth of them had to be waited for."""
        seek, read = self.reader.seek, self.reader.read
        found: list[bytes] = []
        waits, step = _waits(), 1
        while len(found) < len(positions):
            for position in positions[len(found) : len(found) + step]:
                seek(position)
                found.append(read())
            # Not a single one: to be asked for the interpreter is a wait, too.
            if _waits() - waits > max(2, len(found) // 8):
                break
            step = min(2 * step, _STEP)
        return found


def _waits() -> int:
    """How often this thread has slept until something came."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def write_array_record(
    path: Pattern, records: Iterable[bytes], *, group_size: int = 1, options: str = ""
) -> int:
    """Write `records` to one local ArrayRecord file and return how many there were.

    `group_size` records share a chunk: 1 is right for random access. `options` are further writer
    options of array_record, such as `uncompressed`. A file that is there is replaced, durably and
    all at once; on an error it stays as it was.

    Raises: Misuse for a record that is not bytes, or bad options; NotFound for an absent
    directory; StoreFailed.
    """
    name = checked_path("path", path)
    group_size = whole("group_size", group_size, 1, "records")
    if not isinstance(options, str):
        raise Misuse(f"options: wanted a text, such as 'uncompressed', found {options!r:.80}")
    text = ",".join(filter(None, [f"group_size:{group_size}", options]))
    count = 0
    try:
        records = iter(records)
    except TypeError as error:
        raise Misuse(f"records: wanted several of bytes, found {type(records).__name__}") from error
    with replacing(path) as temporary:
        try:
            writer = array_record_module.ArrayRecordWriter(temporary, text)
        except (ValueError, TypeError) as error:  # TypeError: half of a surrogate pair
            raise Misuse(f"{name}: options={options!r:.80}: {error}") from error
        for record in records:
            if not isinstance(record, bytes):
                raise Misuse(
                    f"{name}: record {count} is of type {type(record).__name__}, wanted bytes"
                )
            with _writing(name):
                writer.write(record)
            count += 1
        with _writing(name):
            writer.close()
    return count


@contextlib.contextmanager
def _writing(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StoreFailed(f"{name}: cannot be written ({error})") from error


def _count(file: File) -> int:
    return int(_reader(file).num_records())


def _reader(file: File) -> Any:
    """An open reader; it reports neither an absent file nor a bad footer by itself."""
    with open_binary(file) as stream, naming(file.path):
        size_bytes = stream.seek(0, os.SEEK_END)
    if size_bytes < _FOOTER_BLOCK_BYTES:
        raise Damaged(
            f"{file.path} holds {size_bytes} bytes and an ArrayRecord file at least"
            f" {_FOOTER_BLOCK_BYTES}: it is cut short or no ArrayRecord file"
        )
    reader = array_record_module.ArrayRecordReader(file.path, options=_OPTIONS)
    if reader.ok():
        return reader
    cause = "it has no footer"
    try:
        reader.close()  # the only call that says what is wrong
    except RuntimeError as error:
        cause = str(error).strip() or cause
    raise Damaged(f"{file.path} is cut short or no ArrayRecord file: {cause}")

"""Who serves the batches: from the same files, in a random order of all records, in one process.

Opening a side gives a function that makes the next batch. Files that a side keeps open are open
before that; threads and processes that it starts are started within the time that is measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python import array_record_module

import formats
from datapipe import Pipeline
from formats.arrayrecord import write_array_record

RECORD_BYTES: Final = 1024
WINDOW: Final = 512
"""Tokens in a record: with 16 bits each, 1 KiB as well."""
FILES: Final = 8
SEED: Final = 17
BURN_S: Final = 1e-3

Next = Callable[[], Any]


@dataclass(frozen=True)
class Side:
    """One way to serve batches.

    open: gives a function that makes the next batch.
    part: of the batches of a case that it makes, 0 to 1: slow sides make fewer.
    """

    name: str
    open: Callable[[], AbstractContextManager[Next]]
    part: float = 1.0


# -- ours ------------------------------------------------------------------------------------------


def ours(name: str, pipe: Pipeline, **options: Any) -> Side:
    """An iterator of a pipeline."""

    @contextlib.contextmanager
    def opened() -> Iterator[Next]:
        with pipe.iterator(**options) as iterator:
            yield iterator.__next__

    return Side(name, opened)


def reads(name: str, source: formats.Source, batch_size: int) -> Side:
    """One `read` a batch, without a pipeline."""
    return _drawn(name, len(source), batch_size, source.read)


# -- limits: written by hand -----------------------------------------------------------------------


def bare_records(name: str, directory: Path, batch_size: int) -> Side:
    """The library's own reader, asked once a batch and file."""
    options = "readahead_buffer_size:0,max_parallelism:0"
    readers = [
        array_record_module.ArrayRecordReader(str(path), options=options)
        for path in sorted(directory.glob("*.array_record"))
    ]
    starts = np.cumsum([0, *(reader.num_records() for reader in readers)])

    def read(rows: np.ndarray) -> list[bytes]:
        found = np.empty(rows.size, object)
        at = np.searchsorted(starts, rows, side="right") - 1
        for number, reader in enumerate(readers):
            there = np.flatnonzero(at == number)
            if there.size:
                found[there] = reader.read((rows[there] - starts[number]).tolist())
        return found.tolist()  # type: ignore[no-any-return]

    return _drawn(name, int(starts[-1]), batch_size, read, part=0.25)


def bare_tokens(name: str, path: Path, batch_size: int) -> Side:
    """A gather of NumPy from a mapped file."""
    windows = np.memmap(path, np.uint16, "r").reshape(-1, WINDOW)
    return _drawn(name, len(windows), batch_size, windows.__getitem__)


def _drawn(
    name: str, records: int, batch_size: int, read: Callable[[Any], Any], part: float = 1.0
) -> Side:
    """Batches of rows that were drawn beforehand."""
    drawn = np.random.default_rng(SEED).integers(0, records, (4096, batch_size))

    @contextlib.contextmanager
    def opened() -> Iterator[Next]:
        rows = iter(drawn)

        def make() -> Any:
            nonlocal rows
            row = next(rows, None)
            if row is None:
                rows = iter(drawn)
                row = next(rows)
            return read(row)

        yield make

    return Side(name, opened, part)


# -- others ----------------------------------------------------------------------------------------


def of_grain(
    name: str, directory: Path, batch_size: int, options: grain.ReadOptions | None = None
) -> Side:
    """Grain on the same ArrayRecord files; batches are lists, so that it stacks nothing."""
    paths = sorted(map(str, directory.glob("*.array_record")))
    source = grain.sources.ArrayRecordDataSource(paths)
    shuffled = grain.MapDataset.source(source).shuffle(seed=SEED).repeat()
    batches = shuffled.batch(batch_size, batch_fn=list)

    @contextlib.contextmanager
    def opened() -> Iterator[Next]:
        with contextlib.closing(iter(batches.to_iter_dataset(options))) as iterator:
            yield iterator.__next__

    return Side(name, opened, part=0.1)


def of_datasets(name: str, path: Path, batch_size: int, form: str | None) -> Side:
    """Hugging Face datasets on a Parquet file, of which it makes an Arrow file that it maps."""
    import datasets

    datasets.disable_progress_bars()
    cache = str(path.parent / "datasets")
    whole = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=False)
    data = whole.shuffle(seed=SEED, keep_in_memory=True).with_format(form)

    @contextlib.contextmanager
    def opened() -> Iterator[Next]:
        def batches() -> Iterator[Any]:
            while True:
                yield from data.iter(batch_size, drop_last_batch=True)

        yield batches().__next__

    return Side(name, opened, part=0.25)


def of_streaming(name: str, directory: Path, batch_size: int) -> Side:
    """MosaicML streaming on shards of its own that are all there, in an order of all records."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    @contextlib.contextmanager
    def opened() -> Iterator[Next]:
        data = StreamingDataset(
            local=str(directory),
            shuffle=True,
            shuffle_algo="naive",
            shuffle_seed=SEED,
            batch_size=batch_size,
        )
        loader = DataLoader(data, batch_size, collate_fn=list, drop_last=True)

        def batches() -> Generator[Any]:
            while True:
                yield from loader

        with contextlib.closing(batches()) as found:
            yield found.__next__

    return Side(name, opened, part=0.1)


# -- files -----------------------------------------------------------------------------------------


def write_records(directory: Path, records: int) -> None:
    """Random bytes, which no compression makes smaller."""
    generator = np.random.Generator(np.random.SFC64(SEED))
    each = -(-records // FILES)
    for number in range(FILES):
        raw = generator.bytes(each * RECORD_BYTES)
        write_array_record(
            directory / f"{number:05}.array_record",
            (raw[at : at + RECORD_BYTES] for at in range(0, len(raw), RECORD_BYTES)),
        )


def write_shards(directory: Path, records: int) -> None:
    """The same records as `write_records` in the format of MosaicML streaming."""
    from streaming import MDSWriter

    generator = np.random.Generator(np.random.SFC64(SEED))
    with MDSWriter(out=str(directory), columns={"data": "bytes"}) as writer:
        for _ in range(records):
            writer.write({"data": generator.bytes(RECORD_BYTES)})


def write_rows(path: Path, rows: int) -> None:
    """One binary column."""
    raw = np.random.Generator(np.random.SFC64(SEED)).bytes(rows * RECORD_BYTES)
    values = [raw[at : at + RECORD_BYTES] for at in range(0, len(raw), RECORD_BYTES)]
    pq.write_table(pa.table({"data": pa.array(values, pa.binary())}), path, row_group_size=4096)


def write_tokens(path: Path, windows: int) -> None:
    """Random tokens of 16 bits."""
    generator = np.random.Generator(np.random.SFC64(SEED))
    generator.integers(1, 1 << 15, windows * WINDOW, np.uint16).tofile(path)


def burn(record: bytes) -> bytes:
    """Takes a millisecond of the processor."""
    stop = time.thread_time() + BURN_S
    while time.thread_time() < stop:
        pass
    return record

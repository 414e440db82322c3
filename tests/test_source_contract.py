"""What `formats.Source` promises, of every reader: any rows, threads, processes, pickles, ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pyarrow as pa
import pytest

import formats
from formats import Source
from formats.files import find

SEED = 17
SHARDS = [range(250), range(250, 250), range(250, 600)]
TEXTS = [f"{n}" * (n % 5) for n in range(600)]


def columns(rows: range) -> dict[str, Any]:
    return {
        "x": np.array(rows, np.int64),
        "text": pa.array([TEXTS[n] for n in rows], pa.string()),
        "tokens": pa.array([list(range(n % 4)) for n in rows], pa.list_(pa.int16())),
    }


def arrays(place: Path) -> Source:
    for number, rows in enumerate(SHARDS):
        records = [TEXTS[n].encode() for n in rows]
        formats.write_array_record(place / f"{number}.array_record", records)
    return formats.open_source(place / "*.array_record")


def arrow(place: Path) -> Source:
    for number, rows in enumerate(SHARDS):
        formats.write_arrow(place / f"{number}.arrow", columns(rows), batch_size=90)
    return formats.open_source(place / "*.arrow")


def compressed(place: Path) -> Source:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    for number, rows in enumerate(SHARDS):
        table = pa.table(columns(rows))
        with pa.ipc.new_file(place / f"{number}.arrow", table.schema, options=options) as out:
            out.write_table(table, max_chunksize=90)
    return formats.ArrowSource(find(place / "*.arrow"), cache_bytes=8000)


def parquet(place: Path) -> Source:
    for number, rows in enumerate(SHARDS):
        formats.write_parquet(place / f"{number}.parquet", columns(rows), row_group_size=90)
    return formats.open_source(place / "*.parquet", cache_bytes=8000)


def cached(place: Path) -> Source:
    with parquet(place):
        return formats.open_source(place / "*.parquet", cache=place / "cache")


def tokens(place: Path) -> Source:
    for number, rows in enumerate(SHARDS):
        np.array([*rows, *rows[:5]], np.uint16).tofile(place / f"{number}.bin")
    return formats.open_source(place / "*.bin", window=6, stride=1)


def apart(place: Path) -> Source:
    """More token files than may be open together."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("formats.tokens.open_files", lambda: 2)
        return tokens(place)


READERS: dict[str, Callable[[Path], Source]] = {
    each.__name__: each for each in (arrays, arrow, compressed, parquet, cached, tokens, apart)
}


def record(name: str, n: int) -> Any:
    if name == "arrays":
        return TEXTS[n].encode()
    if name in ("tokens", "apart"):
        rows = next(rows for rows in SHARDS if n in rows)
        return {"tokens": [*rows, *rows[:5]][n - rows[0] :][:6]}
    return {"x": n, "text": TEXTS[n], "tokens": list(range(n % 4))}


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def rows_of(batch: Any) -> list[Any]:
    if isinstance(batch, list):
        return batch
    rows = zip(*batch.values(), strict=True)
    return [plain(dict(zip(batch, row, strict=True))) for row in rows]


@pytest.fixture(params=READERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def source(name: str, tmp_path: Path) -> Iterator[Source]:
    with READERS[name](tmp_path) as found:
        yield found


def test_any_rows_in_any_order(name: str, source: Source) -> None:
    rng = np.random.default_rng(SEED)
    assert len(source) == 600
    wholes = [np.arange(600), rng.permutation(600), rng.integers(0, 600, 50), [7, 7, 0], []]
    for rows in wholes:
        found = rows_of(source.read(rows))
        assert found == [record(name, int(n)) for n in rows], f"seed {SEED}"


def test_single_records(name: str, source: Source) -> None:
    for n in (0, 249, np.int64(250), np.uint8(7), 599):
        assert plain(source[n]) == record(name, int(n))


@pytest.mark.parametrize("rows", [[-1], [600], [0, 1, 999], [2**62]])
def test_numbers_out_of_range_are_named(source: Source, rows: list[int]) -> None:
    with pytest.raises(formats.OutOfRange, match=rf"record {rows[-1]} asked for.*0 to 599") as e:
        source.read(rows)
    assert isinstance(e.value, IndexError)
    with pytest.raises(formats.OutOfRange, match=f"record {rows[-1]} asked for"):
        source[rows[-1]]


@pytest.mark.parametrize("rows", [[0.5], [[0]], [True], ["0"]])
def test_what_is_no_number_is_refused(source: Source, rows: list[Any]) -> None:
    with pytest.raises(formats.Misuse, match="one-dimensional sequence of integers"):
        source.read(rows)


def test_threads_share_it(name: str, source: Source) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(15):
            rows = rng.integers(0, 600, 32)
            if rows_of(source.read(rows)) != [record(name, n) for n in rows.tolist()]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"seeds {wrong}"


def locks(value: Any) -> Iterator[Any]:
    """Those of a source, and of what it has."""
    for each in vars(value).values():
        if isinstance(each, Source):
            yield from locks(each)
        elif hasattr(each, "_lock"):
            yield each._lock


def child(source: Source, rows: list[int], wanted: list[Any]) -> None:
    raise SystemExit(0 if rows_of(source.read(rows)) == wanted else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_open_their_own_files(name: str, source: Source, method: str) -> None:
    source.read([1, 500])
    rows = [599, 0, 250, 249, 0]
    wanted = [record(name, n) for n in rows]
    process = multiprocessing.get_context(method).Process(target=child, args=(source, rows, wanted))
    busy = list(locks(source))
    assert busy
    with contextlib.ExitStack() as held:
        for lock in busy:  # as if another thread were reading
            held.enter_context(lock)
        process.start()
    process.join(60)
    process.kill()  # does nothing to one that has ended
    process.join()
    assert process.exitcode == 0
    assert rows_of(source.read(rows)) == wanted


def test_pickles_are_the_same_source(name: str, source: Source) -> None:
    source.read([3])
    again = pickle.loads(pickle.dumps(source))
    with again:
        assert rows_of(again.read([5, 3])) == [record(name, 5), record(name, 3)]
        assert again.fingerprint() == source.fingerprint()
        assert again.spec == source.spec
        assert again.where(400) == source.where(400)
        assert np.array_equal(again.blocks, source.blocks)


TOLD = {
    "arrays": ("2.array_record, record 151", "ArrayRecordSource(3 files, 600 records)"),
    "arrow": ("2.arrow, row 151", "ArrowSource(3 files, 600 rows, columns x, text, tokens)"),
    "compressed": ("2.arrow, row 151", "ArrowSource(3 files, 600 rows, columns x, text, tokens)"),
    "parquet": (
        "2.parquet, row 151 (row group 1)",
        "ParquetSource(3 files, 600 rows, columns x, text, tokens)",
    ),
    "cached": (
        "2.parquet, row 151 (row group 1)",
        "ParquetSource(3 files, 600 rows, columns x, text, tokens).cached()",
    ),
    "tokens": ("2.bin, tokens 151 to 156", "TokenSource(3 files, 600 windows of 6 uint16 tokens)"),
    "apart": ("2.bin, tokens 151 to 156", "TokenSource(3 files, 600 windows of 6 uint16 tokens)"),
}


def test_places_are_told(name: str, source: Source, tmp_path: Path) -> None:
    where, shown = TOLD[name]
    assert source.where(401) == f"{tmp_path}/{where}"
    assert repr(source) == shown
    with pytest.raises(formats.OutOfRange):
        source.where(600)


def test_closed_means_closed(name: str, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with READERS[name](tmp_path) as source:
        source.read([0, 400])
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(formats.Misuse, match="closed"):
        source.read([0])


def test_grain_takes_it_as_a_source(name: str, source: Source) -> None:
    dataset = grain.MapDataset.source(source).shuffle(seed=SEED).map(plain)
    found = [dataset[n] for n in range(600)]
    assert sorted(map(repr, found)) == sorted(repr(record(name, n)) for n in range(600))
    assert list(map(plain, source._getitems([9, 2]))) == [record(name, 9), record(name, 2)]
    assert source._getitems([]) == []

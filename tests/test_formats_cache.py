"""The Arrow cache of Parquet files: the same rows, built once, whole or not at all."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import formats
from formats import cache as caching
from formats.parquet import ParquetSource

SEED = 17


def write(directory: Path, files: int = 3, rows: int = 40) -> str:
    """Parquet files with a column of each kind, and nulls where they can be."""
    directory.mkdir(exist_ok=True)
    for number in range(files):
        ids = np.arange(rows) + rows * number
        table = pa.table(
            {
                "id": ids,
                "text": [None if i % 7 == 0 else f"text {i}" for i in ids.tolist()],
                "blob": pa.array([b"x" * (i % 9) for i in ids.tolist()], pa.large_binary()),
                "tag": pa.array(
                    [["red", "green"][i % 2] for i in ids.tolist()]
                ).dictionary_encode(),
                "tokens": [list(range(i % 4)) for i in ids.tolist()],
                "pair": pa.array([[i, -i] for i in ids.tolist()], pa.list_(pa.int32(), 2)),
                "words": pa.array(
                    [["a", None]] * rows, pa.list_(pa.dictionary(pa.int8(), pa.string()))
                ),
                "point": [{"x": i, "y": None} for i in ids.tolist()],
                "maybe": pa.array([None if i % 5 == 0 else i for i in ids.tolist()], pa.int16()),
            }
        )
        path = directory / f"{number}.parquet"
        formats.write_parquet(path, table, row_group_size=max(1, rows // 3))
    return str(directory / "*.parquet")


def parts(cache: Path) -> dict[str, int]:
    """Names of the parts, which are all that is there, and their inodes."""
    assert all(re.fullmatch(r"[0-9a-f]{32}\.arrow", name) for name in os.listdir(cache))
    return {path.name: path.stat().st_ino for path in cache.iterdir()}


def listed(batch: dict[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [each.tolist() if isinstance(each, np.ndarray) else each for each in column]
        for name, column in batch.items()
    }


@pytest.mark.parametrize("columns", [None, ["tokens", "id"], ["tag", "words"]])
def test_rows_and_fingerprint_are_those_of_the_parquet_files(tmp_path, columns):
    pattern = write(tmp_path / "data")
    fill = {"maybe": -1} if columns is None else None
    source = formats.open_source(pattern, columns=columns, fill_null=fill)
    cached = formats.open_source(pattern, columns=columns, fill_null=fill, cache=tmp_path / "c")
    assert (len(cached), cached.spec) == (len(source), source.spec)
    assert cached.fingerprint() == source.fingerprint()
    assert cached.where(77) == source.where(77)
    rows = np.random.default_rng(SEED).integers(0, 120, 300)
    expected = source.read(rows)
    found = cached.read(rows)
    assert list(found) == list(expected)
    assert listed(found) == listed(expected), f"seed {SEED}"
    again = pickle.loads(pickle.dumps(cached))
    assert listed(again.read([5])) == listed(source.read([5]))
    cached.close()
    with pytest.raises(formats.Misuse, match="closed"):
        cached.read([0])


def test_parts_are_built_once(tmp_path, monkeypatch):
    pattern = write(tmp_path / "data")
    cache = tmp_path / "c"
    formats.open_source(pattern, columns=["id", "text"], cache=cache)
    before = parts(cache)
    assert len(before) == 3
    monkeypatch.setattr(ParquetSource, "batches", lambda *_: pytest.fail("decoded again"))
    formats.open_source(pattern, columns=["id", "text"], cache=cache)
    assert list(formats.open_source(pattern, columns=["text", "id"], cache=cache)[3]) == [
        "text",
        "id",
    ]
    assert parts(cache) == before


def test_other_columns_or_files_are_other_parts(tmp_path):
    pattern = write(tmp_path / "data")
    cache = tmp_path / "c"
    formats.open_source(pattern, columns=["id"], cache=cache)
    formats.open_source(pattern, columns=["id", "text"], cache=cache)
    assert len(parts(cache)) == 6
    old = formats.open_source(pattern, columns=["maybe"], fill_null={"maybe": 0}, cache=cache)
    new = formats.open_source(pattern, columns=["maybe"], fill_null={"maybe": 9}, cache=cache)
    assert len(parts(cache)) == 9, "what stands for null is not stored"
    assert (old.read([0])["maybe"].tolist(), new.read([0])["maybe"].tolist()) == ([0], [9])
    formats.write_parquet(tmp_path / "data/1.parquet", {"id": np.arange(40) * 2})
    changed = formats.open_source(pattern, columns=["id"], cache=cache)
    assert changed.read([43])["id"].tolist() == [6]
    assert len(parts(cache)) == 10


def test_a_null_is_named_by_its_parquet_file(tmp_path):
    pattern = write(tmp_path / "data")
    cached = formats.open_source(pattern, columns=["maybe"], cache=tmp_path / "c")
    with pytest.raises(formats.BadRecord, match=r"data/1\.parquet, row 20 .*fill_null") as bad:
        cached.read([1, 60])
    assert (bad.value.index, bad.value.position) == (60, 20)
    assert bad.value.file == str(tmp_path / "data/1.parquet")


def test_a_row_group_that_cannot_be_decoded_is_named(tmp_path):
    pattern = write(tmp_path / "data")
    path = tmp_path / "data/1.parquet"
    data = bytearray(path.read_bytes())
    data[10] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(formats.BadRecord, match=r"data/1\.parquet, row 0 \(row group 0"):
        formats.open_source(pattern, cache=tmp_path / "c")
    assert len(parts(tmp_path / "c")) == 1
    write(tmp_path / "data")
    assert len(formats.open_source(pattern, columns=["id"], cache=tmp_path / "c")) == 120


def build_and_die(pattern: str, cache: Path) -> None:
    """Build, and be killed in the middle of the second file."""
    real = caching._cast
    seen = []

    def cast(batch, schema, file):
        seen.append(file)
        if file.name == "1.parquet" and seen.count(file) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(batch, schema, file)

    caching._cast = cast  # type: ignore[assignment]
    formats.open_source(pattern, cache=cache)


def test_a_killed_build_goes_on_where_it_was(tmp_path):
    pattern = write(tmp_path / "data")
    cache = tmp_path / "c"
    child = multiprocessing.get_context("spawn").Process(
        target=build_and_die, args=(pattern, cache)
    )
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    (half,) = cache.glob(".*.tmp")
    (finished,) = cache.glob("*.arrow")
    assert len(os.listdir(cache)) == 2
    inode = finished.stat().st_ino
    source = formats.open_source(pattern, fill_null={"maybe": 0}, cache=cache)
    assert source.read(range(120))["id"].tolist() == list(range(120))
    after = parts(cache)
    assert len(after) == 3
    assert after[finished.name] == inode
    assert half.name[1:-4] + ".arrow" in after


@pytest.mark.parametrize("how", ["cut", "empty", "other rows", "garbage"])
def test_a_file_of_the_cache_that_is_none_is_built_again(tmp_path, how):
    pattern = write(tmp_path / "data")
    cache = tmp_path / "c"
    formats.open_source(pattern, columns=["id"], cache=cache)
    bad = cache / sorted(parts(cache))[1]
    if how == "other rows":
        formats.write_arrow(bad, {"id": np.arange(4)})
    else:
        data = bad.read_bytes()
        bad.write_bytes({"cut": data[:-30], "empty": b"", "garbage": b"x" * 5000}[how])
    source = formats.open_source(pattern, columns=["id"], cache=cache)
    assert source.read(range(120))["id"].tolist() == list(range(120))


def test_no_room_leaves_nothing_half(tmp_path):
    pattern = write(tmp_path / "data", rows=3000)
    cache = tmp_path / "c"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            formats.StoreFailed, match=r"[0-9a-f]{32}\.arrow: no room .*give another cache="
        ):
            formats.open_source(pattern, cache=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(cache) == []


def test_who_waits_says_so_and_builds_nothing_twice(tmp_path, monkeypatch, caplog):
    pattern = write(tmp_path / "data")
    cache = tmp_path / "c"
    entered, go_on = threading.Event(), threading.Event()
    built = []
    real = caching._convert

    def convert(source, number, *rest):
        if number == 0:
            entered.set()
            assert go_on.wait(60)
        built.append(number)
        real(source, number, *rest)

    monkeypatch.setattr(caching, "_convert", convert)
    waiting = threading.Event()

    class Waits(logging.Handler):
        def emit(self, record):
            if "waiting for it" in record.getMessage():
                waiting.set()

    log = logging.getLogger("formats")
    handler = Waits()
    log.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "formats"):
            threads = [
                threading.Thread(
                    target=formats.open_source,
                    args=(pattern,),
                    kwargs={"columns": ["id"], "cache": cache},
                )
                for _ in range(2)
            ]
            threads[0].start()
            assert entered.wait(60)
            threads[1].start()
            assert waiting.wait(60)
            go_on.set()
            for thread in threads:
                thread.join(60)
    finally:
        go_on.set()
        log.removeHandler(handler)
    assert built == [1, 2, 0]


def test_files_without_rows(tmp_path):
    (tmp_path / "data").mkdir()
    for number, rows in enumerate([0, 3, 0]):
        formats.write_parquet(tmp_path / f"data/{number}.parquet", {"x": np.arange(rows)})
    source = formats.open_source(tmp_path / "data/*.parquet", cache=tmp_path / "c")
    assert source.read([2, 0])["x"].tolist() == [2, 0]
    empty = formats.open_source(tmp_path / "data/0.parquet", cache=tmp_path / "c")
    assert (len(empty), empty.read([])["x"].dtype) == (0, np.int64)


def test_a_cache_that_cannot_be_there(tmp_path):
    pattern = write(tmp_path / "data")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(formats.StoreFailed, match=r"file: cannot be made"):
        formats.open_source(pattern, cache=tmp_path / "file")
    formats.write_arrow(tmp_path / "a.arrow", {"x": [1]})
    with pytest.raises(formats.Misuse, match="leave out cache="):
        formats.open_source(tmp_path / "a.arrow", cache=tmp_path / "c")


def test_progress_is_for_a_terminal(tmp_path, monkeypatch, capsys):
    pattern = write(tmp_path / "data")
    formats.open_source(pattern, columns=["id"], cache=tmp_path / "c")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    formats.open_source(pattern, columns=["text"], cache=tmp_path / "c")
    shown = capsys.readouterr()
    assert "caching rows" in shown.err
    assert shown.out == ""

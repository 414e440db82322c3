"""Arrow sources against plain lists: layouts, types, nulls, streams, compression, damage."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

import formats
from formats.files import find

SEED = 13

SCHEMA = pa.schema(
    {
        "number": pa.int64(),
        "weight": pa.float32(),
        "half": pa.float16(),
        "flag": pa.bool_(),
        "day": pa.date32(),
        "when": pa.timestamp("us"),
        "text": pa.string(),
        "large": pa.large_string(),
        "view": pa.string_view(),
        "blob": pa.binary(),
        "hash": pa.binary(3),
        "tag": pa.dictionary(pa.int32(), pa.string()),
        "pair": pa.list_(pa.uint8(), 2),
        "grid": pa.list_(pa.list_(pa.int16(), 2), 2),
        "flags": pa.list_(pa.bool_(), 2),
        "tokens": pa.list_(pa.int16()),
        "longs": pa.large_list(pa.float64()),
        "nested": pa.list_(pa.list_(pa.string())),
        "point": pa.struct({"x": pa.int8(), "y": pa.string()}),
    }
)
DIRECT = {
    *("number", "weight", "half", "flag", "day", "when", "text", "large", "blob", "hash"),
    *("pair", "grid", "tokens", "longs"),
}

INT16 = st.integers(-100, 100)
ROW = st.fixed_dictionaries(
    {
        "number": st.integers(-(2**63), 2**63 - 1),
        "weight": st.floats(width=32, allow_nan=False),
        "half": st.sampled_from([0.5, -1.5, 2.0]),
        "flag": st.booleans(),
        "day": st.dates(),
        "when": st.datetimes(),
        "text": st.none() | st.text(max_size=8),
        "large": st.none() | st.text(max_size=8),
        "view": st.none() | st.text(max_size=20),
        "blob": st.none() | st.binary(max_size=8),
        "hash": st.none() | st.binary(min_size=3, max_size=3),
        "tag": st.none() | st.sampled_from(["red", "green", "blue"]),
        "pair": st.lists(st.integers(0, 255), min_size=2, max_size=2),
        "grid": st.lists(st.lists(INT16, min_size=2, max_size=2), min_size=2, max_size=2),
        "flags": st.lists(st.booleans(), min_size=2, max_size=2),
        "tokens": st.none() | st.lists(INT16, max_size=5),
        "longs": st.none() | st.lists(st.floats(allow_nan=False), max_size=3),
        "nested": st.none() | st.lists(st.none() | st.lists(st.none() | st.text(max_size=2))),
        "point": st.none() | st.fixed_dictionaries({"x": st.none() | INT16, "y": st.text()}),
    }
)
ROWS = st.lists(ROW, max_size=9)


def put(path: Path, table: pa.Table, how: str, batch_size: int) -> None:
    """Write `table` as a plain or compressed file, or as a stream."""
    table = pa.concat_tables(
        [table.slice(at, batch_size) for at in range(0, len(table), batch_size)] or [table]
    )
    table = table.unify_dictionaries()
    if how == "stream":
        with pa.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table)
        return
    options = pa.ipc.IpcWriteOptions(compression=None if how == "file" else how)
    with pa.ipc.new_file(str(path), table.schema, options=options) as out:
        out.write_table(table)


def plain(column: Any) -> list[Any]:
    if isinstance(column, np.ndarray):
        assert column.flags.writeable
        return column.tolist()
    assert isinstance(column, list)
    assert all(not isinstance(each, np.ndarray) or each.flags.writeable for each in column)
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in column]


@hypothesis.given(
    files=st.lists(ROWS, min_size=1, max_size=3),
    how=st.sampled_from(["file", "stream", "lz4", "zstd"]),
    batch_size=st.integers(1, 4),
    cache_bytes=st.sampled_from([0, 2000, 10**6]),
    projection=st.none() | st.lists(st.sampled_from(SCHEMA.names), min_size=1, unique=True),
    data=st.data(),
)
@hypothesis.settings(max_examples=60)
def test_reads_what_lists_would_give(
    tmp_path_factory, files, how, batch_size, cache_bytes, projection, data
):
    directory = tmp_path_factory.mktemp("files")
    for number, rows in enumerate(files):
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        put(directory / f"{number}.arrow", table, how, batch_size)
    oracle = [row for rows in files for row in rows]
    found = find(directory / "*.arrow")
    with formats.ArrowSource(found, columns=projection, cache_bytes=cache_bytes) as source:
        assert len(source) == len(oracle)
        for _ in range(3):
            picked = data.draw(
                st.lists(st.integers(0, len(oracle) - 1), max_size=20) if oracle else st.just([])
            )
            batch = source.read(picked)
            assert list(batch) == (projection or SCHEMA.names)
            for column in source.spec.columns:
                values = batch[column.name]
                wanted: list[Any] = [oracle[row][column.name] for row in picked]
                if column.kind == "array":
                    assert values.dtype == column.dtype
                    assert values.shape == (len(picked), *column.shape)
                    wanted = np.array(wanted, column.dtype).tolist()
                assert plain(values) == wanted, column.name


def test_plain_columns_are_read_without_arrow(tmp_path):
    rows = [{"tokens": [1]}, {"tokens": None}]
    put(tmp_path / "a.arrow", pa.Table.from_pylist(rows, schema=SCHEMA), "file", 1)
    source = formats.open_source(tmp_path / "a.arrow", columns=["tokens", "text"])
    source.read([0])
    every = formats.open_source(
        tmp_path / "a.arrow",
        fill_null=dict.fromkeys(("number", "weight", "half", "pair", "grid"), 0)
        | {
            "flag": False,
            "flags": False,
            "day": datetime.date(1970, 1, 1),
            "when": datetime.datetime(1970, 1, 1),
        },
    )
    batch = every.read([1, 0])
    assert batch["pair"].tolist() == [[0, 0], [0, 0]]
    assert batch["when"].tolist() == [datetime.datetime(1970, 1, 1)] * 2
    assert batch["day"].tolist() == [datetime.date(1970, 1, 1)] * 2
    full = pa.table({"number": [1, 2], "pair": pa.array([[1, 2]] * 2, pa.list_(pa.uint8(), 2))})
    formats.write_arrow(tmp_path / "b.arrow", full)
    fast = formats.open_source(tmp_path / "b.arrow")
    fast.read([0])
    for opened in (source, every, fast):
        for name, direct in opened._handles._open[0].direct.items():
            nulls = opened is every and name in ("pair", "grid")
            assert (direct is not None) == (name in DIRECT and not nulls), name


def test_a_null_among_numbers_is_named_or_filled(tmp_path):
    x = pa.array([1, None, 3], pa.int32())
    v = pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))
    formats.write_arrow(
        tmp_path / "a.arrow",
        pa.table({"x": [9], "v": [[8, 8]]}, schema=pa.schema({"x": pa.int32(), "v": v.type})),
    )
    path = tmp_path / "b.arrow"
    formats.write_arrow(path, pa.table({"x": x, "v": v}))
    with pytest.raises(formats.BadRecord, match=r"b\.arrow, row 1 .*'x'.*null.*fill_null") as bad:
        formats.open_source(tmp_path / "*.arrow", columns=["x"]).read([3, 2, 0])
    assert (bad.value.index, bad.value.position, bad.value.file) == (2, 1, str(path))
    with pytest.raises(formats.BadRecord, match=r"row 2 .*'v' of numbers holds a null"):
        formats.open_source(tmp_path / "*.arrow", columns=["v"]).read([1, 3])
    filled = formats.open_source(tmp_path / "*.arrow", fill_null={"x": -1, "v": 7}).read([2, 3, 0])
    assert filled["x"].tolist() == [-1, 3, 9]
    assert filled["v"].tolist() == [[7, 7], [3, 7], [8, 8]]


def test_text_that_is_no_text_is_a_bad_record(tmp_path):
    blobs = pa.array([b"fine", b"\xff\xfe"], pa.binary())
    table = pa.table({"s": pa.Array.from_buffers(pa.string(), 2, blobs.buffers())})
    formats.write_arrow(tmp_path / "a.arrow", table)
    source = formats.open_source(tmp_path / "a.arrow")
    with pytest.raises(formats.BadRecord, match=r"row 1 .*column 's'.*utf-8") as caught:
        source.read([0, 1])
    assert caught.value.index == 1
    assert source.read([0])["s"] == ["fine"]


def test_offsets_that_lead_outside_are_a_bad_record(tmp_path):
    offsets = np.array([0, 2, 2**31 - 1, 4, -5, 6], np.int32)
    texts = pa.Array.from_buffers(
        pa.binary(), 5, [None, pa.py_buffer(offsets), pa.py_buffer(b"abcdef")]
    )
    lists = pa.Array.from_buffers(
        pa.list_(pa.int8()),
        5,
        [None, pa.py_buffer(offsets)],
        children=[pa.array([1] * 6, pa.int8())],
    )
    for name, array in {"b": texts, "l": lists}.items():
        path = tmp_path / f"{name}.arrow"
        formats.write_arrow(path, pa.table({name: array}))
        source = formats.open_source(path)
        assert len(source.read([0])[name][0]) == 2
        for row in range(1, 5):
            with pytest.raises(formats.BadRecord, match=rf"row {row} .*outside of its buffer"):
                source.read([0, row])


def test_a_dictionary_index_that_leads_outside_is_a_bad_record(tmp_path):
    indices = pa.array([0, 77], pa.int32())
    tag = pa.DictionaryArray.from_arrays(indices, pa.array(["a"]), safe=False)
    path = tmp_path / "a.arrow"
    formats.write_arrow(path, pa.table({"t": tag}))
    with pytest.raises(formats.BadRecord, match=r"a\.arrow, row 1 .*batch 0 is damaged: .*bound"):
        formats.open_source(path).read([1])


@pytest.mark.parametrize("how", ["file", "lz4", "stream"])
def test_no_damage_gets_past_an_error(tmp_path, how):
    """Whatever is overwritten, a read gives rows or an error of ours, and the process lives."""
    rng = np.random.default_rng(SEED)
    rows: list[dict[str, Any]] = [
        {
            "number": i,
            "text": "t" * i,
            "tokens": [i] * (i % 3),
            "tag": "red",
            "view": "long enough not to be inlined",
            "point": {"x": 1, "y": "y"},
        }
        for i in range(12)
    ]
    path = tmp_path / "a.arrow"
    columns = ["number", "text", "tokens", "tag", "view", "point"]
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    put(path, pa.Table.from_pylist(rows, schema=schema), how, 5)
    sound = path.read_bytes()
    raised: list[tuple[int, str]] = []
    for _ in range(150):
        damaged = bytearray(sound)
        at = int(rng.integers(len(sound) - 8))
        damaged[at : at + 8] = rng.choice([b"\xff" * 8, b"\x7f\xff\xff\xff" * 2, rng.bytes(8)])
        path.write_bytes(damaged)
        try:
            source = formats.open_source(path)
            for row in range(min(len(source), 20)):
                source.read([row])
        except formats.DataError as error:
            raised.append((at, str(error)))
    assert len(raised) > 20, f"seed {SEED}"
    assert not [each for each in raised if str(path) not in each[1]], f"seed {SEED}"


@pytest.mark.parametrize("how", ["file", "lz4", "stream"])
@pytest.mark.parametrize("damage", ["empty", "cut", "half", "garbage", "eight bytes"])
def test_an_unreadable_file_is_named_at_open(tmp_path, how, damage):
    path = tmp_path / "a.arrow"
    put(path, pa.table({"x": np.arange(500)}), how, 100)
    sound = path.read_bytes()
    wrong = {
        "empty": b"",
        "cut": sound[:-10] if how != "stream" else sound[:-20],
        "half": sound[: len(sound) // 2],
        "garbage": b"hello " * 5000,
        "eight bytes": sound[:8],
    }
    path.write_bytes(wrong[damage])
    with pytest.raises(formats.Damaged, match=re.escape(f"{path} holds {len(wrong[damage])} b")):
        formats.open_source(path)


def test_what_is_refused_names_the_cure(tmp_path):
    stream = tmp_path / "a.arrow"
    table = pa.table({"x": np.arange(500)})
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(str(stream), table.schema, options=options) as out:
        out.write_table(table)
    with pytest.raises(formats.Unsupported, match=r"compressed Arrow stream.*pyarrow\.ipc\.new_f"):
        formats.open_source(stream)
    old = tmp_path / "a.feather"
    old.write_bytes(b"FEA1" + bytes(100) + b"FEA1")
    with pytest.raises(formats.Unsupported, match=r"Feather version 1; write it anew"):
        formats.open_source(old)
    twice = tmp_path / "b.arrow"
    formats.write_arrow(twice, pa.Table.from_arrays([pa.array([1])] * 2, ["x", "x"]))
    with pytest.raises(formats.Unsupported, match="several columns named x"):
        formats.open_source(twice)
    with pytest.raises(formats.Misuse, match=r"leave out window= and cache=|leave out cache= and"):
        formats.open_source(twice, window=3, cache=tmp_path)


def test_feather_as_it_is_usually_written(tmp_path):
    path = tmp_path / "a.feather"
    pyarrow.feather.write_feather(pa.table({"x": np.arange(50), "s": ["a"] * 50}), str(path))
    source = formats.open_source(path)
    assert source.read([49, 0])["x"].tolist() == [49, 0]
    assert repr(source) == "ArrowSource(1 files, 50 rows, columns x, s)"


def test_schemas_that_differ(tmp_path):
    formats.write_arrow(tmp_path / "a.arrow", {"x": [1], "y": [1]})
    formats.write_arrow(tmp_path / "b.arrow", {"x": [1.5], "y": [1]})
    with pytest.raises(formats.Mismatch, match=r"b\.arrow: column 'x': wanted int64, found double"):
        formats.open_source(tmp_path / "*.arrow")
    assert formats.open_source(tmp_path / "*.arrow", columns=["y"]).read([1])["y"].tolist() == [1]
    with pytest.raises(formats.Misuse, match="no column 'z'"):
        formats.open_source(tmp_path / "*.arrow", columns=["z"])


@pytest.mark.parametrize("how", ["file", "lz4", "stream"])
def test_no_rows_at_all(tmp_path, how):
    put(tmp_path / "a.arrow", SCHEMA.empty_table(), how, 4)
    source = formats.open_source(tmp_path / "a.arrow")
    assert len(source) == 0
    assert source.read([])["grid"].shape == (0, 2, 2)
    assert len(source.fingerprint()["digest"]) == 32
    with pytest.raises(IndexError, match="no records"):
        source[0]


def test_a_file_that_changes_underneath_is_noticed(tmp_path):
    path = tmp_path / "a.arrow"
    formats.write_arrow(path, {"x": np.arange(50_000)})
    source = formats.open_source(path)
    source.read([0])
    size = path.stat().st_size
    os.truncate(path, 4096)
    with pytest.raises(formats.Mismatch, match=rf"wanted {size} bytes, found 4096"):
        source.read([49_999])


def test_compressed_batches_are_kept_within_the_budget(tmp_path):
    put(tmp_path / "a.arrow", pa.table({"x": np.arange(4000)}), "lz4", 1000)
    source = formats.ArrowSource(find(tmp_path / "a.arrow"), cache_bytes=17_000)
    for row in [0, 1000, 0, 2000, 0, 1000]:
        assert source.read([row])["x"].tolist() == [row]
    assert list(source._decoded._tables) == [0, 1]


def test_writing_refuses_what_is_wrong(tmp_path):
    path = tmp_path / "a.arrow"
    assert formats.write_arrow(path, {"grid": np.zeros((4, 3, 2)), "s": ["a"] * 4}) == 4
    with pytest.raises(formats.Misuse, match="different lengths"):
        formats.write_arrow(path, {"a": [1], "b": [1, 2]})
    with pytest.raises(formats.Misuse, match="batch_size=0"):
        formats.write_arrow(path, {"a": [1]}, batch_size=0)
    with pytest.raises(formats.NotFound, match=r"there is no directory .*absent"):
        formats.write_arrow(tmp_path / "absent" / "a.arrow", {"a": [1]})
    assert os.listdir(tmp_path) == ["a.arrow"]
    assert formats.open_source(path).read([3])["grid"].shape == (1, 3, 2)

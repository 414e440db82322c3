"""Parquet sources against plain lists: types, nulls, odd row groups, projection, damage."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import formats
from formats.columns import NullFound, convert, describe
from formats.files import find

SEED = 11

ROW = st.fixed_dictionaries(
    {
        "number": st.integers(-(2**63), 2**63 - 1),
        "weight": st.floats(width=32, allow_nan=False),
        "flag": st.booleans(),
        "text": st.none() | st.text(max_size=8),
        "blob": st.none() | st.binary(max_size=8),
        "tag": st.none() | st.sampled_from(["red", "green", "blue"]),
        "pair": st.lists(st.integers(0, 255), min_size=2, max_size=2),
        "tokens": st.none() | st.lists(st.integers(-100, 100), max_size=5),
        "nested": st.none() | st.lists(st.none() | st.lists(st.none() | st.text(max_size=2))),
    }
)
SCHEMA = pa.schema(
    {
        "number": pa.int64(),
        "weight": pa.float32(),
        "flag": pa.bool_(),
        "text": pa.large_string(),
        "blob": pa.binary(),
        "tag": pa.dictionary(pa.int32(), pa.string()),
        "pair": pa.list_(pa.uint8(), 2),
        "tokens": pa.list_(pa.int16()),
        "nested": pa.list_(pa.list_(pa.string())),
    }
)
DTYPES = {"number": "int64", "weight": "float32", "flag": "bool", "pair": "uint8"}


def plain(name: str, column: Any) -> list[Any]:
    """A column as Python values, having checked what it came as."""
    if name in DTYPES:
        assert isinstance(column, np.ndarray)
        assert column.dtype == DTYPES[name]
        assert column.flags.writeable
        assert column.shape[1:] == ((2,) if name == "pair" else ())
        return column.tolist()
    assert isinstance(column, list)
    if name == "tokens":
        rows = [row for row in column if row is not None]
        assert all(row.dtype == np.int16 and row.flags.writeable for row in rows)
        return [row if row is None else row.tolist() for row in column]
    return column


@hypothesis.given(
    files=st.lists(st.lists(ROW, max_size=9), min_size=1, max_size=3),
    group_size=st.integers(1, 4),
    cache_bytes=st.sampled_from([0, 200, 10**6]),
    projection=st.none() | st.lists(st.sampled_from(SCHEMA.names), min_size=1, unique=True),
    data=st.data(),
)
@hypothesis.settings(max_examples=40)
def test_reads_what_lists_would_give(
    tmp_path_factory, files, group_size, cache_bytes, projection, data
):
    directory = tmp_path_factory.mktemp("files")
    for number, rows in enumerate(files):
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        formats.write_parquet(directory / f"{number}.parquet", table, row_group_size=group_size)
    oracle = [row for rows in files for row in rows]
    found = find(directory / "*.parquet")
    with formats.ParquetSource(found, columns=projection, cache_bytes=cache_bytes) as source:
        assert len(source) == len(oracle)
        for _ in range(3):
            picked = data.draw(
                st.lists(st.integers(0, len(oracle) - 1), max_size=20) if oracle else st.just([])
            )
            batch = source.read(picked)
            assert list(batch) == (projection or SCHEMA.names)
            for name, column in batch.items():
                assert plain(name, column) == [oracle[row][name] for row in picked], name


def write(directory: Path, *tables: Any, row_group_size: int | None = None) -> str:
    for number, table in enumerate(tables):
        path = directory / f"{number}.parquet"
        formats.write_parquet(path, table, row_group_size=row_group_size)
    return str(directory / "*.parquet")


def test_spec_says_what_read_gives(tmp_path):
    pattern = write(tmp_path, SCHEMA.empty_table())
    source = formats.open_source(pattern)
    kinds = {
        column.name: (column.kind, column.dtype, column.shape) for column in source.spec.columns
    }
    assert kinds == {
        "number": ("array", "int64", ()),
        "weight": ("array", "float32", ()),
        "flag": ("array", "bool", ()),
        "text": ("str", "", ()),
        "blob": ("bytes", "", ()),
        "tag": ("str", "", ()),
        "pair": ("array", "uint8", (2,)),
        "tokens": ("ragged", "int16", ()),
        "nested": ("object", "", ()),
    }
    batch = source.read([])
    assert batch["pair"].shape == (0, 2)
    assert batch["text"] == []


def test_dates_times_decimals_and_structs(tmp_path):
    when = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "when": pa.array([when], pa.timestamp("us", tz="Europe/Berlin")),
            "day": pa.array([when.date()], pa.date32()),
            "span": pa.array([datetime.timedelta(seconds=2)], pa.duration("ms")),
            "half": pa.array([np.float16(1.5)], pa.float16()),
            "price": pa.array([None], pa.decimal128(5, 2)),
            "point": pa.array([{"x": 1, "y": None}]),
            "hash": pa.array([b"ab\0\0"], pa.binary(4)),
            "words": pa.array([["a", None]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
            "grid": pa.array([[[1, 2], [3, 4], [5, 6]]], pa.list_(pa.list_(pa.int32(), 2), 3)),
        }
    )
    batch = formats.open_source(write(tmp_path, table)).read([0, 0])
    assert batch["when"][1] == np.datetime64("2024-02-29T12:30:00", "us")
    assert batch["day"][1] == np.datetime64("2024-02-29")
    assert batch["span"][1] == np.timedelta64(2000, "ms")
    assert (batch["half"].dtype, batch["half"][1]) == (np.float16, 1.5)
    assert batch["price"] == [None, None]
    assert batch["point"][1] == {"x": 1, "y": None}
    assert batch["hash"] == [b"ab\0\0"] * 2
    assert batch["words"][1] == ["a", None]
    assert batch["grid"].tolist() == [[[1, 2], [3, 4], [5, 6]]] * 2


def test_a_null_among_numbers_is_named_or_filled(tmp_path):
    tables = [
        pa.table({"x": pa.array([1, 2, 3], pa.int32()), "v": pa.array([[1.0, 2.0]] * 3)}),
        pa.table({"x": pa.array([4, None], pa.int32()), "v": pa.array([None, [3.0, None]])}),
    ]
    pattern = write(tmp_path, *tables)
    with pytest.raises(
        formats.BadRecord, match=r"1\.parquet, row 1 .*'x' .*null.*fill_null"
    ) as bad:
        formats.open_source(pattern, columns=["x"]).read([0, 3, 4])
    assert (bad.value.index, bad.value.position) == (4, 1)
    with pytest.raises(formats.BadRecord, match="column 'v' of numbers holds a null"):
        formats.open_source(pattern, columns=["v"]).read([4])
    filled = formats.open_source(pattern, fill_null={"x": -1, "v": 0.5}).read([4, 3, 0])
    assert filled["x"].tolist() == [-1, 4, 1]
    assert filled["x"].dtype == np.int32
    assert [None if row is None else row.tolist() for row in filled["v"]] == [
        [3.0, 0.5],
        None,
        [1.0, 2.0],
    ]


def test_nulls_in_fixed_size_lists(tmp_path):
    table = pa.table({"v": pa.array([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))})
    pattern = write(tmp_path, table)
    with pytest.raises(formats.BadRecord, match="row 1 "):
        formats.open_source(pattern).read([0, 1])
    with pytest.raises(formats.BadRecord, match="row 2 "):
        formats.open_source(pattern).read([2, 0])
    filled = formats.open_source(pattern, fill_null={"v": 9}).read([2, 1, 0])
    assert filled["v"].tolist() == [[3, 9], [9, 9], [1, 2]]


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        ({"y": 0}, "'y' is not read"),
        ({"s": 0}, "'s' holds str, where a null is None"),
        ({"x": "no"}, "'no' does not fit column 'x'"),
        ({"x": 1.5}, "1.5 does not fit column 'x'"),
        ({"x": None}, "None does not fit column 'x'"),
        ({"x": 300}, "300 does not fit column 'x'"),
    ],
)
def test_fill_values_are_checked_at_open(tmp_path, fill, message):
    pattern = write(tmp_path, pa.table({"x": pa.array([1], pa.int8()), "s": ["a"]}))
    with pytest.raises(formats.Misuse, match=message):
        formats.open_source(pattern, fill_null=fill)


def test_projection_reads_no_other_column(tmp_path):
    """Two names where one begins like the other are kept apart."""
    pattern = write(tmp_path, pa.table({"a": [1, 2], "a.b": ["x", "y"], "c": [{"d": 1}, None]}))
    assert list(formats.open_source(pattern, columns=["a"]).read([1])) == ["a"]
    batch = formats.open_source(pattern, columns=["c", "a.b"]).read([1, 0])
    assert batch == {"c": [None, {"d": 1}], "a.b": ["y", "x"]}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["txt"], "has no column 'txt', it has id, text; did you mean 'text'"),
        ([], "no columns to read; .* has id, text"),
        (["id", "id"], "twice"),
        ("id", r"wanted a list of names, \['id'\]"),
    ],
)
def test_columns_that_cannot_be_read(tmp_path, columns, message):
    pattern = write(tmp_path, pa.table({"id": [1], "text": ["a"]}))
    with pytest.raises(formats.Misuse, match=message):
        formats.open_source(pattern, columns=columns)


def test_differing_files_are_told_apart_completely(tmp_path):
    pattern = write(
        tmp_path,
        pa.table({"id": [1], "text": ["a"]}),
        pa.table({"id": [1.5], "more": ["a"]}),
        pa.table({"text": pa.array(["b"], pa.large_string()), "id": [2]}),
    )
    with pytest.raises(formats.Mismatch) as caught:
        formats.open_source(pattern)
    assert caught.value.differences == (
        "1.parquet: column 'id': wanted int64, found double",
        "1.parquet: column 'text': wanted string, found none",
        "1.parquet: column 'more': wanted none, found string",
    )
    assert pickle.loads(pickle.dumps(caught.value)).differences == caught.value.differences
    (tmp_path / "1.parquet").unlink()
    assert formats.open_source(pattern).read([1, 0])["text"] == ["b", "a"]


def test_row_groups_are_decoded_once_within_the_budget(tmp_path, monkeypatch):
    pattern = write(tmp_path, {"x": np.arange(100)}, row_group_size=7)
    decoded: list[int] = []

    def counting(cache_bytes: int) -> formats.ParquetSource:
        source = formats.ParquetSource(find(pattern), cache_bytes=cache_bytes)
        real = source._open

        def opener(number: int) -> Any:
            opened = real(number)
            decode = opened.decode
            opened.decode = lambda group, columns: decoded.append(group) or decode(group, columns)
            return opened

        monkeypatch.setattr(source, "_open", opener)
        return source

    rows = np.random.default_rng(SEED).integers(0, 100, 300)
    kept = counting(10**6)
    for _ in range(3):
        assert kept.read(rows)["x"].tolist() == rows.tolist()
    assert sorted(decoded) == list(range(15)), f"seed {SEED}"
    decoded.clear()
    dropped = counting(0)
    for _ in range(2):
        assert dropped.read(rows)["x"].tolist() == rows.tolist()
    assert sorted(decoded) == sorted([*range(15), *range(15)]), "once a call, never twice"
    decoded.clear()
    two = counting(2 * 7 * 8 + 8)
    for row in [0, 7, 0, 14, 0, 7]:
        two.read([row])
    assert decoded == [0, 1, 2, 1], "the least recently used goes first"


def test_a_row_group_above_the_budget_drives_no_other_out(tmp_path, monkeypatch):
    pattern = write(tmp_path, {"x": np.arange(4)}, {"x": np.arange(4, 100)})
    source = formats.ParquetSource(find(pattern), cache_bytes=100)
    source.read([0, 50])
    source.read([0, 50])
    assert list(source._decoded._tables) == [0]


def test_dictionaries_of_numbers(tmp_path):
    keys = pa.array([1, 0, None, 1], pa.int8())
    inner = pa.DictionaryArray.from_arrays(keys, pa.array([10, 20], pa.int64()))
    rows = pa.ListArray.from_arrays(pa.array([0, 2, 2, 3, 4], pa.int32()), inner)
    table = pa.table({"x": inner, "rows": rows})
    source = formats.open_source(write(tmp_path, table), fill_null={"x": 7, "rows": 8})
    batch = source.read([2, 0, 1])
    assert batch["x"].tolist() == [7, 20, 10]
    assert batch["x"].dtype == np.int64
    assert [row.tolist() for row in batch["rows"]] == [[8], [20, 10], []]


def test_views_of_text(tmp_path):
    words = ["short", "too long to lie in the view itself", None]
    table = pa.table(
        {
            "word": pa.array(words, pa.string_view()),
            "words": pa.array([words, [], None], pa.list_(pa.string_view())),
        }
    )
    batch = formats.open_source(write(tmp_path, table)).read([2, 0, 1])
    assert batch == {"word": [None, *words[:2]], "words": [None, words, []]}


def test_a_null_among_the_values_of_a_dictionary_is_a_null():
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([5, None], pa.int64()))
    with pytest.raises(NullFound):
        convert(array, describe("x", array.type), None)


def test_where_and_numbers(tmp_path):
    pattern = write(tmp_path, {"x": np.arange(5)}, {"x": np.arange(8)}, row_group_size=3)
    source = formats.open_source(pattern)
    assert source.where(12) == f"{tmp_path}/1.parquet, row 7 (row group 2)"
    assert source[12]["x"] == 7
    with pytest.raises(formats.OutOfRange, match="record 13 asked for"):
        source.read([13])
    source.close()
    with pytest.raises(formats.Misuse, match="closed"):
        source.read([0])


def test_a_flipped_bit_in_a_page_names_file_and_row(tmp_path):
    pattern = write(tmp_path, {"x": np.arange(64)}, {"x": np.arange(64, 128)}, row_group_size=16)
    path = tmp_path / "1.parquet"
    sound = path.read_bytes()
    column = pq.read_metadata(path).row_group(2).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    rng = np.random.default_rng(SEED)
    bad: list[formats.BadRecord] = []
    for at in range(start, start + column.total_compressed_size):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        source = formats.open_source(pattern)
        try:
            values = source.read([1, 64 + 35, 64 + 33])["x"].tolist()
        except formats.BadRecord as error:
            bad.append(error)
        else:
            assert values == [1, 99, 97], f"byte {at}, seed {SEED}"
        assert source.read([127, 0])["x"].tolist() == [127, 0]
    assert len(bad) > 50
    for error in bad:
        assert (error.file, error.index, error.position) == (str(path), 97, 33)
        assert f"{path}, row 33 (row group 2; record 97 of the source)" in str(error)


def test_text_that_is_no_text_is_a_bad_record(tmp_path):
    blobs = pa.array([b"fine", b"\xff\xfe"], pa.binary())
    table = pa.table({"s": pa.Array.from_buffers(pa.string(), 2, blobs.buffers())})
    source = formats.open_source(write(tmp_path, table))
    with pytest.raises(formats.BadRecord, match=r"row 1 .*column 's'") as caught:
        source.read([0, 1])
    assert caught.value.index == 1
    assert source.read([0])["s"] == ["fine"]


def test_a_file_rewritten_behind_an_open_source_is_noticed(tmp_path):
    source = formats.open_source(write(tmp_path, {"x": np.arange(5)}))
    write(tmp_path, {"x": np.arange(6)})
    with pytest.raises(formats.Mismatch, match="wanted 5 rows, found 6"):
        source.read([0])
    with pytest.raises(formats.Mismatch, match=r"0\.parquet: wanted \d+ bytes, found \d+"):
        source.fingerprint()


def test_fingerprint_sees_content_projection_and_fill(tmp_path):
    def digest(name: str, table: Any, **options: Any) -> str:
        directory = tmp_path / name
        directory.mkdir()
        return formats.open_source(write(directory, table), **options).fingerprint()["digest"]

    table = pa.table({"x": [1, 2, 3], "s": ["a", "b", "c"]})
    changed = pa.table({"x": [1, 2, 4], "s": ["a", "b", "c"]})
    assert digest("a", table) == digest("b", table)
    digests = {
        digest("c", table),
        digest("d", changed),
        digest("e", table, columns=["x"]),
        digest("f", table, fill_null={"x": 0}),
    }
    assert len(digests) == 4


def test_writing_arrays_and_refusing_what_is_wrong(tmp_path):
    path = tmp_path / "a.parquet"
    grid = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    assert formats.write_parquet(path, {"grid": grid, "s": ["a", None, "c", "d"]}) == 4
    batch = formats.open_source(path).read([3, 1])
    assert batch["grid"].tolist() == grid[[3, 1]].tolist()
    assert batch["s"] == ["d", None]
    with pytest.raises(formats.Misuse, match=r"different lengths: {'a': 1, 'b': 2}"):
        formats.write_parquet(path, {"a": [1], "b": [1, 2]})
    with pytest.raises(formats.Misuse, match="column 'a' fits no Arrow type"):
        formats.write_parquet(path, {"a": [1, "x"]})
    with pytest.raises(formats.Misuse, match="row_group_size=0"):
        formats.write_parquet(path, {"a": [1]}, row_group_size=0)
    with pytest.raises(formats.NotFound, match=r"there is no directory .*absent"):
        formats.write_parquet(tmp_path / "absent" / "a.parquet", {"a": [1]})
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]
    assert len(formats.open_source(path)) == 4

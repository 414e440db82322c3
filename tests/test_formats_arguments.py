"""What callers give readers and writers is taken as meant, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_values import FROM_0, ODD, TEXT, UNHASHABLE, WHOLE

import formats
from formats import Misuse, NotFound, open_source

BIG = WHOLE | {"2**31", "2**62"}
NONE = {"None"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place = tmp_path_factory.mktemp("files")
    formats.write_array_record(place / "a.array_record", [b"%d" % i for i in range(20)])
    formats.write_arrow(place / "a.arrow", {"x": np.arange(20)})
    formats.write_parquet(place / "a.parquet", {"x": np.arange(20), "t": ["a"] * 20})
    np.arange(1000, dtype=np.uint16).tofile(place / "t.bin")
    return place


@dataclass(frozen=True)
class Case:
    """One argument, given with files at hand: `named` is in each refusal; `works` do."""

    call: Callable[[Path, Any], Any]
    named: str
    works: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    errors: tuple[type[Exception], ...] = (Misuse,)


def parquet(**options):
    return lambda place, value: open_source(
        place / "a.parquet", **{name: make(value) for name, make in options.items()}
    )


def arrow(**options):
    return lambda place, value: open_source(
        place / "a.arrow", **{name: make(value) for name, make in options.items()}
    )


def tokens(**options):
    return lambda place, value: open_source(
        place / "t.bin", **{"window": 4} | {name: make(value) for name, make in options.items()}
    )


def same(value):
    return value


def cached(place, value):
    """In an own directory: the names are relative ones."""
    if isinstance(value, str | Path) and str(value) == "x":
        value = type(value)(place / "cache")
    return open_source(place / "a.parquet", cache=value)


READ = {"[]", "[1]", "()", "(1, 2)", "array([1, 2])", "range(3)"}
CASES = {
    "pattern": Case(lambda place, v: open_source(v), "pattern|'x'", errors=(Misuse, NotFound)),
    "one pattern": Case(
        lambda place, v: open_source([v]), r"pattern\[0\]|'x'", errors=(Misuse, NotFound)
    ),
    "another pattern": Case(
        lambda place, v: open_source([place / "a.arrow", v]),
        r"pattern\[1\]|'x'",
        errors=(Misuse, NotFound),
    ),
    "format": Case(parquet(format=same), "format=", NONE),
    "columns": Case(parquet(columns=same), "columns|no column '?x?", NONE | {"['x']"}),
    "columns of arrow": Case(arrow(columns=same), "columns|no column", NONE | {"['x']"}),
    "a column": Case(parquet(columns=lambda v: [v]), "columns|no column", TEXT),
    "fill_null": Case(parquet(fill_null=same), "fill_null", NONE | {"{}"}),
    "fill_null of arrow": Case(arrow(fill_null=same), "fill_null", NONE | {"{}"}),
    "a value for null": Case(
        parquet(fill_null=lambda v: {"x": v}),
        "fill_null",
        {"0", "3", "-1", "3.0", "2**31", "2**62", "np.int64", "np.uint8", "np.float64"}
        | {"np.True_", "array(3)"},
    ),
    "a name for null": Case(parquet(fill_null=lambda v: {v: 1}), "fill_null", TEXT, UNHASHABLE),
    "cache": Case(cached, "cache", NONE | TEXT | {"path"}),
    "cache_bytes": Case(parquet(cache_bytes=same), "cache_bytes", FROM_0 | BIG | NONE),
    "window": Case(tokens(window=same), "window", BIG),
    "stride": Case(tokens(stride=same), "stride", BIG | NONE),
    "dtype": Case(tokens(dtype=same), "dtype", NONE | {"np.int64", "np.uint8", "class"}),
    "header_bytes": Case(
        tokens(header_bytes=same), "header_bytes", {"0", "None"}, WHOLE | {"2**31", "2**62"}
    ),
    "select": Case(lambda place, v: parquet()(place, 0).select(v), "column", {"['x']"}),
    "read": Case(lambda place, v: parquet()(place, 0).read(v), "integers", READ),
    "a record": Case(lambda place, v: arrow()(place, 0)[v], "record", FROM_0),
    **{
        f"files of {kind.__name__}": Case(lambda place, v, kind=kind: kind(v), "files: wanted")
        for kind in (formats.ArrayRecordSource, formats.ArrowSource, formats.ParquetSource)
    },
    "files of TokenSource": Case(lambda place, v: formats.TokenSource(v, window=3), "files: want"),
    **{
        f"path of {write.__name__}": Case(
            lambda place, v, write=write, data=data: write(v, data), "path", set(), TEXT | {"path"}
        )
        for write, data in (
            (formats.write_array_record, [b"x"]),
            (formats.write_arrow, {"x": np.arange(3)}),
            (formats.write_parquet, {"x": np.arange(3)}),
        )
    },
    "records": Case(
        lambda place, v: formats.write_array_record(place / "w.array_record", v),
        "record",
        {"[]", "()", "{}", "''", "b''"},
    ),
    "options": Case(
        lambda place, v: formats.write_array_record(place / "w.array_record", [b"x"], options=v),
        "options",
        {"''"},
    ),
    "columns to write": Case(
        lambda place, v: formats.write_arrow(place / "w.arrow", v), "column", {"{}"}, {"{'a': 1}"}
    ),
    "row_group_size": Case(
        lambda place, v: formats.write_parquet(
            place / "w.parquet", {"x": np.arange(3)}, row_group_size=v
        ),
        "row_group_size",
        BIG | NONE,
    ),
    "batch_size": Case(
        lambda place, v: formats.write_arrow(place / "w.arrow", {"x": np.arange(3)}, batch_size=v),
        "batch_size",
        BIG | NONE,
    ),
    "group_size": Case(
        lambda place, v: formats.write_array_record(place / "w.array_record", [b"x"], group_size=v),
        "group_size",
        WHOLE,
        {"2**31", "2**62"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_argument_works_or_is_named(name, files):
    case = CASES[name]
    faults = []
    for value_name, make in ODD.items():
        if value_name in case.left_out:
            continue
        try:
            if value_name in case.works:
                case.call(files, make())
                continue
            with pytest.raises(case.errors) as caught:
                case.call(files, make())
            assert re.search(case.named, str(caught.value)), str(caught.value)
            assert len(str(caught.value)) < 1000
        except BaseException as error:
            faults.append(f"{value_name}: {type(error).__name__}: {str(error)[:200]}")
    assert not faults, "\n".join(faults)


def test_files_without_an_order_are_refused(files):
    """A directory lists its files as it likes, and a set has no order at all."""
    for given in (files.glob("a.*"), {files / "a.arrow"}, {files / "a.arrow": 1}):
        with pytest.raises(Misuse, match=r"pattern: wanted a list of paths, such as .* sorted"):
            open_source(given)
    assert len(open_source(sorted(files.glob("a.arrow")))) == 20
    assert len(open_source(np.array([str(files / "a.arrow")]))) == 20
    assert len(open_source((str(files / "a.arrow"),))) == 20


def test_a_directory_is_no_file_to_write(files):
    for write, data in (
        (formats.write_array_record, [b"x"]),
        (formats.write_arrow, {"x": [1]}),
        (formats.write_parquet, {"x": [1]}),
    ):
        with pytest.raises(Misuse, match="wanted the name of a file, found a directory"):
            write(files, data)


def test_a_number_of_a_record_is_whole(files):
    source = open_source(files / "a.arrow")
    for wrong in (1.5, True, "1", None, slice(3)):
        with pytest.raises(Misuse, match="the number of a record is an integer"):
            source[wrong]
    for beyond in (-1, 20, 2**70):
        with pytest.raises(IndexError, match="asked for"):
            source[beyond]
    assert source._getitems([]) == []

"""`ckpt data index`: a function over all records, into a sidecar that a pipeline takes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cli_runs import answer, ckpt_command, refusal

import formats
from datapipe import BadRecord, Mismatch, Misuse, Pack, Pipeline
from datapipe.sources.index_building import kept_by, lengths_by
from datapipe.sources.indexes import Kept, Lengths

LENGTHS = [5, 2, 17, 3, 8, 1, 6]
MODULE = "filters_of_the_test"
SOURCE = """
import numpy as np

def long(row): return row["length"] > 4
def count(row): return len(row["tokens"])
def late(row):
    from beside_the_test import LEAST
    return row["length"] > LEAST
def even(record): return len(record) % 2 == 0
def number(row): return 1.5
def fails(row): raise KeyError("text")
LIMIT = 4
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a Parquet file and a module, which the command is called in."""
    tokens = [np.arange(length, dtype=np.int32) for length in LENGTHS]
    formats.write_parquet(tmp_path / "a.parquet", {"tokens": tokens, "length": np.array(LENGTHS)})
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop(MODULE, None)


def options(kind="keep", function="long", version="3", out="a.index"):
    function = function if ":" in function or function == "" else f"{MODULE}:{function}"
    given = {"--out": out, "--kind": kind, "--function": function, "--version": version}
    return [text for pair in given.items() for text in pair]


def test_what_it_writes_is_what_a_pipeline_takes(place):
    kept = answer("data", "index", "a.parquet", "--column", "length", *options())
    seconds = kept.pop("seconds")
    assert 0 < seconds < 60
    assert kept == {
        "path": "a.index",
        "kind": "keep",
        "records": 7,
        "kept": 4,
        "tokens": None,
        "function": f"{MODULE}:long",
        "version": "3",
        "size_bytes": (place / "a.index").stat().st_size,
    }
    found = answer("data", "index", "a.parquet", *options("lengths", "count", out="lengths"))
    assert (found["tokens"], found["kept"]) == (sum(LENGTHS), None)
    with formats.open_source("a.parquet", columns=["tokens"]) as source:
        pipe = Pipeline(
            source,
            batch_size=1,
            seed=1,
            epochs=1,
            filter="a.index",
            pack=Pack(8, lengths="lengths"),
        )
        tokens = sum(int((batch["segment_ids"] > 0).sum()) for batch in pipe)
    assert tokens == sum(length for length in LENGTHS if length > 4)
    left = {path.name for path in place.iterdir()} - {"__pycache__"}
    assert left == {"a.index", "a.parquet", f"{MODULE}.py", "lengths"}


def test_a_function_may_import_what_lies_beside_it(place):
    (place / "beside_the_test.py").write_text("LEAST = 4")
    path = list(sys.path)
    assert answer("data", "index", "a.parquet", *options(function="late"))["kept"] == 4
    assert sys.path == path
    sys.modules.pop("beside_the_test")


def test_the_answer_for_a_person(place):
    result = ckpt_command("data", "index", "a.parquet", *options())
    assert result.exit_code == 0
    assert f"a.index: 4 of 7 records kept by {MODULE}:long version 3 (" in result.stdout
    result = ckpt_command("data", "index", "a.parquet", *options("lengths", "count"))
    assert f"42 tokens in 7 documents by {MODULE}:count version 3 (" in result.stdout
    assert "Example: ckpt data index " in ckpt_command("data", "index", "--help").stdout


def test_records_of_bytes_and_several_files(place):
    for number in range(2):
        formats.write_array_record(
            place / f"r-{number}.array_record", [b"x" * (number + k) for k in range(5)]
        )
    found = answer(
        "data", "index", "r-0.array_record", "r-1.array_record", *options("keep", "even")
    )
    assert (found["records"], found["kept"]) == (10, 5)


def test_an_index_of_data_that_has_changed_says_who_made_it(place):
    answer("data", "index", "a.parquet", *options())
    formats.write_parquet(place / "a.parquet", {"length": np.arange(9)})
    with (
        formats.open_source("a.parquet") as source,
        pytest.raises(Mismatch, match=rf"a\.index, made by {MODULE}:long 3, is an index") as caught,
    ):
        Kept.load("a.index", source)
    assert "records: wanted 9, found 7" in caught.value.differences


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        (options(function="fails"), 1, "record 0 ("),
        (options(function="count"), 2, "must return True or False, it returned 5"),
        (options("lengths", "number"), 2, "must return a number of tokens, it returned 1.5"),
        (options("lengths", "long"), 2, "must return a number of tokens, it returned "),
        (options(function="none"), 2, "cannot be had: module"),
        (options(function="no_such_module:x"), 2, "No module named 'no_such_module'"),
        (options(function="broken_of_the_test:x"), 2, "fails: SyntaxError: "),
        (options(function="LIMIT"), 2, "cannot be called, it is 4"),
        (options(function=""), 2, "wanted module:name, such as filters:good, found ''"),
        (options(out="a.parquet"), 2, "a.parquet is there and no index; name another file"),
        (options(out="no/index"), 3, "there is no directory for it"),
        ([*options(), "--column", "size"], 2, "no column 'size'"),
    ],
)
def test_what_is_refused_leaves_all_as_it_was(place, given, code, told):
    (place / "broken_of_the_test.py").write_text("def x(:")
    before, path = (place / "a.parquet").read_bytes(), list(sys.path)
    assert told in refusal("data", "index", "a.parquet", *given, code=code)
    assert (place / "a.parquet").read_bytes() == before
    assert sys.path == path
    (place / "broken_of_the_test.py").unlink()
    left = {path.name for path in place.iterdir()} - {"__pycache__"}
    assert left == {"a.parquet", f"{MODULE}.py"}


def test_an_index_that_failed_leaves_the_old_one(place):
    answer("data", "index", "a.parquet", *options())
    before = (place / "a.index").read_bytes()
    refusal("data", "index", "a.parquet", *options(function="fails"), code=1)
    assert (place / "a.index").read_bytes() == before
    answer("data", "index", "a.parquet", *options("lengths", "count"))
    with formats.open_source("a.parquet") as source:
        assert Lengths.load("a.index", source).tokens.tolist() == LENGTHS


def test_progress_and_errors_name_records(place):
    told = []
    with formats.open_source("a.parquet") as source:
        kept = kept_by(source, lambda row: bool(row["length"] > 4), lambda *each: told.append(each))
        assert kept.ids.tolist() == [0, 2, 4, 6]
        assert told == [(7, 7)]
        with pytest.raises(BadRecord, match=r"record 3 \(.*row 3.*: ValueError: three") as caught:
            lengths_by(source, lambda row: int(row["length"]) if row["length"] != 3 else three())
        assert caught.value.index == 3
        with pytest.raises(Misuse, match="a number of tokens from 0 on, it returned -5"):
            lengths_by(source, lambda row: -int(row["length"]))


def three():
    raise ValueError("three")

"""`ckpt data index` of every format that `open_source` opens, and what it says of wrong options."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from cli_runs import answer, ckpt_command, refusal

import formats
from datapipe import Mismatch
from datapipe.sources.indexes import Kept, Lengths

MODULE = "counting_of_the_test"
SOURCE = """
def size(record):
    found = record["tokens"] if isinstance(record, dict) else record
    return len(found)

def even(record):
    return int(record["tokens"][0]) % 2 == 0

def score(record):
    return int(record["score"])
"""
TOKENS = [[1, 2, 3], [4], [], [5, 6]]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A directory with a module, which the command is called in."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop(MODULE, None)


def options(kind="lengths", function="size"):
    function = f"{MODULE}:{function}"
    return ["--out", "a.index", "--kind", kind, "--function", function, "--version", "1"]


def columns():
    return {"tokens": [np.array(each, np.int32) for each in TOKENS]}


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", lambda path: formats.write_parquet(path, columns())),
        ("a.arrow", lambda path: formats.write_arrow(path, columns())),
        ("a.feather", lambda path: formats.write_arrow(path, columns())),
        (
            "a.array_record",
            lambda path: formats.write_array_record(path, [bytes(each) for each in TOKENS]),
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["", "-00000-of-00001"])
def test_formats_that_say_all_by_themselves(place, name, write, suffix):
    write(place / (name + suffix))
    found = answer("data", "index", name + suffix, *options())
    assert (found["records"], found["tokens"]) == (4, 6)
    with formats.open_source(name + suffix) as source:
        assert Lengths.load("a.index", source).tokens.tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize("name", ["a.bin", "a.uint32.bin", "a.npy", "a.tokens"])
def test_token_files_have_the_rows_that_are_said(place, name):
    tokens = np.arange(1, 14, dtype=np.uint16 if name == "a.bin" else np.uint32)
    if name == "a.npy":
        np.save(name, tokens)
    else:
        (place / name).write_bytes(tokens.tobytes())
    given = {"window": 3, "stride": 4}
    if name == "a.tokens":
        given |= {"format": "tokens", "dtype": "uint32", "header_bytes": 8}
    shell = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    found = answer("data", "index", name, *shell, *options("keep", "even"))
    with formats.open_source(name, **given) as source:
        firsts = [row[0] for row in source.read(np.arange(len(source)))["tokens"].tolist()]
        kept = Kept.load("a.index", source)
    assert kept.ids.tolist() == [row for row, first in enumerate(firsts) if first % 2 == 0]
    assert (found["records"], found["kept"]) == (len(firsts), len(kept))


def test_an_index_of_windows_is_of_those_windows(place):
    np.save("a.npy", np.arange(40, dtype=np.uint16))
    answer("data", "index", "a.npy", "--window=9", "--stride=8", *options("keep", "even"))
    with (
        formats.open_source("a.npy", window=8, stride=8) as other,
        pytest.raises(Mismatch, match="is an index of other data"),
    ):
        Kept.load("a.index", other)


def test_a_null_may_be_a_number(place):
    formats.write_parquet("a.parquet", {"score": [1, None, 3], "tokens": TOKENS[:3]})
    told = refusal("data", "index", "a.parquet", *options("lengths", "score"), code=1)
    assert "--fill-null 'score=...'" in told
    given = ["--column=score", "--fill-null", "score=7"]
    assert (
        answer("data", "index", "a.parquet", *given, *options("lengths", "score"))["tokens"] == 11
    )


@pytest.mark.parametrize(
    ("name", "given", "code", "told"),
    [
        ("a.npy", [], 2, "token files need --window=, the tokens in a record, such as --window=2"),
        ("a.npy", ["--window", "0"], 2, "--window=0: wanted a number of tokens"),
        ("a.npy", ["--window", "2", "--dtype", "int8"], 1, "leave --dtype= out"),
        ("a.npy", ["--window", "2", "--column", "x"], 2, "leave out --column="),
        ("a.bin", ["--window", "2"], 2, 'say --dtype="uint32"'),
        ("h.bin", ["--window", "2"], 2, "say --header-bytes=1024"),
        ("a.tokens", ["--window", "2"], 2, "narrow the pattern, or say --format="),
        ("a.npy", ["--format", "token"], 2, "--format='token' is none of"),
        ("b.npy", [], 3, "did you mean"),
    ],
)
def test_errors_tell_the_option_that_cures_them(place, name, given, code, told):
    tokens = np.arange(400, dtype=np.uint32)
    np.save("a.npy", tokens)
    (place / "a.bin").write_bytes(tokens.tobytes())
    (place / "a.tokens").write_bytes(tokens.tobytes())
    (place / "h.bin").write_bytes(np.array([20240520] * 400, np.int32).tobytes())
    assert told in refusal("data", "index", name, *given, *options(), code=code)
    assert not (place / "a.index").exists()


@pytest.mark.parametrize("given", ["x", "x=y", "=3", "x="])
def test_what_stands_for_null_is_a_number(given):
    result = ckpt_command("data", "index", "a.parquet", "--fill-null", given, *options())
    assert result.exit_code == 2
    assert "wanted COLUMN=NUMBER" in " ".join(result.stderr.split())

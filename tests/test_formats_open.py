"""From patterns to sources: order, names, and what each kind of wrong use is told."""

from __future__ import annotations

import ast
import inspect
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import formats
from formats import errors
from formats.files import find


def put(path: Path, *records: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    formats.write_array_record(path, records)
    return path


def names(pattern) -> list[str]:
    return [file.name for file in find(pattern)]


def test_order_is_plain_text_order(tmp_path):
    for name in random.Random(3).sample(["a-10", "a-2", "a-1", "B-1", "ä-1"], 5):
        put(tmp_path / f"{name}.array_record", name.encode())
    source = formats.open_source(tmp_path / "*.array_record")
    assert source.read(range(5)) == [b"B-1", b"a-1", b"a-10", b"a-2", "ä-1".encode()]


def test_names_are_relative_to_the_fixed_part(tmp_path):
    for name in ["x/1", "x/2", "y/1", "y/z/1"]:
        put(tmp_path / f"{name}.array_record", b"r")
    root = str(tmp_path)
    assert names(f"{root}/x/*.array_record") == ["1.array_record", "2.array_record"]
    assert names(f"{root}/*/1.array_record") == ["x/1.array_record", "y/1.array_record"]
    assert names(f"{root}/x/1.array_record") == ["1.array_record"]
    assert names(f"{root}/**/1.*") == [f"{n}/1.array_record" for n in ("x", "y", "y/z")]
    pair = [f"{root}/y/1.array_record", f"{root}/x/*.array_record"]
    assert names(pair) == ["y/1.array_record", "x/1.array_record", "x/2.array_record"]
    assert names(f"file://{root}/x/*") == ["1.array_record", "2.array_record"]


def test_relative_patterns_and_literal_brackets(tmp_path, monkeypatch):
    put(tmp_path / "a[1].array_record", b"one")
    put(tmp_path / ".hidden.array_record", b"two")
    monkeypatch.chdir(tmp_path)
    assert formats.open_source("a[1].array_record").read([0]) == [b"one"]
    assert names("*.array_record") == ["a[1].array_record"]
    assert Path(find("*.array_record")[0].path).is_absolute()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("corpus/*.array_recrd", r"corpus holds a\.array_record, b\.array_record"),
        ("corpus/*.array_recrd", r"did you mean '.*/corpus/\*\.array_record'"),
        ("corpus/a.arrayrecord", r"did you mean '.*/corpus/a\.array_record'"),
        ("corpis/*.array_record", r"holds corpus, empty; did you mean '.*/corpus'"),
        ("empty/*.parquet", r"empty is empty"),
        ("corpus", r"is a directory .*; did you mean '.*/corpus/\*\.array_record'"),
        ("no/such/*.parquet", r"no file matches 'no/such/\*\.parquet'.* holds corpus, empty"),
    ],
)
def test_an_empty_pattern_says_what_is_there(tmp_path, monkeypatch, pattern, message):
    put(tmp_path / "corpus/a.array_record", b"r")
    put(tmp_path / "corpus/b.array_record", b"r")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(formats.NotFound, match=message) as caught:
        formats.open_source(pattern)
    assert repr(pattern) in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_one_pattern_of_a_list_without_a_match_is_an_error(tmp_path):
    put(tmp_path / "a.array_record", b"r")
    with pytest.raises(formats.NotFound, match=r"b\.array_record"):
        formats.open_source([tmp_path / "a.array_record", tmp_path / "b.array_record"])


def test_patterns_that_mean_nothing(tmp_path):
    path = put(tmp_path / "a.array_record", b"r")
    with pytest.raises(formats.Misuse, match="empty list"):
        formats.open_source([])
    with pytest.raises(formats.Misuse, match=r"a\.array_record matches twice"):
        formats.open_source([path, tmp_path / "*"])


def test_the_format_follows_from_the_suffix(tmp_path):
    for name in ["a.array_record", "b.arrayrecord", "c.array_record-00000-of-00001"]:
        path = put(tmp_path / name, b"r")
        assert isinstance(formats.open_source(path), formats.ArrayRecordSource)
    formats.write_parquet(tmp_path / "d.parquet", {"x": [1]})
    assert isinstance(formats.open_source(tmp_path / "d.parquet"), formats.ParquetSource)
    for name in ["f.arrow", "g.feather"]:
        formats.write_arrow(tmp_path / name, {"x": [1]})
        assert isinstance(formats.open_source(tmp_path / name), formats.ArrowSource)
    np.arange(1, 9, dtype=np.uint16).tofile(tmp_path / "h.bin")
    np.save(tmp_path / "i.npy", np.arange(8))
    for name in ["h.bin", "i.npy"]:
        assert isinstance(formats.open_source(tmp_path / name, window=4), formats.TokenSource)
    with pytest.raises(formats.Misuse, match=r"several formats: array_record \(.*parquet \("):
        formats.open_source(tmp_path / "*")
    odd = put(tmp_path / "e.records", b"r")
    with pytest.raises(formats.Unsupported, match=r"suffix '\.records' .* say format="):
        formats.open_source(odd)
    assert formats.open_source(odd, format="array_record").read([0]) == [b"r"]
    with pytest.raises(formats.Misuse, match="did you mean 'array_record'"):
        formats.open_source(odd, format="arrayrecord")
    with pytest.raises(formats.Misuse, match="no columns"):
        formats.open_source(odd, format="array_record", columns=["x"])


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "zero bytes":
        path.write_bytes(b"")
    elif how == "cut at the end":
        path.write_bytes(data[:-10])
    elif how == "cut in half":
        path.write_bytes(data[: len(data) // 2])
    elif how == "another format":
        path.write_bytes(b"hello " * 50_000)


@pytest.mark.parametrize("suffix", ["array_record", "parquet"])
@pytest.mark.parametrize("how", ["zero bytes", "cut at the end", "cut in half", "another format"])
def test_an_unreadable_shard_is_named_at_open(tmp_path, suffix, how):
    for name in ["a", "b", "c"]:
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            formats.write_parquet(path, {"x": np.arange(20)})
        else:
            put(path, b"one", b"two")
    bad = tmp_path / f"b.{suffix}"
    damaged(bad, how)
    with pytest.raises(formats.Damaged, match=re.escape(str(bad))):
        formats.open_source(tmp_path / f"*.{suffix}")


@pytest.mark.parametrize("suffix", ["array_record", "parquet"])
def test_a_shard_that_may_not_be_read_is_a_store_failure(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        formats.write_parquet(path, {"x": [1]})
    else:
        put(path, b"one")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # The superuser may read everything, so the refusal is put in the place of the real call.
    if suffix == "parquet":
        monkeypatch.setattr("pyarrow.OSFile", refuse)
    else:
        monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(
        formats.StoreFailed, match=re.escape(f"{path}: may not be read by this user")
    ):
        formats.open_source(path)


def test_a_dangling_link_is_not_found(tmp_path):
    (tmp_path / "a.array_record").symlink_to(tmp_path / "gone")
    with pytest.raises(formats.NotFound, match=r"a\.array_record"):
        formats.open_source(tmp_path / "*.array_record")


def test_a_source_without_records_opens(tmp_path):
    records = formats.open_source(put(tmp_path / "a.array_record"))
    formats.write_parquet(tmp_path / "b.parquet", {"x": np.zeros(0, np.int32)})
    rows = formats.open_source(tmp_path / "b.parquet")
    assert records.read([]) == []
    assert rows.read([])["x"].dtype == np.int32
    for source in (records, rows):
        assert len(source) == 0
        assert len(source.fingerprint()["digest"]) == 32
        with pytest.raises(IndexError, match="the source has no records"):
            source[0]


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/formats-test", recursive=True)


def test_parquet_from_a_url(tmp_path, memory):
    for number in range(2):
        path = tmp_path / f"{number}.parquet"
        formats.write_parquet(path, {"x": np.arange(5) + 5 * number}, row_group_size=2)
        memory.pipe(f"/formats-test/{number}.parquet", path.read_bytes())
    source = formats.open_source("memory://formats-test/*.parquet")
    assert source.read([9, 0, 5])["x"].tolist() == [9, 0, 5]
    local = formats.open_source(tmp_path / "*.parquet")
    assert source.fingerprint() == local.fingerprint()
    assert source.where(7) == "memory:///formats-test/1.parquet, row 2 (row group 1)"
    one = formats.open_source("memory://formats-test/1.parquet")
    assert one.read([0])["x"].tolist() == [5]
    with pytest.raises(formats.NotFound, match=r"holds 0\.parquet, 1\.parquet; did you mean"):
        formats.open_source("memory://formats-test/*.parqet")
    memory.pipe("/formats-test/2.parquet", b"PAR1 and no more")
    with pytest.raises(formats.Damaged, match=r"memory:///formats-test/2\.parquet"):
        formats.open_source("memory://formats-test/*.parquet")


def test_what_a_url_cannot_do(memory):
    memory.pipe("/formats-test/a.array_record", b"x")
    with pytest.raises(formats.Unsupported, match=r"local file systems only; mount .* or copy"):
        formats.open_source("memory://formats-test/a.array_record")
    for name, options in {"a.arrow": {}, "a.bin": {"window": 1}}.items():
        memory.pipe(f"/formats-test/{name}", b"x")
        with pytest.raises(formats.Unsupported, match=r"local file systems only; mount .* or copy"):
            formats.open_source(f"memory://formats-test/{name}", **options)
    with pytest.raises(formats.Unsupported, match="no reader for nosuch://"):
        formats.open_source("nosuch://bucket/*.parquet")


@hypothesis.given(st.lists(st.text("ab1/", min_size=1, max_size=6), min_size=1, max_size=6))
def test_names_never_depend_on_where_the_files_lie(tmp_path_factory, paths):
    found = []
    for base in ("one", "two/deeper"):
        root = tmp_path_factory.mktemp("names") / base
        for path in paths:
            file = root / "fixed" / (path.strip("/") or "x")
            if file.is_dir() or any(parent.is_file() for parent in file.parents):
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")
        found.append(names(root / "fixed/**"))
    assert found[0] == found[1]
    assert all(not name.startswith("/") and ".." not in name for name in found[0])


def test_the_package_is_a_list_of_names():
    assert list(formats.__all__) == sorted(formats.__all__)
    for name in formats.__all__:
        assert getattr(formats, name).__module__.startswith("formats.")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        formats.nonsense  # noqa: B018
    tree = ast.parse(Path(formats.__file__).read_text())
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name for node in typed.body for alias in node.names}  # type: ignore[attr-defined]
    assert seen == set(formats.__all__) == set(formats._HOME)


def test_opening_imports_only_what_it_needs(tmp_path):
    np.arange(1, 9, dtype=np.uint16).tofile(tmp_path / "a.bin")
    code = (
        f"import sys, formats; path = {str(tmp_path / 'a.bin')!r};"
        "formats.open_source(path, window=2).read([0]);"
        "print(sorted({'pyarrow', 'array_record', 'rich'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "[]"


def test_importing_the_package_loads_nothing():
    code = "import sys, formats; print(sorted(m for m in sys.modules if m.startswith('formats')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "['formats']"


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    real = [
        name
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.DataError) and value is not errors.DataError
    ]
    assert sorted(drawn) == sorted(real)

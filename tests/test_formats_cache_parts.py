"""The parts of an Arrow cache: what is added costs its own part, and nothing stays for ever."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest

import formats
from formats import cache as caching
from formats.parquet import ParquetSource
from formats.source import json_digest

ROWS = 40


def write(directory: Path, numbers: range) -> str:
    directory.mkdir(exist_ok=True, parents=True)
    for number in numbers:
        ids = np.arange(ROWS) + ROWS * number
        formats.write_parquet(
            directory / f"{number}.parquet",
            {"id": ids, "text": [f"text {each}" for each in ids.tolist()]},
            row_group_size=15,
        )
    return str(directory / "*.parquet")


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """The names of the files that are decoded for a cache."""
    found: list[str] = []
    real = ParquetSource.batches

    def batches(self: ParquetSource, number: int):
        found.append(self.files[number].name)
        return real(self, number)

    monkeypatch.setattr(ParquetSource, "batches", batches)
    return found


def ids_of(source: formats.Source) -> list[int]:
    column = source.read(np.arange(len(source)))["id"]  # type: ignore[call-overload]
    return column.tolist()


def test_an_appended_file_costs_its_own_part(tmp_path, decoded):
    pattern = write(tmp_path / "data", range(3))
    formats.open_source(pattern, cache=tmp_path / "c")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "c").iterdir()}
    decoded.clear()
    write(tmp_path / "data", range(3, 5))
    source = formats.open_source(pattern, cache=tmp_path / "c")
    assert decoded == ["3.parquet", "4.parquet"]
    assert ids_of(source) == list(range(5 * ROWS))
    after = {path.name: path.stat().st_ino for path in (tmp_path / "c").iterdir()}
    assert len(after) == 5
    assert before.items() <= after.items()


def test_parts_stay_where_patterns_and_directories_become_others(tmp_path, decoded):
    first = write(tmp_path / "data/2023", range(2))
    formats.open_source(first, cache=tmp_path / "c")
    decoded.clear()
    second = write(tmp_path / "data/2024", range(2, 3))
    source = formats.open_source([first, second], cache=tmp_path / "c")
    assert decoded == ["2024/2.parquet"]
    assert ids_of(source) == list(range(3 * ROWS))
    (tmp_path / "data").rename(tmp_path / "moved")
    decoded.clear()
    formats.open_source(tmp_path / "moved/**/*.parquet", cache=tmp_path / "c")
    assert decoded == []


def test_files_that_are_the_same_have_one_part(tmp_path, decoded):
    first = write(tmp_path / "a", range(1))
    second = write(tmp_path / "b", range(1))
    source = formats.open_source([first, second], cache=tmp_path / "c")
    assert len(decoded) == 1
    assert ids_of(source) == 2 * list(range(ROWS))


def build_and_die(pattern: str, cache: Path, at: str) -> None:
    """Build, and be killed in a file: in its midst, or just before it takes its final name."""
    real_cast, real_replace, seen = caching._cast, os.replace, []

    def cast(batch, schema, file):
        seen.append(file.name)
        if at == "middle" and seen.count("1.parquet") == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return real_cast(batch, schema, file)

    def replace(temporary, target):
        if at == "end" and "1.parquet" in seen:
            os.kill(os.getpid(), signal.SIGKILL)
        real_replace(temporary, target)

    caching._cast, os.replace = cast, replace  # type: ignore[assignment]
    formats.open_source(pattern, cache=cache)


@pytest.mark.parametrize("at", ["middle", "end"])
def test_what_a_killed_builder_leaves_goes_also_if_nobody_wants_it(tmp_path, decoded, at):
    cache = tmp_path / "c"
    pattern = write(tmp_path / "data", range(3))
    child = multiprocessing.get_context("spawn").Process(
        target=build_and_die, args=(pattern, cache, at)
    )
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list(cache.glob(".*.tmp"))) == 1
    formats.open_source(tmp_path / "data/0.parquet", cache=cache)
    assert decoded == [], "the first file was finished"
    formats.open_source(tmp_path / "data/2.parquet", cache=cache)
    assert decoded == ["2.parquet"]
    assert list(cache.glob(".*.tmp")) == []
    assert ids_of(formats.open_source(pattern, cache=cache)) == list(range(3 * ROWS))


def test_a_temporary_file_of_a_live_builder_stays(tmp_path):
    cache = tmp_path / "c"
    cache.mkdir()
    held = cache / f".{'0' * 32}.tmp"
    other = cache / "notes.txt"
    other.write_text("mine")
    with held.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        formats.open_source(write(tmp_path / "data", range(1)), cache=cache)
        assert held.exists()
    formats.open_source(write(tmp_path / "more", range(7, 8)), cache=cache)
    assert not held.exists()
    assert other.read_text() == "mine"


def test_parts_that_nobody_has_opened_for_long_go(tmp_path, decoded):
    cache = tmp_path / "c"
    pattern = write(tmp_path / "data", range(2))
    formats.open_source(pattern, cache=cache)
    long_ago = time.time() - 31 * 86400
    for path in cache.iterdir():
        os.utime(path, (long_ago, long_ago))
    used = formats.open_source(tmp_path / "data/1.parquet", cache=cache)
    assert len(list(cache.iterdir())) == 2, "only building removes anything"
    decoded.clear()
    write(tmp_path / "data", range(2, 3))
    formats.open_source([tmp_path / "data/1.parquet", tmp_path / "data/2.parquet"], cache=cache)
    assert decoded == ["2.parquet"]
    assert len(list(cache.iterdir())) == 2
    assert ids_of(used) == list(range(ROWS, 2 * ROWS))
    decoded.clear()
    assert ids_of(formats.open_source(pattern, cache=cache)) == list(range(3 * ROWS))
    assert decoded == ["0.parquet"]


def test_a_part_that_is_gone_while_it_is_read_is_named(tmp_path):
    source = formats.open_source(write(tmp_path / "data", range(1)), cache=tmp_path / "c")
    for path in (tmp_path / "c").iterdir():
        path.unlink()
    with pytest.raises(formats.NotFound, match=r"\.arrow.*open the source again"):
        source.read([0])


def old_entry(source: ParquetSource, cache: Path) -> Path:
    """What the first layout had of a source, out of the parts of today."""
    types = {name: str(kind) for name, kind in source.projection.types.items()}
    files = source.fingerprint()["files"]
    entry = cache / json_digest({"layout": 1, "files": files, "types": types})
    made = [cache / f"{key}.arrow" for key in caching._keys(source)]
    entry.mkdir()
    (entry / "lock").touch()
    (entry / ".000002.arrow.01234567.tmp").write_bytes(b"half")
    for number, path in enumerate(made):
        path.rename(entry / f"{number:06d}.arrow")
    return entry


def test_an_entry_of_the_first_layout_is_taken_over(tmp_path, decoded):
    cache = tmp_path / "c"
    pattern = write(tmp_path / "data", range(3))
    source = formats.open_source(pattern)
    assert isinstance(source, ParquetSource)
    source.cached(cache)
    entry = old_entry(source, cache)
    (entry / "000001.arrow").write_bytes(b"damaged")
    decoded.clear()
    assert ids_of(formats.open_source(pattern, cache=cache)) == list(range(3 * ROWS))
    assert decoded == ["1.parquet"]
    assert not entry.exists()
    assert len(list(cache.iterdir())) == 3


def open_at_once(pattern: str, cache: Path, barrier) -> None:
    barrier.wait(60)
    raise SystemExit(ids_of(formats.open_source(pattern, cache=cache)) != list(range(6 * ROWS)))


def test_processes_that_build_at_once_make_each_part_once(tmp_path):
    cache = tmp_path / "c"
    pattern = write(tmp_path / "data", range(6))
    source = formats.open_source(tmp_path / "data/[012].parquet")
    assert isinstance(source, ParquetSource)
    source.cached(cache)
    old_entry(source, cache)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    children = [
        context.Process(target=open_at_once, args=(pattern, cache, barrier)) for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        child.kill()
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert list(cache.glob(".*")) == []
    assert len(list(cache.glob("*.arrow"))) == 6


def test_a_cache_that_is_complete_may_be_read_only(tmp_path, monkeypatch):
    cache = tmp_path / "c"
    pattern = write(tmp_path / "data", range(2))
    formats.open_source(pattern, cache=cache)

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("read-only file system")

    for name in ("utime", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(caching, "_locked", refuse)
    assert ids_of(formats.open_source(pattern, cache=cache)) == list(range(2 * ROWS))


def test_columns_that_the_cache_has_are_read_from_it(tmp_path, monkeypatch):
    pattern = write(tmp_path / "data", range(2))
    cached = formats.open_source(pattern, columns=["id"], cache=tmp_path / "c")
    monkeypatch.setattr(ParquetSource, "_group", lambda *_: pytest.fail("decoded"))
    with cached.select(["id"]) as narrow:  # type: ignore[attr-defined]
        assert ids_of(narrow) == list(range(2 * ROWS))
        assert narrow.fingerprint() == cached.fingerprint()
    monkeypatch.undo()
    with cached.select(["text"]) as other:  # type: ignore[attr-defined]
        assert other.read([ROWS])["text"] == [f"text {ROWS}"]


def test_parts_are_of_their_user_alone(tmp_path):
    formats.open_source(write(tmp_path / "data", range(1)), cache=tmp_path / "c")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()]
    assert modes == [0o600]

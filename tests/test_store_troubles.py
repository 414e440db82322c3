"""A file store when the system fails: never a wrong answer, nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from store_contract import aligned, files, some_bytes
from store_troubles import fail_on, raw_files, writes_of

from ckpt import disk
from ckpt.errors import StoreFailed
from ckpt.store import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "run")


# --- failures of the system ----------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG])
@pytest.mark.parametrize("name", ["put", "put_many", "put_if_absent", "append"])
def test_a_failed_write_leaves_what_was_there(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    store.put("a/x", b"old")
    before = raw_files(Path(store.location))
    fail_on(monkeypatch, "write", number, lambda *_: True)
    with pytest.raises(StoreFailed) as caught:
        writes_of(store)[name]()
    after = raw_files(Path(store.location))
    after.pop("a/log", None)  # made, and empty
    assert after == before
    assert isinstance(caught.value.__cause__, OSError)
    text = str(caught.value)
    assert store.location in text
    assert os.strerror(number) in text
    if number == errno.ENOSPC:
        assert "writing 3 bytes" in text
        assert "bytes are free" in text
        assert "keep fewer steps" in text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("after", [0, 3])
def test_a_failed_image_frees_its_space(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int, shift: int, after: int
) -> None:
    monkeypatch.setattr(disk, "WINDOW_BYTES", 4096)
    store.put("a/x", b"old")
    calls: list[int] = []

    def when(*_: object) -> bool:
        calls.append(1)
        return len(calls) > after

    fail_on(monkeypatch, "pwrite", number, when)
    with pytest.raises(StoreFailed, match=f"image: {os.strerror(number)}"):
        store.write_image("a/image", aligned(some_bytes(40_000), shift=shift))
    assert raw_files(Path(store.location)) == {"a/x": b"old"}
    monkeypatch.undo()
    store.write_image("a/image", aligned(some_bytes(40_000), shift=shift))
    assert files(store)["a/image"] == 40_000


def test_a_file_size_limit_is_a_failure_of_the_store(tmp_path: Path) -> None:
    """A real limit, in a process of its own."""
    program = """
        import resource, sys
        import numpy as np
        from ckpt.errors import StoreFailed
        from ckpt.store import FileStore
        store = FileStore(sys.argv[1])
        store.put("x", b"1")
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        memory = np.zeros(300_000, np.uint8)
        start = -memory.ctypes.data % 4096
        for act in (
            lambda: store.put("x", bytes(100_000)),
            lambda: store.put_if_absent("y", bytes(100_000)),
            lambda: store.write_image("i", memoryview(memory[start : start + 200_000].data)),
            lambda: store.write_image("i", memoryview(memory[start + 1 : start + 200_000].data)),
        ):
            try:
                act()
            except StoreFailed as error:
                assert "File too large; files of this process" in str(error), error
                assert "(ulimit -f)" in str(error), error
            else:
                raise SystemExit("no error")
        assert [(e.name, e.size_bytes) for e in store.list("")] == [("x", 1)]
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert raw_files(tmp_path / "run") == {"x": b"1"}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_no_access_is_a_failure_of_the_store_and_never_absence(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store.put("a/x", b"old")
    store.put("t/x", b"old")
    inside = f"{store.location}/a"

    def within(path: object, *_: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(inside)

    def no_access(function: str) -> None:
        fail_on(monkeypatch, function, number, within)

    for function in ("open", "scandir", "lstat", "stat", "unlink", "rename", "mkdir", "link"):
        no_access(function)
    image = aligned(b"1")
    reads: list[Callable[[], object]] = [
        lambda: store.read("a/x"),
        lambda: store.open_image("a/x"),
        lambda: store.list("a"),
        lambda: store.exists("a/x"),
    ]
    writes: list[Callable[[], object]] = [
        *writes_of(store).values(),
        lambda: store.write_image("a/i", image),
        lambda: store.delete("a/x"),
        lambda: store.delete_tree("a"),
        lambda: store.move("a", "b"),
    ]
    for acts, access in ((reads, "read"), (writes, "write")):
        for act in acts:
            with pytest.raises(StoreFailed, match=f"this user needs {access} access"):
                act()
    monkeypatch.undo()
    assert raw_files(Path(store.location)) == {"a/x": b"old", "t/x": b"old"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root is let in everywhere")
def test_no_access_for_real(store: FileStore) -> None:
    store.put("a/b/x", b"old")
    os.chmod(Path(store.location, "a"), 0)
    try:
        acts: list[Callable[[], object]] = [
            lambda: store.read("a/b/x"),
            lambda: store.list("a"),
            lambda: store.exists("a/b/x"),
            lambda: store.put("a/b/x", b""),
        ]
        for act in acts:
            with pytest.raises(StoreFailed, match="this user needs"):
                act()
    finally:
        os.chmod(Path(store.location, "a"), 0o700)


def test_a_parent_that_is_a_file(store: FileStore) -> None:
    store.put("file", b"f")
    image = aligned(b"1")
    acts: list[Callable[[], object]] = [
        lambda: store.put("file/x", b""),
        lambda: store.put("file/x/y", b""),
        lambda: store.put_if_absent("file/x", b""),
        lambda: store.write_image("file/x/y", image),
        lambda: store.append("file/x", b""),
    ]
    for act in acts:
        with pytest.raises(StoreFailed, match="a parent of it is a file, wanted a directory"):
            act()
    store.put("d/x", b"")
    with pytest.raises(StoreFailed):
        store.move("d", "file/d")
    assert raw_files(Path(store.location)) == {"file": b"f", "d/x": b""}


def test_a_directory_that_vanishes_under_a_write_is_no_absence(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt may clean up: `NotFound` would say that something was looked for."""
    store.put("a/x", b"")
    monkeypatch.setattr(disk, "make_directory", lambda directory: None)
    image = aligned(b"1")
    acts: list[Callable[[], object]] = [
        lambda: store.put("gone/x", b""),
        lambda: store.put_if_absent("gone/x", b""),
        lambda: store.write_image("gone/x", image),
    ]
    for act in acts:
        with pytest.raises(StoreFailed, match="its directory vanished"):
            act()


@pytest.mark.parametrize("function", ["read", "preadv"])
def test_a_failing_disk_is_no_absence(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    store.write_image("image", aligned(some_bytes(10_000)))
    with store.open_image("image") as reader:
        fail_on(monkeypatch, function, errno.EIO, lambda *_: True)
        fail_on(monkeypatch, "open", errno.ESTALE, lambda *_: True)
        with pytest.raises(StoreFailed, match="Stale file handle"):
            store.read("image")
        if function == "preadv":
            with pytest.raises(StoreFailed, match="Input/output error"):
                reader.read(0, 10)


# --- short reads and writes ----------------------------------------------------------------------


def test_short_reads_and_writes_go_on(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pwrite, preadv = os.write, os.pwrite, os.preadv
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[:7]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, to, at: preadv(fd, [to[0][:999]], at))
    data = some_bytes(100_001)
    store.put("a", data[:500])
    store.put_if_absent("b", data[:501])
    store.append("c", data[:100])
    store.append("c", data[100:200])
    assert [store.read(key) for key in "abc"] == [data[:500], data[:501], data[:200]]
    for shift in (0, 1):
        # 1000 bytes are no block: O_DIRECT refuses the rest, and the image goes out buffered.
        store.write_image("image", aligned(data, shift=shift))
        with store.open_image("image") as reader:
            assert reader.read(0, len(data)) == data

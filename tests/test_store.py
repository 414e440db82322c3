"""The store over a file system: the contract, and what only a file system can do to one."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_store import FaultyStore
from store_contract import SIZES, StoreContract, aligned, files, some_bytes
from store_troubles import fail_on, raw_files, writes_of

from ckpt import disk
from ckpt.errors import AlreadyExists, Misuse, StoreFailed
from ckpt.store import FileStore, Store, open_store


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FileStore(tmp_path / "run")


class TestFaultyStoreWithoutFaults(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FaultyStore(FileStore(tmp_path / "run"))


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "run")


# --- processes -----------------------------------------------------------------------------------


def test_put_if_absent_has_one_winner_among_processes(tmp_path: Path) -> None:
    program = """
        import sys, pathlib, time
        from ckpt.errors import AlreadyExists
        from ckpt.store import FileStore
        root, me = sys.argv[1:]
        assert "jax" not in sys.modules
        store = FileStore(root + "/run")
        pathlib.Path(root, "ready-" + me).touch()
        while not pathlib.Path(root, "go").exists():
            pass
        for i in range(60):
            try:
                store.put_if_absent(f"attempts/{i}.json", me.encode() * 3000)
                print(i)
            except AlreadyExists:
                pass
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(me)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(3)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 3:
        assert all(child.poll() is None for child in children)
    (tmp_path / "go").touch()
    won = {me: set(map(int, child.communicate()[0].split())) for me, child in enumerate(children)}
    assert all(child.returncode == 0 for child in children)
    assert sorted(i for each in won.values() for i in each) == list(range(60))
    for me, numbers in won.items():
        for i in numbers:
            found = (tmp_path / f"run/attempts/{i}.json").read_bytes()
            assert found == str(me).encode() * 3000
    assert len(list((tmp_path / "run/attempts").iterdir())) == 60, "temporary files were left"


def test_an_image_is_written_at_the_end_of_the_interpreter(tmp_path: Path) -> None:
    """No thread can be started then, and the last save of a trainer goes out just then."""
    program = """
        import atexit, sys, threading
        import numpy as np
        from ckpt import disk
        from ckpt.store import FileStore
        disk.WINDOW_BYTES = 8192
        store = FileStore(sys.argv[1])
        memory = np.arange(200_000, dtype=np.uint8)
        start = -memory.ctypes.data % 4096
        data = memoryview(memory[start : start + 65536].data)

        def last():
            store.write_image("image", data)
            with store.open_image("image") as reader:
                assert reader.read(0, 65536) == bytes(data)
            print("written")

        atexit.register(last)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "written\n", "")


# --- direct and buffered images ------------------------------------------------------------------


def opened_flags(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Flags of every `os.open` for writing an image."""
    real, flags = os.open, []

    def call(path: Any, flag: int, *args: Any, **options: Any) -> int:
        if flag & os.O_TRUNC:
            flags.append(flag)
        return real(path, flag, *args, **options)

    monkeypatch.setattr(os, "open", call)
    return flags


def test_aligned_images_go_out_directly_and_others_buffered(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = opened_flags(monkeypatch)
    store.write_image("image", aligned(some_bytes(8192)))
    assert flags[0] & os.O_DIRECT
    del flags[:]
    store.write_image("image", aligned(some_bytes(8192), shift=1))
    store.write_image("image", memoryview(b""))
    assert [flag & os.O_DIRECT for flag in flags] == [0, 0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_direct_writes(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, size: int, number: int
) -> None:
    monkeypatch.setattr(disk, "WINDOW_BYTES", 65536)
    fail_on(monkeypatch, "open", number, lambda path, flags, *_: bool(flags & os.O_DIRECT))
    data = some_bytes(size)
    store.write_image("image", aligned(data))
    with store.open_image("image") as reader:
        assert reader.read(0, reader.size_bytes) == data


@pytest.mark.parametrize("after", [0, 2])
def test_a_file_system_that_refuses_direct_writes_only_when_it_writes(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    import fcntl

    monkeypatch.setattr(disk, "WINDOW_BYTES", 65536)
    refused: list[int] = []

    def when(descriptor: int, *_: object) -> bool:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        refused.extend([1] * direct)
        return direct and len(refused) > after

    fail_on(monkeypatch, "pwrite", errno.EINVAL, when)
    data = some_bytes(300_000)
    store.write_image("image", aligned(data))
    with store.open_image("image") as reader:
        assert reader.read(0, reader.size_bytes) == data
    if not refused:
        pytest.skip("this file system has no O_DIRECT")


def test_other_errors_of_a_direct_write_are_errors(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_on(monkeypatch, "open", errno.EIO, lambda path, flags, *_: bool(flags & os.O_DIRECT))
    with pytest.raises(StoreFailed, match="Input/output"):
        store.write_image("image", aligned(some_bytes(8192)))


# --- durability ----------------------------------------------------------------------------------


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a crash of the host would and would not keep, as it happens: (event, path)."""
    events: list[tuple[str, str]] = []

    def record(function: str, name: Callable[..., str]) -> None:
        real = getattr(os, function)

        def call(*args: Any, **options: Any) -> Any:
            path = name(*args)
            result = real(*args, **options)
            events.append((function, path))
            return result

        monkeypatch.setattr(os, function, call)

    record("fsync", lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}"))
    record("mkdir", lambda path, *_: os.fspath(path))
    for function in ("replace", "link", "rename"):
        record(function, lambda source, target, **_: f"{os.fspath(source)} -> {os.fspath(target)}")
    return events


def test_what_returns_is_durable(store: FileStore, journal: list[tuple[str, str]]) -> None:
    """Data before its name, each name before the return; every new directory in its parent."""
    root = store.location
    assert not os.path.exists(root)
    image = aligned(some_bytes(5000))
    acts: list[tuple[Callable[[], object], str, str]] = [
        (lambda: store.put("a/b/x", b"1"), "replace", "a/b/x"),
        (lambda: store.put("a/b/x", b"2"), "replace", "a/b/x"),
        (lambda: store.put_if_absent("c/y", b"1"), "link", "c/y"),
        (lambda: store.write_image("e/f/g/image", image), "", "e/f/g/image"),
        (lambda: store.move("a/b", "h/i"), "rename", "h/i"),
    ]
    for act, naming, key in acts:
        del journal[:]
        act()
        target = f"{root}/{key}"
        if naming:
            named = next(i for i, (what, path) in enumerate(journal) if what == naming)
            source, _, to = journal[named][1].partition(" -> ")
            assert to == target
            if naming != "rename":
                assert ("fsync", source) in journal[:named], "the name before its data"
            else:
                assert ("fsync", os.path.dirname(source)) in journal[named:]
        else:
            named = journal.index(("fsync", target))
        assert ("fsync", os.path.dirname(target)) in journal[named:]
        for i, (what, path) in enumerate(journal):
            if what == "mkdir":
                assert ("fsync", os.path.dirname(path)) in journal[i:], path


def test_failing_to_make_it_durable_is_a_failure(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/x", b"")
    fail_on(monkeypatch, "fsync", errno.EIO, lambda *_: True)
    image = aligned(b"1")
    for act in (
        *(act for name, act in writes_of(store).items() if name != "append"),
        lambda: store.write_image("a/i", image),
        lambda: store.move("a", "b"),
    ):
        with pytest.raises(StoreFailed, match="Input/output"):
            act()


def test_a_claim_whose_answer_was_lost_is_won(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network file systems repeat a call after a lost answer, and then report what they did."""
    real = os.link

    def twice(source: Any, target: Any) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", twice)
    store.put_if_absent("a/1", b"mine")
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a/1", b"other")
    assert raw_files(Path(store.location)) == {"a/1": b"mine"}


# --- what else may lie in a directory ------------------------------------------------------------


def test_what_interrupted_writes_left_is_hidden_and_can_be_cleared(store: FileStore) -> None:
    root = Path(store.location)
    store.put_many({"s/x": b"1", "s/d/y": b"2", "t/z": b"3"})
    left = [f"s/x.tmp-{'0' * 32}", f"s/d/y.tmp-{'ab' * 16}", f"t/z.tmp-{'1' * 32}"]
    foreign = ["s/x.tmp-1", f"s/x.tmp-{'0' * 31}", f"s/x.tmp-{'0' * 32}.txt", f"s/.tmp-{'G' * 32}"]
    for key in left + foreign:
        (root / key).write_bytes(b"half")
    wanted = {"s/x", "s/d/y", "t/z", *foreign}
    assert set(files(store)) == wanted
    store.clear_temporaries("s")
    assert set(raw_files(root)) == wanted | {left[2]}


def test_a_whole_image_of_real_windows(store: FileStore) -> None:
    data = some_bytes(2 * disk.WINDOW_BYTES + 12_345)
    store.write_image("image", aligned(data))
    with store.open_image("image") as reader:
        assert reader.read(0, len(data)) == data


def test_files_are_made_with_the_mask_of_the_user(store: FileStore) -> None:
    before = os.umask(0o027)
    try:
        store.put("a", b"")
        store.write_image("b", aligned(b"1"))
    finally:
        os.umask(before)
    for name in "ab":
        assert stat.S_IMODE(os.stat(Path(store.location, name)).st_mode) == 0o640


def test_a_location_is_a_path_or_a_file_url(tmp_path: Path) -> None:
    wanted = str(tmp_path / "run")
    assert open_store(tmp_path / "run").location == wanted
    assert open_store(f"file://{wanted}").location == wanted
    assert open_store(f"{wanted}/../run/").location == wanted
    assert repr(open_store(wanted)) == f"FileStore({wanted!r})"
    with pytest.raises(Misuse, match="scheme 'gopher' is not supported; wanted a path"):
        open_store("gopher://x/y")

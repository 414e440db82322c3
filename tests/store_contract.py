"""What every store must hold: the clauses of `ckpt/store.py`, as tests.

A test module derives a class of its own, named `Test...`, and gives it a fixture `store`: an empty
store. Nothing here knows what a store is made of.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckpt import disk
from ckpt.errors import AlreadyExists, Damaged, Misuse, NotFound
from ckpt.grid import PAGE_BYTES
from ckpt.store import Store

HOSTILE_KEYS = [
    "",
    "/",
    ".",
    "..",
    "/etc/passwd",
    "a/",
    "a//b",
    "./a",
    "a/.",
    "a/..",
    "../a",
    "a/../../b",
    "a\0b",
    "\0",
    "\ud800",
    "a/b\ud800c",
    f"a.tmp-{'0' * 32}",
    f"x.tmp-{'f' * 32}/b",
]

ODD_KEYS = [
    " ",
    "...",
    ".hidden",
    "-rf",
    "a b/c d",
    "a\\b",
    "a\nb",
    "a%2Fb",
    "*?[",
    "~",
    "$HOME",
    "schönes/Ding",
    "文",
    "x" * 200,
    "1.orbax-checkpoint-tmp-a1-deleted/x",
    "a.tmp-0",
]

SIZES = [0, 1, 4095, 4096, 4097, 65536, 2 * 2**20 + 4095]


def some_bytes(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def aligned(data: bytes, *, shift: int = 0) -> memoryview:
    """The bytes in memory that begins `shift` bytes behind a page boundary."""
    memory = np.empty(len(data) + 2 * PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES + shift
    view = memory[start : start + len(data)]
    view[:] = np.frombuffer(data, np.uint8)
    return memoryview(view.data)


def in_threads(acts: list[Callable[[], Any]]) -> list[Any]:
    """Run all at once; what each returned or raised, in order."""
    barrier = threading.Barrier(len(acts))
    found: list[Any] = [None] * len(acts)

    def run(i: int) -> None:
        barrier.wait()
        try:
            found[i] = acts[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def files(store: Store, prefix: str = "") -> dict[str, int]:
    """Size of every file; what a listing does not tell is read."""
    return {key: len(store.read(key)) if size is None else size for key, size in store.walk(prefix)}


class StoreContract:
    """The contract; derive from it and give a fixture `store`."""

    # --- small files ---------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 100, 2**20])
    def test_what_was_put_is_read(self, store: Store, size: int) -> None:
        data = some_bytes(size)
        store.put("a/b/c", data)
        assert store.read("a/b/c") == data
        assert files(store) == {"a/b/c": size}

    def test_put_replaces(self, store: Store) -> None:
        store.put("a", b"long old bytes")
        store.put("a", b"new")
        assert store.read("a") == b"new"
        assert [e.name for e in store.list("")] == ["a"]

    def test_put_many_puts_all(self, store: Store) -> None:
        wanted = {f"d{i % 3}/{i}": some_bytes(i) for i in range(20)}
        store.put("d0/0", b"old")
        store.put_many(wanted)
        assert {key: store.read(key) for key in files(store)} == wanted
        store.put_many({})

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_names_are_names(self, store: Store, key: str) -> None:
        store.put(key, b"x")
        assert store.read(key) == b"x"
        assert files(store) == {key: 1}
        assert store.exists(key)
        store.put_if_absent(f"{key}2", b"y")
        store.delete(key)
        assert files(store) == {f"{key}2": 1}

    @pytest.mark.parametrize("key", HOSTILE_KEYS)
    def test_keys_that_lead_elsewhere_are_refused(self, store: Store, key: str) -> None:
        store.put("a/b", b"x")
        image = memoryview(b"image")
        acts: list[Callable[[], Any]] = [
            lambda: store.put(key, b""),
            lambda: store.put_many({key: b""}),
            lambda: store.put_if_absent(key, b""),
            lambda: store.read(key),
            lambda: store.exists(key),
            lambda: store.delete(key),
            lambda: store.delete_tree(key),
            lambda: store.clear_temporaries(key),
            lambda: store.move(key, "x"),
            lambda: store.move("a", key),
            lambda: store.write_image(key, image),
            lambda: store.open_image(key),
        ]
        if key:  # the empty prefix is the whole store
            acts.append(lambda: store.list(key))
        for act in acts:
            with pytest.raises(Misuse, match="key"):
                act()
        assert files(store) == {"a/b": 1}

    def test_a_reader_sees_old_or_new_bytes(self, store: Store) -> None:
        versions = [bytes([65 + i]) * (200_000 + 1000 * i) for i in range(4)]
        store.put("a", versions[0])
        done = threading.Event()

        def write() -> None:
            try:
                for i in range(40):
                    store.put("a", versions[i % 4])
            finally:
                done.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            found = store.read("a")
            assert found in versions, f"{len(found)} bytes, a mixture"
        writer.join()
        assert store.read("a") == versions[3]

    # --- put_if_absent -------------------------------------------------------------------------

    def test_put_if_absent_leaves_what_is_there(self, store: Store) -> None:
        store.put_if_absent("a/1", b"first")
        for data in (b"", b"second", b"first"):
            with pytest.raises(AlreadyExists, match="1"):
                store.put_if_absent("a/1", data)
        assert store.read("a/1") == b"first"
        assert files(store) == {"a/1": 5}
        store.put("dir/x", b"")
        with pytest.raises(AlreadyExists):
            store.put_if_absent("dir", b"")

    def test_put_if_absent_has_one_winner_among_threads(self, store: Store) -> None:
        for key in (f"claims/{i}" for i in range(25)):
            acts = [
                lambda me=me, key=key: store.put_if_absent(key, b"%d" % me * 1000)
                for me in range(8)
            ]
            found = in_threads(acts)
            winners = [me for me, what in enumerate(found) if what is None]
            assert len(winners) == 1, f"{key}: {found}"
            assert all(isinstance(what, AlreadyExists) for what in found if what is not None)
            assert store.read(key) == b"%d" % winners[0] * 1000
        assert len(store.list("claims")) == 25

    # --- listing and deleting ------------------------------------------------------------------

    def test_list_is_one_level_and_sorted(self, store: Store) -> None:
        for key in ("b", "a/x", "a/y/z", "a/10", "a/9", "a-b", "ab/c"):
            store.put(key, b"123")
        top = store.list("")
        sizes = [3 if e.size_bytes is None else e.size_bytes for e in top]
        assert [(e.name, e.is_dir, size) for e, size in zip(top, sizes, strict=True)] == [
            ("a", True, 0),
            ("a-b", False, 3),
            ("ab", True, 0),
            ("b", False, 3),
        ]
        assert [e.name for e in store.list("a")] == ["10", "9", "x", "y"]
        assert store.list("absent") == []
        assert store.list("absent/deep") == []
        assert store.list("b") == []
        assert store.list("b/below") == []

    def test_exists(self, store: Store) -> None:
        store.put("a/b", b"")
        assert store.exists("a")
        assert store.exists("a/b")
        for key in ("b", "a/c", "a/b/c", "x/y/z"):
            assert not store.exists(key)

    def test_deleting_what_is_absent_is_fine(self, store: Store) -> None:
        store.put("a/b", b"x")
        for key in ("c", "a/c", "a/b/c", "x/y/z"):
            store.delete(key)
            store.delete_tree(key)
            store.clear_temporaries(key)
        store.delete_tree("a/b")  # nothing is below a file
        assert files(store) == {"a/b": 1}
        store.delete("a/b")
        store.delete("a/b")
        assert files(store) == {}

    def test_delete_tree_removes_all_below_and_nothing_beside(self, store: Store) -> None:
        keep = ["a", "d-deleted/x", "d2/x", "dd", "e/d/x"]
        for key in [*keep, "d/x", "d/y/z", "d/y/zz/1", "d/.hidden"]:
            store.put(key, b"1")
        store.delete_tree("d")
        store.delete_tree("d")
        assert sorted(files(store)) == sorted(keep)
        assert not store.exists("d")

    # --- move ----------------------------------------------------------------------------------

    def test_move_takes_everything(self, store: Store) -> None:
        wanted = {f"{i}/x{i}": some_bytes(i) for i in range(5)}
        store.put_many({f"b/tmp/{key}": data for key, data in wanted.items()})
        store.move("b/tmp", "b/final")
        assert {key: store.read(f"b/final/{key}") for key in wanted} == wanted
        assert not store.exists("b/tmp")
        with pytest.raises(NotFound):
            store.read("b/tmp/0/x0")
        store.move("b/final", "other/place/final")  # whose parents are not there yet
        assert sorted(files(store)) == sorted(f"other/place/final/{key}" for key in wanted)

    def test_move_fails_on_what_is_there(self, store: Store) -> None:
        store.put("a/x", b"a")
        store.put("b/y", b"b")
        store.put("file", b"f")
        for target in ("b", "file"):
            with pytest.raises(AlreadyExists, match=target):
                store.move("a", target)
        assert {key: store.read(key) for key in files(store)} == {
            "a/x": b"a",
            "b/y": b"b",
            "file": b"f",
        }

    def test_moving_what_is_no_directory(self, store: Store) -> None:
        store.put("file", b"f")
        store.put("there/x", b"t")
        for source in ("absent", "file", "file/below", "absent/below"):
            for target in ("new", "there", "file"):
                with pytest.raises(NotFound):
                    store.move(source, target)
        assert files(store) == {"file": 1, "there/x": 1}

    def test_one_of_many_movers_wins(self, store: Store) -> None:
        for attempt in range(10):
            for me in range(4):
                store.put(f"{attempt}/tmp{me}/x", b"%d" % me)
            acts = [
                lambda me=me, a=attempt: store.move(f"{a}/tmp{me}", f"{a}/final") for me in range(4)
            ]
            found = in_threads(acts)
            winners = [me for me, what in enumerate(found) if what is None]
            assert len(winners) == 1, found
            assert {type(what) for what in found if what is not None} == {AlreadyExists}
            assert store.read(f"{attempt}/final/x") == b"%d" % winners[0]
            left = {f"{attempt}/tmp{me}/x" for me in range(4) if me != winners[0]}
            assert set(files(store, str(attempt))) == left | {f"{attempt}/final/x"}

    def test_what_is_moved_is_moved_once(self, store: Store) -> None:
        for attempt in range(10):
            store.put(f"{attempt}/tmp/x", b"x")
            acts = [
                lambda me=me, a=attempt: store.move(f"{a}/tmp", f"{a}/to{me}") for me in range(4)
            ]
            found = in_threads(acts)
            winners = [me for me, what in enumerate(found) if what is None]
            assert len(winners) == 1, found
            assert {type(what) for what in found if what is not None} == {NotFound}
            assert list(files(store, str(attempt))) == [f"{attempt}/to{winners[0]}/x"]

    # --- images --------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("shift", [0, 1, 8])
    def test_an_image_is_what_was_written(self, store: Store, size: int, shift: int) -> None:
        data = some_bytes(size)
        store.write_image("s/d/image", aligned(data, shift=shift))
        with store.open_image("s/d/image") as reader:
            assert reader.size_bytes == size
            assert reader.read(0, size) == data
            assert reader.read(size, 0) == b""
            assert "image" in reader.name
        assert files(store) == {"s/d/image": size}

    def test_an_image_of_several_windows(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(disk, "WINDOW_BYTES", 64 * 1024)
        for size in (2 * 65536, 5 * 65536 + 4096, 5 * 65536 + 1):
            for shift in (0, 3):
                data = some_bytes(size, seed=size + shift)
                store.write_image("image", aligned(data, shift=shift))
                with store.open_image("image") as reader:
                    assert reader.size_bytes == size
                    assert reader.read(0, size) == data

    def test_a_shorter_image_replaces_a_longer_one(self, store: Store) -> None:
        for size in (100_000, 5000, 4096, 10, 0):
            store.write_image("image", aligned(some_bytes(size)))
            with store.open_image("image") as reader:
                assert reader.size_bytes == size
                assert reader.read(0, size) == some_bytes(size)

    def test_ranges_are_read_into_buffers(self, store: Store) -> None:
        data = some_bytes(300_000)
        store.write_image("image", aligned(data))
        rng = np.random.default_rng(3)
        starts = rng.integers(0, 290_000, 40).tolist()
        buffers = [np.zeros(int(n), np.uint8) for n in rng.integers(0, 10_000, 40)]
        with store.open_image("image") as reader:
            reader.read_into(
                [(s, memoryview(b.data)) for s, b in zip(starts, buffers, strict=True)]
            )
            reader.read_into([])
            float_buffer = np.zeros(8)
            reader.read_into([(16, memoryview(float_buffer.data))])
        for start, buffer in zip(starts, buffers, strict=True):
            assert buffer.tobytes() == data[start : start + buffer.nbytes]
        assert float_buffer.tobytes() == data[16:80]

    def test_an_image_that_ends_early_is_damaged(self, store: Store) -> None:
        store.write_image("image", aligned(some_bytes(5000)))
        with store.open_image("image") as reader:
            for offset, length in ((0, 5001), (4999, 2), (5001, 0), (-1, 1), (0, -1), (2**62, 1)):
                with pytest.raises(Damaged, match="image"):
                    reader.read(offset, length)
            with pytest.raises(Damaged, match="image"):
                reader.read_into([(4000, memoryview(bytearray(1001)))])
        reader.close()

    # --- what is not there, and what is something else -----------------------------------------

    @pytest.mark.parametrize("key", ["absent", "a/absent", "absent/deep/er", "file/below"])
    def test_what_is_not_there_is_not_found(self, store: Store, key: str) -> None:
        store.put("file", b"")
        store.put("a/b", b"")
        for act in (store.read, store.open_image):
            with pytest.raises(NotFound, match=key.split("/")[-1]):
                act(key)

    def test_a_directory_is_no_file(self, store: Store) -> None:
        store.put("a/b", b"")
        for act in (store.read, store.open_image):
            with pytest.raises((Damaged, NotFound), match="a"):
                act("a")
        assert files(store) == {"a/b": 0}

    def test_the_location_is_told(self, store: Store) -> None:
        assert store.location
        with pytest.raises(NotFound, match=store.location):
            store.read("absent")

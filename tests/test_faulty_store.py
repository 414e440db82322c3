"""The store that fails on demand does what it is asked to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faulty_store import Died, Fault, FaultyStore

from ckpt.errors import NotFound, StoreFailed
from ckpt.store import FileStore


def test_faults_come_when_they_are_due(tmp_path: Path) -> None:
    inner = FileStore(tmp_path)
    store = FaultyStore(inner, [Fault(2, "fail"), Fault(3, "fail after"), Fault(5, "stop")])
    store.put("a", b"1")
    with pytest.raises(StoreFailed, match="operation 2"):
        store.put("a", b"2")
    with pytest.raises(StoreFailed, match="operation 3"):
        store.put("a", b"3")
    assert store.read("a") == b"3"
    store.put("a", b"4")
    with pytest.raises(Died):
        store.put("a", b"5")
    for act in (lambda: store.read("a"), lambda: store.list(""), lambda: store.put("b", b"")):
        with pytest.raises(Died):
            act()
    assert inner.read("a") == b"4"
    assert store.operations == ["put a"] * 5


def test_a_torn_operation_is_half_done(tmp_path: Path) -> None:
    inner = FileStore(tmp_path)
    inner.put_many({"d/1": b"", "d/2": b"", "d/3": b"", "d/4": b"", "m/1": b""})

    def torn(act: Callable[[FaultyStore], None]) -> None:
        with pytest.raises(Died):
            act(FaultyStore(inner, [Fault(1, "torn")]))

    torn(lambda store: store.delete_tree("d"))
    assert len(inner.list("d")) == 2
    torn(lambda store: store.write_image("image", memoryview(b"12345678")))
    with inner.open_image("image") as reader:
        assert reader.read(0, reader.size_bytes) == b"1234"
    torn(lambda store: store.put_many({"x/1": b"1234"}))
    torn(lambda store: store.put_if_absent("x/2", b"1234"))
    assert inner.list("x") == []
    assert sorted(path.read_bytes() for path in (tmp_path / "x").iterdir()) == [b"12", b"12"]
    torn(lambda store: store.move("m", "n"))
    assert inner.exists("m")


def test_a_slow_store_is_slow_and_counts_from_all_threads(tmp_path: Path) -> None:
    store = FaultyStore(FileStore(tmp_path), delay_s=0.001)
    threads = [threading.Thread(target=lambda i=i: store.put(f"{i}", b"")) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(store.operations) == [f"put {i}" for i in range(5)]
    with pytest.raises(NotFound):
        store.read("absent")

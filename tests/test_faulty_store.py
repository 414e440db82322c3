"""The store that fails on demand does what it is asked to; runs on stores that are stuck or slow,
and on disks that cannot be read."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash_runs import after_death, saved, state_of
from faulty_store import Died, Fault, FaultyStore
from rows import Rows

import ckpt
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


# --- a run on such a store -----------------------------------------------------------------------


def test_a_store_that_does_not_answer_holds_up_no_train_step(tmp_path: Path) -> None:
    """Saves return while the store is stuck; when it goes on, all of them are there."""
    run, rows = saved(tmp_path, 1), Rows()
    goes_on, stuck = threading.Event(), threading.Event()

    def wait() -> None:
        stuck.set()
        assert goes_on.wait(60)

    store = FaultyStore(FileStore(run.location), [Fault(3, "pause", wait)])
    with run.manager(store) as manager:
        manager.resume(data=rows)
        pending = []
        for step in (2, 3):
            rows.take()
            run.tags[step] = {100 + step}
            pending.append(manager.save(step, state_of(100 + step), data=rows))
            assert stuck.wait(60)
        assert store.operations[-1].startswith("write_image branch-1/2")
        assert [each is not None and each.done() for each in pending] == [False, False]
        assert ckpt.restore(run.location).step == 1  # readers are not held up either
        goes_on.set()
        manager.wait_until_finished(60)
    run.acked = 3
    assert after_death(run, "after a stuck store").step == 3


def test_a_slow_store_is_written_by_one_thread_behind_the_trainer(tmp_path: Path) -> None:
    """No matter how many leaves or files: the thread that trains waits for no write of a save."""
    run, rows = saved(tmp_path, 1), Rows()
    threads: dict[str, set[str]] = {}
    store = FaultyStore(FileStore(run.location), delay_s=0.02)
    mutate = store._mutate

    def told(what: str, *acts: Callable[[], None]) -> None:
        threads.setdefault(threading.current_thread().name, set()).add(what.split()[0])
        mutate(what, *acts)

    store._mutate = told  # type: ignore[method-assign]
    with run.manager(store) as manager:
        manager.resume(data=rows)
        threads.clear()
        for step in (2, 3, 4):
            run.save(manager, step, 100 + step, rows)
    assert threading.current_thread().name not in threads, threads
    assert {"write_image", "put", "move"} <= set().union(*threads.values()), threads
    assert after_death(run, "after a slow store").step == 4


def test_a_disk_that_cannot_be_read_is_neither_damage_nor_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Input/output errors on the newest step: nobody goes back to an older one for that."""
    run = saved(tmp_path, 2)
    newest = f"{run.root}/branch-1/2"
    real = os.open

    def failing(path: Any, *args: Any, **options: Any) -> int:
        if str(path).startswith(newest):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        with pytest.raises(StoreFailed, match="Input/output error"):
            ckpt.restore(run.location)
        with pytest.raises(StoreFailed, match="Input/output error"):
            ckpt.verify(run.location)
        with run.manager() as manager, pytest.raises(StoreFailed, match="Input/output error"):
            manager.resume(data=Rows())
    assert after_death(run, "after a bad disk").step == 2


def test_a_disk_that_gives_no_chunks_is_not_fallen_back_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(tmp_path, 2)

    def failing(descriptor: int, *args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(StoreFailed, match="Input/output error"):
            ckpt.restore(run.location)
        with run.manager() as manager, pytest.raises(StoreFailed, match="Input/output error"):
            manager.resume(data=Rows())
    assert after_death(run, "after a bad disk").step == 2

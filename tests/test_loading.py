"""How a restore reads: its budget, its threads, its progress, and what it says of them."""

from __future__ import annotations

import shutil
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged_steps import DAMAGES
from loading_states import (
    COLUMNS,
    SPREAD,
    full,
    manager_of,
    save_three,
    state_of,
    watched,
)
from rows import Rows

import ckpt
from ckpt import Fit, Loading, arrays, fetch
from ckpt.grid import CRC_BYTES
from ckpt.image import CHUNK_LIMIT_BYTES
from tools.bench.bits import bits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_three(tmp_path_factory.mktemp("loading") / "run")


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


# --- values of Loading ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_bytes": 0}, "budget_bytes: wanted a whole number from 1 on, found 0"),
        ({"budget_bytes": 1e9}, "budget_bytes: .* found 1000000000.0"),
        ({"budget_bytes": True}, "budget_bytes: .* found True"),
        ({"threads": -1}, "threads: wanted a whole number from 1 on, found -1"),
        ({"threads": None}, "threads: .* found None"),
        ({"donate": 1}, "donate: wanted True or False, found 1"),
        ({"progress": "yes"}, "progress: wanted a function .* found 'yes'"),
    ],
)
def test_values_without_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ckpt.Misuse, match=message):
        Loading(**options)


def test_what_would_be_narrowed_is_restored_as_it_is_under_x64(saved: Path) -> None:
    with jax.enable_x64(True):
        like = {"host": jax.ShapeDtypeStruct((50,), np.int64)}
        found = ckpt.restore(saved, like, fit=Fit(extra="ignore")).state["host"]
        assert (found.dtype, isinstance(found, jax.Array)) == (np.int64, True)
        np.testing.assert_array_equal(found, np.arange(50) + 3)


# --- progress, threads and the report ------------------------------------------------------------


def test_progress_grows_to_the_whole_and_the_report_says_what_it_cost(saved: Path) -> None:
    sizes: list[tuple[int, int]] = []
    callers: set[int] = set()
    asked: list[int] = []

    def note(done: int, total: int) -> None:
        sizes.append((done, total))
        callers.add(threading.get_ident())

    with watched(asked.append):
        restored = ckpt.restore(saved, full(7), loading=Loading(progress=note))
    stored = [leaf for leaf in jax.tree.leaves(full(3)) if not isinstance(leaf, str)]
    keys = [jax.random.key_data(x) if is_key(x) else x for x in stored]
    nbytes = sum(np.asarray(each).nbytes for each in keys)
    assert sizes == sorted(sizes)
    assert sizes[-1] == (nbytes, nbytes)
    assert {total for _, total in sizes} == {nbytes}
    assert callers == {threading.get_ident()}
    report = restored.report
    assert report.bytes_needed == nbytes
    assert report.bytes_read == sum(asked)
    assert report.chunks >= len(stored)
    assert nbytes + CRC_BYTES * report.chunks <= report.bytes_read
    assert 0 < report.plan_s + report.read_s + report.place_s <= report.seconds


def is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def test_progress_begins_anew_for_an_older_step_and_may_end_the_restore(run: Path) -> None:
    DAMAGES["image"](run / "branch-1/3")
    sizes: list[tuple[int, int]] = []
    loading = Loading(progress=lambda done, total: sizes.append((done, total)))
    assert ckpt.restore(run, loading=loading).step == 2
    ends = [i for i, (done, total) in enumerate(sizes) if done == total]
    assert len(ends) == 2
    assert sizes[ends[0]][1] == sizes[ends[1]][1] + 16, "the newest has a leaf of 16 bytes more"

    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StopError

    with manager_of(run) as manager:
        with pytest.raises(StopError):
            manager.resume(full(7), Rows(), loading=Loading(progress=stop))
        assert manager.resume(state_of(7), Rows(), fit=Fit(extra="ignore")).step == 2


@pytest.mark.parametrize("threads", [1, 3])
def test_so_many_threads_read(wide: tuple[Path, dict[str, np.ndarray]], threads: int) -> None:
    root, wanted = wide
    readers: set[str] = set()
    together = threading.Barrier(threads, timeout=20)

    def meet(_: int) -> None:
        name = threading.current_thread().name
        if name not in readers:
            readers.add(name)
            together.wait()  # nobody goes on before so many are there

    # Else small chunks that are neighbours would be one read.
    with watched(meet), mock.patch.object(fetch, "SMALL_BYTES", 0):
        state = ckpt.restore(root, loading=Loading(threads=threads)).state
    assert len(readers) == threads
    assert bits(state) == bits(wanted)


# --- the budget ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A run with leaves of many sizes, in part above the budgets of the tests; and their values."""
    root = tmp_path_factory.mktemp("wide") / "run"
    rng = np.random.default_rng(5)
    found = {
        f"leaf{i}": rng.standard_normal((8, 8 * columns)).astype(np.float32)
        for i, columns in enumerate([1, 4, 16, 64, 256, 1024, 2048, 4096, 3, 5, 700, 900])
    }
    state = {
        name: jax.device_put(array, SPREAD if i % 2 else COLUMNS)
        for i, (name, array) in enumerate(found.items())
    }
    with ckpt.CheckpointManager(root, arena=root.with_name("arena")) as manager:
        manager.save(0, state)
        manager.wait_until_finished(60)
    return root, found


class Counted:
    """numpy that counts the memory it gives: in the threads that read that is scratch memory, in
    the thread that restores the buffers which are to become arrays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.scratch_bytes = self.most_scratch_bytes = 0
        self.staged_bytes = self.most_staged_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        return self._count(np.empty(shape, dtype))

    def frombuffer(self, buffer: Any, dtype: Any) -> np.ndarray:
        return self._count(np.frombuffer(buffer, dtype))

    def _count(self, found: np.ndarray) -> np.ndarray:
        with self._lock:
            if threading.current_thread().name.startswith("ckpt-read"):
                self.scratch_bytes += found.nbytes
                self.most_scratch_bytes = max(self.most_scratch_bytes, self.scratch_bytes)
                weakref.finalize(found, self._gone, found.nbytes)
            else:
                self.staged_bytes += found.nbytes
                self.most_staged_bytes = max(self.most_staged_bytes, self.staged_bytes)
        return found

    def placed(self, leaves: Any) -> Any:
        """In the place of `arrays._finish`: what was staged is on its devices."""
        self.staged_bytes = 0
        return _FINISH(leaves)

    def _gone(self, nbytes: int) -> None:
        with self._lock:
            self.scratch_bytes -= nbytes


_FINISH = arrays._finish


@pytest.mark.parametrize("budget_bytes", [1, 5000, 100_000, 1 << 30])
@pytest.mark.parametrize("threads", [1, 4])
def test_scratch_and_staged_memory_stay_within_the_budget(
    wide: tuple[Path, dict[str, np.ndarray]], budget_bytes: int, threads: int
) -> None:
    root, wanted = wide
    # Cut across the chunks, so that they go through scratch memory.
    like = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=COLUMNS if i % 2 else SPREAD)
        for i, (name, array) in enumerate(wanted.items())
    }
    counted = Counted()
    loading = Loading(budget_bytes=budget_bytes, threads=threads)
    with (
        mock.patch.object(fetch, "np", counted),
        mock.patch.object(arrays, "_finish", counted.placed),
    ):
        restored = ckpt.restore(root, like, loading=loading)
    for name, array in wanted.items():
        np.testing.assert_array_equal(restored.state[name], array)
        assert restored.state[name].sharding == like[name].sharding
    largest_leaf = max(array.nbytes for array in wanted.values())
    # A chunk is a shard or a part of one; one of these leaves has 8 shards.
    largest_chunk = min(largest_leaf // 8, CHUNK_LIMIT_BYTES) + CRC_BYTES
    assert 0 < counted.most_scratch_bytes <= max(budget_bytes, largest_chunk)
    assert counted.scratch_bytes == 0
    padding = 64 * 8 * len(wanted)  # buffers are aligned
    assert 0 < counted.most_staged_bytes <= max(budget_bytes, largest_leaf) + padding
    if budget_bytes == 1:
        assert counted.most_scratch_bytes == largest_chunk
        assert counted.most_staged_bytes >= largest_leaf


def test_a_budget_of_one_byte_gives_the_same_values(saved: Path) -> None:
    tight = Loading(budget_bytes=1, threads=3)
    assert bits(ckpt.restore(saved, full(7), loading=tight).state) == bits(full(3))
    assert bits(ckpt.restore(saved, loading=tight).state) == bits(ckpt.restore(saved).state)

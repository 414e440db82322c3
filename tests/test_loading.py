"""How a restore reads: its budget, its threads, its progress, and a template that makes room."""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damaged_steps import bits
from jax.sharding import NamedSharding, PartitionSpec
from rows import Rows
from test_fallback import DAMAGES

import ckpt
from ckpt import Fit, Loading, arrays, fetch
from ckpt.grid import CRC_BYTES
from ckpt.image import CHUNK_LIMIT_BYTES
from ckpt.reader import Reader, Restored
from ckpt.store import FileStore, ImageReader

MESH = jax.make_mesh((8,), ("x",))
SPREAD = NamedSharding(MESH, PartitionSpec("x"))
COLUMNS = NamedSharding(MESH, PartitionSpec(None, "x"))
DONATE = Loading(donate=True)


def state_of(tag: int) -> dict[str, Any]:
    """All that a template may hold: sharded, replicated, uncommitted, weak, keys, NumPy, others."""
    rows = jnp.arange(64.0 * 16).reshape(64, 16) + tag
    return {
        "spread": jax.device_put(rows, SPREAD),
        "columns": jax.device_put(rows + 1, COLUMNS),
        "copies": jax.device_put(rows + 2, NamedSharding(MESH, PartitionSpec())),
        "one": jax.device_put(rows + 3, jax.devices()[5]),
        "free": rows + 4,
        "half": (rows + 5).astype(jnp.bfloat16),
        "weak": jax.jit(lambda: 1.5)() + tag,
        "key": jax.random.key(tag),
        "keys": jax.device_put(jax.random.split(jax.random.key(tag), 8), SPREAD),
        "host": np.arange(50) + tag,
        "count": tag,
        "name": f"state {tag}",
    }


def copied(state: Any) -> Any:
    """The same values in arrays of their own: those of a tree may be donated then."""
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state)


def devices_of(state: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]


def traits(state: Any) -> list[Any]:
    """What a restore into a template takes from the template."""
    return [
        (x.shape, x.dtype, x.sharding, x.committed, getattr(x, "weak_type", None))
        for x in devices_of(state)
    ]


def live_bytes() -> int:
    return sum(each.nbytes for each in jax.live_arrays())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 3; the newest has a leaf more."""
    root = tmp_path_factory.mktemp("loading") / "run"
    tier = ckpt.Shared(root, keep=ckpt.Keep())
    data = Rows()
    with ckpt.CheckpointManager(tier, arena=root.with_name("arena")) as manager:
        manager.resume(data=data)
        for step in (1, 2):
            data.take()
            manager.save(step, state_of(step), data=data)
        data.take()
        manager.save(3, {**state_of(3), "ema": jnp.full(4, 3.0)}, data=data)
        manager.wait_until_finished(60)
    return root


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def full(tag: int) -> dict[str, Any]:
    return {**state_of(tag), "ema": jnp.full(4, float(tag))}


@contextlib.contextmanager
def manager_of(root: Path) -> Iterator[ckpt.CheckpointManager]:
    tier = ckpt.Shared(root, keep=ckpt.Keep())
    with ckpt.CheckpointManager(tier, arena=root.parent / "arena") as manager:
        yield manager


def by_resume(root: Path, like: Any, loading: Loading) -> Restored:
    with manager_of(root) as manager:
        return manager.resume(like, Rows(), loading=loading)


def by_restore(root: Path, like: Any, loading: Loading) -> Restored:
    with manager_of(root) as manager:
        return manager.restore(3, like=like, data=Rows(), loading=loading)


def by_rewind(root: Path, like: Any, loading: Loading) -> Restored:
    with manager_of(root) as manager:
        return manager.rewind(3, like=like, data=Rows(), loading=loading)


def by_one_call(root: Path, like: Any, loading: Loading) -> Restored:
    return ckpt.restore(root, like, loading=loading)


def by_step_path(root: Path, like: Any, loading: Loading) -> Restored:
    return ckpt.restore(root / "branch-1/3", like, loading=loading)


def by_reader(root: Path, like: Any, loading: Loading) -> Restored:
    return Reader(root).restore(3, like=like, loading=loading)


def by_reader_of_a_step(root: Path, like: Any, loading: Loading) -> Restored:
    reader = Reader(root)
    return reader.restore_step(reader.find(3), like=like, loading=loading)


CALLS = [
    by_resume,
    by_restore,
    by_rewind,
    by_one_call,
    by_step_path,
    by_reader,
    by_reader_of_a_step,
]


class Watched(ImageReader):
    """An image that tells before it reads chunks; its header is read in the calling thread."""

    def __init__(self, image: Any, told: Callable[[int], object]) -> None:
        self.name, self.size_bytes = image.name, image.size_bytes
        self._image, self._told = image, told

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        if threading.current_thread().name.startswith("ckpt-read"):
            self._told(sum(buffer.nbytes for _, buffer in ranges))
        self._image.read_into(ranges)

    def close(self) -> None:
        self._image.close()


@contextlib.contextmanager
def watched(told: Callable[[int], object]) -> Iterator[None]:
    """`told` gets the bytes of each read of chunks, before it."""
    original = FileStore.open_image

    def open_image(self: FileStore, key: str) -> ImageReader:
        return Watched(original(self, key), told)

    with mock.patch.object(FileStore, "open_image", open_image):
        yield


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


# --- a template that makes room ------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_when_reading_begins_the_arrays_of_the_template_are_gone(
    run: Path, call: Callable[[Path, Any, Loading], Restored]
) -> None:
    wanted = full(3)
    for loading in (Loading(), DONATE):
        like = copied(full(7))
        mine = devices_of(like)
        expected = traits(like)
        seen: list[tuple[int, bool]] = []

        def look(_: int, mine: list[jax.Array] = mine, seen: list[Any] = seen) -> None:
            seen.append((live_bytes(), all(each.is_deleted() for each in mine)))

        host = like["host"]
        template_bytes = sum(each.nbytes for each in mine)
        before = live_bytes()
        with watched(look):
            restored = call(run, like, loading)
        at_first, gone = seen[0]
        assert gone == loading.donate
        assert at_first == (before - template_bytes if loading.donate else before)
        assert restored.step == 3
        assert bits(restored.state) == bits(wanted)
        assert traits(restored.state) == expected
        np.testing.assert_array_equal(host, np.arange(50) + 7)
        assert not any(each.is_deleted() for each in devices_of(restored.state))


def test_deleted_arrays_are_as_good_a_template_as_before(saved: Path) -> None:
    like = copied(full(7))
    expected = traits(like)
    for _ in range(2):
        restored = ckpt.restore(saved, like, loading=DONATE)
        assert bits(restored.state) == bits(full(3))
        assert traits(restored.state) == expected


def differing(state: dict[str, Any], kind: str) -> dict[str, Any]:
    """A template that the step does not match, in one leaf that is no array of its own."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    along = NamedSharding(jax.make_mesh((3,), ("y",), devices=jax.devices()[:3]), jax.P("y"))
    other = {
        "missing": {"more": jax.ShapeDtypeStruct((2,), jnp.float32)},
        "spread": {"spread": jax.ShapeDtypeStruct((64, 17), jnp.float32, sharding=SPREAD)},
        "uneven": {"spread": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=along)},
        "cast": {"spread": jax.ShapeDtypeStruct((64, 16), jnp.bfloat16, sharding=along)},
        "wide": {"host": jax.ShapeDtypeStruct((50,), np.int64)},
        "wide, placed": {"host": jax.ShapeDtypeStruct((50,), np.int64, sharding=one)},
        "keys": {"keys": jax.ShapeDtypeStruct((8,), state["keys"].dtype, sharding=along)},
    }
    return {**state, **other[kind]}


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("missing", ckpt.Mismatch, "more: wanted float32"),
        ("spread", ckpt.Mismatch, r"spread: wanted float32\[64,17\], found float32\[64,16\]"),
        ("uneven", ckpt.Mismatch, r"\n  spread: wanted NamedSharding.*found shape \[64, 16\]"),
        ("cast", ckpt.Mismatch, r"\n  spread: wanted NamedSharding.*found shape \[64, 16\]"),
        ("wide", ckpt.Unsupported, r"host: wanted int64\[50\], but JAX would make it int32"),
        ("wide, placed", ckpt.Unsupported, "host: .*int64, but JAX would make it int32"),
        ("keys", ckpt.Mismatch, r"\n  keys: wanted NamedSharding.*found shape \[8, 2\]"),
    ],
)
def test_nothing_is_let_go_for_a_step_that_does_not_match(
    saved: Path, kind: str, error: type[Exception], message: str
) -> None:
    like = differing(copied(full(7)), kind)
    fit = Fit(cast=kind == "cast")
    reads: list[int] = []
    with watched(reads.append):
        for loading in (Loading(), DONATE):
            with pytest.raises(error, match=message):
                ckpt.restore(saved, like, fit=fit, loading=loading)
    assert reads == []
    mine = devices_of(like)
    assert len(mine) >= 9
    assert not any(each.is_deleted() for each in mine)
    assert bits({"free": like["free"]}) == bits({"free": state_of(7)["free"]})


def test_what_would_be_narrowed_is_restored_as_it_is_under_x64(saved: Path) -> None:
    with jax.enable_x64(True):
        like = {"host": jax.ShapeDtypeStruct((50,), np.int64)}
        found = ckpt.restore(saved, like, fit=Fit(extra="ignore")).state["host"]
        assert (found.dtype, isinstance(found, jax.Array)) == (np.int64, True)
        np.testing.assert_array_equal(found, np.arange(50) + 3)


def test_leaves_that_keep_their_value_stay(saved: Path) -> None:
    like = copied(state_of(7))
    like["more"] = jnp.full(3, 9.0)
    like["twice"] = like["free"]  # restored there, kept here
    like["bits"] = jax.random.key_data(like["key"])  # may share the memory of the key
    fit = Fit(missing="keep", extra="ignore")
    found = ckpt.restore(saved, like, fit=fit, loading=DONATE).state
    wanted = {**state_of(3), "more": jnp.full(3, 9.0), "twice": state_of(7)["free"]}
    wanted["bits"] = jax.random.key_data(jax.random.key(7))
    assert bits(found) == bits(wanted)
    assert found["more"] is like["more"]
    assert found["twice"] is like["twice"]
    gone = {name for name, leaf in like.items() if isinstance(leaf, jax.Array) and is_gone(leaf)}
    arrays_of_its_own = {name for name, leaf in like.items() if isinstance(leaf, jax.Array)}
    assert gone == arrays_of_its_own - {"more", "twice", "free", "bits", "key"}


def is_gone(leaf: jax.Array) -> bool:
    return leaf.is_deleted()


def test_an_older_step_is_restored_into_what_was_let_go_for_a_damaged_one(run: Path) -> None:
    for number in (3, 2):
        DAMAGES["image"](run / f"branch-1/{number}")
    fit = Fit(extra="ignore")
    for restore in (
        lambda like: ckpt.restore(run, like, fit=fit, loading=DONATE),
        lambda like: resumed(run, like, fit),
    ):
        like = copied(state_of(7))
        expected = traits(like)
        told: list[bool] = []
        with watched(lambda _, like=like, told=told: told.append(is_gone(like["key"]))):
            restored = restore(like)
        assert (restored.step, [lost.step for lost in restored.report.lost]) == (1, [3, 2])
        assert all(told)
        assert bits(restored.state) == bits(state_of(1))
        assert traits(restored.state) == expected


def resumed(root: Path, like: Any, fit: Fit = Fit(), loading: Loading = DONATE) -> Restored:  # noqa: B008
    with manager_of(root) as manager:
        return manager.resume(like, Rows(), fit=fit, loading=loading)


def test_a_leaf_let_go_for_a_damaged_step_is_not_kept_for_an_older_one(run: Path) -> None:
    DAMAGES["image"](run / "branch-1/3")
    like = copied(full(7))
    wanted = r"branch-1/2: .*\n  ema: wanted an array, found float32\[4\] without values"
    with pytest.raises(ckpt.Mismatch, match=wanted):
        ckpt.restore(run, like, fit=Fit(missing="keep"), loading=DONATE)
    like["ema"] = jnp.zeros(4)
    fit = Fit(partial=lambda name: name != "ema", missing="keep")
    restored = ckpt.restore(run, like, fit=fit, loading=DONATE)
    assert bits(restored.state) == bits({**state_of(2), "ema": jnp.zeros(4)})


def test_a_damaged_header_lets_nothing_go(run: Path) -> None:
    for number in (1, 2, 3):
        DAMAGES["manifest"](run / f"branch-1/{number}")
    like = copied(state_of(7))
    with pytest.raises(ckpt.Damaged):
        ckpt.restore(run, like, loading=DONATE)
    assert not any(map(is_gone, devices_of(like)))


def test_a_fresh_run_returns_the_template_untouched(tmp_path: Path) -> None:
    like = copied(state_of(7))
    with manager_of(tmp_path / "new") as manager:
        restored = manager.resume(like, loading=DONATE)
    assert restored.report.fresh
    assert restored.state is like
    assert bits(like) == bits(state_of(7))
    for error, call in ((ckpt.NotFound, by_one_call), (ckpt.NotFound, by_restore)):
        with pytest.raises(error):
            call(tmp_path / "none", like, DONATE)
    assert bits(like) == bits(state_of(7))


def test_after_an_error_in_reading_the_template_is_gone_and_still_serves(saved: Path) -> None:
    like = copied(full(7))

    def fail(_: int) -> None:
        raise ckpt.StoreFailed("no answer")

    with watched(fail), pytest.raises(ckpt.StoreFailed, match="no answer"):
        ckpt.restore(saved, like, loading=DONATE)
    assert all(map(is_gone, devices_of(like)))
    assert bits(ckpt.restore(saved, like, loading=DONATE).state) == bits(full(3))


def test_a_run_lets_go_of_the_state_before(tmp_path: Path) -> None:
    guard = ckpt.SpikeGuard(
        window=8, warm_up=4, cool_down=2, consecutive=1, margin=2, skip_before=1, skip_after=2
    )
    states: list[jax.Array] = []
    place = ckpt.Shared(tmp_path / "run", every=2, keep=ckpt.Keep())
    for steps, spikes in ((10, {8}), (12, set())):
        start = {"w": jnp.zeros(3)}
        with (
            ckpt.CheckpointManager(place, arena=tmp_path / "arena") as manager,
            ckpt.Run(manager, start, Stream(), steps=steps, guard=guard, loading=DONATE) as run,
        ):
            assert is_gone(start["w"]) == (steps == 12)
            for step, _ in run:
                states.append(run.state["w"] + 1)
                loss = 100.0 if step in spikes else 1.0 + step / 1000
                spikes -= {step}
                run.update({"w": states[-1]}, loss=loss)
            assert run.state["w"].tolist() == [float(steps)] * 3
            if steps == 10:
                (rewound,) = run.rewinds
                assert rewound.onset == 8
                # Some updates pass before the guard has read the loss of one.
                assert [is_gone(w) for w in states].count(True) == 1
                assert [is_gone(w) for w in states].index(True) >= 7


class Stream(Rows):
    """Batches without an end, as a run takes them."""

    def __next__(self) -> list[int]:
        return self.take()


# --- steps of Orbax ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orbax_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import orbax.checkpoint as ocp

    path = tmp_path_factory.mktemp("orbax") / "5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, orbax_state(3))
    return path


def orbax_state(tag: int) -> dict[str, Any]:
    rows = jnp.arange(64.0 * 16).reshape(64, 16) + tag
    return {"w": jax.device_put(rows, SPREAD), "b": rows[0], "n": np.arange(6) + tag}


def test_a_step_of_orbax_lets_the_template_go_too(orbax_step: Path) -> None:
    from ckpt import orbax

    like = copied(orbax_state(7))
    mine = devices_of(like)
    told: list[bool] = []
    sizes: list[tuple[int, int]] = []
    budgets: list[int] = []
    original = orbax._groups

    def groups(reads: Any, budget_bytes: int) -> Any:
        told.append(all(map(is_gone, mine)))
        budgets.append(budget_bytes)
        return original(reads, budget_bytes)

    loading = Loading(
        budget_bytes=100, donate=True, progress=lambda done, total: sizes.append((done, total))
    )
    with mock.patch.object(orbax, "_groups", groups), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = ckpt.restore(orbax_step, like, loading=loading)
        assert bits(restored.state) == bits(orbax_state(3))
        host = ckpt.restore(orbax_step, loading=loading)
    assert told == [True, True]
    assert budgets == [100, 100]
    nbytes = 64 * 16 * 4 + 16 * 4 + 6 * 8
    assert sizes == [(nbytes, nbytes)] * 2
    np.testing.assert_array_equal(host.state["n"], np.arange(6) + 3)


@pytest.mark.parametrize("kind", ["shape", "uneven", "wide"])
def test_a_step_of_orbax_that_does_not_match_lets_nothing_go(orbax_step: Path, kind: str) -> None:
    three = NamedSharding(jax.make_mesh((3,), ("y",), devices=jax.devices()[:3]), jax.P("y"))
    other = {
        "shape": {"w": jax.ShapeDtypeStruct((64, 17), jnp.float32)},
        "uneven": {"w": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=three)},
        "wide": {"n": jax.ShapeDtypeStruct((6,), np.int64)},
    }
    like = {**copied(orbax_state(7)), **other[kind]}
    error = ckpt.Unsupported if kind == "wide" else ckpt.Mismatch
    with pytest.raises(error, match=r"n: wanted int64\[6\]" if kind == "wide" else "w: wanted"):
        ckpt.restore(orbax_step, like, loading=DONATE)
    assert not any(map(is_gone, devices_of(like)))


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
    """numpy with an `empty` that counts: in the threads that read it makes scratch memory, in the
    thread that restores the buffers which are to become arrays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.scratch_bytes = self.most_scratch_bytes = 0
        self.staged_bytes = self.most_staged_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any) -> np.ndarray:
        found = np.empty(shape, dtype)
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

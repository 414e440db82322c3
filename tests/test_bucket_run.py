"""A run in a bucket: the manager over real HTTP, with trouble, races, and deaths at every write."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import tensorstore as ts
from faulty_store import Died
from memory_source import Columns
from s3_server import BUCKET, CUT, LOSE, TEAR, Proxy, s3_server, status

import ckpt
from ckpt import attempts, layout, store_kv
from ckpt.reader import Reader
from ckpt.store import FileStore, open_store
from ckpt.store_kv import KvStore
from datapipe import Pipeline

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def s3(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The server, found through the environment as in production."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(store_kv, "PATIENCE", store_kv.Patience(10.0, 0.01, 0.05, 10.0))
    return server


@pytest.fixture
def root(s3: Proxy) -> str:
    return f"s3://{BUCKET}/run-{next(_numbers)}"


def manager(root: str, tmp_path: Path, **options: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(ckpt.Shared(root, **options), arena=tmp_path / "arena")


def state_of(step: int) -> dict[str, Any]:
    key = jax.random.fold_in(jax.random.key(3), step)
    return {"w": jax.random.normal(key, (32, 16)), "b": np.full(7, step), "step": step}


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_steps(m: ckpt.CheckpointManager, steps: Iterable[int], data: Any = None) -> None:
    for step in steps:
        if data is not None:
            next(data)
        m.save(step, state_of(step), data=data)
    m.wait_until_finished()


def pipeline() -> Pipeline:
    return Pipeline(Columns(97), batch_size=4, seed=3)


def test_a_run_in_a_bucket(root: str, tmp_path: Path) -> None:
    """Save, resume, rewind with skips, retention, the one-shot calls: as on a file system."""
    with manager(root, tmp_path, keep=ckpt.Keep(last=2)) as m, pipeline().iterator() as data:
        assert m.resume(like=state_of(0), data=data).report.fresh
        save_steps(m, range(1, 4), data)
        coming = next(data)
    assert ckpt.open(root).all_steps() == [2, 3]
    with manager(root, tmp_path) as m, pipeline().iterator() as data:
        restored = m.resume(like=state_of(0), data=data)
        assert restored.step == 3
        assert_same(restored.state, state_of(3))
        np.testing.assert_array_equal(next(data)["id"], coming["id"])
        m.save(4, state_of(4), data=data)
        save_steps(m, [5], data)
        assert m.all_steps() == [2, 3, 4, 5]
        m.delete(3)
        assert m.all_steps() == [2, 4, 5]
    with manager(root, tmp_path) as m, pipeline().iterator() as data:
        restored = m.rewind(to=4, skip_batches=range(4, 6), data=data, like=state_of(0))
        assert_same(restored.state, state_of(4))
        save_steps(m, [5], data)
        assert m.all_steps() == [2, 4, 5]
        assert m._attempt is not None
        assert m._attempt.decision.branch == m._attempt.number == 3
    assert_same(ckpt.restore(root).state, state_of(5))
    assert_same(ckpt.restore(f"{root}/branch-2/4", like=state_of(0)).state, state_of(4))
    assert ckpt.metadata(root).id.step == 5
    assert ckpt.pin(root, 2).step == 2
    verified = ckpt.verify(root)
    assert verified.intact
    assert verified.unfinished == ()
    with pytest.raises(ckpt.NotFound, match="no such step"):
        ckpt.restore(f"{root}/branch-2/77")


def test_a_fresh_start_needs_an_answer(
    root: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_kv, "PATIENCE", store_kv.Patience(0.1, 0.01, 0.02, 0.3))
    with manager(root, tmp_path) as m:
        for trouble in (status(403), status(500), CUT):
            with s3.trouble(lambda request, n, t=trouble: t), pytest.raises(ckpt.StoreFailed):
                m.resume()
        with pytest.raises(ckpt.NotFound, match="no checkpoint here"):
            m.resume(must_exist=True)
    assert open_store(root).list("") == []
    with manager("s3://not-there/run", tmp_path) as m:
        with pytest.raises(ckpt.StoreFailed, match="no such bucket"):
            m.resume()
        with pytest.raises(ckpt.StoreFailed, match="no such bucket"):
            m.latest_step()


def test_listing_reads_markers_only(root: str, s3: Proxy, tmp_path: Path) -> None:
    with manager(root, tmp_path) as m:
        m.resume()
        save_steps(m, range(1, 6))
    during = s3.during()
    assert ckpt.open(root).all_steps() == [1, 2, 3, 4, 5]
    read = [request.key.rpartition("/")[2] for request in during() if request.kind == "GET"]
    assert Counter(read) == {layout.MARKER: 10, "1.from.json": 2}  # `open` lists, too
    kinds = Counter(request.kind for request in during())
    assert kinds.keys() == {"GET", "LIST"}
    assert kinds["LIST"] <= 8


def test_a_step_that_is_not_due_asks_nothing(root: str, s3: Proxy, tmp_path: Path) -> None:
    with manager(root, tmp_path, every=10) as m:
        m.resume()
        during = s3.during()
        assert m.save(7, state_of(7)) is None
        assert during() == []


def arrays_by_tensorstore(root: str, s3: Proxy, step: str, param: str) -> np.ndarray:
    """One array of a step, read by TensorStore alone."""
    bucket = {
        "driver": "s3",
        "bucket": BUCKET,
        "path": f"{root.removeprefix(f's3://{BUCKET}/')}/{step}/state/",
        "endpoint": s3.url,
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
    }
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": bucket, "path": f"{param}/"},
    }
    return ts.open(spec, context=ts.Context()).result().read().result()


@pytest.mark.parametrize("cut_bytes", [256 << 20, 50_000])
def test_tensorstore_opens_a_step(
    root: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_bytes: int
) -> None:
    monkeypatch.setattr(KvStore, "cut_bytes", cut_bytes)
    state = {
        name: np.random.default_rng(i).standard_normal((64, 200 + i), np.float32)
        for i, name in enumerate("abcd")
    } | {"small": np.arange(5)}
    with manager(root, tmp_path) as m:
        m.resume()
        m.save(3, state)
        m.save(4, state, extra={"text": "x" * 10_000})  # makes the image longer
    for name, wanted in state.items():
        np.testing.assert_array_equal(arrays_by_tensorstore(root, s3, "branch-1/4", name), wanted)
    names = open_store(root)._names("branch-1/3/state/d/")  # type: ignore[attr-defined]
    assert len(names) == (2 if cut_bytes > 10**6 else 7), names
    for name, wanted in state.items():
        found = arrays_by_tensorstore(root, s3, "branch-1/3", name)
        np.testing.assert_array_equal(found, wanted)
    assert_same(ckpt.restore(root).state, state)
    assert ckpt.verify(root).intact
    # One bit in one object of the image: TensorStore refuses it, we fall back and say so.
    victim = next(n for n in names if ".bytes-" in n and not n.endswith(".bytes-0-4096"))
    store = open_store(root)
    assert isinstance(store, KvStore)
    key = f"branch-1/3/state/d/{victim}"
    data = bytearray(store._read(key).value)
    data[next(at for at in range(len(data) // 2, len(data)) if data[at])] ^= 4
    store._write(key, bytes(data))
    with pytest.raises(ckpt.Damaged):
        ckpt.restore(root, step=3)
    broken = 0
    for name in "abcd":
        try:
            arrays_by_tensorstore(root, s3, "branch-1/3", name)
        except ValueError:
            broken += 1
    assert broken == 1


# --- trouble -------------------------------------------------------------------------------------


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 20))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_under_random_trouble(root: str, s3: Proxy, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    kinds = [status(500), status(503), CUT, LOSE, TEAR, *[None] * 10]
    with s3.trouble(lambda request, number: dice.choice(kinds)):
        with manager(root, tmp_path, keep=ckpt.Keep(last=2)) as m:
            m.resume()
            save_steps(m, range(1, 5))
        with manager(root, tmp_path) as m:
            restored = m.resume()
            assert restored.step == 4, f"seed {seed}"
            assert_same(restored.state, state_of(4))
            save_steps(m, [5])
    verified = ckpt.verify(root)
    assert verified.intact, f"seed {seed}: {verified.damage}"
    assert ckpt.open(root).all_steps()[-3:] == [3, 4, 5], f"seed {seed}"


def test_a_store_that_fails_for_good_is_told(
    root: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager(root, tmp_path) as m:
        m.resume()
        save_steps(m, [1])
        monkeypatch.setattr(store_kv, "PATIENCE", store_kv.Patience(0.1, 0.01, 0.02, 0.3))
        with s3.trouble(lambda request, number: status(503)):
            pending = m.save(2, state_of(2))
            assert pending is not None
            with pytest.raises(ckpt.StoreFailed, match=r"503.*tried"):
                pending.wait()
        assert m.all_steps() == [1]
        save_steps(m, [3])
        assert m.all_steps() == [1, 3]


def test_the_older_of_two_attempts_is_superseded(root: str, tmp_path: Path) -> None:
    with manager(root, tmp_path / "a") as old:
        old.resume()
        save_steps(old, [1, 2])
        with manager(root, tmp_path / "b") as new:
            assert new.resume().step == 2
            pending = old.save(3, state_of(3))
            assert pending is not None
            with pytest.raises(ckpt.Superseded, match="attempt 2"):
                pending.wait()
            save_steps(new, [3])
            assert new.all_steps() == [1, 2, 3]
        with pytest.raises(ckpt.Superseded):
            old.save(4, state_of(4))
    with manager(root, tmp_path) as m:
        assert m.resume().step == 3
        assert m._attempt is not None
    assert attempts.list_run(open_store(root)).remains == ()


def test_of_attempts_that_start_at_once_each_has_a_number(root: str) -> None:
    numbers: list[int] = []
    barrier = threading.Barrier(4)

    def claim() -> None:
        barrier.wait()
        numbers.append(attempts.claim(open_store(root), "start"))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4]


# --- death at every write ------------------------------------------------------------------------


class Requests:
    """A TensorStore KvStore that stops for ever at mutating request number `at`, counted from 1.

    With `carried_out` that request still happens: only its answer is lost.
    """

    def __init__(self, inner: ts.KvStore, at: int = 0, *, carried_out: bool = False) -> None:
        self.inner, self.at, self.carried_out = inner, at, carried_out
        self.count = 0
        self.dead = False
        self._lock = threading.Lock()

    def write(self, *args: Any, **options: Any) -> Any:
        with self._lock:
            self._must_live()
            self.count += 1
            self.dead = self.count == self.at
            if not self.dead or self.carried_out:
                future = self.inner.write(*args, **options)
                future.result()
        self._must_live()
        return future

    def read(self, *args: Any, **options: Any) -> Any:
        self._must_live()
        return self.inner.read(*args, **options)

    def list(self, *args: Any) -> Any:
        self._must_live()
        return self.inner.list(*args)

    def _must_live(self) -> None:
        if self.dead:
            raise Died(f"request {self.count}")


SPEC = {"driver": "memory", "path": "run/"}
KEEP_TWO = ckpt.Keep(last=2)


class Memory:
    """A bucket in memory, and managers on it."""

    def __init__(self, tmp_path: Path, objects: dict[bytes, bytes] | None = None) -> None:
        self.context = ts.Context()
        self.tmp_path = tmp_path
        self.tries = 0
        kv = ts.KvStore.open(SPEC, context=self.context).result()
        for key, value in (objects or {}).items():
            kv.write(key, value).result()

    def objects(self) -> dict[bytes, bytes]:
        kv = ts.KvStore.open(SPEC, context=self.context).result()
        return {key: kv.read(key).result().value for key in kv.list().result()}

    def store(self) -> KvStore:
        return KvStore("memory://run", SPEC, self.context)

    def manager(
        self, store: KvStore | None = None, keep: ckpt.Keep = KEEP_TWO
    ) -> ckpt.CheckpointManager:
        self.tries += 1
        with mock.patch("ckpt.manager.open_store", return_value=store or self.store()):
            return ckpt.CheckpointManager(
                ckpt.Shared("memory://run", keep=keep),
                arena=self.tmp_path / f"arena-{self.tries}",
            )

    def requests(self, act: Act, at: int = 0, *, carried_out: bool = False) -> Requests:
        """`act` on a manager whose store dies at a request, unless it gets through."""
        store = self.store()
        store_kv._told.discard(store.location)  # each run is the first of its process
        requests = Requests(store._kv, at, carried_out=carried_out)
        store._opened = requests  # type: ignore[assignment]
        m = self.manager(store)
        try:
            act(m)
            m.close()
        except Died:
            assert requests.dead
        finally:
            abandon(m)
        return requests


Act = Callable[[ckpt.CheckpointManager], None]


def abandon(m: ckpt.CheckpointManager) -> None:
    """Leave a manager as a killed process does."""
    if m._writer is not None:
        m._writer._jobs.put(None)
        m._writer._thread.join(60)
    if m._arena is not None:
        m._arena.close(remove=True)
    m._closed = True


def start_and_save(m: ckpt.CheckpointManager) -> None:
    step = m.resume().step
    save_steps(m, [step + 1, step + 2, step + 3])


def rewind_and_save(m: ckpt.CheckpointManager) -> None:
    m.rewind(2)
    save_steps(m, [3, 4])


# --- what lies there ------------------------------------------------------------------------------


def test_fallback_past_damage(tmp_path: Path) -> None:
    run = Memory(tmp_path)
    with run.manager(keep=ckpt.Keep()) as m:
        m.resume()
        save_steps(m, range(1, 5))
    store = run.store()
    store.put("branch-1/4/commit_success.txt", b"torn")
    store.delete("branch-1/3/state/d/a1-p0.image")
    with run.manager(keep=ckpt.Keep()) as m:
        restored = m.resume()
        assert restored.step == 2
        assert [lost.step for lost in restored.report.lost] == [4, 3]
        assert_same(restored.state, state_of(2))
        save_steps(m, [3])
        assert m.all_steps() == [1, 2, 3]
    # Nothing that is damaged was cleaned up.
    assert store.exists("branch-1/3/manifest.json")
    assert store.exists("branch-1/4/manifest.json")


def test_a_run_that_was_copied_from_a_file_system(tmp_path: Path) -> None:
    """Images in one piece, several attempts on one branch; it goes on in the bucket."""
    for steps in ([1, 2], [3]):
        with manager(str(tmp_path / "run"), tmp_path) as m:
            m.resume()
            save_steps(m, steps)
    files, run = FileStore(tmp_path / "run"), Memory(tmp_path)
    for key, _ in files.walk(""):
        run.store().put(key, files.read(key))
    with run.manager(keep=ckpt.Keep()) as m:
        restored = m.resume()
        assert_same(restored.state, state_of(3))
        save_steps(m, [4])
        assert m.all_steps() == [1, 2, 3, 4]
    assert attempts.list_run(run.store()).damaged == ()


# --- the scenarios -------------------------------------------------------------------------------


SCENARIOS: dict[str, tuple[list[Act], Act]] = {
    "a first start": ([], start_and_save),
    "a second start, retention": ([start_and_save], start_and_save),
    "a rewind": ([start_and_save], rewind_and_save),
}


def deaths(name: str, tmp_path: Path, every: int) -> int:
    before, act = SCENARIOS[name]
    memory = Memory(tmp_path)
    for each in before:
        memory.requests(each)
    objects = memory.objects()
    total = memory.requests(act).count
    for at in range(1, total + 1, every):
        for carried_out in (False, True):
            run = Memory(tmp_path, objects)
            before_death = max(Reader(run.store()).all_steps(), default=0)
            what = f"{name}: request {at} of {total}, {carried_out=}"
            requests = run.requests(act, at, carried_out=carried_out)
            assert requests.dead, what
            after_death(run, before_death if act is start_and_save else 2, what)
    return total


def after_death(run: Memory, at_least: int, what: str) -> None:
    """The next attempt finds the newest step, leaves order behind, and can go on."""
    with run.manager() as m:
        restored = m.resume()
        assert restored.step >= at_least, what
        assert not restored.report.lost, what
        if restored.step:
            assert_same(restored.state, state_of(restored.step))
        assert attempts.list_run(run.store()).remains == (), what
        save_steps(m, [restored.step + 1])
    listing = attempts.list_run(run.store())
    assert listing.counting[-1].step == restored.step + 1, what
    assert listing.damaged == (), what
    assert listing.remains == (), what
    for step in listing.steps:
        assert_same(
            ckpt.reader.load(run.store(), step, ckpt.reader.MISSING).state, state_of(step.step)
        )
    for key in run.objects():
        branch, _, rest = key.decode().partition("/")
        if branch.startswith("branch-"):
            number = int(rest.split("/")[0])
            assert any(step.step == number for step in listing.steps), f"{what}: left: {key!r}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_death_at_a_write(name: str, tmp_path: Path) -> None:
    assert deaths(name, tmp_path, every=9) > 20


@pytest.mark.soak
@pytest.mark.parametrize("name", SCENARIOS)
def test_death_at_every_write(name: str, tmp_path: Path) -> None:
    assert deaths(name, tmp_path, every=1) > 20

"""A run in a bucket: the manager over real HTTP, with trouble and races."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from bucket_runs import assert_same, save_steps, state_of
from memory_source import Columns
from s3_server import BUCKET, CUT, LOSE, TEAR, Proxy, s3_server, status

import ckpt
from ckpt import attempts, layout, store_kv
from ckpt.store import open_store
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


def test_of_two_attempts_that_race_one_wins(root: str, tmp_path: Path) -> None:
    """Both have started; both save the same steps at the same time, over real HTTP."""
    both = [manager(root, tmp_path / name) for name in "ab"]
    numbers: list[int] = []
    for m in both:
        m.resume()
        assert m._attempt is not None
        numbers.append(m._attempt.number)
    assert numbers == [1, 2]
    barrier = threading.Barrier(2)
    outcomes: list[Any] = [None, None]

    def race(me: int) -> None:
        barrier.wait()
        try:
            for step in range(1, 4):
                pending = both[me].save(step, state_of(10 * me + step))
                assert pending is not None
                pending.wait(timeout=60)
        except ckpt.Superseded as error:
            outcomes[me] = error

    threads = [threading.Thread(target=race, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for m in both:
        m.close()
    assert isinstance(outcomes[0], ckpt.Superseded), outcomes
    assert outcomes[1] is None
    assert ckpt.open(root).all_steps() == [1, 2, 3]
    for step in range(1, 4):
        assert_same(ckpt.restore(root, step=step).state, state_of(10 + step))
    assert ckpt.verify(root).intact


def test_a_slow_bucket(
    root: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer is late; some come after the request was given up, and was sent again."""
    monkeypatch.setattr(store_kv, "PATIENCE", store_kv.Patience(30.0, 0.01, 0.02, 0.1))
    dice = random.Random(20263)

    def late(request: Any, number: int) -> None:
        time.sleep(dice.choice([*[0.0] * 7, 0.01, 0.03, 0.2]))

    with s3.trouble(late):
        with manager(root, tmp_path) as m:
            m.resume()
            save_steps(m, [1, 2])
        with manager(root, tmp_path) as m:
            restored = m.resume()
            assert restored.step == 2
            assert_same(restored.state, state_of(2))
            save_steps(m, [3])
    assert ckpt.verify(root).intact
    assert ckpt.open(root).all_steps() == [1, 2, 3]

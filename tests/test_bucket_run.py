"""A run in a bucket: the manager over real HTTP, read by ourselves and by TensorStore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from bucket_runs import (
    assert_same,
    found_through_environment,
    manager_of,
    new_root,
    save_steps,
    spec_of,
    state_of,
)
from memory_source import Columns
from s3_server import BUCKET, Proxy, s3_server

import ckpt
from ckpt import layout
from ckpt.store import open_store
from ckpt.store_kv import KvStore
from datapipe import Pipeline


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with s3_server() as proxy:
        yield proxy


@pytest.fixture
def s3(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    return found_through_environment(server, monkeypatch)


@pytest.fixture
def root(s3: Proxy) -> str:
    return new_root()


def pipeline() -> Pipeline:
    return Pipeline(Columns(97), batch_size=4, seed=3)


def test_a_run_in_a_bucket(root: str, tmp_path: Path) -> None:
    """Save, resume, rewind with skips, retention, the one-shot calls: as on a file system."""
    with manager_of(root, tmp_path, keep=ckpt.Keep(last=2)) as m, pipeline().iterator() as data:
        assert m.resume(like=state_of(0), data=data).report.fresh
        save_steps(m, range(1, 4), data)
        coming = next(data)
    assert ckpt.open(root).all_steps() == [2, 3]
    with manager_of(root, tmp_path) as m, pipeline().iterator() as data:
        restored = m.resume(like=state_of(0), data=data)
        assert restored.step == 3
        assert_same(restored.state, state_of(3))
        np.testing.assert_array_equal(next(data)["id"], coming["id"])
        m.save(4, state_of(4), data=data)
        save_steps(m, [5], data)
        assert m.all_steps() == [2, 3, 4, 5]
        m.delete(3)
        assert m.all_steps() == [2, 4, 5]
    with manager_of(root, tmp_path) as m, pipeline().iterator() as data:
        restored = m.rewind(to=4, skip_batches=range(4, 6), data=data, like=state_of(0))
        assert_same(restored.state, state_of(4))
        save_steps(m, [5], data)
        assert m.all_steps() == [2, 4, 5]
        assert m._tenure.attempt is not None
        assert m._tenure.attempt.decision.branch == m._tenure.attempt.number == 3
    assert_same(ckpt.restore(root).state, state_of(5))
    assert_same(ckpt.restore(f"{root}/branch-2/4", like=state_of(0)).state, state_of(4))
    assert ckpt.metadata(root).id.step == 5
    assert ckpt.pin(root, 2).step == 2
    verified = ckpt.verify(root)
    assert verified.intact
    assert verified.unfinished == ()
    with pytest.raises(ckpt.NotFound, match="no such step"):
        ckpt.restore(f"{root}/branch-2/77")


def test_listing_reads_markers_only(root: str, s3: Proxy, tmp_path: Path) -> None:
    with manager_of(root, tmp_path) as m:
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
    with manager_of(root, tmp_path, every=10) as m:
        m.resume()
        during = s3.during()
        assert m.save(7, state_of(7)) is None
        assert during() == []


def arrays_by_tensorstore(root: str, s3: Proxy, step: str, param: str) -> np.ndarray:
    """One array of a step, read by TensorStore alone."""
    base = spec_of(s3, f"{root.removeprefix(f's3://{BUCKET}/')}/{step}/state/")
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{param}/"}
    opened = ts.open({"driver": "zarr3", "kvstore": kvstore}, context=ts.Context()).result()
    return opened.read().result()


def large_state() -> dict[str, Any]:
    shapes = {name: (64, 200 + i) for i, name in enumerate("abcd")}
    rng = np.random.default_rng(0)
    large = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return large | {"small": np.arange(5)}


def objects_of(root: str, step: int) -> list[str]:
    return open_store(root).requests.names(f"branch-1/{step}/state/d/")  # type: ignore[attr-defined]


def must_be_read_alike(root: str, s3: Proxy, step: int, state: dict[str, Any]) -> None:
    for name, wanted in state.items():
        found = arrays_by_tensorstore(root, s3, f"branch-1/{step}", name)
        np.testing.assert_array_equal(found, wanted)
    assert_same(ckpt.restore(root, step=step).state, state)


def test_tensorstore_opens_a_step(root: str, s3: Proxy, tmp_path: Path) -> None:
    state = large_state()
    with manager_of(root, tmp_path) as m:
        m.resume()
        m.save(3, state)
    assert len(objects_of(root, 3)) == 2
    must_be_read_alike(root, s3, 3, state)


def test_tensorstore_opens_a_step_in_many_objects(
    root: str, s3: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvStore, "cut_bytes", 50_000)
    state = large_state()
    with manager_of(root, tmp_path) as m:
        m.resume()
        m.save(3, state)
        m.save(4, state, extra={"text": "x" * 10_000})  # makes the image longer
    names = objects_of(root, 3)
    assert len(names) == 7, names
    must_be_read_alike(root, s3, 3, state)
    must_be_read_alike(root, s3, 4, state)
    assert ckpt.verify(root).intact
    # One bit in one object of the image: TensorStore refuses it, we fall back and say so.
    victim = next(n for n in names if ".bytes-" in n and not n.endswith(".bytes-0-4096"))
    store = open_store(root)
    assert isinstance(store, KvStore)
    key = f"branch-1/3/state/d/{victim}"
    data = bytearray(store.requests.read(key).value)
    data[next(at for at in range(len(data) // 2, len(data)) if data[at])] ^= 4
    store.requests.write(key, bytes(data))
    with pytest.raises(ckpt.Damaged):
        ckpt.restore(root, step=3)
    broken = 0
    for name in "abcd":
        try:
            arrays_by_tensorstore(root, s3, "branch-1/3", name)
        except ValueError:
            broken += 1
    assert broken == 1

"""Buckets: the store contract and the whole of a run over real HTTP, with trouble in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from memory_source import Columns
from s3_server import BUCKET, Proxy, s3_server
from store_contract import ODD_KEYS, StoreContract

import ckpt
from ckpt import store_kv
from ckpt.errors import AlreadyExists, Misuse
from ckpt.store import Store, open_store
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
    monkeypatch.setattr(store_kv, "PATIENCE", store_kv.Patience(5.0, 0.01, 0.05, 5.0))
    return server


@pytest.fixture
def root(s3: Proxy) -> str:
    return f"s3://{BUCKET}/run-{next(_numbers)}"


@pytest.fixture
def store(root: str) -> Store:
    return open_store(root)


class TestS3(StoreContract):
    @pytest.fixture
    def store(self, root: str) -> Store:
        return open_store(root)

    def test_put_if_absent_leaves_what_is_there(self, store: Store) -> None:
        store.put_if_absent("a/1", b"first")
        for data in (b"", b"second", b"first"):
            with pytest.raises(AlreadyExists, match="1"):
                store.put_if_absent("a/1", data)
        assert store.read("a/1") == b"first"

    @pytest.mark.parametrize("key", [key for key in ODD_KEYS if key.isprintable()])
    def test_odd_names_are_names(self, store: Store, key: str) -> None:
        super().test_odd_names_are_names(store, key)

    @pytest.mark.parametrize("key", ["a\nb", "a.bytes-0-5", "x/a.bytes-0-5/b"])
    def test_names_that_a_bucket_refuses(self, store: Store, key: str) -> None:
        with pytest.raises(Misuse, match="key"):
            store.put(key, b"x")

    # A bucket cannot rename; `Publishing` does without.
    test_move_takes_everything = None
    test_move_fails_on_what_is_there = None
    test_moving_what_is_no_directory = None
    test_one_of_many_movers_wins = None
    test_what_is_moved_is_moved_once = None


# --- a run ---------------------------------------------------------------------------------------


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

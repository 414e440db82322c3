"""Buckets: the store contract and the whole of a run over real HTTP, with trouble in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from s3_server import BUCKET, Proxy, s3_server
from store_contract import ODD_KEYS, StoreContract

from ckpt import store_kv
from ckpt.errors import AlreadyExists, Misuse
from ckpt.store import Store, open_store

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

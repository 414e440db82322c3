"""Buckets: the store contract and the whole of a run over real HTTP, with trouble in between."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from memory_bucket import memory_store
from s3_server import BUCKET, CUT, LOSE, TEAR, Proxy, Request, Trouble, s3_server, status
from store_contract import ODD_KEYS, StoreContract, aligned, in_threads, some_bytes

from ckpt import kv_requests, store_kv
from ckpt.errors import AlreadyExists, Damaged, Misuse, NotFound, StoreFailed
from ckpt.store import Store, open_store
from ckpt.store_kv import KvStore

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
    monkeypatch.setattr(kv_requests, "PATIENCE", kv_requests.Patience(5.0, 0.01, 0.05, 5.0))
    return server


@pytest.fixture
def root(s3: Proxy) -> str:
    return f"s3://{BUCKET}/run-{next(_numbers)}"


@pytest.fixture
def store(root: str) -> KvStore:
    found = open_store(root)
    assert isinstance(found, KvStore)
    return found


class BucketContract(StoreContract):
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


class TestS3(BucketContract):
    @pytest.fixture
    def store(self, root: str) -> Store:
        return open_store(root)


class TestMemory(BucketContract):
    @pytest.fixture
    def store(self) -> Store:
        return memory_store()


# --- locations -----------------------------------------------------------------------------------


def test_locations(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_store("s3://runs/a/b/").location == "s3://runs/a/b"
    assert open_store("s3://runs").location == "s3://runs"
    for bad in ("s3://", "s3:///a", "s3://runs/a?x=1", "s3://runs/a#b", "s3://runs/a//b", "gs://"):
        with pytest.raises(Misuse, match=re.escape(bad)):
            open_store(bad)
    with pytest.raises(Misuse, match="Invalid S3 bucket name"):
        open_store("s3://a/x")


def test_only_the_spec_of_google_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("gs://runs/a")
    assert isinstance(store, KvStore)
    assert store.requests.spec == {"driver": "gcs", "bucket": "runs", "path": "a/"}
    assert store.location == "gs://runs/a"


def test_the_environment_says_where_and_who(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    plain = {"driver": "s3", "bucket": "runs", "use_conditional_write": True, "path": "a/"}
    assert store_kv.open_bucket("s3://runs/a").requests.spec == plain
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-1")
    assert store_kv.open_bucket("s3://runs/a").requests.spec == {**plain, "aws_region": "eu-1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other:1/")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://here:2/")
    found = store_kv.open_bucket("s3://runs/a").requests.spec
    assert found == {**plain, "aws_region": "eu-1", "endpoint": "http://here:2"}


# --- absent, or failed ---------------------------------------------------------------------------


def always(trouble: Trouble) -> Callable[[Request, int], Trouble | None]:
    return lambda request, number: trouble


def acts(store: Store) -> dict[str, Callable[[], Any]]:
    """Every operation, on a key that is not there."""
    return {
        "put": lambda: store.put("a/b", b"x"),
        "put_many": lambda: store.put_many({"a/b": b"x", "a/c": b"y"}),
        "put_if_absent": lambda: store.put_if_absent("a/d", b"x"),
        "read": lambda: store.read("absent"),
        "read_many": lambda: store.read_many(["absent", "gone"]),
        "list": lambda: store.list("a"),
        "exists": lambda: store.exists("absent"),
        "delete": lambda: store.delete("absent"),
        "delete_tree": lambda: store.delete_tree("absent"),
        "write_image": lambda: store.write_image("image", memoryview(b"x")),
        "open_image": lambda: store.open_image("absent"),
    }


@pytest.mark.parametrize("act", acts(memory_store()))
def test_what_fails_is_not_absent(
    act: str, store: KvStore, s3: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_requests, "PATIENCE", kv_requests.Patience(0.1, 0.01, 0.02, 0.3))
    for trouble, text in (
        (status(403), "check the credentials"),
        (status(500), r"500.*tried \d+ times"),
        (CUT, "AWS_ENDPOINT_URL"),
    ):
        with s3.trouble(always(trouble)), pytest.raises(StoreFailed, match=text):
            acts(store)[act]()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreFailed, match="onnect"):
        acts(open_store("s3://runs/a"))[act]()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid")
    with pytest.raises(StoreFailed, match="resolve"):
        acts(open_store("s3://runs/a"))[act]()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    if act != "delete":  # what is asked for is so
        with pytest.raises(StoreFailed, match="no such bucket"):
            acts(open_store("s3://not-there/a"))[act]()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_a_server_that_was_never_reached_is_given_up_soon(
    endpoint: str, s3: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kv_requests.Patience().first_s <= 10
    assert kv_requests.Patience().total_s >= 100
    monkeypatch.setattr(
        kv_requests, "PATIENCE", kv_requests.Patience(1e9, 0.01, 0.02, 5.0, first_s=0.1)
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StoreFailed, match="check the network and AWS_ENDPOINT_URL"):
        open_store("s3://runs/a").read("b")

    # One that has answered before is waited for as long as ever.
    monkeypatch.setattr(
        kv_requests, "PATIENCE", kv_requests.Patience(0.5, 0.01, 0.02, 5.0, first_s=0.0)
    )
    monkeypatch.setattr(kv_requests, "_reached", {endpoint})
    with pytest.raises(StoreFailed) as caught:
        open_store("s3://runs/a").read("b")
    assert int(str(caught.value).split("(tried ")[1].split()[0]) > 5


def test_cures_are_those_of_the_scheme() -> None:
    for scheme, cures in kv_requests._CURES.items():
        other = {"s3": "GOOGLE", "gs": "AWS"}[scheme]
        assert {"PERMISSION_DENIED", "UNAUTHENTICATED", "NOT_FOUND", "CURL"} == cures.keys()
        assert other not in " ".join(cures.values())


def test_an_answer_that_never_comes(
    store: KvStore, s3: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_requests, "PATIENCE", kv_requests.Patience(0.5, 0.01, 0.02, 0.2))
    monkeypatch.setattr(s3, "delay_s", 1.0)
    with pytest.raises(StoreFailed, match="no answer"):
        store.read("a")


# --- trouble that passes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble", [status(500), status(503), status(429), CUT, LOSE, TEAR], ids=str
)
def test_what_passes_is_waited_for(trouble: Trouble, store: KvStore, s3: Proxy) -> None:
    data = some_bytes(300_000)
    found: list[Any] = []

    def look_at_image() -> None:
        with store.open_image("d/image") as reader:
            found.append(reader.read(0, len(data)))

    for act in (
        lambda: store.put("a", data),
        lambda: found.append(store.read("a")),
        lambda: store.write_image("d/image", aligned(data), [4096, 100_000]),
        look_at_image,
        lambda: found.append([entry.name for entry in store.list("")]),
        lambda: store.delete_tree("d"),
        lambda: store.delete("a"),
        lambda: found.append(store.list("")),
    ):
        with s3.trouble(lambda request, number: trouble if number < 4 else None):
            act()
    assert found == [data, data, ["a", "d"], []]


def first_put(trouble: Trouble) -> Callable[[Request, int], Trouble | None]:
    """Trouble with the first conditional put, however often the client repeats it by itself."""
    puts = itertools.count()
    return lambda request, _: trouble if request.kind == "PUT?" and next(puts) < 8 else None


def test_a_lost_answer_to_a_put_if_absent_is_settled(store: KvStore, s3: Proxy) -> None:
    """What was carried out is ours; what somebody else did meanwhile is not."""
    for number in range(3):
        with s3.trouble(first_put(LOSE)):
            store.put_if_absent(f"claims/{number}", b"mine")
        assert store.read(f"claims/{number}") == b"mine"
    store.put("claims/9", b"theirs")
    with s3.trouble(first_put(LOSE)), pytest.raises(AlreadyExists):
        store.put_if_absent("claims/9", b"mine")
    assert store.read("claims/9") == b"theirs"


def test_a_lost_answer_to_a_swap_is_settled(store: KvStore, s3: Proxy) -> None:
    store.put("state", b"1")
    with s3.trouble(first_put(LOSE)):
        store.swap("state", b"1", b"2")
    assert store.read("state") == b"2"
    for old in (b"1", b"3"):
        with pytest.raises(NotFound, match="changed meanwhile"):
            store.swap("state", old, b"4")
    with pytest.raises(NotFound):
        store.swap("absent", b"", b"4")
    assert store.read("state") == b"2"


def test_swaps_have_one_winner(store: KvStore) -> None:
    for number in range(5):
        store.put(f"state/{number}", b"old")
        found = in_threads(
            [
                lambda me=me, n=number: store.swap(f"state/{n}", b"old", b"%d" % me)
                for me in range(6)
            ]
        )
        winners = [me for me, what in enumerate(found) if what is None]
        assert len(winners) == 1, found
        assert {type(what) for what in found if what is not None} == {NotFound}
        assert store.read(f"state/{number}") == b"%d" % winners[0]


def test_claims_under_random_trouble_have_one_winner(store: KvStore, s3: Proxy) -> None:
    seed = 20261
    dice = random.Random(seed)
    kinds = [status(500), status(503), CUT, LOSE, TEAR, None, None]
    store.put("warm", b"")
    with s3.trouble(lambda request, number: dice.choice(kinds)):
        for number in range(4):
            found = in_threads(
                [
                    lambda me=me, n=number: store.put_if_absent(f"c/{n}", b"%d" % me)
                    for me in range(4)
                ]
            )
            won = [me for me, what in enumerate(found) if what is None]
            there = store.read(f"c/{number}")
            # The winner may be told that it lost, never the other way round.
            assert won in ([], [int(there)]), f"seed {seed}, claim {number}: {found} {there!r}"
            assert {type(what) for what in found if what is not None} == {AlreadyExists}


# --- images --------------------------------------------------------------------------------------


def test_a_cut_image(store: KvStore, s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_kv, "READ_BYTES", 10_000)
    data = some_bytes(100_000)
    store.write_image("d/image", aligned(data), [4096, 50_000, 98_304])
    assert [(e.name, e.is_dir, e.size_bytes) for e in store.list("d")] == [
        ("image", False, 100_000)
    ]
    names = {request.key.rpartition("/")[2] for request in s3.requests if request.kind == "PUT"}
    assert {"image.bytes-0-4096", "image.bytes-98304-100000"} <= names
    rng = np.random.default_rng(1)
    with store.open_image("d/image") as reader:
        assert reader.size_bytes == 100_000
        for _ in range(20):
            start, stop = sorted(rng.integers(0, 100_001, 2).tolist())
            assert reader.read(start, stop - start) == data[start:stop]
    store.requests.remove("d/image.bytes-4096-50000")
    with pytest.raises(Damaged, match="wanted an object for its bytes from 4096 on"):
        store.open_image("d/image")
    store.delete("d/image")
    assert store.list("d") == []


def test_an_object_shorter_than_its_name_is_damage(store: KvStore) -> None:
    store.write_image("image", memoryview(bytes(5000)))
    store.requests.write("image.bytes-0-5000", bytes(4000))
    with store.open_image("image") as reader:
        assert reader.read(0, 4000) == bytes(4000)
        with pytest.raises(Damaged, match="shorter than its name"):
            reader.read(3000, 2000)


def test_a_name_that_claims_more_than_memory_is_damage(store: KvStore) -> None:
    """Nothing is allocated for it."""
    store.write_image("image", memoryview(bytes(5000)))
    store.requests.write(f"image.bytes-5000-{10**15}", bytes(4000))
    with store.open_image("image") as reader:
        assert reader.size_bytes == 10**15
        assert reader.read(4000, 2000) == bytes(2000)
        for start, length in ((0, 10**15), (5000, 10**15 - 5000), (4000, 10**14)):
            with pytest.raises(Damaged, match="shorter than its name"):
                reader.read(start, length)


@pytest.mark.parametrize("size", [0, 1, 4096, 3_000_000])
def test_an_image_in_one_piece_from_a_file_system(size: int) -> None:
    store, data = memory_store(), some_bytes(size)
    store.put("image", data)
    with store.open_image("image") as reader:
        assert reader.size_bytes == size
        assert reader.read(0, size) == data


def test_a_failed_image_leaves_nothing(store: KvStore, s3: Proxy) -> None:
    def plan(request: Request, number: int) -> Trouble | None:
        return status(403) if request.key.endswith("-8192") and request.method == "PUT" else None

    with s3.trouble(plan), pytest.raises(StoreFailed):
        store.write_image("d/image", aligned(some_bytes(10_000)), [4096, 8192])
    assert store.list("d") == []


# --- a store without conditional put -------------------------------------------------------------


def test_a_store_that_ignores_conditions_is_told_once(
    root: str, s3: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "ignore_conditions", True)
    with pytest.warns(RuntimeWarning, match="ignores conditional puts"):
        open_store(root).put_if_absent("a", b"x")
    open_store(root).put_if_absent("b", b"x")  # warnings are errors here


def test_a_store_with_conditions_is_asked_once(root: str, s3: Proxy) -> None:
    counts = []
    for key in ("a", "b", "c"):
        during = s3.during()
        open_store(root).put_if_absent(key, b"x")
        counts.append([request.kind for request in during()])
    assert counts == [["PUT?", "PUT?"], ["PUT?"], ["PUT?"]]

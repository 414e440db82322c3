"""The image of an array: what is written is what is read; its chunks and plans."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
from awscrt import checksums
from hypothesis import given
from hypothesis import strategies as st
from image_cases import PAGE, assembled, decoded, filled, random_array, small_image

from ckpt import image
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.specs import ArraySpec, ShardSpec, dtype_of

DTYPES = ["bool", "int8", "uint16", "float32", "complex128", "bfloat16", "int4", "float8_e4m3fn"]


# -- what is written is what is read
@given(data=st.data())
def test_round_trip(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    arrays, shards, sources, wanted = [], [], [], {}
    for i in range(data.draw(st.integers(0, 5), label="arrays")):
        shard = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4), label="shard"))
        split = tuple(data.draw(st.integers(1, 3)) for _ in shard)
        dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
        limit = data.draw(st.sampled_from([8, 64, 300, 2**20]), label="limit")
        shape = tuple(n * k for n, k in zip(shard, split, strict=True))
        chunk = image.chunk_shape(shard, dtype_of(dtype).itemsize, limit)
        value = random_array(rng, shape, dtype)
        arrays.append(ArraySpec(f"p{i}", dtype, shape, chunk))
        wanted[f"p{i}"] = value
        for at in itertools.product(*map(range, split)):
            start = tuple(k * n for k, n in zip(at, shard, strict=True))
            index = tuple(slice(s, s + n) for s, n in zip(start, shard, strict=True))
            shards.append(ShardSpec(i, start, shard))
            part = value[(*index, ...)]  # not contiguous where an inner axis is split
            sources.append(part.copy() if rng.integers(2) else part)
    plan = image.plan(arrays, shards, {"n": [1, None, {"x": 0.5}]})
    raw, header = filled(plan, sources, threads=data.draw(st.integers(1, 3), label="threads"))
    read = decoded(raw)
    assert read.digest == header.digest
    assert read.meta == header.meta == {"n": [1, None, {"x": 0.5}]}
    assert read.arrays == tuple(arrays)
    assert read.size_bytes == plan.size_bytes
    for name in ("array", "grid", "offset", "nbytes", "digest", "crc"):
        np.testing.assert_array_equal(getattr(read.columns, name), getattr(header.columns, name))
    found = assembled(raw, read)
    for name, value in wanted.items():
        assert found[name].tobytes() == value.tobytes(), name
    again, _ = filled(plan, sources)
    assert again == raw, "the same values gave other bytes"


def test_large_chunks_start_at_pages_and_small_ones_are_packed() -> None:
    sizes = [16, 64 * 1024 - 1, 64 * 1024, 3 * 2**20, 8]
    arrays = [ArraySpec(f"p{n}", "uint8", (n,), (n,)) for n in sizes]
    plan = image.plan(arrays, [ShardSpec(i, (0,), (n,)) for i, n in enumerate(sizes)], {})
    rng = np.random.default_rng(1)
    sources = [rng.integers(0, 256, n, np.uint8) for n in sizes]
    raw, header = filled(plan, sources, threads=2)
    offset = header.columns.offset
    assert (offset[2:4] % PAGE == 0).all()
    assert offset[[0, 1, 4]].tolist() == [PAGE, PAGE + 64, PAGE + 64 + 65600]
    assert plan.size_bytes % PAGE == 0
    found = assembled(raw, decoded(raw))
    for n, source in zip(sizes, sources, strict=True):
        np.testing.assert_array_equal(found[f"p{n}"], source)


def test_strided_and_large_chunks_agree_with_contiguous_ones() -> None:
    rng = np.random.default_rng(2)
    whole = rng.integers(0, 256, (64, 3, 8192), np.uint8)
    for chunk in [(1, 3, 8192), (16, 3, 8192), (64, 3, 8192), (32, 1, 4096), (1, 1, 8192)]:
        plan = image.plan(
            [ArraySpec("a", "uint8", whole.shape, chunk)],
            [ShardSpec(0, (0, 0, 0), whole.shape)],
            {},
        )
        plain, _ = filled(plan, [whole], threads=2)
        turned, _ = filled(plan, [np.asfortranarray(whole)], threads=2)
        assert plain == turned, chunk
        assert (assembled(plain, decoded(plain))["a"] == whole).all(), chunk


def test_a_plan_with_other_meta_keeps_its_places() -> None:
    plan = image.plan([ArraySpec("a", "int8", (5,), (5,))], [ShardSpec(0, (0,), (5,))], {})
    source = [np.arange(5, dtype=np.int8)]
    for meta in ({"step": 1}, {"long": "x" * 10_000, "loss": float("inf")}, {}):
        other = plan.with_meta(meta)
        raw, header = filled(other, source)
        assert decoded(raw).meta == meta
        assert header.columns.offset.tolist() == plan.places.offset.tolist()


def test_a_smaller_image_in_a_used_buffer() -> None:
    rng = np.random.default_rng(3)
    buffer, digests = bytearray(64 * 1024), set()
    for n in (5000, 100, 4000):
        plan = image.plan(
            [ArraySpec("a", "int64", (n,), (n,))], [ShardSpec(0, (0,), (n,))], {"n": n}
        )
        source = rng.integers(0, 2**60, n)
        header = image.fill(plan, buffer, [source], 1)
        read = decoded(buffer)
        assert read.size_bytes == plan.size_bytes < len(buffer)
        np.testing.assert_array_equal(assembled(buffer, read)["a"], source)
        digests.add(header.digest)
    assert len(digests) == 3


def test_the_page_is_cleared_before_anything_else_and_written_last() -> None:
    raw, _ = small_image()
    buffer = bytearray(raw)
    plan = image.plan([ArraySpec("a", "int8", (1,), (1,))], [ShardSpec(0, (0,), (1,))], {})

    class Stop(Exception):
        pass

    class Source(np.ndarray):
        def reshape(self, *shape: Any, **options: Any) -> Any:  # the first touch of the values
            assert buffer[:PAGE] == bytes(PAGE)
            raise Stop

    with pytest.raises(Stop):
        image.fill(plan, buffer, [np.zeros(1, np.int8).view(Source)], 2)
    with pytest.raises(Damaged, match="here: no finished image"):
        decoded(buffer)


# -- chunk shapes
@given(
    shard=st.lists(st.integers(0, 400), max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    limit=st.sampled_from([64, 1000, 4096, 2**20]),
)
def test_chunk_shape(shard: tuple[int, ...], itemsize: int, limit: int) -> None:
    chunk = image.chunk_shape(shard, itemsize, limit)
    assert len(chunk) == len(shard)
    assert all(c >= 1 and n % c == 0 for n, c in zip(shard, chunk, strict=True))
    if 0 in shard or math.prod(shard) * itemsize <= limit:
        assert chunk == tuple(max(1, n) for n in shard)
        return
    nbytes = math.prod(chunk) * itemsize
    assert nbytes * 64 >= limit or chunk == shard, "a crumb"
    cut = [i for i, (n, c) in enumerate(zip(shard, chunk, strict=True)) if n != c]
    assert not cut or all(c == 1 for c in chunk[: cut[-1]]), "not along leading axes"


def test_chunk_shape_examples() -> None:
    assert image.chunk_shape((4096, 4096), 4) == (4096, 4096)
    assert image.chunk_shape((8192, 8192), 4) == (2048, 8192)
    assert image.chunk_shape((3, 8192, 8192), 4) == (1, 2048, 8192)
    prime = 1_000_003  # only 1 or all of it: one large chunk rather than a million of 400 bytes
    assert image.chunk_shape((prime, 100), 4) == (prime, 100)
    assert image.chunk_shape((), 8) == ()
    assert image.chunk_shape((0, 5), 8) == (1, 5)


# -- what does not make a plan
@pytest.mark.parametrize(
    ("arrays", "shards", "error", "text"),
    [
        ([("a", "float32", (5,), (2,))], [], Misuse, r"a: chunks of \(2,\) do not tile \(5,\)"),
        ([("a", "float32", (4,), (2, 2))], [], Misuse, "rank"),
        ([("a", "float32", (-4,), (2,))], [], Misuse, "do not tile"),
        ([("a", "object", (4,), (2,))], [], Misuse, "dtype 'object' is none of bool"),
        ([("a", "int8", (1,), (1,))] * 2, [], Misuse, "'a' is no text, or is there twice"),
        ([("\ud800", "int8", (1,), (1,))], [], Misuse, "no text"),
        ([("a", "int8", (2**62,), (1,))], [], Misuse, "beyond 2\\*\\*62"),
        ([("a", "int8", (4,), (2,))], [(0, (1,), (2,))], Unsupported, "a: .*evenly"),
        ([("a", "int8", (4,), (2,))], [(0, (2,), (4,))], Misuse, "a: .*leaves"),
        ([("a", "int8", (4,), (2,))], [(0, (), ())], Misuse, "a: .*rank"),
        ([("a", "int8", (4,), (2,))], [(1, (0,), (4,))], Misuse, "shard 0 is of array 1"),
        ([("a", "int8", (4,), (2,))], [(0, (0,), (4,)), (0, (2,), (2,))], Misuse, "a: two shards"),
    ],
)
def test_plans_refused(arrays: Any, shards: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        image.plan([ArraySpec(*a) for a in arrays], [ShardSpec(*s) for s in shards], {})


def test_fill_refused() -> None:
    plan = image.plan([ArraySpec("a", "int8", (4,), (4,))], [ShardSpec(0, (0,), (4,))], {})
    good = np.zeros(4, np.int8)
    with pytest.raises(Misuse, match="wanted 12288 writable bytes, found 8191"):
        image.fill(plan, bytearray(8191), [good])
    with pytest.raises(Misuse, match="found 12288 read-only"):
        image.fill(plan, bytes(12288), [good])
    with pytest.raises(Misuse, match="wanted 1 sources, one per shard, found 0"):
        image.fill(plan, bytearray(12288), [])
    for bad in (good.astype(np.uint8), np.zeros((2, 2), np.int8)):
        with pytest.raises(Misuse, match=r"a: wanted int8\[4\] for the shard at \[0\], found "):
            image.fill(plan, bytearray(12288), [bad])
    for meta in ({"x": {1, 2}}, {"x": "\ud800"}, ["no object"]):
        with pytest.raises(Misuse, match="meta"):
            plan.with_meta(meta)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="dtype 'uint4'"):
        dtype_of("uint4")


def test_an_empty_image() -> None:
    raw, _ = filled(image.plan([], [], {}), [])
    read = decoded(raw)
    assert (len(raw), read.arrays, len(read.columns.array)) == (2 * PAGE, (), 0)
    assert len(image.payload_ranges(read)) == 0


def test_zero_size_arrays_have_no_chunks() -> None:
    arrays = [ArraySpec("z", "float32", (0, 3), image.chunk_shape((0, 3), 4))]
    plan = image.plan(arrays, [ShardSpec(0, (0, 0), (0, 3))], {})
    raw, _ = filled(plan, [np.zeros((0, 3), np.float32)])
    assert decoded(raw).arrays == tuple(arrays)
    assert len(decoded(raw).columns.array) == 0


def test_an_error_in_a_copying_thread_reaches_the_caller() -> None:
    n = 40
    arrays = [ArraySpec(f"p{i}", "uint8", (2**20,), (2**20,)) for i in range(n)]
    plan = image.plan(arrays, [ShardSpec(i, (0,), (2**20,)) for i in range(n)], {})

    class Bad(np.ndarray):
        def reshape(self, *shape: Any, **options: Any) -> Any:
            raise MemoryError("planted")

    sources = [np.zeros(2**20, np.uint8) for _ in range(n)]
    sources[20] = sources[20].view(Bad)
    buffer = bytearray(plan.size_bytes)
    with pytest.raises(MemoryError, match="planted"):
        image.fill(plan, buffer, sources, 3)
    with pytest.raises(Damaged):
        decoded(buffer)


def test_an_interrupt_leaves_no_thread_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while this thread waits for the others: they have stopped when `fill` raises."""
    n = 4
    arrays = [ArraySpec(f"p{i}", "uint8", (2**20,), (2**20,)) for i in range(n)]
    plan = image.plan(arrays, [ShardSpec(i, (0,), (2**20,)) for i in range(n)], {})
    real_join, real_crc = threading.Thread.join, checksums.crc32c
    interrupted: list[threading.Thread] = []
    entered, go_on = threading.Event(), threading.Event()

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if not interrupted:
            interrupted.append(thread)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt
        real_join(thread, timeout)

    def checksum(*arguments: Any) -> int:
        if threading.current_thread().name == "ckpt-copy":
            entered.set()
            go_on.wait(60)
        else:
            entered.wait(60)
        return real_crc(*arguments)

    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(checksums, "crc32c", checksum)
    sources = [np.zeros(2**20, np.uint8) for _ in range(n)]
    buffer = bytearray(plan.size_bytes)
    with pytest.raises(KeyboardInterrupt):
        image.fill(plan, buffer, sources, 2)
    assert interrupted
    assert not interrupted[0].is_alive()
    with pytest.raises(Damaged):
        decoded(buffer)

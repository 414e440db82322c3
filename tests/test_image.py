"""Images: what is filled is what is decoded, and nothing else passes as an image."""

from __future__ import annotations

import itertools
import json
import math
import struct
import threading
from collections.abc import Callable
from typing import Any

import crc32c
import numpy as np
import pytest
import xxhash
from awscrt import checksums
from hypothesis import given
from hypothesis import strategies as st

from ckpt import grid, image
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.image import Header, Plan
from ckpt.specs import ArraySpec, ShardSpec, dtype_of
from ckpt.table import MAGIC

PAGE = grid.PAGE_BYTES
DTYPES = ["bool", "int8", "uint16", "float32", "complex128", "bfloat16", "int4", "float8_e4m3fn"]


def decoded(raw: Any, where: str = "here") -> Header:
    view = memoryview(raw)
    return image.decode(lambda offset, length: view[offset : offset + length], len(view), where)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    wanted = dtype_of(dtype)
    if dtype == "bool" or dtype == "int4":
        return rng.integers(0, 2, shape).astype(wanted)
    count = math.prod(shape) * wanted.itemsize
    return rng.integers(0, 256, count, np.uint8).view(wanted).reshape(shape)


def filled(plan: Plan, sources: list[np.ndarray], threads: int = 1) -> tuple[bytearray, Header]:
    buffer = bytearray(b"\xa5" * plan.size_bytes)
    return buffer, image.fill(plan, buffer, sources, threads)


def assembled(raw: Any, header: Header) -> dict[str, np.ndarray]:
    """Each array put together from its verified chunks, the slow and plain way."""
    whole = {a.param: np.zeros(a.shape, dtype_of(a.dtype)) for a in header.arrays}
    columns, view = header.columns, memoryview(raw)
    for row, (offset, length) in enumerate(image.payload_ranges(header).tolist()):
        stored = view[offset : offset + length]
        image.verify_chunk(header, row, stored)
        image.verify_chunk(header, row, stored[:-4])
        assert struct.unpack("<I", stored[-4:])[0] == crc32c.crc32c(stored[:-4])
        spec = header.arrays[columns.array[row]]
        at = columns.grid[row].tolist()[: len(spec.shape)]
        index = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, spec.chunk_shape, strict=True))
        chunk = np.frombuffer(stored[:-4], dtype_of(spec.dtype)).reshape(spec.chunk_shape)
        whole[spec.param][index] = chunk
    return whole


def small_image() -> tuple[bytes, Header]:
    """Two arrays, four chunks, 12 KiB."""
    arrays = [ArraySpec("a", "float32", (4, 3), (2, 3)), ArraySpec("b.c", "int64", (), ())]
    shards = [ShardSpec(0, (0, 0), (4, 3)), ShardSpec(1, (), ())]
    plan = image.plan(arrays, shards, {"step": 7, "who": "ü"})
    sources = [np.arange(12, dtype=np.float32).reshape(4, 3), np.array(5)]
    raw, header = filled(plan, sources)
    return bytes(raw), header


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


# -- damage


def test_every_flipped_bit_of_page_and_table_is_refused() -> None:
    raw, header = small_image()
    table_at, table_bytes = struct.unpack_from("<QQ", raw, 24)
    buffer = bytearray(raw)
    places = [*range(PAGE), *range(table_at, table_at + table_bytes)]
    for at, bit in itertools.product(places, range(8)):
        buffer[at] ^= 1 << bit
        with pytest.raises(Damaged, match="here"):
            decoded(buffer)
        buffer[at] ^= 1 << bit
    assert decoded(buffer).digest == header.digest


def test_every_flipped_bit_of_a_chunk_or_its_crc_is_refused() -> None:
    raw, header = small_image()
    flipped = 0
    for row, (offset, length) in enumerate(image.payload_ranges(header).tolist()):
        chunk = bytearray(raw[offset : offset + length])
        for at, bit in itertools.product(range(length), range(8)):
            chunk[at] ^= 1 << bit
            with pytest.raises(Damaged, match=r"image: (a|b\.c), chunk .* at byte \d+: wanted"):
                image.verify_chunk(header, row, chunk)
            chunk[at] ^= 1 << bit
            flipped += 1
        with pytest.raises(Damaged, match="truncated"):
            image.verify_chunk(header, row, chunk[:-5])
    assert flipped == 8 * sum(image.payload_ranges(header)[:, 1].tolist())


def test_every_truncation_is_refused() -> None:
    raw, _ = small_image()
    for size in range(len(raw)):
        with pytest.raises(Damaged, match="here"):
            decoded(raw[:size])
        if size % PAGE == 0:  # the file says it is long enough, and then is not
            with pytest.raises(Damaged, match="here"):
                image.decode(lambda o, n, s=size: raw[:s][o : o + n], len(raw), "here")


def test_foreign_and_empty_files_are_refused() -> None:
    for raw in (b"", bytes(PAGE), b"\x89HDF" * PAGE, bytes(10 * PAGE)):
        with pytest.raises(Damaged, match="here"):
            decoded(raw)


def test_a_newer_format_is_named() -> None:
    raw, _ = small_image()
    page = bytearray(raw[:PAGE])
    struct.pack_into("<I", page, 8, 3)
    with pytest.raises(Unsupported, match="here: image format 3; this release reads formats 1"):
        decoded(sealed(page, raw[PAGE:]))


# -- hostile headers: digests in order, content not


def sealed(page: bytearray, rest: bytes) -> bytes:
    page[-16:] = xxhash.xxh3_128_digest(bytes(page[:-16]))
    return bytes(page) + rest


Change = Callable[[dict[str, Any]], None]


def crafted(change: Change) -> bytes:
    """A small image whose content went through `change`, with sizes and digests right again.

    Keys of page fields (`size`, `at`, ...) that `change` sets override the right ones.
    """
    raw, _ = small_image()
    _, _, _, _, at, length, n, arrays_n, meta_n, _ = struct.unpack_from("<8sIIQQQQQQQ", raw)
    table = raw[at : at + length]
    content: dict[str, Any] = {
        "cell": np.frombuffer(table, "<u8", n).copy(),
        "offset": np.frombuffer(table, "<u8", n, 8 * n).copy(),
        "digest": table[16 * n : 32 * n],
        "array": np.frombuffer(table, "<u4", n, 32 * n).copy(),
        "crc": table[36 * n : 40 * n],
        "arrays": table[40 * n : 40 * n + arrays_n],
        "meta": table[40 * n + arrays_n :][:meta_n],
        "tree": table[40 * n + arrays_n + meta_n :],
    }
    parts = tuple(content)
    change(content)
    if not isinstance(content["arrays"], bytes):
        content["arrays"] = json.dumps(content["arrays"]).encode()
    body = b"".join(bytes(content[k]) for k in parts)
    size = -(-(at + len(body)) // PAGE) * PAGE
    right = {"page": PAGE, "size": size, "at": at, "length": len(body), "count": n}
    right |= {"arrays_n": len(content["arrays"]), "meta_n": len(content["meta"])}
    right |= {"tree_n": len(content["tree"])}
    page = bytearray(PAGE)
    fields = [content.get(k, v) for k, v in right.items()]
    struct.pack_into("<8sIIQQQQQQQ", page, 0, MAGIC, 1, *fields)
    page[72:88] = xxhash.xxh3_128_digest(body)
    rest = raw[PAGE:at] + body
    return sealed(page, rest + bytes(-len(rest) % PAGE))


def put(name: str, value: Any) -> Change:
    return lambda content: content.__setitem__(name, value)


def put_in(name: str, row: int, value: int) -> Change:
    return lambda content: content[name].__setitem__(row, value)


def test_the_crafting_itself_is_sound() -> None:
    assert decoded(crafted(lambda content: None)).meta == {"step": 7, "who": "ü"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put("page", 512), "wanted 4096 bytes, found 512"),
        (put("size", 2**63), "truncated"),
        (put("size", PAGE), "do not end"),
        (put("at", 0), "do not end"),
        (put("at", 2**64 - 1), "do not end"),
        (put("length", 2**64 - 1), "do not end"),
        (put("length", 0), "do not end"),
        (put("count", 2**60), "do not make"),
        (put("count", 2), "do not make"),
        (put("arrays_n", 2**63), "do not make"),
        (put_in("array", 1, 2), "chunk 1 is of an array beyond the 2"),
        (put_in("array", 2, 2**32 - 1), "chunk 2 is of an array beyond the 2"),
        (put_in("cell", 0, 2), "chunk 0 leaves its array"),
        (put_in("cell", 2, 2**64 - 1), "chunk 2 leaves its array"),
        (put_in("cell", 0, 1), "is there twice"),
        (put_in("offset", 0, 0), "chunk 0 starts outside"),
        (put_in("offset", 0, 2 * PAGE), "chunk 0 starts outside"),
        (put_in("offset", 0, 2**64 - 64), "chunk 0 starts outside"),
        (put_in("offset", 0, PAGE + 1), "chunk 0 starts between"),
        (put_in("offset", 0, PAGE + 64), "chunk [01] runs into"),
        (put_in("offset", 2, 2 * PAGE - 64), None),
        (put("arrays", [["a", "float32", [4, 3], [2, 3]]]), "chunk 2 is of an array beyond the 1"),
        (put("arrays", []), "chunk 0 is of an array beyond the 0"),
        (put("arrays", [["a", "float32", [4, 3], [2, 3]]] * 2), "twice"),
        (put("arrays", [["a", "float32", [4, 3], [2, 3]], ["b", "void", [], []]]), "'void'"),
        (put("arrays", [["a", "float32", [4, 3], [2, 3]], ["b", ["int8"], [], []]]), "dtype"),
        (put("arrays", [["a", "float32", [4, 3], [2, 3]], [3, "int8", [], []]]), "no text"),
        (put("arrays", [["a", "float32", [4, 3], [2, 2]], ["b", "int8", [], []]]), "do not tile"),
        (put("arrays", [["a", "float32", [4, 3], [2, 0]], ["b", "int8", [], []]]), "do not tile"),
        (put("arrays", [["a", "float32", [4, -3], [2, 3]], ["b", "int8", [], []]]), "do not tile"),
        (put("arrays", [["a", "float32", [4, 3.0], [2, 3]], ["b", "int8", [], []]]), "do not tile"),
        (
            put("arrays", [["a", "float32", [4, True], [2, 1]], ["b", "int8", [], []]]),
            "do not tile",
        ),
        (put("arrays", [["a", "int8", [2**40] * 2, [2**40] * 2], ["b", "int8", [], []]]), "2..62"),
        (put("arrays", [["a", "int8", [2**61], [2**61]], ["b", "int8", [], []]]), "leaves"),
        (put("arrays", [["a", "int8", [2**62], [2**61]], ["b", "int8", [], []]]), "between|runs"),
        (put("arrays", [["a", "int8", [10**4000], [1]], ["b", "int8", [], []]]), "2..62|table"),
        (put("arrays", [["a", "int8", [1] * 65, [1] * 65], ["b", "int8", [], []]]), "rank"),
        (put("arrays", [["a", "int8", [0], [1]], ["b", "int8", [], []]]), "chunk 0 leaves"),
        (put("arrays", {"a": 1}), "table"),
        (put("arrays", [["a"]]), "table"),
        (put("arrays", [[1, 2, 3, 4]]), "table"),
        (put("arrays", b"[" * 100_000), "table"),
        (put("arrays", b"\xff\xfe"), "table"),
        (put("meta", b"[]"), "meta: wanted an object, found list"),
        (put("meta", b"{"), "table"),
        (put("meta", b""), "table"),
    ],
)
def test_hostile_headers_are_refused(change: Change, text: str | None) -> None:
    raw = crafted(change)
    if text is None:
        decoded(raw)
        return
    with pytest.raises(Damaged, match=f"^here: .*({text})"):
        decoded(raw)


@given(at=st.integers(0, 88), value=st.integers(0, 2**64 - 1))
def test_any_number_in_a_resealed_page_is_refused_or_harmless(at: int, value: int) -> None:
    raw, header = small_image()
    page = bytearray(raw[:PAGE])
    struct.pack_into("<Q", page, at, value)
    try:
        read = decoded(sealed(page, raw[PAGE:]))
    except (Damaged, Unsupported):
        return
    assert read.meta == header.meta
    assert (read.columns.digest == header.columns.digest).all()


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

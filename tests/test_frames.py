"""Frames and compressed images, in memory: what goes in comes out, and nothing else does."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import crc32c
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckpt import compressing, image, ocdbt, pieces, specs
from ckpt.compressing import compressed
from ckpt.errors import Damaged, Misuse, StoreFailed, Unsupported
from ckpt.frames import WINDOW_BYTES, Inflater, inflater
from ckpt.grid import CRC_BYTES, PAGE_BYTES
from ckpt.image import Header
from ckpt.specs import ArraySpec, ShardSpec, dtype_of

GUARD = 64


def inflated(frame: bytes, nbytes: int) -> bytes:
    """The chunk of a frame; neither way of reading writes beyond it or finds another one."""
    room = bytearray(b"\xa5" * (nbytes + 2 * GUARD))
    try:
        inflater().into(memoryview(room)[GUARD : GUARD + nbytes], memoryview(frame))
    except Damaged as error:
        with pytest.raises(Damaged, match=r"^zstd frame: "):
            inflater().digest(memoryview(frame), nbytes)
        raise error
    finally:
        assert room[:GUARD] == room[-GUARD:] == b"\xa5" * GUARD, "written beyond the chunk"
    found = bytes(room[GUARD:-GUARD])
    assert inflater().digest(memoryview(frame), nbytes) == xxhash.xxh3_128_digest(found)
    return found


def values(count: int, kind: str = "words") -> bytes:
    rng = np.random.default_rng(count)
    match kind:
        case "zeros":
            return bytes(count)
        case "noise":
            return rng.bytes(count)
    return bytes(rng.choice(np.frombuffer(b"abcd", np.uint8), count))


# -- frames


@pytest.mark.parametrize("kind", ["zeros", "noise", "words"])
@pytest.mark.parametrize("count", [1, 2, 255, 256, 65_791, 65_792, 1 << 17, (1 << 17) + 1, 3 << 20])
def test_a_frame_of_any_writer_is_read(kind: str, count: int) -> None:
    raw = values(count, kind)
    for level in (-5, 1, 9):
        for checksum in (False, True):
            frame = zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(raw)
            assert inflated(frame, count) == raw


def frame_of(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(raw)


def by_hand(content_bytes: int, blocks: bytes, window_log: int = 20, descriptor: int = 0) -> bytes:
    """A frame with a window descriptor and the content size in eight bytes."""
    head = b"\x28\xb5\x2f\xfd" + bytes([0b1100_0000 | descriptor, (window_log - 10) << 3])
    return head + struct.pack("<Q", content_bytes) + blocks


def block(kind: int, size: int, content: bytes, last: bool = True) -> bytes:
    return struct.pack("<I", size << 3 | kind << 1 | last)[:3] + content


RAW = values(1000)
SKIPPABLE = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"skip"
ONE_BYTE = block(0, 1, b"x")
BAD_FRAMES = {
    "nothing": b"",
    "noise": values(500, "noise"),
    "longer than the chunk": frame_of(RAW + b"!"),
    "shorter than the chunk": frame_of(RAW[:-1]),
    "empty": frame_of(b""),
    "no length": zstandard.ZstdCompressor(level=1, write_content_size=False).compress(RAW),
    "trailing garbage": frame_of(RAW) + b"x",
    "trailing zeros": frame_of(RAW) + bytes(3),
    "two frames": frame_of(RAW) * 2,
    "an empty frame behind": frame_of(RAW) + frame_of(b""),
    "a frame to be skipped behind": frame_of(RAW) + SKIPPABLE,
    "a frame to be skipped before": SKIPPABLE + frame_of(RAW),
    "a frame to be skipped": SKIPPABLE,
    "two halves": frame_of(RAW[:500]) + frame_of(RAW[500:]),
    "cut": frame_of(RAW)[:-1],
    "header only": frame_of(RAW)[:6],
    "bomb that says less": by_hand(1000, block(1, 1 << 17, b"x")),
    "bomb of many blocks": by_hand(1000, block(1, 1 << 17, b"x", last=False) * 99 + ONE_BYTE),
    "one byte more than it says": by_hand(1000, block(0, 1000, RAW, last=False) + ONE_BYTE),
    "one byte less than it says": by_hand(1000, block(0, 999, RAW[:-1])),
    "vast": by_hand(1 << 60, block(0, 1000, RAW)),
    "huge window": by_hand(1000, block(0, 1000, RAW), window_log=31),
    "window beyond any": by_hand(1000, block(0, 1000, RAW), window_log=41),
    "window above ours": by_hand(1000, block(0, 1000, RAW), window_log=24),
    "a dictionary": by_hand(1000, b"", descriptor=1)[:6] + b"\7" + by_hand(1000, b"")[6:] + b"x",
    "a type of block that is none": by_hand(1000, block(3, 1000, RAW)),
    "no last block": by_hand(1000, block(0, 1000, RAW, last=False)),
    "a block that is cut": by_hand(1000, block(0, 1000, RAW[:999])),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_hostile_frames_are_refused(name: str) -> None:
    with pytest.raises(Damaged, match=r"^zstd frame: "):
        inflated(BAD_FRAMES[name], 1000)


def test_the_crafting_itself_is_sound() -> None:
    assert inflated(by_hand(1000, block(0, 1000, RAW), window_log=23), 1000) == RAW
    assert WINDOW_BYTES == 1 << 23
    assert inflated(by_hand(1000, block(1, 1000, b"x")), 1000) == b"x" * 1000
    two = block(0, 400, RAW[:400], last=False) + block(0, 600, RAW[400:])
    assert inflated(by_hand(1000, two), 1000) == RAW


@given(data=st.data())
def test_a_changed_frame_is_refused_or_gives_as_many_bytes(data: st.DataObject) -> None:
    raw = values(data.draw(st.integers(1, 3000)), data.draw(st.sampled_from(["zeros", "words"])))
    frame = bytearray(frame_of(raw))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert len(inflated(bytes(frame), len(raw))) == len(raw)
    except Damaged:
        return


def test_a_refused_frame_leaves_no_trace() -> None:
    """One that stops in the middle, then a good one, with the same decompressor."""
    mine, raw = Inflater(), values(3 << 20)
    frame = memoryview(frame_of(raw))
    first = block(0, 1 << 17, raw[: 1 << 17], last=False)
    broken = memoryview(by_hand(1 << 21, first * 15 + block(2, 50, b"\xff" * 50)))
    for _ in range(3):
        with pytest.raises(Damaged, match=r"^zstd frame: .*"):
            mine.digest(broken, 1 << 21)
        with pytest.raises(Damaged, match=r"^zstd frame: .*"):
            mine.into(memoryview(bytearray(1 << 21)), broken)
        target = bytearray(len(raw))
        mine.into(memoryview(target), frame)
        assert target == raw


# -- images


def image_of(
    arrays: list[ArraySpec], sources: list[np.ndarray], meta: Any = None, tree: bytes = b""
) -> tuple[bytearray, Header]:
    shards = [ShardSpec(i, (0,) * len(spec.shape), spec.shape) for i, spec in enumerate(arrays)]
    plan = image.plan(arrays, shards, {}).with_meta(meta or {}, tree)
    buffer = bytearray(plan.size_bytes)
    return buffer, image.fill(plan, buffer, sources)


def decoded(raw: Any, where: str = "here") -> Header:
    view = memoryview(raw)
    return image.decode(lambda at, n: view[at : at + n], len(view), where)


def mixed_image() -> tuple[bytearray, Header]:
    """Small and large chunks, some that shrink below the size of a page and some that grow."""
    sources = [
        np.frombuffer(values(count, kind), np.uint8)
        for count in (1, 300, 65_530, 65_536, 131_071, 131_072, 200_000)
        for kind in ("zeros", "noise", "words")
    ]
    arrays = [ArraySpec(f"a{i}", "uint8", s.shape, s.shape) for i, s in enumerate(sources)]
    return image_of(arrays, sources, {"step": 7}, b"the tree")


def assert_compressed(raw: bytearray, header: Header, packed: Any, found: Header) -> None:
    """`packed` holds what `raw` holds, chunk by chunk."""
    assert found.compression == "zstd"
    assert (found.meta, found.arrays, found.tree) == (header.meta, header.arrays, header.tree)
    for name in ("array", "grid", "nbytes", "digest"):
        a, b = getattr(found.columns, name), getattr(header.columns, name)
        np.testing.assert_array_equal(a, b)
    before = image.payload_ranges(header).tolist()
    after = image.payload_ranges(found).tolist()
    for row, ((at, length), (start, stored)) in enumerate(zip(before, after, strict=True)):
        frame, behind = packed[start : start + stored - 4], packed[start + stored - 4 :][:4]
        assert struct.unpack("<I", behind)[0] == crc32c.crc32c(frame) == found.columns.crc[row]
        chunk = raw[at : at + length - CRC_BYTES]
        assert inflated(bytes(frame), len(chunk)) == chunk
        assert start % (64 if stored - 4 < 65_536 else PAGE_BYTES) == 0
        image.verify_chunk(found, row, packed[start : start + stored])
        image.verify_chunk(found, row, frame)


@given(data=st.data())
def test_an_image_holds_the_same_compressed(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    arrays, sources = [], []
    for i in range(data.draw(st.integers(0, 5), label="arrays")):
        shape = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4), label="shape"))
        name = data.draw(st.sampled_from(sorted(specs.DTYPES)), label="dtype")
        dtype = dtype_of(name)
        chunk = image.chunk_shape(shape, dtype.itemsize, data.draw(st.sampled_from([8, 99, 9999])))
        arrays.append(ArraySpec(f"p{i}", name, shape, chunk))
        sources.append(rng.integers(0, 2, math.prod(shape)).astype(dtype).reshape(shape))
    raw, header = image_of(arrays, sources, {"n": [1, None]}, b"tree")
    before = bytes(raw)
    made, packed = compressed(header, memoryview(raw), threads=data.draw(st.integers(1, 3)))
    assert raw == before, "the slot was touched"
    found = decoded(packed)
    assert found.digest == made.digest
    assert found.size_bytes == made.size_bytes == len(packed)
    assert_compressed(raw, header, packed, made)
    assert_compressed(raw, header, packed, found)


def test_chunks_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, header = mixed_image()
    packed = None
    for run_bytes in (1, 100_000, 1 << 30):
        monkeypatch.setattr(compressing, "_RUN_BYTES", run_bytes)
        for threads in (1, 2, 5):
            made, found = compressed(header, memoryview(raw), threads)
            assert packed in (None, found.tobytes()), "the same values gave other bytes"
            packed = found.tobytes()
            assert np.frombuffer(found, np.uint8).ctypes.data % PAGE_BYTES == 0
    assert_compressed(raw, header, packed, decoded(packed))
    # Places of both kinds among chunks that were small, and among those that were large.
    longer = made.columns.stored >= 65_536
    assert (longer & (header.columns.nbytes < 65_536)).any()
    assert (~longer & (header.columns.nbytes >= 65_536)).any()
    assert len(packed or b"") < len(raw)


def test_what_is_not_compressed_has_the_bytes_that_it_always_had() -> None:
    sources = [np.arange(12, dtype=np.float32).reshape(4, 3), np.array(5)]
    sources += [np.arange(200_000, dtype=np.uint8), np.zeros((0, 3), dtype_of("int4"))]
    chunks = [(2, 3), (), (100_000,), (1, 3)]
    arrays = [
        ArraySpec(name, source.dtype.name, source.shape, chunk)
        for name, source, chunk in zip(["a", "b.c", "big", "z"], sources, chunks, strict=True)
    ]
    raw, header = image_of(arrays, sources, {"step": 7, "who": "ü"}, b"the tree")
    assert xxhash.xxh3_128_hexdigest(raw) == "b2745db0cfba0fae1976278b453d0c92"
    assert header.digest == "e4b7c60c39a046bb84e8496693d68c47"
    assert header.compression is decoded(raw).compression is None
    assert header.columns.stored is header.columns.nbytes


def test_releases_that_know_only_plain_images_see_another_version() -> None:
    """They compare these four bytes, and read nothing else of a page that they do not know."""
    raw, header = mixed_image()
    packed = bytearray(compressed(header, memoryview(raw))[1])
    assert packed[:8] == raw[:8] == b"LASTGOOD"
    assert struct.unpack_from("<I", raw, 8) == (1,)
    assert struct.unpack_from("<I", packed, 8) == (2,)
    for page in (raw[:PAGE_BYTES], packed[:PAGE_BYTES]):
        assert page[-16:] == xxhash.xxh3_128_digest(bytes(page[:-16]))
    struct.pack_into("<I", packed, 8, 3)
    packed[PAGE_BYTES - 16 : PAGE_BYTES] = xxhash.xxh3_128_digest(bytes(packed[: PAGE_BYTES - 16]))
    with pytest.raises(Unsupported, match="here: image format 3"):
        decoded(packed)


def test_what_cannot_be_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, header = mixed_image()
    made, packed = compressed(header, memoryview(raw))
    with pytest.raises(Misuse, match="image: the image is compressed already"):
        compressed(made, packed)
    with pytest.raises(Damaged, match="image: wanted an image of format 1, found 2"):
        compressed(header, packed)

    def no_room(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(compressing.mmap, "mmap", no_room)
    with pytest.raises(StoreFailed, match="image: no room for a compressed copy of up to"):
        compressed(header, memoryview(raw))


def test_no_frame_is_cut_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressing, "_frames_bound", lambda nbytes: int(nbytes.sum()))
    noise = np.frombuffer(values(200_000, "noise"), np.uint8)
    raw, header = image_of([ArraySpec("a", "uint8", noise.shape, noise.shape)], [noise])
    with pytest.raises(StoreFailed, match="a frame of 200000 bytes is longer than its bound"):
        compressed(header, memoryview(raw))


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(compressing._Press, "run", fail)
    raw, header = mixed_image()
    with pytest.raises(MemoryError, match="planted"):
        compressed(header, memoryview(raw))


# -- hostile tables: digests in order, content not


def resealed(packed: bytes, change: Callable[[np.ndarray, np.ndarray], None]) -> bytes:
    """The image with other columns offset and frame, and digests that are right again."""
    data = bytearray(packed)
    at, length, count = struct.unpack_from("<QQQ", data, 24)
    table = bytearray(data[at : at + length])
    offset = np.frombuffer(table, "<u8", count, 8 * count)
    change(offset, np.frombuffer(table, "<u8", count, 40 * count))
    data[at : at + length] = table
    data[72:88] = xxhash.xxh3_128_digest(bytes(table))
    data[PAGE_BYTES - 16 : PAGE_BYTES] = xxhash.xxh3_128_digest(bytes(data[: PAGE_BYTES - 16]))
    return bytes(data)


def put(column: str, row: int, value: int) -> Callable[[np.ndarray, np.ndarray], None]:
    def change(offset: np.ndarray, frame: np.ndarray) -> None:
        {"offset": offset, "frame": frame}[column][row] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put("frame", 0, 2**64 - 1), "chunk 0 is longer than its image"),
        (put("frame", 1, 2**63), "chunk 1 is longer than its image"),
        (put("frame", 14, 0), "chunk 14 is too short for what it is to hold"),
        (put("frame", 14, 5), "chunk 14 is too short for what it is to hold"),
        (put("frame", 2, 64), "runs into"),
        (put("frame", 1, 70_000), "chunk 1 (starts between|runs into)"),
        (put("offset", 0, 2**64 - 64), "chunk 0 starts outside"),
        (put("offset", 0, 0), "chunk 0 starts outside"),
        (put("offset", 0, PAGE_BYTES + 1), "chunk 0 starts between"),
    ],
)
def test_hostile_tables_are_refused(change: Any, text: str) -> None:
    sources = [np.frombuffer(values(300_000 if i == 14 else 100), np.uint8) for i in range(15)]
    arrays = [ArraySpec(f"a{i}", "uint8", s.shape, s.shape) for i, s in enumerate(sources)]
    raw, header = image_of(arrays, sources)
    packed = compressed(header, memoryview(raw))[1].tobytes()
    assert decoded(resealed(packed, lambda *_: None)).size_bytes == len(packed)
    with pytest.raises(Damaged, match=f"^here: table: .*{text}"):
        decoded(resealed(packed, change))


def test_every_flipped_bit_of_a_compressed_image_is_refused() -> None:
    arrays = [ArraySpec("a", "float32", (4, 3), (2, 3)), ArraySpec("b.c", "int64", (), ())]
    raw, header = image_of(arrays, [np.ones((4, 3), np.float32), np.array(5)], {"step": 7})
    made, packed = compressed(header, memoryview(raw))
    data = bytearray(packed)
    at, length = struct.unpack_from("<QQ", data, 24)
    for byte in (*range(PAGE_BYTES), *range(at, at + length)):
        for bit in range(byte % 3, 8, 3):
            data[byte] ^= 1 << bit
            with pytest.raises(Damaged, match=r"^here: "):
                decoded(data)
            data[byte] ^= 1 << bit
    for row, (start, stored) in enumerate(image.payload_ranges(made).tolist()):
        for bit in range(8 * stored):
            chunk = bytearray(data[start : start + stored])
            chunk[bit // 8] ^= 1 << bit % 8
            with pytest.raises(Damaged, match=r"^image: (a|b\.c), chunk .* wanted CRC-32C"):
                image.verify_chunk(made, row, chunk)
        with pytest.raises(Damaged, match="truncated"):
            image.verify_chunk(made, row, data[start : start + stored - 5])


def test_images_of_one_step_are_compressed_or_not() -> None:
    half = ArraySpec("w", "float32", (4, 4), (2, 4))
    headers = []
    for number in (0, 2):
        plan = image.plan([half], [ShardSpec(0, (number, 0), (2, 4))], {})
        buffer = bytearray(plan.size_bytes)
        header = image.fill(plan, buffer, [np.ones((2, 4), np.float32)])
        headers.append((header, compressed(header, memoryview(buffer))[0]))

    def index(a: int, b: int) -> Any:
        both = [headers[0][a], headers[1][b]]
        return ocdbt.index(both, ["d/p0", "d/p1"], "nodes", uuid=bytes(16), time_ns=1)

    assert b'"zstd"' not in index(0, 0).nodes
    assert b'"zstd"' in index(1, 1).nodes
    with pytest.raises(Damaged, match=r"d/p1 is compressed and d/p0 is not: .*compression="):
        index(0, 1)
    with pytest.raises(Damaged, match="d/p0 is compressed and d/p1 is not"):
        index(1, 0)


def test_cuts_for_a_bucket_go_by_the_frames() -> None:
    raw, header = mixed_image()
    made, packed = compressed(header, memoryview(raw))
    borders = pieces.cuts(made, 100_000)
    assert borders
    spans = image.payload_ranges(made).tolist()
    for border in borders:
        assert 0 < border < len(packed)
        assert not any(start < border < start + length for start, length in spans)

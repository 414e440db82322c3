"""Damaged and hostile images: every flipped bit, every cut, headers with digests in order."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from image_cases import PAGE, decoded, small_image

from ckpt import image
from ckpt.errors import Damaged, Unsupported
from ckpt.table import MAGIC


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

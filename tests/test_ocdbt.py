"""The OCDBT index: against published bytes, a plain encoder, and TensorStore's reader and dump."""

from __future__ import annotations

import json
import math
import random
import struct
from dataclasses import replace
from typing import Any

import crc32c
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from plain_ocdbt import (
    TIME_NS,
    UUID,
    Child,
    Place,
    column,
    entries_of,
    in_memory,
    interior,
    leaf,
    plain_encode,
    read_all,
    walk,
)

from ckpt import btree, image, ocdbt
from ckpt.btree import Entries
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.specs import ArraySpec, ShardSpec, dtype_of

# -- the bytes


def test_worked_example_of_one_leaf() -> None:
    values = {b"k/a": b"hi", b"k/b": ("images/p0", 4096, 3)}
    database = btree.encode(entries_of(values), "index", UUID, TIME_NS)
    assert database.nodes == bytes.fromhex(
        "0cdb20de 3000000000000000 00 00 00 01 09 00 696d616765732f7030"
        "02 02 03 01 6b2f61 62 02 03 00 01 00 8020 6869 1a5392a6"
    )
    assert database.manifest == bytes.fromhex(
        "0cdb3a2a 4900000000000000 00 00 000102030405060708090a0b0c0d0e0f"
        "00 8008 80c2d72f 04 01 00000000 01 05 00 696e646578 01 01 00"
        "00 00 30 02 30 03 000064a7b3b6e00d 00 4122dfbe"
    )


def test_plain_encoder_gives_the_worked_example_of_three_nodes() -> None:
    """The oracle below against published bytes; ours leaves no prefix out (all bytes differ)."""
    first = leaf([(b"a", b"hi")])
    second = leaf([(b"b", ("images/p0", 4096, 3))])
    children = [Child(b"k/a", 0, 27, 1, 27, 0), Child(b"k/b", 27, 39, 1, 39, 3)]
    root = interior(1, b"index2", children, excluded=2)
    assert first + second + root == bytes.fromhex(
        "0cdb20de1b00000000000000 0000  00 00 01 01 61 02 00 6869  5d37f541"
        "0cdb20de2700000000000000 0000  00 01 09 00 696d616765732f7030 01 01 62"
        "03 01 00 8020  0eeb160f"
        "0cdb20de3200000000000000 0000  01 01 06 00 696e64657832 02"
        "02  03 01  02 02  6b2f61 62  00 00  00 1b  1b 27  01 01  1b 27  00 03  728540d4"
    )


KEYS = st.one_of(
    st.binary(max_size=6),
    st.text("ab./0", max_size=12).map(str.encode),
    st.integers(0, 40).map(lambda i: b"params.layer_%d/c/0" % i),
    st.integers(120, 132).map(lambda n: b"long" * n),
)
PATHS = st.sampled_from(["d/a1-p0.image", "d/a1-p1.image", "d/a1-p10.image", "x y/\u00e9%", "0"])
VALUES = st.one_of(
    st.binary(max_size=5),
    st.tuples(PATHS, st.integers(0, 300), st.integers(0, 200)),
)


@given(
    values=st.dictionaries(KEYS, VALUES, max_size=30),
    leaf_keys=st.integers(1, 9),
    fan_out=st.integers(2, 5),
    seed=st.integers(0, 99),
)
def test_equals_the_plain_encoder_and_tensorstore_reads_it(
    values: dict[bytes, bytes | Place], leaf_keys: int, fan_out: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(btree, "LEAF_KEYS", leaf_keys)
        patch.setattr(btree, "FAN_OUT", fan_out)
        database = btree.encode(entries_of(values, seed), "nodes", UUID, TIME_NS)
    assert database == plain_encode(values, "nodes", leaf_keys, fan_out)

    files = {
        value[0]: random.Random(value[0]).randbytes(500)
        for value in values.values()
        if isinstance(value, tuple)
    }
    raw, store = in_memory(database, files)
    assert read_all(store) == {
        key: value if isinstance(value, bytes) else files[value[0]][value[1] :][: value[2]]
        for key, value in values.items()
    }
    manifest = ts.ocdbt.dump(raw).result()
    (version,) = manifest["versions"]
    assert manifest["config"]["uuid"] == UUID.hex()
    assert version["commit_time"] == TIME_NS
    if values:
        assert walk(raw, version["root"], version["root_height"]) == values
    else:
        assert "location" not in version["root"]
        assert database.nodes == b""


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_varints(values: list[int]) -> None:
    edges = [edge for bits in range(7, 64, 7) for edge in (2**bits - 1, 2**bits)]
    for some in (values, edges, edges[:2]):
        assert btree._varints(np.array(some, np.uint64)) == column(some)


def test_many_keys_make_three_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(btree, "FAN_OUT", 3)
    values: dict[bytes, bytes | Place] = {
        b"params.layer_%d/c/%d" % (i % 300, i): (f"d/a1-p{i % 7}.image", 4096 * i, 4100)
        for i in range(5 * btree.LEAF_KEYS + 1)
    }
    database = btree.encode(entries_of(values), "nodes", UUID, TIME_NS)
    assert database == plain_encode(values, "nodes", 4096, 3)
    raw, store = in_memory(database, {})
    (version,) = ts.ocdbt.dump(raw).result()["versions"]
    assert version["root_height"] == 2
    assert walk(raw, version["root"], 2) == values
    assert sorted(store.list().result()) == sorted(values)


def test_every_flipped_bit_of_an_index_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(btree, "LEAF_KEYS", 1)
    values: dict[bytes, bytes | Place] = {b"k/a": b"hi", b"k/b": ("p0", 40, 3)}
    whole = btree.encode(entries_of(values), "nodes", UUID, TIME_NS)
    unnoticed = []
    for name in ("manifest", "nodes"):
        content = getattr(whole, name)
        for bit in range(8 * len(content)):
            broken = bytearray(content)
            broken[bit // 8] ^= 1 << bit % 8
            _, store = in_memory(whole._replace(**{name: bytes(broken)}), {"p0": bytes(99)})
            try:
                read_all(store)
            except ValueError:
                continue
            unnoticed.append((name, bit))
    assert not unnoticed


# -- refused


GOOD = Entries(
    keys=[b"k", b"l"],
    files=["d/p0"],
    file=np.array([0, -1]),
    offset=np.array([0, 0], np.uint64),
    length=np.array([3, 0], np.uint64),
    inline=[b"hi"],
)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/d/p0", "d//p0", "d/p0/", "d/./p0", "../p0", "d/..", "d/p\0", "d/p.__lock"),
        *("\ud800", "p" * 65_536),
    ],
)
def test_refuses_paths_that_readers_refuse(path: str) -> None:
    with pytest.raises(Misuse, match="wanted a relative path of at most 65535 bytes"):
        btree.encode(replace(GOOD, files=[path]), "nodes", UUID, TIME_NS)
    with pytest.raises(Misuse, match="wanted a relative path of at most 65535 bytes"):
        btree.encode(GOOD, path, UUID, TIME_NS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"keys": [b"k", b"k"]}, "key b'k' stands in two rows"),
        ({"keys": [b"k", b"l" * 65_536]}, "wanted at most 65535 bytes, found 65536"),
        ({"keys": [b"k"]}, "wanted columns of 1 rows like the keys"),
        ({"inline": []}, "wanted 1 inline values and files below 1, found 0 values"),
        ({"files": []}, "wanted 1 inline values and files below 0"),
        ({"inline": [bytes(2**20 + 1)]}, "at most 1 MiB in a leaf, found 1048577"),
        ({"files": ["d/p0", "d/p0"]}, "data file 'd/p0' is listed twice"),
        ({"length": np.array([2**63, 0], np.uint64)}, "key b'k': wanted a value that ends below"),
        ({"offset": np.array([2**63 - 3, 0], np.uint64)}, "key b'k': wanted a value that ends"),
    ],
)
def test_refuses_entries_that_readers_refuse(change: dict[str, Any], text: str) -> None:
    with pytest.raises(Misuse, match=text):
        btree.encode(replace(GOOD, **change), "nodes", UUID, TIME_NS)


def test_takes_what_is_just_within_the_limits() -> None:
    entries = replace(
        GOOD,
        keys=[b"k", b"l" * 65_535],
        offset=np.array([2**63 - 4, 0], np.uint64),
        inline=[bytes(2**20)],
    )
    raw, store = in_memory(btree.encode(entries, "nodes", UUID, TIME_NS), {})
    (version,) = ts.ocdbt.dump(raw).result()["versions"]
    assert walk(raw, version["root"], 0)[b"k"] == ("d/p0", 2**63 - 4, 3)
    assert store.read(b"l" * 65_535).result().value == bytes(2**20)


@pytest.mark.parametrize(("uuid", "time_ns"), [(b"short", 0), (UUID, -1), (UUID, 2**64)])
def test_refuses_what_no_manifest_holds(uuid: bytes, time_ns: int) -> None:
    with pytest.raises(Misuse, match="wanted a uuid of 16 bytes and a time of"):
        btree.encode(GOOD, "nodes", uuid, time_ns)


# -- the index of images


ARRAYS = (
    ArraySpec("w", "float32", (8, 6), (2, 3)),
    ArraySpec("b", "int32", (4,), (4,)),
    ArraySpec("scalar", "bool", (), ()),
    ArraySpec("none", "float32", (0, 3), (1, 3)),
    ArraySpec("a/", "uint8", (2, 2, 2), (1, 1, 2)),
    ArraySpec("", "bfloat16", (2,), (1,)),
)
SHARDS = (
    (ShardSpec(0, (0, 0), (4, 6)), ShardSpec(1, (0,), (4,)), ShardSpec(4, (0, 0, 0), (1, 2, 2))),
    (ShardSpec(2, (), ()), ShardSpec(5, (0,), (2,))),
    (ShardSpec(0, (4, 0), (4, 6)), ShardSpec(4, (1, 0, 0), (1, 2, 2))),
)
PATHS_OF_IMAGES = [f"d/a1-p{process}.image" for process in range(3)]


def make_image(arrays: tuple[ArraySpec, ...], shards: tuple[ShardSpec, ...]) -> tuple[Any, bytes]:
    plan = image.plan(arrays, shards, {})
    buffer = bytearray(plan.size_bytes)
    sources = []
    for shard in shards:
        dtype = dtype_of(arrays[shard.array].dtype)
        values = np.arange(math.prod(shard.shape)) + sum(shard.start) + 1
        sources.append(values.reshape(shard.shape).astype(dtype))
    return image.fill(plan, buffer, sources), bytes(buffer)


def test_index_of_three_images() -> None:
    headers, contents = zip(*(make_image(ARRAYS, shards) for shards in SHARDS), strict=True)
    database = ocdbt.index(headers, PATHS_OF_IMAGES, "nodes", uuid=UUID, time_ns=TIME_NS)
    raw, store = in_memory(database, dict(zip(PATHS_OF_IMAGES, contents, strict=True)))
    found = read_all(store)
    wanted = {
        b"w/zarr.json", b"b/zarr.json", b"scalar/zarr.json", b"none/zarr.json", b"a/zarr.json",
        b"zarr.json", b"b/c/0", b"scalar/c", b"c/0", b"c/1",
        *(b"w/c/%d/%d" % (i, j) for i in range(4) for j in range(2)),
        *(b"a/c/%d/%d/0" % (i, j) for i in range(2) for j in range(2)),
    }  # fmt: skip
    assert set(found) == wanted
    for key, value in found.items():
        if not key.endswith(b"zarr.json"):
            assert struct.unpack("<I", value[-4:]) == (crc32c.crc32c(value[:-4]),), key
    assert found[b"scalar/c"][:-4] == b"\1"
    assert (
        found[b"w/c/3/1"][:-4]
        == np.array([[k + 5 for k in row] for row in ((15, 16, 17), (21, 22, 23))], "<f4").tobytes()
    )
    (version,) = ts.ocdbt.dump(raw).result()["versions"]
    for key, value in walk(raw, version["root"], 0).items():
        assert isinstance(value, bytes) == key.endswith(b"zarr.json"), key

    # Images that list only what they hold, in another order, make the same index.
    order = [2, 0, 1]
    own = []
    for at in order:
        held = sorted({shard.array for shard in SHARDS[at]}, reverse=True)
        held += [3] if at == 1 else []
        arrays = tuple(ARRAYS[number] for number in held)
        own.append(
            replace(
                headers[at],
                arrays=arrays,
                columns=replace(
                    headers[at].columns,
                    array=np.array([held.index(n) for n in headers[at].columns.array], "<u4"),
                ),
            )
        )
    paths = [PATHS_OF_IMAGES[at] for at in order]
    assert ocdbt.index(own, paths, "nodes", uuid=UUID, time_ns=TIME_NS) == database


def test_index_of_no_arrays() -> None:
    header, content = make_image((), ())
    database = ocdbt.index([header], ["p0"], "nodes", uuid=UUID, time_ns=TIME_NS)
    assert database == plain_encode({}, "nodes", 4096, 1024)
    _, store = in_memory(database, {"p0": content})
    assert read_all(store) == {}


def test_index_refuses_incomplete_and_contradicting_images() -> None:
    headers = [make_image(ARRAYS, shards)[0] for shards in SHARDS]

    def index(some: list[Any], paths: list[str]) -> None:
        ocdbt.index(some, paths, "nodes", uuid=UUID, time_ns=TIME_NS)

    with pytest.raises(Misuse, match="wanted 3 paths, one per image; found 1"):
        index(headers, ["p0"])
    with pytest.raises(Damaged, match="array 'w': wanted 8 chunks, found 4 in 2 images"):
        index(headers[:2], PATHS_OF_IMAGES[:2])
    with pytest.raises(Damaged, match="array 'w': wanted 8 chunks, found 12 in 4 images"):
        index([*headers, headers[0]], [*PATHS_OF_IMAGES, "d/a1-p3.image"])

    swapped = make_image(ARRAYS, (ShardSpec(0, (0, 0), (4, 6)), *SHARDS[2][1:]))[0]
    twice = r"array 'w': wanted chunk \(0, 0\) once, found it in d/a1-p0.image and d/a1-p2.image"
    with pytest.raises(Damaged, match=twice):
        index([*headers[:2], swapped], PATHS_OF_IMAGES)

    other = make_image((ARRAYS[0]._replace(dtype="int32"), *ARRAYS[1:]), SHARDS[2])[0]
    with pytest.raises(
        Damaged, match=r"array 'w': wanted the same in every image, found .*float32"
    ):
        index([*headers[:2], other], PATHS_OF_IMAGES)

    slashes = (ArraySpec("a", "int8", (), ()), ArraySpec("a/", "int8", (), ()))
    header = make_image(slashes, (ShardSpec(0, (), ()), ShardSpec(1, (), ())))[0]
    with pytest.raises(Misuse, match="arrays 'a' and 'a/' have the same keys"):
        index([header], ["p0"])


def test_zarr_metadata() -> None:
    assert json.loads(ocdbt.zarr_metadata(ARRAYS[0])) == {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [8, 6],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "fill_value": 0.0,
    }
    with pytest.raises(Unsupported, match="uint4"):
        ocdbt.zarr_metadata(ArraySpec("x", "uint4", (), ()))

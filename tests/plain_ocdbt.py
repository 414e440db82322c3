"""OCDBT the plain way: an encoder that goes entry by entry, and TensorStore as the reader.

The oracle of the tests of `ckpt.btree` and `ckpt.ocdbt`; shares no code with them.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import crc32c
import numpy as np
import tensorstore as ts

from ckpt.btree import Database, Entries

UUID = bytes(range(16))
TIME_NS = 10**18

Place = tuple[str, int, int]
"""A value in a data file: path, offset, length."""


def entries_of(values: Mapping[bytes, bytes | Place], seed: int = 0) -> Entries:
    """Columns in a random order of rows and files."""
    rows, order = list(values.items()), random.Random(seed)
    order.shuffle(rows)
    files = sorted({value[0] for value in values.values() if isinstance(value, tuple)})
    order.shuffle(files)
    places = [value if isinstance(value, tuple) else ("", 0, 0) for _, value in rows]
    return Entries(
        keys=[key for key, _ in rows],
        files=files,
        file=np.array([files.index(path) if path else -1 for path, _, _ in places], np.int64),
        offset=np.array([offset for _, offset, _ in places], np.uint64),
        length=np.array([length for _, _, length in places], np.uint64),
        inline=[value for _, value in rows if isinstance(value, bytes)],
    )


# -- the format, one field and one entry at a time


def varint(value: int) -> bytes:
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + varint(value >> 7)


def column(values: Iterable[int]) -> bytes:
    return b"".join(map(varint, values))


def frame(magic: str, body: bytes) -> bytes:
    head = bytes.fromhex(magic) + struct.pack("<Q", len(body) + 18) + b"\0\0"
    return head + body + struct.pack("<I", crc32c.crc32c(head + body))


def shared(names: list[bytes]) -> list[int]:
    counts = []
    for before, after in itertools.pairwise(names):
        count = 0
        while before[: count + 1] == after[: count + 1] and count < min(len(before), len(after)):
            count += 1
        counts.append(count)
    return counts


def rests(names: list[bytes]) -> list[bytes]:
    return [name[cut:] for name, cut in zip(names, [0, *shared(names)], strict=False)]


def table(names: list[bytes]) -> bytes:
    suffixes = rests(names)
    lengths = column(map(len, suffixes))
    return (
        varint(len(names))
        + column(shared(names))
        + lengths
        + bytes(len(names))
        + b"".join(suffixes)
    )


def leaf(rows: list[tuple[bytes, bytes | Place]]) -> bytes:
    keys = [key for key, _ in rows]
    places = [value for _, value in rows if isinstance(value, tuple)]
    files = sorted({path.encode() for path, _, _ in places})
    return frame(
        "0cdb20de",
        b"\0"
        + table(files)
        + varint(len(rows))
        + column(shared(keys))
        + column(map(len, rests(keys)))
        + b"".join(rests(keys))
        + column(value[2] if isinstance(value, tuple) else len(value) for _, value in rows)
        + bytes(isinstance(value, tuple) for _, value in rows)
        + column(files.index(path.encode()) for path, _, _ in places)
        + column(offset for _, offset, _ in places)
        + b"".join(value for _, value in rows if isinstance(value, bytes)),
    )


@dataclass
class Child:
    first: bytes
    offset: int
    size: int
    keys: int
    tree_bytes: int
    indirect: int


def interior(height: int, node_file: bytes, children: list[Child], excluded: int = 0) -> bytes:
    keys = [child.first for child in children]
    return frame(
        "0cdb20de",
        bytes([height])
        + table([node_file])
        + varint(len(children))
        + column(shared(keys))
        + column(map(len, rests(keys)))
        + column(excluded for _ in children)
        + b"".join(rests(keys))
        + bytes(len(children))
        + column(child.offset for child in children)
        + column(child.size for child in children)
        + column(child.keys for child in children)
        + column(child.tree_bytes for child in children)
        + column(child.indirect for child in children),
    )


def plain_encode(
    values: Mapping[bytes, bytes | Place], node_file: str, leaf_keys: int, fan_out: int
) -> Database:
    """What `btree.encode` must give, without columns."""
    nodes, height, level = b"", 0, []
    rows = sorted(values.items())
    for at in range(0, len(rows), leaf_keys):
        part = rows[at : at + leaf_keys]
        node = leaf(part)
        indirect = sum(value[2] for _, value in part if isinstance(value, tuple))
        level.append(Child(part[0][0], len(nodes), len(node), len(part), len(node), indirect))
        nodes += node
    while len(level) > 1:
        height += 1
        above = []
        for at in range(0, len(level), fan_out):
            below = level[at : at + fan_out]
            node = interior(height, node_file.encode(), below)
            total = [sum(getattr(child, name) for child in below) for name in ("keys", "indirect")]
            tree_bytes = sum(child.tree_bytes for child in below) + len(node)
            above.append(
                Child(below[0].first, len(nodes), len(node), total[0], tree_bytes, total[1])
            )
            nodes += node
        level = above
    root = level[0] if level else Child(b"", 2**64 - 1, 2**64 - 1, 0, 0, 0)
    body = (
        UUID
        + bytes.fromhex("00 8008 80c2d72f 04 01 00000000")
        + table([node_file.encode()])
        + bytes([1, 1, height, 0])
        + column([root.offset, root.size, root.keys, root.tree_bytes, root.indirect])
        + struct.pack("<Q", TIME_NS)
        + b"\0"
    )
    return Database(frame("0cdb3a2a", body), nodes)


# -- TensorStore as reader


def in_memory(database: Database, files: Mapping[str, bytes]) -> tuple[ts.KvStore, ts.KvStore]:
    """The raw store that holds the files, and the key-value store that they make."""
    context = ts.Context()
    raw = ts.KvStore.open("memory://", context=context).result()
    for path, content in files.items():
        raw[path] = content
    raw["nodes"], raw["manifest.ocdbt"] = database.nodes, database.manifest
    store = ts.KvStore.open({"driver": "ocdbt", "base": "memory://"}, context=context).result()
    return raw, store


def read_all(store: ts.KvStore) -> dict[bytes, bytes]:
    return {key: store.read(key).result().value for key in store.list().result()}


def walk(raw: ts.KvStore, node: dict[str, Any], height: int) -> dict[bytes, bytes | Place]:
    """All entries below a node as TensorStore's dump shows them; statistics are checked."""
    found: dict[bytes, bytes | Place] = {}
    dumped = ts.ocdbt.dump(raw, node["location"]).result()
    assert dumped["height"] == height
    tree_bytes = int(node["location"].rsplit(":", 1)[1])
    for entry in dumped["entries"]:
        if height:
            found.update(walk(raw, entry, height - 1))
            tree_bytes += entry["statistics"]["num_tree_bytes"]
        elif "inline_value" in entry:
            found[entry["key"]] = entry["inline_value"]
        else:
            path, offset, length = entry["indirect_value"].removeprefix("value::").rsplit(":", 2)
            found[entry["key"]] = (unquote(path), int(offset), int(length))
    assert node["statistics"] == {
        "num_keys": len(found),
        "num_tree_bytes": tree_bytes,
        "num_indirect_value_bytes": sum(v[2] for v in found.values() if isinstance(v, tuple)),
    }
    return found

"""Keys and values to the bytes of an OCDBT database: a manifest and the nodes of a B+tree.

OCDBT is TensorStore's key-value store on plain files: the manifest names the root of the tree, a
leaf says for each key in which file, at which offset, its value lies. Columns of a node are
encoded with NumPy, one leaf at a time. Pure and deterministic: no clock, no random names.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from awscrt import checksums

from ckpt.errors import Misuse

LEAF_KEYS = 4096
"""Keys in a leaf. Readers decode a whole leaf to find one key."""

FAN_OUT = 1024
"""Children of an interior node."""

MAX_NAME_BYTES = 65_535
"""Longest key, and longest path of a data file, that readers accept."""

MAX_INLINE_BYTES = 1 << 20
"""Longest value inside a leaf that readers accept."""

MAX_END = (1 << 63) - 1
"""Largest offset + length of a value that readers accept."""

_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_BODY_AT = 4 + 8 + 2  # of a frame: behind magic, length, version and compression
_TAIL_BYTES = 8 + 1 + 4  # of a manifest: time, no version nodes, CRC-32C

# What Orbax's writer asks for, so that it may open the database with its own settings: a single
# manifest, inline up to 1,024 bytes, nodes up to 100,000,000, 2^4 versions a node, zstd level 0.
_SETTINGS = bytes.fromhex("00 8008 80c2d72f 04 01 00000000")


class Database(NamedTuple):
    """The two files of a database."""

    manifest: bytes
    """`manifest.ocdbt`. Written last, it is the commit of the key-value store."""
    nodes: bytes
    """All nodes of the B+tree: leaves in key order, then each interior level, the root last."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Keys and where their values are: one row per key, in any order."""

    keys: Sequence[bytes]
    files: Sequence[str]
    """Data files, relative to the folder of the manifest; each name once."""
    file: npt.NDArray[np.int64]
    """Position in `files`; -1 for a value inside the leaf."""
    offset: npt.NDArray[np.uint64]
    """First byte of the value in its file. Nothing for values inside the leaf."""
    length: npt.NDArray[np.uint64]
    """Bytes of the value. Nothing for values inside the leaf."""
    inline: Sequence[bytes] = ()
    """The values inside the leaf, in the order of their rows."""


class _Node(NamedTuple):
    """What a parent, or the manifest, says about a node."""

    first_key: bytes
    height: int
    offset: int
    size_bytes: int
    keys: int
    tree_bytes: int
    """Size of all nodes below, this one included."""
    indirect_bytes: int
    """Sum of the lengths of all values below that lie in data files."""


_NO_ROOT = _Node(b"", 0, 2**64 - 1, 2**64 - 1, 0, 0, 0)


def encode(entries: Entries, node_file: str, uuid: bytes, time_ns: int) -> Database:
    """The files of a database that holds `entries`; `node_file` is where its nodes will lie.

    The same entries in another order give the same bytes. Without entries there are no nodes.

    Raises:
        Misuse: what readers refuse: a key twice or longer than 65,535 bytes, a value inside a
            leaf above 1 MiB, one in a file that ends beyond 2^63-1, a path with an empty, `.` or
            `..` component or a NUL; and columns that do not fit each other.
    """
    if len(uuid) != 16 or not 0 <= time_ns < 2**64:
        raise Misuse(
            f"index: wanted a uuid of 16 bytes and a time of 0..2^64-1 ns, found {len(uuid)} bytes"
            f" and {time_ns}"
        )
    node_name = _path_bytes(node_file)
    level, frames = _leaves(_in_order(entries))
    end = sum(map(len, frames))
    while len(level) > 1:
        children = [level[at : at + FAN_OUT] for at in range(0, len(level), FAN_OUT)]
        level = []
        for group in children:
            frames.append(_interior(group, node_name))
            level.append(_parent(group, end, len(frames[-1])))
            end += len(frames[-1])
    root = level[0] if level else _NO_ROOT
    body = (
        uuid,
        _SETTINGS,
        _file_table([node_name]),
        _varints([1, 1]),  # one version, generation 1
        bytes([root.height]),
        _varints([0, root.offset, root.size_bytes]),
        _varints([root.keys, root.tree_bytes, root.indirect_bytes]),
        struct.pack("<Q", time_ns),
        b"\0",  # no version nodes
    )
    return Database(_frame(_MANIFEST_MAGIC, body), b"".join(frames))


def renewed(database: Database, uuid: bytes, time_ns: int) -> Database:
    """The same entries under another uuid and time, as `encode` would give them."""
    body = database.manifest[_BODY_AT + len(uuid) : -_TAIL_BYTES]
    parts = (uuid, body, struct.pack("<Q", time_ns), b"\0")
    return Database(_frame(_MANIFEST_MAGIC, parts), database.nodes)


# -- entries to nodes


def _in_order(entries: Entries) -> Entries:
    """The same entries, checked: keys and files in bytewise order, all lengths filled in."""
    keys, count = entries.keys, len(entries.keys)
    file = np.asarray(entries.file, np.int64)
    inline = file < 0
    if not count == len(file) == len(entries.offset) == len(entries.length):
        raise Misuse(f"index: wanted columns of {count} rows like the keys, found other lengths")
    if inline.sum() != len(entries.inline) or np.any(file >= len(entries.files)):
        raise Misuse(
            f"index: wanted {inline.sum()} inline values and files below {len(entries.files)},"
            f" found {len(entries.inline)} values and files up to {file.max(initial=-1)}"
        )
    offset, length = np.array(entries.offset, np.uint64), np.array(entries.length, np.uint64)
    length[inline] = _lengths(entries.inline)
    key_bytes = _lengths(keys)

    def refuse(bad: npt.NDArray[np.bool_], wanted: str, found: npt.NDArray[np.uint64]) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            raise Misuse(f"index: key {keys[row][:200]!r}: wanted {wanted}, found {found[row]}")

    refuse(key_bytes > MAX_NAME_BYTES, f"at most {MAX_NAME_BYTES} bytes", key_bytes)
    refuse(inline & (length > MAX_INLINE_BYTES), "a value of at most 1 MiB in a leaf", length)
    refuse(~inline & (length > MAX_END), "a value that ends below 2^63", length)
    room = np.uint64(MAX_END) - np.minimum(length, np.uint64(MAX_END))
    refuse(~inline & (offset > room), "a value that ends below 2^63", offset)

    names = [_path_bytes(path) for path in entries.files]
    by_name = sorted(range(len(names)), key=names.__getitem__)
    for before, after in pairwise(by_name):
        if names[before] == names[after]:
            raise Misuse(f"index: data file {entries.files[after]!r} is listed twice")
    new_number = np.full(len(names) + 1, -1)  # its last row answers for -1
    new_number[by_name] = np.arange(len(names))

    by_key = sorted(range(count), key=keys.__getitem__)
    sorted_keys = [keys[row] for row in by_key]
    if any(map(bytes.__eq__, sorted_keys, islice(sorted_keys, 1, None))):
        twice = next(key for key, after in pairwise(sorted_keys) if key == after)
        raise Misuse(f"index: key {twice[:200]!r} stands in two rows; wanted each once")
    order = np.array(by_key, np.int64)
    value = (np.cumsum(inline) - 1)[order][inline[order]]
    return Entries(
        keys=sorted_keys,
        files=[entries.files[number] for number in by_name],
        file=new_number[np.maximum(file, -1)][order],
        offset=offset[order],
        length=length[order],
        inline=[entries.inline[number] for number in value.tolist()],
    )


def _leaves(entries: Entries) -> tuple[list[_Node], list[bytes]]:
    """Leaves of ordered entries: what parents say of them, and their bytes."""
    names = [_path_bytes(path) for path in entries.files]
    nodes: list[_Node] = []
    frames: list[bytes] = []
    end = inline_end = 0
    for start in range(0, len(entries.keys), LEAF_KEYS):
        rows = slice(start, start + LEAF_KEYS)
        keys, file, length = entries.keys[rows], entries.file[rows], entries.length[rows]
        reference = file >= 0
        inline_start, inline_end = inline_end, inline_end + int((~reference).sum())
        used, numbers = np.unique(file[reference], return_inverse=True)
        body = (
            b"\0",  # height
            _file_table([names[number] for number in used.tolist()]),
            _varints([len(keys)]),
            *_compressed(keys),
            _varints(length),
            reference.astype(np.uint8).tobytes(),
            _varints(numbers),
            _varints(entries.offset[rows][reference]),
            *entries.inline[inline_start:inline_end],
        )
        frames.append(_frame(_NODE_MAGIC, body))
        size = len(frames[-1])
        indirect = int(length[reference].sum())
        nodes.append(_Node(keys[0], 0, end, size, len(keys), size, indirect))
        end += size
    return nodes, frames


def _interior(children: Sequence[_Node], node_name: bytes) -> bytes:
    keys = [child.first_key for child in children]
    shared, rest, suffixes = _compressed(keys)
    body = (
        bytes([children[0].height + 1]),
        _file_table([node_name]),
        _varints([len(children)]),
        shared,
        rest,
        bytes(len(children)),  # nothing is left out of the keys below
        suffixes,
        bytes(len(children)),  # all in the one file
        _varints([child.offset for child in children]),
        _varints([child.size_bytes for child in children]),
        _varints([child.keys for child in children]),
        _varints([child.tree_bytes for child in children]),
        _varints([child.indirect_bytes for child in children]),
    )
    return _frame(_NODE_MAGIC, body)


def _parent(children: Sequence[_Node], offset: int, size_bytes: int) -> _Node:
    return _Node(
        first_key=children[0].first_key,
        height=children[0].height + 1,
        offset=offset,
        size_bytes=size_bytes,
        keys=sum(child.keys for child in children),
        tree_bytes=sum(child.tree_bytes for child in children) + size_bytes,
        indirect_bytes=sum(child.indirect_bytes for child in children),
    )


# -- columns to bytes


def _frame(magic: int, body: Sequence[bytes]) -> bytes:
    """Magic, length of the frame, version 0, compression 0, the body, and a CRC-32C of it all."""
    size = 4 + 8 + 2 + sum(map(len, body)) + 4
    frame = b"".join((struct.pack(">I", magic), struct.pack("<QH", size, 0), *body))
    return frame + struct.pack("<I", checksums.crc32c(frame))


def _varints(values: npt.ArrayLike) -> bytes:
    """A column of unsigned LEB128 integers below 2^64."""
    column = np.asarray(values, np.uint64)
    largest = int(column.max(initial=0))
    if largest < 0x80:
        return column.astype(np.uint8).tobytes()
    groups = -(-largest.bit_length() // 7)
    rest = column[:, None] >> (7 * np.arange(groups, dtype=np.uint64))
    written = rest != 0
    written[:, 0] = True
    groups_of_7 = (rest & np.uint64(0x7F)).astype(np.uint8)
    groups_of_7[:, :-1] |= written[:, 1:].astype(np.uint8) << 7  # more follows
    return groups_of_7[written].tobytes()


def _compressed(keys: Sequence[bytes]) -> tuple[bytes, bytes, bytes]:
    """Keys (or paths) in order, each without what it shares with the one before.

    Three columns: bytes shared (none for the first key), bytes of the rest, and the rests.
    """
    lengths = _lengths(keys).astype(np.int64)
    shared = np.zeros(len(keys), np.int64)
    shared[1:] = np.minimum(lengths[1:], lengths[:-1])
    width = int(shared.max(initial=0))
    if width:
        # Zero-padded rows; where padding agrees with a NUL of the neighbour, the lengths decide.
        table = np.array(keys, f"S{width}").view(np.uint8).reshape(len(keys), width)
        differs = table[1:] != table[:-1]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        shared[1:] = np.minimum(shared[1:], first)
    suffixes = b"".join([key[cut:] for key, cut in zip(keys, shared.tolist(), strict=True)])
    return _varints(shared[1:]), _varints(lengths - shared), suffixes


def _file_table(names: Sequence[bytes]) -> bytes:
    """Data files in order; no base folders."""
    shared, rest, suffixes = _compressed(names)
    return b"".join((_varints([len(names)]), shared, rest, bytes(len(names)), suffixes))


def _lengths(items: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(len, items), np.uint64, len(items))


def _path_bytes(path: str) -> bytes:
    """A relative path of a data file as UTF-8, refused where a reader would refuse it."""
    parts = path.split("/")
    try:
        name = path.encode()
    except UnicodeEncodeError:
        name = b"\0"
    if (
        b"\0" in name
        or len(name) > MAX_NAME_BYTES
        or path.endswith(".__lock")
        or any(part in ("", ".", "..") for part in parts)
    ):
        raise Misuse(
            f"index: data file {path[:200]!r}: wanted a relative path of at most {MAX_NAME_BYTES}"
            " bytes, without NUL, without empty, '.' or '..' components, not ending in '.__lock'"
        )
    return name

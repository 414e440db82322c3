"""The image: one process's share of one step, as one self-describing file.

An arena slot in memory, a file of a local tier and a data file of a step hold the same bytes.
All integers are little-endian; `size_bytes` is a multiple of 4096.

==================== ============================================================================
bytes                content
==================== ============================================================================
0 .. 4096            header page: the fields of `ckpt/table.py`, zeros, and in its last 16 bytes the
                     xxh3-128 of the 4080 bytes before them
4096 .. table        chunks. Those under 64 KiB come first, each at a multiple of 64; then the
                     others, each at a multiple of 4096. Behind every chunk stands its CRC-32C
                     (u32), then zeros up to the next
table .. size_bytes  per chunk: cell u64[n], offset u64[n], digest u8[n,16], array u32[n],
                     crc u32[n], in a compressed image frame u64[n]; then as JSON: the list of
                     arrays, and the meta object; then the tree record, bytes of the caller; then
                     zeros
==================== ============================================================================

`cell` is a chunk's row-major position in the grid of its array. A chunk's length follows from its
array: all chunks are full. The page carries the table's digest and is written last; before a slot
is used again its page is zeroed, so bytes that were only partly written never pass as an image.
Magic, version and the page's own digest keep their places in every later version of the format.

In a **compressed** image (version 2 of the format; all others are version 1) each chunk is stored
as one zstd frame, of `frame` bytes, which is what the CRC is of, and whose length decides where it
may start. `digest` remains that of the chunk: whoever compares values need not know.

Slots are never compressed: `ckpt/compressing.py` makes such an image of one. Nothing read is
trusted: `decode` checks every size, offset and name before it is used. No clock, no device, no
file: callers bring buffers and a `read` function.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Never

import numpy as np
import xxhash
from awscrt import checksums

from ckpt import specs, table
from ckpt.copying import Part, copy_chunks
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.frames import inflater
from ckpt.grid import (
    CRC_BYTES,
    PAGE_BYTES,
    Places,
    cells_of,
    coordinates,
    place_chunks,
    repeated,
    round_up,
)
from ckpt.specs import ArraySpec, ShardSpec
from ckpt.table import COMPRESSED, PLAIN, Columns, Page

CHUNK_LIMIT_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Header:
    """What an image says about itself.

    `tree` is the tree record, opaque here and the same for all snapshots of one structure; what
    is different in each stands in `meta`.
    `size_bytes` is its exact length, `digest` the xxh3-128 (hex) of header page and table, which
    through the chunk digests stands for the whole image; `where` names it in messages.
    """

    meta: dict[str, Any]
    arrays: tuple[ArraySpec, ...]
    columns: Columns
    size_bytes: int
    digest: str
    where: str = "image"
    tree: bytes = field(default=b"", repr=False)

    @property
    def compression(self) -> str | None:
        """ "zstd" for a compressed image, else None."""
        return None if self.columns.frames is None else "zstd"


@dataclass(frozen=True, eq=False)
class Plan:
    """Where everything of an image goes: all but the bytes and their digests.

    The layout depends on arrays and shards alone: `with_meta` gives the plan of the next step.
    """

    arrays: tuple[ArraySpec, ...]
    shards: tuple[ShardSpec, ...]
    first: tuple[int, ...] = field(repr=False)  # first row of each shard, and the number of rows
    array: np.ndarray = field(repr=False)
    cell: np.ndarray = field(repr=False)
    grid: np.ndarray = field(repr=False)
    places: Places = field(repr=False)
    table_offset: int
    arrays_json: bytes = field(repr=False)
    meta_json: bytes = field(repr=False)
    tree: bytes = field(repr=False)

    @property
    def table_bytes(self) -> int:
        """Length of the table, without the zeros behind it."""
        texts = len(self.arrays_json) + len(self.meta_json) + len(self.tree)
        return len(self.array) * table.row_bytes(PLAIN) + texts

    @property
    def size_bytes(self) -> int:
        """Exact length of the image."""
        return round_up(self.table_offset + self.table_bytes, PAGE_BYTES)

    def with_meta(self, meta: dict[str, Any], tree: bytes = b"") -> Plan:
        """The same layout with other meta; cheap. Raises `Misuse` when meta is not JSON."""
        return replace(self, meta_json=_meta_json(meta), tree=tree)


@functools.lru_cache(maxsize=65536)
def chunk_shape(
    shard_shape: tuple[int, ...], itemsize: int, limit_bytes: int = CHUNK_LIMIT_BYTES
) -> tuple[int, ...]:
    """The shape of the chunks a shard is cut into: divides `shard_shape`, cut along leading axes.

    The largest that keeps a chunk within `limit_bytes`. Where that gives only crumbs below 1/64 of
    the limit (a long axis of prime length), the smallest that does not, be it over the limit.
    """
    shape = tuple(max(1, n) for n in shard_shape)
    if 0 in shard_shape or math.prod(shape) * itemsize <= limit_bytes:
        return shape
    for axis, n in enumerate(shape):
        row_bytes = math.prod(shape[axis + 1 :]) * itemsize
        if row_bytes > limit_bytes:
            continue  # a single index of this axis is still too much: cut the next axis as well
        low = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
        divisors = low + [n // k for k in low]
        best = max(k for k in divisors if k * row_bytes <= limit_bytes)
        if best * row_bytes * 64 < limit_bytes:
            best = min((k for k in divisors if k * row_bytes * 64 >= limit_bytes), default=n)
        return (*(1,) * axis, best, *shape[axis + 1 :])
    return (1,) * len(shape)


def plan(arrays: Sequence[ArraySpec], shards: Sequence[ShardSpec], meta: dict[str, Any]) -> Plan:
    """Lay out an image that holds `shards`; pure.

    Raises `Unsupported` when a shard is not made of whole chunks (an uneven sharding), and `Misuse`
    for specs that contradict each other or meta that is not JSON.
    """
    arrays, shards = tuple(arrays), tuple(shards)
    if fault := specs.fault(arrays):
        raise Misuse(fault)
    only = np.zeros(1, np.int64)
    parts = []
    for i, shard in enumerate(shards):
        if not 0 <= shard.array < len(arrays):
            raise Misuse(f"shard {i} is of array {shard.array}; there are {len(arrays)} arrays")
        spec = arrays[shard.array]
        if shard.shape == spec.shape == spec.chunk_shape and not any(shard.start):
            parts.append(only)
            continue
        try:
            parts.append(cells_of(spec.shape, spec.chunk_shape, shard.start, shard.shape))
        except (Misuse, Unsupported) as error:
            raise type(error)(f"{spec.param}: {error}") from error
    counts = np.array([0, *map(len, parts)])
    array = np.repeat(np.array([s.array for s in shards], np.int64), counts[1:])
    cell = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if (row := repeated(array, cell)) is not None:
        name = arrays[array[row]].param
        raise Misuse(f"{name}: two shards hold cell {cell[row]} of its chunks; give each once")
    places, table_offset = place_chunks(np.array([a.chunk_bytes for a in arrays], np.int64)[array])
    return Plan(
        arrays=arrays,
        shards=shards,
        first=tuple(np.cumsum(counts).tolist()),
        array=array.astype("<u4"),
        cell=cell.astype("<u8"),
        grid=coordinates([a.grid for a in arrays], array, cell),
        places=places,
        table_offset=table_offset,
        arrays_json=_json([[a.param, a.dtype, a.shape, a.chunk_shape] for a in arrays]),
        meta_json=_meta_json(meta),
        tree=b"",
    )


def fill(
    plan: Plan,
    buffer: Any,
    sources: Sequence[np.ndarray],
    threads: int = 1,
    *,
    where: str = "image",
) -> Header:
    """Copy `sources`, one array per shard of `plan`, into `buffer` and make it an image.

    `buffer` is writable and at least `plan.size_bytes` long. The header page is cleared first and
    written last. The same plan and the same values give the same bytes. Raises `Misuse` when buffer
    or sources do not fit the plan.
    """
    target = np.frombuffer(buffer, np.uint8)
    if not target.flags.writeable or target.size < plan.size_bytes:
        kind = "" if target.flags.writeable else " read-only"
        raise Misuse(f"{where}: wanted {plan.size_bytes} writable bytes, found {target.size}{kind}")
    _check_sources(plan, sources)
    view = memoryview(target.data)
    view[:PAGE_BYTES] = bytes(PAGE_BYTES)
    parts = (
        Part(source, plan.arrays[shard.array].chunk_shape, first, stop - first)
        for source, shard, first, stop in zip(
            sources, plan.shards, plan.first[:-1], plan.first[1:], strict=True
        )
    )
    digest, crc = copy_chunks(target, parts, plan.places, threads)
    offset = plan.places.offset.astype("<u8")
    columns = (plan.cell, offset, digest, plan.array, crc)
    texts = (plan.arrays_json, plan.meta_json, plan.tree)
    rows = b"".join((*(c.tobytes() for c in columns), *texts))
    stop = plan.table_offset + len(rows)
    view[plan.table_offset : stop] = rows
    view[stop : plan.size_bytes] = bytes(plan.size_bytes - stop)
    page = Page(
        PLAIN,
        plan.size_bytes,
        plan.table_offset,
        plan.table_bytes,
        len(plan.array),
        len(plan.arrays_json),
        len(plan.meta_json),
        len(plan.tree),
        xxhash.xxh3_128_digest(rows),
    ).emit()
    view[:PAGE_BYTES] = page
    return Header(
        meta=json.loads(plan.meta_json),
        arrays=plan.arrays,
        columns=Columns(
            plan.array, plan.grid, offset, plan.places.nbytes.astype("<u8"), digest, crc
        ),
        size_bytes=plan.size_bytes,
        digest=xxhash.xxh3_128_hexdigest(page + rows),
        where=where,
        tree=plan.tree,
    )


def _check_sources(plan: Plan, sources: Sequence[np.ndarray]) -> None:
    if len(sources) != len(plan.shards):
        raise Misuse(f"wanted {len(plan.shards)} sources, one per shard, found {len(sources)}")
    for shard, source in zip(plan.shards, sources, strict=True):
        spec = plan.arrays[shard.array]
        if source.shape != shard.shape or source.dtype != specs.DTYPES[spec.dtype]:
            raise Misuse(
                f"{spec.param}: wanted {spec.dtype}{list(shard.shape)} for the shard at "
                f"{list(shard.start)}, found {source.dtype}{list(source.shape)}"
            )


def decode(read: Callable[[int, int], Any], size_bytes: int, where: str) -> Header:
    """Read header page and table through `read(offset, length)`; chunks: see `verify_chunk`.

    `size_bytes` is what the file or slot holds, at least the image. Raises `Damaged`, naming
    `where`, for anything that `fill` does not write, and `Unsupported` for a newer format.
    """

    def damaged(what: str) -> Never:
        raise Damaged(f"{where}: {what}")

    def fetch(offset: int, length: int, what: str) -> bytes:
        if offset + length > size_bytes:
            damaged(f"{what}: wanted {offset + length} bytes, found {size_bytes}: truncated")
        raw = bytes(read(offset, length))
        if len(raw) != length:
            damaged(f"{what}: wanted {length} bytes at byte {offset}, found {len(raw)}")
        return raw

    raw = fetch(0, PAGE_BYTES, "header page")
    page = table.parse_page(raw, size_bytes, damaged)
    if page.version not in (PLAIN, COMPRESSED):
        raise Unsupported(
            f"{where}: image format {page.version}; this release reads formats {PLAIN} and "
            f"{COMPRESSED}: use a release that knows the newer one"
        )
    rows = fetch(page.table_at, page.table_bytes, "table")
    meta, arrays, columns, tree = table.parse_table(page, rows, damaged)
    digest = xxhash.xxh3_128_hexdigest(raw + rows)
    return Header(meta, arrays, columns, page.size_bytes, digest, where, tree)


def verify_chunk(header: Header, row: int, view: Any) -> None:
    """Check chunk `row`, given as it is stored, with or without the CRC behind it.

    Raises `Damaged`, naming image, array, chunk and place.
    """
    columns = header.columns
    nbytes, stored = int(columns.nbytes[row]), int(columns.stored[row])
    view = memoryview(view).cast("B")
    if len(view) not in (stored, stored + CRC_BYTES):
        raise Damaged(f"{_place(header, row)}: wanted {stored} bytes, found {len(view)}: truncated")
    chunk, behind = view[:stored], view[stored:]

    def check(name: str, column: np.ndarray, found: bytes) -> None:
        if (wanted := column[row].tobytes()) != found:
            raise Damaged(
                f"{_place(header, row)}: wanted {name} {wanted.hex()}, found {found.hex()}"
            )

    if header.compression is None:
        check("digest", columns.digest, xxhash.xxh3_128_digest(chunk))
    else:
        check("CRC-32C", columns.crc, checksums.crc32c(chunk).to_bytes(CRC_BYTES, "little"))
        try:
            digest = inflater().digest(chunk, nbytes)
        except Damaged as error:
            raise Damaged(f"{_place(header, row)}: {error}") from error
        check("digest", columns.digest, digest)
    if behind:
        check("CRC-32C", columns.crc, bytes(behind))


def payload_ranges(header: Header) -> np.ndarray:
    """First byte and length of each chunk as it is stored, with its CRC: i64[n, 2], by row."""
    columns = header.columns
    length = columns.stored + np.uint64(CRC_BYTES)
    return np.stack([columns.offset, length], axis=1).astype(np.int64)


def _place(header: Header, row: int) -> str:
    columns = header.columns
    spec = header.arrays[columns.array[row]]
    at = tuple(columns.grid[row, : len(spec.shape)].tolist())
    return f"{header.where}: {spec.param}, chunk {at} at byte {columns.offset[row]}"


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _meta_json(meta: dict[str, Any]) -> bytes:
    """Meta in the caller's order of keys; NaN and infinities as Python's json writes them."""
    if not isinstance(meta, dict):
        raise Misuse(f"meta: wanted a dict, found {type(meta).__name__}")
    try:
        return _json(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise Misuse(f"meta is no JSON value: {error}") from error

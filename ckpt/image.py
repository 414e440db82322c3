"""The image: one process's share of one step, as one self-describing file.

An arena slot in memory, a file of a local tier and a data file of a step hold the same bytes.
All integers are little-endian; `size_bytes` is a multiple of 4096.

==================== ============================================================================
bytes                content
==================== ============================================================================
0 .. 4096            header page: the fields of `_PAGE`, zeros, and in its last 16 bytes the
                     xxh3-128 of the 4080 bytes before them
4096 .. table        chunks. Those under 64 KiB come first, each at a multiple of 64; then the
                     others, each at a multiple of 4096. Behind every chunk stands its CRC-32C
                     (u32), then zeros up to the next
table .. size_bytes  per chunk: cell u64[n], offset u64[n], digest u8[n,16], array u32[n],
                     crc u32[n]; then as JSON: the list of arrays, and the meta object; then the
                     tree record, bytes of the caller; then zeros
==================== ============================================================================

`cell` is a chunk's row-major position in the grid of its array. A chunk's length follows from its
array: all chunks are full. The page carries the table's digest and is written last; before a slot
is used again its page is zeroed, so bytes that were only partly written never pass as an image.
Magic, version and the page's own digest keep their places in every later version of the format.

Nothing read is trusted: `decode` checks every size, offset and name before it is used. No clock,
no device, no file: callers bring buffers and a `read` function.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Never

import ml_dtypes
import numpy as np
import xxhash

from ckpt.copying import Part, copy_chunks
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.grid import (
    CRC_BYTES,
    PAGE_BYTES,
    Places,
    alignment,
    cells_of,
    coordinates,
    place_chunks,
    repeated,
    round_up,
)

MAGIC = b"LASTGOOD"
VERSION = 1
CHUNK_LIMIT_BYTES = 64 * 2**20

# Magic, version, page size; size_bytes, table offset and length; chunks, length of the list of
# arrays, of meta, of the tree record; xxh3-128 of the table.
_PAGE = struct.Struct("<8sII QQQ QQQQ 16s")
_CHECK_AT = PAGE_BYTES - 16
_ROW_BYTES = 8 + 8 + 16 + 4 + 4
_MAX_DIMENSIONS = 64
_MAX_COUNT = 2**62  # products and sums below this do not wrap in 64 bits

_DTYPE_NAMES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64
    complex128 bfloat16 float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2
    float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn int4 int2
"""
_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _DTYPE_NAMES.split()}


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a storage dtype name; raises `Unsupported` for any other name."""
    if name not in _DTYPES:
        names = ", ".join(_DTYPES)
        raise Unsupported(f"dtype {name!r} cannot be held in an image; wanted one of {names}")
    return _DTYPES[name]


class ArraySpec(NamedTuple):  # made by the thousands
    """A global array as stored. `chunk_shape` divides `shape`; its entries are at least 1."""

    param: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return _grid(self.shape, self.chunk_shape)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, without its CRC."""
        return _chunk_bytes(self.dtype, self.chunk_shape)


# Models have many arrays of one shape.
@functools.lru_cache(maxsize=4096)
def _grid(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n // c for n, c in zip(shape, chunk_shape, strict=True))


@functools.lru_cache(maxsize=4096)
def _chunk_bytes(dtype: str, chunk_shape: tuple[int, ...]) -> int:
    return math.prod(chunk_shape) * dtype_of(dtype).itemsize


class ShardSpec(NamedTuple):
    """A part of array number `array` that this process holds; made of whole chunks."""

    array: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Columns:
    """The chunk table, one row per chunk.

    `array` u32[n]: index into the arrays; `grid` i64[n, w]: grid coordinates, zero beyond the
    array's rank; `offset` u64[n]: first byte in the image; `nbytes` u64[n]: without the CRC;
    `digest` u8[n, 16]: xxh3-128 of the bytes; `crc` u32[n]: their CRC-32C, which also stands
    behind them.
    """

    array: np.ndarray
    grid: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    digest: np.ndarray
    crc: np.ndarray


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
        return len(self.array) * _ROW_BYTES + texts

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
    if fault := _fault(arrays):
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
    table = b"".join((*(c.tobytes() for c in columns), *texts))
    stop = plan.table_offset + len(table)
    view[plan.table_offset : stop] = table
    view[stop : plan.size_bytes] = bytes(plan.size_bytes - stop)
    page = _page(plan, xxhash.xxh3_128_digest(table))
    view[:PAGE_BYTES] = page
    return Header(
        meta=json.loads(plan.meta_json),
        arrays=plan.arrays,
        columns=Columns(
            plan.array, plan.grid, offset, plan.places.nbytes.astype("<u8"), digest, crc
        ),
        size_bytes=plan.size_bytes,
        digest=xxhash.xxh3_128_hexdigest(page + table),
        where=where,
        tree=plan.tree,
    )


def _page(plan: Plan, table_digest: bytes) -> bytes:
    sizes = (plan.size_bytes, plan.table_offset, plan.table_bytes)
    counts = (len(plan.array), len(plan.arrays_json), len(plan.meta_json), len(plan.tree))
    fields = _PAGE.pack(MAGIC, VERSION, PAGE_BYTES, *sizes, *counts, table_digest)
    body = fields.ljust(_CHECK_AT, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def _check_sources(plan: Plan, sources: Sequence[np.ndarray]) -> None:
    if len(sources) != len(plan.shards):
        raise Misuse(f"wanted {len(plan.shards)} sources, one per shard, found {len(sources)}")
    for shard, source in zip(plan.shards, sources, strict=True):
        spec = plan.arrays[shard.array]
        if source.shape != shard.shape or source.dtype != _DTYPES[spec.dtype]:
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

    page = fetch(0, PAGE_BYTES, "header page")
    if not page.startswith(MAGIC):
        damaged(f"no finished image: wanted {MAGIC!r} at byte 0, found {page[: len(MAGIC)]!r}")
    if (found := xxhash.xxh3_128_digest(page[:_CHECK_AT])) != page[_CHECK_AT:]:
        damaged(f"header page: wanted digest {page[_CHECK_AT:].hex()}, found {found.hex()}")
    _, version, page_bytes, *sizes, table_digest = _PAGE.unpack_from(page)
    if version != VERSION:
        raise Unsupported(
            f"{where}: image format {version}; this release reads format {VERSION}: "
            "use a release that knows the newer one"
        )
    total, table_at, table_bytes, count, arrays_bytes, meta_bytes, tree_bytes = sizes
    if page_bytes != PAGE_BYTES:
        damaged(f"header page: wanted {PAGE_BYTES} bytes, found {page_bytes}")
    if total > size_bytes:
        damaged(f"wanted {total} bytes, found {size_bytes}: truncated")
    if table_at < PAGE_BYTES or total != round_up(table_at + table_bytes, PAGE_BYTES):
        damaged(f"table: {table_bytes} bytes at byte {table_at} do not end {total} bytes")
    if count * _ROW_BYTES + arrays_bytes + meta_bytes + tree_bytes != table_bytes:
        damaged(
            f"table: {count} chunks with {arrays_bytes} and {meta_bytes} bytes of JSON and "
            f"{tree_bytes} of the tree do not make {table_bytes} bytes"
        )
    table = fetch(table_at, table_bytes, "table")
    if (found := xxhash.xxh3_128_digest(table)) != table_digest:
        damaged(f"table: wanted digest {table_digest.hex()}, found {found.hex()}")
    json_at = count * _ROW_BYTES
    meta_at, tree_at = json_at + arrays_bytes, table_bytes - tree_bytes
    try:
        listed = json.loads(table[json_at:meta_at].decode())
        meta = json.loads(table[meta_at:tree_at].decode())
        arrays = _parse_arrays(listed)
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"{where}: table: {error}") from error
    if not isinstance(meta, dict):
        damaged(f"meta: wanted an object, found {type(meta).__name__}")
    if fault := _fault(arrays):
        damaged(fault)
    columns = _columns(table, count, arrays, table_at, damaged)
    digest = xxhash.xxh3_128_hexdigest(page + table)
    return Header(meta, arrays, columns, total, digest, where, table[tree_at:])


def _parse_arrays(listed: Any) -> tuple[ArraySpec, ...]:
    """The specs of a list that was read; equal shapes become one object, so one type as well."""
    known: dict[Any, tuple[Any, Any]] = {}
    arrays = []
    for param, dtype, shape, chunk in listed:
        shapes = (tuple(shape), tuple(chunk))
        arrays.append(ArraySpec(param, dtype, *known.setdefault(shapes, shapes)))
    return tuple(arrays)


def _columns(
    table: bytes,
    count: int,
    arrays: tuple[ArraySpec, ...],
    end: int,
    damaged: Callable[[str], Never],
) -> Columns:
    cell = np.frombuffer(table, "<u8", count)
    offset = np.frombuffer(table, "<u8", count, 8 * count)
    digest = np.frombuffer(table, np.uint8, 16 * count, 16 * count).reshape(count, 16)
    array = np.frombuffer(table, "<u4", count, 32 * count)
    crc = np.frombuffer(table, "<u4", count, 36 * count)

    def refuse(wrong: np.ndarray, what: str) -> None:
        if wrong.any():
            damaged(f"table: chunk {int(np.flatnonzero(wrong)[0])} {what}")

    refuse(array >= len(arrays), f"is of an array beyond the {len(arrays)} there are")
    grids = [a.grid for a in arrays]
    refuse(cell >= np.array([math.prod(g) for g in grids], np.uint64)[array], "leaves its array")
    if (row := repeated(array, cell)) is not None:
        damaged(f"table: chunk {row} is there twice")
    nbytes = np.array([a.chunk_bytes for a in arrays], np.uint64)[array]
    step = alignment(nbytes).astype(np.uint64)
    refuse(offset % step != 0, "starts between the places where a chunk may")
    refuse(
        (offset < PAGE_BYTES) | (offset >= end), f"starts outside of bytes {PAGE_BYTES} .. {end}"
    )
    order = np.argsort(offset)
    stop = offset + nbytes + np.uint64(CRC_BYTES)
    limit = np.empty_like(offset)
    limit[order] = np.append(offset[order][1:], np.uint64(end))
    refuse(stop > limit, "runs into the next one, or into the table")
    return Columns(array, coordinates(grids, array, cell), offset, nbytes, digest, crc)


def verify_chunk(header: Header, row: int, view: Any) -> None:
    """Check the bytes of chunk `row`, given with or without the CRC behind them.

    Raises `Damaged`, naming image, array, chunk and place.
    """
    columns = header.columns
    nbytes = int(columns.nbytes[row])
    view = memoryview(view).cast("B")
    if len(view) not in (nbytes, nbytes + CRC_BYTES):
        raise Damaged(f"{_place(header, row)}: wanted {nbytes} bytes, found {len(view)}: truncated")
    checks = [("digest", columns.digest[row].tobytes(), xxhash.xxh3_128_digest(view[:nbytes]))]
    if len(view) > nbytes:
        checks.append(("CRC-32C", columns.crc[row].tobytes(), bytes(view[nbytes:])))
    for name, wanted, found in checks:
        if wanted != found:
            raise Damaged(
                f"{_place(header, row)}: wanted {name} {wanted.hex()}, found {found.hex()}"
            )


def payload_ranges(header: Header) -> np.ndarray:
    """First byte and length of each chunk together with its CRC, i64[n, 2] in table order."""
    columns = header.columns
    length = columns.nbytes + np.uint64(CRC_BYTES)
    return np.stack([columns.offset, length], axis=1).astype(np.int64)


def _place(header: Header, row: int) -> str:
    columns = header.columns
    spec = header.arrays[columns.array[row]]
    at = tuple(columns.grid[row, : len(spec.shape)].tolist())
    return f"{header.where}: {spec.param}, chunk {at} at byte {columns.offset[row]}"


def _fault(arrays: Sequence[ArraySpec]) -> str | None:
    """What is wrong with these specs, whatever source they come from; None if nothing."""
    names: set[str] = set()
    fine: set[tuple[str, int, int]] = set()  # by identity: True is equal to 1
    for a in arrays:
        if type(a.param) is not str or a.param in names or not _is_utf8(a.param):
            return f"array name {a.param!r} is no text, or is there twice"
        names.add(a.param)
        looked_at = (a.dtype, id(a.shape), id(a.chunk_shape))
        if type(a.dtype) is str and looked_at in fine:
            continue
        if type(a.dtype) is not str or a.dtype not in _DTYPES:
            return f"{a.param}: dtype {a.dtype!r} is none of {', '.join(_DTYPES)}"
        if len(a.shape) != len(a.chunk_shape) or len(a.shape) > _MAX_DIMENSIONS:
            return f"{a.param}: chunks of {a.chunk_shape} have not the rank of {a.shape}"
        cells, chunk_bytes = 1, _DTYPES[a.dtype].itemsize
        for n, c in zip(a.shape, a.chunk_shape, strict=True):
            if type(n) is not int or type(c) is not int or n < 0 or c < 1 or n % c:
                return f"{a.param}: chunks of {a.chunk_shape} do not tile {a.shape}"
            cells, chunk_bytes = cells * (n // c), chunk_bytes * c
        if cells >= _MAX_COUNT or chunk_bytes >= _MAX_COUNT:
            return f"{a.param}: {a.shape} in chunks of {a.chunk_shape} is beyond 2**62"
        fine.add(looked_at)
    return None


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


def _is_utf8(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False

"""Chunk tables to the OCDBT index by which TensorStore and Orbax read our images.

A value of an OCDBT database may lie in any file, so in an image: a step needs no second copy of
its bytes. All here is a function of its arguments: whoever finishes a commit writes the same
bytes, and to check an index is to make it again and compare.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.btree import Database, Entries, encode
from ckpt.errors import Damaged, Misuse
from ckpt.frames import LEVEL
from ckpt.grid import CRC_BYTES
from ckpt.image import Header
from ckpt.specs import ArraySpec, dtype_of
from ckpt.wording import counted

# A zero as zarr wants it in JSON, by the start of the dtype's name; 0.0 for all others.
_FILLS: dict[str, Any] = {"bool": False, "int": 0, "uint": 0, "complex": [0.0, 0.0]}

# What stands between the bytes of a chunk and the CRC, by compression.
_CODECS: dict[str | None, list[Any]] = {
    None: [],
    "zstd": [{"name": "zstd", "configuration": {"level": LEVEL}}],
}

_JSON = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def index(
    headers: Sequence[Header],
    image_paths: Sequence[str],
    node_path: str,
    *,
    uuid: bytes,
    time_ns: int,
    objects: Sequence[Sequence[tuple[int, str]]] | None = None,
) -> Database:
    """The index of a step: `<param>/zarr.json` inline, each chunk `<param>/c/<i>/<j>` by reference.

    `image_paths[i]` is the image of `headers[i]`, and `node_path` the file that will hold the
    nodes, all relative to the folder of the manifest. Where images are cut between chunks,
    `objects[i]` has (first byte, path) of each object of `headers[i]`, in order. `uuid` (16 bytes)
    and `time_ns` (since 1970) come from the attempt. A value is a chunk's bytes, or the zstd frame
    that they are stored as, with the CRC-32C behind them.

    Raises:
        Damaged: images disagree about an array, or a chunk is in two of them or in none (a chunk
            left out would read as zeros); or some of them are compressed and others not.
        Misuse: a path or name that readers refuse.
        Unsupported: a dtype that TensorStore cannot read.
    """
    if len(headers) != len(image_paths):
        raise Misuse(f"index: wanted {len(headers)} paths, one per image; found {len(image_paths)}")
    compression = _compression_of(headers, image_paths)
    arrays = _arrays_of(headers, image_paths)
    number = {spec.param: row for row, spec in enumerate(arrays)}
    tables = [header.columns for header in headers]
    counts = [len(table.array) for table in tables]
    array = np.concatenate(
        [np.zeros(0, np.int64)]
        + [
            np.array([number[spec.param] for spec in header.arrays], np.int64)[table.array]
            for header, table in zip(headers, tables, strict=True)
        ]
    )
    # Tables are as wide as their arrays' widest rank: pad them to one width.
    width = max((len(spec.shape) for spec in arrays), default=0)
    grid = np.zeros((len(array), width), np.int64)
    for table, end in zip(tables, np.cumsum(counts).tolist(), strict=True):
        grid[end - len(table.array) : end, : table.grid.shape[1]] = table.grid
    image = np.repeat(np.arange(len(headers)), counts)
    _check_complete(arrays, array, grid, [image_paths[at] for at in image.tolist()])

    # Objects of all images in one row; a chunk lies in the last one that begins before it.
    rows = objects if objects is not None else [[(0, path)] for path in image_paths]
    before = np.cumsum([0, *(len(row) for row in rows)])
    file, offset = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    for first, row, table in zip(before.tolist(), rows, tables, strict=False):
        starts = np.array([start for start, _ in row], np.uint64)
        at = np.searchsorted(starts, table.offset, "right") - 1
        file.append(first + at)
        offset.append(table.offset - starts[at])

    absent = np.zeros(len(arrays), np.uint64)
    entries = Entries(
        keys=[_key_prefix(spec.param) + b"zarr.json" for spec in arrays]
        + _chunk_keys(arrays, array, grid),
        files=[path for row in rows for _, path in row],
        file=np.concatenate([np.full(len(arrays), -1), *file]),
        offset=np.concatenate([absent, *offset]),
        length=np.concatenate([absent, *(table.stored + np.uint64(CRC_BYTES) for table in tables)]),
        inline=[zarr_metadata(spec, compression) for spec in arrays],
    )
    return encode(entries, node_path, uuid, time_ns)


def zarr_metadata(spec: ArraySpec, compression: str | None = None) -> bytes:
    """The `zarr.json` (zarr v3) of an array: regular grid, little-endian bytes, then CRC-32C.

    With `compression` "zstd" there is a frame of it between the two.

    Raises `Unsupported` for a dtype that TensorStore cannot read.
    """
    return _zarr_metadata(spec.dtype, spec.shape, spec.chunk_shape, compression)


@functools.lru_cache(maxsize=65536)
def _zarr_metadata(
    dtype: str, shape: tuple[int, ...], chunk_shape: tuple[int, ...], compression: str | None
) -> bytes:
    # Elements of one byte, and smaller ones, which take a byte each, have no byte order.
    endian = {"configuration": {"endian": "little"}} if dtype_of(dtype).itemsize > 1 else {}
    fill = next((zero for kind, zero in _FILLS.items() if dtype.startswith(kind)), 0.0)
    metadata = {
        "chunk_grid": {"configuration": {"chunk_shape": chunk_shape}, "name": "regular"},
        "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
        "codecs": [{"name": "bytes", **endian}, *_CODECS[compression], {"name": "crc32c"}],
        "data_type": dtype,
        "fill_value": fill,
        "node_type": "array",
        "shape": shape,
        "zarr_format": 3,
    }
    return _JSON.encode(metadata).encode()


def _compression_of(headers: Sequence[Header], image_paths: Sequence[str]) -> str | None:
    """How the chunks of all images are stored: `zarr.json` says it once for an array."""
    found = {header.compression: path for header, path in zip(headers, image_paths, strict=True)}
    if len(found) > 1:
        raise Damaged(
            f"{found.pop('zstd')} is compressed and {found.pop(None)} is not: they are not of one "
            "step, or their processes were given tiers with different compression="
        )
    return next(iter(found), None)


def _arrays_of(headers: Sequence[Header], image_paths: Sequence[str]) -> list[ArraySpec]:
    """All arrays of all images; an image may list every array, or only those it holds."""
    specs: dict[bytes, tuple[ArraySpec, str]] = {}
    for header, path in zip(headers, image_paths, strict=True):
        if header is not headers[0] and header.arrays == headers[0].arrays:
            continue  # as a rule every image lists all arrays
        for spec in header.arrays:
            known, where = specs.setdefault(_key_prefix(spec.param), (spec, path))
            if known.param != spec.param:
                raise Misuse(
                    f"arrays {known.param!r} and {spec.param!r} have the same keys; rename one"
                )
            if known != spec:
                raise Damaged(
                    f"array {spec.param!r}: wanted the same in every image, found {known} in"
                    f" {where} and {spec} in {path}: they are not of one step"
                )
    return [spec for spec, _ in specs.values()]


def _check_complete(
    arrays: Sequence[ArraySpec],
    array: npt.NDArray[np.int64],
    grid: npt.NDArray[np.int64],
    path_of_row: Sequence[str],
) -> None:
    """Every chunk of every array is there once. Each lies in its grid: images are checked so."""
    grids = [spec.grid for spec in arrays]
    wanted = [math.prod(cells) for cells in grids]
    found = np.bincount(array, minlength=len(arrays)).tolist()
    if found != wanted:
        row = [a == b for a, b in zip(found, wanted, strict=True)].index(False)
        raise Damaged(
            f"array {arrays[row].param!r}: wanted {counted(wanted[row], 'chunk')}, found "
            f"{found[row]} in {counted(len(set(path_of_row)), 'image')}; an image is missing, or "
            "is there twice"
        )
    # Place among all chunks: row-major within the array; shorter ranks go on with sizes of 1.
    width = grid.shape[1]
    sizes = np.array([cells + (1,) * (width - len(cells)) for cells in grids], np.int64)
    place = np.zeros(len(array), np.int64)
    for axis in range(width):
        place = place * sizes[array, axis] + grid[:, axis]
    place += np.cumsum([0, *wanted], dtype=np.int64)[array]
    times = np.bincount(place, minlength=len(place))
    if np.any(times != 1):
        rows = np.flatnonzero(place == np.argmax(times)).tolist()
        spec = arrays[array[rows[0]]]
        raise Damaged(
            f"array {spec.param!r}: wanted chunk {tuple(grid[rows[0], : len(spec.grid)].tolist())}"
            f" once, found it in {' and '.join(path_of_row[row] for row in rows)}"
        )


def _key_prefix(param: str) -> bytes:
    """What stands before `zarr.json` and `c/0/0`: TensorStore adds a slash only where none is."""
    return (param if not param or param.endswith("/") else param + "/").encode()


def _chunk_keys(
    arrays: Sequence[ArraySpec], array: npt.NDArray[np.int64], grid: npt.NDArray[np.int64]
) -> list[bytes]:
    """Keys of the chunks, row by row."""
    prefixes = [_key_prefix(spec.param) + b"c" for spec in arrays]
    ranks = np.array([len(spec.shape) for spec in arrays], np.int64)[array]
    keys = [b""] * len(array)
    for rank in np.unique(ranks).tolist():
        rows = np.flatnonzero(ranks == rank)
        form = b"%b" + b"/%d" * rank
        owners = [prefixes[owner] for owner in array[rows].tolist()]
        parts = zip(owners, *grid[rows, :rank].T.tolist(), strict=True)
        for row, part in zip(rows.tolist(), parts, strict=True):
            keys[row] = form % part
    return keys

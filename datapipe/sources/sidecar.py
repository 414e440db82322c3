"""Indexes kept beside the data: a few flat arrays and what they were made from, in one small file.

A file consists of: the 8 bytes `LGINDEX1`; the size of the header, 8 bytes, little-endian; the
header, JSON in UTF-8, padded with spaces so that it ends at a multiple of 64 bytes; the arrays,
flat, little-endian, each padded with zeros to a multiple of 64 bytes. The header is an object with

    kind, version   what index this is, and which release of its layout
    about           an object of texts and numbers: parameters, digests of what it was made from
    arrays          of each array its `name`, `dtype` and `count`
    digest          hex xxh3-128 over the canonical JSON of the rest of the header and the arrays

Sizes are checked against the size of the file. Arrays that are read are the pages of the file,
which all processes share and the system may drop: an index is replaced, never written into.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from formats.arguments import checked_path
from formats.errors import Damaged, Mismatch, Misuse, NotFound
from formats.files import Pattern, naming, replacing
from formats.source import canonical_json

_MAGIC: Final = b"LGINDEX1"
_ALIGNED_BYTES: Final = 64
_HEADER_LIMIT_BYTES: Final = 1 << 20
_DTYPES: Final = {"int32": "<i4", "int64": "<i8"}
_FIELDS: Final = {"kind", "version", "about", "arrays", "digest"}


@dataclass(frozen=True)
class Stored:
    """Where an index was read: what other processes get instead of its arrays."""

    path: str
    kind: str
    version: int
    digest: str


@dataclass(frozen=True, eq=False)
class Sidecar:
    """One index: `arrays` of one dimension by name, int32 or int64; `about` texts and numbers.

    stored: where it was read from; None for one that is to be written.
    """

    kind: str
    version: int
    about: Mapping[str, Any]
    arrays: Mapping[str, NDArray[Any]]
    stored: Stored | None = None


def write(path: Pattern, index: Sidecar) -> None:
    """Write `index` to the local `path`, all of it or nothing; what was there is replaced.

    Raises:
      NotFound: there is no directory for it.
      StoreFailed: it cannot be written.
      Misuse: an array is not of one dimension, int32 or int64.
    """
    flat: list[NDArray[Any]] = []
    listed: list[dict[str, Any]] = []
    for name, array in index.arrays.items():
        if array.ndim != 1 or array.dtype.name not in _DTYPES:
            raise Misuse(
                f"array {name}: wanted one dimension of {' or '.join(_DTYPES)}, found "
                f"{array.dtype} of shape {list(array.shape)}"
            )
        flat.append(np.ascontiguousarray(array, _DTYPES[array.dtype.name]))
        listed.append({"name": name, "dtype": array.dtype.name, "count": array.size})
    header = {
        "kind": index.kind,
        "version": index.version,
        "about": dict(index.about),
        "arrays": listed,
    }
    found = _digest(header)
    for array in flat:
        found.update(array.data)
    head = canonical_json(header | {"digest": found.hexdigest()})
    if len(head) > _HEADER_LIMIT_BYTES - _ALIGNED_BYTES:
        raise Misuse(f"a header of {len(head)} bytes, {_HEADER_LIMIT_BYTES} are the limit")
    head += b" " * (-(len(head) + 16) % _ALIGNED_BYTES)
    with naming(checked_path("path", path), "written"), replacing(path) as temporary:
        _write(temporary, head, flat)


def read(path: Pattern, kind: str, version: int) -> Sidecar:
    """The index at the local `path`, mapped, its digest checked.

    Raises:
      NotFound, StoreFailed: of the file.
      Damaged: it is no index, or not as it was written.
      Mismatch: it is an index of another kind or version.
    """
    path = checked_path("path", path)
    index, header = _mapped(os.path.abspath(path), kind, version)
    found = _digest({name: header[name] for name in header if name != "digest"})
    for array in index.arrays.values():
        found.update(array.data)
    if found.hexdigest() != header["digest"]:
        raise Damaged(f"{path} is not as it was written: its digest differs; build it again")
    return index


def reopened(stored: Stored) -> Sidecar:
    """An index that another process has read and checked.

    Raises:
      NotFound: it is gone.
      Mismatch: another one has taken its place.
      Whatever `read` raises.
    """
    try:
        index, _ = _mapped(stored.path, stored.kind, stored.version)
    except NotFound as error:
        raise NotFound(
            f"{stored.path}: the index is gone, which processes map that read through it; put it "
            "back, or make the pipeline anew"
        ) from error
    if index.stored != stored:
        raise Mismatch(
            f"{stored.path} is another index than when the pipeline was made; make it anew",
            [f"digest: wanted {stored.digest}, found {index.stored and index.stored.digest}"],
        )
    return index


def is_one(path: Pattern) -> bool:
    """Whether a file begins as an index does."""
    with naming(os.fspath(path)), open(path, "rb", opener=_without_waiting) as stream:
        is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
        return is_file and stream.read(len(_MAGIC)) == _MAGIC


def text(about: Mapping[str, Any], name: str, path: Pattern) -> str:
    """A text in `about`. Raises Damaged: it is none."""
    value = about.get(name)
    if not isinstance(value, str):
        raise Damaged(
            f"{os.fspath(path)}: {name} must be a text, found {value!r:.80}; build it again"
        )
    return value


def number(about: Mapping[str, Any], name: str, path: Pattern, first: int, last: int) -> int:
    """An integer in `about`. Raises Damaged: it is none, or outside [first, last]."""
    value = about.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
        raise Damaged(
            f"{os.fspath(path)}: {name} must be an integer in [{first}, {last}], found "
            f"{value!r:.80}; build it again"
        )
    return value


def array_digest(array: NDArray[np.int64]) -> str:
    """Hex xxh3-128 over the numbers as int64."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array, "<i8").data)


def _write(path: str, head: bytes, arrays: Sequence[NDArray[Any]]) -> None:
    with open(path, "xb") as stream:
        stream.write(_MAGIC + len(head).to_bytes(8, "little") + head)
        for array in arrays:
            stream.write(array.data)
            stream.write(bytes(-array.nbytes % _ALIGNED_BYTES))


def _without_waiting(path: str, flags: int) -> int:
    """A pipe in place of the file is refused instead of waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _mapped(path: str, kind: str, version: int) -> tuple[Sidecar, dict[str, Any]]:
    """An index and its header; its digest is not checked yet."""
    with naming(path), open(path, "rb", opener=_without_waiting) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(f"{path} is no file; put the index in its place")
        start = stream.read(16)
        if len(start) < 16 or start[:8] != _MAGIC:
            raise Damaged(
                f"{path} is no index: wanted {_MAGIC!r} at its start, found {start[:8]!r}"
            )
        whole = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    size_bytes = whole.size
    head_bytes = int.from_bytes(start[8:], "little")
    if not 0 < head_bytes <= min(_HEADER_LIMIT_BYTES, size_bytes - 16):
        raise Damaged(f"{path}: a header of {head_bytes} bytes in a file of {size_bytes}")
    at = 16 + head_bytes
    header = _header(whole[16:at].tobytes(), path)
    if (header["kind"], header["version"]) != (kind, version):
        raise Mismatch(
            f"{path} is another index; build it again",
            [
                f"kind: wanted {kind} version {version}, found "
                f"{header['kind']} version {header['version']}"
            ],
        )
    wanted_bytes = at + sum(map(_padded, header["arrays"]))
    if wanted_bytes != size_bytes:
        raise Damaged(f"{path}: wanted {wanted_bytes} bytes, found {size_bytes}; build it again")
    arrays: dict[str, NDArray[Any]] = {}
    for each in header["arrays"]:
        dtype = np.dtype(_DTYPES[each["dtype"]])
        array = whole[at : at + each["count"] * dtype.itemsize].view(dtype)
        arrays[each["name"]] = array.astype(each["dtype"], copy=False)
        at += _padded(each)
    stored = Stored(path, kind, version, header["digest"])
    return Sidecar(kind, version, header["about"], arrays, stored), header


def _header(raw: bytes, path: str) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: the header is no JSON ({error}); build it again") from error
    if not isinstance(header, dict) or set(header) != _FIELDS or not _is_sound(header):
        raise Damaged(f"{path}: the header is not that of an index; build it again")
    return header


def _is_sound(header: dict[str, Any]) -> bool:
    about, arrays = header["about"], header["arrays"]
    if not isinstance(about, dict) or not isinstance(arrays, list):
        return False
    if not isinstance(header["kind"], str) or not isinstance(header["version"], int):
        return False
    if not all(isinstance(value, str | int | float | None) for value in about.values()):
        return False
    for each in arrays:
        if not isinstance(each, dict) or set(each) != {"name", "dtype", "count"}:
            return False
        count, dtype = each["count"], each["dtype"]
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 1 << 60:
            return False
        if not isinstance(each["name"], str) or not isinstance(dtype, str) or dtype not in _DTYPES:
            return False
    return len({each["name"] for each in arrays}) == len(arrays)


def _padded(each: dict[str, Any]) -> int:
    array_bytes = int(each["count"]) * np.dtype(_DTYPES[each["dtype"]]).itemsize
    return array_bytes + -array_bytes % _ALIGNED_BYTES


def _digest(header: dict[str, Any]) -> Any:
    return xxhash.xxh3_128(canonical_json(header))

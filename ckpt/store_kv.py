"""A bucket (`s3://`, `gs://`) as a store, through TensorStore's key-value layer.

How the clauses of `ckpt.store` are kept where there are requests instead of system calls:

- Every request is repeated for a bounded time while its failure looks like one that passes
  (`ckpt.kv_requests`).
- `put_if_absent` and `swap` are conditional puts. A request whose answer was lost may have been
  carried out, so a refusal after it is settled by reading back: our bytes there mean that we won.
  Below TensorStore a broken connection is repeated once without a word. Then a win can be told as
  a refusal, never the other way round; those who claim, decide and publish can live with that.
- Absent is what the bucket says is absent, and only once it is known that there is a bucket.
- An image is a row of objects named `<image>.bytes-<start>-<stop>`. A listing shows them as the
  one file that they are; it knows the size of images only.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import tensorstore as ts

from ckpt import threads
from ckpt.errors import AlreadyExists, Damaged, Misuse, NotFound, StoreFailed
from ckpt.kv_requests import ABSENT, Requests, text_of
from ckpt.open_images import ImageReader
from ckpt.pieces import piece_name
from ckpt.store import Entry, SwappingStore, check_key
from ckpt.windows import Source, size_of

_log = logging.getLogger("ckpt")

CUT_BYTES = 256 << 20
"""Most bytes of one object of an image: small enough to send again, large enough to be few."""

READ_BYTES = 16 << 20
"""Bytes of one range request."""

READS = 8
"""Requests in flight for small files and ranges."""

WRITES = 2
"""Objects of an image in flight; each is copied once on its way out."""

_PIECE = re.compile(r"\.bytes-(0|[1-9]\d{0,17})-(0|[1-9]\d{0,17})\Z")
_URL = re.compile(r"(s3|gs)://([^/?#]+)(?:/([^?#]*))?\Z")


def open_bucket(url: str) -> KvStore:
    """The store behind `s3://bucket/prefix` or `gs://bucket/prefix`.

    The endpoint of a server other than Amazon's comes from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL,
    the region from AWS_REGION or AWS_DEFAULT_REGION, credentials from where AWS tools look.

    Raises:
        Misuse: another scheme, or no bucket.
    """
    found = _URL.match(url)
    if found is None:
        raise Misuse(f"{url}: wanted s3://bucket/prefix or gs://bucket/prefix")
    scheme, bucket, prefix = found.group(1), found.group(2), (found.group(3) or "").strip("/")
    if "//" in prefix:
        raise Misuse(f"{url}: wanted a prefix without empty components")
    spec = _s3(bucket) if scheme == "s3" else {"driver": "gcs", "bucket": bucket}
    location = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
    try:
        ts.KvStore.Spec(spec)
    except ValueError as error:
        raise Misuse(f"{url}: {text_of(error)}") from error
    return KvStore(location, {**spec, "path": f"{prefix}/" if prefix else ""})


def _s3(bucket: str) -> dict[str, Any]:
    found = os.environ
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "use_conditional_write": True}
    endpoint = found.get("AWS_ENDPOINT_URL_S3") or found.get("AWS_ENDPOINT_URL")
    region = found.get("AWS_REGION") or found.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec["endpoint"] = endpoint.rstrip("/")
        region = region or "us-east-1"
    if region:
        spec["aws_region"] = region
    if found.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}
    return spec


@final
class KvStore(SwappingStore):
    """Objects below a prefix.

    Args:
        spec: of a TensorStore KvStore; the context is for drivers that live in one.
    """

    cut_bytes = CUT_BYTES

    def __init__(
        self, location: str, spec: Mapping[str, Any], context: ts.Context | None = None
    ) -> None:
        self.location = location
        self.requests = Requests(location, spec, context)

    def __repr__(self) -> str:
        return f"KvStore({self.location!r})"

    # --- small files --------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        self.requests.write(_checked(key), data)

    def put_many(self, files: Mapping[str, bytes]) -> None:
        for key in files:
            _checked(key)
        threads.each(lambda item: self.requests.write(*item), list(files.items()), READS)

    def put_if_absent(self, key: str, data: bytes) -> None:
        if not self.requests.put_if(_checked(key), data, ABSENT):
            raise AlreadyExists(f"{self.location}/{key}: there already; left as it is")
        self.requests.tell_if_unconditional(key, data)

    def swap(self, key: str, old: bytes, new: bytes) -> None:
        found = self.requests.read(_checked(key))
        if found.value != old or not self.requests.put_if(
            key, new, found.stamp.generation, settled=True
        ):
            raise NotFound(f"{self.location}/{key}: it has changed meanwhile; left as it is")

    def read(self, key: str) -> bytes:
        return bytes(self.requests.read(_checked(key)).value)

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes | NotFound | Damaged]:
        def read(key: str) -> bytes | NotFound | Damaged:
            try:
                return self.read(key)
            except (NotFound, Damaged) as error:
                return error

        return threads.each(read, keys, READS)

    def delete(self, key: str) -> None:
        pieces = [piece.key for piece in self._pieces(_checked(key))]
        threads.each(self.requests.remove, pieces or [key], READS)

    def delete_tree(self, prefix: str) -> None:
        below = f"{_checked(prefix)}/"
        threads.each(
            self.requests.remove, [below + name for name in self.requests.names(below)], READS
        )

    def delete_tree_but(self, prefix: str, name: str) -> None:
        below = f"{_checked(prefix)}/"
        keys = [below + found for found in self.requests.names(below) if found != name]
        threads.each(self.requests.remove, keys, READS)

    def clear_temporaries(self, prefix: str) -> None:
        _checked(prefix)  # there are none: an object is there as a whole or not at all

    def move(self, source: str, target: str) -> None:
        raise Misuse(
            f"{self.location}: keys {source!r}, {target!r}: a bucket cannot rename directories"
        )

    # --- listing ------------------------------------------------------------------------------

    def list(self, prefix: str) -> list[Entry]:
        below = f"{_checked(prefix)}/" if prefix else ""
        found: dict[str, Entry] = {}
        for key in self.requests.names(below):
            name, slash, _ = key.partition("/")
            if slash:
                found[name] = Entry(name, True, 0)
                continue
            piece = _PIECE.search(name)
            if piece is None:
                found.setdefault(name, Entry(name, False, None))
                continue
            image, stop = name[: piece.start()], int(piece.group(2))
            known = found.get(image)
            stop = max(stop, known.size_bytes or 0) if known is not None else stop
            found[image] = Entry(image, False, stop)
        return sorted(found.values(), key=lambda entry: entry.name)

    def exists(self, key: str) -> bool:
        here = _checked(key)
        return any(
            not rest or rest[0] == "/" or _PIECE.match(rest) for rest in self.requests.names(here)
        )

    # --- images -------------------------------------------------------------------------------

    def write_image(self, key: str, data: Source, cuts: Sequence[int] = ()) -> None:
        borders = [0, *cuts, size_of(data)]
        pieces = [
            Piece(piece_name(_checked(key), start, stop), start, stop)
            for start, stop in itertools.pairwise(borders)
        ]
        old = {piece.key for piece in self._pieces(key)} - {piece.key for piece in pieces}
        try:
            threads.each(
                lambda piece: self.requests.write(piece.key, _bytes(data, piece.start, piece.stop)),
                pieces,
                WRITES,
            )
        except BaseException:
            try:
                threads.each(self.requests.remove, [piece.key for piece in pieces], READS)
            except StoreFailed as error:
                _log.warning("%s/%s: what was written of it stays: %s", self.location, key, error)
            raise
        threads.each(self.requests.remove, sorted(old), READS)

    def open_image(self, key: str) -> ImageReader:
        pieces = self._pieces(_checked(key)) or [Piece(key, 0, self._size(key))]
        where = f"{self.location}/{key}"
        end = 0
        for piece in pieces:
            if piece.start != end:
                raise Damaged(
                    f"{where}: wanted an object for its bytes from {end} on, found {piece.key}; "
                    "an object of the image is absent"
                )
            end = piece.stop
        return KvImage(self.requests, where, pieces)

    def _pieces(self, key: str) -> Sequence[Piece]:
        """The objects of an image in order; none when there is no such image."""
        found = []
        for rest in self.requests.names(f"{key}.bytes-"):
            piece = _PIECE.match(f".bytes-{rest}")
            if piece is not None:
                found.append(Piece(f"{key}.bytes-{rest}", int(piece[1]), int(piece[2])))
        return sorted(found, key=lambda each: (each.start, each.stop))

    def _size(self, key: str) -> int:
        """Size of an object, found by asking for single bytes: TensorStore does not tell it.

        Needed only for images that were copied here from a file system, in one piece.
        """

        def reaches(size_bytes: int) -> bool:
            try:
                self.requests.read(key, slice(size_bytes - 1, size_bytes))
            except Damaged:
                return False
            return True

        if not reaches(1):
            return 0
        known, bound = 1, 1 << 20
        while reaches(bound):
            known, bound = bound, bound * 4
        while bound - known > 1:
            middle = (known + bound) // 2
            known, bound = (middle, bound) if reaches(middle) else (known, middle)
        return known


@dataclass(frozen=True)
class Piece:
    """One object of an image: its bytes `start` to `stop`."""

    key: str
    start: int
    stop: int


@final
class KvImage(ImageReader):
    """An image in a bucket, read by several range requests at once."""

    def __init__(self, requests: Requests, name: str, pieces: Sequence[Piece]) -> None:
        self.name = name
        self.size_bytes = pieces[-1].stop
        self._requests = requests
        self._pieces = pieces

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        requests = []
        for offset, whole in ranges:
            buffer = whole.cast("B")
            if offset + buffer.nbytes > self.size_bytes:
                raise Damaged(
                    f"{self.name}: ends at byte {self.size_bytes}, "
                    f"wanted bytes up to {offset + buffer.nbytes}; the image was cut"
                )
            for piece in self._pieces:
                first, last = max(offset, piece.start), min(offset + buffer.nbytes, piece.stop)
                for at in range(first, last, READ_BYTES):
                    stop = min(at + READ_BYTES, last)
                    requests.append((piece, at, buffer[at - offset : stop - offset]))
        threads.each(lambda request: self._fill(*request), requests, READS)

    def read(self, offset: int, length: int) -> bytes:
        if READ_BYTES < length <= self.size_bytes - offset:
            # Names are claims: nothing is allocated for bytes that no object holds.
            for piece in self._pieces:
                if piece.start < min(piece.stop, offset + length) and piece.stop > offset:
                    last = piece.stop - piece.start - 1
                    self._requests.read(piece.key, slice(last, last + 1))
        return super().read(offset, length)

    def _fill(self, piece: Piece, offset: int, buffer: memoryview) -> None:
        start = offset - piece.start
        buffer[:] = self._requests.read(piece.key, slice(start, start + buffer.nbytes)).value

    def close(self) -> None:
        """Nothing is held."""


def _bytes(data: Source, start: int, stop: int) -> bytes:
    """Of some bytes a copy, and never two at a time."""
    if isinstance(data, memoryview):
        return bytes(data.cast("B")[start:stop])
    whole = io.BytesIO()
    for at in range(start, stop, READ_BYTES):
        whole.write(data.window(at, min(at + READ_BYTES, stop)))
    return whole.getvalue()


def _checked(key: str) -> str:
    if not check_key(key).isprintable():
        raise Misuse(f"key {key!r}: a listing of a bucket cannot hold control characters")
    if any(_PIECE.search(part) for part in key.split("/")):
        raise Misuse(f"key {key!r}: names that end like this are those of pieces of images")
    return key

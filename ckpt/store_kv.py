"""A bucket (`s3://`, `gs://`) as a store, through TensorStore's key-value layer.

How the clauses of `ckpt.store` are kept where there are requests instead of system calls:

- Every request is repeated, with backoff and jitter, while the failure looks like one that passes,
  for a bounded time in all. TensorStore's own repeating is off: it does not tell that it happened.
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
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never, TypeVar, final

import tensorstore as ts

from ckpt import threads
from ckpt.errors import AlreadyExists, Damaged, Misuse, NotFound, StoreFailed
from ckpt.open_images import ImageReader
from ckpt.pieces import piece_name
from ckpt.store import Entry, SwappingStore, check_key
from ckpt.windows import Source, size_of

T = TypeVar("T")
_log = logging.getLogger("ckpt")

CUT_BYTES = 256 << 20
"""Most bytes of one object of an image: small enough to send again, large enough to be few."""

READ_BYTES = 16 << 20
"""Bytes of one range request."""

READS = 8
"""Requests in flight for small files and ranges."""

WRITES = 2
"""Objects of an image in flight; each is copied once on its way out."""

_ABSENT = b"\x02"
"""TensorStore's generation of what is not there: the condition of a put if absent."""

_BYTES_PER_S = 1 << 18
"""A request slower than this has lost its connection."""

_PIECE = re.compile(r"\.bytes-(0|[1-9]\d{0,17})-(0|[1-9]\d{0,17})\Z")
_URL = re.compile(r"(s3|gs)://([^/?#]+)(?:/([^?#]*))?\Z")
_TRAILER = re.compile(r" \[(?!http_response_code|curl_code)[\w-]+='.*?'\](?= \[|\Z)", re.DOTALL)
_PASSES = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
_UNREACHED = re.compile(r"curl_code='[67]'|[Cc]ould not (resolve|connect)")
_NO_BUCKET = "there is no such bucket; check its name, or create it"
_CURES = {
    "s3": {
        "PERMISSION_DENIED": "check the credentials (AWS_ACCESS_KEY_ID and so on) and what they "
        "allow",
        "UNAUTHENTICATED": "check the credentials (AWS_ACCESS_KEY_ID and so on)",
        "NOT_FOUND": _NO_BUCKET,
        "CURL": "check the network and AWS_ENDPOINT_URL",
    },
    "gs": {
        "PERMISSION_DENIED": "check the credentials (GOOGLE_APPLICATION_CREDENTIALS) and what they "
        "allow",
        "UNAUTHENTICATED": "check the credentials (GOOGLE_APPLICATION_CREDENTIALS)",
        "NOT_FOUND": _NO_BUCKET,
        "CURL": "check the network and its proxies",
    },
}
"""By the scheme of the location, and by a sign in the text of an error."""


@dataclass(frozen=True)
class Patience:
    """How long a request is repeated, three times at least, before the store counts as failed."""

    total_s: float = 120.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 8.0
    answer_s: float = 60.0
    """How long one answer may take, on top of the time for its bytes."""
    first_s: float = 10.0
    """In place of `total_s` for a server that could not be connected to and never was before: its
    name is wrong, or there is no network."""


PATIENCE = Patience()

_told: set[str] = set()
"""Locations of which it is known whether they have a conditional put."""

_reached: set[str] = set()
"""Servers that have answered this process."""


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
        raise Misuse(f"{url}: {_text(error)}") from error
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
        self._spec = dict(spec)
        self._context = context
        self._opened: ts.KvStore | None = None
        self._bucket_is_there = False
        scheme = location.partition("://")[0]
        self._cures = _CURES.get(scheme, _CURES["s3"])
        self._server = str(spec.get("endpoint") or scheme)

    def __repr__(self) -> str:
        return f"KvStore({self.location!r})"

    # --- small files --------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        self._write(_checked(key), data)

    def put_many(self, files: Mapping[str, bytes]) -> None:
        for key in files:
            _checked(key)
        threads.each(lambda item: self._write(*item), list(files.items()), READS)

    def put_if_absent(self, key: str, data: bytes) -> None:
        if not self._put_if(_checked(key), data, _ABSENT):
            raise AlreadyExists(f"{self.location}/{key}: there already; left as it is")
        if self.location not in _told:
            self._tell_if_unconditional(key, data)

    def swap(self, key: str, old: bytes, new: bytes) -> None:
        found = self._read(_checked(key))
        if found.value != old or not self._put_if(key, new, found.stamp.generation, settled=True):
            raise NotFound(f"{self.location}/{key}: it has changed meanwhile; left as it is")

    def read(self, key: str) -> bytes:
        return bytes(self._read(_checked(key)).value)

    def read_many(self, keys: Sequence[str]) -> Sequence[bytes | NotFound | Damaged]:
        def read(key: str) -> bytes | NotFound | Damaged:
            try:
                return self.read(key)
            except (NotFound, Damaged) as error:
                return error

        return threads.each(read, keys, READS)

    def delete(self, key: str) -> None:
        pieces = [piece.key for piece in self._pieces(_checked(key))]
        threads.each(self._remove, pieces or [key], READS)

    def delete_tree(self, prefix: str) -> None:
        below = f"{_checked(prefix)}/"
        threads.each(self._remove, [below + name for name in self._names(below)], READS)

    def delete_tree_but(self, prefix: str, name: str) -> None:
        below = f"{_checked(prefix)}/"
        keys = [below + found for found in self._names(below) if found != name]
        threads.each(self._remove, keys, READS)

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
        for key in self._names(below):
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
        return any(not rest or rest[0] == "/" or _PIECE.match(rest) for rest in self._names(here))

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
                lambda piece: self._write(piece.key, _bytes(data, piece.start, piece.stop)),
                pieces,
                WRITES,
            )
        except BaseException:
            try:
                threads.each(self._remove, [piece.key for piece in pieces], READS)
            except StoreFailed as error:
                _log.warning("%s/%s: what was written of it stays: %s", self.location, key, error)
            raise
        threads.each(self._remove, sorted(old), READS)

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
        return KvImage(self, where, pieces)

    def _pieces(self, key: str) -> Sequence[Piece]:
        """The objects of an image in order; none when there is no such image."""
        found = []
        for rest in self._names(f"{key}.bytes-"):
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
                self._read(key, slice(size_bytes - 1, size_bytes))
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

    # --- requests -----------------------------------------------------------------------------

    def _write(self, key: str, data: bytes) -> None:
        def act(tries: int) -> None:
            answer = self._answer(self._kv.write(key, data), len(data))
            if not answer.generation:
                raise ValueError("UNAVAILABLE: the store refused a put that had no condition")

        self._repeat(key, act)
        self._bucket_is_there = True

    def _put_if(self, key: str, data: bytes, generation: bytes, *, settled: bool = False) -> bool:
        """Put if the object is of that generation. False: it was not, and was not by our doing.

        After a refusal the object is read: if it holds `data`, an earlier request of ours may have
        been carried out. It is taken for ours if there was one, or if nobody else would have
        written the same bytes (`settled`).
        """

        def act(tries: int) -> bool:
            answer = self._answer(self._kv.write(key, data, if_equal=generation), len(data))
            if answer.generation:
                return True
            found = self._answer(self._kv.read(key), 0)
            if found.state != "value":
                self._confirm_bucket(key)
                if generation != _ABSENT:
                    return False
                raise ValueError("UNAVAILABLE: a put if absent was refused, and nothing is there")
            return (tries > 0 or settled) and found.value == data

        done = self._repeat(key, act)
        self._bucket_is_there = True
        return done

    def _tell_if_unconditional(self, key: str, data: bytes) -> None:
        """Put the same bytes once more: a store that knows conditions refuses them."""
        try:
            answer = self._answer(self._kv.write(key, data, if_equal=_ABSENT), len(data))
        except (ValueError, TimeoutError):
            return  # another time
        _told.add(self.location)
        if answer.generation:
            warnings.warn(
                f"{self.location}: the store ignores conditional puts, so two attempts that start "
                "at once can both believe that the run is theirs; make sure that one trainer is "
                "started at a time",
                RuntimeWarning,
                stacklevel=3,
            )

    def _read(self, key: str, byte_range: slice | None = None) -> Any:
        wanted = 0 if byte_range is None else byte_range.stop - byte_range.start
        found = self._repeat(
            key, lambda _: self._answer(self._kv.read(key, byte_range=byte_range), wanted)
        )
        if found.state != "value":
            self._confirm_bucket(key)
            raise NotFound(f"{self.location}/{key}: not there")
        self._bucket_is_there = True
        return found

    def _confirm_bucket(self, key: str) -> None:
        """A read cannot tell an absent object from an absent bucket; a listing can."""
        if not self._bucket_is_there:
            self._names(key)

    def _remove(self, key: str) -> None:
        self._repeat(key, lambda _: self._answer(self._kv.write(key, None), 0))

    def _names(self, start: str) -> Sequence[str]:
        """What stands behind `start` in each key that begins with it; sorted."""
        first = start.encode()
        last = first[:-1] + bytes([first[-1] + 1]) if first else b""
        within = ts.KvStore.KeyRange(first, last)
        found = self._repeat(start, lambda _: self._answer(self._kv.list(within), 0))
        self._bucket_is_there = True
        return sorted(key.decode()[len(start) :] for key in found)

    @property
    def _kv(self) -> ts.KvStore:
        if self._opened is None:
            no_retries = {"max_retries": 0}
            context = self._context or ts.Context(
                {"s3_request_retries": no_retries, "gcs_request_retries": no_retries}
            )
            self._opened = ts.KvStore.open(self._spec, context=context).result()
        return self._opened

    def _answer(self, future: Any, size_bytes: int) -> Any:
        """The result of a request, or TimeoutError; what was given up may still happen."""
        try:
            return future.result(timeout=PATIENCE.answer_s + size_bytes / _BYTES_PER_S)
        except TimeoutError:
            future.cancel()
            raise

    def _repeat(self, key: str, act: Callable[[int], T]) -> T:
        """`act`, told how often it was tried already, until it succeeds or time is up."""
        begun = time.monotonic()
        pause_s, tries = PATIENCE.first_pause_s, 0
        while True:
            try:
                done = act(tries)
            except (ValueError, TimeoutError) as error:
                tries += 1
                spent_s = time.monotonic() - begun
                limit_s = PATIENCE.total_s
                if self._server not in _reached and _UNREACHED.search(str(error)):
                    limit_s = min(limit_s, PATIENCE.first_s)
                if not _passes(error) or (tries >= 3 and spent_s + pause_s > limit_s):
                    self._fail(key, error, tries, spent_s)
                _log.info("%s/%s: try %d: %s", self.location, key, tries, _text(error))
            else:
                _reached.add(self._server)
                return done
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(PATIENCE.longest_pause_s, pause_s * 2)

    def _fail(self, key: str, error: Exception, tries: int, spent_s: float) -> Never:
        text = _text(error)
        if "OUT_OF_RANGE" in text:
            raise Damaged(f"{self.location}/{key}: shorter than its name says: {text}") from error
        cure = next((cure for sign, cure in self._cures.items() if sign in text), "")
        often = f" (tried {tries} times in {spent_s:.0f} s)" if tries > 1 else ""
        raise StoreFailed(
            f"{self.location}/{key}: {text}{often}{f'; {cure}' if cure else ''}"
        ) from error


@dataclass(frozen=True)
class Piece:
    """One object of an image: its bytes `start` to `stop`."""

    key: str
    start: int
    stop: int


@final
class KvImage(ImageReader):
    """An image in a bucket, read by several range requests at once."""

    def __init__(self, store: KvStore, name: str, pieces: Sequence[Piece]) -> None:
        self.name = name
        self.size_bytes = pieces[-1].stop
        self._store = store
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
                    self._store._read(piece.key, slice(last, last + 1))
        return super().read(offset, length)

    def _fill(self, piece: Piece, offset: int, buffer: memoryview) -> None:
        start = offset - piece.start
        buffer[:] = self._store._read(piece.key, slice(start, start + buffer.nbytes)).value

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


def _passes(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, TimeoutError) or text.startswith(_PASSES) or "RequestTimeout" in text


def _text(error: Exception) -> str:
    """The error without what TensorStore appends from headers and body of the answer."""
    text = _TRAILER.sub("", str(error)).replace("All 0 retry attempts failed: ", "")
    return (text if len(text) < 300 else f"{text[:300]}...") or "no answer"

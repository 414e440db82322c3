"""Requests to a bucket: each repeated while its failure looks like one that passes.

With backoff and jitter, for a bounded time in all. TensorStore's own repeating is off: it does not
tell that it happened, and whether an answer was lost decides how a refused put is read.
"""

from __future__ import annotations

import logging
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Never, TypeVar, final

import tensorstore as ts

from ckpt.errors import Damaged, NotFound, StoreFailed

T = TypeVar("T")
_log = logging.getLogger("ckpt")

ABSENT = b"\x02"
"""TensorStore's generation of what is not there: the condition of a put if absent."""

_BYTES_PER_S = 1 << 18
"""A request slower than this has lost its connection."""

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


@final
class Requests:
    """What can be asked of the objects below a prefix.

    Args:
        spec: of a TensorStore KvStore; the context is for drivers that live in one.
    """

    def __init__(self, location: str, spec: Mapping[str, Any], context: ts.Context | None) -> None:
        self.location = location
        self.spec = dict(spec)
        self._context = context
        self._opened: ts.KvStore | None = None
        self._bucket_is_there = False
        scheme = location.partition("://")[0]
        self._cures = _CURES.get(scheme, _CURES["s3"])
        self._server = str(spec.get("endpoint") or scheme)

    def write(self, key: str, data: bytes) -> None:
        """Put, whatever is there. Raises StoreFailed, as all others do."""

        def act(tries: int) -> None:
            answer = self._answer(self._kv.write(key, data), len(data))
            if not answer.generation:
                raise ValueError("UNAVAILABLE: the store refused a put that had no condition")

        self._repeat(key, act)
        self._bucket_is_there = True

    def put_if(self, key: str, data: bytes, generation: bytes, *, settled: bool = False) -> bool:
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
                if generation != ABSENT:
                    return False
                raise ValueError("UNAVAILABLE: a put if absent was refused, and nothing is there")
            return (tries > 0 or settled) and found.value == data

        done = self._repeat(key, act)
        self._bucket_is_there = True
        return done

    def tell_if_unconditional(self, key: str, data: bytes) -> None:
        """Put what was put if absent once more: a store that knows conditions refuses it."""
        if self.location in _told:
            return
        try:
            answer = self._answer(self._kv.write(key, data, if_equal=ABSENT), len(data))
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

    def read(self, key: str, byte_range: slice | None = None) -> Any:
        """TensorStore's answer: `value`, the bytes, and `stamp`.

        Raises:
            NotFound: no such object. Damaged: it ends before `byte_range` does.
        """
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
            self.names(key)

    def remove(self, key: str) -> None:
        """Remove one object; absent is fine."""
        self._repeat(key, lambda _: self._answer(self._kv.write(key, None), 0))

    def names(self, start: str) -> Sequence[str]:
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
            self._opened = ts.KvStore.open(self.spec, context=context).result()
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
                _log.info("%s/%s: try %d: %s", self.location, key, tries, text_of(error))
            else:
                _reached.add(self._server)
                return done
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(PATIENCE.longest_pause_s, pause_s * 2)

    def _fail(self, key: str, error: Exception, tries: int, spent_s: float) -> Never:
        text = text_of(error)
        if "OUT_OF_RANGE" in text:
            raise Damaged(f"{self.location}/{key}: shorter than its name says: {text}") from error
        cure = next((cure for sign, cure in self._cures.items() if sign in text), "")
        often = f" (tried {tries} times in {spent_s:.0f} s)" if tries > 1 else ""
        raise StoreFailed(
            f"{self.location}/{key}: {text}{often}{f'; {cure}' if cure else ''}"
        ) from error


def _passes(error: Exception) -> bool:
    text = str(error)
    return isinstance(error, TimeoutError) or text.startswith(_PASSES) or "RequestTimeout" in text


def text_of(error: Exception) -> str:
    """The error without what TensorStore appends from headers and body of the answer."""
    text = _TRAILER.sub("", str(error)).replace("All 0 retry attempts failed: ", "")
    return (text if len(text) < 300 else f"{text[:300]}...") or "no answer"

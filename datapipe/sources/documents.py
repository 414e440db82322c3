"""The tokens of documents, out of what a source reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from datapipe.sources.epoch_sources import varies
from datapipe.sources.indexes import Lengths
from formats.errors import BadRecord, Mismatch, Misuse

if TYPE_CHECKING:
    from formats.source import Source


@dataclass(frozen=True)
class Documents:
    """A source of documents, with as many tokens each as an index says.

    source: one document a record.
    lengths: of its documents.
    column: that holds the tokens; empty where a record is nothing but the bytes of its tokens.
    dtype: of a token; bytes are little-endian.
    """

    source: Source
    lengths: Lengths
    column: str
    dtype: str

    @staticmethod
    def of(source: Source, lengths: Lengths, column: str, dtype: str | None) -> Documents:
        """Finds out where the tokens are, by the spec of the source.

        Args:
          column: of a source of columns: one of lists of integers, of arrays or of bytes.
          dtype: of tokens that are bytes; of others it is known.

        Raises:
          Misuse: there is no such column, or it cannot hold tokens; `dtype` is missing, not needed,
            or no dtype of tokens; there are not as many lengths as documents.
        """
        if len(lengths) != len(source):
            raise Misuse(f"wanted lengths of {len(source)} documents, found {len(lengths)}")
        if varies(source):
            raise Misuse(
                f"{type(source).__name__} has other items in every epoch, so that no index of "
                "lengths is of them: pack the source beneath it"
            )
        spec = getattr(source, "spec", None)
        if spec is None:
            raise Misuse(
                f"{type(source).__name__} has no spec, so that nobody knows what its tokens are: "
                "give it one, a formats.Spec"
            )
        if spec.trees:
            raise Misuse(
                f"{type(source).__name__} has examples of any form, no columns of tokens: pack the "
                "source beneath it"
            )
        if not spec.columns:
            return Documents(source, lengths, "", _dtype_of_bytes("records of bytes", dtype))
        found = {each.name: each for each in spec.columns}
        if column not in found:
            raise Misuse(
                f"no column {column!r} of tokens, the source has {', '.join(found)}: say "
                "tokens=, or read it"
            )
        there = found[column]
        if there.kind == "bytes":
            return Documents(source, lengths, column, _dtype_of_bytes(f"column {column!r}", dtype))
        is_list = there.kind == "ragged" or (there.kind == "array" and len(there.shape) == 1)
        if not is_list or np.dtype(there.dtype).kind not in "iu":
            raise Misuse(
                f"column {column!r} is no list of tokens: wanted lists of integers, or bytes, "
                f"found {there.kind} {there.dtype}{list(there.shape)}"
            )
        if dtype is not None and np.dtype(dtype) != there.dtype:
            raise Misuse(f"column {column!r} holds {there.dtype}: leave out dtype={dtype!r}")
        return Documents(source, lengths, column, there.dtype)

    def read(self, records: NDArray[np.int64]) -> list[NDArray[Any]]:
        """The tokens of documents `records`, int64[n], by one call of the source.

        One array of one dimension for each.

        Raises:
          BadRecord: one has no tokens, or bytes that are no tokens.
          Mismatch: one does not have as many tokens as the index says.
          Whatever the source raises.
        """
        raw = self.source.read(records)
        values = raw[self.column] if isinstance(raw, dict) else raw
        found = [
            self._tokens(record, value)
            for record, value in zip(records.tolist(), values, strict=True)
        ]
        wanted = self.lengths.tokens[records]
        sizes = np.fromiter(map(len, found), np.int64, len(found))
        wrong = np.flatnonzero(sizes != wanted)
        if wrong.size:
            at = int(wrong[0])
            raise Mismatch(
                "the index of lengths is not of these documents; build it again",
                [
                    f"document {records[at]} ({self.source.where(int(records[at]))}): wanted "
                    f"{wanted[at]} tokens, found {sizes[at]}"
                ],
            )
        return found

    def _tokens(self, record: int, value: Any) -> NDArray[Any]:
        if isinstance(value, bytes):
            width = np.dtype(self.dtype).itemsize
            if len(value) % width:
                raise self._bad(record, f"{len(value)} bytes are no whole number of {self.dtype}")
            return np.frombuffer(value, self.dtype)
        if not isinstance(value, np.ndarray):
            raise self._bad(record, f"wanted tokens, found {value!r:.40}")
        return value

    def _bad(self, record: int, why: str) -> BadRecord:
        place = self.source.where(record)
        return BadRecord(f"document {record} ({place}): {why}", index=record)


def _dtype_of_bytes(what: str, dtype: str | None) -> str:
    if dtype is None:
        raise Misuse(f"{what}: say what a token in them is, such as dtype='uint16'")
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iu":
        raise Misuse(f"dtype: wanted integers such as 'uint16', found {dtype!r}")
    return found.newbyteorder("<").str

"""Documents in memory, whose tokens say where they come from; importable by tests and children."""

from __future__ import annotations

import numpy as np

from formats.errors import BadRecord
from formats.source import Column, Source, Spec


class Documents(Source):
    """Token k of document d is d * 1000 + k; `calls` are the indices of each read.

    Columns `tokens`, `length` and `score`, which is d % 10; or records of bytes.
    """

    def __init__(self, lengths, *, name="documents", as_bytes=False, bad=()):
        self.lengths = list(lengths)
        self.name = name
        self.as_bytes = as_bytes
        self.bad = set(bad)
        self.calls = []

    def __len__(self):
        return len(self.lengths)

    def document(self, index):
        return np.arange(self.lengths[index], dtype=np.int32) + 1000 * index

    def read(self, indices):
        indices = np.asarray(indices)
        self.calls.append(indices.copy())
        for index in indices.tolist():
            if index in self.bad:
                raise BadRecord("rotten", index=index, file="shard", position=index)
        found = [self.document(index) for index in indices.tolist()]
        if self.as_bytes:
            return [each.astype("<i4").tobytes() for each in found]
        lengths = np.array([len(each) for each in found], np.int64)
        return {"tokens": found, "length": lengths, "score": indices % 10}

    @property
    def spec(self):
        if self.as_bytes:
            return Spec()
        return Spec(
            (
                Column("tokens", "ragged", "int32"),
                Column("length", "array", "int64"),
                Column("score", "array", "int64"),
            )
        )

    def fingerprint(self):
        return {
            "format": "memory",
            "name": self.name,
            "records": len(self),
            "digest": f"{self.name}{self.lengths}",
        }

    def where(self, index):
        return f"shelf {index}"

    def close(self):
        pass

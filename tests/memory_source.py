"""Sources in memory that count what is asked of them; importable by tests and their children."""

from __future__ import annotations

import threading

import numpy as np

from formats.errors import BadRecord


class Records:
    """Records `b"<id>"` padded to growing lengths; `calls` are the indices of each read."""

    def __init__(self, count, *, name="memory", bad=(), says_which=True):
        self.count = count
        self.name = name
        self.bad = set(bad)
        self.says_which = says_which
        self.calls = []

    def __len__(self):
        return self.count

    def read(self, indices):
        indices = np.asarray(indices)
        assert indices.dtype == np.int64
        assert indices.ndim == 1
        self.calls.append(indices.copy())
        found = []
        for index in indices.tolist():
            assert 0 <= index < self.count
            if index in self.bad:
                if self.says_which:
                    raise BadRecord("rotten", index=index, file="shard-3", position=index % 10)
                raise RuntimeError("the decoder choked")
            found.append(b"%d" % index + b"." * (index % 7))
        return found

    def __getitem__(self, index):
        return self.read(np.array([index]))[0]

    def fingerprint(self):
        return {"format": "memory", "name": self.name, "records": self.count, "digest": self.name}

    def where(self, index):
        return f"{self.name}-shard-{index // 10}, record {index % 10}"


class Columns(Records):
    """The same as columns: an array of numbers, an array of rows, a list of texts."""

    def read(self, indices):
        super().read(indices)
        ids = np.asarray(indices)
        return {
            "id": ids.copy(),
            "row": np.stack([ids, ids * 2], axis=1).astype(np.float32),
            "text": ["x" * (index % 5) + str(index) for index in ids.tolist()],
        }


class Gate(Records):
    """Reads wait until the gate is opened."""

    def __init__(self, count):
        super().__init__(count)
        self.entered = threading.Event()
        self.opened = threading.Event()

    def read(self, indices):
        self.entered.set()
        assert self.opened.wait(60), "nobody opened the gate"
        return super().read(indices)


def number(record):
    """The id of a record of `Records`."""
    return int(record.rstrip(b"."))

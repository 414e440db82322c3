"""A source in memory whose items the epoch decides."""

from __future__ import annotations

from datapipe.sources.epoch_sources import EpochSource
from formats.source import Spec


class Turning(EpochSource):
    """Item i of epoch e is `b"e:i"`; `calls` are the pairs of each read."""

    def __init__(self, count, bad=()):
        self.count = count
        self.bad = set(bad)
        self.calls = []

    def __len__(self):
        return self.count

    def read_epochs(self, items, epochs):
        pairs = list(zip(epochs.tolist(), items.tolist(), strict=True))
        self.calls.append(pairs)
        if self.bad & set(pairs):
            raise RuntimeError("the decoder choked")
        return [b"%d:%d" % pair for pair in pairs]

    @property
    def spec(self):
        return Spec()

    def fingerprint(self):
        return {"format": "turning", "records": self.count, "digest": "turning"}

    def where(self, index):
        return f"turning, item {index}"

    def close(self):
        pass

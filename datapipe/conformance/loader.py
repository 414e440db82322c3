"""What a loader under test is: how it is opened, what it offers, and the records that it serves."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np

from datapipe.order.plan import Remainder
from formats.errors import BadRecord
from formats.source import Spec, sealed

Ids = tuple[int, ...]
"""Of the records of one batch, row by row."""

FEATURES: Final = {
    "carry": "batches run over the border of two epochs",
    "keep": "epochs that end with a short batch",
    "drop": "epochs that end with their last full batch",
    "workers": "processes that work ahead",
    "hosts": "each host gets its rows of the batch",
    "rehost": "a state goes on with another number of hosts",
    "reworker": "a state goes on with another number of workers",
    "rebatch": "a state goes on with another batch size",
    "reweight": "a state goes on with other weights of several sources",
    "grow": "a state goes on with records appended to the source",
    "seek": "iterator.seek(example)",
    "skip": "iterator.skip(ranges of examples)",
    "replace": "another record in the place of a bad one",
    "pack": "documents in rows of a fixed number of tokens",
}
"""What a loader may or may not offer; the checks that need it pass over those that do not."""


class Records:
    """A source in memory: record i is `b"<id>."` and up to 60 bytes more, its id `first + i`.

    It counts what is read in this process. It can be read as sources of this project are, as
    random-access sources of Grain and as map-style datasets of PyTorch. Picklable, thread-safe.

    Args:
      count: records, in a file, so to speak.
      appended: records in a second one.
      first: id of record 0.
      name: stands for what is in the records, in the fingerprint.
      bad: ids of records that cannot be read.
    """

    def __init__(
        self,
        count: int,
        *,
        appended: int = 0,
        first: int = 0,
        name: str = "records",
        bad: Sequence[int] = (),
    ) -> None:
        self.count = count + appended
        self.appended = appended
        self.first = first
        self.name = name
        self.bad = frozenset(bad)
        self.calls: list[Ids] = []
        """The ids that each call asked for."""

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Sequence[int] | np.ndarray) -> list[bytes]:
        """The records of these numbers, in that order.

        Raises:
          BadRecord: one of them is bad.
        """
        ids = tuple(self.first + int(index) for index in indices)
        self.calls.append(ids)
        for place, index in zip(ids, indices, strict=True):
            if not self.first <= place < self.first + self.count:
                raise IndexError(f"record {index} of {self.count}")
            if place in self.bad:
                raise BadRecord(f"record {place} is rotten", index=int(index), file=self.name)
        return [self.record(place) for place in ids]

    def __getitem__(self, index: Any) -> bytes:
        return self.read([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[bytes]:  # as PyTorch reads a batch
        return self.read(indices)

    _getitems = __getitems__  # as Grain does

    def fingerprint(self) -> dict[str, Any]:
        """A JSON value that is equal where the records are."""
        counts = [each for each in (self.count - self.appended, self.appended) if each]
        files = [
            {"name": f"{self.name}-{number}", "first": self.first, "records": each}
            for number, each in enumerate(counts)
        ]
        return sealed({"format": "records", "records": self.count, "columns": [], "files": files})

    @property
    def spec(self) -> Spec:
        """No columns: records are bytes."""
        return Spec()

    def where(self, index: int) -> str:
        """A record, in words."""
        return f"{self.name}, record {index}"

    def close(self) -> None:
        """Nothing is open."""

    @property
    def ids(self) -> Ids:
        """Of all records."""
        return tuple(range(self.first, self.first + self.count))

    def fresh(self) -> Records:
        """The same records, all of them good, and nothing read yet."""
        return _records(self.count - self.appended, self.appended, self.first, self.name, ())

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self.count - self.appended, self.appended, self.first, self.name, [*self.bad])
        return _records, given

    @staticmethod
    def record(number: int) -> bytes:
        """The record of an id."""
        return b"%d." % number + b"x" * (number % 61)

    @staticmethod
    def number(record: bytes) -> int:
        """The id in a record."""
        return int(bytes(record).partition(b".")[0])


def _records(count: int, appended: int, first: int, name: str, bad: Sequence[int]) -> Records:
    return Records(count, appended=appended, first=first, name=name, bad=bad)


@dataclass(frozen=True)
class Setting:
    """What a loader is asked to serve.

    sources: one, or several that are mixed. Without workers they are read themselves, no copies of
      them: their `calls` are looked at.
    batch_size: examples per batch, over all hosts.
    seed: of the shuffle.
    shuffle: every epoch in another order of all records; else as stored.
    epochs: how often each record is served.
    remainder: what becomes of the end of an epoch; see `FEATURES`.
    weights: of several sources.
    workers: processes that work ahead; 0: none.
    hosts, host: how many there are, and which of them this iterator is for.
    version: of a function of batches that hands them on as they are, for loaders that know
      functions by a version. The others may ignore it.
    raw: batches of the records themselves; else of their ids.
    on_bad_record: "raise", or "replace" where that is offered.
    row_tokens: 0, or each record is a document whose bytes are its tokens, and a batch has rows of
      that many, with zeros as padding.
    may_change: whether states of other weights or of fewer records are to be taken; else refused.
    """

    sources: tuple[Records, ...]
    batch_size: int = 4
    seed: int = 17
    shuffle: bool = True
    epochs: int = 2
    remainder: Remainder = "carry"
    weights: tuple[int, ...] = ()
    workers: int = 0
    hosts: int = 1
    host: int = 0
    version: str = "1"
    raw: bool = False
    on_bad_record: Literal["raise", "replace"] = "raise"
    row_tokens: int = 0
    may_change: bool = False

    @property
    def source(self) -> Records:
        """The only one."""
        (source,) = self.sources
        return source


class Loading(Protocol):
    """An iterator of a loader. `close`, `seek`, `skip` and `span` where they are offered.

    `seek(example)` goes to an example of the whole run; `skip(ranges)` leaves out half-open ranges
    of examples for good; `span(state, first, stop)` gives, as `skip` takes them, the ranges of the
    examples in batches first..stop-1 from a state on.
    """

    def __next__(self) -> Any: ...

    def get_state(self) -> Any:
        """The position after the batches that were delivered."""

    def set_state(self, state: Any) -> None:
        """Goes to a position."""


@dataclass(frozen=True)
class Loader:
    """A loader under test. Functions of a module, so that another process finds them.

    name: heading of its column.
    open: an iterator at the beginning, for a setting.
    ids: of a batch of ids: as integers; of a batch of rows: all tokens, row by row.
    offers: names of `FEATURES`.
    packages: whose versions a report names.
    """

    name: str
    open: Callable[[Setting], Loading]
    offers: frozenset[str]
    ids: Callable[[Any], Sequence[int]] = list
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = self.offers - FEATURES.keys()
        if unknown:
            raise ValueError(f"{sorted(unknown)} are no features: {', '.join(FEATURES)}")
        if not self.offers & {"carry", "keep", "drop"}:
            raise ValueError(f"{self.name} must offer one of carry, keep, drop")

    @property
    def versions(self) -> dict[str, str]:
        """Of its packages, as installed."""
        return {name: importlib.metadata.version(name) for name in self.packages}

"""A store around a store that fails, or stops for ever, at a chosen operation."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from ckpt.errors import StoreFailed
from ckpt.open_images import ImageReader
from ckpt.store import Entry, FileStore, Store
from ckpt.windows import Source, size_of, window_of


class Died(BaseException):
    """The process is dead: no error that anybody may handle."""


@dataclass(frozen=True)
class Fault:
    """What happens at the mutating operation number `at`, counted from 1.

    `stop`: it does not happen, nor does anything after it. `torn`: the same, but half of it has
    happened. `fail`: it does not happen, and `StoreFailed` is raised. `fail after`: it happens, and
    `StoreFailed` is raised. `pause`: `meanwhile` is called, then it happens.
    """

    at: int
    kind: Literal["stop", "torn", "fail", "fail after", "pause"]
    meanwhile: Callable[[], None] = lambda: None


@final
class FaultyStore(Store):
    """Passes everything on to `inner`, one file at a time, but for the faults.

    `operations` lists the mutating operations that were asked for. Reads are not counted.
    """

    def __init__(
        self, inner: FileStore, faults: Collection[Fault] = (), *, delay_s: float = 0.0
    ) -> None:
        self.inner = inner
        self.location = inner.location
        self.renames = inner.renames
        self.cut_bytes = inner.cut_bytes
        self.operations: list[str] = []
        self.dead = False
        self._faults = {fault.at: fault for fault in faults}
        self._delay_s = delay_s
        self._lock = threading.Lock()

    # --- mutating ------------------------------------------------------------------------------

    def put(self, key: str, data: bytes) -> None:
        self._mutate(
            f"put {key}", lambda: self.inner.put(key, data), lambda: self._tear_file(key, data)
        )

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._mutate(
            f"put_if_absent {key}",
            lambda: self.inner.put_if_absent(key, data),
            lambda: self._tear_file(key, data),
        )

    def delete(self, key: str) -> None:
        self._mutate(f"delete {key}", lambda: self.inner.delete(key), _nothing)

    def delete_tree(self, prefix: str) -> None:
        def tear() -> None:
            keys = [key for key, _ in self.inner.walk(prefix)]
            for key in keys[: len(keys) // 2]:
                self.inner.delete(key)

        self._mutate(f"delete_tree {prefix}", lambda: self.inner.delete_tree(prefix), tear)

    def clear_temporaries(self, prefix: str) -> None:
        self._mutate(
            f"clear_temporaries {prefix}", lambda: self.inner.clear_temporaries(prefix), _nothing
        )

    def move(self, source: str, target: str) -> None:
        self._mutate(f"move {source} {target}", lambda: self.inner.move(source, target), _nothing)

    def write_image(self, key: str, data: Source, cuts: Sequence[int] = ()) -> None:
        self._mutate(
            f"write_image {key}",
            lambda: self.inner.write_image(key, data, cuts),
            lambda: self.inner.write_image(key, window_of(data, 0, size_of(data) // 2)),
        )

    def append(self, key: str, data: bytes) -> None:
        self._mutate(
            f"append {key}",
            lambda: self.inner.append(key, data),
            lambda: self.inner.append(key, data[: len(data) // 2]),
        )

    def _mutate(self, what: str, act: Callable[[], None], tear: Callable[[], None]) -> None:
        if self._delay_s:
            time.sleep(self._delay_s)
        with self._lock:
            self._must_live()
            self.operations.append(what)
            number = len(self.operations)
            fault = self._faults.get(number)
            kind = fault.kind if fault is not None else None
            self.dead = kind in ("stop", "torn")
        if kind == "torn":
            tear()
        if self.dead:
            raise Died(f"operation {number}: {what}")
        if fault is not None and kind == "pause":
            fault.meanwhile()
        if kind != "fail":
            act()
        if kind in ("fail", "fail after"):
            raise StoreFailed(f"operation {number}: {what}: wanted to fail")

    def _tear_file(self, key: str, data: bytes) -> None:
        """What `FileStore` has made of a file just before it gives it its name."""
        path = Path(self.location, f"{key}.tmp-{uuid.uuid4().hex}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[: len(data) // 2])

    # --- reading -------------------------------------------------------------------------------

    def read(self, key: str) -> bytes:
        self._must_live()
        return self.inner.read(key)

    def read_log(self, key: str) -> bytes:
        self._must_live()
        return self.inner.read_log(key)

    def list(self, prefix: str) -> list[Entry]:
        self._must_live()
        return self.inner.list(prefix)

    def exists(self, key: str) -> bool:
        self._must_live()
        return self.inner.exists(key)

    def open_image(self, key: str) -> ImageReader:
        self._must_live()
        return self.inner.open_image(key)

    def _must_live(self) -> None:
        if self.dead:
            raise Died("nothing happens after death")


def _nothing() -> None:
    pass

"""Values that are costly to make, the most recently used ones kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@final
class Recent(Generic[K, V]):
    """The `limit` most recently used values, by key. Safe to call from several threads.

    A value is made under a lock, so that it is made once: other threads wait for it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: dict[K, V] = {}  # the least recently used one first
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of `key`; `make(key)` where it is not held."""
        with self._lock:
            value = self._values.pop(key) if key in self._values else make(key)
            self._values[key] = value
            while len(self._values) > self._limit:
                del self._values[next(iter(self._values))]
            return value

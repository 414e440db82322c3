"""A bucket in memory."""

from __future__ import annotations

import tensorstore as ts

from ckpt.store_kv import KvStore


def memory_store() -> KvStore:
    """The same store over objects in memory, of its own."""
    return KvStore("memory://run", {"driver": "memory", "path": "run/"}, ts.Context())

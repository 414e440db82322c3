"""What the small files of a step that Orbax wrote tell of it; nothing in them is relied on."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from ckpt.errors import Damaged, NotFound
from ckpt.store import FileStore, Store

Json = Any


def tree_bytes(store: Store, name: str) -> int:
    """Bytes of all files below a name, as far as the store tells. Links are not followed, since
    they may lead in rings; what goes away meanwhile counts for nothing."""
    if not isinstance(store, FileStore):
        return sum(size or 0 for _, size in store.walk(name))
    total = 0
    for directory, _, names in os.walk(os.path.join(store.location, name)):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


def time_ns(store: Store, key: str) -> int | None:
    """When Orbax finished a step, by its `_CHECKPOINT_METADATA`; None where that does not say."""
    written = json_or_none(store, key)
    found = written.get("commit_timestamp_nsecs") if isinstance(written, dict) else None
    return found if type(found) is int and found > 0 else None


def numbers(document: Json) -> dict[str, float] | None:
    """The members of a JSON object that are numbers; None of anything else."""
    if not isinstance(document, dict):
        return None
    return {
        str(name): value
        for name, value in document.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def json_or_none(store: Store, key: str) -> Json:
    """The JSON value in a file of others, None where there is none."""
    try:
        return json.loads(store.read(key))
    except (NotFound, Damaged, ValueError, RecursionError):
        return None

"""How many bytes values hold: batches that were made, records that were read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def size_of(value: Any) -> int:
    """Bytes of the arrays in a tree, plus the lengths of texts and bytes; other objects count 0."""
    if isinstance(value, np.ndarray):
        return _of_items(value.ravel().tolist()) if value.dtype.hasobject else value.nbytes
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, tuple | list):
        return _of_items(value)
    if isinstance(value, bytes | str):
        return len(value)
    return int(getattr(value, "nbytes", 0))


def _of_items(items: Sequence[Any]) -> int:
    if {*map(type, items)} <= {bytes, str}:  # most are, and there may be many
        return sum(map(len, items))
    return sum(map(size_of, items))

"""Digests of trees of arrays, bytes, texts and numbers; other values count by their type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash


def exact(tree: Any) -> str:
    """Hex; equal for equal trees, bit for bit."""
    return _digest(tree, first_digits=False)


def coarse(tree: Any) -> str:
    """Hex; of floating-point numbers only how large they are and where, to a few digits.

    What functions compute may have other last digits on another processor, and is then as good as
    the same.
    """
    return _digest(tree, first_digits=True)


def _digest(tree: Any, *, first_digits: bool) -> str:
    hasher = xxhash.xxh3_128()
    _feed(hasher, tree, first_digits)
    return str(hasher.hexdigest())


def _feed(hasher: Any, value: Any, first_digits: bool) -> None:
    if isinstance(value, Mapping):
        hasher.update(f"dict {len(value)};".encode())
        for key in sorted(value, key=repr):
            hasher.update(f"{key!r:.200};".encode("utf-8", "replace"))
            _feed(hasher, value[key], first_digits)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        hasher.update(f"{type(value).__name__} {len(value)};".encode())
        for item in value:
            _feed(hasher, item, first_digits)
    elif isinstance(value, str | bytes):
        data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        hasher.update(f"{type(value).__name__} {len(data)};".encode())
        hasher.update(data)
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        _feed_array(hasher, np.asarray(value), first_digits)
    elif isinstance(value, float | complex):
        hasher.update(f"{type(value).__name__};".encode())
        _feed_array(hasher, np.asarray(value), first_digits)
    elif value is None or isinstance(value, bool | int):
        hasher.update(f"{type(value).__name__} {value!r};".encode())
    else:
        hasher.update(f"{type(value).__qualname__};".encode())


def _feed_array(hasher: Any, array: np.ndarray, first_digits: bool) -> None:
    hasher.update(f"array {array.dtype.str} {array.shape};".encode())
    if array.dtype.hasobject:
        _feed(hasher, array.reshape(-1).tolist(), first_digits)
    elif first_digits and array.dtype.kind in "fc":
        hasher.update(_sizes(array).encode())
    else:
        hasher.update(np.ascontiguousarray(array).tobytes())


def _sizes(array: np.ndarray) -> str:
    """Few numbers in few digits, so that one is seldom so near to a border that it changes."""
    flat = array.reshape(-1)
    finite = np.isfinite(flat)
    there = np.flatnonzero(finite)
    sizes = np.abs(flat[there]).astype(np.float64)
    whole = sizes.sum()
    place = float((sizes * (there + 1)).sum() / whole) if 0 < whole < np.inf else 0.0
    negative = int((flat[there].real < 0).sum()) if there.size == 1 else 0
    return f"{there.size} {whole:.3e} {place:.3e} {negative};"

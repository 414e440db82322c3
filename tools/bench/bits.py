"""The leaves of a tree as bytes, so that two trees can be compared exactly."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

Bits = dict[str, tuple[str, bytes]]
"""By leaf path: what it is (type of key, dtype, shape), and its bytes."""


def bits(tree: Any) -> Bits:
    """Structure and bytes of a tree: of numbers, texts, arrays and PRNG keys of any dtype."""
    found: Bits = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kind = ""
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind, leaf = str(leaf.dtype), jax.random.key_data(leaf)
        array = np.asarray(leaf)
        data = leaf.encode() if isinstance(leaf, str) else array.tobytes()
        shape = "text" if isinstance(leaf, str) else f"{array.dtype}{array.shape}"
        found[jax.tree_util.keystr(path)] = (f"{kind}{shape}", data)
    return found

"""What functions of the user return, checked before it is used.

A function that returns something else than it should gets an error with its own name. Another
record would mend nothing, so none is replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from formats.errors import Mismatch

USUAL: Final = frozenset({dict, tuple, list, bytes, str, int, float, bool, np.ndarray})
"""Types of examples that need no check."""

_LISTED: Final = 8  # faulty leaves that a message names


def refuse_no_example(value: Any, by: str) -> None:
    """Refuses what cannot be an example. `by` names the function.

    Raises:
      Mismatch: it is None, or can be gone through only once.
    """
    if value is None:
        raise Mismatch(
            f"{by} returned None, wanted an example: is a `return` missing? Records are left out "
            "by Pipeline(filter=...), not by a function"
        )
    if is_spent(type(value)):
        raise Mismatch(f"{by} returned a {type(value).__name__}, wanted an example: {SPENT_CURE}")


def is_spent(kind: type) -> bool:
    """Whether values of a type can be iterated over, or awaited, only once."""
    return hasattr(kind, "__next__") or hasattr(kind, "__await__")


SPENT_CURE: Final = (
    "take `yield` or `async` out of the function, or return list(...) or an array of it"
)


def refuse_other_rows(batch: Any, rows: int, by: str) -> None:
    """Refuses what is no batch of `rows` rows.

    A batch is a tree of dicts, tuples, named tuples, lists, and nodes registered with JAX, with one
    array or more; None is a tree without leaves. `by` names the function that returned it.

    Raises:
      Mismatch: a leaf is no array, or its first axis is not `rows` long; or there is no array.
    """
    if type(batch) is np.ndarray and batch.ndim and batch.shape[0] == rows:
        return
    wrong: list[str] = []
    count = 0
    for path, leaf in _leaves(batch, ""):
        count += 1
        found = _fault(leaf, rows)
        if found:
            wrong.append(f"{path or 'the batch'}: wanted {rows} rows, found {found}")
    if not count:
        cure = ": is a `return` missing?" if batch is None else ""
        raise Mismatch(f"{by} returned {batch!r:.80}, wanted a tree of arrays{cure}")
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        raise Mismatch(
            f"{by} must return a tree of arrays with a row for each of the {rows} rows that it is "
            "given. Leave records out by Pipeline(filter=...), make an array of a list by "
            "np.asarray(...), and of what all rows share by np.full(rows, ...):",
            [*wrong[:_LISTED], *more],
        )


def is_array(value: Any) -> bool:
    """Whether it is an array, of whatever library."""
    # np.str_ and np.bytes_ are texts first.
    return (
        not isinstance(value, str | bytes) and hasattr(value, "shape") and hasattr(value, "dtype")
    )


def _fault(leaf: Any, rows: int) -> str:
    """What a leaf is instead of an array of so many rows; empty: it is one."""
    if not is_array(leaf):
        return f"{type(leaf).__name__} {leaf!r:.40}, which is no array"
    shape = tuple(leaf.shape)
    return "" if shape and shape[0] == rows else f"{leaf.dtype} of shape {list(shape)}"


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if node is None:
        return
    if isinstance(node, Mapping):
        for key in node:
            yield from _leaves(node[key], f"{path}[{key!r}]")
    elif isinstance(node, tuple | list):
        for index, each in enumerate(node):
            yield from _leaves(each, f"{path}[{index}]")
    elif is_array(node):
        yield path, node
    else:
        children = _registered(node)
        if children is None:
            yield path, node
        for name, each in children or ():
            yield from _leaves(each, f"{path}{name}")


def _registered(node: Any) -> list[tuple[str, Any]] | None:
    """The children of a node registered with JAX, with their names; None: it is a leaf.

    Whoever registered one has imported JAX; nobody else needs to.
    """
    trees = getattr(sys.modules.get("jax"), "tree_util", None)
    if trees is None or is_spent(type(node)):
        return None
    found, _ = trees.tree_flatten_with_path(node, is_leaf=lambda each: each is not node)
    if len(found) == 1 and found[0][1] is node:
        return None
    return [(trees.keystr(path), each) for path, each in found]

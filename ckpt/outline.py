"""What a tree record says of a tree: all but the values; and whether another tree has the same.

A train loop saves one structure again and again. JAX flattens a tree in C, a hundred times as fast
as our walk that names every leaf; so when structure and leaves look exactly as they did the last
time, the outline of that time is used again.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from ckpt.leaves import EmptySpec, LeafSpec

_INT64 = range(-(2**63), 2**63)


class Look(NamedTuple):
    """What a tree looks like to JAX. Equal looks have equal outlines; the reverse need not hold."""

    treedef: Any
    text: str
    """Static data may be equal and yet differ (1, True, 1.0), or be changed in place."""
    leaves: list[Any]
    """All that the specs depend on but their places: one list for all leaves, as a tuple for each
    would set off the garbage collector in the middle of a save."""


@dataclass(frozen=True, eq=False)
class Outline:
    """Structure and leaves of a tree. Compared by identity: one object, one outline."""

    structure: Any
    """JSON value: version and structure record."""
    specs: tuple[LeafSpec, ...]
    """In JAX's order; the structure record counts them in it."""
    empties: tuple[EmptySpec, ...]
    """Nodes without leaves, for Orbax's files only: the structure record has them too."""
    look: Look | None = field(default=None, repr=False)

    @functools.cached_property
    def record(self) -> bytes:
        """The tree record as JSON, as it stands in an image."""
        value = {
            "structure": self.structure,
            "leaves": [spec.to_json() for spec in self.specs],
            "empty": [node.to_json() for node in self.empties],
        }
        return json.dumps(value, separators=(",", ":")).encode()


def look_at(tree: Any) -> tuple[Look, list[Any]] | None:
    """How a tree looks, and its leaves; None if JAX cannot flatten it."""
    try:
        values, treedef = jax.tree.flatten(tree)
        text = str(treedef)
    except (TypeError, ValueError, RecursionError, SystemError):  # the last: a tree within itself
        return None
    lookers = {type(value): _looker(value) for value in {type(v): v for v in values}.values()}
    leaves: list[Any] = []
    for value in values:
        leaves += lookers[type(value)](value)
    return Look(treedef, text, leaves), values


def _looker(value: Any) -> Callable[[Any], tuple[Any, ...]]:
    """For leaves of this type: what tells them apart."""
    kind = type(value)
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return lambda array: (kind, array.aval, array.sharding, array.committed)
    if isinstance(value, np.ndarray | np.generic):
        return lambda array: (kind, array.dtype, array.shape)
    if kind in (bool, float, complex):
        return lambda _: (kind,)
    if kind is int:
        return lambda number: (kind, number in _INT64 or number)
    if kind in (str, bytes):
        return lambda text: (kind, text)
    return lambda _: (object(),)  # equal to nothing else

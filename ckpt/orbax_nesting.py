"""The tree of an item that Orbax wrote, from the values of its leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.errors import Damaged
from ckpt.orbax_files import EMPTY, SEQUENCE, TREE, OrbaxItem, OrbaxLeaf


def empty_value(leaf: OrbaxLeaf) -> Any:
    """The value of a leaf that is None or an empty container."""
    value = EMPTY[leaf.value_type]
    return value.copy() if isinstance(value, (dict, list)) else value


def rebuild(item: OrbaxItem, values: Sequence[Any]) -> Any:
    """The tree of an item from the values of its leaves, in their order.

    Mappings become dicts with text keys and sequences lists, as Orbax gives them without a
    template; tuples come back as such only where the writer recorded rich types. Named tuples and
    other nodes are dicts.

    Raises:
        Damaged: the keys of the leaves contradict each other.
    """
    if len(item.leaves) == 1 and not item.leaves[0].keys:
        return values[0]
    root = _Node()
    kinds: dict[tuple[str, ...], int] = {}
    for leaf, value in zip(item.leaves, values, strict=True):
        node, path = root, tuple(key for key, _ in leaf.keys)
        for depth, (key, kind) in enumerate(leaf.keys):
            if kinds.setdefault(path[:depth], kind) != kind or type(node) is not _Node:
                raise Damaged(f"{item.location}/{TREE}: {leaf.param}: contradicts other keys")
            if depth == len(leaf.keys) - 1:
                if key in node:
                    raise Damaged(f"{item.location}/{TREE}: {leaf.param}: is there twice")
                node[key] = value
            else:
                node = node.setdefault(key, _Node())
        if not leaf.keys:
            raise Damaged(f"{item.location}/{TREE}: a leaf without keys beside others")
    return _finished(item, root, (), kinds)


class _Node(dict[Any, Any]):
    """An inner node while a tree is built; tells it from a leaf that is a dict."""


def _finished(
    item: OrbaxItem,
    node: dict[Any, Any],
    path: tuple[str, ...],
    kinds: Mapping[tuple[str, ...], int],
) -> Any:
    built = {
        key: _finished(item, value, (*path, key), kinds) if isinstance(value, _Node) else value
        for key, value in node.items()
    }
    if kinds.get(path) != SEQUENCE:
        return built
    count = len(built)
    if any(str(i) not in built for i in range(count)):
        raise Damaged(
            f"{item.location}/{TREE}: {'.'.join(path)}: wanted entries 0 .. {count - 1} of a "
            f"sequence, found {', '.join(built)}"
        )
    in_order = [built[str(i)] for i in range(count)]
    return tuple(in_order) if path in item.tuples else in_order

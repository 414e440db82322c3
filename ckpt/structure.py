"""The structure record of a tree: what it looks like, and the tree from it.

Nested JSON. A leaf is its index, None is null, all other nodes are objects:

    {"dict": {"kernel": 0, "bias": 1}}           keys are text
    {"dict_items": [[1, 0], [{"bytes": ..}, 1]]} keys are anything that `plain` can encode
    {"ordered_dict": [["b", 0], ["a", 1]]}
    {"defaultdict": [["a", 0]], "factory": "list"}
    {"list": [0, 1]}    {"tuple": [0, 1]}
    {"namedtuple": "module:Name", "fields": {"mu": 0, "nu": 1}}
    {"dataclass": "module:Name", "fields": {"w": 0}, "static": {"width": 8}}
    {"node": "module:Name", "keys": ["w"], "children": [0], "static": ..}
    {"opaque": "reason", "type": "module:Name", "keys": ["w"], "children": [0]}

`static` is what JAX calls aux data or meta fields, in the form of `plain`. Where it has no such
form (functions, say), or the class cannot be found by its name, the node is opaque: it is saved,
and restored into a template, but not without one. A dict comes back with sorted keys, as from JAX.
The default factory of a defaultdict is kept if it is one of Python's own types.

A record may be hostile. Classes are looked up among the loaded modules, never imported, and must
be what the record says: a namedtuple with these fields, a dataclass or class registered with JAX.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax

from ckpt import plain
from ckpt.errors import CheckpointError, Damaged, Unsupported
from ckpt.nodes import FACTORIES, child_name, distinct, entry_text, escape, look_up, place, text

MAX_DEPTH = 128
"""Levels of a tree; keeps the record below the nesting that Python's JSON reader accepts."""


def join(record: Any, leaf: Callable[[Any, str], Any], name: str = "", depth: int = 0) -> Any:
    """The tree of a record. `leaf` takes the index that a leaf has in the record, and its path.

    Raises:
        Damaged: not a record, or one that the classes it names contradict.
        Unsupported: an opaque node, or a class that is not loaded or has changed.
    """
    if type(record) is int:
        return leaf(record, name)
    if record is None:
        return None
    if depth > MAX_DEPTH:
        raise Damaged(f"structure record: nested more than {MAX_DEPTH} deep at {name[:200]}")

    def join_all(records: Iterable[tuple[str, Any]]) -> list[Any]:
        return [join(child, leaf, child_name(name, key), depth + 1) for key, child in records]

    def join_items(items: list[Any]) -> list[tuple[Any, Any]]:
        pairs = [pair for pair in items if isinstance(pair, list) and len(pair) == 2]
        keys = [_key(pair[0], name) for pair in pairs]
        if len(pairs) != len(items) or len(set(keys)) != len(keys):
            raise Damaged(f"structure record: wanted distinct keys at {place(name)}")
        texts = (escape(text(key)) for key in keys)
        children = join_all(zip(texts, (child for _, child in pairs), strict=True))
        return list(zip(keys, children, strict=True))

    match record:
        case {"dict": dict(items)} if len(record) == 1:
            children = join_all((escape(key), child) for key, child in items.items())
            return dict(sorted(zip(items, children, strict=True), key=operator.itemgetter(0)))
        case {"dict_items": list(items)} if len(record) == 1:
            return dict(join_items(items))
        case {"ordered_dict": list(items)} if len(record) == 1:
            return OrderedDict(join_items(items))
        case {"defaultdict": list(items), "factory": None | str() as factory} if len(record) == 2:
            if factory is not None and factory not in FACTORIES:
                raise Damaged(f"structure record: no default factory {factory[:200]!r}")
            return defaultdict(FACTORIES[factory] if factory else None, join_items(items))
        case {"list": list(items)} if len(record) == 1:
            return join_all((str(i), child) for i, child in enumerate(items))
        case {"tuple": list(items)} if len(record) == 1:
            return tuple(join_all((str(i), child) for i, child in enumerate(items)))
        case {"namedtuple": str(where), "fields": dict(fields)} if len(record) == 2:
            return _namedtuple(
                where, dict(zip(fields, join_all(fields.items()), strict=True)), name
            )
        case {"dataclass": str(where), "fields": dict(fields), "static": dict(static)} if (
            len(record) == 3
        ):
            values = dict(zip(fields, join_all(fields.items()), strict=True))
            constants = {key: plain.decode(constant) for key, constant in static.items()}
            return _dataclass(where, values, constants, name)
        case {
            "node": str(where),
            "keys": list(keys),
            "children": list(items),
            "static": static,
        } if len(record) == 4 and len(keys) == len(items) and all(isinstance(k, str) for k in keys):
            children = join_all(zip(keys, items, strict=True))
            return _registered(where, keys, children, plain.decode(static), name)
        case {"opaque": str(reason), "type": str(where), "keys": list(), "children": list()}:
            raise Unsupported(
                f"{place(name)}: a {where[:200]} cannot be rebuilt from its record: "
                f"{reason[:500]}; restore with a template (like=)"
            )
    raise Damaged(
        f"structure record: no node of this release at {place(name)}: {str(record)[:200]}"
    )


def _namedtuple(where: str, children: dict[str, Any], name: str) -> Any:
    found = _find(where, name)
    fields = getattr(found, "_fields", None)
    if not issubclass(found, tuple) or not isinstance(fields, tuple):
        raise Unsupported(f"{place(name)}: wanted a namedtuple, found {where[:200]}, which is none")
    if set(fields) != children.keys():
        raise _changed(where, list(children), list(fields), name)
    ordered = [children[field] for field in fields]
    value = _call(lambda: found(*ordered), where, name)
    if type(value) is not found or len(value) != len(ordered):
        raise _changed(where, list(children), list(fields), name)
    _check_same(value, ordered, where, name)
    return value


def _dataclass(where: str, children: dict[str, Any], constants: dict[str, Any], name: str) -> Any:
    found = _find(where, name)
    if not jax.tree_util.is_tree_node(found) or not hasattr(found, "__dataclass_fields__"):
        raise _unregistered(where, name)
    known = [field.name for field in dataclasses.fields(found) if field.init]
    if sorted(known) != sorted([*children, *constants]):
        raise _changed(where, [*children, *constants], known, name)
    value = _call(lambda: found(**children, **constants), where, name)
    keys, held, _ = _flatten(value, where, name)
    if sorted(keys) != sorted(children):
        raise _changed(where, list(children), keys, name)
    _check_same(held, [children[key] for key in keys], where, name)
    for key, constant in constants.items():
        _check_static(getattr(value, key, None), constant, where, name)
    return value


def _registered(where: str, keys: list[str], children: list[Any], static: Any, name: str) -> Any:
    found = _find(where, name)
    from_children = _from_registry(found, where, name)
    value = _call(lambda: from_children(static, children), where, name)
    rebuilt_keys, held, rebuilt_static = _flatten(value, where, name)
    if keys != rebuilt_keys:
        raise _changed(where, keys, rebuilt_keys, name)
    _check_same(held, children, where, name)
    _check_static(rebuilt_static, static, where, name)
    return value


def _from_registry(found: type, where: str, name: str) -> Callable[[Any, list[Any]], Any]:
    """The function by which a class is put together again, as it was registered with jax.

    Without an instance at hand jax has no public way to it that checks its arguments:
    `PyTreeDef.from_node_data_and_children` reads past the end of too short a list of children.
    """
    registry = getattr(jax._src.tree_util, "_registry", {})
    from_children = getattr(registry.get(found), "from_iter", None)
    if from_children is None:
        raise _unregistered(where, name)
    return from_children


def _find(where: str, name: str) -> Any:
    found = look_up(where)
    if not isinstance(found, type):
        module = where.partition(":")[0]
        raise Unsupported(
            f"{place(name)}: the class {where[:200]} is not loaded; import {module[:200]} before "
            "restoring, or restore with a template (like=)"
        )
    return found


def _call(make: Callable[[], Any], where: str, name: str) -> Any:
    try:
        return make()
    except CheckpointError:
        raise
    except Exception as error:  # anything may come from the constructor of a class of the user
        raise Unsupported(
            f"{place(name)}: {where[:200]} could not be put together from what was saved "
            f"({type(error).__name__}: {error}); restore with a template (like=)"
        ) from error


def _flatten(value: Any, where: str, name: str) -> tuple[list[str], list[Any], Any]:
    """Keys, children and static data of a node that was put together, as a save would see it."""
    try:
        pairs, static = jax.tree_util.flatten_one_level_with_keys(value)
    except ValueError as error:
        raise _unregistered(where, name) from error
    pairs = list(pairs)
    return distinct(entry_text(entry) for entry, _ in pairs), [child for _, child in pairs], static


def _check_same(held: Iterable[Any], children: list[Any], where: str, name: str) -> None:
    if any(one is not other for one, other in zip(held, children, strict=True)):
        raise Unsupported(
            f"{place(name)}: {where[:200]} does not hold what it was put together from, so nobody "
            "can tell that it is what was saved; restore with a template (like=)"
        )


def _check_static(found: Any, wanted: Any, where: str, name: str) -> None:
    if not plain.same(found, wanted):
        raise Unsupported(
            f"{place(name)}: static data of {where[:200]} was {str(wanted)[:200]} when it was "
            f"saved, and comes back as {str(found)[:200]}; restore with a template (like=)"
        )


def _changed(where: str, saved: list[str], known: list[str], name: str) -> CheckpointError:
    return Unsupported(
        f"{place(name)}: {where[:200]} had the fields {str(saved)[:200]} when it was saved, and "
        f"has {str(known)[:200]} now; restore with a template (like=)"
    )


def _unregistered(where: str, name: str) -> CheckpointError:
    return Unsupported(
        f"{place(name)}: {where[:200]} is not registered with jax as it was when it was saved; "
        "register it before restoring, or restore with a template (like=)"
    )


def _key(record: Any, name: str) -> Any:
    key = plain.decode(record)
    try:
        hash(key)
    except TypeError as error:
        raise Damaged(f"structure record: no key at {place(name)}: {str(record)[:200]}") from error
    return key

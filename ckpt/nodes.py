"""One node of a pytree: taken apart into named children, with its line in the structure record.

`structure` says what the record looks like, and reads it.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from ckpt import plain
from ckpt.errors import Unsupported

FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, bool, int, float, complex, str, bytes)
}
_SEQUENCE, _NAME = 1, 2
_KEY_TYPES: dict[type, int] = {
    SequenceKey: _SEQUENCE,
    FlattenedIndexKey: _SEQUENCE,
    DictKey: _NAME,
    GetAttrKey: _NAME,
}
"""Orbax's key types; it refuses other keys than these."""


class Node(NamedTuple):  # there is one per node, and a tuple is made in a third of the time
    """A node taken apart. The sequences have one entry per child."""

    segments: Sequence[str]
    """Parts of leaf names, unique in the node, escaped."""
    keys: Sequence[tuple[str, int]]
    """Orbax's key and key type."""
    children: Sequence[Any]
    record: Callable[[list[Any]], Any]
    """The records of the children to that of the node."""
    rebuild: Callable[[list[Any]], Any]
    """Other children to a node like this one."""
    orbax_type: str
    """Orbax's name for such a node if it has no children."""
    hidden: frozenset[int] = frozenset()
    """Numbers of the children that Orbax has no names for, or takes for another one of them."""


def split(value: Any, name: str) -> Node | None:
    """A node taken apart; None for a leaf. `name` is its path, for messages.

    Raises:
        Unsupported: a dict with keys that have no order.
    """
    kind: Any = type(value)
    if kind is dict:
        return _split_dict(value, name)
    if kind is list or kind is tuple:
        return _split_sequence(value, kind)
    if not jax.tree_util.is_tree_node(kind):
        return None
    if value is None:
        return Node((), (), (), lambda _: None, lambda _: None, "None")
    if kind is OrderedDict:
        return _split_ordered(value)
    if kind is defaultdict:
        return _split_defaultdict(value, name)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        children, static = jax.tree_util.flatten_one_level(value)
        if static is kind and len(tuple(children)) == len(value):
            return _split_namedtuple(value)
    return _split_registered(value)


def child_name(parent: str, segment: str) -> str:
    """The name of a child from that of its parent; the root's is empty."""
    return f"{parent}/{segment}" if parent else segment


def escape(key: str) -> str:
    """A key as a part of a leaf name: readable, never empty, without `/`, on one line, UTF-8.

    `~0` stands for `~` and `~1` for `/` as in JSON pointers, `~e` for nothing at all, `~u` and four
    hexadecimal digits for a character that has no glyph or no encoding.
    """
    if key.isascii() and key.isprintable() and key and "~" not in key and "/" not in key:
        return key
    key = key.replace("~", "~0").replace("/", "~1")
    return "".join(c if c.isprintable() else f"~u{ord(c):04x}" for c in key) or "~e"


def _split_dict(value: dict[Any, Any], name: str) -> Node:
    keys = _sorted(value, name)
    children = [value[key] for key in keys]

    def rebuild(new: list[Any]) -> Any:
        return dict(zip(keys, new, strict=True))

    if set(map(type, keys)) <= {str} and all(map(plain.is_utf8, keys)):
        return Node(
            [escape(key) for key in keys],
            [(key, _NAME) for key in keys],
            children,
            lambda records: {"dict": dict(zip(keys, records, strict=True))},
            rebuild,
            "Dict",
        )
    segments, texts, hidden = _segments(keys)

    def record(records: list[Any]) -> Any:
        return _items("dict_items", keys, segments, records)

    return Node(segments, texts, children, record, rebuild, "Dict", hidden)


def _split_ordered(value: OrderedDict[Any, Any]) -> Node:
    keys = list(value)
    segments, texts, hidden = _segments(keys)

    def rebuild(new: list[Any]) -> Any:
        return OrderedDict(zip(keys, new, strict=True))

    def record(records: list[Any]) -> Any:
        return _items("ordered_dict", keys, segments, records)

    return Node(segments, texts, list(value.values()), record, rebuild, "Dict", hidden)


def _split_defaultdict(value: defaultdict[Any, Any], name: str) -> Node:
    keys = _sorted(value, name)
    children = [value[key] for key in keys]
    segments, texts, hidden = _segments(keys)
    factory = value.default_factory

    def record(records: list[Any]) -> Any:
        known = getattr(factory, "__name__", None)
        if factory is None or FACTORIES.get(known or "") is factory:
            return _items("defaultdict", keys, segments, records, factory=known)
        return _opaque(defaultdict, segments, records, "its default factory is no builtin type")

    def rebuild(new: list[Any]) -> Any:
        return defaultdict(factory, zip(keys, new, strict=True))

    return Node(segments, texts, children, record, rebuild, "Dict", hidden)


def _split_sequence(value: Sequence[Any], kind: type) -> Node:
    segments = [str(i) for i in range(len(value))]
    return Node(
        segments,
        [(segment, _SEQUENCE) for segment in segments],
        value,
        lambda records: {kind.__name__: records},
        kind,
        kind.__name__.capitalize(),
    )


def _split_namedtuple(value: Any) -> Node:
    kind, fields = type(value), value._fields

    def record(records: list[Any]) -> Any:
        where = _reference(kind)
        if where is None:
            return _opaque(kind, fields, records, "no class of that name can be looked up")
        return {"namedtuple": where, "fields": dict(zip(fields, records, strict=True))}

    keys = [(field, _NAME) for field in fields]
    # Orbax writes None for every empty namedtuple.
    return Node(fields, keys, tuple(value), record, lambda new: kind(*new), "None")


def _split_registered(value: Any) -> Node:
    kind = type(value)
    pairs, static = jax.tree_util.flatten_one_level_with_keys(value)
    pairs = list(pairs)
    texts = [entry_text(entry) for entry, _ in pairs]
    kinds = {_KEY_TYPES.get(type(entry), 0) for entry, _ in pairs}
    # Orbax makes a dict or a list of them; a list, only if no place in it is left out.
    is_list = kinds == {_SEQUENCE} and set(texts) == {str(i) for i in range(len(pairs))}
    keys, hidden = _orbax_keys(texts, _SEQUENCE if is_list else _NAME)
    if 0 in kinds:
        hidden = frozenset(range(len(pairs)))
    segments = distinct(texts)

    def record(records: list[Any]) -> Any:
        where = _reference(kind)
        if where is None:
            return _opaque(kind, segments, records, "no class of that name can be looked up")
        try:
            if dataclasses.is_dataclass(kind):
                names = [entry.name for entry, _ in pairs if type(entry) is GetAttrKey]
                constants = _static_fields(value, names, static)
                if len(names) == len(pairs) == len(set(names)) and constants is not None:
                    fields = dict(zip(names, records, strict=True))
                    encoded = {key: plain.encode(held) for key, held in constants.items()}
                    return {"dataclass": where, "fields": fields, "static": encoded}
            encoded = plain.encode(static)
        except Unsupported as error:
            return _opaque(kind, segments, records, f"static data: {error}")
        return {"node": where, "keys": segments, "children": records, "static": encoded}

    def rebuild(new: list[Any]) -> Any:
        treedef = jax.tree.structure(value, is_leaf=lambda item: item is not value)
        return jax.tree.unflatten(treedef, new)

    return Node(segments, keys, [child for _, child in pairs], record, rebuild, "None", hidden)


def _static_fields(value: Any, names: list[str], static: Any) -> dict[str, Any] | None:
    """The static fields of a registered dataclass by name; None if it is registered otherwise."""
    fields = [f.name for f in dataclasses.fields(value) if f.init and f.name not in names]
    if type(static) is not tuple or len(static) != len(fields):
        return None
    if any(
        getattr(value, name, None) is not held for name, held in zip(fields, static, strict=True)
    ):
        return None
    return dict(zip(fields, static, strict=True))


def _sorted(value: dict[Any, Any], name: str) -> list[Any]:
    """Keys in JAX's order; keys of several types, which JAX refuses, by type and then by value."""
    try:
        return sorted(value)
    except TypeError:
        pass
    try:
        return sorted(value, key=lambda key: (type(key).__qualname__, key))
    except TypeError as error:
        kinds = ", ".join(sorted({type(key).__qualname__ for key in value}))
        raise Unsupported(
            f"{place(name)}: a dict with keys that have no order ({kinds}) has no fixed order of "
            "leaves; use keys of one type, text best of all"
        ) from error


def _segments(keys: list[Any]) -> tuple[list[str], list[tuple[str, int]], frozenset[int]]:
    """Parts of leaf names for the keys of a dict; Orbax's keys, and which of them it lacks."""
    several = len({type(key) for key in keys}) > 1
    segments = [
        f"~{type(key).__name__}:{escape(text(key))}"
        if several and type(key) is not str
        else escape(text(key))
        for key in keys
    ]
    return distinct(segments, escaped=True), *_orbax_keys([text(key) for key in keys], _NAME)


def _orbax_keys(
    texts: Sequence[str], key_type: int
) -> tuple[list[tuple[str, int]], frozenset[int]]:
    """Orbax's keys, distinct, and which of the children it takes for another one.

    Of children whose keys have one text, such as 1 and "1", the first keeps it. What is below the
    others must not get into the dict of the first, so they stand beside it, without values.
    """
    names = [_utf8(each) for each in texts]
    taken = set(names)
    if len(taken) == len(names):
        return [(name, key_type) for name in names], frozenset()
    keys: dict[str, int] = {}
    hidden = []
    for i, name in enumerate(names):
        if name in keys:
            hidden.append(i)
            name = next(n for k in itertools.count(i) if (n := f"{name}~{k}") not in taken)
            taken.add(name)
        keys[name] = key_type
    return list(keys.items()), frozenset(hidden)


def distinct(texts: Iterable[str], *, escaped: bool = False) -> list[str]:
    """Escaped texts, with a number behind each that stood before."""
    segments: dict[str, None] = {}
    for name in texts:
        segment = name if escaped else escape(name)
        while segment in segments:
            segment = f"{segment}~{len(segments)}"
        segments[segment] = None
    return list(segments)


def text(key: Any) -> str:
    """The text of a dict key, as Orbax takes it."""
    # Python refuses to write numbers of very many digits.
    return hex(key) if type(key) is int and key.bit_length() > 1024 else str(key)


def entry_text(entry: Any) -> str:
    """The text of a key entry, as Orbax takes it."""
    kind = type(entry)
    if kind is GetAttrKey:
        return str(entry.name)
    if kind is DictKey or kind is FlattenedIndexKey:
        return text(entry.key)
    return str(entry.idx) if kind is SequenceKey else str(entry)


def _utf8(text: str) -> str:
    return text if plain.is_utf8(text) else escape(text)


def _items(
    form: str, keys: list[Any], segments: Sequence[str], records: list[Any], **more: Any
) -> Any:
    try:
        items = [[plain.encode(key), child] for key, child in zip(keys, records, strict=True)]
    except Unsupported as error:
        return _opaque(dict, segments, records, f"a key: {error}")
    return {form: items, **more}


def _opaque(kind: type, segments: Sequence[str], records: list[Any], reason: str) -> Any:
    where = f"{kind.__module__}:{kind.__qualname__}"
    return {"opaque": reason, "type": where, "keys": list(segments), "children": records}


def _reference(kind: type) -> str | None:
    """`module:qualname` of a class; None if that does not lead back to it."""
    where = f"{kind.__module__}:{kind.__qualname__}"
    return where if look_up(where) is kind else None


def place(name: str) -> str:
    return f"node {name[:200]}" if name else "the root of the tree"


def look_up(where: str) -> Any:
    """What `module:qualname` names among the loaded modules, or None.

    Reads the dictionaries themselves: attribute access could run code, imports even.
    """
    module, _, qualname = where.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        try:
            found = object.__getattribute__(found, "__dict__").get(part)
        except AttributeError:
            return None
    return found

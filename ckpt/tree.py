"""A pytree as named leaves and a record of its structure, and back.

Leaf names are the keys from the root joined by `/`, such as `params/dense/kernel` or `opt/0/mu`;
`nodes.escape` says what becomes of odd characters. In a dict with keys of several types those that
are no text carry their type (`~int:1`). A tree that is one leaf calls it `~`.

Orbax joins keys by `.` instead, so that `{"a.b": x, "a": {"b": y}}` has one name for two leaves.
The first leaf of such a name keeps it; the others get a `param` of their own and `orbax=False`.
So do the leaves below a key that Orbax takes for another one of the same node, such as "1" for 1.

The order of leaves is JAX's. The structure record is a JSON value: `structure` describes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ckpt import plain
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.leaves import EmptySpec, LeafSpec
from ckpt.nodes import child_name, place, split
from ckpt.outline import Outline, look_at
from ckpt.structure import MAX_DEPTH, join
from ckpt.values import Place, describe
from ckpt.wording import counted

VERSION = 1
ROOT = "~"
MAX_PARAM_BYTES = 4096
"""Far below the 65,535 bytes of an OCDBT key, which also holds the chunk."""


class Leaf(NamedTuple):
    """A leaf of a tree: its name, the value itself, and what the tree record says of it."""

    name: str
    value: Any
    spec: LeafSpec


@dataclass(frozen=True, slots=True)
class Flat:
    """A tree as a list: its outline, and the values in the order of the outline's specs."""

    outline: Outline
    values: Sequence[Any]

    @property
    def structure(self) -> Any:
        """JSON value: version and structure record."""
        return self.outline.structure

    @property
    def specs(self) -> tuple[LeafSpec, ...]:
        """What the tree record says of each leaf."""
        return self.outline.specs

    @property
    def empties(self) -> tuple[EmptySpec, ...]:
        """Nodes without leaves."""
        return self.outline.empties

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Names, values and specs together."""
        return tuple(map(Leaf, (s.name for s in self.specs), self.values, self.specs))


_SHOWN = 100
"""Characters of the name of a node that is too deep."""


def flatten(tree: Any, *, abstract: bool = False, known: Outline | None = None) -> Flat:
    """The leaves of `tree`, and a record from which `unflatten` builds it again.

    With `abstract` the tree is a template: leaves may be `jax.ShapeDtypeStruct` or deleted arrays.
    `known`, the outline of an earlier tree, is used again, the same object, if this tree has the
    same (structure, names, dtypes, shapes, shardings); deleted arrays go unnoticed then.

    Raises:
        Unsupported: a leaf that cannot be held exactly, dict keys without an order, or a tree
            deeper than 128 levels; names the path.
        Misuse: a deleted or donated array, or a tracer; names the leaf.
    """
    looked = look_at(tree) if known is not None and not abstract else None
    if looked is not None and known is not None and known.look == looked[0]:
        return Flat(known, looked[1])
    walk = _Walk()
    record = walk.visit(tree, "", "", (), 0)
    params, visible = _params(walk)
    specs = tuple(
        describe(
            value, Place(walk.names[i], params[i], walk.keys[i], visible[i]), abstract=abstract
        )
        for i, value in enumerate(walk.values)
    )
    structure = {"version": VERSION, "tree": record}
    looked = looked or (None if abstract else look_at(tree))
    look = None if looked is None else looked[0]
    return Flat(Outline(structure, specs, tuple(walk.empties), look), walk.values)


def must_end(tree: Any) -> None:
    """A look at a tree that may be a template, far shorter than `flatten`.

    Raises:
        Unsupported: it contains itself, or is very deep; names the path.
    """
    try:
        jax.tree.structure(tree)
    except (RecursionError, SystemError):
        flatten(tree, abstract=True)
        raise
    except (TypeError, ValueError):
        pass  # keys of several types


def unflatten(structure: Any, values: Sequence[Any]) -> Any:
    """The tree of a structure record, with `values` for its leaves.

    Raises:
        Damaged: no structure record, or one whose leaves are not exactly those of `values`.
        Unsupported: a newer version, an opaque node, or a class that is not loaded or has changed.
    """
    if not isinstance(structure, dict) or structure.keys() != {"version", "tree"}:
        raise Damaged(f"structure record: wanted version and tree, found {str(structure)[:200]}")
    version = structure["version"]
    if type(version) is not int or version < 1:
        raise Damaged(f"structure record: no version: {str(version)[:200]}")
    if version > VERSION:
        raise Unsupported(
            f"structure record: version {version} is newer than {VERSION}, the newest that this "
            "release reads; install a newer release"
        )
    missing = set(range(len(values)))

    def leaf(index: int, name: str) -> Any:
        if index not in missing:
            raise Damaged(
                f"structure record: leaf {index} at {place(name)} is used twice, or is none of "
                f"the {counted(len(values), 'leaf', 'leaves')}"
            )
        missing.remove(index)
        return values[index]

    tree = join(structure["tree"], leaf)
    if missing:
        raise Damaged(
            f"structure record: {len(missing)} of {counted(len(values), 'leaf', 'leaves')} without "
            f"a place in the tree, the first of them leaf {min(missing)}"
        )
    return tree


def with_values(like: Any, specs: Sequence[LeafSpec], values: Sequence[Any]) -> Any:
    """A tree of the nodes of `like`, with `values` for its leaves: one for each of its specs."""
    try:
        structure: Any = jax.tree.structure(like)
        if structure.num_leaves == len(values):
            return jax.tree.unflatten(structure, values)
    except (TypeError, ValueError):
        pass  # what JAX cannot flatten: keys of several types
    names = (spec.name for spec in specs)
    return with_structure_of(like, dict(zip(names, values, strict=True)))


def with_structure_of(like: Any, values: Mapping[str, Any]) -> Any:
    """A tree of the nodes of `like`, with `values` by leaf name for its leaves.

    Static data (functions and the like) is that of `like`. Names that `like` does not have are
    ignored.

    Raises:
        Misuse: a leaf of `like` has no value.
        Unsupported: as `flatten`, but for the leaves, which are not looked at.
    """
    missing: list[str] = []

    def visit(node: Any, name: str, depth: int) -> Any:
        parts = _split(node, name, depth)
        if parts is None:
            name = name or ROOT
            if name not in values:
                missing.append(name)
            return values.get(name)
        return parts.rebuild(
            [
                visit(child, child_name(name, segment), depth + 1)
                for segment, child in zip(parts.segments, parts.children, strict=True)
            ]
        )

    tree = visit(like, "", 0)
    if missing:
        names = ", ".join(missing[:20])
        leaves = counted(len(missing), "leaf", "leaves")
        raise Misuse(f"no value for {leaves} of the template: {names}")
    return tree


class _Walk:
    """Leaves and empty nodes of a tree, in order."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.names: list[str] = []
        self.params: list[str] = []
        self.keys: list[tuple[tuple[str, int], ...]] = []
        self.visible: list[bool] = []
        self.empties: list[EmptySpec] = []

    def visit(
        self,
        node: Any,
        name: str,
        param: str,
        keys: tuple[tuple[str, int], ...],
        depth: int,
        *,
        visible: bool = True,
    ) -> Any:
        """The record of `node`, once its leaves are noted."""
        parts = _split(node, name, depth)
        if parts is None:
            self.values.append(node)
            self.names.append(name or ROOT)
            self.params.append(param)
            self.keys.append(keys)
            self.visible.append(visible)
            return len(self.values) - 1
        if not parts.children:
            self.empties.append(EmptySpec(keys, parts.orbax_type, len(self.values)))
        hidden = parts.hidden
        records = [
            self.visit(
                child,
                child_name(name, segment),
                f"{param}.{key[0]}" if keys else key[0],
                (*keys, key),
                depth + 1,
                visible=visible and i not in hidden,
            )
            for i, (segment, key, child) in enumerate(
                zip(parts.segments, parts.keys, parts.children, strict=True)
            )
        ]
        return parts.record(records)


def _split(node: Any, name: str, depth: int) -> Any:
    parts = split(node, name)
    if parts is not None and depth > MAX_DEPTH:
        shortened = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        raise Unsupported(
            f"{place(shortened)}: wanted a tree of at most {MAX_DEPTH} levels, found a deeper one, "
            "or one that contains itself"
        )
    return parts


def _params(walk: _Walk) -> tuple[list[str], list[bool]]:
    """Unique names inside OCDBT, and whether each is the one that Orbax would take."""
    first: dict[str, int] = {}
    for i, param in enumerate(walk.params):
        if walk.visible[i] and _is_param(param):
            first.setdefault(param, i)
    params, visible = list(walk.params), []
    for i, param in enumerate(walk.params):
        visible.append(first.get(param) == i)
        if not visible[i]:
            params[i] = _own_param(walk.names[i], first)
            first[params[i]] = i
    return params, visible


def _is_param(param: str) -> bool:
    """Whether a name works as a folder of keys: `x/` would be the same one as `x`."""
    if not param or param[-1] == "/":
        return False
    if param.isascii():
        return len(param) <= MAX_PARAM_BYTES
    return plain.is_utf8(param) and len(param.encode()) <= MAX_PARAM_BYTES


def _own_param(name: str, taken: Mapping[str, int]) -> str:
    """A name that no leaf has, from the leaf name, which is unique."""
    if len(name.encode()) > MAX_PARAM_BYTES:
        name = hashlib.sha256(name.encode()).hexdigest()
    param = f"~/{name}"
    while param in taken:
        param = f"~{param}"
    return param

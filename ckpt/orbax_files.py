"""Steps that Orbax wrote: their names, items and small JSON files. Neither jax nor TensorStore.

Read are the directories of both API generations: one directory per item (`default`, `state`,
`items`, ... with a `_METADATA` file), and "direct" checkpoints with `_METADATA` at step level.
Optional files may be absent: `_CHECKPOINT_METADATA`, `_sharding`, `array_metadatas/` (without it
nothing says that an array is a PRNG key), `_strings.json` unless there are string leaves.

On file systems a name without `.orbax-checkpoint-tmp` counts as a finished step, as it does for
Orbax; elsewhere `commit_success.txt` decides.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt import layout
from ckpt.errors import Damaged, Misuse, NotFound, StoreFailed, Unsupported
from ckpt.store import Entry, Store, open_store

TEMPORARY = ".orbax-checkpoint-tmp"

SEQUENCE, MAPPING = 1, 2
"""Orbax's key types. A tuple is a sequence, a named tuple a mapping: more is not stored."""

TREE = "_METADATA"
"""The file that tells the leaves of an item."""

_STEP = layout.ORBAX_STEP
_STEP_MARKS = {_STEP, TREE, layout.ORBAX_V1}
_DELETION = "_CHECKPOINT_DELETION"
_PREFERRED = ("default", "state", "items")

EMPTY: Mapping[str, Any] = {
    "None": None,
    "NamedTuple": None,  # an empty one; Orbax gives None as well
    "Dict": {},
    "List": [],
    "Tuple": (),
}
"""The values of leaves that lie nowhere, by Orbax's word for them."""

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """One leaf by its metadata.

    `param` names its array: the keys joined by dots. `keys` are (text, SEQUENCE or MAPPING), from
    the root. `value_type` is Orbax's word: jax.Array, np.ndarray, scalar, string, or that of an
    empty container. `impl` is the PRNG implementation when the array is key data.
    """

    param: str
    keys: tuple[tuple[str, int], ...]
    value_type: str
    impl: str | None = None

    @property
    def is_array(self) -> bool:
        """Whether the value lies in an array; all others come from JSON."""
        return self.value_type in _ARRAYS


@dataclass(frozen=True)
class OrbaxItem:
    """One pytree of one step, as its JSON files describe it.

    `location` is its directory or URL; `missing_is_zero` says that chunks that are not there stand
    for zeros (old checkpoints; otherwise they are damage). `tuples` are the key paths of tuples
    where the writer recorded them. `strings` are the values of string leaves by param.
    """

    location: str
    leaves: tuple[OrbaxLeaf, ...]
    ocdbt: bool
    zarr3: bool
    missing_is_zero: bool
    strings: Mapping[str, str]
    tuples: frozenset[tuple[str, ...]] = frozenset()


def is_orbax_step(path: str | os.PathLike[str]) -> bool:
    """Whether there is a finished step of Orbax at `path`, by its files; nothing is verified.

    Raises:
        StoreFailed: the location could not be read.
    """
    return holds_step(open_store(path))


def holds_step(store: Store) -> bool:
    """Whether a store is one finished step of Orbax, whatever its name; as `is_orbax_step`."""
    if TEMPORARY in os.path.basename(store.location.rstrip("/")):
        return False
    return is_step(store, "")


def is_step(store: Store, name: str) -> bool:
    """Whether a directory of a store is one finished step of Orbax, by its files.

    Also one that has lost the files without which it cannot be read: that is told when it is.
    """
    entries = store.list(name)
    names = {entry.name for entry in entries}
    if not store.renames and layout.MARKER not in names:
        return False
    if names & {*_STEP_MARKS, layout.MARKER, _PREFERRED[0]}:
        return True
    below = f"{name}/" if name else ""
    return any(store.exists(f"{below}{e.name}/{TREE}") for e in entries if _is_item(e))


def is_marked(store: Store) -> bool:
    """Whether a store has a file at its top that only steps of Orbax have.

    Without one, a step of items named by numbers cannot be told from a root of steps.
    """
    return any(entry.name in _STEP_MARKS for entry in store.list(""))


def step_names(root: str | os.PathLike[str], *, prefix: str | None = None) -> dict[int, str]:
    """The finished steps of Orbax in a root: number to directory name, ascending.

    Names are `<step>`, or `<prefix>_<step>` when a prefix is given; zeros may stand in front.
    Where two names mean the same number, the one without zeros counts.
    """
    store = open_store(root)
    pattern = re.compile(rf"{re.escape(prefix)}_([0-9]+)" if prefix else r"([0-9]+)")
    found: dict[int, str] = {}
    for entry in sorted(store.list(""), key=lambda entry: (-len(entry.name), entry.name)):
        match = pattern.fullmatch(entry.name)
        if entry.is_dir and match and is_step(store, entry.name):
            found[int(match[1])] = entry.name
    return dict(sorted(found.items()))


def steps(root: str | os.PathLike[str], *, prefix: str | None = None) -> list[int]:
    """The finished steps of Orbax in a root, ascending; see `step_names`."""
    return list(step_names(root, prefix=prefix))


def items(path: str | os.PathLike[str]) -> dict[str, str]:
    """The items of a step by name: "pytree", "json" (also iterator states of Grain) or "other".

    A direct checkpoint has one, with the empty name.

    Raises:
        NotFound: no checkpoint there.
    """
    store = open_store(path)
    entries = _listed(store, path)
    if any(entry.name == TREE for entry in entries):
        return {"": "pytree"}
    return {entry.name: _kind(store, entry.name) for entry in entries if _is_item(entry)}


def undescribed(where: str) -> Unsupported:
    """The error for what only steps of ours have."""
    return Unsupported(
        f"{where}: written by Orbax, which keeps neither digests nor a manifest: it can be "
        "restored, but not verified; save it once with ckpt to have them"
    )


def trees(path: str | os.PathLike[str]) -> list[str | None]:
    """The pytree items that make up the state of a step, each as `read_item` takes it.

    [None] where that chooses one by itself, as Orbax does; else all, of which none stands out.

    Raises:
        NotFound: no checkpoint there.
    """
    found = [name for name, kind in items(path).items() if kind == "pytree"]
    return [*found] if len(found) > 1 and not set(found) & set(_PREFERRED) else [None]


def full_param(item: str | None, param: str) -> str:
    """The name of a leaf among those of all of `trees`: below the name of its item."""
    return ".".join(part for part in (item, param) if part)


def read_json(path: str | os.PathLike[str], item: str) -> dict[str, Any]:
    """The JSON files of an item by file name: `metadata`, `metrics`, `process_<i>-of-<n>.json`.

    Raises:
        NotFound: no such item, or no JSON in it.
        Damaged: a file does not parse.
    """
    store = open_store(path)
    names = [e.name for e in store.list(item) if not e.is_dir and _is_json_name(e.name)]
    if not names:
        raise NotFound(f"{store.location}/{item}: wanted a JSON item, found {_names(store, item)}")
    return {name: _json(store, f"{item}/{name}") for name in names}


def read_item(path: str | os.PathLike[str], item: str | None = None) -> OrbaxItem:
    """Describe a pytree item. Without a name: `default`, `state`, `items`, or the only one.

    Raises:
        NotFound: no checkpoint there, or no such item.
        Damaged: a small file does not parse, or one that must be there is absent.
        Unsupported: a leaf or layout that is not read; the message says what is.
        Misuse: several items and none was named.
    """
    store = open_store(path)
    name = _choose(store, path, item)
    below = f"{name}/" if name else ""
    where = f"{store.location}/{name}" if name else store.location
    present = {entry.name for entry in store.list(name)}
    if TREE not in present:
        raise _without_tree(where, present)
    tree = _json(store, below + TREE)
    if not isinstance(tree, dict) or not isinstance(tree.get("tree_metadata"), dict):
        raise Damaged(f"{where}/{TREE}: wanted an object with tree_metadata, found no such thing")
    impls = _key_impls(store, below) if "array_metadatas" in present else {}
    leaves = tuple(
        _leaf(f"{where}/{TREE}", text, entry, impls)
        for text, entry in tree["tree_metadata"].items()
    )
    ocdbt = "manifest.ocdbt" in present
    if tree.get("use_ocdbt") and not ocdbt and any(leaf.is_array for leaf in leaves):
        raise Damaged(
            f"{where}: wanted manifest.ocdbt, as {TREE} says, found {_text(present)}; "
            "the step was not copied or written completely"
        )
    return OrbaxItem(
        location=where,
        leaves=leaves,
        ocdbt=ocdbt,
        zarr3=bool(tree.get("use_zarr3", False)),
        missing_is_zero=not tree.get("store_array_data_equal_to_fill_value", False),
        strings=_strings(store, where, below, leaves),
        tuples=_tuples(tree.get("value_metadata_tree"), f"{where}/{TREE}"),
    )


def _is_item(entry: Entry) -> bool:
    return entry.is_dir and TEMPORARY not in entry.name and not entry.name.startswith(".")


def _kind(store: Store, name: str) -> str:
    names = [entry.name for entry in store.list(name) if not entry.is_dir]
    if TREE in names:
        return "pytree"
    return "json" if any(map(_is_json_name, names)) else "other"


def _is_json_name(name: str) -> bool:
    return (
        name in ("metadata", "metrics")
        or re.fullmatch(r"process_\d+-of-\d+\.json", name) is not None
    )


def _listed(store: Store, path: str | os.PathLike[str]) -> list[Entry]:
    entries = store.list("")
    if TEMPORARY in os.path.basename(store.location.rstrip("/")):
        raise NotFound(f"{store.location}: an unfinished step of Orbax, by its name; take another")
    if not is_step(store, ""):
        raise NotFound(
            f"{os.fspath(path)}: wanted a step of Orbax ({_STEP} or an item with {TREE}), "
            f"found {_names(store, '')}"
        )
    return entries


def _choose(store: Store, path: str | os.PathLike[str], item: str | None) -> str:
    entries = _listed(store, path)
    _refuse_deleted(store, entries, item)
    direct = any(entry.name == TREE for entry in entries)
    if direct and not item:
        return ""
    names = [entry.name for entry in entries if _is_item(entry)]
    if item is not None:
        if item not in names:
            raise NotFound(f"{store.location}: wanted item {item!r}, found {_text(names)}")
        return item
    trees = [name for name in names if store.exists(f"{name}/{TREE}")]
    preferred = [name for name in _PREFERRED if name in trees]
    if preferred or len(trees) == 1:
        return (preferred or trees)[0]
    if trees:
        raise Misuse(f"{store.location}: several items, {_text(trees)}: say item=")
    raise _without_tree(store.location, {entry.name for entry in entries})


def _refuse_deleted(store: Store, entries: Sequence[Entry], item: str | None) -> None:
    """An item whose deletion began may be half there; Orbax refuses it too."""
    if all(entry.name != _DELETION for entry in entries):
        return
    record = _json(store, _DELETION)
    name = record.get("checkpointable_name") if isinstance(record, dict) else None
    if item is None or item == name or not isinstance(name, str):
        raise Damaged(
            f"{store.location}: the deletion of item {name!r} was begun and not finished; "
            "finish it with Orbax, or name another item"
        )


def _without_tree(where: str, present: set[str]) -> Exception:
    if "checkpoint" in present:
        return Unsupported(
            f"{where}: holds one msgpack file `checkpoint`, the format of Flax and early Orbax; "
            "restore it with Orbax and save it again"
        )
    return Damaged(
        f"{where}: wanted {TREE}, without which nothing tells the leaves, found {_text(present)}; "
        "Orbax does not open it either"
    )


def _leaf(where: str, text: str, entry: Any, impls: Mapping[str, str]) -> OrbaxLeaf:
    try:
        keys = tuple((part["key"], part["key_type"]) for part in entry["key_metadata"])
        value_type = entry["value_metadata"]["value_type"]
        skipped = entry["value_metadata"].get("skip_deserialize", False)
    except (KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{where}: {text}: wanted keys and a value type: {error!r}") from error
    for key, kind in keys:
        if not isinstance(key, str) or kind not in (SEQUENCE, MAPPING):
            raise Damaged(
                f"{where}: {text}: wanted a text key of type 1 or 2, found {key!r}, {kind}"
            )
    param = ".".join(key for key, _ in keys)
    if value_type in EMPTY:
        return OrbaxLeaf(param, keys, value_type)
    if skipped or value_type not in (*_ARRAYS, "string"):
        raise Unsupported(
            f"{where}: {param}: value type {value_type!r} is not read (only {', '.join(_ARRAYS)}, "
            "string, None and empty containers); restore it with Orbax and save it again"
        )
    return OrbaxLeaf(param, keys, value_type, impls.get(param))


def _key_impls(store: Store, below: str) -> dict[str, str]:
    """PRNG implementations by param: `array_metadatas/` is the only place that tells keys."""
    found = {}
    for entry in store.list(f"{below}array_metadatas"):
        key = f"{below}array_metadatas/{entry.name}"
        if entry.is_dir or not entry.name.startswith("process_"):
            continue
        try:
            for wrapped in _json(store, key)["array_metadatas"]:
                array = wrapped["array_metadata"]
                impl = (array.get("ext_metadata") or {}).get("random_key_impl")
                if impl is not None:
                    found[str(array["param_name"])] = str(impl)
        except (KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{store.location}/{key}: no array metadata: {error!r}") from error
    return found


def _strings(store: Store, where: str, below: str, leaves: Sequence[OrbaxLeaf]) -> dict[str, str]:
    params = [leaf.param for leaf in leaves if leaf.value_type == "string"]
    if not params:
        return {}
    try:
        values = _json(store, f"{below}_strings.json")
    except NotFound as error:
        raise Damaged(f"{where}/_strings.json: absent, but {params[0]} is a string") from error
    for param in params:
        if not isinstance(values, dict) or not isinstance(values.get(param), str):
            raise Damaged(f"{where}/_strings.json: {param}: wanted a string, found none")
    return {param: values[param] for param in params}


def _tuples(encoded: Any, where: str) -> frozenset[tuple[str, ...]]:
    """Key paths of the tuples in the rich description of a tree, which few writers add."""
    if encoded is None:
        return frozenset()
    found = set()
    try:
        pending: list[tuple[tuple[str, ...], Any]] = [((), json.loads(encoded))]
        while pending:
            path, node = pending.pop()
            if isinstance(node, dict) and node.get("category") == "custom":
                if node["clazz"] != "tuple":
                    continue
                found.add(path)
                node = node["entries"]
            elif isinstance(node, dict) and node.get("category") == "namedtuple":
                node = {part["key"]: part["value"] for part in node["entries"]}
            children = enumerate(node) if isinstance(node, list) else node.items()
            pending += [((*path, str(key)), child) for key, child in children]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{where}: value_metadata_tree: {error!r}") from error
    return frozenset(found)


def _json(store: Store, key: str) -> Any:
    raw = store.read(key)
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{store.location}/{key}: wanted JSON: {error}") from error


def _names(store: Store, key: str) -> str:
    if key and not store.exists(key):
        return "nothing"
    try:
        return _text({entry.name for entry in store.list(key)})
    except StoreFailed as error:
        return f"what could not be listed ({error})"


def _text(names: Sequence[str] | set[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 12} more" if len(listed) > 12 else ""
    return (", ".join(listed[:12]) + more) or "nothing"

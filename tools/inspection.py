"""What `ckpt inspect` answers: everything that is known of a step but its values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from ckpt import attempts, dtypes, layout, orbax_files
from ckpt.errors import CheckpointError, Damaged, Misuse, NotFound, Unsupported
from ckpt.leaves import LeafSpec
from ckpt.lineage import StepId
from ckpt.log import joined, late_metrics
from ckpt.reader import Reader
from ckpt.steps import OpenStep, open_step, read_manifest
from ckpt.store import Store, open_store
from datapipe.state import State
from formats.errors import DataError
from tools import foreign
from tools.commands import size_of
from tools.places import place_at

Json = Any


@dataclass(frozen=True)
class LeafRow:
    """One leaf. Sizes are those of the stored array; 0 for what lies in a small file."""

    name: str
    kind: str
    """jax, numpy, numpy_scalar, key, or the type of a Python scalar."""
    dtype: str
    shape: tuple[int, ...] | None
    """None where nothing could tell."""
    size_bytes: int
    hidden_from_orbax: bool = False


@dataclass(frozen=True)
class Total:
    """The leaves of one dtype together."""

    dtype: str
    leaves: int
    elements: int
    size_bytes: int


@dataclass(frozen=True)
class DataState:
    """The state of one iterator."""

    name: str
    batch_size: int | None
    state: Json
    """As saved; a list with one for each process where they differ."""
    next_example: int | None = None
    """This and what follows: of datapipe's iterators only."""
    epoch: int | None = None
    records: int | None = None
    skipped: tuple[tuple[int, int], ...] = ()
    """Examples left out, half-open."""


@dataclass(frozen=True)
class Inspection:
    """What is known of a step."""

    location: str
    """Of the step."""
    format: Literal["lastgood", "orbax"]
    id: StepId | None
    """None: a step of Orbax outside of a run."""
    leaves: tuple[LeafRow, ...]
    totals: tuple[Total, ...]
    """Of `leaves`, by dtype."""
    leaf_count: int
    """Of the whole step; `leaves` are those that a glob let through."""
    size_bytes: int
    """Of all files of the step."""
    parent: StepId | None = None
    """The step that its attempt went on from."""
    time_ns: int | None = None
    metrics: Mapping[str, float] | None = None
    """With those that were added late."""
    extra: Json = None
    data: tuple[DataState, ...] = ()
    environment: Mapping[str, Json] = field(default_factory=dict)
    damage: tuple[str, ...] = ()
    payload_bytes: int | None = None
    """Of the values, as they are when they are read; None: nothing tells."""
    compression: str | None = None
    """How the values are stored; None: as they are, or nothing tells."""


def inspect(location: str, *, step: int | None = None, glob: str | None = None) -> Inspection:
    """Describe a step, or a step of a run: the newest of its lineage without a number.

    Reads small files and image headers; of Orbax's steps the metadata of arrays, too.

    Args:
        glob: only leaves whose name it matches, or that lie in a subtree it matches. `*` matches
            `/` as well.

    Raises:
        NotFound: no such run, step or leaf. Misuse: a step, and another number. StoreFailed.
        Damaged, Unsupported: not even its manifest could be read.
    """
    whole = _inspected(location, step)
    leaves = whole.leaves if glob is None else _matching(whole, glob)
    return replace(whole, leaves=leaves, totals=_totals(leaves))


def _inspected(location: str, step: int | None) -> Inspection:
    place = place_at(location)
    if place.alone:
        _refuse_number(location, step)
        return _of_orbax(Path(place.store.location), None)
    if place.step is not None:
        if step != place.step.step:
            _refuse_number(location, step)
        found = place.step
    else:
        found = Reader(place.store).find(step)
    if found.attempt:
        return _of_ours(place.store, found)
    return _of_orbax(Path(place.store.location) / str(found.step), found)


def _refuse_number(location: str, step: int | None) -> None:
    if step is not None:
        raise Misuse(f"--step {step}: {location} is one step already; leave out one of them")


def _of_ours(store: Store, step: StepId) -> Inspection:
    damage: list[str] = []
    compression = None
    try:
        opened: OpenStep | None = open_step(store, step)
        assert opened is not None
        manifest, leaves = opened.manifest, opened.leaves
        compression = next((each.compression for each in opened.headers), None)
        damage += map(str, opened.damage)
    except (Damaged, Unsupported) as error:
        # As much as can be told is told.
        manifest = read_manifest(store, step)
        leaves = _leaves_of(store, step)
        damage.append(str(error))
    rows = tuple(map(_row, leaves))
    late = late_metrics(store, attempts.list_run(store)).get(step)
    return Inspection(
        f"{store.location}/{layout.step_name(step.branch, step.step)}",
        "lastgood",
        manifest.id,
        rows,
        (),
        len(rows),
        size_of(manifest),
        manifest.parent,
        manifest.time_ns,
        joined(manifest.metrics, late),
        manifest.extra,
        tuple(data_state(name, entry) for name, entry in sorted(manifest.data.items())),
        manifest.environment,
        tuple(damage),
        manifest.payload_bytes,
        compression,
    )


def _leaves_of(store: Store, step: StepId) -> tuple[LeafSpec, ...]:
    """The leaves of a damaged step, if its tree record is intact; else none."""
    key = f"{layout.step_name(step.branch, step.step)}/{layout.TREE}"
    try:
        entries = layout.unseal(store.read(key), key)["leaves"]
        return tuple(
            LeafSpec.from_json({k: v for k, v in entry.items() if k != "digest"})
            for entry in entries
        )
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return ()


def _row(leaf: LeafSpec) -> LeafRow:
    return LeafRow(leaf.name, leaf.kind, leaf.dtype, leaf.shape, leaf.storage_bytes, not leaf.orbax)


def data_state(name: str, entry: Mapping[str, Json]) -> DataState:
    """What a manifest says of one iterator, in numbers where it is one of datapipe's."""
    batch_size = entry.get("batch_size")
    batch_size = batch_size if type(batch_size) is int else None
    if "state" not in entry:
        return DataState(name, batch_size, entry.get("states"))
    saved = entry["state"]
    with contextlib.suppress(DataError):
        state = State.from_json(saved)
        records = sum(state.identity["segments"][-1]["items"])
        at = state.next_example
        return DataState(name, batch_size, saved, at, at // records, records, state.skips)
    return DataState(name, batch_size, saved)


# --- steps of Orbax ----------------------------------------------------------------------------


def _of_orbax(path: Path, step: StepId | None) -> Inspection:
    from ckpt import orbax  # and with it jax and TensorStore, which only these steps need

    damage: list[str] = []
    rows: list[LeafRow] = []
    for name in orbax.trees(path):
        try:
            found = [_orbax_row(spec) for spec in orbax.specs(path, name)]
        except Damaged as error:
            damage.append(str(error))
            item = orbax_files.read_item(path, name)
            found = [LeafRow(leaf.param, leaf.value_type, "?", None, 0) for leaf in item.leaves]
        rows += [replace(row, name=orbax.full_param(name, row.name)) for row in found]
    store = open_store(path)
    documents = _orbax_documents(path)
    metrics = documents.pop("metrics", {}).get("metrics")
    return Inspection(
        str(path),
        "orbax",
        step,
        tuple(rows),
        (),
        len(rows),
        foreign.tree_bytes(store, ""),
        None,
        foreign.time_ns(store, layout.ORBAX_STEP),
        foreign.numbers(metrics),
        documents or None,
        damage=tuple(damage),
    )


def _orbax_row(spec: Any) -> LeafRow:
    kinds = {"jax.Array": "jax", "np.ndarray": "numpy"}
    kind = "key" if spec.impl else kinds.get(spec.value_type, spec.value_type)
    if spec.shape is None:
        return LeafRow(spec.param, kind, spec.value_type, (), 0)
    size = math.prod(spec.shape) * dtypes.parse(spec.dtype).itemsize
    return LeafRow(spec.param, kind, spec.dtype, spec.shape, size)


def _orbax_documents(path: Path) -> dict[str, dict[str, Json]]:
    """The JSON items of a step of Orbax: metrics, iterator states of Grain, what users added."""
    found = {}
    for name, kind in orbax_files.items(path).items():
        if kind == "json":
            with contextlib.suppress(Damaged, NotFound):
                found[name] = orbax_files.read_json(path, name)
    return found


# --- choosing and adding up --------------------------------------------------------------------


def _matching(whole: Inspection, glob: str) -> tuple[LeafRow, ...]:
    # Orbax's names have dots between the keys.
    below = f"{glob}{'.' if whole.format == 'orbax' else '/'}*"
    found = tuple(
        leaf
        for leaf in whole.leaves
        if fnmatchcase(leaf.name, glob) or fnmatchcase(leaf.name, below)
    )
    if not found:
        names = [leaf.name for leaf in whole.leaves]
        close = get_close_matches(glob, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {_first(names)}"
        raise NotFound(f"{whole.location}: no leaf matches {glob!r}; {hint}")
    return found


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "no leaves"


def _totals(leaves: Sequence[LeafRow]) -> tuple[Total, ...]:
    by_dtype: dict[str, list[LeafRow]] = {}
    for leaf in leaves:
        by_dtype.setdefault(leaf.dtype, []).append(leaf)
    totals = [
        Total(
            dtype,
            len(rows),
            sum(math.prod(row.shape) for row in rows if row.shape is not None),
            sum(row.size_bytes for row in rows),
        )
        for dtype, rows in by_dtype.items()
    ]
    return tuple(sorted(totals, key=lambda total: (-total.size_bytes, total.dtype)))

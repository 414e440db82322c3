"""Trees from steps that Orbax wrote, matched against a template as ours are."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ckpt import orbax, tree
from ckpt.errors import Mismatch
from ckpt.leaves import ARRAYS, SCALARS, LeafSpec
from ckpt.loading import DEFAULT, Loading, let_go
from ckpt.placement import must_all_fit, must_fit


def restore_tree(
    path: str | os.PathLike[str], like: Any, *, given: bool, loading: Loading = DEFAULT
) -> Any:
    """The tree of a step of Orbax; on the host without a template.

    A step of several pytree items, none of them `default`, `state` or `items`, gives all of them,
    as a dict by their names.
    Leaves of the template are looked up by the names that Orbax gives them (keys joined by `.`).
    Of `loading`, `threads` means nothing here, and `progress` is told once for each item.

    Raises:
        Mismatch: all differences of structure, shape and dtype; a sharding that does not fit.
        Damaged, NotFound, Unsupported, StoreFailed: as `orbax.read`.
    """
    items = orbax.trees(path)
    specs = {item: orbax.specs(path, item) for item in items if given or loading.progress}
    budget_bytes = loading.budget_bytes
    if not given:
        found = {}
        for item in items:
            found[item] = orbax.read_tree(path, item, budget_bytes=budget_bytes)
            _tell(loading, specs, list(found))
        return found.get(None, found)
    flat = tree.flatten(like, abstract=True)
    places = {
        orbax.full_param(item, spec.param): (item, spec) for item in items for spec in specs[item]
    }
    saved = {param: spec for param, (_, spec) in places.items()}
    wrong = sorted(
        [line for leaf in flat.leaves if (line := _difference(saved.get(leaf.spec.param), leaf))]
        + [
            f"{param}: wanted nothing, found {_text(spec)}"
            for param, spec in saved.items()
            if spec.shape is not None and param not in {leaf.spec.param for leaf in flat.leaves}
        ]
    )
    if wrong:
        raise Mismatch(f"{os.fspath(path)}: the saved tree is not the one in `like`", wrong)
    must_all_fit(
        (
            functools.partial(must_fit, leaf.spec, _sharding(leaf))
            for leaf in flat.leaves
            if leaf.spec.kind in ("jax", "key")
        ),
        os.fspath(path),
    )
    if loading.donate:
        let_go(flat.values)
    values: dict[str, Any] = {}
    for number, item in enumerate(items):
        wanted = {}
        for leaf in flat.leaves:
            where, spec = places[leaf.spec.param]
            if where == item:
                wanted[spec.param] = _sharding(leaf)
        read = orbax.read(path, wanted, item, budget_bytes=budget_bytes)
        values |= {orbax.full_param(item, param): value for param, value in read.items()}
        _tell(loading, specs, items[: number + 1])
    return tree.with_structure_of(
        like, {leaf.name: _as(values[leaf.spec.param], leaf) for leaf in flat.leaves}
    )


def _tell(
    loading: Loading,
    specs: Mapping[str | None, Sequence[orbax.SavedArray]],
    done: Sequence[str | None],
) -> None:
    """Which items have been read, in bytes."""
    if loading.progress is not None:
        sizes = {item: sum(map(_nbytes, found)) for item, found in specs.items()}
        loading.progress(sum(sizes[item] for item in done), sum(sizes.values()))


def _nbytes(spec: orbax.SavedArray) -> int:
    if spec.shape is None or spec.dtype is None:
        return 0
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _sharding(leaf: tree.Leaf) -> Any:
    if leaf.spec.kind not in ("jax", "key"):
        return None
    sharding = getattr(leaf.value, "sharding", None)
    return None if isinstance(leaf.value, jax.Array) and not leaf.spec.committed else sharding


def _difference(found: orbax.SavedArray | None, leaf: tree.Leaf) -> str:
    spec = leaf.spec
    if found is None:
        return f"{leaf.name}: wanted {spec}, found nothing"
    if spec.kind in ARRAYS or spec.kind in SCALARS:
        same = found.shape == spec.shape and found.impl is None
        if spec.kind in ARRAYS:
            same = same and found.dtype == spec.dtype
        return "" if same else f"{leaf.name}: wanted {spec}, found {_text(found)}"
    if spec.kind == "key":
        # Orbax of some generations keeps no implementation; the shape of the key data must do.
        same = found.shape == spec.storage_shape and found.impl in (None, spec.impl)
        return "" if same else f"{leaf.name}: wanted {spec}, found {_text(found)}"
    return "" if found.shape is None else f"{leaf.name}: wanted {spec}, found {_text(found)}"


def _text(found: orbax.SavedArray) -> str:
    if found.shape is None:
        return found.value_type
    key = f" ({found.impl} key data)" if found.impl else ""
    return f"{found.dtype}[{','.join(map(str, found.shape))}]{key}"


def _as(value: Any, leaf: tree.Leaf) -> Any:
    """A value that Orbax stored, as what the template has in its place."""
    spec: LeafSpec = leaf.spec
    if spec.kind == "jax" and not isinstance(value, jax.Array):
        sharding = _sharding(leaf)
        return jax.device_put(np.asarray(value, np.dtype(leaf.value.dtype)), sharding)
    if spec.kind == "key" and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.numpy.asarray(value), impl=spec.impl)
    if spec.kind in SCALARS:
        kinds: dict[str, Any] = {"bool": bool, "int": int, "float": float, "complex": complex}
        return kinds[spec.kind](value)
    if spec.kind == "numpy":
        return np.asarray(value)
    if spec.kind == "numpy_scalar":
        return np.asarray(value, np.dtype(spec.dtype))[()]
    return value

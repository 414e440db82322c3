"""From an open step to a tree: match it against `like`, read and verify, build the leaves."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ckpt import collector, dtypes, leaves, placement, tree
from ckpt.arrays import Report, Request, read_arrays
from ckpt.errors import Mismatch
from ckpt.fit import EXACT, Fit, pair
from ckpt.image import Header
from ckpt.leaves import LeafSpec, logical_view
from ckpt.loading import DEFAULT, Loading, let_go
from ckpt.open_images import ImageReader
from ckpt.steps import OpenStep
from ckpt.values import revive


class _Want(NamedTuple):
    """One leaf of the result: what is stored, what is to be built, and where it goes."""

    saved: LeafSpec
    target: LeafSpec
    sharding: jax.sharding.Sharding | None
    """Of the stored array, when it can be read straight to devices; else None: the host."""
    final: jax.sharding.Sharding | None
    """Where a value that was read to the host goes afterwards."""
    on_device: bool


def read_tree(
    step: OpenStep,
    like: Any = None,
    *,
    given: bool = False,
    fit: Fit = EXACT,
    loading: Loading = DEFAULT,
) -> tuple[Any, Report]:
    """The tree of a step.

    Without a template (`given` false): exactly the structure that was saved, on the host. With
    one: its structure, its shardings, with what `fit` allows; every leaf verified. With
    `loading.donate` the jax arrays of the template are deleted before anything is read.

    Raises:
        Mismatch: saved and wanted trees differ; all differences are listed.
        Damaged: chunks that are needed are absent or not what was written.
        Unsupported: JAX, as it is set up, would narrow a dtype; or, without a template, a class
            of the structure is not loaded here.
    """
    with collector.waiting():
        return _read_tree(step, like, fit, loading, given=given)


def _read_tree(
    step: OpenStep, like: Any, fit: Fit, loading: Loading, *, given: bool
) -> tuple[Any, Report]:
    if not given:
        wants = [_Want(spec, spec, None, None, False) for spec in step.leaves]
        values, report = _read(step, wants, loading)
        return tree.unflatten(step.structure, values), report
    flat = tree.flatten(like, abstract=True)
    pairing = pair(step.leaves, flat.specs, fit)
    where = f"{step.store.location}/{step.prefix}"
    if pairing.differences:
        raise Mismatch(f"{where}: the saved tree is not the one in `like`", pairing.differences)
    values = list(flat.values)
    read = [i for i, target in enumerate(flat.specs) if target.name in pairing.saved]
    if len(read) < len(values):
        _must_have_values(flat, pairing.saved, where)
    wants = [_want(pairing.saved[flat.specs[i].name], flat.specs[i], values[i]) for i in read]
    _must_all_fit(wants, where)
    if loading.donate:
        _let_go(values, set(read))
    found, report = _read(step, wants, loading)
    for i, value in zip(read, found, strict=True):
        values[i] = value
    return tree.with_values(like, flat.specs, values), report


def _must_have_values(flat: tree.Flat, restored: Mapping[str, LeafSpec], where: str) -> None:
    """Leaves that are not restored keep the values of the template, so it must have them."""
    bare = [
        f"{spec.name}: wanted an array, found {spec} without values"
        for spec, value in zip(flat.specs, flat.values, strict=True)
        if spec.name not in restored and _is_bare(value)
    ]
    if bare:
        raise Mismatch(f"{where}: leaves that are not restored need values in `like`", bare)


def _is_bare(value: Any) -> bool:
    """Deleted arrays are so, too: they were donated, perhaps to a step that was damaged."""
    if isinstance(value, jax.Array):
        return value.is_deleted()
    return isinstance(value, jax.ShapeDtypeStruct)


def _must_all_fit(wants: Sequence[_Want], where: str) -> None:
    """What many leaves have in common is asked once, unless it is an error for all of them."""
    kinds: dict[Any, _Want] = {}
    for want in wants:
        saved, target = want.saved, want.target
        stored = (saved.storage_dtype, saved.storage_shape, want.on_device)
        # The wants keep the shardings, so identity holds; to hash one takes longer.
        wanted = (target.dtype, target.shape, id(want.sharding), id(want.final))
        kinds.setdefault((stored, wanted), want)
    try:
        for want in kinds.values():
            _must_fit(want)
    except Mismatch:
        placement.must_all_fit((functools.partial(_must_fit, want) for want in wants), where)


def _must_fit(want: _Want) -> None:
    """Asked of every leaf before anything is read, and before the template is let go."""
    spec, sharding = want.saved, want.sharding
    if want.on_device and sharding is None:
        placement.must_fit(want.target, want.final)
    elif sharding is not None and spec.storage_dtype is not None:
        shape, dtype = spec.storage_shape or (), dtypes.parse(spec.storage_dtype)
        placement.boxes(shape, dtype, sharding, want.target.name)


def _let_go(values: list[Any], read: Container[int]) -> None:
    """The memory of the template."""
    staying = [value for i, value in enumerate(values) if i not in read]
    let_go((value for i, value in enumerate(values) if i in read), staying)


def _want(saved: LeafSpec, target: LeafSpec, value: Any) -> _Want:
    if target.kind not in ("jax", "key"):
        return _Want(saved, target, None, None, False)
    sharding = getattr(value, "sharding", None)
    if not target.committed:
        sharding = None  # stays free to follow its neighbours
    # Devices may lack the dtype in which these bytes are stored, or hold it differently.
    direct = (
        sharding is not None
        and (saved.dtype == target.dtype or not _is_cast(saved, target))
        and saved.storage_dtype is not None
        and (target.kind == "key" or not dtypes.is_reinterpreted(saved.dtype))
    )
    return _Want(saved, target, sharding if direct else None, sharding, True)


def _is_cast(saved: LeafSpec, target: LeafSpec) -> bool:
    """Is the array to be converted, not only seen in another byte order?"""
    return {saved.kind, target.kind} <= leaves.ARRAYS and saved.dtype.removeprefix(
        ">"
    ) != target.dtype.removeprefix(">")


def _read(step: OpenStep, wants: Sequence[_Want], loading: Loading) -> tuple[list[Any], Report]:
    stored = [i for i, want in enumerate(wants) if want.saved.storage_dtype is not None]
    requests = [
        Request(wants[i].saved.param, wants[i].sharding, wants[i].saved.name) for i in stored
    ]
    with _images(step) as images:
        arrays, report = read_arrays(
            images,
            requests,
            budget_bytes=loading.budget_bytes,
            threads=loading.threads,
            progress=loading.progress,
        )
    found: list[Any] = [None] * len(wants)
    for i, array in zip(stored, arrays, strict=True):
        found[i] = array
    values = [_build(want, array) for want, array in zip(wants, found, strict=True)]
    late = [i for i, want in enumerate(wants) if want.on_device and want.target.kind != "key"]
    late = [i for i in late if wants[i].sharding is None]
    placed = placement.put([values[i] for i in late], [wants[i].final for i in late])
    for i, value in zip(late, placed, strict=True):
        values[i] = value
    for i, want in enumerate(wants):
        if want.on_device and want.target.weak_type:
            values[i] = _weak(values[i])
    return values, report


def _build(want: _Want, array: Any) -> Any:
    """The value, but for what `_read` does for all together: arrays not yet on their devices."""
    saved, target = want.saved, want.target
    if want.sharding is not None:
        return jax.random.wrap_key_data(array, impl=target.impl) if target.kind == "key" else array
    if _is_cast(saved, target):
        cast = logical_view(array, saved).astype(dtypes.parse(target.dtype))
        return cast[()] if target.kind == "numpy_scalar" else cast
    if not want.on_device:
        return revive(array, _as(saved, target))
    if target.kind == "key":
        keys = revive(array, saved)
        return keys if want.final is None else jax.device_put(keys, want.final)
    return np.asarray(logical_view(array, saved) if array is not None else revive(None, saved))


def _as(saved: LeafSpec, target: LeafSpec) -> LeafSpec:
    """The saved leaf, to be revived as what the template has in its place."""
    if saved is target or saved.storage_dtype is None or saved.kind == "key":
        return saved
    if target.kind in leaves.SCALARS:
        return saved._replace(kind=target.kind)
    kind = "numpy" if target.kind == "jax" else target.kind
    return saved._replace(kind=kind, dtype=target.dtype)


def _weak(array: jax.Array) -> jax.Array:
    """The same array, weakly typed again; JAX has no public call for arrays."""
    from jax._src.lax import lax

    weak = lax._convert_element_type(array, array.dtype, weak_type=True)
    # It has moved to the default memory of its devices.
    return weak if weak.sharding == array.sharding else jax.device_put(weak, array.sharding)


@contextlib.contextmanager
def _images(step: OpenStep) -> Iterator[list[tuple[Header, ImageReader]]]:
    with contextlib.ExitStack() as stack:
        yield [
            (header, stack.enter_context(step.store.open_image(f"{step.prefix}/{image.name}")))
            for header, image in zip(step.headers, step.manifest.images, strict=True)
        ]

"""One leaf with jax: its description, the array to store, and the value again.

Held exactly: jax arrays, NumPy arrays and scalars (byte order included), typed PRNG keys, Python's
bool, int, float, complex, str and bytes. Not kept: memory order of NumPy arrays (they come back in
C order) and the classes of `np.memmap` and of JAX's float0 (they come back as `np.ndarray`).
Everything else is refused.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from ckpt import dtypes, plain
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.leaves import ARRAYS, READABLE_DIMENSIONS, SCALARS, LeafSpec, logical_view, storage_view

_ARRAY_TYPES = (np.ndarray, np.memmap)
_PYTHON = (bool, int, float, complex, str, bytes)
_INT64 = range(-(2**63), 2**63)
_IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


class Place(NamedTuple):
    """Where a leaf stands: the fields of its spec that do not depend on its value."""

    name: str
    param: str
    keys: tuple[tuple[str, int], ...]
    orbax: bool


def describe(value: Any, place: Place, *, abstract: bool) -> LeafSpec:
    """The spec of one leaf.

    With `abstract` the leaf belongs to a template: `jax.ShapeDtypeStruct` is a leaf like an array,
    and an array may be deleted already.

    Raises:
        Unsupported: a leaf that cannot be held exactly; names leaf and type.
        Misuse: a deleted or donated array, a tracer, or an abstract leaf that is to be saved.
    """
    if isinstance(value, np.ndarray):
        return _describe_numpy(value, "numpy", place)
    if isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer):
            raise Misuse(
                f"leaf {place.name}: wanted an array, found a tracer; save outside of jit, grad "
                "and vmap"
            )
        if not abstract and value.is_deleted():
            raise Misuse(
                f"leaf {place.name}: the array is deleted, or was donated to a jitted function; "
                "save the arrays that the function returned"
            )
        return _describe_jax(value, place)
    if isinstance(value, jax.ShapeDtypeStruct):
        if not abstract:
            raise Misuse(
                f"leaf {place.name}: wanted an array, found a jax.ShapeDtypeStruct, which has no "
                "values to save"
            )
        return _describe_jax(value, place)
    if isinstance(value, np.generic):
        return _describe_numpy(value, "numpy_scalar", place)
    if type(value) in _PYTHON:
        return _describe_python(value, place)
    raise _refusal(value, place)


def stored(value: Any, spec: LeafSpec) -> np.ndarray | jax.Array:
    """The array to be stored for a leaf that `describe` described as `spec`.

    Of jax arrays the array itself, of PRNG keys their uint32 key data: the shards of these go to
    the image, each by `storage_view` once it is on the host. Of all other kinds a C-contiguous
    array of `storage_dtype` and `storage_shape`, which shares memory with `value` where it can.

    Raises:
        Misuse: the leaf is held in the record; nothing of it is stored.
    """
    if spec.storage_dtype is None:
        raise Misuse(f"leaf {spec.name}: a {spec.kind} is held in the tree record")
    if spec.kind == "jax":
        return value
    if spec.kind == "key":
        return jax.random.key_data(value)
    return storage_view(np.asarray(value, dtypes.parse(spec.dtype)), spec)


def revive(array: np.ndarray | None, spec: LeafSpec) -> Any:
    """The value on the host from the stored array (None for what is held in the record).

    Kind `jax` gives an `np.ndarray` of the logical dtype, `key` a jax array of keys on the default
    device, all others exactly the type that was saved. Arrays share memory with `array` where they
    can.

    Raises:
        Damaged: dtype or shape of `array` are not those of the spec, or the record is no record of
            such a value.
        Unsupported: a PRNG implementation that this process does not have.
    """
    if spec.storage_dtype is None:
        return _revive_inline(spec)
    wanted = (dtypes.parse(spec.storage_dtype), spec.storage_shape)
    if array is None or (array.dtype, array.shape) != wanted:
        found = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
        raise Damaged(
            f"leaf {spec.name}: wanted stored {wanted[0]}{list(wanted[1] or ())}, found {found}"
        )
    if spec.kind == "key":
        try:
            return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=spec.impl)
        except (ValueError, TypeError) as error:
            raise Unsupported(
                f"leaf {spec.name}: key data {list(array.shape)} are no keys of the PRNG "
                f"implementation {spec.impl!r} in this process; register it before restoring"
            ) from error
    value = logical_view(array, spec)
    if spec.kind in SCALARS:
        return value.item()
    return value[()] if spec.kind == "numpy_scalar" else value


def _describe_jax(value: jax.Array | jax.ShapeDtypeStruct, place: Place) -> LeafSpec:
    shape = value.shape
    if isinstance(value.dtype, np.dtype):
        kind, impl, storage_shape = "jax", None, shape
        layout = _layout(value.dtype)
        if layout is None:
            raise _refusal(value, place)
        dtype, storage_dtype, readable = layout
    elif jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind, impl = "key", _impl(value, place.name)
        storage_shape = shape + _key_data_shape(value.dtype)
        dtype, storage_dtype, readable = value.dtype.name, "uint32", True
    else:
        raise _refusal(value, place)
    sharding = value.sharding
    return LeafSpec(
        name=place.name,
        param=place.param,
        keys=place.keys,
        kind=kind,
        dtype=dtype,
        shape=shape,
        storage_dtype=storage_dtype,
        storage_shape=storage_shape,
        memory_kind=None if sharding is None else _memory_kind(sharding),
        weak_type=getattr(value, "weak_type", False),  # keys have none
        committed=getattr(value, "committed", True),  # abstract arrays have none
        impl=impl,
        orbax=place.orbax and readable and _is_readable(storage_shape),
    )


def _describe_numpy(value: np.ndarray | np.generic, kind: str, place: Place) -> LeafSpec:
    # A masked array would lose its mask, a matrix its meaning of `*`; float0 has a class of JAX's.
    plain_array = kind != "numpy" or type(value) in _ARRAY_TYPES or value.dtype == dtypes.FLOAT0
    layout = _layout(value.dtype)
    if layout is None or not plain_array:
        raise _refusal(value, place)
    dtype, storage_dtype, readable = layout
    return LeafSpec(
        name=place.name,
        param=place.param,
        keys=place.keys,
        kind=kind,
        dtype=dtype,
        shape=value.shape,
        storage_dtype=storage_dtype,
        storage_shape=value.shape if storage_dtype else None,
        orbax=place.orbax and readable and _is_readable(value.shape),
    )


def _describe_python(value: Any, place: Place) -> LeafSpec:
    kind = type(value).__name__
    array = kind in SCALARS and (kind != "int" or value in _INT64)
    return LeafSpec(
        name=place.name,
        param=place.param,
        keys=place.keys,
        kind=kind,
        dtype=SCALARS[kind] if array else kind,
        shape=(),
        storage_dtype=SCALARS[kind] if array else None,
        storage_shape=() if array else None,
        inline=None if array else plain.encode(value),
        orbax=place.orbax and (array or (kind == "str" and _is_text(value, place.param))),
    )


def _revive_inline(spec: LeafSpec) -> Any:
    if spec.kind in ARRAYS:
        return np.zeros(spec.shape, dtypes.FLOAT0)
    value = plain.decode(spec.inline)
    if type(value).__name__ != spec.kind:
        raise Damaged(
            f"leaf {spec.name}: wanted a {spec.kind} in the tree record, found a "
            f"{type(value).__name__}"
        )
    return value


@functools.cache
def _layout(dtype: np.dtype[Any]) -> tuple[str, str | None, bool] | None:
    """Logical and storage name of a dtype, and whether others read the same numbers; or None."""
    name = dtypes.logical_name(dtype)
    if name is None:
        return None
    return name, dtypes.storage_name(name), not dtypes.is_reinterpreted(name)


def _is_text(value: str, param: str) -> bool:
    """Whether Orbax finds a string: it looks for it by JSON pointer, where two signs mean more."""
    return plain.is_utf8(value) and not {"/", "~"} & set(param)


def _is_readable(shape: tuple[int, ...]) -> bool:
    return 0 not in shape and len(shape) <= READABLE_DIMENSIONS


def _impl(keys: jax.Array | jax.ShapeDtypeStruct, leaf: str) -> str:
    if isinstance(keys, jax.Array):
        return str(jax.random.key_impl(keys))
    for name in _IMPLS:
        if _key_dtype(name) == keys.dtype:
            return name
    raise Unsupported(
        f"leaf {leaf}: the PRNG implementation of an abstract {keys.dtype} cannot be told; give an "
        "array of keys in its place"
    )


@functools.cache
def _key_dtype(impl: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype


@functools.cache
def _key_data_shape(dtype: Any) -> tuple[int, ...]:
    return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape


@functools.lru_cache(maxsize=1024)
def _memory_kind(sharding: jax.sharding.Sharding) -> str | None:
    """The memory kind, or None if it is the default one of the devices."""
    device: Any = next(iter(sharding.device_set))
    kind = sharding.memory_kind
    return None if kind in (None, device.default_memory().kind) else kind


def _refusal(value: Any, place: Place) -> Unsupported:
    kind = type(value)
    dtype = f" of dtype {str(value.dtype)[:200]}" if hasattr(value, "dtype") else ""
    return Unsupported(
        f"leaf {place.name}: a {kind.__module__}.{kind.__qualname__}{dtype} cannot be held "
        "exactly; convert it to numbers, text or a plain array, or keep it outside of the state"
    )

"""From buffers on the host to arrays on devices, under any sharding.

JAX takes a buffer that starts at a multiple of 64 bytes without a copy on CPU. Such a buffer
belongs to the array from then on; JAX does not let a donating computation overwrite it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ckpt import dtypes
from ckpt.errors import Mismatch, Unsupported
from ckpt.leaves import LeafSpec

ALIGNMENT_BYTES = 64

Box = tuple[tuple[int, int], ...]
"""A part of a global array: (start, stop) along each axis."""


class HostLeaf(NamedTuple):
    """What one leaf needs to become an array: a buffer for each box of its sharding here."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding
    parts: Mapping[Box, np.ndarray]


def whole(shape: Sequence[int]) -> Box:
    """The box that is the whole array."""
    return tuple((0, n) for n in shape)


_NO_FIT = (
    "a sharding does not fit the saved array; JAX cuts a dimension into equal parts only: give "
    "these leaves a mesh axis that divides it, or leave the dimension whole (None in the spec)"
)


def must_all_fit(checks: Iterable[Callable[[], object]], where: str) -> None:
    """All that `must_fit` and `boxes` find in the leaves of a step, in one error that names it."""
    lines: list[str] = []
    for check in checks:
        try:
            check()
        except Mismatch as error:
            lines += error.differences
    if lines:
        raise Mismatch(f"{where}: {_NO_FIT}", lines)


def must_fit(target: LeafSpec, sharding: jax.sharding.Sharding | None) -> None:
    """What comes to devices by way of the host must fit there: to be asked before it is read.

    target: a jax array or an array of keys, as the template has it; sharding: None where it stays
    uncommitted. Raises as `boxes`.
    """
    dtype = np.dtype(np.uint32) if target.kind == "key" else dtypes.parse(target.dtype)
    _must_not_be_narrowed(f"{target.name}: wanted {target}", dtype)
    if sharding is not None:
        boxes(target.shape, dtype, sharding, target.name)


def boxes(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: jax.sharding.Sharding, name: str
) -> tuple[Box, ...]:
    """The different boxes which the devices of this process hold; replicas count once.

    Raises:
        Mismatch: the sharding does not fit the shape.
        Unsupported: JAX, as it is set up, has no arrays of this dtype and would narrow it.
    """
    _must_not_be_narrowed(f"{name}: saved as {dtype}", dtype)
    try:
        return _boxes(shape, sharding)
    except (ValueError, IndexError) as error:
        line = f"{name}: wanted {sharding}, found shape {list(shape)}"
        raise Mismatch(_NO_FIT, [line]) from error


def _must_not_be_narrowed(what: str, dtype: np.dtype[Any]) -> None:
    narrowed = jax.dtypes.canonicalize_dtype(dtype)
    if narrowed != dtype:
        raise Unsupported(
            f"{what}, but JAX would make it {narrowed}; set jax_enable_x64, or give a NumPy array "
            "in `like`"
        )


@functools.lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> tuple[Box, ...]:
    sharding.shard_shape(shape)
    places = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(_box(index, shape) for index in places if index is not None))


def place(leaves: Sequence[HostLeaf]) -> list[jax.Array]:
    """Arrays under the shardings of the leaves. The buffers must not be written afterwards."""
    found: dict[int, jax.Array] = {}
    single = [i for i, leaf in enumerate(leaves) if _is_single(leaf)]
    buffers = [next(iter(leaves[i].parts.values())) for i in single]
    found.update(zip(single, put(buffers, [leaves[i].sharding for i in single]), strict=True))
    for i, leaf in enumerate(leaves):
        if i not in found:
            found[i] = _from_parts(leaf)
    return [found[i] for i in range(len(leaves))]


def put(
    buffers: Sequence[np.ndarray], shardings: Sequence[jax.sharding.Sharding | None]
) -> list[jax.Array]:
    """Whole arrays under their shardings; None: uncommitted, on the default device."""
    found: dict[int, jax.Array] = {}
    fast = _fast_put()
    bound: list[int] = []
    free: list[int] = []
    for i, (buffer, sharding) in enumerate(zip(buffers, shardings, strict=True)):
        if sharding is None:
            free.append(i)
        elif fast is not None and _is_plain(sharding):
            found[i] = fast(buffer, sharding)
        elif sharding.is_fully_addressable:
            bound.append(i)
        else:
            found[i] = _of_all_processes(buffer, sharding)
    # One call for all: what device_put costs per call is more than what it costs per leaf.
    if bound:
        arrays = jax.device_put([buffers[i] for i in bound], [shardings[i] for i in bound])
        found.update(zip(bound, arrays, strict=True))
    if free:
        found.update(zip(free, jax.device_put([buffers[i] for i in free]), strict=True))
    return [found[i] for i in range(len(buffers))]


def _of_all_processes(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    # device_put would have all processes compare their values, and hang where one of them failed.
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


@functools.lru_cache(maxsize=1024)
def _is_plain(sharding: jax.sharding.Sharding) -> bool:
    """One device, and its default memory."""
    if type(sharding) is not jax.sharding.SingleDeviceSharding:
        return False
    (device,) = sharding.device_set
    kinds: Any = device
    return sharding.memory_kind in (None, kinds.default_memory().kind)


_Put = Callable[[np.ndarray, Any], jax.Array]


@functools.cache
def _fast_put() -> _Put | None:
    """The call behind `device_put`, at a sixth of its cost; None if this jax has another.

    It is private to jax, so it is used only after it did to some arrays what `device_put` does.
    """
    try:
        from jax._src.lib import xla_client

        @functools.lru_cache(maxsize=4096)
        def aval(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            return jax.core.ShapedArray(shape, dtype)

        def fast(buffer: np.ndarray, sharding: Any) -> jax.Array:
            kind = aval(buffer.shape, buffer.dtype)
            devices = list(sharding._device_assignment)
            return xla_client.batched_device_put(kind, sharding, [buffer], devices, True)

        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[-1])
        for sample in (np.arange(6.0, dtype=np.float32).reshape(2, 3), np.array(7, np.int32)):
            one, other = fast(sample, sharding), jax.device_put(sample, sharding)
            if type(one) is not type(other) or not np.array_equal(one, sample):
                return None
            if not one.committed or one.sharding != sharding:
                return None
            if any(getattr(one, name) != getattr(other, name) for name in _TRAITS):
                return None
    except Exception:  # whatever a later jax makes of it, there is the public way
        return None
    return fast


_TRAITS = ("aval", "dtype", "shape", "sharding", "committed", "weak_type")


@functools.lru_cache(maxsize=1024)
def is_single(sharding: jax.sharding.Sharding | None) -> bool:
    """Whether it is that of one device, of this process."""
    return sharding is not None and sharding.is_fully_addressable and len(sharding.device_set) == 1


def _is_single(leaf: HostLeaf) -> bool:
    return leaf.sharding.is_fully_addressable and list(leaf.parts) == [whole(leaf.shape)]


def _from_parts(leaf: HostLeaf) -> jax.Array:
    shape, parts = leaf.shape, leaf.parts
    return jax.make_array_from_callback(
        shape, leaf.sharding, lambda index: parts[_box(index, shape)], dtype=leaf.dtype
    )


def _box(index: Any, shape: tuple[int, ...]) -> Box:
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop)
        for part, size in zip(index, shape, strict=True)
    )

"""From buffers on the host to arrays on devices, under any sharding.

JAX takes a buffer that starts at a multiple of 64 bytes without a copy on CPU. Such a buffer
belongs to the array from then on; JAX does not let a donating computation overwrite it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckpt.errors import Mismatch, Unsupported

ALIGNMENT_BYTES = 64

Box = tuple[tuple[int, int], ...]
"""A part of a global array: (start, stop) along each axis."""


@dataclass(frozen=True, eq=False)
class HostLeaf:
    """What one leaf needs to become an array: a buffer for each box of its sharding here."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding
    parts: Mapping[Box, np.ndarray]


def whole(shape: Sequence[int]) -> Box:
    """The box that is the whole array."""
    return tuple((0, n) for n in shape)


def boxes(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: jax.sharding.Sharding, name: str
) -> tuple[Box, ...]:
    """The different boxes which the devices of this process hold; replicas count once.

    Raises:
        Mismatch: the sharding does not fit the shape.
        Unsupported: JAX, as it is set up, has no arrays of this dtype and would narrow it.
    """
    narrowed = jax.dtypes.canonicalize_dtype(dtype)
    if narrowed != dtype:
        raise Unsupported(
            f"{name}: saved as {dtype}, but JAX would make it {narrowed}; "
            "set jax_enable_x64, or restore it to the host without a sharding"
        )
    try:
        return _boxes(shape, sharding)
    except (ValueError, IndexError) as error:
        line = f"{name}: wanted {sharding}, found shape {list(shape)}"
        raise Mismatch("a sharding does not fit the saved array", [line]) from error


@functools.lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], sharding: jax.sharding.Sharding) -> tuple[Box, ...]:
    sharding.shard_shape(shape)
    places = sharding.addressable_devices_indices_map(shape).values()
    return tuple(dict.fromkeys(_box(index, shape) for index in places if index is not None))


def place(leaves: Sequence[HostLeaf]) -> list[jax.Array]:
    """Arrays under the shardings of the leaves. The buffers must not be written afterwards."""
    found: dict[int, jax.Array] = {}
    single = [i for i, leaf in enumerate(leaves) if _is_single(leaf)]
    if single:
        # One call for all: what device_put costs per call is more than what it costs per leaf.
        buffers = [next(iter(leaves[i].parts.values())) for i in single]
        arrays = jax.device_put(buffers, [leaves[i].sharding for i in single])
        found.update(zip(single, arrays, strict=True))
    for i, leaf in enumerate(leaves):
        if i not in found:
            found[i] = _from_parts(leaf)
    return [found[i] for i in range(len(leaves))]


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

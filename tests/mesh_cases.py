"""Arrays, how they lie on the devices of a mesh, and how they are wanted on another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memory_images import random_array

SIZES = (6, 12, 24, 48)

DTYPES = ("float32", "bfloat16", "int4", "bool", "complex64", "uint8", "float8_e4m3fn", "int16")

MESHES = (
    (1,),
    (2,),
    (3,),
    (4,),
    (6,),
    (8,),
    (2, 2),
    (2, 3),
    (3, 2),
    (1, 3),
    (2, 4),
    (4, 2),
    (2, 2, 2),
    (3, 1, 2),
)

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cut:
    """How an array lies on devices: for each dimension the mesh axes that cut it, in order."""

    mesh: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    first_device: int = 0

    @property
    def devices(self) -> list[Any]:
        count = math.prod(self.mesh)
        return [jax.devices()[(self.first_device + i) % 8] for i in range(count)]

    @property
    def sharding(self) -> NamedSharding:
        names = "abc"[: len(self.mesh)]
        mesh = Mesh(np.array(self.devices).reshape(self.mesh), tuple(names))
        parts = [tuple(names[axis] for axis in axes) or None for axes in self.axes]
        return NamedSharding(mesh, PartitionSpec(*parts))

    def boxes(self, shape: Sequence[int]) -> Iterator[tuple[Any, Box]]:
        """Each device and what it holds; by arithmetic, not by JAX."""
        places = itertools.product(*map(range, self.mesh))
        for device, place in zip(self.devices, places, strict=True):
            box = []
            for size, axes in zip(shape, self.axes, strict=True):
                number, parts = 0, 1
                for axis in axes:
                    number = number * self.mesh[axis] + place[axis]
                    parts *= self.mesh[axis]
                box.append((number * size // parts, (number + 1) * size // parts))
            yield device, tuple(box)

    def __str__(self) -> str:
        return f"mesh {self.mesh} from device {self.first_device}, axes {self.axes}"


def index_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def cut_of(
    shape: Sequence[int],
    mesh: tuple[int, ...],
    wishes: Iterable[tuple[int, int]],
    first_device: int,
) -> Cut:
    """Each axis of the mesh cuts the dimension it wishes, in this order, if it divides it.

    wishes: pairs of axis and dimension; -1: replicated along this axis.
    """
    axes: list[tuple[int, ...]] = [()] * len(shape)
    for axis, dimension in wishes:
        if dimension >= 0:
            more = (*axes[dimension], axis)
            if shape[dimension] % math.prod(mesh[each] for each in more) == 0:
                axes[dimension] = more
    return Cut(mesh, tuple(axes), first_device)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    mesh = draw(st.sampled_from(MESHES))
    order = draw(st.permutations(range(len(mesh))))
    wishes = [(axis, draw(st.integers(-1, len(shape) - 1))) for axis in order]
    return cut_of(shape, mesh, wishes, draw(st.integers(0, 7)))


@dataclass(frozen=True)
class Case:
    """An array, how it was written and how it is wanted."""

    array: np.ndarray
    before: Cut
    wanted: Cut
    seed: int

    def __repr__(self) -> str:
        kind = f"{self.array.dtype}{list(self.array.shape)} of seed {self.seed}"
        return f"{kind} from {self.before} to {self.wanted}"


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    if math.prod(shape) > 2**14:
        shape = (shape[0], *(min(size, 12) for size in shape[1:]))
    seed = draw(st.integers(0, 2**32))
    array = random_array(shape, draw(st.sampled_from(DTYPES)), seed)
    return Case(array, draw(cuts(shape)), draw(cuts(shape)), seed)


LIMITS = st.sampled_from([16, 60, 200, 1000, 1 << 20])

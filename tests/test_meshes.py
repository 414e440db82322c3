"""From any mesh to any other: the values, and how little is read for them.

JAX 0.10 has no arrays with shards of unequal sizes, so "uneven" means here that two meshes cut an
array at different places: 12 rows over 3 devices, restored to 4.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from memory_images import make_images, random_array, same

import ckpt
from ckpt import arrays, fetch, image
from ckpt.arrays import Request, read_arrays
from ckpt.grid import CRC_BYTES

SEED = int(os.environ.get("MESH_SEED", time.time_ns() % 1_000_000))
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


@given(
    some=st.lists(cases(), min_size=1, max_size=3),
    processes=st.integers(1, 3),
    limit_bytes=LIMITS,
    budget_bytes=st.sampled_from([1, 500, 1 << 30]),
)
def test_every_device_gets_its_part(
    some: list[Case], processes: int, limit_bytes: int, budget_bytes: int
) -> None:
    named = {f"leaf{i}": case for i, case in enumerate(some)}
    images = make_images(
        {name: case.array for name, case in named.items()},
        {name: case.before.sharding for name, case in named.items()},
        processes=processes,
        limit_bytes=limit_bytes,
    )
    requests = [Request(name, case.wanted.sharding) for name, case in named.items()]
    found, _ = read_arrays(images, requests, budget_bytes=budget_bytes)
    for value, case in zip(found, some, strict=True):
        must_be(value, case.array, case.wanted, repr(case))


def must_be(value: Any, array: np.ndarray, wanted: Cut, note: str) -> None:
    assert value.sharding == wanted.sharding, note
    must_hold(value, array, wanted, note)


def must_hold(value: Any, array: np.ndarray, wanted: Cut, note: str) -> None:
    assert same(value, array), note
    shards = {shard.device: shard for shard in value.addressable_shards}
    for device, box in wanted.boxes(array.shape):
        assert same(shards.pop(device).data, array[index_of(box)]), f"{note}: {device}"
    assert not shards, note


# --- how little is read --------------------------------------------------------------------------


@given(
    some=st.lists(cases(), min_size=1, max_size=3),
    writers=st.integers(1, 3),
    limit_bytes=LIMITS,
    mine=st.sets(st.integers(0, 7), min_size=1, max_size=3),
    small_bytes=st.sampled_from([0, 100, 1 << 18]),
    gap_share=st.sampled_from([0.0, 0.7, 0.99]),
)
def test_a_process_reads_what_it_needs_and_one_chunk_at_each_edge(
    some: list[Case],
    writers: int,
    limit_bytes: int,
    mine: set[int],
    small_bytes: int,
    gap_share: float,
) -> None:
    """`mine`: the devices that the reading process has; of the others it reads nothing."""
    gap_bytes = int(gap_share * small_bytes)  # so that no run spans what is read by itself
    named = {f"leaf{i}": case for i, case in enumerate(some)}
    images = make_images(
        {name: case.array for name, case in named.items()},
        {name: case.before.sharding for name, case in named.items()},
        processes=writers,
        limit_bytes=limit_bytes,
    )
    wanted = {
        name: {box for device, box in case.wanted.boxes(case.array.shape) if device.id in mine}
        for name, case in named.items()
    }
    requests = [Request(name, case.wanted.sharding) for name, case in named.items()]
    with (
        mock.patch.multiple(fetch, SMALL_BYTES=small_bytes, GAP_BYTES=gap_bytes),
        mock.patch.object(arrays, "boxes", Part(mine)),
        mock.patch.object(arrays, "_finish", lambda leaves: [x.on_devices() for x in leaves]),
    ):
        found, report = read_arrays(images, requests)

    needed_bytes = payload_bytes = chunks = most_bytes = 0
    for leaf, (name, case) in zip(found, named.items(), strict=True):
        assert leaf.parts.keys() == wanted[name], repr(case)
        for box, part in leaf.parts.items():
            assert same(part, case.array[index_of(box)]), f"{case!r}: {box}"
        specs = [spec for header, _ in images for spec in header.arrays if spec.param == name]
        chunk_shape = specs[0].chunk_shape
        touched = chunks_of(case.array.shape, chunk_shape, wanted[name])
        itemsize = case.array.itemsize
        needed_bytes += sum(map(volume, wanted[name])) * itemsize
        chunks += len(touched)
        payload_bytes += len(touched) * math.prod(chunk_shape) * itemsize
        for box in wanted[name]:
            most_bytes += most_elements(box, chunk_shape) * itemsize
            for chunk in touched:
                must_be_inside_or_at_an_edge(chunk, box, repr(case))

    asked = [(file.name, *each) for _, file in images for each in file.ranges]
    asked_bytes = sum(length for _, _, length in asked)
    note = f"{some}, limit {limit_bytes}, devices {sorted(mine)}"
    assert report.bytes_needed == needed_bytes, note
    assert report.chunks == chunks, note
    assert report.bytes_read == asked_bytes, note
    # The chunks that the boxes touch, once each, and their CRCs; between two neighbours below
    # SMALL_BYTES what lies between them, if it is no more than GAP_BYTES.
    least_bytes = payload_bytes + CRC_BYTES * chunks
    gaps_bytes = gap_bytes * max(0, chunks - 1) if small_bytes else 0
    assert least_bytes <= asked_bytes <= least_bytes + gaps_bytes, note
    assert needed_bytes <= payload_bytes <= most_bytes, note
    assert not overlapping(asked), note


@dataclass(frozen=True)
class Part:
    """In the place of `placement.boxes`: what some devices hold, as if a process had only these."""

    devices: set[int]

    def __call__(
        self, shape: tuple[int, ...], dtype: Any, sharding: Sharding, name: str
    ) -> tuple[Box, ...]:
        indices = sharding.devices_indices_map(shape)
        found = [index for device, index in indices.items() if device.id in self.devices]
        return tuple(dict.fromkeys(box_of(index, shape) for index in found))


def box_of(index: Any, shape: Sequence[int]) -> Box:
    parts = (each.indices(size) for each, size in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop, _ in parts)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def chunks_of(shape: Sequence[int], chunk_shape: Sequence[int], boxes: set[Box]) -> set[Box]:
    """The chunks that hold an element of a box; element by element."""
    wanted = np.zeros(shape, bool)
    for box in boxes:
        wanted[index_of(box)] = True
    grid = [range(0, size, step) for size, step in zip(shape, chunk_shape, strict=True)]
    chunks = (
        tuple((a, a + step) for a, step in zip(corner, chunk_shape, strict=True))
        for corner in itertools.product(*grid)
    )
    return {chunk for chunk in chunks if wanted[index_of(chunk)].any()}


def must_be_inside_or_at_an_edge(chunk: Box, box: Box, note: str) -> None:
    """A chunk that a box touches lies in it, or one of the edges of the box goes through it."""
    if any(b <= c or d <= a for (a, b), (c, d) in zip(chunk, box, strict=True)):
        return  # another box needs it
    inside = all(c <= a and b <= d for (a, b), (c, d) in zip(chunk, box, strict=True))
    at_edge = any(a < c < b or a < d < b for (a, b), (c, d) in zip(chunk, box, strict=True))
    assert inside != at_edge, f"{note}: chunk {chunk}, box {box}"


def most_elements(box: Box, chunk_shape: Sequence[int]) -> int:
    """Elements of a box that has grown, at each edge that cuts chunks, by less than one chunk."""
    sizes = []
    for (start, stop), step in zip(box, chunk_shape, strict=True):
        cut = (start % step != 0) + (stop % step != 0)
        sizes.append(stop - start + cut * (step - 1))
    return math.prod(sizes)


def overlapping(asked: Sequence[tuple[str, int, int]]) -> bool:
    """Is a byte read twice?"""
    in_order = sorted(each for each in asked if each[2])
    return any(
        first[0] == second[0] and first[1] + first[2] > second[1]
        for first, second in itertools.pairwise(in_order)
    )


# --- a whole run, by the public calls ------------------------------------------------------------


def leaves_of(seed: int) -> dict[str, np.ndarray]:
    shapes = [(24,), (48,), (24, 12), (12, 24), (24, 12, 6), (6, 24, 4)]
    pairs = enumerate(itertools.product(shapes, ("float32", "bfloat16", "int4", "bool")))
    return {
        f"{dtype}-{'x'.join(map(str, shape))}": random_array(shape, dtype, seed + i)
        for i, (shape, dtype) in pairs
    }


def drawn(rng: np.random.Generator, shape: Sequence[int], count: int) -> Cut:
    """Any cut over so many devices."""
    meshes = [mesh for mesh in MESHES if math.prod(mesh) == count]
    mesh = meshes[rng.integers(len(meshes))]
    order = rng.permutation(len(mesh)).tolist()
    wishes = [(axis, int(rng.integers(-1, len(shape)))) for axis in order]
    return cut_of(shape, mesh, wishes, int(rng.integers(8)))


def save(root: Path, state: Any, limit_bytes: int) -> None:
    original = image.chunk_shape
    with (
        mock.patch.object(image, "chunk_shape", lambda s, n: original(s, n, limit_bytes)),
        ckpt.CheckpointManager(root, arena=root.with_name("arena")) as manager,
    ):
        manager.save(0, state)
        manager.wait_until_finished(60)


COUNTS = (1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize("before", COUNTS)
def test_from_so_many_devices_to_any_other_number(before: int, tmp_path: Path) -> None:
    rng = np.random.default_rng([SEED, before])
    values = leaves_of(SEED)
    keys = jax.random.split(jax.random.key(SEED), 24)
    for limit_bytes in (40, 1 << 20):
        root = tmp_path / f"run-{limit_bytes}"
        was = {name: drawn(rng, array.shape, before) for name, array in values.items()}
        state = {name: jax.device_put(values[name], cut.sharding) for name, cut in was.items()}
        rows = Cut((before,), ((0,),))
        save(root, {**state, "keys": jax.device_put(keys, rows.sharding)}, limit_bytes)
        for after in COUNTS:
            now = {name: drawn(rng, array.shape, after) for name, array in values.items()}
            rows = Cut((after,), ((0,),), 1)
            like = {
                name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=now[name].sharding)
                for name, array in values.items()
            }
            key_like = jax.ShapeDtypeStruct((24,), keys.dtype, sharding=rows.sharding)
            found = ckpt.restore(root, {**like, "keys": key_like}).state
            for name, array in values.items():
                note = f"MESH_SEED={SEED}: {name} from {was[name]} to {now[name]}"
                must_be(found[name], array, now[name], note)
            assert found["keys"].sharding == rows.sharding
            data, key_data = map(jax.random.key_data, (found["keys"], keys))
            must_hold(data, np.asarray(key_data), Cut((after,), ((0,), ()), 1), f"{after} devices")


SWAPS: Mapping[str, tuple[Cut, Cut]] = {
    "axes swapped": (Cut((2, 3), ((0,), (1,))), Cut((2, 3), ((1,), (0,)))),
    "mesh turned": (Cut((2, 3), ((0,), (1,))), Cut((3, 2), ((0,), (1,)))),
    "both axes on one dimension, in the other order": (
        Cut((2, 4), ((0, 1), ())),
        Cut((2, 4), ((1, 0), ())),
    ),
    "rows to columns": (Cut((8,), ((0,), ())), Cut((6,), ((), (0,)))),
    "replicated to sharded": (Cut((6,), ((), ())), Cut((4,), ((0,), ()))),
    "sharded to replicated": (Cut((3,), ((0,), ())), Cut((8,), ((), ()))),
    "partially replicated": (Cut((2, 4), ((0,), ())), Cut((3, 2), ((), (0,)))),
    "the same on other devices": (Cut((3,), ((0,), ())), Cut((3,), ((0,), ()), 5)),
    "3 to 4": (Cut((3,), ((0,), ())), Cut((4,), ((0,), ()))),
    "8 to 3": (Cut((8,), ((0,), ())), Cut((3,), ((0,), ()))),
}


@pytest.mark.parametrize("kind", SWAPS)
@pytest.mark.parametrize("limit_bytes", [100, 1 << 20])
def test_named_changes_of_a_mesh(kind: str, limit_bytes: int, tmp_path: Path) -> None:
    before, wanted = SWAPS[kind]
    array = random_array((48, 24), "float32", SEED)
    save(tmp_path / "run", {"w": jax.device_put(array, before.sharding)}, limit_bytes)
    like = {"w": jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=wanted.sharding)}
    restored = ckpt.restore(tmp_path / "run", like)
    must_be(restored.state["w"], array, wanted, f"MESH_SEED={SEED}")
    assert restored.report.bytes_needed == array.nbytes


# --- shards of unequal sizes ---------------------------------------------------------------------


def test_jax_has_no_arrays_with_shards_of_unequal_sizes() -> None:
    """Should this fail, JAX has learnt it, and so must a restore."""
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec("a"))
    array = np.arange(12, dtype=np.float32)
    wrong = "divi"  # "not divisible", "does not evenly divide"
    with pytest.raises(ValueError, match=wrong):
        jax.device_put(array, sharding)
    with pytest.raises(ValueError, match=wrong):
        jax.jit(lambda: jnp.asarray(array), out_shardings=sharding)()
    with pytest.raises(ValueError, match=wrong):
        jax.make_array_from_callback((12,), sharding, lambda index: array[index])
    parts = [jax.device_put(array[i : i + 2], d) for i, d in enumerate(jax.devices())]
    with pytest.raises(ValueError, match=wrong):
        jax.make_array_from_single_device_arrays((12,), sharding, parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint4"])
def test_a_target_with_shards_of_unequal_sizes_is_refused_by_name(
    dtype: str, tmp_path: Path
) -> None:
    """Read straight to the devices, converted, or held under another dtype in the image."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    saved = np.float32 if dtype == "bfloat16" else kind
    ckpt.save(
        tmp_path / "run",
        {
            "fine": np.ones(8, saved),
            "more": np.ones(4, saved),
            "rows": np.ones((12, 8), saved),
        },
    )
    sharding = NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec("a"))
    like = {
        "fine": jax.ShapeDtypeStruct((8,), kind, sharding=sharding),
        "more": jax.ShapeDtypeStruct((4,), kind, sharding=sharding),
        "rows": jax.ShapeDtypeStruct((12, 8), kind, sharding=sharding),
    }
    step_and_cure = r"run/branch-1/0: .* equal parts only: give .* \[12, 8\]"
    for donate in (False, True):
        with pytest.raises(ckpt.Mismatch, match=f"(?s){step_and_cure}") as caught:
            ckpt.restore(
                tmp_path / "run",
                like,
                fit=ckpt.Fit(cast=True),
                loading=ckpt.Loading(donate=donate),
            )
        assert [line.split(":")[0] for line in caught.value.differences] == ["more", "rows"]

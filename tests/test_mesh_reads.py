"""How little is read from one mesh to another: the chunks that are needed, once each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Sharding
from memory_images import make_images, same
from mesh_cases import LIMITS, Box, Case, cases, index_of

from ckpt import arrays, fetch
from ckpt.arrays import Request, read_arrays
from ckpt.grid import CRC_BYTES


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

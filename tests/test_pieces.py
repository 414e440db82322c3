"""Cutting an image for a bucket: between chunks, no larger than it must be, nothing left out."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt import image
from ckpt.grid import CRC_BYTES
from ckpt.image import Header
from ckpt.pieces import cuts, objects
from ckpt.specs import ArraySpec, ShardSpec


def header_of(shapes: list[tuple[int, int]], text: int = 0) -> Header:
    """The header of an image; each shape is (number of chunks, bytes of a chunk)."""
    arrays = [
        ArraySpec(f"a{i}", "uint8", (count * size,), (size,))
        for i, (count, size) in enumerate(shapes)
    ]
    shards = [ShardSpec(i, (0,), spec.shape) for i, spec in enumerate(arrays)]
    plan = image.plan(arrays, shards, {"text": "x" * text})
    buffer = bytearray(plan.size_bytes)
    return image.fill(plan, buffer, [np.zeros(spec.shape, np.uint8) for spec in arrays])


SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 200_000)), min_size=0, max_size=6)


@given(SHAPES, st.integers(1, 600_000), st.sampled_from([0, 10, 50_000]))
def test_cuts(shapes: list[tuple[int, int]], limit: int, text: int) -> None:
    header = header_of(shapes, text)
    borders = [0, *cuts(header, limit), header.size_bytes]
    assert borders == sorted(set(borders))
    starts = header.columns.offset.astype(int).tolist()
    ends = (header.columns.offset + header.columns.nbytes).astype(int).tolist()
    chunks = [(start, end + CRC_BYTES) for start, end in zip(starts, ends, strict=True)]
    for start, stop in itertools.pairwise(borders):
        inside = [c for c in chunks if start < c[1] and c[0] < stop]
        assert all(start <= c[0] and c[1] <= stop for c in inside), "a chunk lies in two objects"
        if stop - start > limit:
            # Only what cannot be cut: the page, one chunk, or the table with what stands before.
            assert len(inside) <= 1, f"{start}..{stop} could have been cut: {inside}"
    # As few as can be: no two neighbours would fit into one.
    for first, third in zip(borders, borders[2:], strict=False):
        assert third - first > limit


def test_an_image_that_is_not_cut() -> None:
    header = header_of([(3, 100_000)])
    assert cuts(header, None) == []
    assert cuts(header, header.size_bytes) == []
    assert objects(header, "d/p0.image", None) == [(0, "d/p0.image")]
    whole = f"d/p0.image.bytes-0-{header.size_bytes}"
    assert objects(header, "d/p0.image", 1 << 30) == [(0, whole)]


def test_names_follow_each_other() -> None:
    header = header_of([(5, 100_000)])
    found = objects(header, "image", 150_000)
    spans = [tuple(map(int, name.removeprefix("image.bytes-").split("-"))) for _, name in found]
    assert [start for start, _ in found] == [start for start, _ in spans]
    assert spans[0][0] == 0
    assert spans[-1][1] == header.size_bytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert len(spans) > 2

"""Reading frames out of compressed images: what is read together, the budget, hostile frames."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import crc32c
import numpy as np
import pytest
import zstandard
from memory_images import Bytes
from orbax_steps import mesh_sharding

from ckpt import fetch, image
from ckpt.arrays import Request, read_arrays
from ckpt.compressing import compressed
from ckpt.errors import Damaged
from ckpt.image import Header
from ckpt.specs import ArraySpec, ShardSpec


def in_memory(arrays: dict[str, np.ndarray], limit_bytes: int = 1 << 20) -> tuple[Header, Bytes]:
    listed, shards = [], []
    for number, (param, value) in enumerate(arrays.items()):
        chunk = image.chunk_shape(value.shape, value.dtype.itemsize, limit_bytes)
        listed.append(ArraySpec(param, value.dtype.name, value.shape, chunk))
        shards.append(ShardSpec(number, (0,) * value.ndim, value.shape))
    plan = image.plan(listed, shards, {})
    buffer = bytearray(plan.size_bytes)
    header = image.fill(plan, buffer, list(arrays.values()))
    made, packed = compressed(header, memoryview(buffer))
    return made, Bytes("p0.image", packed.tobytes())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["two frames", "bomb", "trailing", "another length", "not one"])
def test_a_hostile_frame_is_damage(name: str, sharded: bool) -> None:
    """Two chunks, the second of which is not what a writer of ours would leave there."""
    values = np.arange(200_000, dtype=np.int32).reshape(2, 100_000) // 9
    header, reader = in_memory({"w": values}, limit_bytes=400_000)
    start, length = image.payload_ranges(header)[1].tolist()
    pack = zstandard.ZstdCompressor(level=3).compress
    zeros = pack(bytes(30 << 20))
    frame = {
        "two frames": pack(values[1].tobytes()) + pack(b""),
        "bomb": zeros,
        "trailing": pack(values[1].tobytes()) + b"\0",
        "another length": pack(values[1, :-1].tobytes()),
        "not one": b"x" * 100,
    }[name]
    assert len(frame) < length + 3000, "it fits"
    data = bytearray(reader.data)
    crc = crc32c.crc32c(frame)
    data[start : start + len(frame) + 4] = frame + crc.to_bytes(4, "little")
    frames, crcs = header.columns.frames.copy(), header.columns.crc.copy()  # type: ignore[union-attr]
    frames[1], crcs[1] = len(frame), crc
    changed = replace(header, columns=replace(header.columns, frames=frames, crc=crcs))
    hostile = Bytes("p0.image", bytes(data))
    sharding = mesh_sharding(2, None, "b") if sharded else None
    with pytest.raises(Damaged, match=r"1 of the 2 chunks .*\n.*leaf w: .*\(1, 0\).*: zstd frame"):
        read_arrays([(changed, hostile)], [Request("w", sharding)])


def test_reads_and_scratch_memory_keep_to_the_budget() -> None:
    rng = np.random.default_rng(8)
    arrays = {f"s{i}": np.full(64, i, np.float32) for i in range(500)}
    arrays["zeros"] = np.zeros((8, 1 << 18), np.uint8)
    arrays["noise"] = rng.integers(0, 256, (8, 1 << 16)).astype(np.uint8)
    header, reader = in_memory(arrays, limit_bytes=1 << 18)
    held: list[int] = []
    original = fetch._Budget.hold

    def hold(self: Any, nbytes: int) -> Any:
        held.append(nbytes)
        return original(self, nbytes)

    requests = [
        Request(param, mesh_sharding(2, None, "b") if value.ndim == 2 else None)
        for param, value in arrays.items()
    ]
    done: list[int] = []
    with mock.patch.object(fetch._Budget, "hold", hold):
        for budget_bytes in (1 << 30, 600_000, 1):
            held.clear()
            reader.ranges.clear()
            found, report = read_arrays(
                [(header, reader)],
                requests,
                budget_bytes=budget_bytes,
                threads=3,
                progress=lambda so_far, total: done.append(total - so_far),
            )
            for value, wanted in zip(found, arrays.values(), strict=True):
                np.testing.assert_array_equal(np.asarray(value), wanted)
            assert done[-1] == 0
            assert report.bytes_read == sum(length for _, length in reader.ranges)
            assert report.chunks == len(header.columns.array)
            if budget_bytes == 600_000:
                # A large chunk that goes to several places: its frame, and itself.
                assert max(held) > 1 << 18
                assert max(held) <= 600_000
    zeros = int(header.columns.nbytes[header.columns.array == 500].sum())
    assert report.bytes_read < sum(value.nbytes for value in arrays.values()) - zeros // 2


def test_neighbours_among_small_frames_are_read_together() -> None:
    header, reader = in_memory({f"s{i}": np.full(64, i, np.float32) for i in range(1000)})
    read_arrays([(header, reader)], [Request(f"s{i}") for i in range(1000)])
    assert len(reader.ranges) == 1


def test_a_cut_image_names_the_chunks_beyond_its_end() -> None:
    header, reader = in_memory({f"s{i}": np.full(64, i, np.float32) for i in range(1000)})
    end = int(image.payload_ranges(header).sum(axis=1)[400])
    reader.data = reader.data[:end]
    with pytest.raises(Damaged, match=r"599 of the 1000 chunks .*\n.*s401.*truncated"):
        read_arrays([(header, reader)], [Request(f"s{i}") for i in range(1000)])

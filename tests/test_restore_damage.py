"""Damage, absence and failing stores under a restore."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from device_meshes import mesh_of
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from memory_images import Bytes, Images, make_images, random_array, same

from ckpt import fetch, image, specs, table
from ckpt.arrays import Request, read_arrays
from ckpt.errors import Damaged, NotFound, StoreFailed


@dataclass
class OnDisk(fetch.ImageFile):
    """An image in a file, opened for each read."""

    path: pathlib.Path

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        try:
            with self.path.open("rb") as file:
                for offset, buffer in ranges:
                    file.seek(offset)
                    if file.readinto(buffer) != buffer.nbytes:
                        raise Damaged(f"{self.name}: ends early")
        except FileNotFoundError as error:
            raise NotFound(f"{self.name}: not there") from error


# Damage
ROWS = {"big": (8, 1 << 15), "small": (64,), "cut": (16, 8)}


def damaged_images(limit_bytes: int = 1 << 18) -> tuple[dict[str, np.ndarray], Images]:
    arrays = {param: random_array(shape, "float32", 5) for param, shape in ROWS.items()}
    columns = NamedSharding(mesh_of((8,)), PartitionSpec(None, "a"))
    return arrays, make_images(
        arrays, {"big": None, "small": None, "cut": columns}, processes=2, limit_bytes=limit_bytes
    )


REQUESTS = [
    Request("big", None, "params/big"),
    Request("small", SingleDeviceSharding(jax.devices()[0]), "params/small"),
    Request("cut", NamedSharding(mesh_of((8,)), PartitionSpec("a")), "params/cut"),
]

LEAVES = {request.param: request.name for request in REQUESTS}


@given(data=st.data(), budget_bytes=st.sampled_from([1, 1 << 30]))
def test_one_flipped_bit_anywhere_in_a_chunk_is_found(
    data: st.DataObject, budget_bytes: int
) -> None:
    _, images = damaged_images()
    number = data.draw(st.integers(0, 1), "image")
    header, reader = images[number]
    row = data.draw(st.integers(0, len(header.columns.array) - 1), "row")
    start, length = image.payload_ranges(header)[row].tolist()
    place = start + data.draw(st.integers(0, length - 1), "byte")
    flipped = bytearray(reader.data)
    flipped[place] ^= 1 << data.draw(st.integers(0, 7), "bit")
    reader.data = bytes(flipped)
    spec = header.arrays[header.columns.array[row]]
    with pytest.raises(Damaged, match="1 of the 13 chunks") as caught:
        read_arrays(images, REQUESTS, budget_bytes=budget_bytes)
    at = tuple(header.columns.grid[row, : len(spec.shape)].tolist())
    wanted = f"leaf {LEAVES[spec.param]}: {reader.name}: {spec.param}, chunk {at}"
    assert wanted in str(caught.value), caught.value


def test_all_damage_comes_in_one_error_in_the_order_of_the_files() -> None:
    _, images = damaged_images(limit_bytes=256)
    for _, reader in images:
        reader.data = reader.data[:4096] + bytes(len(reader.data) - 4096)
    for budget_bytes in (1, 1 << 30):
        with pytest.raises(Damaged) as caught:
            read_arrays(images, REQUESTS, budget_bytes=budget_bytes)
        lines = str(caught.value).splitlines()
        assert lines[0].startswith("4105 of the 4105 chunks that are needed are damaged")
        assert lines[-1] == f"  and {4105 - fetch.LISTED} more"
        assert len(lines) == fetch.LISTED + 2


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_image_names_the_chunks_beyond_its_end(share: float) -> None:
    _, images = damaged_images()
    for header, reader in images:
        reader.data = reader.data[: int(header.size_bytes * share)]
    ends = [image.payload_ranges(header).sum(axis=1) for header, _ in images]
    lost = sum(int((e > r.size_bytes).sum()) for e, (_, r) in zip(ends, images, strict=True))
    if not lost:
        read_arrays(images, REQUESTS)
        return
    with pytest.raises(Damaged, match=rf"{lost} of the 13 chunks .*\n.*truncated"):
        read_arrays(images, REQUESTS)


def on_disk(images: Images, directory: pathlib.Path) -> list[tuple[image.Header, OnDisk]]:
    found = []
    for header, reader in images:
        path = directory / reader.name
        path.write_bytes(reader.data)
        found.append((header, OnDisk(path)))
    return found


def test_files(tmp_path: pathlib.Path) -> None:
    arrays, images = damaged_images()
    found, _ = read_arrays(on_disk(images, tmp_path), REQUESTS)
    assert all(same(x, arrays[r.param]) for x, r in zip(found, REQUESTS, strict=True))


@pytest.mark.parametrize("number", [0, 1])
def test_a_deleted_image_is_damage(number: int, tmp_path: pathlib.Path) -> None:
    _, images = damaged_images()
    files = on_disk(images, tmp_path)

    @dataclass
    class Gone(fetch.ImageFile):
        name: str
        size_bytes: int

        def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
            files[number][1].read_into(ranges)

    header, file = files[number]
    mixed: list[tuple[image.Header, Any]] = list(files)
    mixed[number] = (header, Gone(file.name, file.size_bytes))
    file.path.unlink()
    count = len(header.columns.array)
    with pytest.raises(Damaged, match=rf"{count} of the 13 chunks .*\n.*not there") as caught:
        read_arrays(mixed, REQUESTS)
    assert str(file.path) in str(caught.value)


def test_a_chunk_that_no_image_holds_is_damage_and_nothing_is_read() -> None:
    _, images = damaged_images()
    for number in (0, 1):
        with pytest.raises(Damaged, match=r"not in the image \(p[01]\.image\)") as caught:
            read_arrays([images[number]], REQUESTS)
        assert "leaf params/cut: cut, chunk (0, " in str(caught.value)
        assert not images[number][1].ranges


def test_one_missing_chunk_is_named() -> None:
    array = random_array((8, 64), "float32", 6)
    ((header, reader),) = make_images({"w": array}, {"w": None}, limit_bytes=256)
    keep = np.arange(8) != 5
    columns = header.columns
    cut = table.Columns(
        **{
            name: getattr(columns, name)[keep]
            for name in ("array", "grid", "offset", "nbytes", "digest", "crc")
        }
    )
    images = [(replace(header, columns=cut), reader)]
    with pytest.raises(Damaged, match=r"leaf params/w: w, chunk \(5, 0\)$"):
        read_arrays(images, [Request("w", None, "params/w")])


def test_a_header_that_speaks_of_more_than_there_is_costs_no_memory() -> None:
    header, reader = make_images({"w": np.zeros((8, 8), np.float32)}, {"w": None})[0]
    vast = specs.ArraySpec("w", "float32", (2**40, 8), (8, 8))
    images = [(replace(header, arrays=(vast,)), reader)]
    with pytest.raises(Damaged, match=r"chunk \(1, 0\)(?s:.)*and others$"):
        read_arrays(images, [Request("w")])


def test_an_unknown_array_and_images_that_disagree() -> None:
    images = make_images({"w": np.zeros((8, 8), np.float32)}, {"w": None})
    with pytest.raises(Damaged, match=r"leaf a/b: wanted array 'a\.b', found none .* p0\.image"):
        read_arrays(images, [Request("a.b", None, "a/b")])
    others = make_images({"w": np.zeros((8, 4), np.float32)}, {"w": None})
    with pytest.raises(Damaged, match="images disagree"):
        read_arrays([*images, *others], [Request("w")])


@pytest.mark.parametrize(
    "error", [StoreFailed("no answer"), OSError("oh"), KeyboardInterrupt("stop")]
)
def test_a_failing_store_is_no_damage_and_keeps_its_type(error: BaseException) -> None:
    _, images = damaged_images()

    def fail(_: Sequence[tuple[int, memoryview]]) -> None:
        raise error

    with (
        mock.patch.object(Bytes, "read_into", side_effect=fail),
        pytest.raises(type(error), match=str(error)),
    ):
        read_arrays(images, REQUESTS)

"""Arrays out of images: any sharding from any other, and every kind of damage found."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from device_meshes import mesh_of
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from memory_images import make_images, random_array, same

from ckpt import arrays as arrays_module
from ckpt import fetch
from ckpt.arrays import Report, Request, read_arrays
from ckpt.errors import Mismatch, Misuse, Unsupported

MESHES = [(8,), (4, 2), (2, 4), (2, 2, 2)]

DTYPES = ["float32", "bfloat16", "int4", "bool", "complex64", "uint8"]


@st.composite
def arrays_and_shardings(draw: st.DrawFn) -> tuple[np.ndarray, Sharding | None, Sharding | None]:
    shape = tuple(draw(st.lists(st.sampled_from([8, 16, 24]), min_size=0, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    array = random_array(shape, dtype, draw(st.integers(0, 2**32)))
    return array, draw(shardings(len(shape))), draw(shardings(len(shape)))


@st.composite
def shardings(draw: st.DrawFn, rank: int) -> Sharding | None:
    kind = draw(st.sampled_from(["mesh", "mesh", "mesh", "mesh", "single", "host"]))
    if kind == "host":
        return None
    if kind == "single":
        return SingleDeviceSharding(jax.devices()[draw(st.integers(0, 7))])
    mesh = mesh_of(draw(st.sampled_from(MESHES)))
    names = draw(st.permutations(list(mesh.axis_names)))
    spec: list[Any] = [None] * rank
    for name in names:
        axis = draw(st.integers(-1, rank - 1))
        if axis >= 0:
            spec[axis] = (*(spec[axis] or ()), name)
    return NamedSharding(mesh, PartitionSpec(*spec))


@given(
    cases=st.lists(arrays_and_shardings(), min_size=1, max_size=4),
    processes=st.integers(1, 3),
    limit_bytes=st.sampled_from([16, 100, 1000, 1 << 20]),
    small_bytes=st.sampled_from([0, 128, 1 << 18]),
    gap_bytes=st.sampled_from([0, 64, 1 << 16]),
    budget_bytes=st.sampled_from([1, 300, 1 << 30]),
    threads=st.integers(1, 3),
)
def test_any_sharding_from_any_other(
    cases: list[tuple[np.ndarray, Sharding | None, Sharding | None]],
    processes: int,
    limit_bytes: int,
    small_bytes: int,
    gap_bytes: int,
    budget_bytes: int,
    threads: int,
) -> None:
    arrays = {f"leaf{i}": array for i, (array, _, _) in enumerate(cases)}
    written = {f"leaf{i}": sharding for i, (_, sharding, _) in enumerate(cases)}
    images = make_images(arrays, written, processes=processes, limit_bytes=limit_bytes)
    requests = [Request(f"leaf{i}", wanted) for i, (_, _, wanted) in enumerate(cases)]
    sizes: list[tuple[int, int]] = []
    with mock.patch.multiple(fetch, SMALL_BYTES=small_bytes, GAP_BYTES=gap_bytes, GROUP_BYTES=200):
        found, report = read_arrays(
            images,
            requests,
            budget_bytes=budget_bytes,
            threads=threads,
            progress=lambda done, total: sizes.append((done, total)),
        )
    for value, (array, before, wanted) in zip(found, cases, strict=True):
        note = f"{array.dtype}{array.shape} from {before} to {wanted}"
        assert same(value, array), note
        if wanted is None:
            assert isinstance(value, np.ndarray), note
            assert value.flags.writeable, note
            assert value.__array_interface__["data"][0] % 64 == 0, note
        else:
            assert value.sharding == wanted, note
            for shard in value.addressable_shards:
                assert same(shard.data, array[shard.index]), note
    assert sizes[-1] == (sizes[-1][1],) * 2
    assert [done for done, _ in sizes] == sorted(done for done, _ in sizes)
    asked = sum(length for _, reader in images for _, length in reader.ranges)
    assert report.bytes_read == asked
    assert report.chunks == sum(len(h.columns.array) for h, _ in images)


def test_only_what_is_needed_is_read_and_replicas_once() -> None:
    array = random_array((64, 1024), "float32", 1)
    spread = NamedSharding(mesh_of((8,)), PartitionSpec("a"))
    images = make_images({"w": array}, {"w": spread}, limit_bytes=8192)
    for wanted in (spread, NamedSharding(mesh_of((4, 2)), PartitionSpec()), None):
        images[0][1].ranges.clear()
        (found,), report = read_arrays(images, [Request("w", wanted)])
        assert same(found, array)
        assert report.bytes_needed == array.nbytes
        assert report.chunks == 32
        assert array.nbytes < report.bytes_read < array.nbytes * 1.01 + 32 * 64


def test_parts_that_moved_to_other_devices() -> None:
    array = random_array((64, 16), "float32", 1)
    images = make_images({"w": array}, {"w": NamedSharding(mesh_of((8,)), PartitionSpec("a"))})
    moved = Mesh(np.roll(np.array(jax.devices()[:4]), 3), ("z",))
    (found,), report = read_arrays(images, [Request("w", NamedSharding(moved, PartitionSpec("z")))])
    assert same(found, array)
    assert report.bytes_needed == array.nbytes


def test_large_chunks_are_read_in_place() -> None:
    array = random_array((8, 1 << 17), "float32", 2)
    images = make_images({"w": array}, {"w": None}, limit_bytes=1 << 19)
    with mock.patch.object(fetch.Fetch, "_through_scratch", side_effect=AssertionError):
        (host,), _ = read_arrays(images, [Request("w")], budget_bytes=1)
        rows = NamedSharding(mesh_of((8,)), PartitionSpec("a"))
        (device,), _ = read_arrays(images, [Request("w", rows)], budget_bytes=1)
    assert same(host, array)
    assert same(device, array)
    with mock.patch.object(fetch.Fetch, "_straight", side_effect=AssertionError):
        columns = NamedSharding(mesh_of((8,)), PartitionSpec(None, "a"))
        (device,), _ = read_arrays(images, [Request("w", columns)], budget_bytes=1)
    assert same(device, array)


def test_device_arrays_take_the_buffers_and_survive_donation() -> None:
    array = random_array((1 << 16,), "float32", 3)
    images = make_images({"w": array}, {"w": None})
    buffers = []

    def remember(*args: Any) -> np.ndarray:
        buffers.append(allocate(*args))
        return buffers[-1]

    allocate = arrays_module.aligned_bytes
    device = SingleDeviceSharding(jax.devices()[3])
    with mock.patch.object(arrays_module, "aligned_bytes", remember):
        (found,), _ = read_arrays(images, [Request("w", device)])
    address = buffers[0].__array_interface__["data"][0]
    assert found.unsafe_buffer_pointer() == address, "no copy on CPU"
    changed = jax.jit(lambda x: x + 1, donate_argnums=0)(found)
    assert same(changed, array + 1)
    assert same(buffers[0].view(np.float32), array)


def test_many_small_leaves_take_few_reads() -> None:
    arrays = {f"l{i}": np.full(64, i, np.float32) for i in range(10_000)}
    images = make_images(arrays, dict.fromkeys(arrays), processes=2)
    one = SingleDeviceSharding(jax.devices()[0])
    for sharding in (None, one):
        for _, reader in images:
            reader.ranges.clear()
        found, report = read_arrays(images, [Request(p, sharding, p) for p in arrays])
        assert all(np.asarray(x)[5] == i for i, x in enumerate(found))
        assert report.chunks == 10_000
        assert sum(len(reader.ranges) for _, reader in images) == 2


def test_empty_arrays_scalars_and_memory_kinds() -> None:
    arrays = {
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.5, np.float32),
        "w": random_array((16, 16), "float32", 4),
    }
    images = make_images(arrays, dict.fromkeys(arrays))
    replicated = NamedSharding(mesh_of((8,)), PartitionSpec())
    requests = [
        Request("empty"),
        Request("empty", replicated),
        Request("scalar", replicated),
        Request("scalar"),
        Request("w", replicated, memory_kind="pinned_host"),
        Request("w", NamedSharding(mesh_of((8,)), PartitionSpec("a"), memory_kind="unpinned_host")),
    ]
    found, _ = read_arrays(images, requests)
    for request, value in zip(requests, found, strict=True):
        assert same(value, arrays[request.param]), request
    assert [x.sharding.memory_kind for x in found[4:]] == ["pinned_host", "unpinned_host"]
    assert read_arrays(images, []) == ([], Report(0, 0, 0, mock.ANY, mock.ANY, mock.ANY))


def test_an_int64_leaf_is_not_narrowed() -> None:
    array = np.array([2**40, -1])
    images = make_images({"n": array}, {"n": None})
    one = SingleDeviceSharding(jax.devices()[0])
    assert same(read_arrays(images, [Request("n")])[0][0], array)
    with pytest.raises(Unsupported, match=r"step/n: saved as int64, .* int32; set jax_enable_x64"):
        read_arrays(images, [Request("n", one, "step/n")])
    with jax.enable_x64(True):
        assert same(read_arrays(images, [Request("n", one)])[0][0], array)


def test_a_sharding_that_does_not_fit() -> None:
    images = make_images({"w": np.zeros((6, 4), np.float32)}, {"w": None})
    with pytest.raises(Mismatch, match=r"params/w: wanted NamedSharding.*found shape \[6, 4\]"):
        read_arrays(
            images, [Request("w", NamedSharding(mesh_of((8,)), PartitionSpec("a")), "params/w")]
        )


def test_calls_without_meaning() -> None:
    for options in ({"threads": 0}, {"budget_bytes": 0}):
        with pytest.raises(Misuse, match="at least 1"):
            read_arrays([], [], **options)


def test_a_budget_is_kept_and_what_is_larger_runs_alone() -> None:
    array = random_array((64, 512), "float32", 7)
    columns = NamedSharding(mesh_of((8,)), PartitionSpec(None, "a"))
    images = make_images({"w": array}, {"w": columns}, limit_bytes=1024)
    held = []
    original = fetch._Budget.hold

    def hold(self: Any, nbytes: int) -> Any:
        held.append(nbytes)
        return original(self, nbytes)

    with mock.patch.object(fetch._Budget, "hold", hold):
        (found,), _ = read_arrays(images, [Request("w")], budget_bytes=5000, threads=3)
        assert same(found, array)
        assert 1024 < max(held) <= 5000
        (found,), _ = read_arrays(images, [Request("w")], budget_bytes=1, threads=3)
        assert same(found, array)


def test_the_budget_lets_only_so_much_run_at_a_time() -> None:
    budget, peak, now = fetch._Budget(100), 0, 0
    lock = threading.Lock()

    def use(nbytes: int) -> None:
        nonlocal peak, now
        with budget.hold(nbytes):
            with lock:
                now += nbytes
                assert now <= 100 or now == nbytes, "what is larger runs alone"
                peak = max(peak, now)
            time.sleep(0.001)
            with lock:
                now -= nbytes

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, [30, 60, 500, 10, 40, 40, 40, 101, 1, 99] * 4))
    assert peak == 500
    assert now == 0

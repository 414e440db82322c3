"""From any mesh to any other: every device gets its part of the values.

JAX 0.10 has no arrays with shards of unequal sizes, so "uneven" means here that two meshes cut an
array at different places: 12 rows over 3 devices, restored to 4.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
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
from jax.sharding import NamedSharding, PartitionSpec
from memory_images import make_images, random_array, same
from mesh_cases import LIMITS, MESHES, Case, Cut, cases, cut_of, index_of

import ckpt
from ckpt import image
from ckpt.arrays import Request, read_arrays

SEED = int(os.environ.get("MESH_SEED", time.time_ns() % 1_000_000))


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

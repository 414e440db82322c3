"""Snapshots: the values at the moment of the call, each shard once, whatever happens next."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ckpt import image, snapshot, tree
from ckpt.arena import Arena
from ckpt.errors import Misuse, StoreFailed
from ckpt.leaves import logical_view
from ckpt.snapshot import Snapshot, SnapshotPlan
from ckpt.specs import dtype_of

MESHES = [((8,), ("x",)), ((4, 2), ("x", "y")), ((2, 2, 2), ("x", "y", "z")), ((1,), ("x",))]
DTYPES = [
    np.bool_, np.int8, np.uint32, np.float32, np.complex64,
    ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e5m2,
]  # fmt: skip


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    arena = Arena(tmp_path_factory.mktemp("snapshot") / "arena", owner={"run": "tests"}, slots=2)
    yield arena
    arena.close(remove=True)


def take(state: Any, arena: Arena, previous: SnapshotPlan | None = None, **meta: Any) -> Snapshot:
    known = None if previous is None else previous.outline
    flat = tree.flatten(state, known=known)
    return snapshot.take(flat, arena, meta, previous=previous, timeout_s=0)


def read(state: Any, taken: Snapshot) -> dict[str, np.ndarray]:
    """Arrays of a snapshot by leaf name, in logical dtype, from the verified bytes of its slot."""
    raw = bytes(taken.slot.buffer)
    header = image.decode(lambda o, n: raw[o : o + n], len(raw), "slot")
    assert header.digest == taken.header.digest
    whole = {a.param: np.empty(a.shape, dtype_of(a.dtype)) for a in header.arrays}
    filled = {a.param: 0 for a in header.arrays}
    for row, (offset, length) in enumerate(image.payload_ranges(header).tolist()):
        stored = raw[offset : offset + length]
        image.verify_chunk(header, row, stored)
        spec = header.arrays[header.columns.array[row]]
        at = header.columns.grid[row, : len(spec.shape)].tolist()
        index = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, spec.chunk_shape, strict=True))
        chunk = np.frombuffer(stored[:-4], dtype_of(spec.dtype)).reshape(spec.chunk_shape)
        whole[spec.param][index] = chunk
        filled[spec.param] += chunk.size
    assert filled == {a.param: int(np.prod(a.shape)) for a in header.arrays}, "twice or never"
    specs = {leaf.spec.param: leaf.spec for leaf in tree.flatten(state).leaves}
    return {
        specs[p].name: v if specs[p].kind == "key" else logical_view(v, specs[p])
        for p, v in whole.items()
    }


@given(data=st.data())
def test_round_trip_over_shapes_dtypes_and_shardings(arena: Arena, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    state, wanted = {}, {}
    for i in range(data.draw(st.integers(1, 4), label="leaves")):
        shape_, names = data.draw(st.sampled_from(MESHES), label="mesh")
        mesh = mesh_of(shape_, names)
        rank = data.draw(st.integers(0, 3), label="rank")
        axes = data.draw(st.permutations([None, None, None, *names]), label="axes")[:rank]
        shape = tuple(
            data.draw(st.integers(0, 3)) * (1 if axis is None else mesh.shape[axis])
            for axis in axes
        )
        dtype = np.dtype(data.draw(st.sampled_from(DTYPES), label="dtype"))
        value = rng.integers(0, 2, shape).astype(dtype)
        wanted[f"a{i}"] = value
        state[f"a{i}"] = jax.device_put(value, NamedSharding(mesh, P(*axes)))
    state["host"] = wanted["host"] = rng.random((3, 4)).T  # not contiguous
    state["n"], wanted["n"] = 7, np.array(7)
    state["text"] = "held in the record"
    taken = take(state, arena, step=3)
    try:
        found = read(state, taken)
        assert taken.header.meta == {"step": 3}
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype, name
            assert found[name].tobytes() == value.tobytes(), name
    finally:
        taken.slot.release()


def test_keys_and_scalars(arena: Arena) -> None:
    state = {
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 5),
        "lr": 0.1,
        "on": True,
        "z": 1j,
        "step": np.int32(4),
        "big": 2**80,
    }
    taken = take(state, arena)
    found = read(state, taken)
    taken.slot.release()
    assert found.keys() == state.keys() - {"big"}
    assert (found["key"] == jax.random.key_data(state["key"])).all()
    assert (found["keys"] == jax.random.key_data(state["keys"])).all()
    for name in ("lr", "on", "z", "step"):
        assert found[name] == state[name]
        assert found[name].shape == ()


def test_through_pinned_memory(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way from accelerators, on the pinned memory that CPU devices offer, too."""
    mesh = mesh_of((4, 2), ("x", "y"))
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    shardings = [NamedSharding(mesh, p) for p in (P("x"), P(), P("y", "x"))]
    state = {f"a{i}": jax.device_put(value, s) for i, s in enumerate(shardings)}
    state["one"] = jnp.asarray(value)
    state["there"] = jax.device_put(value, shardings[0].with_memory_kind("pinned_host"))
    moved: list[Any] = []
    real = jax.device_put

    def put(shards: list[Any], shardings: list[Any]) -> Any:
        moved.extend(shards)
        return real(shards, shardings)

    monkeypatch.setattr(snapshot, "_pinned", lambda sharding: "pinned_host")
    monkeypatch.setattr(jax, "device_put", put)
    taken = take(state | {"host": value}, arena)
    monkeypatch.undo()
    found = read(state | {"host": value}, taken)
    taken.slot.release()
    assert len(moved) == 4 + 1 + 8 + 1 + 4, "only what is written goes to the host"
    assert len(found) == 6
    for name, array in found.items():
        np.testing.assert_array_equal(array, value, err_msg=name)


def test_each_shard_is_written_once(arena: Arena) -> None:
    mesh = mesh_of((4, 2), ("x", "y"))
    value = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    shardings = {"all": P(), "rows": P("x"), "cells": P("y", "x"), "joint": P(("x", "y"))}
    state = {n: jax.device_put(value, NamedSharding(mesh, p)) for n, p in shardings.items()}
    taken = take(state, arena)
    taken.slot.release()
    counts = np.bincount(taken.header.columns.array)
    by_name = {a.param: int(counts[i]) for i, a in enumerate(taken.header.arrays)}
    assert by_name == {"all": 1, "rows": 4, "cells": 8, "joint": 8}
    chunks = {a.param: a.chunk_shape for a in taken.header.arrays}
    assert chunks == {"all": (8, 8), "rows": (2, 8), "cells": (4, 2), "joint": (1, 8)}


def buffers(state: Any) -> set[int]:
    shards = (s for v in jax.tree.leaves(state) for s in v.addressable_shards)
    return {s.data.unsafe_buffer_pointer() for s in shards}


def test_a_donating_step_right_after_does_not_change_the_snapshot(arena: Arena) -> None:
    mesh = mesh_of((8,), ("x",))

    grow = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    state = {
        "one": jnp.arange(500_000, dtype=jnp.int32),
        "many": jax.device_put(jnp.arange(80_000), NamedSharding(mesh, P("x"))),
        "host": np.arange(1000),
    }
    plan = None
    for round_ in range(12):
        host = state.pop("host")
        wanted = {k: np.array(v, copy=True) for k, v in state.items()} | {"host": host.copy()}
        before = buffers(state)
        taken = take(state | {"host": host}, arena, plan)
        plan = taken.plan
        state = {k: grow(v) for k, v in state.items()}
        host += 1
        jax.block_until_ready(state)
        after = buffers(state)
        assert before == after, f"round {round_}: the snapshot still held the donated buffers"
        found = read(state | {"host": host}, taken)
        taken.slot.release()
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name}, round {round_}")
        state["host"] = host


def test_three_states_through_reused_buffers_differ(arena: Arena) -> None:
    digests, plan = [], None
    for step in (1, 2, 3):
        state = {"w": jnp.full((4, 4), float(step)), "same": jnp.zeros(3)}
        taken = take(state, arena, plan)
        assert (read(state, taken)["w"] == step).all()
        assert plan is None or taken.plan is plan, "planned again without need"
        plan = taken.plan
        digests.append([row.tobytes() for row in taken.header.columns.digest])
        taken.slot.release()
    same, w = zip(*digests, strict=True)
    assert len(set(same)) == 1
    assert len(set(w)) == 3


def test_a_plan_is_not_used_for_another_state(arena: Arena) -> None:
    mesh = mesh_of((8,), ("x",))
    base = jnp.zeros((8, 8), jnp.float32)
    states = [
        {"w": base},
        {"v": base},
        {"w": base.astype(jnp.bfloat16)},
        {"w": base.reshape(4, 16)},
        {"w": jax.device_put(base, NamedSharding(mesh, P("x")))},
        {"w": jax.device_put(base, NamedSharding(mesh, P(None, "x")))},
        {"w": np.zeros((8, 8), np.float32)},
        {"w": base, "b": 1},
    ]
    for first in states:
        for second in states:
            taken = take(first, arena)
            taken.slot.release()
            again = take(second, arena, taken.plan)
            assert (again.plan is taken.plan) == (first is second)
            read(second, again)
            again.slot.release()


def test_meta_may_be_made_late(arena: Arena) -> None:
    flat = tree.flatten({"a": 1})
    taken = snapshot.take(flat, arena, lambda: {"made": True})
    assert taken.header.meta == {"made": True}
    assert taken.header.where == str(taken.slot.path)
    taken.slot.release()


def test_failures_free_the_slot(arena: Arena) -> None:
    flat = tree.flatten({"a": jnp.zeros(3), "b": jnp.ones(3)})
    with pytest.raises(Misuse, match="meta"):
        snapshot.take(flat, arena, {"x": object()})
    flat.values[1].delete()
    with pytest.raises(Misuse, match="leaf b: the array is deleted"):
        snapshot.take(flat, arena, {})
    held = [arena.claim(1, timeout_s=0), arena.claim(1, timeout_s=0)]
    with pytest.raises(StoreFailed, match="none of 2 slots"):
        take({"a": 1}, arena)
    for slot in held:
        slot.release()


def test_an_error_while_filling_frees_the_slot(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(image, "fill", fail)
    for _ in range(3):
        with pytest.raises(MemoryError, match="planted"):
            take({"a": 1}, arena)


TWO = """
import json, os, sys
import jax, numpy as np
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from ckpt import snapshot, tree
from ckpt.arena import Arena
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
value = np.arange(32.0, dtype=np.float32).reshape(8, 4)
def put(spec):
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, spec), lambda index: value[index])
state = {"rows": put(P("x")), "all": put(P()), "host": value, "local": jnp.asarray(value), "n": 3}
arena = Arena(sys.argv[1], owner={"run": "two"})
taken = snapshot.take(tree.flatten(state), arena, {})
columns = taken.header.columns
rows = sorted(zip(columns.array.tolist(), columns.grid.tolist()))
print(json.dumps([[str(a) for a in taken.header.arrays], rows]))
taken.slot.release()
arena.close(remove=True)
"""


def test_two_processes_write_each_shard_once(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(tmp_path / f"p{i}"), coordinator, str(i)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    (arrays, first), (others, second) = (json.loads(output) for output in outputs)
    assert arrays == others
    names = [name.split("'")[1] for name in arrays]
    assert names == ["all", "host", "local", "n", "rows"]
    assert first == [[0, [0, 0]], [1, [0, 0]], [2, [0, 0]], [3, [0, 0]], [4, [0, 0]], [4, [1, 0]]]
    assert second == [[4, [2, 0]], [4, [3, 0]]]
    assert list(tmp_path.iterdir()) == []

"""A restore from memory lends the pages of the slot: nobody ever sees a change of the other."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arena_slots import OWNER

import ckpt
from ckpt import image, lending
from ckpt.arena import Arena
from ckpt.errors import StoreFailed
from ckpt.imaged import SlotImage
from ckpt.lending import LEND_FROM_BYTES, Loan
from ckpt.slot_files import StoredImage
from ckpt.specs import ArraySpec, ShardSpec

N = LEND_FROM_BYTES  # of int64: half a MiB


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with_two = Arena(tmp_path / "arena", owner=OWNER, slots=2)
    yield with_two
    with_two.close(remove=True)


def values(step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(step)
    return [rng.integers(0, 1 << 60, N), rng.integers(0, 1 << 60, 100)]


def put(arena: Arena, step: int) -> None:
    """A large array and a small one; written by nobody, so the slot is free at once."""
    specs = [ArraySpec(name, "int64", (n,), (n,)) for name, n in (("a", N), ("b", 100))]
    plan = image.plan(specs, [ShardSpec(0, (0,), (N,)), ShardSpec(1, (0,), (100,))], {"step": step})
    slot = arena.claim(plan.size_bytes, timeout_s=0)
    image.fill(plan, slot.buffer, values(step))
    slot.filled()
    slot.release()


def stored(arena: Arena, step: int) -> StoredImage:
    (found,) = (each for each in arena.valid_images() if each.header.meta["step"] == step)
    return found


def lent(arena: Arena, step: int, array: int = 0) -> np.ndarray | None:
    """An array of the step where it lies."""
    found = stored(arena, step)
    row = int(np.flatnonzero(found.header.columns.array == array)[0])
    with SlotImage(found, arena) as opened:
        raw = opened.lend(int(found.header.columns.offset[row]), (N, 100)[array] * 8)
    return None if raw is None else raw.view(np.int64)


def is_read(found: StoredImage) -> bool:
    """Whether somebody holds the lock of a reader."""
    fd = os.open(found.path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def in_slot(found: StoredImage) -> np.ndarray:
    row = int(np.flatnonzero(found.header.columns.array == 0)[0])
    offset = int(found.header.columns.offset[row])
    return np.fromfile(found.path, np.int64, N, offset=offset)


def test_the_image_does_not_see_what_is_written_to_an_array(arena: Arena) -> None:
    put(arena, 1)
    array = lent(arena, 1)
    assert array is not None
    np.testing.assert_array_equal(array, values(1)[0])
    array[:] = 7
    np.testing.assert_array_equal(in_slot(stored(arena, 1)), values(1)[0])


def test_arrays_do_not_see_the_snapshots_that_come_into_their_slot(arena: Arena) -> None:
    put(arena, 1)
    array = lent(arena, 1)
    assert array is not None
    array[::1000] = 5
    wanted = array.copy()
    for step in (2, 3, 4):  # with two slots, the third one takes the slot of the first
        put(arena, step)
        np.testing.assert_array_equal(array, wanted)
    np.testing.assert_array_equal(in_slot(stored(arena, 4)), values(4)[0])


def test_a_slot_stays_read_until_the_last_array_is_gone(arena: Arena) -> None:
    put(arena, 1)
    found = stored(arena, 1)
    array = lent(arena, 1)
    assert array is not None
    part = array[10:20]
    del array
    assert is_read(found)
    del part
    assert not is_read(found)


def test_nothing_is_kept_where_nothing_is_lent(arena: Arena) -> None:
    put(arena, 1)
    assert lent(arena, 1, array=1) is None  # too small
    assert not is_read(stored(arena, 1))


def test_pages_are_lent_once(arena: Arena) -> None:
    """Two arrays in them would see each other's writes."""
    put(arena, 1)
    found = stored(arena, 1)
    offset = int(found.header.columns.offset[0])
    with SlotImage(found, arena) as opened:
        first = opened.lend(offset, N * 8)
        assert first is not None
        assert opened.lend(offset, N * 8) is None
        for outside in ((-4096, N * 8), (0, N * 8), (offset, found.header.size_bytes), (8, N * 8)):
            assert opened.lend(*outside) is None
    again = lent(arena, 1)  # by another restore: pages of its own
    assert again is not None
    again[:] = 1
    np.testing.assert_array_equal(first.view(np.int64), values(1)[0])


def test_the_next_owner_does_not_wait_for_arrays_of_the_last_one(tmp_path: Path) -> None:
    first = Arena(tmp_path / "arena", owner=OWNER, slots=1)
    put(first, 1)
    array = lent(first, 1)
    assert array is not None
    first.close(remove=False)
    second = Arena(tmp_path / "arena", owner=OWNER, slots=1)
    put(second, 2)
    np.testing.assert_array_equal(array, values(1)[0])
    second.close(remove=True)
    np.testing.assert_array_equal(array, values(1)[0])


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_child_keeps_its_arrays_and_not_the_lock(arena: Arena) -> None:
    put(arena, 1)
    found = stored(arena, 1)
    array = lent(arena, 1)
    assert array is not None
    told, tell = os.pipe()
    ask, asked = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"!")
        os.read(ask, 1)
        os._exit(0 if np.array_equal(array, values(1)[0]) else 1)
    try:
        os.read(told, 1)
        del array
        assert not is_read(found)
    finally:
        os.write(asked, b"!")
        assert os.waitpid(child, 0)[1] == 0
        for fd in (told, tell, ask, asked):
            os.close(fd)


def test_where_the_system_cannot_copy_on_demand_nothing_is_lent(arena: Arena) -> None:
    put(arena, 1)
    with mock.patch.object(lending._libc, "madvise", return_value=-1):
        assert lent(arena, 1) is None
    assert not is_read(stored(arena, 1))


def test_no_memory_for_the_copies_is_said_where_a_save_needs_the_slot(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=1)
    put(arena, 1)
    array = lent(arena, 1)
    assert array is not None
    with (
        mock.patch.object(lending._libc, "madvise", return_value=-1),
        pytest.raises(StoreFailed, match="still in use"),
    ):
        put(arena, 2)
    np.testing.assert_array_equal(array, values(1)[0])
    put(arena, 2)
    np.testing.assert_array_equal(array, values(1)[0])
    arena.close(remove=True)


def state_of(step: int) -> dict[str, Any]:
    return {
        "frozen": jnp.asarray(values(1)[0].astype(np.int32)),
        "w": jnp.asarray(values(step)[0].astype(np.float32)),
        "on_host": values(step)[0].copy(),
        "small": jnp.full(3, step),
    }


def sharded_state() -> dict[str, Any]:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec("x")
    value = np.random.default_rng(3).standard_normal((64, 4096), np.float32)
    return {"w": jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))}


@pytest.mark.parametrize("state", [state_of(1), sharded_state()], ids=["plain", "sharded"])
def test_a_restart_from_memory_copies_no_large_chunk(state: dict[str, Any], tmp_path: Path) -> None:
    tiers = (ckpt.Memory(), ckpt.Shared(tmp_path / "run", every=100))
    place = tmp_path / "arena"
    wanted = jax.tree.map(np.array, state)
    first = ckpt.CheckpointManager(*tiers, arena=place)
    first.resume(like=state)
    first.save(1, state).wait()
    with mock.patch("ckpt.saves.Saves._is_needed", return_value=True):
        first.close()
    asked: list[int] = []
    of = Loan.lend

    def counted(self: Loan, offset: int, nbytes: int) -> np.ndarray | None:
        found = of(self, offset, nbytes)
        asked.append(0 if found is None else nbytes)
        return found

    with ckpt.CheckpointManager(*tiers, arena=place) as second:
        with mock.patch.object(Loan, "lend", counted):
            restored = second.resume(like=state)
        assert restored.report.tier == "memory"
        assert sum(asked) == sum(x.nbytes for x in wanted.values() if x.nbytes >= LEND_FROM_BYTES)
        held = restored.state
        train = jax.jit(lambda w: w * 2 + 1, donate_argnums=0)
        moved = {**held, "w": train(held["w"])}
        for step in range(2, 6):
            second.save(step, moved).wait()
            moved["w"] = train(moved["w"])
        for name in set(held) - {"w"}:
            np.testing.assert_array_equal(np.asarray(held[name]), wanted[name], name)
        w = wanted["w"]
        for _ in range(5):
            w = w * 2 + 1
        np.testing.assert_array_equal(np.asarray(moved["w"]), w)

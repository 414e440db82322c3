"""Who may have a slot, and where: readers elsewhere, places that are too small, owners that die."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from arena_slots import OWNER, Place, arena, child, forked, plan_of, put, steps

from ckpt import image
from ckpt.arena import Arena, Slot
from ckpt.errors import InUse, Misuse, StoreFailed
from ckpt.owning import remove_stale, stale_arenas

__all__ = ["arena"]  # a fixture

# -- several holders, readers elsewhere


def test_a_slot_is_free_when_all_holders_have_released_it(arena: Arena) -> None:
    first = put(arena, 1)
    second = first.share()
    other = arena.claim(1)
    first.release()
    first.release()
    with pytest.raises(StoreFailed, match="came free"):
        arena.claim(1, timeout_s=0)
    with pytest.raises(Misuse, match="slot-0: released already"):
        first.share()
    (found,) = arena.valid_images()
    (row,) = image.payload_ranges(found.header).tolist()
    image.verify_chunk(found.header, 0, second.buffer[row[0] : sum(row)])
    second.release()
    arena.claim(1, timeout_s=0).release()
    other.release()


READ = """
import fcntl, sys
with open(sys.argv[1]) as file:
    fcntl.flock(file, fcntl.LOCK_SH)
    print("reading", flush=True)
    sys.stdin.readline()
"""


def test_a_slot_that_another_process_reads_is_not_filled(arena: Arena) -> None:
    for step in (1, 2):
        put(arena, step).release()
    reader = child(READ, arena.directory / "slot-0")
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        put(arena, 3).release()
        assert steps(arena) == {0: 1, 1: 3}, "another one, though it is not its turn"
        held = arena.adopt(1)
        with pytest.raises(StoreFailed, match="came free"):
            arena.claim(1, timeout_s=0.05)
        got: list[Slot] = []
        waiter = threading.Thread(target=lambda: got.append(arena.claim(1, timeout_s=60)))
        waiter.start()
        waiter.join(0.1)
        assert waiter.is_alive()
        reader.kill()
        waiter.join(60)
        assert [slot.number for slot in got] == [0]
    finally:
        reader.kill()
        reader.communicate()
    with open(got[0].path) as file:
        with pytest.raises(BlockingIOError):  # until it is filled
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        got[0].filled()
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    got[0].release()
    held.release()


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_does_not_keep_a_slot_locked(tmp_path: Path) -> None:
    with forked(tmp_path / "arena", "slot = arena.claim(100)") as parent:
        parent.kill()
        parent.wait()
        arena = Arena(tmp_path / "arena", owner=OWNER, slots=1)
        put(arena, 1).release()
        arena.close(remove=True)


def test_a_copy_that_failed_costs_no_snapshot(arena: Arena) -> None:
    for step in (1, 2):
        put(arena, step).release()
    arena.claim(1).release()  # in place of step 1
    put(arena, 3).release()
    assert steps(arena) == {0: 3, 1: 2}


def test_slots_that_nobody_wants_go_first(arena: Arena) -> None:
    """After a rewind the newest image counts no more, and an older one does."""
    for step in (1, 2):
        put(arena, step).release()
    arena.reuse_first({1, 7})
    put(arena, 3).release()
    assert steps(arena) == {0: 1, 1: 3}
    put(arena, 4).release()
    assert steps(arena) == {0: 4, 1: 3}


def test_the_newest_is_overwritten_last(tmp_path: Path) -> None:
    """The newest by time: after a rewind the steps are smaller."""
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=3)
    for step, time_ns in ((5, 30), (9, 10), (7, 20)):
        plan = plan_of(100, step).with_meta({"step": step, "time_ns": time_ns})
        slot = arena.claim(plan.size_bytes)
        image.fill(plan, slot.buffer, [np.arange(100)])
        slot.filled()
    arena.close(remove=False)
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=3)
    assert [arena.claim(1).number for _ in range(3)] == [1, 2, 0]
    arena.close(remove=True)


def test_a_dying_owner_is_waited_for(tmp_path: Path) -> None:
    """The kernel frees the memory of a killed process first, and drops its locks then."""
    directory = tmp_path / "arena"
    Arena(directory, owner=OWNER).close(remove=False)
    dead = child("")
    dead.communicate()
    text = json.loads((directory / "lock").read_text())
    zombie = child("")  # ended, and nobody has asked how
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    again = {"pid": os.getpid(), "started": text["started"] + 1}  # the number was used again
    for told in ({"pid": dead.pid}, {"pid": zombie.pid, "started": None}, again):
        (directory / "lock").write_text(json.dumps({**text, **told}))
        holding = os.open(directory / "lock", os.O_RDWR)
        fcntl.flock(holding, fcntl.LOCK_EX)
        later = threading.Timer(0.7, os.close, [holding])
        later.start()
        Arena(directory, owner=OWNER).close(remove=False)
        later.join()
    zombie.communicate()
    alive = {**text, "host": "another host", "pid": dead.pid}
    (directory / "lock").write_text(json.dumps(alive))
    with open(directory / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InUse, match="another host"):
            Arena(directory, owner=OWNER)
    Arena(directory, owner=OWNER).close(remove=True)


# -- places


MIB = 2**20


def test_with_room_for_one_slot_only_it_goes_on_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Place(monkeypatch, tmp_path, 5 * MIB)  # a slot takes 3
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=3)
    for step in (1, 2, 3):
        put(arena, step, n=MIB // 8).release()
        assert steps(arena) == {0: step}
    assert arena.slots == 1
    assert [p.name for p in arena.directory.glob("slot-*")] == ["slot-0"]
    (warning,) = caplog.messages
    assert re.search(r"needs \d+ bytes more, .*--shm-size.*going on with 1 slot: .*waits", warning)
    held = put(arena, 4, n=MIB // 8)
    with pytest.raises(StoreFailed, match="none of 1 slot came free"):
        arena.claim(1, timeout_s=0)
    held.release()
    arena.close(remove=True)


def test_a_slot_that_must_grow_takes_the_room_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Place(monkeypatch, tmp_path, 8 * MIB)
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=3)
    for step in (1, 2):
        put(arena, step).release()  # 2 MiB each
    put(arena, 3, n=4 * MIB // 8).release()
    assert steps(arena) == {1: 2, 0: 3} or steps(arena) == {1: 2, 2: 3}
    with pytest.raises(StoreFailed, match="needs"):
        arena.claim(20 * MIB)
    assert 3 in steps(arena).values()
    arena.close(remove=True)


def test_dead_runs_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest first, and only as many as are needed; none when that would not do."""
    for name, steps_ in (("b", (3, 4)), ("a", (5,))):
        dead = Arena(tmp_path / name, owner={"run": f"runs/{name}"}, slots=len(steps_))
        for step in steps_:
            put(dead, step).release()
        dead.close(remove=False)
    Place(monkeypatch, tmp_path, 7 * MIB)
    modest = Arena(tmp_path / "modest", owner=OWNER)
    with pytest.raises(StoreFailed, match="needs"):
        modest.claim(1 * MIB + 1)
    modest.close(remove=True)
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=1, frees_stale=True)
    with pytest.raises(StoreFailed, match="needs"):
        arena.claim(20 * MIB)
    assert caplog.messages == []
    put(arena, 1, n=2 * MIB // 8).release()
    assert [each.owner["run"] for each in stale_arenas(tmp_path)] == ["runs/a"]
    (warning,) = caplog.messages
    assert re.search(r"/b: \d+ bytes of the dead run runs/b, with steps 3, 4", warning)
    arena.close(remove=True)
    remove_stale(tmp_path, older_than_s=-3600)

"""The arena: one owner, slots that outlive it, no half-written snapshot ever found."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from arena_slots import OWNER, child, plan_of, put, steps

from ckpt import image, owning
from ckpt.arena import Arena, Slot
from ckpt.errors import InUse, Misuse, StoreFailed
from ckpt.owning import default_directory, remove_stale, stale_arenas
from ckpt.table import MAGIC


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", owner=OWNER)
    yield arena
    arena.close(remove=True)
    assert not (tmp_path / "arena").exists()


HOLD = """
import sys
from ckpt.arena import Arena
arena = Arena(sys.argv[1], owner={"run": "the other run"})
print("held", flush=True)
sys.stdin.readline()
"""


def test_slots_are_private_page_aligned_and_reused(arena: Arena) -> None:
    slot = arena.claim(10_000)
    first = np.frombuffer(slot.buffer, np.uint8)
    assert first.__array_interface__["data"][0] % 4096 == 0
    assert len(slot.buffer) >= 10_000
    assert oct(arena.directory.stat().st_mode)[-3:] == "700"
    assert {oct(p.stat().st_mode)[-3:] for p in arena.directory.iterdir()} == {"600"}
    assert slot.path.stat().st_blocks * 512 >= len(slot.buffer), "not preallocated"
    address, inode = first.__array_interface__["data"][0], slot.path.stat().st_ino
    slot.filled()
    slot.release()
    seen = set()
    for n in (1, 500_000, 10_000) * 3:
        slot = arena.claim(n)
        at = np.frombuffer(slot.buffer, np.uint8).__array_interface__["data"][0]
        seen.add((slot.number, at, slot.path.stat().st_ino))
        slot.filled()
        slot.release()
    assert (0, address, inode) in seen
    assert len(seen) == 2, "slots were mapped or made again"


def test_a_slot_grows_when_needed(arena: Arena) -> None:
    small = arena.claim(10)
    held = small.buffer  # somebody still looks at the old mapping
    size = len(held)
    small.release()
    arena.claim(10).release()
    large = arena.claim(3 * size)
    assert large.number == small.number
    assert len(large.buffer) >= 3 * size
    large.buffer[-1] = 7
    assert len(held) == size
    large.release()


def test_claim_waits_for_a_free_slot(arena: Arena) -> None:
    slots = [arena.claim(1), arena.claim(1)]
    with pytest.raises(
        StoreFailed, match=r"none of 2 slots came free within 0\.01 s: .*more slots"
    ):
        arena.claim(1, timeout_s=0.01)
    got: list[Slot] = []
    waiter = threading.Thread(target=lambda: got.append(arena.claim(1, timeout_s=60)))
    waiter.start()
    slots[1].release()
    waiter.join(60)
    assert [s.number for s in got] == [slots[1].number]
    slots[1].release()  # a second time: means nothing, and takes nothing from the new holder
    with pytest.raises(StoreFailed):
        arena.claim(1, timeout_s=0)
    got[0].release()
    slots[0].release()


def test_closing_wakes_those_who_wait(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=1)
    arena.claim(1)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            arena.claim(1)
        except BaseException as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    arena.close(remove=True)
    waiter.join(60)
    assert [type(e) for e in errors] == [Misuse]
    with pytest.raises(Misuse, match="closed"):
        arena.claim(1)
    with pytest.raises(Misuse, match="closed"):
        arena.valid_images()
    arena.close(remove=True)


def test_images_survive_and_are_adopted(tmp_path: Path) -> None:
    with_images = Arena(tmp_path / "arena", owner=OWNER)
    put(with_images, 10)
    put(with_images, 20)
    with_images.close(remove=False)

    later = Arena(tmp_path / "arena", owner=OWNER)
    assert steps(later) == {0: 10, 1: 20}
    newest = max(later.valid_images(), key=lambda found: found.header.meta["step"])
    slot = later.adopt(newest.slot)
    for row, (offset, length) in enumerate(image.payload_ranges(newest.header).tolist()):
        image.verify_chunk(newest.header, row, slot.buffer[offset : offset + length])
    with pytest.raises(Misuse, match="slot 1 is held already"):
        later.adopt(1)
    with pytest.raises(Misuse, match="slot 7 has no image"):
        later.adopt(7)
    put(later, 30).release()  # takes the other slot
    assert steps(later) == {0: 30, 1: 20}
    put(later, 40).release()  # and again, for as long as the adopted one is held
    assert steps(later) == {0: 40, 1: 20}
    slot.release()
    put(later, 50, n=5)
    assert steps(later) == {0: 40, 1: 50}
    later.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_slots_without_an_image_are_claimed_first(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", owner=OWNER)
    put(arena, 10)
    torn = arena.claim(1)
    torn.buffer[:8] = MAGIC
    arena.close(remove=False)
    arena = Arena(tmp_path / "arena", owner=OWNER)
    assert steps(arena) == {0: 10}
    put(arena, 20)
    assert steps(arena) == {0: 10, 1: 20}
    arena.close(remove=True)


def test_fewer_slots_than_before_give_their_memory_back(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=3)
    for step in (1, 2, 3):
        put(arena, step)
    arena.close(remove=False)
    arena = Arena(tmp_path / "arena", owner=OWNER, slots=1)
    assert steps(arena) == {0: 1, 1: 2, 2: 3}
    newest = arena.adopt(2)
    put(arena, 4)
    assert steps(arena) == {0: 4, 2: 3}
    newest.release()
    assert steps(arena) == {0: 4}
    arena.close(remove=True)


def test_three_states_through_two_buffers_differ(arena: Arena) -> None:
    digests = set()
    for step in (1, 2, 3, 4, 5):
        slot = put(arena, step)
        found = {i.slot: i.header for i in arena.valid_images()}[slot.number]
        assert found.meta == {"step": step}
        values = np.frombuffer(slot.buffer, np.int64, 100, int(found.columns.offset[0]))
        assert (values == np.arange(100) * step).all()
        digests.add(found.columns.digest.tobytes())
        del values
        slot.release()
    assert len(digests) == 5


# -- one owner


def test_a_second_arena_is_refused_and_the_owner_named(arena: Arena) -> None:
    with pytest.raises(
        InUse, match=rf"{arena.directory} .* pid {os.getpid()} .* run runs/a, since "
    ):
        Arena(arena.directory, owner=OWNER)
    put(arena, 3)
    assert steps(arena) == {0: 3}, "the refused one did harm"


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    directory = tmp_path / "arena"
    other = child(HOLD, directory)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InUse, match=rf"pid {other.pid} on host \S+, run the other run"):
            Arena(directory, owner=OWNER)
    finally:
        other.kill()
        other.communicate()
    arena = Arena(directory, owner=OWNER)
    assert json.loads((directory / "lock").read_text())["pid"] == os.getpid()
    arena.close(remove=True)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = """
import os, sys, time
from ckpt.arena import Arena
arena = Arena(sys.argv[1], owner={"run": "forks"})
pid = os.fork()
if pid == 0:
    print(os.getpid(), flush=True)  # by now it has let go of what it inherited
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
"""
    parent = child(code, tmp_path / "arena")
    assert parent.stdout is not None
    grandchild = int(parent.stdout.readline())
    try:
        with pytest.raises(InUse):
            Arena(tmp_path / "arena", owner=OWNER)
        parent.kill()
        parent.wait()
        Arena(tmp_path / "arena", owner=OWNER).close(remove=True)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        parent.communicate()


def test_a_lock_that_says_nothing_still_refuses(arena: Arena) -> None:
    for text in ("", "[]", '{"pid"'):
        (arena.directory / "lock").write_text(text)
        with pytest.raises(InUse, match=r"pid \? on host \?"):
            Arena(arena.directory, owner=OWNER)


# -- killed while filling

FILL = """
import sys
import numpy as np
from ckpt import image
from ckpt.arena import Arena
from ckpt.slot_files import SlotFiles
from ckpt.specs import ArraySpec, ShardSpec

arena = Arena(sys.argv[1], owner={"run": "dies"})
stop = int(sys.argv[2])

class Source(np.ndarray):
    def reshape(self, *shape, **options):
        if self.stop:
            print("filling", flush=True)
            sys.stdin.readline()  # killed here, in the middle
        return super().reshape(*shape, **options)

n = 200_000
arrays = [ArraySpec(f"p{i}", "int64", (n,), (n,)) for i in range(5)]
shards = [ShardSpec(i, (0,), (n,)) for i in range(5)]
for step in (1, 2, 3):
    plan = image.plan(arrays, shards, {"step": step})
    sources = [(np.arange(n) * step).view(Source) for _ in arrays]
    for i, source in enumerate(sources):
        source.stop = step == 3 and i == stop
    slot = arena.claim(plan.size_bytes)
    image.fill(plan, slot.buffer, sources)
    slot.filled()
    slot.release()
"""


@pytest.mark.parametrize("stop", [0, 2, 4])
def test_killed_in_mid_fill_the_slot_is_invalid_and_the_other_valid(
    tmp_path: Path, stop: int
) -> None:
    victim = child(FILL, tmp_path / "arena", stop)
    assert victim.stdout is not None
    assert victim.stdout.readline() == "filling\n"
    victim.kill()
    victim.communicate()
    arena = Arena(tmp_path / "arena", owner=OWNER)
    assert steps(arena) == {1: 2}, "slot 0 held step 1 and was being overwritten by step 3"
    (found,) = arena.valid_images()
    slot = arena.adopt(1)
    for row, (offset, length) in enumerate(image.payload_ranges(found.header).tolist()):
        image.verify_chunk(found.header, row, slot.buffer[offset : offset + length])
    slot.release()
    arena.close(remove=True)


# -- places


def test_a_limit_on_the_size_of_files_is_no_lack_of_space(arena: Arena) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(StoreFailed, match=r"to 3145728 bytes: .*File too large.*\(ulimit -f\)"):
            arena.claim(2**21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    arena.claim(2**21).release()


def test_too_small_a_place_says_what_is_needed(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = put(arena, 1)
    slot.release()
    with pytest.raises(StoreFailed, match=r"needs \d+ bytes more, \d+ are free .*--shm-size"):
        arena.claim(2**60)
    other = arena.claim(1)  # so that the next claim is for the slot with the image
    size = slot.path.stat().st_size
    real = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length // 2)  # some of it, then no more
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreFailed, match="free"):
        arena.claim(10 * size)
    monkeypatch.undo()
    assert slot.path.stat().st_size == size
    assert steps(arena) == {0: 1}, "a claim that failed took the image with it"
    arena.claim(1, timeout_s=0).release()  # and it is free again
    other.release()


def test_directories_that_are_not_private_are_refused(tmp_path: Path) -> None:
    public, target, link, file = (tmp_path / n for n in ("public", "target", "link", "file"))
    public.mkdir()
    public.chmod(0o755)
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    file.write_text("")
    for place in (public, link, file):
        with pytest.raises(StoreFailed, match=rf"{place}: wanted a directory of user .* mode 0700"):
            Arena(place, owner=OWNER)
    with pytest.raises(StoreFailed, match="cannot make"):
        Arena(file / "below", owner=OWNER)
    assert list(target.iterdir()) == []


def test_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owning, "_SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr(owning.tempfile, "gettempdir", lambda: str(tmp_path))
    mine = tmp_path / f"lastgood-{os.getuid()}"
    monkeypatch.chdir(tmp_path)
    first = default_directory("runs/a", 0)
    assert first.parent == mine
    assert first == default_directory(str(tmp_path / "runs/a"), 0), "depends on how it is written"
    others = {
        default_directory(where, p) for where, p in [("runs/b", 0), ("runs/a", 1), ("gs://b/a", 0)]
    }
    assert len({first, *others}) == 4
    assert list(mine.iterdir()) == []
    mine.chmod(0o777)
    with pytest.raises(StoreFailed, match="mode 0700"):
        default_directory("runs/a", 0)
    monkeypatch.setattr(owning, "_SHARED_MEMORY", tmp_path)
    mine.chmod(0o700)
    assert default_directory("runs/a", 0) == first


def test_stale_arenas_are_found_and_freed(tmp_path: Path) -> None:
    live = Arena(tmp_path / "x-p0", owner=OWNER)
    dead = Arena(tmp_path / "y-p0", owner={"run": "dead"})
    put(live, 1)
    put(dead, 2)
    dead.close(remove=False)
    (tmp_path / "y-p0" / "notes").write_text("mine")
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    (foreign / "lock").write_text("{}")
    (foreign / "slot-0").write_text("not an arena")
    for name, age_s in (("early-p0", 3600), ("beginning-p0", 0)):  # killed before it wrote the text
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name / "lock", (time.time() - age_s,) * 2)
    (tmp_path / "link").symlink_to(tmp_path / "y-p0")

    early, found = stale_arenas(tmp_path)
    assert early.directory == tmp_path / "early-p0"
    assert (found.directory, found.owner["run"]) == (tmp_path / "y-p0", "dead")
    assert found.size_bytes >= plan_of(100, 2).size_bytes
    assert found.newest_ns == json.loads((tmp_path / "y-p0" / "lock").read_text())["since_ns"]
    six_hours_ns = int(6 * 3600 * 1e9)

    def removed(age_ns: int) -> list[Path]:
        now_ns = found.newest_ns + age_ns
        return [each.directory for each in remove_stale(tmp_path, now_ns=lambda: now_ns)]

    assert removed(six_hours_ns) == [tmp_path / "early-p0"], "somebody may come back for the other"
    assert remove_stale(tmp_path, keep=tmp_path / "y-p0", older_than_s=0) == []
    assert removed(six_hours_ns + 1) == [tmp_path / "y-p0"]
    assert stale_arenas(tmp_path) == []
    assert [p.name for p in (tmp_path / "y-p0").iterdir()] == ["notes"]
    assert (foreign / "slot-0").exists()
    assert steps(live) == {0: 1}
    live.close(remove=True)


def test_many_racing_for_one_directory(tmp_path: Path) -> None:
    """Whoever gets it is alone, also while others remove the directory under it."""
    inside, seen, refused = [0], [0], [0]
    start = threading.Barrier(6)

    def race() -> None:
        start.wait()
        for _ in range(60):
            try:
                arena = Arena(tmp_path / "arena", owner=OWNER)
            except InUse:
                refused[0] += 1
                continue
            inside[0] += 1
            assert inside[0] == 1
            assert (tmp_path / "arena" / "lock").exists()
            seen[0] += 1
            inside[0] -= 1
            arena.close(remove=True)

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            race()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert errors == []
    assert seen[0] > 0
    assert not (tmp_path / "arena").exists()


def test_without_jax() -> None:
    """The writer imports these, and must start fast and survive a broken accelerator."""
    code = "import sys, ckpt.arena; print([m for m in ('jax', 'tensorstore') if m in sys.modules])"
    assert child(code).communicate(timeout=60)[0] == "[]\n"

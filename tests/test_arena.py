"""The arena: one owner, slots that outlive it, no half-written snapshot ever found."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from arena_slots import OWNER, arena, child, put, steps

from ckpt import image, owning
from ckpt.arena import Arena, Slot
from ckpt.errors import Misuse, StoreFailed
from ckpt.owning import default_directory
from ckpt.table import MAGIC

__all__ = ["arena"]  # a fixture


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


def test_without_jax() -> None:
    """The writer imports these, and must start fast and survive a broken accelerator."""
    code = "import sys, ckpt.arena; print([m for m in ('jax', 'tensorstore') if m in sys.modules])"
    assert child(code).communicate(timeout=60)[0] == "[]\n"

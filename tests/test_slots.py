"""Slots as a writer sees them: the image of a step or nothing, and never while it is filled."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually
from writer_runs import fill

from ckpt import owning
from ckpt.arena import Arena
from ckpt.errors import Damaged, NotFound, StoreFailed
from ckpt.lineage import StepId
from ckpt.owning import make_room, remove_stale, stale_arenas
from ckpt.slots import Slots

ONE, TWO = StepId(1, 1, 1), StepId(2, 1, 1)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", owner={"run": "tests"}, slots=2)
    yield arena
    arena.close(remove=True)


@pytest.fixture
def slots(arena: Arena) -> Iterator[Slots]:
    slots = Slots(arena.directory)
    yield slots
    slots.close()


def test_the_image_of_a_step_is_read_as_it_is(arena: Arena, slots: Slots) -> None:
    slot = fill(arena, ONE)
    with slots.reading(slot.number, ONE) as (header, data):
        assert bytes(data) == bytes(slot.buffer[: header.size_bytes])
        assert header.meta["step"] == 1
        assert data.readonly
    with slots.reading(slot.number, ONE) as (again, _):
        assert again is header, "decoded once"
    assert [(number, each.digest) for number, each in slots.valid()] == [
        (slot.number, header.digest)
    ]


def test_another_step_in_it_is_named(arena: Arena, slots: Slots) -> None:
    slot = fill(arena, ONE)
    with slots.reading(slot.number, ONE):
        pass
    slot.release()
    other = fill(arena, StepId(9, 1, 1))
    other.release()
    again = fill(arena, TWO)
    assert again.number == slot.number
    with (
        pytest.raises(Damaged, match=r"wanted step 1 .*found step 2 "),
        slots.reading(slot.number, ONE),
    ):
        pass
    with slots.reading(slot.number, TWO) as (header, _):
        assert header.meta["step"] == 2


def test_no_slot_and_no_arena(slots: Slots, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such slot"), slots.reading(7, ONE):
        pass
    with pytest.raises(NotFound, match="no arena"), Slots(tmp_path / "x").reading(0, ONE):
        pass


def test_what_is_being_filled_is_waited_for_or_passed_over(arena: Arena, slots: Slots) -> None:
    slot = fill(arena, ONE)
    slot.release()
    fill(arena, TWO)
    held = arena.claim(4096)
    assert held.number == slot.number
    assert [number for number, _ in slots.valid()] == [1 - held.number]
    seen: list[BaseException | None] = []

    def read() -> None:
        try:
            with slots.reading(held.number, ONE):
                seen.append(None)
        except Damaged as error:
            seen.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    held.buffer[:8] = bytes(8)
    held.filled()
    thread.join(60)
    assert isinstance(seen[0], Damaged)


def test_what_is_read_cannot_be_filled(arena: Arena, slots: Slots) -> None:
    slot = fill(arena, ONE)
    with slots.reading(slot.number, ONE), slots.reading(slot.number, ONE):
        assert not arena._files.lock(slot.number)
    assert arena._files.lock(slot.number)
    arena._files.unlock(slot.number)


def test_a_reader_that_ends_leaves_the_others_their_lock(arena: Arena, slots: Slots) -> None:
    slot = fill(arena, ONE)
    with slots.reading(slot.number, ONE):
        with slots.reading(slot.number, ONE):
            pass
        assert not arena._files.lock(slot.number)


def test_another_process_may_read_too(arena: Arena, slots: Slots) -> None:
    slot = fill(arena, ONE)
    code = (
        "import sys\nfrom ckpt.slots import Slots\nfrom ckpt.lineage import StepId\n"
        "with Slots(sys.argv[1]).reading(int(sys.argv[2]), StepId(1, 1, 1)) as (h, d):\n"
        "    print(h.digest)"
    )
    with slots.reading(slot.number, ONE) as (header, _):
        out = subprocess.run(
            [sys.executable, "-c", code, str(arena.directory), str(slot.number)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert out.stdout.strip() == header.digest


def test_a_slot_that_grew_or_was_replaced_is_mapped_anew(arena: Arena, slots: Slots) -> None:
    slot = fill(arena, ONE)
    with slots.reading(slot.number, ONE) as (small, _):
        pass
    slot.release()
    fill(arena, StepId(9, 1, 1)).release()
    with slots.reading(1 - slot.number, StepId(9, 1, 1)):
        again = fill(arena, TWO, size=600_000)
        assert again.number == slot.number
        with slots.reading(slot.number, TWO) as (large, data):
            assert large.size_bytes > small.size_bytes
            assert bytes(data) == bytes(again.buffer[: large.size_bytes])
            path = arena.directory / f"slot-{slot.number}"
            copy = path.with_name("copy")
            copy.write_bytes(path.read_bytes())
            os.replace(copy, path)
            kept = os.open(path, os.O_RDWR)
            with slots.reading(slot.number, TWO) as (_, other):
                assert bytes(other) == bytes(data)
                slots.close()
                with pytest.raises(BlockingIOError):
                    fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Unlocked, though its memory is still there.
            fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(kept)


def test_foreign_files_are_not_read(arena: Arena, slots: Slots, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(bytes(8192))
    (arena.directory / "slot-1").unlink(missing_ok=True)
    (arena.directory / "slot-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreFailed, match="cannot open"), slots.reading(1, ONE):
        pass
    (arena.directory / "slot-1").unlink()
    os.mkfifo(arena.directory / "slot-1")
    with pytest.raises(Damaged, match="wanted a file"), slots.reading(1, ONE):
        pass
    (arena.directory / "slot-1").unlink()
    (arena.directory / "slot-1").write_bytes(b"")
    with pytest.raises(Damaged, match="found 0 bytes"), slots.reading(1, ONE):
        pass
    arena.directory.chmod(0o755)
    with pytest.raises(StoreFailed, match="0700"), slots.reading(1, ONE):
        pass
    arena.directory.chmod(0o700)


def test_no_lock_is_left_behind_by_what_was_refused(arena: Arena, slots: Slots) -> None:
    slot = fill(arena, ONE)
    with pytest.raises(Damaged), slots.reading(slot.number, TWO):
        pass
    with pytest.raises(ZeroDivisionError), slots.reading(slot.number, ONE):
        raise ZeroDivisionError
    fd = os.open(slot.path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_who_comes_to_a_retired_file_takes_no_lock_away(
    arena: Arena, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found before it was retired, and is locked afterwards, while another one reads it."""

    def found_too_early(self: Slots, slot: int, path: Path) -> Any:
        monkeypatch.setattr(Slots, "_mapped", real)
        found = self._known.pop(slot)
        found.stamp = (0, 0, 0)  # as when the file has grown meanwhile
        found.retire()
        return found

    slot, real = fill(arena, ONE), Slots._mapped
    slot.release()
    other = os.open(arena.directory / "slot-0", os.O_RDWR)
    try:
        with slots.reading(0, ONE) as (header, data):
            known = slots._known[0]
            monkeypatch.setattr(Slots, "_mapped", found_too_early)
            assert [number for number, _ in slots.valid()] == [0]
            assert known._readers == 1
            os.fstat(known._fd)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert len(data) == header.size_bytes
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_an_arena_is_given_up_only_when_no_writer_may_read_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer has died, its writer tries a store again, and holds no slot at the moment."""
    monkeypatch.setattr(owning, "_free_bytes", lambda place: 0)
    place = tmp_path / "arenas"
    place.mkdir()
    arena = Arena(place / "dead", owner={"run": "tests"}, slots=1)
    slots = Slots(arena.directory)
    fill(arena, ONE).release()
    arena.close(remove=False)
    assert stale_arenas(place) == []
    assert make_room(place, 1, keep=place / "mine") == []
    assert remove_stale(place, older_than_s=-3600) == []
    with slots.reading(0, ONE) as (header, _):
        assert header.meta["step"] == 1
    child = os.fork()
    if child == 0:  # it has no part in this
        signal.pause()
        os._exit(0)
    try:
        slots.let_go()  # as when this process ends
        eventually(lambda: stale_arenas(place))
        slots.close()
        assert [each.directory.name for each in make_room(place, 1, keep=place / "mine")] == [
            "dead"
        ]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

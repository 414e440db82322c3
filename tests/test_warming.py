"""Slots are warmed in the background, and nobody has to know of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt import snapshot
from ckpt.arena import Arena
from ckpt.errors import Misuse, StoreFailed
from ckpt.slot_files import SlotFiles


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", owner={})
    yield arena
    arena.close(remove=True)


class Gate:
    """Holds up whoever maps a slot in the background, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.closed: list[int] = []
        """The slots at which somebody was held up."""
        mapped = Arena._mapped

        def slow(arena: Arena, number: int, nbytes: int) -> Any:
            if threading.current_thread().name == "ckpt-prefault":
                self.closed.append(number)
                self.entered.set()
                assert self.opened.wait(60)
            return mapped(arena, number, nbytes)

        monkeypatch.setattr(Arena, "_mapped", slow)


def test_free_slots_are_warmed_in_the_background(arena: Arena) -> None:
    """After one claim the next one finds its slot grown and mapped; no image is touched."""
    arena.prepare(3 << 20)
    preparing = arena._preparing
    if preparing is not None:
        preparing.join()
    assert sorted(arena._maps) == [0, 1]
    assert all(len(mapping) >= 3 << 20 for mapping in arena._maps.values())
    mappings = dict(arena._maps)
    with_both = [arena.claim(3 << 20), arena.claim(2 << 20)]
    assert arena._maps == mappings
    for slot in with_both:
        slot.release()


def test_closing_waits_for_what_is_being_warmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    mapped = Arena._mapped

    def slow(arena: Arena, number: int, nbytes: int) -> Any:
        entered.set()
        assert go_on.wait(60)
        return mapped(arena, number, nbytes)

    monkeypatch.setattr(Arena, "_mapped", slow)
    arena = Arena(tmp_path / "arena", owner={})
    arena.prepare(1 << 20)
    assert entered.wait(60)
    closing = threading.Thread(target=arena.close, kwargs={"remove": True})
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    assert (tmp_path / "arena").exists()
    go_on.set()
    closing.join(60)
    assert not (tmp_path / "arena").exists()
    assert arena._preparing is None


def test_closing_does_not_wait_for_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot may be large, and a machine slow to give memory."""
    monkeypatch.setattr("ckpt.slot_files._STEP_BYTES", 1 << 20)
    real, calls = os.posix_fallocate, []
    entered, go_on = threading.Event(), threading.Event()

    def slow(fd: int, offset: int, nbytes: int) -> None:
        calls.append(offset)
        if offset == 2 << 20:
            entered.set()
            assert go_on.wait(60)
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    arena = Arena(tmp_path / "arena", owner={})
    arena.prepare(50 << 20)
    assert entered.wait(60)
    closing = threading.Thread(target=arena.close, kwargs={"remove": True})
    closing.start()
    while not arena._closed:
        time.sleep(0.001)
    go_on.set()
    closing.join(60)
    assert calls == [0, 1 << 20, 2 << 20]
    assert not (tmp_path / "arena").exists()


def test_a_finalizer_in_the_warming_thread_closes_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = Arena._mapped

    def closing(arena: Arena, number: int, nbytes: int) -> Any:
        arena.close(remove=True)
        return mapped(arena, number, nbytes)

    monkeypatch.setattr(Arena, "_mapped", closing)
    arena = Arena(tmp_path / "arena", owner={})
    arena.prepare(1 << 20)
    preparing = arena._preparing
    if preparing is not None:
        preparing.join(60)
    assert not (tmp_path / "arena").exists()
    with pytest.raises(Misuse, match="closed"):
        arena.claim(1)


def test_no_room_to_warm_is_left_for_the_claim_to_tell(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StoreFailed("planted")

    monkeypatch.setattr(SlotFiles, "_allocate", full)
    arena.prepare(1 << 20)
    preparing = arena._preparing
    if preparing is not None:
        preparing.join(60)
    with pytest.raises(StoreFailed, match="planted"):
        arena.claim(1 << 20)


def test_a_claim_waits_for_the_slot_in_turn_though_another_is_free(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one holds the newest snapshot; and to wait for a warm-up is no time-out."""
    gate = Gate(monkeypatch)
    first = arena.claim(1 << 20)
    newest = first.number
    first.filled()
    first.release()
    assert gate.entered.wait(60)
    found: list[int] = []

    def claim() -> None:
        slot = arena.claim(1 << 20, timeout_s=0)
        found.append(slot.number)
        slot.release()

    claiming = threading.Thread(target=claim)
    claiming.start()
    claiming.join(0.1)
    assert claiming.is_alive()
    gate.opened.set()
    claiming.join(60)
    assert found == gate.closed
    assert found != [newest]


def test_no_memory_to_map_is_told_by_the_claim(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mapped(*_: object, **__: object) -> None:
        raise OSError(12, "planted")

    monkeypatch.setattr("ckpt.slot_files.mmap.mmap", mapped)
    arena.prepare(1 << 20)
    preparing = arena._preparing
    if preparing is not None:
        preparing.join(60)
    for _ in range(3):  # a slot that was not given is not held
        with pytest.raises(StoreFailed, match=r"slot-[01]: cannot map its .* bytes: .*planted"):
            arena.claim(1 << 20)


@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_fork_in_the_middle_of_it(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has no such thread, and neither waits for one nor touches the arena."""
    gate = Gate(monkeypatch)
    arena.prepare(1 << 20)
    assert gate.entered.wait(60)
    with arena._free:  # at the worst moment
        child = os.fork()
        if child == 0:
            arena.close(remove=True)
            os._exit(7 if arena._preparing is None else 8)
    end = time.monotonic() + 60
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < end:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    gate.opened.set()
    assert done
    assert os.waitstatus_to_exitcode(status) == 7
    slot = arena.claim(1 << 20)
    slot.release()


def test_about_bytes_is_what_this_process_has_of_a_tree() -> None:
    tree = {"a": np.zeros((3, 4), np.float32), "b": [1, None, "text"]}
    assert snapshot.about_bytes(tree) == 48
    assert snapshot.about_bytes({1: np.zeros(3), "a": np.zeros(3)}) == 0  # JAX cannot order them

"""The writer and tiers that fail, are full, or do not answer."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually
from writer_runs import WAIT_S, Notes, Play, Start, Weather, begin_run, check_values, quick, start

from ckpt import attempts, disk
from ckpt.errors import (
    AlreadyExists,
    Damaged,
    Misuse,
    StoreFailed,
    Superseded,
)
from ckpt.messages import (
    Begin,
    Failed,
    Released,
)
from ckpt.retention import Keep
from ckpt.store import FileStore
from ckpt.tiers import Durable, Local, Shared

__all__ = ["quick", "start"]  # fixtures


@pytest.mark.parametrize("is_superseded", [False, True])
def test_who_is_superseded_leaves_what_was_to_go_further(
    tmp_path: Path, *, is_superseded: bool
) -> None:
    """The next attempt is about to bring it there; otherwise it need not stay any more."""
    store = Weather(tmp_path / "shared")
    tiers: dict[str, Durable] = {
        "local": Local(tmp_path / "local", keep=Keep(last=1)),
        "shared": Shared(tmp_path / "shared", patience_s=1e9),
    }
    play = Play(tmp_path, tiers, stores={"shared": store})
    store.down = StoreFailed("no network")
    for step in (1, 2, 3):
        play.save(step)
        play.done(step, "local")
    store.down = None
    if is_superseded:
        attempts.claim(play.home, "resume")
    for step in (1, 2, 3):
        play.ended(step, "shared")
    play.close()
    there = [each.id.step for each in play.writer._depot.images["local"].list()]
    assert there == ([1, 2, 3] if is_superseded else [3])


# --- a store that fails ---------------------------------------------------------------------------


def test_a_store_that_is_down_catches_up_while_local_goes_on(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start("local", "shared", stores={"shared": store}, slots=2, patience_s=60)
    store.down = StoreFailed("no network")
    for step in range(1, 7):  # far more than there are slots
        play.save(step)
    for step in range(1, 7):
        play.done(step, "local")
    play.wait(lambda: len(play.of(Released)) == 6)
    play.wait(lambda: play.troubles("shared"))
    assert not any(tier == "shared" for _, tier in play.ends())
    assert set(play.writer.queued()) == {play.id(step) for step in range(1, 7)}
    store.down = None
    play.close()
    assert play.order("shared") == [*range(1, 7)]
    assert play.steps() == [*range(1, 7)]
    check_values(play.home.location, range(1, 7))
    assert play.troubles("shared") == ["no network", ""]
    assert not play.troubles("local")


def test_without_patience_the_first_failure_is_final(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start(stores={"shared": store})
    store.down = StoreFailed("no network")
    play.save(1)
    assert play.error(1, "shared") is store.down
    play.wait(lambda: play.released(1))
    store.down = None
    play.save(2)
    play.close()
    assert play.steps() == [2]
    assert play.troubles("shared") == ["no network", ""]


def test_when_patience_is_over_saves_fail_with_the_last_error(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start(stores={"shared": store}, patience_s=0.1)
    store.down = StoreFailed("no network")
    play.save(1)
    assert play.error(1, "shared") is store.down
    tries = len([1 for name, _ in store.calls if name == "list"])
    assert tries > 2, store.calls
    play.save(2)  # the spell goes on: there is no patience any more
    play.error(2, "shared")
    assert play.troubles("shared") == ["no network"]
    play.close()


@pytest.mark.parametrize("kind", ["fail", "fail after"])
def test_whichever_call_fails_the_step_is_made_up_for(
    kind: Any, start: Start, tmp_path: Path
) -> None:
    """Each changing call in turn; what was done already is not done again."""
    from faulty_store import Fault, FaultyStore

    inner = FileStore(tmp_path / "shared")
    play = start("shared", stores={"shared": (faulty := FaultyStore(inner))}, patience_s=60)
    play.save(1)
    play.done(1, "shared")
    calls = len(faulty.operations)
    for at in range(1, calls + 1):
        faulty.operations.clear()
        faulty._faults = {at: Fault(at, kind)}
        play.save(at + 1)
        play.done(at + 1, "shared")
        images = [each for each in faulty.operations if each.startswith("write_image")]
        assert len(images) == (2 if "write_image" in faulty.operations[at - 1] else 1)
    play.close()
    assert play.steps() == [*range(1, calls + 2)]
    check_values(inner.location, range(1, calls + 2))


def test_a_full_store_is_made_room_in_before_each_try(start: Start, tmp_path: Path) -> None:
    def full() -> StoreFailed:
        error = StoreFailed("full")
        error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
        return error

    def room() -> None:
        if len([each for each in notes.heard if each[0] == "lost"]) == 2:
            store.down = None

    notes, store = Notes(room), Weather(tmp_path / "shared")
    play = start(stores={"shared": store}, keeper=notes, patience_s=60)
    store.down = full()
    play.save(1)
    play.done(1, "shared")
    assert notes.heard.count(("lost", "shared", 1)) == 2
    play.close()
    assert play.steps() == [1]


def test_a_full_local_disk_deletes_what_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a longer Keep had left is in the way."""

    def tiers(keep: Keep) -> dict[str, Durable]:
        local = Local(tmp_path / "local", keep=keep, patience_s=60)
        return {"local": local, "shared": Shared(tmp_path / "shared", patience_s=0)}

    play = Play(tmp_path, tiers(Keep()))
    for step in range(1, 5):
        play.save(step, "local")
    play.close()
    real = disk.write_bulk

    def full(path: Path, data: Any) -> None:
        if len(list(path.parent.glob("*.image"))) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(disk, "write_bulk", full)
    play = Play(tmp_path, tiers(Keep(last=2)), begun=(play.owner, play.line))
    play.save(5, "local")
    play.done(5, "local")
    assert "No space left" in play.troubles("local")[0]
    play.close()
    assert [each.id.step for each in play.writer._depot.images["local"].list()] == [4, 5]


def test_other_errors_are_final_at_once(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start(stores={"shared": store}, patience_s=60)
    for step, error in enumerate(
        (Damaged("x"), AlreadyExists("x"), Misuse("x"), ValueError("x")), 1
    ):
        store.down = error
        play.save(step)
        assert play.error(step, "shared") is error
    store.down = None
    play.save(9)
    play.close()
    assert play.steps() == [9]
    assert not play.troubles("shared")


def test_if_local_fails_shared_goes_on_from_the_slot(start: Start, tmp_path: Path) -> None:
    (tmp_path / "local").write_text("no directory")
    play = start("local", "shared")
    play.save(1)
    assert isinstance(play.error(1, "local"), StoreFailed)
    play.done(1, "shared")
    play.close()
    assert play.steps() == [1]
    assert len(play.of(Released)) == 1


@pytest.mark.parametrize("trouble", ["full", "hangs"])
def test_a_local_disk_in_trouble_holds_up_no_other_tier(
    trouble: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the step that it is at nor those that wait behind it, told before or after."""

    def write_bulk(path: Path, data: Any) -> None:
        if "local" in path.parts:
            if trouble == "full" and not over.is_set():
                raise OSError(errno.ENOSPC, "No space left on device")
            assert over.wait(WAIT_S)
        real(path, data)

    real, over = disk.write_bulk, threading.Event()
    monkeypatch.setattr(disk, "write_bulk", write_bulk)
    play = start("local", "shared", patience_s=WAIT_S, slots=4)
    try:
        for step in (1, 2):
            play.save(step, "local", "shared")
        for step in (1, 2):
            play.done(step, "shared")
        play.save(3, "local", "shared")
        play.done(3, "shared")
        assert not any(tier == "local" for _, tier in play.ends())
    finally:
        over.set()
    for step in (1, 2, 3):
        play.done(step, "local")
    play.save(4, "local", "shared")
    play.close()
    assert play.steps() == [1, 2, 3, 4]
    assert play.troubles("local")[-1] == ""
    assert [len(each) for each in play.ends().values()] == [1] * 8


def test_a_local_disk_that_cannot_be_read_is_tried_again(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start("local", "shared", stores={"shared": store}, patience_s=60)
    store.calm.clear()
    play.save(1)
    play.done(1, "local")
    directory = play.writer._depot.images["local"].directory
    directory.chmod(0o770)
    store.calm.set()
    play.wait(lambda: play.troubles("shared"))
    assert "mode 0700" in play.troubles("shared")[-1]
    directory.chmod(0o700)
    play.done(1, "shared")
    play.close()
    assert play.steps() == [1]


# --- a store that hangs --------------------------------------------------------------------------


def test_a_hanging_store_fails_its_jobs_and_goes_on_when_it_wakes(
    start: Start, tmp_path: Path
) -> None:
    store = Weather(tmp_path / "shared")
    play = start("local", "shared", stores={"shared": store}, slots=2, patience_s=0.4)
    store.stops = lambda name, key: name == "write_image"
    store.calm.clear()
    for step in (1, 2, 3):
        play.save(step)
    for step in (1, 2, 3):
        play.done(step, "local")
    play.wait(lambda: len(play.of(Released)) == 3)
    for step in (1, 2, 3):
        assert "has not answered" in str(play.error(step, "shared"))
    assert "has not answered for 1 s" in play.troubles("shared")[0]
    play.save(4)
    play.done(4, "local")
    store.calm.set()
    play.wait(lambda: play.troubles("shared")[-1] == "")
    play.done(4, "shared")
    play.close()
    # The call that hung was carried out after all; nobody was promised that.
    assert [s for s in play.steps() if s != 1] == [4]
    assert [len(each) for each in play.ends().values()] == [1] * 8


def test_a_slot_is_not_given_back_while_a_stuck_call_reads_it(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start(stores={"shared": store}, patience_s=0.1)
    store.stops = lambda name, key: name == "write_image"
    store.calm.clear()
    play.save(1)
    play.save(2)
    play.error(1, "shared")
    play.error(2, "shared")
    play.wait(lambda: play.released(2))
    assert not play.released(1)
    assert not play.arena._files.lock(play.slots[play.id(1)].number), "it is locked for reading"
    store.calm.set()
    play.wait(lambda: play.released(1))
    play.close()


@pytest.mark.parametrize("woken", ["before it begins", "afterwards"])
def test_a_call_that_wakes_in_the_next_attempt_harms_none_of_its_saves(
    woken: str, start: Start, tmp_path: Path
) -> None:
    """It meets a newer attempt: the one that has begun here meanwhile."""
    store = Weather(tmp_path / "shared")
    play = start(stores={"shared": store}, patience_s=0.3)
    store.stops = lambda name, key: name == "put" and "/part-" in key
    store.calm.clear()
    play.save(1)
    assert "has not answered" in str(play.error(1, "shared"))
    play.owner, play.line = begin_run(play.home, "rewind")
    if woken == "afterwards":
        play.writer.tell(Begin(play.owner, play.line))
        play.save(2)
    store.calm.set()
    eventually(lambda: play.writer._lanes["shared"].is_idle)
    if woken == "before it begins":
        play.writer.tell(Begin(play.owner, play.line))
        play.save(2)
    play.ended(2, "shared")
    play.save(3)
    play.done(3, "shared")
    play.close()
    assert not [each for each in play.of(Failed) if isinstance(each.error, Superseded)]


def test_close_does_not_wait_for_what_hangs(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start("local", "shared", stores={"shared": store}, patience_s=0.3, keeper=Notes())
    store.calm.clear()
    play.save(1)
    play.save(2)
    play.writer.close()
    assert "has not answered" in str(play.error(1, "shared"))
    assert "has not answered" in str(play.error(2, "shared"))
    assert play.done(2, "local")
    reports = len(play.reports)
    store.calm.set()
    lane = play.writer._lanes["shared"]
    lane._thread.join(60)
    assert not lane._thread.is_alive()
    assert len(play.reports) == reports, "nothing is told after the end"

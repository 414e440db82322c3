"""The writer: each job ends once in each tier, whatever the stores do, and slots come back."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from memory_bucket import memory_store
from writer_runs import (
    Notes,
    Play,
    Start,
    Weather,
    begin_run,
    check_values,
    fill,
    quick,
    start,
    tiers_of,
)

from ckpt import attempts, commit, disk, layout, lineage
from ckpt.errors import (
    Damaged,
    Misuse,
    NotFound,
    StoreFailed,
)
from ckpt.lineage import StepId
from ckpt.messages import (
    Begin,
    Done,
    Failed,
    Job,
    Released,
    Report,
    Settle,
    Settled,
    Setup,
)
from ckpt.retention import Keep
from ckpt.store import FileStore
from ckpt.tiers import Local, Shared
from ckpt.writer import Writer

__all__ = ["quick", "start"]  # fixtures


# --- all is well --------------------------------------------------------------------------------


def test_every_tier_gets_every_step(start: Start) -> None:
    play = start("local", "local-2", "shared", "shared-2")
    for step in (1, 2, 3):
        play.save(step, blocking_s=0.5)
    play.close()
    assert play.steps() == play.steps("shared-2") == [1, 2, 3]
    check_values(play.home.location, [1, 2, 3])
    check_values(play.tiers["shared-2"].location, [1, 2, 3])
    for name in ("local", "local-2"):
        images = play.writer._depot.images[name]
        assert [each.id.step for each in images.list()] == [1, 2, 3]
        assert {each.size_bytes for each in images.list()} == {play.done(1, name).figures["bytes"]}
    assert play.done(2, "shared").figures["blocking_s"] == 0.5
    assert set(play.done(2, "local").figures) == {"durable_s", "bytes"}
    assert sorted(each.id.step for each in play.of(Released)) == [1, 2, 3]
    assert not play.troubles("shared")


def test_the_image_of_an_older_run_under_the_same_numbers_is_no_image_of_this_one(
    start: Start,
) -> None:
    play = start("local", "shared")
    step = play.id(1)
    older = fill(play.arena, step, size=3000)
    images = play.writer._depot.images["local"]
    with play.writer._depot.slots.reading(older.number, step) as (header, data):
        images.write(header, data)
    older.release()
    play.save(1, size=2000)
    play.done(1, "local")
    play.done(1, "shared")
    play.close()
    assert sorted(array.shape for array in images.header(step).arrays) == [(7,), (2000,)]
    check_values(play.home.location, [1])


def test_a_real_keeper_writes_the_log_and_deletes(tmp_path: Path) -> None:
    tiers = {
        "local": Local(tmp_path / "local", keep=Keep(last=1), patience_s=0),
        "shared": Shared(tmp_path / "shared", keep=Keep(last=2), patience_s=0),
    }
    play = Play(tmp_path, tiers)
    for step in range(1, 6):
        play.save(step)
        play.done(step, "shared")
    play.writer.tell(Settle())
    play.wait(lambda: play.of(Settled))
    assert play.steps() == [4, 5]
    assert [each.id.step for each in play.writer._depot.images["local"].list()] == [5]
    play.close()
    log = play.home.read_log(layout.log_name(play.owner)).decode()
    assert log.count('"event": "save"') == 10, log


def test_what_waited_in_a_local_tier_for_a_shared_one_goes_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last retention of the Local tier comes while all steps are still to be promoted."""
    tiers = {
        "local": Local(tmp_path / "local", keep=Keep(last=1), patience_s=0),
        "shared": Shared(tmp_path / "shared", patience_s=0),
    }
    is_open = threading.Event()
    write = FileStore.write_image

    def held_back(self: FileStore, *arguments: Any) -> None:
        assert is_open.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(FileStore, "write_image", held_back)
    play = Play(tmp_path, tiers)
    images = play.writer._depot.images["local"]
    for step in (1, 2, 3):
        play.save(step)
        play.done(step, "local")
    assert [each.id.step for each in images.list()] == [1, 2, 3]
    is_open.set()
    play.close()
    assert [each.id.step for each in images.list()] == [3]
    check_values(play.home.location, [1, 2, 3])


def test_settled_is_said_when_nothing_is_under_way(start: Start, tmp_path: Path) -> None:
    store, notes = Weather(tmp_path / "shared"), Notes()
    play = start(stores={"shared": store}, keeper=notes, patience_s=60)
    store.stops = lambda name, key: name == "write_image"
    store.calm.clear()
    play.save(1)
    play.writer.tell(Settle())
    assert store.stopped.wait(60)
    assert not play.of(Settled)
    store.calm.set()
    play.wait(lambda: play.of(Settled))
    assert play.done(1, "shared")
    assert notes.heard[-1] == ("settle",)
    play.writer.tell(Settle())
    play.wait(lambda: len(play.of(Settled)) == 2)


@pytest.mark.parametrize("kinds", [("shared",), ("local", "shared")])
def test_compressed_steps(start: Start, kinds: tuple[str, ...]) -> None:
    play = start(*kinds, compression="zstd")
    play.save(1)
    play.close()
    assert play.steps() == [1]
    check_values(play.home.location, [1])
    [image] = [e for e in play.home.list("branch-1/1/state/d") if e.name.endswith(".image")]
    assert image.size_bytes == play.done(1, "shared").figures["bytes"]
    header = commit.read_headers(play.home, "branch-1/1", play.owner)[0]
    assert header.compression == "zstd"


def test_leave_finishes_and_calls_last(start: Start) -> None:
    play = start()
    play.save(1)
    seen: list[bool] = []
    thread = play.writer.leave(lambda: seen.append(bool(play.of(Released))))
    thread.join(60)
    assert seen == [True]
    assert play.steps() == [1]
    assert not play.writer.is_alive


def test_close_is_idempotent_and_refuses_what_comes_after(start: Start) -> None:
    play = start()
    play.writer.close()
    play.writer.close()
    assert not play.writer.is_alive


def test_a_job_before_any_attempt_fails_and_gives_its_slot_back(tmp_path: Path) -> None:
    heard: list[Any] = []
    tiers = tiers_of(tmp_path, ["shared"])
    writer = Writer(Setup(tiers, str(tmp_path), 0, 1, 1.0, 1.0), heard.append, make_keeper=None)
    writer.tell(Job(StepId(1, 1, 1), ("shared",), 0))
    writer.close()
    [failed, released] = heard
    assert isinstance(failed.error, Misuse)
    assert isinstance(released, Released)


def test_neither_jax_nor_tensorstore_is_imported() -> None:
    code = (
        "import sys, ckpt.writer\n"
        "print([m for m in ('jax', 'tensorstore', 'orbax') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]", out


# --- what comes from Local -----------------------------------------------------------------------


def test_promotion_does_not_hold_the_slot(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start("local", "shared", stores={"shared": store}, slots=1, patience_s=60)
    store.stops = lambda name, key: name == "write_image"
    store.calm.clear()
    play.save(1)
    assert store.stopped.wait(60)
    play.wait(lambda: play.released(1))
    play.save(2)  # the same slot
    play.done(2, "local")
    store.calm.set()
    play.close()
    assert play.steps() == [1, 2]
    check_values(play.home.location, [1, 2])


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("also_in_slot", [False, True])
def test_a_damaged_local_image_is_no_step(
    also_in_slot: bool, start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ckpt.local import LocalImages

    real = LocalImages.write
    gate = threading.Event()

    def write(self: LocalImages, header: Any, data: Any) -> None:
        if "local-2" in str(self.directory):
            assert gate.wait(60)
        real(self, header, data)
        if "local-2" not in str(self.directory):
            flip(self.path(StepId(1, 1, 1)), 4096 + 8)

    monkeypatch.setattr(LocalImages, "write", write)
    kinds = ("local", "local-2", "shared") if also_in_slot else ("local", "shared")
    play = start(*kinds, patience_s=60)
    play.save(1)
    if also_in_slot:
        play.done(1, "shared")  # local-2 holds the slot, and is not there yet itself
        assert not play.released(1)
        gate.set()
        play.close()
        assert play.steps() == [1]
        check_values(play.home.location, [1])
    else:
        error = play.error(1, "shared")
        assert isinstance(error, Damaged)
        assert "1-b1-a1.image" in str(error)
        play.close()


def test_a_large_image_is_promoted_in_windows(start: Start, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk, "WINDOW_BYTES", 1 << 16)
    size = 300_000  # 2.4 MB, and a tail that fills no page
    play = start("local", "shared")
    play.save(1, size=size)
    play.close()
    check_values(play.home.location, [1], size)


# --- going on after a writer or a trainer ---------------------------------------------------------


def test_steps_that_only_local_has_are_made_up_for(start: Start, tmp_path: Path) -> None:
    """A new attempt finds images of an older one, which its store never got."""
    store = Weather(tmp_path / "shared")
    play = start("local", "shared", stores={"shared": store})
    play.save(1)
    play.done(1, "shared")
    store.down = StoreFailed("no network")
    ids = [play.save(step) for step in (2, 3)]
    for step in (2, 3):
        play.error(step, "shared")
    play.close()
    number = attempts.claim(play.home, "resume")
    listing = attempts.list_run(play.home)
    decision = lineage.decide(
        number, "resume", parent=ids[-1], newest=ids[-1], current=listing.head
    )
    attempts.record(play.home, decision)
    line = attempts.list_run(play.home).lineage
    later = start("local", "shared", begun=(number, line))
    for step_id in ids:
        later.writer.tell(Job(step_id, ("shared",), None))
    later.save(4)
    later.close()
    assert later.order("shared") == [2, 3, 4]
    assert later.steps() == [1, 2, 3, 4]
    assert [s.attempt for s in attempts.list_run(play.home).counting] == [1, 1, 1, 2]
    check_values(play.home.location, [1, 2, 3, 4])


def test_a_job_of_which_nothing_is_left_fails(start: Start) -> None:
    play = start("local", "shared")
    play.writer.tell(Job(play.id(7), ("shared",), None))
    assert isinstance(play.error(7, "shared"), NotFound)
    assert "given back" in str(play.error(7, "shared"))


@pytest.mark.parametrize("died_after", ["image", "part", "publish"])
def test_a_job_is_told_again_to_the_next_writer(
    died_after: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Weather(tmp_path / "shared")
    play = start(stores={"shared": store})
    on = {"image": "part-", "part": "manifest", "publish": "\0"}[died_after]
    store.stops = lambda name, key: name in ("put", "put_many") and on in key
    store.calm.clear()
    step_id = fill_and_tell(play)
    if died_after == "publish":
        play.done(1, "shared")
    else:
        assert store.stopped.wait(60)
    heard: list[Report] = []
    second = Writer(play.setup, heard.append, make_keeper=None)
    second.tell(Begin(play.owner, play.line))
    written: list[str] = []
    real = FileStore.write_image

    def write(self: FileStore, key: str, *arguments: Any) -> None:
        written.append(key)
        real(self, key, *arguments)

    monkeypatch.setattr(FileStore, "write_image", write)
    second.tell(Job(step_id, ("shared",), 0, {"blocking_s": 1.0}))
    second.close()
    [done] = [each for each in heard if isinstance(each, Failed | Done)]
    assert isinstance(done, Done), done
    assert done.figures["blocking_s"] == 1.0
    assert done.figures["bytes"] > 4096
    assert len(written) == (1 if died_after == "image" else 0)
    assert play.steps() == [1]
    store.calm.set()


def fill_and_tell(play: Play) -> StepId:
    step_id = play.id(1)
    slot = fill(play.arena, step_id)
    play.slots[step_id] = slot
    assert slot.number == 0
    play.writer.tell(Job(step_id, ("shared",), 0))
    return step_id


def test_a_bucket_gets_steps_window_by_window(start: Start, tmp_path: Path) -> None:
    store = memory_store()
    begun = begin_run(store)
    play = start("local", "shared", stores={"shared": store}, begun=begun, patience_s=60)
    for step in (1, 2):
        play.save(step, size=50_000)
    play.close()
    assert [each.step for each in attempts.list_run(store).counting] == [1, 2]
    local = play.writer._depot.images["local"]
    for step in (1, 2):
        with (
            local.open(play.id(step)) as image,
            store.open_image(f"branch-1/{step}/{layout.image_name(1, 0)}") as there,
        ):
            assert there.read(0, there.size_bytes) == image.read(0, image.size_bytes)

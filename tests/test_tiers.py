"""Tiers through the manager: what is due where, what is gone on from, what is made up for."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from board_members import Board, Member
from tier_runs import Place, check, place, state_of, store_fails, writer
from waiting import eventually

import ckpt
from ckpt import tiers as tiers_module
from ckpt.store import FileStore
from ckpt.tiers import Tiers

__all__ = ["place", "writer"]  # fixtures


def test_a_local_tier_is_written_where_it_is_read(
    place: Place, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """Given as a URL, as a path from the home directory, and from a directory that is left."""
    monkeypatch.setenv("HOME", str(place.root))
    for name in ("there", "elsewhere"):
        (place.root / name).mkdir()
    for number, location in enumerate((f"file://{place.root}/local-0", "~/local-1", "local-2")):
        monkeypatch.chdir(place.root / "there")
        tiers = ckpt.Local(location), ckpt.Shared(f"file://{place.root}/run-{number}", every=9)
        with place.manager(*tiers, writer=writer) as manager:
            monkeypatch.chdir(place.root / "elsewhere")
            manager.resume()
            pending = manager.save(1, state_of(1))
            assert pending is not None
            pending.wait("local")
            where = place.root / ("there/local-2" if number == 2 else f"local-{number}")
            assert len(list(where.rglob("*.image"))) == 1, location
    assert not list((place.root / "elsewhere").iterdir())
    assert {path.name for path in (place.root / "there").iterdir()} == {"local-2"}


def test_local_tiers_of_several_processes_keep_no_best_steps(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only process 0 has the metrics: each host would keep its part of another step."""
    keep = ckpt.Keep(last=1, best=ckpt.Best("loss"))
    tiers = ckpt.Local(place.root / "local", keep=keep), ckpt.Shared(place.root / "run", keep=keep)
    place.manager(*tiers).close()
    board = Board()
    for index in range(2):
        member = Member(board, index, 2)
        monkeypatch.setattr("ckpt.manager.of_run", lambda location, member=member: member)
        with pytest.raises(ckpt.Misuse, match=r"local: found .*best.* 2 processes"):
            place.manager(*tiers)
        place.manager(tiers[1]).close()


def test_one_place_in_two_ways_is_one_place(place: Place) -> None:
    with pytest.raises(ckpt.Misuse, match="are both"):
        Tiers.of([ckpt.Local(place.root / "a"), ckpt.Shared(f"file://{place.root}/a")])
    for tier in (ckpt.Local, ckpt.Shared):
        with pytest.raises(ckpt.Misuse, match="wanted a path"):
            tier("file://")


# --- what is due ----------------------------------------------------------------------------------


def test_each_tier_gets_what_is_due(place: Place, writer: str) -> None:
    with place.manager(writer=writer) as m:
        m.resume()
        for step in range(1, 9):
            pending = m.save(step, state_of(step))
            assert pending is not None
            due = {"memory": 1, "local": 2, "shared": 4}
            assert pending.tiers == tuple(name for name, n in due.items() if step % n == 0)
            pending.wait("memory", timeout=0)
            if step % 4:
                with pytest.raises(ckpt.Misuse, match="'shared' is not due"):
                    pending.wait("shared")
            pending.wait(timeout=60)
        assert place.shared() == [4, 8]
        m._saves.settle()
        assert m.all_steps() == [4, 6, 8]
        assert [each.id.step for each in m._saves.locals["local"].list()] == [6, 8]
        status = m.status()
        assert {name: tier.newest for name, tier in status.tiers.items()} == dict.fromkeys(due, 8)
        assert (status.writer, status.degraded, status.slots) == (writer, False, 3)
        assert (status.writer_pid is not None) == (writer == "process")
    assert not (place.root / "arena").exists()


def test_a_step_saved_for_some_tiers_can_be_forced_into_all(place: Place) -> None:
    with place.manager() as m:
        m.resume()
        first = m.save(1, state_of(1))
        assert first is not None
        assert first.tiers == ("memory",)
        again = m.save(1, state_of(1), force=True)
        assert again is first
        assert again.tiers == ("memory", "local", "shared")
        again.wait(timeout=60)
        with pytest.raises(ckpt.AlreadyExists):
            m.save(1, state_of(2), force=True)
    assert place.shared() == [1]


def test_what_is_only_in_memory_is_brought_out_at_the_end(place: Place, writer: str) -> None:
    with place.manager(writer=writer) as m:
        m.resume()
        for step in (1, 2, 3):
            m.save(step, state_of(step))
    assert place.shared() == [3]
    with place.manager(ckpt.Shared(place.root / "run")) as m:
        check(m.resume(), 3, "shared")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([ckpt.Memory()], "wanted a Shared tier"),
        ([ckpt.Shared("a"), ckpt.Memory()], "nearest tier first"),
        ([ckpt.Memory(), ckpt.Memory(), "a"], "one Memory tier"),
        (["a", ckpt.Shared("a")], "are both"),
        ([ckpt.Local("./a"), "a"], "are both"),
    ],
)
def test_tiers_that_make_no_sense_together(given: list[Any], text: str) -> None:
    with pytest.raises(ckpt.Misuse, match=text):
        Tiers.of(given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ckpt.Memory(keep=ckpt.Keep()),
        lambda: ckpt.Memory(every=0),
        lambda: ckpt.Local("s3://bucket/x"),
        lambda: ckpt.Local("a", patience_s=math.nan),
        lambda: ckpt.Shared("a", patience_s=-1),
        lambda: ckpt.CheckpointManager("a", slots=0),
        lambda: ckpt.CheckpointManager("a", slots="2"),  # type: ignore[arg-type]
        lambda: ckpt.CheckpointManager("a", writer="fiber"),  # type: ignore[arg-type]
        lambda: ckpt.CheckpointManager("a", busy="no"),  # type: ignore[arg-type]
    ],
)
def test_options_that_mean_nothing_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ckpt.Misuse, match="wanted"):
        make()


# --- several shared tiers -----------------------------------------------------------------------


def two_shared(place: Place) -> tuple[Any, ...]:
    return ckpt.Shared(place.root / "run"), ckpt.Shared(place.root / "far", every=2)


def test_a_further_shared_tier_is_a_run_of_its_own(place: Place) -> None:
    with place.manager(*two_shared(place)) as m:
        m.resume()
        for step in (1, 2, 3, 4):
            m.save(step, state_of(step)).wait(timeout=60)  # type: ignore[union-attr]
    assert place.shared() == [1, 2, 3, 4]
    far = ckpt.open(place.root / "far")
    assert far.all_steps() == [2, 4]
    np.testing.assert_array_equal(far.restore().state["w"], state_of(4)["w"])
    assert ckpt.verify(place.root / "far").intact


def test_a_lost_home_gets_its_records_back(place: Place) -> None:
    with place.manager(*two_shared(place)) as m:
        m.resume()
        for step in (1, 2, 3):
            m.save(step, state_of(step))
    shutil.rmtree(place.root / "run")
    with place.manager(*two_shared(place)) as m:
        check(m.resume(), 2, "shared-2")
        m.save(3, state_of(3)).wait(timeout=60)  # type: ignore[union-attr]
        assert m.all_steps() == [2, 3]
    assert place.shared() == [3]


def test_a_root_of_another_run_is_no_further_tier(place: Place) -> None:
    for name in ("run", "far"):
        with ckpt.CheckpointManager(place.root / name, arena=place.root / name / "arena") as m:
            m.resume()
            m.save(2, state_of(2)).wait(timeout=60)  # type: ignore[union-attr]

    def go_on() -> None:
        with place.manager(*two_shared(place)) as m:
            m.resume()
            m.save(4, state_of(4)).wait("shared-2", timeout=60)  # type: ignore[union-attr]

    with pytest.raises(ckpt.Misuse, match="roots of different runs"):
        go_on()


# --- a store that fails ---------------------------------------------------------------------------


def test_a_store_that_is_down_is_made_up_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_module, "PATIENCE_S", math.inf)
    with place.manager(
        ckpt.Local(place.root / "local"), ckpt.Shared(place.root / "run", every=2)
    ) as m:
        m.resume()
        with store_fails(monkeypatch):
            for step in range(1, 9):
                m.save(step, state_of(step)).wait("local", timeout=60)  # type: ignore[union-attr]
            eventually(lambda: m.status().degraded)
            found = m.status().tiers["shared"]
            assert "the store is down" in found.error
            assert (found.newest, found.under_way) == (None, 4)
        m.wait_until_finished(60)
        assert not m.status().degraded
        assert place.shared() == [2, 4, 6, 8]


def test_lasting_failure_is_raised_when_patience_is_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = ckpt.Local(place.root / "local"), ckpt.Shared(place.root / "run", patience_s=0.2)
    with store_fails(monkeypatch), place.manager(*tiers) as m:
        m.resume()
        pending = m.save(1, state_of(1))
        assert pending is not None
        pending.wait("local", timeout=60)
        with pytest.raises(ckpt.StoreFailed, match="the store is down"):
            pending.wait("shared", timeout=60)


def test_without_a_slot_a_save_is_left_out_if_that_is_wanted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    write = FileStore.write_image

    def slow(self: FileStore, *arguments: Any) -> None:
        held.wait(60)
        write(self, *arguments)

    monkeypatch.setattr(FileStore, "write_image", slow)
    with place.manager(ckpt.Shared(place.root / "run"), busy="skip") as m:
        m.resume()
        saved = [m.save(step, state_of(step)) is not None for step in (1, 2, 3, 4)]
        assert saved == [True, True, False, False]
        assert m.status().skipped == 2
        held.set()
        m.wait_until_finished(60)
        assert m.save(5, state_of(5)) is not None
    assert place.shared() == [1, 2, 5]

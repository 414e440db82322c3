"""What the writer tells its keeper, and what it brings out when it is told to flush."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually
from writer_runs import Notes, Start, fill, quick, start

import ckpt
from ckpt.errors import (
    StoreFailed,
)
from ckpt.lineage import StepId
from ckpt.messages import (
    Failed,
    Flush,
    Note,
    Said,
    Settle,
    Settled,
)

__all__ = ["quick", "start"]  # fixtures


def test_the_keeper_hears_of_everything(start: Start) -> None:
    notes = Notes()
    play = start("local", "shared", keeper=notes)
    play.save(1, blocking_s=0.1)
    play.done(1, "shared")
    play.writer.tell(Note({"event": "metrics"}))
    play.close()
    assert notes.heard[0] == ("begin", 1)
    assert [each[:3] for each in notes.heard if each[0] == "saved"] == [
        ("saved", "local", 1),
        ("saved", "shared", 1),
    ]
    figures = next(each[3] for each in notes.heard if each[:2] == ("saved", "shared"))
    assert figures == play.done(1, "shared").figures
    assert notes.heard[-2:] == [("note", "metrics"), ("close",)]


def test_a_keeper_that_raises_touches_no_save(start: Start) -> None:
    class Bad(Notes):
        def saved(self, *arguments: Any) -> None:
            raise ValueError("a fault of ours")

    play = start(keeper=Bad())
    play.save(1)
    play.done(1, "shared")
    play.wait(lambda: [each for each in play.of(Failed) if each.id is None])


def test_a_flush_brings_out_the_newest_snapshot(start: Start) -> None:
    play = start("local", "shared")
    play.save(1)
    play.save(2, "local")
    play.done(2, "local")
    play.done(1, "shared")
    play.writer.tell(Flush())
    play.done(2, "shared")
    slot = fill(play.arena, play.id(3))  # of the Memory tier only
    play.writer.tell(Flush())
    play.done(3, "local")
    play.done(3, "shared")
    play.writer.tell(Flush())
    play.close()
    slot.release()
    assert play.steps() == [1, 2, 3]
    assert play.writer._depot.images["local"].list()[-1].id.step == 3
    assert [len(each) for each in play.ends().values()] == [1] * 6
    assert not play.released(3), "that slot was not given to the writer"


def test_a_flush_leaves_alone_what_does_not_count_or_is_being_filled(start: Start) -> None:
    play = start()
    old = fill(play.arena, StepId(9, 1, 7))
    being_filled = play.arena.claim(4096)
    play.writer.tell(Flush())
    play.close()
    assert play.reports == []
    old.release()
    being_filled.release()


def test_a_choice_that_fails_or_hangs_is_told(start: Start) -> None:
    answers: list[Any] = [StoreFailed("no network"), threading.Event()]

    def choose(*_: Any) -> None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        hung.append(answer)
        answer.wait(60)

    hung: list[threading.Event] = []
    play = start(flush_choice=choose)
    object.__setattr__(play.setup, "grace_s", 0.2)
    play.writer.tell(Flush())
    play.writer.tell(Flush())
    play.close()
    first, second = (each.text for each in play.of(Said))
    assert "no network" in first
    assert "not known in 0.2 s" in second
    hung[0].set()


def test_a_deletion_that_hangs_holds_up_no_flush(start: Start) -> None:
    """Who settles is not told either, until it is through."""

    class Hanging(Notes):
        def settle(self, then: Any) -> None:
            hung.append(then)

    hung: list[Any] = []
    play = start(keeper=Hanging())
    play.save(1)
    play.done(1, "shared")
    play.writer.tell(Settle(7))
    eventually(lambda: hung)
    slot = fill(play.arena, play.id(2))
    play.writer.tell(Flush())
    play.done(2, "shared")
    assert not play.of(Settled)
    hung[0]()
    assert play.of(Settled) == [Settled(7)]
    slot.release()


def test_an_answer_that_comes_late_is_none_to_who_asks_again(tmp_path: Path) -> None:
    class Mute:
        is_alive = True

        def __init__(self) -> None:
            self.asked: list[Settle] = []

        def tell(self, message: Any) -> None:
            if isinstance(message, Settle):
                self.asked.append(message)
                if len(self.asked) > 1:
                    saves._report(Settled(self.asked[len(self.asked) - 2].number))

    with ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena", writer="thread") as m:
        m.resume({})
        saves, mute = m._saves, Mute()
        saves._timeout_s = 0.01
        backend, saves._backend = saves._backend, mute  # type: ignore[assignment]
        try:
            for _ in range(3):
                with pytest.raises(StoreFailed, match="not come to rest"):
                    saves.settle()
        finally:
            saves._backend = backend
        assert len(mute.asked) == 3

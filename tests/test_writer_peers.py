"""Writers of several processes, and what ends an attempt or a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from writer_runs import (
    Notes,
    Play,
    Start,
    Weather,
    quick,
    start,
    tiers_of,
)

from ckpt import attempts
from ckpt.errors import (
    PeerFailed,
    StoreFailed,
    Superseded,
)
from ckpt.messages import (
    Abandon,
    Failed,
    Released,
)

__all__ = ["quick", "start"]  # fixtures


def test_after_a_newer_attempt_every_job_fails_at_once(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared")
    play = start("local", "shared", stores={"shared": store}, patience_s=60)
    play.save(1)
    play.done(1, "shared")
    attempts.claim(play.home, "resume")
    play.save(2)
    assert isinstance(play.error(2, "shared"), Superseded)
    play.ended(2, "local")
    calls = len(store.calls)
    play.save(3)
    assert isinstance(play.error(3, "shared"), Superseded)
    assert isinstance(play.error(3, "local"), Superseded)
    assert len(store.calls) == calls
    play.close()
    assert sorted(each.id.step for each in play.of(Released)) == [1, 2, 3]


def test_a_newer_attempt_ends_what_is_tried_again(start: Start, tmp_path: Path) -> None:
    """The keeper meets it first, while a tier is down and patient."""
    notes, store = Notes(), Weather(tmp_path / "shared-2")
    play = start("shared", "shared-2", stores={"shared-2": store}, keeper=notes, patience_s=1e9)
    store.down = StoreFailed("no network")
    play.save(1)
    play.done(1, "shared")
    notes.tell(Failed(None, "", Superseded("by attempt 2")))
    assert isinstance(play.error(1, "shared-2"), Superseded)


def test_the_claims_of_the_home_fence_other_tiers(start: Start, tmp_path: Path) -> None:
    store = Weather(tmp_path / "shared-2")
    play = start("shared", "shared-2", stores={"shared-2": store}, patience_s=60)
    store.stops = lambda name, key: name == "move"
    store.calm.clear()
    play.save(1)
    play.done(1, "shared")
    assert store.stopped.wait(60)
    attempts.claim(play.home, "resume")
    store.calm.set()
    assert isinstance(play.error(1, "shared-2"), Superseded)


def peers(tmp_path: Path, **options: Any) -> tuple[Play, Play]:
    tiers = tiers_of(tmp_path, ["shared"], patience_s=60)
    first = Play(tmp_path, tiers, count=2, make_keeper=None, **options)
    begun = (first.owner, first.line)
    second = Play(tmp_path, tiers, index=1, count=2, begun=begun, make_keeper=None, **options)
    return first, second


def test_process_0_publishes_what_all_have_written(tmp_path: Path) -> None:
    first, second = peers(tmp_path)
    second.save(1, blocking_s=1.0)
    assert set(second.done(1, "shared").figures) == {"durable_s", "bytes"}
    assert attempts.list_run(first.home).steps == ()
    first.save(1)
    both = first.done(1, "shared").figures["bytes"]
    assert both > second.done(1, "shared").figures["bytes"]
    assert [step.step for step in attempts.list_run(first.home).counting] == [1]
    first.close()
    second.close()


def test_a_peer_that_cannot_save_ends_the_waiting(tmp_path: Path) -> None:
    first, second = peers(tmp_path)
    step_id = first.save(1)
    first.wait(lambda: first.released(1))
    first.writer.tell(Abandon(step_id, error := PeerFailed("process 1 is out of memory")))
    assert first.error(1, "shared") is error
    # Told before the job, which then is not begun.
    first.writer.tell(Abandon(first.id(2), error))
    first.save(2)
    assert first.error(2, "shared") is error
    first.save(3)
    second.save(3)
    first.done(3, "shared")
    first.close()
    second.close()


def test_a_peer_that_is_not_heard_of_is_named(tmp_path: Path) -> None:
    first, second = peers(tmp_path, timeout_s=0.1)
    first.save(1)
    error = first.error(1, "shared")
    assert isinstance(error, PeerFailed)
    assert "process 1 of 2" in str(error)
    first.close()
    second.close()

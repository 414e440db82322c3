"""Between the tries of a job: who waits for a store that is back begins at once.

A pause ends only if it is woken here: each is longer than any test waits.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from writer_runs import WAIT_S, Notes, Start, Weather, start

from ckpt import lanes
from ckpt.course import Course
from ckpt.errors import StoreFailed
from ckpt.lanes import Figures, Lane
from ckpt.lineage import StepId
from ckpt.messages import Job

__all__ = ["start"]  # a fixture


class Pauses:
    """The pauses of all courses, in order: (step, tier)."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, str]] = []
        self.changed = threading.Condition()

    def note(self, course: Course, tier: str) -> None:
        with self.changed:
            self.begun.append((course.id.step, tier))
            self.changed.notify_all()

    def until(self, *wanted: tuple[int, str]) -> None:
        """Until these are all that there were, in whatever order of tiers."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= len(wanted), WAIT_S), self.begun
        assert sorted(self.begun) == sorted(wanted)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    found, real = Pauses(), Course.pause

    def pause(course: Course, tier: str, pause_s: float) -> None:
        assert pause_s > 2 * WAIT_S
        found.note(course, tier)
        real(course, tier, pause_s)

    monkeypatch.setattr(Course, "pause", pause)
    monkeypatch.setattr(lanes, "FIRST_PAUSE_S", 100 * WAIT_S)
    monkeypatch.setattr(lanes, "LONGEST_PAUSE_S", 100 * WAIT_S)
    return found


class Tier:
    """One lane, what it delivers to, and whom it tells."""

    def __init__(self) -> None:
        self.down = True
        self.tries: list[int] = []
        self.ended: list[int] = []
        self.changed = threading.Condition()
        self.lane = Lane("shared", 1000 * WAIT_S, 1, self.deliver, self)

    def save(self, step: int) -> None:
        job = Job(StepId(step, 1, 1), ("shared",), None, {})
        self.lane.submit(Course(job, 1, (), (), lambda: None))

    def deliver(self, course: Course, lane: Lane) -> Any:
        tier = self

        class Delivery:
            def run(self) -> Figures:
                tier.tries.append(course.id.step)
                if tier.down:
                    raise StoreFailed("down")
                return {}

        return Delivery()

    def done(self, course: Course, tier: str, figures: Figures) -> None:
        with self.changed:
            self.ended.append(course.id.step)
            self.changed.notify_all()

    def failed(self, course: Course, tier: str, error: BaseException) -> None:
        raise AssertionError(error)

    def make_room(self, course: Course, tier: str) -> None:
        raise AssertionError

    def trouble(self, report: Any) -> None: ...

    def idle(self) -> None: ...

    def until(self, *ended: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ended) >= len(ended), WAIT_S), self.ended
        assert self.ended == [*ended]


@pytest.fixture
def tier(pauses: Pauses) -> Iterator[Tier]:
    tier = Tier()
    yield tier
    tier.down = False
    tier.lane.answered()
    tier.lane.end()


def test_a_save_that_comes_ends_the_pause_of_the_one_before(tier: Tier, pauses: Pauses) -> None:
    tier.save(1)
    pauses.until((1, "shared"))
    tier.down = False
    tier.save(2)
    tier.until(1, 2)
    assert tier.tries == [1, 1, 2]
    pauses.until((1, "shared"))


def test_each_save_that_comes_is_one_try_while_the_store_is_down(
    tier: Tier, pauses: Pauses
) -> None:
    tier.save(1)
    for step in (2, 3):
        pauses.until(*[(1, "shared")] * (step - 1))
        tier.save(step)
    pauses.until(*[(1, "shared")] * 3)
    assert tier.tries == [1, 1, 1]


def test_an_answer_ends_the_pause_and_all_that_waits_begins(tier: Tier, pauses: Pauses) -> None:
    for step in range(1, 5):
        tier.save(step)
        pauses.until(*[(1, "shared")] * step)
    tier.down = False
    tier.lane.answered()
    tier.until(1, 2, 3, 4)
    assert tier.tries == [1, 1, 1, 1, 1, 2, 3, 4]
    pauses.until(*[(1, "shared")] * 4)


def test_an_answer_during_a_try_that_fails_is_not_forgotten(pauses: Pauses) -> None:
    """Which of both came first is not known."""
    tier = Tier()
    deliver = tier.deliver

    def answered(course: Course, lane: Lane) -> Any:
        lane.answered()
        return deliver(course, lane)

    tier.lane._deliver = answered
    tier.save(1)
    pauses.until((1, "shared"), (1, "shared"))
    assert tier.tries == [1, 1], "and once only"
    tier.down = False
    tier.lane.answered()
    tier.until(1)
    tier.lane.end()


def test_a_home_that_is_back_wakes_the_tiers_that_wait_for_its_claims(
    start: Start, tmp_path: Path, pauses: Pauses
) -> None:
    home = Weather(tmp_path / "shared")
    play = start("shared", "shared-2", stores={"shared": home}, patience_s=1000 * WAIT_S)
    home.down = StoreFailed("no network")
    play.save(1)
    pauses.until((1, "shared"), (1, "shared-2"))
    home.down = None
    play.save(2, "shared")
    for tier in ("shared", "shared-2"):
        play.done(1, tier)
    play.done(2, "shared")
    pauses.until((1, "shared"), (1, "shared-2"))
    play.close()


def test_room_that_was_made_is_used_at_once(start: Start, tmp_path: Path, pauses: Pauses) -> None:
    class Deleting(Notes):
        def lost(self, tier: str, step: StepId) -> int:
            super().lost(tier, step)
            return 1

    def room() -> None:
        store.down = None

    store = Weather(tmp_path / "shared")
    keeper = Deleting(room)
    play = start(stores={"shared": store}, keeper=keeper, patience_s=1000 * WAIT_S)
    store.down = StoreFailed("full")
    store.down.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    play.save(1)
    play.done(1, "shared")
    assert keeper.heard.count(("lost", "shared", 1)) == 1
    pauses.until((1, "shared"))
    play.close()

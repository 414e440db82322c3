"""Images of several processes become a step before anything is chosen."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from board_members import Board, Member
from hosts import Host, check

import ckpt
from ckpt import attempts, layout
from ckpt.candidates import holders
from ckpt.errors import Damaged, NotFound, PeerFailed, StoreFailed
from ckpt.imaged import host_images
from ckpt.lineage import Decision, StepId, lineage
from ckpt.local import LocalImages
from ckpt.store import FileStore


def decisions_of(*times: int) -> dict[int, Decision]:
    return {n: Decision(n, "resume", None, 1, time_ns=t) for n, t in enumerate(times, 1)}


def test_who_has_the_image_of_a_step_that_counts() -> None:
    decisions = decisions_of(70)
    line = lineage(decisions, decisions[1])
    both = [3, 1, 1, 70]
    assert holders([[both, [5, 1, 1, 70]], [both, [4, 1, 1, 70]]], line, decisions) == {
        StepId(3, 1, 1): {0, 1},
        StepId(5, 1, 1): {0},
        StepId(4, 1, 1): {1},
    }
    assert holders([[both], []], line, decisions) == {StepId(3, 1, 1): {0}}
    assert holders([[both], [[3, 1, 1, 71]]], line, decisions) == {StepId(3, 1, 1): {0}}, (
        "another run"
    )
    assert holders([[], [[3, 1, 1, None]]], line, decisions) == {}
    gone = [[3, 2, 2, 70]]
    assert holders([gone, gone], line, decisions) == {}, "no such attempt"


class Pair:
    """Two processes on one host, as threads."""

    def __init__(self, root: Path, place: Path) -> None:
        self.root = root
        self.calls = 0
        self.hosts = [Host(root, place) for _ in range(2)]

    def together(self, act: Any) -> list[Any]:
        self.calls += 1
        board = Board()
        found: list[Any] = [None, None]

        def run(index: int) -> None:
            host = self.hosts[index]
            host.processes = Member(board, index, 2)
            host.locals = {"local": LocalImages(host.place / "disk", str(self.root), index)}
            try:
                found[index] = act(host)
            except Exception as error:
                found[index] = error

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path / "run", tmp_path / "host")
    yield pair
    for host in pair.hosts:
        host.close()


def test_images_of_two_processes_become_a_step_first(pair: Pair) -> None:
    assert [r.report.fresh for r in pair.together(lambda h: h.start())] == [True, True]

    def save(host: Host) -> None:
        for step in (1, 2):
            host.copy(step).slot.release()
        if host.processes.index == 0:
            host.copy(3).slot.release()  # the other one died before it had copied this
        host.die()

    assert pair.together(save) == [None, None]
    restored = pair.together(lambda h: h.start())
    for host, each in zip(pair.hosts, restored, strict=True):
        check(each, host, 2, "shared")
        assert host.started is not None
        assert host.started.decision.parent == StepId(2, 1, 1)
        assert {image.id.step for image in host.started.images} == {2}
    assert ckpt.verify(pair.root).intact
    assert ckpt.open(pair.root).all_steps() == [2]


def test_one_damaged_image_of_two_processes_falls_back_to_home(pair: Pair) -> None:
    def begin(host: Host) -> None:
        host.start()
        snap = host.copy(1)
        host.to_local(snap)
        snap.slot.release()
        host.die()

    assert pair.together(begin) == [None, None]
    assert [r.step for r in pair.together(lambda h: h.start())] == [1, 1]

    def save(host: Host) -> None:
        snap = host.copy(2)
        if host.processes.index == 1:
            chunk = int(snap.header.columns.offset[0])
            snap.slot.buffer[chunk] ^= 0xFF
        snap.slot.release()
        host.die()

    assert pair.together(save) == [None, None]
    restored = pair.together(lambda h: h.start())
    for host, each in zip(pair.hosts, restored, strict=True):
        check(each, host, 1, "shared")
        (lost,) = each.report.lost
        assert lost.step == 2
        assert "process 1: memory: " in lost.reason
        assert host.started is not None
        assert (host.started.decision.kind, host.started.decision.branch) == ("fallback", 3)
    assert ckpt.open(pair.root).all_steps() == [1]
    # It stays lost: what was begun of it at home is removed by the next attempt.
    for host in pair.hosts:
        host.die()
    restored = pair.together(lambda h: h.start())
    assert [r.step for r in restored] == [1, 1]
    assert attempts.list_run(FileStore(pair.root)).remains == ()


def test_home_fails_while_the_step_is_made(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(host: Host) -> None:
        host.start()
        host.copy(1).slot.release()
        host.die()

    assert pair.together(save) == [None, None]

    def down(*_: Any, **__: Any) -> Any:
        raise StoreFailed("planted")

    monkeypatch.setattr("ckpt.commit.finish", down)
    errors = pair.together(lambda h: h.start())
    assert [type(error) for error in errors] == [StoreFailed] * 2, "it is no fresh run"
    assert "no step could be made of them: planted" in str(errors[0])
    for host in pair.hosts:
        host.die()
    monkeypatch.undo()
    restored = pair.together(lambda h: h.start())
    for host, each in zip(pair.hosts, restored, strict=True):
        check(each, host, 1, "shared")


def test_with_an_older_step_at_home_a_failure_there_costs_only_the_newer_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def save(host: Host) -> None:
        host.start()
        host.copy(1).slot.release()
        host.die()

    assert pair.together(save) == [None, None]

    def go_on(host: Host) -> None:
        assert host.start().step == 1
        host.copy(2).slot.release()
        host.die()

    assert pair.together(go_on) == [None, None]

    def down(*_: Any, **__: Any) -> Any:
        raise StoreFailed("planted")

    monkeypatch.setattr("ckpt.commit.publish", down)
    restored = pair.together(lambda h: h.start())
    for host, each in zip(pair.hosts, restored, strict=True):
        check(each, host, 1, "shared")
        assert [(lost.step, lost.reason) for lost in each.report.lost] == [(2, "planted")]
    assert "no step was made of the images of step 2" in caplog.text


def test_images_of_another_number_of_processes_make_no_step(pair: Pair, tmp_path: Path) -> None:
    def save(host: Host) -> None:
        host.start()
        host.copy(1).slot.release()
        host.die()

    assert pair.together(save) == [None, None]
    alone = Host(pair.root, tmp_path / "host")
    try:
        assert host_images(None, {}).images == ()
        assert alone.start().report.fresh
    finally:
        alone.close()


class NoRows(dict):
    """No iterator at all, where a host has one."""

    def take(self) -> list[int]:
        return []


def planted(pair: Pair, *steps: int, apart: int | None = None, only: Sequence[int] = ()) -> None:
    """A run of which `steps` are in the arenas of both; of `apart` the images do not fit, and
    `only` are with process 0. Then all die."""

    def save(host: Host) -> None:
        host.start()
        for step in steps:
            host.copy(step).slot.release()
        if apart is not None:
            if host.processes.index == 1:
                host.rows = NoRows()  # type: ignore[assignment]
            host.copy(apart).slot.release()
        for step in only if host.processes.index == 0 else ():
            host.copy(step).slot.release()
        host.die()

    assert pair.together(save) == [None, None]


def given_up(each: Any) -> list[int]:
    return [lost.step for lost in each.report.given_up]


def test_images_that_do_not_fit_together_are_given_up(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    planted(pair, apart=1)
    restored = pair.together(lambda h: h.start())
    for each in restored:
        assert (each.step, each.report.fresh, each.report.lost) == (0, True, ())
        (told,) = each.report.given_up
        assert told.step == 1
        assert "wanted iterators" in told.reason
    assert "the images of step 1 on the hosts make no step and are given up" in caplog.text
    # They do not come back, and nothing of them stays at home.
    for host in pair.hosts:
        host.die()
    again = pair.together(lambda h: h.start())
    assert [(e.report.fresh, e.report.given_up) for e in again] == [(True, ())] * 2
    assert attempts.list_run(FileStore(pair.root)).remains == ()


def test_an_older_image_is_taken_when_the_newest_do_not_fit(pair: Pair) -> None:
    planted(pair, 1, apart=2, only=[3])
    restored = pair.together(lambda h: h.start())
    for host, each in zip(pair.hosts, restored, strict=True):
        check(each, host, 1, "shared")
        assert (given_up(each), each.report.lost) == ([3, 2], ())
        assert each.report.given_up[0].reason == "process 1 has no image of it"
        assert host.started is not None
        assert (host.started.decision.kind, host.started.decision.branch) == ("resume", 1)
    assert ckpt.open(pair.root).all_steps() == [1]


def test_an_older_image_is_taken_when_the_newest_is_damaged(pair: Pair) -> None:
    def save(host: Host) -> None:
        host.start()
        host.copy(1).slot.release()
        snap = host.copy(2)
        if host.processes.index == 1:
            snap.slot.buffer[int(snap.header.columns.offset[0])] ^= 0xFF
        snap.slot.release()
        host.die()

    assert pair.together(save) == [None, None]
    restored = pair.together(lambda h: h.start())
    for host, each in zip(pair.hosts, restored, strict=True):
        check(each, host, 1, "shared")
        assert [lost.step for lost in each.report.lost] == [2]
        assert given_up(each) == []


def test_an_image_whose_peer_has_none_is_given_up_with_nothing_else_there(pair: Pair) -> None:
    planted(pair, only=[1])
    errors = pair.together(lambda h: h.start(must_exist=True))
    for error in errors:
        assert isinstance(error, NotFound)
        assert "without a saved step" in str(error)
        assert "given up: the images of step 1 (branch 1, attempt 1): process 1 has" in str(error)
    for host in pair.hosts:
        host.die()
    restored = pair.together(lambda h: h.start())
    assert [(e.report.fresh, given_up(e)) for e in restored] == [(True, [1])] * 2


def test_steps_that_are_gone_from_home_are_told_of_with_what_was_given_up(pair: Pair) -> None:
    """As without an image: the run went on from a step that nobody has any more."""
    planted(pair, 1)
    planted(pair, only=[2, 3, 4])
    shutil.rmtree(pair.root / layout.branch_name(1))
    errors = pair.together(lambda h: h.start())
    for error in errors:
        assert isinstance(error, Damaged)
        assert "put the directories of the branches back" in str(error)
        assert "given up: the images of step 4" in str(error)


def test_nothing_is_given_up_while_a_peer_has_a_tier_that_does_not_answer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted(pair, only=[1])
    list_ = LocalImages.list

    def silent(local: LocalImages) -> Any:
        if local.index == 1:
            raise StoreFailed("planted")
        return list_(local)

    monkeypatch.setattr(LocalImages, "list", silent)
    errors = pair.together(lambda h: h.start())
    for error in errors:
        assert isinstance(error, StoreFailed | PeerFailed), "it is no fresh run"
        assert "process 1: local: planted" in str(error)
        assert "its local did not answer" in str(error)
    for host in pair.hosts:
        host.die()
    monkeypatch.undo()
    restored = pair.together(lambda h: h.start())
    assert [given_up(e) for e in restored] == [[1], [1]]

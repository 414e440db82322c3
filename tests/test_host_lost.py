"""Hosts that are lost after a start from their images, and tiers that do not answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hosts import Host, check, host, other_host

import ckpt
from ckpt import attempts, layout
from ckpt.candidates import HOST_ONLY
from ckpt.errors import Damaged, StoreFailed, Superseded
from ckpt.lineage import Decision, StepId, counts, lineage
from ckpt.local import LocalImages
from ckpt.store import FileStore

__all__ = ["host"]  # a fixture


def test_the_host_is_lost_after_a_restart_from_its_image(host: Host) -> None:
    """Home has r, the image s > r was gone on from; then only r is there.

    No step that was acknowledged at home is shadowed, and what a writer that survived publishes
    late, between r and s, counts for nothing and is moved out of the way.
    """
    host.start()
    host.to_shared(host.copy(1))
    late = host.copy(2)
    host.copy(3)
    assert host.arena is not None
    writer_line = host.started.line if host.started is not None else ()
    kept = late.slot.buffer[: late.header.size_bytes].tobytes()
    host.die()
    check(host.start(), host, 3, "memory")  # attempt 2, parent step 3
    assert host.started is not None
    assert host.started.decision.branch == 1
    host.copy(4)
    host.die()

    new = other_host(host)
    try:
        check(new.start(), new, 1, "shared")  # attempt 3
        assert new.started is not None
        assert (new.started.decision.kind, new.started.decision.parent) == (
            "resume",
            StepId(1, 1, 1),
        )
        # The writer of attempt 1 wakes and goes on with step 2, which it had looked up before.
        step = StepId(2, 1, 1)
        making = layout.making_name(1, 2, 1)
        ckpt.commit.write_image(host.home, making, late.header, memoryview(kept))
        part = ckpt.commit.part_of(late.header)
        host.home.put(f"{making}/{layout.part_name(1, 0)}", part.emit())
        marker = ckpt.commit.finish(host.home, step, [late.header])
        ckpt.publishing.of(host.home).publish(step, marker, 1)
        with pytest.raises(Superseded):
            ckpt.commit.publish(host.home, step, marker, writer_line, owner=1)
        listing = attempts.list_run(host.home)
        assert step in listing.steps
        assert listing.counting == [StepId(1, 1, 1)]
        new.to_shared(new.copy(2, tag=20))
        listing = attempts.list_run(host.home)
        assert listing.counting == [StepId(1, 1, 1), StepId(2, 1, 3)]
        new.die()
        restored = new.start()
        assert (restored.step, restored.state["tag"]) == (2, 20)
        new.die()
        # The first host comes back with its images: none of them counts any more.
        restored = host.start()
        assert (restored.step, restored.state["tag"]) == (2, 20)
        assert restored.report.tier == "shared"
        assert host.started is not None
        assert host.started.images == ()
    finally:
        new.close()


def test_nothing_was_on_a_shared_tier_and_the_host_is_lost(host: Host) -> None:
    """The run begins anew; nothing of it is damaged."""
    host.start()
    host.copy(1).slot.release()
    host.die()
    check(host.start(), host, 1, "memory")
    assert host.started is not None
    assert host.started.decision.reason == HOST_ONLY
    host.die()
    new = other_host(host)
    try:
        assert new.start().report.fresh
        assert new.started is not None
        new.to_shared(new.copy(1, tag=10))
        new.die()
        restored = host.start()
        assert (restored.state["tag"], restored.report.tier) == (10, "shared")
        host.die()
        (host.root / "branch-3").rename(host.root.with_name("gone"))
        with pytest.raises(Damaged, match="that step is gone"):
            host.start()
    finally:
        new.close()


def test_every_combination_of_what_home_and_the_hosts_have(host: Host) -> None:
    """Acknowledged at home: never shadowed, whatever a host had beside it."""
    for publish_before in (0, 1, 2):
        for publish_after in (False, True):
            place = host.place / f"case-{publish_before}-{publish_after}"
            case = Host(place / "run", place / "host")
            new = other_host(case)
            try:
                case.start()
                acknowledged = []
                for step in (1, 2, 3):
                    snap = case.copy(step)
                    if step <= publish_before:
                        case.to_shared(snap)
                        acknowledged.append(step)
                    snap.slot.release()
                case.die()
                assert case.start().step == 3
                snap = case.copy(4)
                if publish_after:  # what the second attempt saves, but not what it went on from
                    case.to_shared(snap)
                    acknowledged.append(4)
                case.die()
                restored = new.start()
                assert restored.step == max(acknowledged, default=0), place.name
                listing = attempts.list_run(case.home)
                assert [s.step for s in listing.counting] == acknowledged, place.name
                names = [(s.branch, s.step) for s in listing.steps]
                assert len(set(names)) == len(names)
            finally:
                case.close()
                new.close()


def test_a_shared_tier_that_does_not_answer_is_never_taken_for_empty(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = FileStore(tmp_path / "second")
    host.others = {"shared-2": second}

    def down(prefix: str) -> Any:
        raise StoreFailed("planted")

    monkeypatch.setattr(second, "list", down)
    with pytest.raises(StoreFailed, match="planted; shared-2 may have the newest step"):
        host.start()


def test_a_local_disk_that_fails_stops_only_a_fresh_start(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def down(self: LocalImages) -> Any:
        raise StoreFailed("planted")

    monkeypatch.setattr(LocalImages, "list", down)
    with pytest.raises(StoreFailed, match=r"planted; no other tier .* local may have some"):
        host.start()
    monkeypatch.undo()
    host.start()
    host.copy(1).slot.release()
    host.die()
    monkeypatch.setattr(LocalImages, "list", down)
    check(host.start(), host, 1, "memory")
    assert "local did not answer: planted" in caplog.text


def test_the_line_of_a_restart_from_an_image_counts_it() -> None:
    decisions = {
        1: Decision(1, "start", None, 1),
        2: Decision(2, "resume", StepId(5, 1, 1), 1),
    }
    line = lineage(decisions, decisions[2])
    assert counts(line, StepId(5, 1, 1))
    assert not counts(line, StepId(6, 1, 1))
    assert counts(line, StepId(6, 1, 2))

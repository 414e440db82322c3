"""Restarts from images of this host: the newest step that counts, from the nearest tier."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, check, flip, host, payload

import ckpt
from ckpt import attempts
from ckpt.errors import Misuse, NotFound
from ckpt.lineage import StepId
from ckpt.mirrors import copy_records
from ckpt.store import FileStore

__all__ = ["host"]  # a fixture


def test_from_the_arena_bit_for_bit(host: Host) -> None:
    host.start()
    for step in (1, 2, 3):
        host.copy(step).slot.release()
    host.die()
    restored = host.start()
    check(restored, host, 3, "memory")
    assert not restored.report.lost
    assert not restored.report.damage
    assert host.started is not None
    assert host.started.decision.parent == StepId(3, 1, 1)
    assert host.started.decision.branch == 1, "going on from the newest stays on the branch"
    assert sorted(image.id.step for image in host.started.images) == [1, 2, 3]
    # What it came from can be read again, as the manager does.
    assert ckpt.manifest.read_manifest(host.started.source, StepId(3, 1, 1)).extra == {"tag": None}


def test_from_local_when_the_arena_is_gone(host: Host) -> None:
    host.start()
    for step in (1, 2):
        snap = host.copy(step)
        host.to_local(snap)
        snap.slot.release()
    assert host.arena is not None
    host.arena.close(remove=True)
    host.arena = host.started = None
    check(host.start(), host, 2, "local")


def test_the_nearest_tier_has_it_all_tiers_do(host: Host, tmp_path: Path) -> None:
    """And the newest step wins over the nearest tier."""
    second = FileStore(tmp_path / "second")
    host.others = {"shared-2": second}
    host.start()
    copy_records(host.home, second)
    snap = host.copy(1)
    host.to_local(snap)
    host.to_shared(snap)
    host.to_shared(snap, second)
    snap.slot.release()
    host.die()
    for tier, lose in (
        ("memory", lambda: host.place / "arena-0"),
        ("local", lambda: host.place / "disk"),
        ("shared", lambda: host.root / "branch-1"),
        ("shared-2", lambda: None),
    ):
        check(host.start(), host, 1, tier)
        host.die()
        place = lose()
        if place is not None:
            place.rename(tmp_path / f"lost-{tier}")
    host.start()
    copy_records(host.home, second)
    host.to_shared(host.copy(2), second)
    host.die()
    (host.place / "arena-0" / "slot-0").unlink()
    restored = host.start()
    check(restored, host, 2, "shared-2")


def test_damage_falls_to_the_next_tier_and_then_to_an_older_step(host: Host) -> None:
    host.start()
    host.to_shared(host.copy(1))
    snap = host.copy(2)
    host.to_local(snap)
    host.to_shared(snap)
    host.die()

    def images() -> dict[tuple[str, int], Any]:
        return {(each.tier, each.id.step): each for each in host.hosted().images}

    restored = host.start("resume")
    check(restored, host, 2, "memory")
    slot = images()["memory", 2]
    flip(Path(slot.header.where), payload(slot))
    host.die()
    restored = host.start()
    check(restored, host, 2, "local")
    (damage,) = restored.report.damage
    assert damage.file == "memory"
    assert "slot-" in damage.what
    assert "wanted digest" in damage.what
    assert not restored.report.lost, "nothing is lost while another tier has it"
    assert host.started is not None
    assert host.started.decision.kind == "resume"
    local = images()["local", 2]
    flip(Path(local.header.where), payload(local))
    host.die()
    restored = host.start()
    check(restored, host, 2, "shared")
    assert [each.file for each in restored.report.damage] == ["memory", "local"]
    (shared,) = (host.root / "branch-1" / "2" / "state" / "d").glob("*.image")
    flip(shared, payload(slot))
    host.die()
    restored = host.start()
    check(restored, host, 1, "memory")
    assert not restored.report.damage, "of the step that was restored"
    (lost,) = restored.report.lost
    assert lost.step == 2
    assert all(tier in lost.reason for tier in ("memory: ", "local: ", "shared: "))
    assert host.started is not None
    assert host.started.decision.kind == "fallback"
    assert host.started.decision.branch == host.started.number


def must_miss(host: Host, tier: str) -> None:
    """Step 2 is in memory, and unreadable in a tier: told of, and lost once memory is."""
    restored = host.start()
    check(restored, host, 2, "memory")
    assert [each.file for each in restored.report.damage] == [tier]
    host.die()
    (host.place / "arena-0").rename(host.place / "gone")
    restored = host.start()
    check(restored, host, 1, "shared")
    (lost,) = restored.report.lost
    assert lost.step == 2
    assert lost.reason.startswith(f"{tier}: ")


def test_a_local_image_without_a_readable_header_is_told_of(host: Host) -> None:
    host.start()
    host.to_shared(host.copy(1))
    host.to_local(host.copy(2))
    local = host.hosted().images[-1]
    assert local.tier == "local"
    flip(Path(local.header.where), 8)
    host.die()
    must_miss(host, "local")


def test_a_marker_that_cannot_be_read_in_a_further_tier(host: Host, tmp_path: Path) -> None:
    second = FileStore(tmp_path / "second")
    host.others = {"shared-2": second}
    host.start()
    host.to_shared(host.copy(1))
    copy_records(host.home, second)
    snap = host.copy(2)
    host.to_shared(snap, second)
    host.die()
    flip(tmp_path / "second" / "branch-1" / "2" / "commit_success.txt", 3)
    must_miss(host, "shared-2")


def test_a_step_of_another_run_in_a_further_tier(host: Host, tmp_path: Path) -> None:
    """It was not copied there by this run: damage, whatever its numbers say."""
    foreign = Host(tmp_path / "foreign", tmp_path / "elsewhere")
    foreign.start()
    foreign.to_shared(foreign.copy(2))
    foreign.close()
    host.others = {"shared-2": FileStore(tmp_path / "foreign")}
    host.start()
    host.to_shared(host.copy(1))
    host.die()
    (host.place / "arena-0").rename(host.place / "gone")
    restored = host.start()
    check(restored, host, 1, "shared")
    (lost,) = restored.report.lost
    assert "belongs to another run" in lost.reason


def test_images_of_an_older_run_at_the_same_location_do_not_count(host: Host) -> None:
    host.start()
    snap = host.copy(5)
    host.to_local(snap)
    host.die()
    host.root.rename(host.root.with_name("old"))
    restored = host.start()  # attempt 1 of another run: the same numbers
    assert restored.report.fresh
    host.copy(1).slot.release()
    host.die()
    check(host.start(), host, 1, "memory")
    assert host.started is not None
    assert [image.id.step for image in host.started.images] == [1]


def test_images_from_before_the_field_do_not_count(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.start()
    real = ckpt.meta.meta_of

    def older(*given: Any) -> Any:
        return {k: v for k, v in real(*given).items() if k != "decided_ns"}

    monkeypatch.setattr("hosts.meta_of", older)
    host.copy(1).slot.release()
    host.die()
    assert host.start().report.fresh


def test_images_beyond_a_fork_do_not_count(host: Host) -> None:
    host.start()
    for step in (1, 2, 3):
        host.copy(step).slot.release()
    restored = host.start("rewind", 1, batches=range(1, 2), reason="spike")
    assert (restored.step, restored.report.tier) == (1, "memory")
    assert host.rows.take() == [4, 5], "the batch of step 2 is skipped"
    assert host.started is not None
    assert [image.id.step for image in host.started.images] == [1]
    host.die()
    restored = host.start()
    assert (restored.step, restored.report.tier) == (1, "memory")
    assert host.started is not None
    assert host.started.decision.branch == 2


def test_a_step_that_only_the_host_has_can_be_asked_for(host: Host) -> None:
    host.start()
    for step in (1, 2):
        host.copy(step).slot.release()
    host.die()
    with pytest.raises(NotFound, match="step 7 is not in the lineage"):
        host.start("restore", 7, must_exist=True)
    check(host.start("restore", 1, must_exist=True), host, 1, "memory")
    assert host.started is not None
    assert host.started.decision.branch == host.started.number, "not the newest: a branch"


def test_a_start_without_resume_is_refused_while_the_host_has_steps(host: Host) -> None:
    host.start()
    host.copy(4).slot.release()
    host.die()
    with pytest.raises(Misuse, match=r"holds steps up to step 4 .*resume\(\)"):
        host.start("start")
    assert attempts.list_claims(host.home) == [1], "it was refused before the claim"


COPY = """
import sys
from pathlib import Path
from hosts import Host
from ckpt import image

host = Host(Path(sys.argv[1]), Path(sys.argv[2]))
host.start()
for step in (1, 2):
    host.copy(step).slot.release()

def slowly(target, parts, places, threads):
    target[4096:] = 7  # some of it
    print("copying", flush=True)
    sys.stdin.readline()  # killed here

image.copy_chunks = slowly
host.copy(3)
"""


def test_killed_in_the_middle_of_a_copy(host: Host) -> None:
    """Time and again: the snapshot before is there, and takes no harm from the next try."""
    for tried in range(2):
        arguments = [str(host.root), str(host.place)]
        child = subprocess.Popen(
            [sys.executable, "-c", COPY, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            start_new_session=True,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "copying\n"
        finally:
            child.kill()
            child.communicate()
        restored = host.start()
        check(restored, host, 2, "memory")
        assert not restored.report.lost, tried
        host.die()
        host.root.rename(host.root.with_name(f"before-{tried}"))

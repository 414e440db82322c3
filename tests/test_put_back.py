"""What an older attempt condemned is put back only if it was a step, and not half of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from hosts import Host, check

from ckpt import attempts, clearing, commit, layout, publishing, start
from ckpt.attempts import Listing
from ckpt.errors import Superseded
from ckpt.image import Header
from ckpt.lineage import Remain, StepId
from ckpt.store import Store
from ckpt.store_kv import KvStore

STEP = StepId(1, 1, 1)


@pytest.fixture(params=["renames", "swaps"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "run", tmp_path / "host")
    if request.param == "swaps":
        context = {"driver": "memory", "path": "run/"}
        host.home = KvStore("memory://run", context, ts.Context())  # type: ignore[assignment]
    yield host
    host.close()


def half(store: Store, header: Header, data: memoryview, *, whole: bool = False) -> None:
    """What an attempt makes of its step until it dies: the image, or all but the publishing."""
    making = publishing.of(store).making(STEP)
    commit.write_image(store, making, header, data)
    if whole:
        store.put(f"{making}/{layout.part_name(STEP.attempt, 0)}", commit.part_of(header).emit())
        commit.finish(store, STEP, [header])


def first(host: Host, *, whole: bool = False) -> None:
    """Attempt 1 copies step 1, makes half of it at home, and dies. Its image stays."""
    host.start()
    snap = host.copy(1)
    half(host.home, snap.header, snap.slot.buffer[: snap.header.size_bytes], whole=whole)
    host.die()


def between(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """`act` happens once, between the listing of the next start and its roll-forward."""
    real = clearing.roll_forward

    def roll_forward(store: Store, owner: int, listing: Listing) -> list[str]:
        monkeypatch.setattr(clearing, "roll_forward", real)
        act()
        return real(store, owner, listing)

    monkeypatch.setattr(clearing, "roll_forward", roll_forward)


def lines(host: Host, number: int) -> list[str]:
    return clearing.roll_forward(host.home, number, attempts.list_run(host.home))


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_never_committed_is_no_step_to_put_back(
    host: Host, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 2 takes over what 1 left, while 3, which has listed it, goes on from the image."""
    first(host, whole=whole)
    second = attempts.claim(host.home, "resume")
    listing = attempts.list_run(host.home)
    assert [remain.state for remain in listing.remains] == ["making"]

    def take_over() -> None:
        with pytest.raises(Superseded):
            clearing._remove(host.home, listing.remains[0], second)

    between(monkeypatch, take_over)
    check(host.start(), host, 1, "memory")
    assert host.started is not None
    assert (host.started.number, host.started.decision.parent) == (3, STEP)
    left = attempts.list_run(host.home)
    # By swaps 3 may publish what was whole, though 2 has condemned it since.
    published = whole and not host.home.renames
    wanted = [] if published else [("deleted", second)]
    assert [(r.state, r.attempt) for r in left.remains] == wanted
    host.die()

    fourth = attempts.claim(host.home, "resume")
    told = lines(host, fourth)
    found = attempts.list_run(host.home)
    assert (found.damaged, found.remains) == ((), ()), told
    # Where a name tells the state, what was whole is as good as committed.
    assert found.steps == ((STEP,) if whole else ())
    back = "put" if whole else "removed"
    assert [line.split()[0] for line in told] == ([] if published else [back])
    check(host.start(), host, 1, "memory")


def test_what_was_committed_is_put_back(host: Host) -> None:
    """Attempt 1 condemns what 2 has gone on from, and dies before its look."""
    host.start()
    host.to_shared(host.copy(1))
    host.die()
    check(host.start(), host, 1, "memory")
    host.die()
    publishing.of(host.home).condemn(STEP, 1)
    assert attempts.list_run(host.home).steps == ()
    assert lines(host, attempts.claim(host.home, "resume")) == [f"put back {STEP}"]
    found = attempts.list_run(host.home)
    assert (found.steps, found.damaged, found.remains) == ((STEP,), (), ())
    check(host.start(step=1), host, 1, "memory")


@pytest.mark.parametrize("wrong", ["other", "torn", "empty"])
def test_a_marker_that_is_not_that_of_the_step_proves_nothing(host: Host, wrong: str) -> None:
    host.start()
    host.to_shared(host.copy(1))
    host.die()
    host.start()
    host.die()
    ways = publishing.of(host.home)
    ways.condemn(STEP, 1)
    (remain,) = attempts.list_run(host.home).remains
    assert ways.was_committed(STEP, remain)
    assert not ways.was_committed(StepId(1, 1, 2), remain), "the same number, of another attempt"
    key = f"{remain.name}/{layout.MARKER}"
    other = layout.Marker(StepId(1, 1, 7), "0" * 32).emit()
    host.home.put(key, {"other": other, "torn": host.home.read(key)[:-9], "empty": b""}[wrong])
    assert not ways.was_committed(STEP, remain)
    host.home.delete(key)
    assert not ways.was_committed(STEP, remain)


def test_a_whole_remain_of_a_step_that_stands_is_removed(tmp_path: Path) -> None:
    """Attempt 1 wakes and makes once more what is there; then it is condemned under its name."""
    host = Host(tmp_path / "run", tmp_path / "host")
    host.start()
    snap = host.copy(1)
    host.to_shared(snap)
    header, data = snap.header, memoryview(bytes(snap.slot.buffer[: snap.header.size_bytes]))
    host.die()
    host.start()
    host.close()
    half(host.home, header, data, whole=True)
    host.home.move(layout.making_name(1, 1, 1), layout.deleted_name(1, 1, 1))
    assert [r.state for r in attempts.list_run(host.home).remains] == ["deleted"]
    told = lines(host, attempts.claim(host.home, "resume"))
    assert told == [f"removed {layout.deleted_name(1, 1, 1)}"]
    found = attempts.list_run(host.home)
    assert (found.steps, found.remains) == ((STEP,), ())


@pytest.mark.parametrize("by", [2, 4])
def test_of_two_that_are_condemned_the_whole_one_is_put_back(
    by: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 1 wakes and makes half of a step that is there already; both are condemned."""
    host = Host(tmp_path / "run", tmp_path / "host")
    host.start()
    snap = host.copy(1)
    header, data = snap.header, memoryview(bytes(snap.slot.buffer[: snap.header.size_bytes]))
    host.to_shared(snap)
    host.close()  # nobody has its image any more
    host.started = None
    for number in (2, 3, 4):
        assert attempts.claim(host.home, "resume") == number
    ways = publishing.of(host.home)
    real = start.Start._load_here

    def condemned(self: start.Start, *args: Any) -> Any:
        monkeypatch.setattr(start.Start, "_load_here", real)
        half(host.home, header, data)
        ways.take_over(Remain(1, 1, 1, "making", layout.making_name(1, 1, 1)), by)
        ways.condemn(STEP, 3)
        return real(self, *args)

    monkeypatch.setattr(start.Start, "_load_here", condemned)
    check(host.start(), host, 1, "shared")
    assert attempts.list_run(host.home).steps == (STEP,)
    host.close()

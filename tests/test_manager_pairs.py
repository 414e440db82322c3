"""Two managers that take each other for processes of one job: threads, over a board in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from board_members import Board, Member, at_once

import ckpt
from ckpt.image import Header
from ckpt.local import LocalImages
from ckpt.snapshot import Snapshot
from ckpt.windows import Source


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(3000, step, np.float32)}


class Pair:
    """Who is who is told by the name of the thread, since a manager asks JAX."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._here = threading.local()
        self.meeting = threading.Barrier(2, timeout=60)
        monkeypatch.setattr("ckpt.manager.of_run", lambda location: self._here.member)
        monkeypatch.setattr(jax, "process_index", lambda: self._here.member.index)

    def manager(self, member: Member, *tiers: Any, **options: Any) -> ckpt.CheckpointManager:
        self._here.member = member
        return ckpt.CheckpointManager(
            *tiers, arena=self.root / "arena", writer="thread", **{"timeout_s": 60, **options}
        )

    def play(self, act: Callable[[Member], Any]) -> list[Any]:
        """What both saw, without an error."""
        found = at_once(act, 2, board=Board())
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found

    @property
    def steps(self) -> list[int]:
        return ckpt.open(self.root / "run").all_steps()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(tmp_path, monkeypatch)


def test_a_save_that_tells_of_an_earlier_one_has_begun_all_the_same(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others must not be told that the part of this one will not come."""
    write = LocalImages.write

    def fail(images: LocalImages, header: Header, data: Source) -> None:
        if images.index == 0 and header.meta["step"] == 1:
            raise ckpt.StoreFailed("the disk of process 0")
        write(images, header, data)

    monkeypatch.setattr(LocalImages, "write", fail)

    def act(member: Member) -> None:
        local = ckpt.Local(pair.root / "local", patience_s=0)
        with pair.manager(member, local, ckpt.Shared(pair.root / "run")) as m:
            m.resume()
            first = m.save(1, state_of(1))
            assert first is not None
            first.wait("shared", timeout=60)
            assert first.ended(60)
            with pytest.raises(ckpt.CheckpointError, match="the disk of process 0"):
                m.save(2, state_of(2))
            m.wait_until_finished(60)
            pair.meeting.wait()

    pair.play(act)
    assert pair.steps == [1, 2]


def test_snapshots_that_a_peer_never_took_hold_no_slots(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not in the memory of all processes is of no use, and there are few slots."""

    def act(member: Member) -> None:
        tiers = (ckpt.Memory(), ckpt.Shared(pair.root / "run", every=100))
        with pair.manager(member, *tiers, timeout_s=10) as m:
            m.resume()
            for step in range(1, 5):
                if member.index == 1:
                    with monkeypatch.context() as patch:
                        patch.setattr(m._saves, "save", _no_memory)
                        with pytest.raises(MemoryError):
                            m.save(step, state_of(step))
                else:
                    pending = m.save(step, state_of(step))
                    assert pending is not None
                    with pytest.raises(ckpt.PeerFailed, match="no memory for it"):
                        pending.wait(timeout=60)
            pair.meeting.wait()
            m.save(100, state_of(100)).wait(timeout=60)  # type: ignore[union-attr]
            assert m.status().slots_free == m.status().slots - 1
            pair.meeting.wait()

    pair.play(act)
    assert pair.steps == [100]


def _no_memory(*_: Any) -> Snapshot:
    raise MemoryError("no memory for it")


def test_what_did_not_reach_all_memories_goes_with_the_attempt(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(member: Member) -> None:
        tiers = (ckpt.Memory(keep=ckpt.Keep(last=2)), ckpt.Shared(pair.root / "run", every=2))
        with pair.manager(member, *tiers) as m:
            m.resume()
            m.save(2, state_of(2)).wait(timeout=60)  # type: ignore[union-attr]
            # As if the acknowledgements of step 3 had been lost on their way.
            with monkeypatch.context() as patch:
                patch.setattr(m._saves._in_memory, "reached", lambda id: None)
                m.save(3, state_of(3)).wait(timeout=60)  # type: ignore[union-attr]
                pair.meeting.wait()
            m.rewind(3)
            m.rewind(2)
            m.save(4, state_of(4)).wait(timeout=60)  # type: ignore[union-attr]
            assert m.status().slots_free == m.status().slots - 2
            pair.meeting.wait()

    pair.play(act)
    assert pair.steps == [2, 4]


def test_what_is_in_memory_only_is_brought_out_though_one_closes_late(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.backend.GRACE_S", 0.4)  # their writers wait for half as long

    def act(member: Member) -> None:
        m = pair.manager(member, ckpt.Memory(), ckpt.Shared(pair.root / "run", every=100))
        m.resume()
        m.save(7, state_of(7)).wait(timeout=60)  # type: ignore[union-attr]
        if member.index == 1:
            time.sleep(1.5)
        m.close()

    pair.play(act)
    assert pair.steps == [7]
    assert list((pair.root / "arena").glob("*")) == []


def test_who_closes_after_an_error_is_not_waited_for(pair: Pair) -> None:
    def act(member: Member) -> None:
        m = pair.manager(member, ckpt.Memory(), ckpt.Shared(pair.root / "run", every=100))
        m.resume()
        m.save(7, state_of(7)).wait(timeout=60)  # type: ignore[union-attr]
        if member.index == 0:
            m.close()
            return
        with pytest.raises(ZeroDivisionError), m:
            raise ZeroDivisionError

    pair.play(act)
    assert pair.steps == [7]


def test_a_step_that_cannot_be_is_forgotten_but_not_what_one_tier_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that do not belong together are none of a step; others can be gone on from."""

    def act(member: Member) -> list[int]:
        tiers = (ckpt.Memory(), ckpt.Shared(pair.root / "run"))
        with pair.manager(member, *tiers, timeout_s=10) as m:
            m.resume()
            tree = {**state_of(1), "host": np.zeros(3 + member.index)}
            with pytest.raises(ckpt.Damaged):
                m.save(1, tree).wait(timeout=60)  # type: ignore[union-attr]
            pair.meeting.wait()
            with monkeypatch.context() as patch:
                if member.index == 0:
                    patch.setattr("ckpt.commit.publish", _not_now)
                pair.meeting.wait()
                with pytest.raises(ckpt.CheckpointError, match="not now"):
                    m.save(2, state_of(2)).wait(timeout=60)  # type: ignore[union-attr]
                pair.meeting.wait()
            return sorted(image.id.step for image in m._saves.host_images().images)

    assert pair.play(act) == [[2], [2]]


def _not_now(*_: Any, **__: Any) -> None:
    raise ckpt.AlreadyExists("not now")

"""When does a tier have a step? Threads stand for processes, over a board in memory."""

from __future__ import annotations

import functools
import random
import threading
import time

import pytest
from board_members import Board, Member
from waiting import eventually

from ckpt.acks import Acks, matter_of
from ckpt.errors import CheckpointError, PeerFailed, StoreFailed
from ckpt.lineage import StepId
from ckpt.pending import Pending
from ckpt.processes import Alone, Processes

TIERS = ("memory", "local", "shared")


class Side:
    """One process: its acks, and what they told."""

    def __init__(self, processes: Processes, timeout_s: float = 30.0) -> None:
        self.reached: list[tuple[int, str]] = []
        self.missed: list[tuple[int, str, bool]] = []
        self.given_up: list[tuple[int, CheckpointError]] = []
        self.processes = processes
        self.acks = Acks(
            processes,
            ("shared",),
            lambda step, tier: self.reached.append((step.step, tier)),
            lambda step, tier, error, is_told: self.missed.append((step.step, tier, is_told)),
            lambda step, error: self.given_up.append((step.step, error)),
            timeout_s=timeout_s,
            extra_s=lambda tier: 0.0,
        )

    def save(self, step: int, tiers: tuple[str, ...] = TIERS) -> Pending:
        pending = Pending(step, tiers)
        self.acks.expect(id_of(step), pending)
        return pending


def id_of(step: int) -> StepId:
    return StepId(step, 1, 1)


def members(count: int, timeout_s: float = 30.0) -> list[Side]:
    board = Board()
    return [Side(Member(board, i, count), timeout_s) for i in range(count)]


def test_alone_a_share_is_the_whole() -> None:
    member = Side(Alone())
    pending = member.save(3)
    assert not pending.done()
    for tier in TIERS:
        member.acks.done(id_of(3), tier)
        assert pending.done(tier)
    assert pending.done()
    assert member.reached == [(3, tier) for tier in TIERS]


def test_a_host_tier_has_a_step_when_all_have_it() -> None:
    one, two, three = members(3)
    pendings = [each.save(3, ("local",)) for each in (one, two, three)]
    one.acks.done(id_of(3), "local")
    two.acks.done(id_of(3), "local")
    with pytest.raises(TimeoutError):
        pendings[0].wait("local", timeout=0.2)
    three.acks.done(id_of(3), "local")
    for pending in pendings:
        pending.wait("local", timeout=30)


def test_a_shared_tier_has_a_step_when_process_0_has_published_it() -> None:
    one, two = members(2)
    pendings = [one.save(3, ("shared",)), two.save(3, ("shared",))]
    two.acks.done(id_of(3), "shared")
    with pytest.raises(TimeoutError):
        pendings[1].wait(timeout=0.2)
    one.acks.done(id_of(3), "shared")
    for pending in pendings:
        pending.wait(timeout=30)


def test_a_later_step_stands_for_those_before_it_but_not_for_one_that_failed() -> None:
    one, two = members(2)
    first = [one.save(1, ("local",)), two.save(1, ("local",))]
    second = [one.save(2, ("local",)), two.save(2, ("local",))]
    two.acks.failed(id_of(1), "local", StoreFailed("the disk of two is gone"))
    two.acks.done(id_of(2), "local")
    one.acks.done(id_of(1), "local")
    one.acks.done(id_of(2), "local")
    with pytest.raises(StoreFailed, match="the disk of two"):
        first[1].wait(timeout=30)
    with pytest.raises(PeerFailed, match=r"process 1.*the disk of two"):
        first[0].wait(timeout=30)
    for pending in second:
        pending.wait(timeout=30)


def test_process_0_hears_that_a_part_will_not_come() -> None:
    one, two = members(2)
    pendings = [one.save(5, ("shared",)), two.save(5, ("shared",))]
    two.processes.matter(matter_of(id_of(5))).fail(StoreFailed("no slot"))
    eventually(lambda: one.given_up)
    assert one.given_up[0][0] == 5
    assert "process 1" in str(one.given_up[0][1])
    one.acks.failed(id_of(5), "shared", one.given_up[0][1])
    two.acks.done(id_of(5), "shared")
    for pending in pendings:
        with pytest.raises(PeerFailed):
            pending.wait(timeout=30)


def test_one_that_never_comes_is_named_in_bounded_time() -> None:
    one, two = members(2, timeout_s=0.1)
    pending = one.save(5, ("local",))
    two.save(5, ("local",))
    one.acks.done(id_of(5), "local")
    with pytest.raises(PeerFailed, match="process 1 of 2"):
        pending.wait(timeout=30)


def test_one_that_has_left_after_its_share_is_no_trouble() -> None:
    one, two = members(2)
    pending = one.save(5, ("local",))
    two.save(5, ("local",))
    two.acks.done(id_of(5), "local")
    two.processes.leave("it closed its manager")
    one.acks.done(id_of(5), "local")
    pending.wait(timeout=30)


def test_one_that_leaves_before_its_share_is_told() -> None:
    one, two = members(2)
    pending = one.save(5, ("local",))
    two.processes.leave("it raised KeyError")
    one.acks.done(id_of(5), "local")
    with pytest.raises(PeerFailed, match="it raised KeyError"):
        pending.wait(timeout=30)


Broken = dict[tuple[int, str], int]
"""(step, tier) -> the process whose share fails."""


def play(side: Side, steps: range, broken: Broken, order: random.Random) -> None:
    """The reports of one process, tier by tier in order, the tiers in any."""
    queues = {tier: list(steps) for tier in TIERS}
    while any(queues.values()):
        tier = order.choice([tier for tier, queue in queues.items() if queue])
        step = queues[tier].pop(0)
        breaks = broken.get((step, tier))
        if breaks == side.processes.index:
            side.acks.failed(id_of(step), tier, StoreFailed("drawn"))
        elif tier == "shared" and side.processes.index == 0 and breaks is not None:
            # Its part does not come: process 0 is told to give the step up.
            eventually(functools.partial(has_given_up, side, step))
            side.acks.failed(id_of(step), tier, dict(side.given_up)[step])
        else:
            side.acks.done(id_of(step), tier)
        if order.random() < 0.3:
            time.sleep(0.002)


def test_any_order_of_shares_and_failures_ends_alike_everywhere() -> None:
    seed = random.randrange(1_000_000)
    draw = random.Random(seed)
    steps = range(1, 6)
    for _ in range(15):
        group = members(draw.choice([2, 3]))
        pendings = {step: [each.save(step) for each in group] for step in steps}
        broken: Broken = {
            (step, tier): draw.randrange(len(group))
            for step in steps
            for tier in TIERS
            if draw.random() < 0.15
        }
        threads = [
            threading.Thread(target=play, args=(side, steps, broken, random.Random(draw.random())))
            for side in group
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for step in steps:
            for i, pending in enumerate(pendings[step]):
                assert pending.ended(30), f"seed {seed}: step {step}, process {i}"
                for tier in TIERS:
                    what = f"seed {seed}: step {step}, {tier}, process {i}"
                    assert failed(pending, tier) == ((step, tier) in broken), what


def has_given_up(side: Side, step: int) -> bool:
    return step in dict(side.given_up)


def failed(pending: Pending, tier: str) -> bool:
    try:
        pending.wait(tier)
    except (StoreFailed, PeerFailed):
        return True
    return False


@pytest.mark.parametrize("count", [1, 2])
def test_what_no_pending_can_tell_is_told_all_the_same(count: int) -> None:
    """A flush has no Pending, and its failure must not be lost."""
    one = Side(Alone()) if count == 1 else members(2)[0]
    one.acks.failed(id_of(3), "shared", StoreFailed("the store is down"))
    one.save(4).finish()
    one.acks.failed(id_of(4), "shared", StoreFailed("the store is down"))
    assert one.missed == [(3, "shared", False), (4, "shared", True)]

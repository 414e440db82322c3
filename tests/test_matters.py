"""What processes settle together, played by threads over a board in memory."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from board_members import Board, Member

import ckpt
from ckpt import processes
from ckpt.processes import Alone, Matter


def together(act: Any, count: int = 3, timeout_s: float = 30.0) -> list[Any]:
    """What `act(matter)` gives, or raises, in each of several threads."""
    board = Board()
    found: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            with Member(board, index, count).matter("m", timeout_s) as matter:
                found[index] = act(matter)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_decisions_and_votes_are_the_same_everywhere() -> None:
    def act(matter: Matter) -> Any:
        decided = matter.decide("a", lambda: {"by": matter.index})
        return decided, matter.gather("b", matter.index * 10)

    assert together(act) == [({"by": 0}, [0, 10, 20])] * 3


@pytest.mark.parametrize("kind", ["NotFound", "Damaged", "Misuse", "Superseded", "Mismatch"])
def test_what_process_0_finds_out_is_so_for_all(kind: str) -> None:
    def make() -> None:
        raise getattr(ckpt, kind)("because")

    found = together(lambda matter: matter.decide("a", make))
    assert [type(error).__name__ for error in found] == [kind] * 3
    assert [str(error) for error in found[1:]] == ["process 0: because"] * 2


@pytest.mark.parametrize("error", [ckpt.StoreFailed("because"), KeyError("because")])
def test_what_fails_in_process_0_is_a_failed_peer(error: Exception) -> None:
    def make() -> None:
        raise error

    found = together(lambda matter: matter.decide("a", make))
    assert found[0] is error
    for other in found[1:]:
        assert type(other) is ckpt.PeerFailed
        assert str(other) == f"process 0 failed: {type(error).__name__}: {error}"


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_everybody_hears_the_first_cause(culprit: int) -> None:
    def act(matter: Matter) -> None:
        if matter.index == culprit:
            raise ckpt.StoreFailed("disk on fire")
        try:
            matter.gather("a", 1)
        finally:
            time.sleep(0.2 * matter.index)

    found = together(act)
    assert type(found.pop(culprit)) is ckpt.StoreFailed
    for error in found:
        assert type(error) is ckpt.PeerFailed
        assert str(error) == f"process {culprit} failed: StoreFailed: disk on fire"


def test_a_silent_process_is_named_to_all() -> None:
    def act(matter: Matter) -> Any:
        if matter.index == 1:
            return "elsewhere"
        return matter.gather("a", 1)

    zero, one, two = together(act, timeout_s=0.3)
    assert one == "elsewhere"
    assert type(zero) is type(two) is ckpt.PeerFailed
    assert str(zero) == str(two)
    assert "process 1 of 3 was not heard of" in str(zero)


def test_waiting_asks_seldom() -> None:
    board = Board()
    with pytest.raises(ckpt.PeerFailed, match="process 0 of 2"):
        Member(board, 1, 2).matter("m", 0.5).decide("a", lambda: 1)
    assert board.questions < 8


def test_who_left_is_waited_for_no_more() -> None:
    def act(matter: Matter) -> Any:
        if matter.index == 1:
            matter._processes.leave("it raised ZeroDivisionError")
            return None
        return matter.gather("a", 1)

    zero, _, two = together(act)
    for error in (zero, two):
        assert type(error) is ckpt.PeerFailed
        assert str(error) == "process 1 takes no part in m any more: it raised ZeroDivisionError"


@pytest.mark.parametrize("seed", range(20))
def test_what_was_said_before_leaving_counts(seed: int) -> None:
    rng = random.Random(seed)

    def act(matter: Matter) -> Any:
        time.sleep(rng.uniform(0, 0.2))
        found = matter.decide("a", lambda: "said")
        if matter.index == 0:
            matter._processes.leave("it is done")
        return found

    assert together(act, count=2) == ["said"] * 2


def test_votes() -> None:
    """Damage of one is damage for all; any other error stops all, even where there is damage."""
    errors: list[Exception | None] = [None, ckpt.Damaged("a bit"), None]

    def act(matter: Matter) -> Any:
        def mine() -> int:
            error = errors[matter.index]
            if error is not None:
                raise error
            return matter.index

        return matter.vote("v", mine)

    found = together(act)
    assert [type(error) for error in found] == [ckpt.Damaged] * 3
    assert {str(error) for error in found} == {"process 1: Damaged: a bit"}

    errors[2] = ckpt.Damaged("a byte")
    assert {str(error) for error in together(act)} == {
        "process 1: Damaged: a bit\nprocess 2: Damaged: a byte"
    }

    errors[2] = ckpt.StoreFailed("gone")
    found = together(act)
    assert found[2] is errors[2]
    assert [type(error) for error in found[:2]] == [ckpt.PeerFailed] * 2
    assert {str(error) for error in found[:2]} == {"process 2: StoreFailed: gone"}

    errors[:] = [None, None, None]
    assert together(act) == [0, 1, 2]


def test_boards_are_numbered_for_each_coordination_service() -> None:
    first, second = object(), object()
    numbers = [processes._next_board(first, name) for name in ("a", "a", "b", "a")]
    assert numbers == [1, 2, 1, 3]
    assert processes._next_board(second, "a") == 1
    assert processes._next_board(second, "a") == 2


def test_one_process_needs_no_others() -> None:
    with Alone().matter("m") as matter:
        assert matter.decide("a", lambda: [1]) == [1]
        assert matter.gather("b", 2) == [2]
        matter.check()
        matter.forget()

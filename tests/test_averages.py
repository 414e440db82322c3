"""Means over processes that each see a value of their own, played by threads."""

from __future__ import annotations

import math
import random
import struct
import threading
import time
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import pytest
from board_members import Board, Member, at_once
from hypothesis import example, given
from hypothesis import strategies as st

import ckpt
from ckpt.averages import Averages, mean
from ckpt.processes import Alone

LAG = 2


def drive(member: Member, values: list[Any], timeout_s: float = 20.0) -> list[float]:
    """As a run does: gives each value, and takes it `LAG` values later."""
    averages = Averages(member, timeout_s)
    found = []
    error: BaseException | None = None
    try:
        for count, value in enumerate(values, 1):
            averages.give(value)
            if count > LAG:
                found.append(averages.take())
        found += [averages.take() for _ in range(min(LAG, len(values)))]
    except BaseException as caught:
        error = caught
        raise
    finally:
        averages.close(error)
    return found


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("count", [2, 5])
def test_all_take_the_same_means_whatever_their_speed(seed: int, count: int) -> None:
    rng = random.Random(seed)
    given = [[rng.uniform(0, 1) ** 9 for _ in range(60)] for _ in range(count)]
    board = Board()

    def act(member: Member) -> list[float]:
        pace = random.Random(seed + member.index)
        values = []
        for value in given[member.index]:
            values.append(Slow(value) if pace.random() < 0.2 else value)
        return drive(member, values)

    found = at_once(act, count, seed=seed, board=board)
    assert not isinstance(found[0], Exception), (seed, found[0])
    assert all(bits(each) == bits(found[0]) for each in found), seed
    assert found[0] == [mean(each) for each in zip(*given, strict=True)], seed
    # Of each round, all that is kept is what those need who are in it.
    assert board.most <= 4 * count + 4, seed
    assert len(board.texts) <= 2 * count, board.texts.keys()


class Slow:
    """A value that the device has not got ready yet."""

    def __init__(self, value: float, seconds: float = 0.005) -> None:
        self.value, self.at = value, time.monotonic() + seconds

    def is_ready(self) -> bool:
        return time.monotonic() >= self.at

    def __float__(self) -> float:
        time.sleep(max(0.0, self.at - time.monotonic()))
        return self.value


def test_giving_does_not_wait_for_the_value_nor_for_the_others() -> None:
    board, turn = Board(), threading.Event()

    class Held:
        def is_ready(self) -> bool:
            return turn.is_set()

        def __float__(self) -> float:
            assert turn.wait(20)
            return 1.0

    def act(member: Member) -> Any:
        averages = Averages(member, 20.0)
        try:
            if member.index == 0:
                for value in (Held(), Held(), Held()):
                    averages.give(value)
                turn.set()  # only now can they be read
            else:
                turn.wait(20)
                for value in (2.0, 3.0, 4.0):
                    averages.give(value)
            return [averages.take() for _ in range(3)]
        finally:
            averages.close()

    assert at_once(act, 2, board=board) == [[1.5, 2.0, 2.5]] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_that_is_not_finite_is_so_for_all(bad: float) -> None:
    found = at_once(lambda member: drive(member, [1.0, bad if member.index == 1 else 2.0, 3.0]))
    for each in found:
        assert (each[0], each[2]) == (1.0, 3.0)
        assert repr(each[1]) == repr(bad)


LARGEST = 1.7976931348623157e308


@given(st.lists(st.floats() | st.sampled_from([LARGEST, -LARGEST]), min_size=1, max_size=9))
@example([LARGEST] * 3)
@example([LARGEST, LARGEST, 0.0])
def test_the_mean_is_finite_exactly_when_all_values_are(values: list[float]) -> None:
    found = mean(values)
    assert math.isfinite(found) == all(map(math.isfinite, values))
    if math.isfinite(found):
        assert min(values) <= found <= max(values)
        exact = sum(map(Fraction, values)) / len(values)
        error = abs(Fraction(found) - exact)
        assert error <= max(map(abs, map(Fraction, values))) * Fraction(1, 2**50) + Fraction(1e-300)


def test_what_was_dropped_is_never_taken() -> None:
    """After a rewind the values on their way are of no use."""

    def act(member: Member) -> list[float]:
        averages = Averages(member, 20.0)
        try:
            for value in (1.0, 2.0, 3.0):
                averages.give(value + member.index)
            first = averages.take()
            averages.drop()
            for value in (10.0, 20.0):
                averages.give(value + member.index)
            return [first, averages.take(), averages.take()]
        finally:
            averages.close()

    for seed in range(5):
        assert at_once(act, 3, seed=seed) == [[2.0, 11.0, 21.0]] * 3, seed


def test_one_process_reads_a_value_when_it_is_taken() -> None:
    reads = []

    class Value:
        def __float__(self) -> float:
            reads.append(1)
            return 4.0

    before = threading.active_count()
    averages = Averages(Alone())
    assert threading.active_count() == before
    averages.give(Value())
    averages.give(jnp.float32(0.5))
    assert reads == []
    assert averages.take() == 4.0
    averages.drop()
    averages.give(2)
    assert averages.take() == 2.0
    averages.close()


def test_a_process_that_fails_is_named_to_those_who_wait() -> None:
    def act(member: Member) -> list[float]:
        if member.index == 1:
            return drive(member, [1.0, 2.0, 3.0, Broken(), 5.0, 6.0])
        return drive(member, [1.0] * 20)

    zero, one, two = at_once(act)
    assert type(one) is ZeroDivisionError
    for error in (zero, two):
        assert type(error) is ckpt.PeerFailed
        assert str(error) == "process 1 failed: ZeroDivisionError: on the device"


class Broken:
    def __float__(self) -> float:
        raise ZeroDivisionError("on the device")


def test_an_error_in_the_loop_of_one_is_told_to_the_others() -> None:
    def act(member: Member) -> Any:
        averages = Averages(member, 20.0)
        error: BaseException | None = None
        try:
            for count in range(30):
                averages.give(float(count))
                if member.index == 2 and count == 10:
                    raise KeyError("mine")
                averages.take()
        except BaseException as caught:
            error = caught
            raise
        finally:
            averages.close(error)

    zero, one, two = at_once(act)
    assert type(two) is KeyError
    for each in (zero, one):
        assert type(each) is ckpt.PeerFailed
        assert "process 2 failed: KeyError: 'mine'" in str(each)


def test_one_that_left_the_run_is_waited_for_no_more() -> None:
    def act(member: Member) -> Any:
        if member.index == 1:
            drive(member, [1.0])
            member.leave("it closed its manager")
            return None
        return drive(member, [1.0, 2.0, 3.0, 4.0])

    zero, _, two = at_once(act)
    for error in (zero, two):
        assert type(error) is ckpt.PeerFailed
        assert "process 1 takes no part" in str(error)
        assert "it closed its manager" in str(error)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_silent_process_is_named_in_time(silent: int) -> None:
    def act(member: Member) -> Any:
        if member.index == silent:
            return None
        return drive(member, [1.0, 2.0, 3.0], timeout_s=0.5)

    found = at_once(act)
    del found[silent]
    for error in found:
        assert type(error) is ckpt.PeerFailed
        assert f"process {silent} of 3 gave no value within" in str(error)


def test_a_board_that_is_gone_is_told_and_no_thread_stays() -> None:
    board = Board()

    def act(member: Member) -> Any:
        averages = Averages(member, 20.0)
        try:
            averages.give(1.0)
            averages.take()
            board.gone = True
            averages.give(2.0)
            return averages.take()
        finally:
            averages.close(KeyError())

    for error in at_once(act, 2, board=board):
        assert type(error) is ckpt.PeerFailed
        assert "the board is gone" in str(error)
    assert not [each for each in threading.enumerate() if each.name == "ckpt-averages"]


def test_several_one_after_another_on_a_board_do_not_meet() -> None:
    def act(member: Member) -> Any:
        return [drive(member, [n + member.index * 1.0, 5.0]) for n in range(4)]

    assert at_once(act, 2) == [[[n + 0.5, 5.0] for n in range(4)]] * 2

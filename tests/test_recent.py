"""What is kept of costly values, and that each is made once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import eventually

from datapipe.recent import Recent


@given(st.lists(st.integers(0, 6)), st.integers(1, 4))
def test_the_most_recently_used_are_kept(keys: list[int], limit: int) -> None:
    recent: Recent[int, tuple[int]] = Recent(limit)
    made: list[int] = []
    order: list[int] = []

    def make(key: int) -> tuple[int]:
        made.append(key)
        return (key,)

    for key in keys:
        wanted = [*made, key] if key not in order[-limit:] else [*made]
        assert recent.get(key, make) == (key,)
        assert made == wanted
        order = [*(each for each in order if each != key), key]


def test_threads_wait_for_the_one_that_makes_it() -> None:
    recent: Recent[str, object] = Recent(2)
    began, goes_on = threading.Event(), threading.Event()
    found: list[object] = []

    def make(key: str) -> object:
        began.set()
        assert goes_on.wait(60)
        return object()

    def second(key: str) -> object:
        raise AssertionError("made twice")

    threads = [
        threading.Thread(target=lambda make=make: found.append(recent.get("a", make)))
        for make in (make, second, second)
    ]
    threads[0].start()
    assert began.wait(60)
    for thread in threads[1:]:
        thread.start()
    goes_on.set()
    eventually(lambda: len(found) == 3)
    assert len({*map(id, found)}) == 1


def test_a_failure_is_not_kept() -> None:
    recent: Recent[int, int] = Recent(2)
    with pytest.raises(ZeroDivisionError):
        recent.get(0, lambda key: 1 // key)
    assert recent.get(0, lambda key: key) == 0

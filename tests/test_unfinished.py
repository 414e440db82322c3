"""What a writer has not ended when it dies, and how lines are put together from pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import Damaged, PeerFailed, StoreFailed
from ckpt.lineage import Reach, StepId
from ckpt.lines import Lines
from ckpt.messages import (
    Abandon,
    Begin,
    Close,
    Done,
    Failed,
    Flush,
    Job,
    Note,
    Noted,
    Released,
    Settle,
    Settled,
    Trouble,
)
from ckpt.unfinished import Unfinished

LINE = (Reach(1, 1, -1, None),)


def test_the_ledger_knows_what_is_left() -> None:
    left, one, two = Unfinished(), StepId(1, 1, 1), StepId(2, 1, 1)
    begin, abandon = Begin(1, LINE), Abandon(two, PeerFailed("gone"))
    for message in (begin, Job(one, ("local", "shared"), 0), Job(two, ("shared",), 1), abandon):
        left.told(message)
    left.told(Note({"event": "lost"}))
    left.told(Note({"event": "kept"}), reachable=False)
    for report in (Done(one, "local"), Released(one, 0), Trouble("shared", "down", 1)):
        left.heard(report)
    assert left.at_death() == [Trouble("shared", "")]
    again = [begin, Job(one, ("shared",), None), Job(two, ("shared",), 1), abandon]
    assert left.again() == [*again, Note({"event": "kept"})]
    left.heard(Done(two, "shared"))
    assert left.at_death() == [Released(two, 1)], "its reports were cut short"
    left.told(Settle(1))
    left.told(Settle(2))
    left.heard(Settled(1))
    left.told(Flush())
    left.told(Close())
    assert left.again() == [*again[:2], Flush(), Settle(2), Close()]
    error = StoreFailed("no writer")
    assert left.failed(error) == [Failed(one, "shared", error), Settled(2)]
    assert (left.jobs, left.again()) == (0, [begin, Flush(), Close()])


def test_late_metrics_are_kept_until_they_are_in_the_log() -> None:
    left = Unfinished()
    notes = [Note({"event": "metrics", "time_ns": n, "metrics": {"eval": n}}) for n in (1, 2)]
    for note in notes:
        left.told(note)
    left.heard(Noted(1))
    assert left.again() == [notes[1]], "which no log has yet, though it was told"
    error = StoreFailed("no writer")
    assert left.failed(error) == []
    assert left.again() == [notes[1]], "for another writer"
    left.told(Close())
    assert left.failed(error) == [Noted(2, error)]
    assert (left.metrics, left.again()) == (0, [Close()])


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), max_size=40))
def test_the_ledger_ends_every_save_once(reports: list[tuple[int, str]]) -> None:
    """Whatever was reported before the writer was given up."""
    left = Unfinished()
    wanted = {(StepId(k, 1, 1), tier) for k in range(4) for tier in "abc"}
    for k in range(4):
        left.told(Job(StepId(k, 1, 1), ("a", "b", "c"), k))
    ended, free = set(), set()
    for k, tier in dict.fromkeys(reports):
        left.heard(Done(StepId(k, 1, 1), tier))
        ended.add((StepId(k, 1, 1), tier))
        if tier == "a":
            left.heard(Released(StepId(k, 1, 1), k))
            free.add(k)
    last = left.at_death() + left.failed(StoreFailed("no writer"))
    failed = [(each.id, each.tier) for each in last if isinstance(each, Failed)]
    slots = [each.slot for each in last if isinstance(each, Released)]
    assert sorted(failed, key=repr) == sorted(wanted - ended, key=repr)
    assert sorted(slots) == sorted(set(range(4)) - free)
    assert left.jobs == 0


def test_lines_are_put_together_from_pieces() -> None:
    whole = b"one\n\ntwo, longer\nthree"
    for size in range(1, len(whole) + 1):
        lines = Lines()
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        assert [line for p in pieces for line in lines.feed(p)] == [b"one", b"", b"two, longer"]


def test_no_line_grows_without_end() -> None:
    lines = Lines(limit_bytes=10)
    lines.feed(b"0123456789")
    with pytest.raises(Damaged, match="more than 10 bytes"):
        lines.feed(b"0")

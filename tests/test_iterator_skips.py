"""Skips and seeks of an iterator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from number_batches import flat, numbers, taken

from datapipe import Mismatch, Misuse


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(0, 60), st.integers(1, 30), st.integers(0, 4))
def test_skip_discards_what_was_made_ahead(delivered, start, length, prefetch):
    pipe = numbers(remainder="keep")
    every = flat(pipe)
    with pipe.iterator(prefetch=prefetch, window=3) as iterator:
        served = flat(taken(iterator, delivered))
        iterator.skip([(start, start + length)])
        rest = flat(iterator)
    at = len(served)
    kept = [e for e in range(at, len(every)) if not start <= e < start + length]
    assert served == every[:at]
    assert rest == [every[e] for e in kept]


def test_skips_are_in_the_state_and_unite():
    pipe = numbers()
    iterator = pipe.iterator()
    iterator.skip([(20, 24), (8, 10)])
    iterator.skip([(10, 12)])
    assert iterator.get_state()["skips"] == [8, 4, 8, 4]
    next(iterator)
    restored = pipe.iterator()
    restored.skip([(0, 4)])  # a state says all: its skips replace those here
    restored.set_state(iterator.get_state())
    assert restored.get_state()["skips"] == [8, 4, 8, 4]
    np.testing.assert_equal(list(restored), list(iterator))
    # An older state and a newer ledger: the manager adds what it knows.
    restored.set_state(pipe.iterator().get_state())
    restored.skip([(8, 12)])
    assert not set(range(8, 12)) & set(np.concatenate(restored.plan.examples(0, 3)).tolist())


@pytest.mark.parametrize("other", [1, 3, 5, 8])
def test_skip_then_change_the_batch_size(other):
    """After a spike people lower the batch size: the same examples stay skipped."""
    iterator = numbers(40, batch_size=4, epochs=2).iterator()
    taken(iterator, 3)
    state = iterator.get_state()
    ranges = iterator.span(state, 2, 5)
    assert ranges == [(20, 32)]
    iterator.skip(ranges)
    changed = numbers(40, batch_size=other, epochs=2, remainder="keep").iterator()
    changed.set_state(iterator.get_state())
    every = flat(numbers(40, batch_size=4, epochs=2))
    assert flat(changed) == every[12:20] + every[32:]


def test_a_rewind_serves_what_the_run_without_the_bad_batches_serves():
    """Save at 3, see a spike in batches 6 and 7, go back, skip them: nothing else is different."""
    pipe = numbers(40, epochs=2)
    wanted = list(pipe)
    iterator = pipe.iterator(prefetch=4)
    taken(iterator, 3)
    state = iterator.get_state()
    taken(iterator, 9)
    iterator.set_state(state)
    iterator.skip(iterator.span(state, 3, 5))
    np.testing.assert_equal(list(iterator), wanted[3:6] + wanted[8:])


def test_span_counts_under_the_skips_of_the_state():
    iterator = numbers(40).iterator()
    iterator.skip([(6, 10)])
    state = iterator.get_state()
    iterator.skip([(0, 100)])
    assert iterator.span(state, 0, 1) == [(0, 4)]
    assert iterator.span(state, 1, 3) == [(4, 6), (10, 16)]
    with pytest.raises(Mismatch):
        numbers(seed=8).iterator().span(state, 0, 1)


def test_seek():
    pipe = numbers(remainder="keep")
    every = flat(pipe)
    iterator = pipe.iterator()
    for example in (50, 0, 3, len(every) - 1, len(every)):
        iterator.seek(example)
        assert iterator.next_example == example
        assert flat(iterator) == every[example:]
    with pytest.raises(Misuse, match=r"an example must be an integer in \[0, 69\], found 70"):
        iterator.seek(70)
    assert iterator.batch_size == 4

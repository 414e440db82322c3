"""How many batches are read at once, and by whom."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from memory_source import Columns, Records, number

from datapipe import Pipeline
from datapipe.batches import window
from datapipe.prefetch import prefetcher


class Readers(Records):
    """Remembers which threads read."""

    def __init__(self, count):
        super().__init__(count)
        self.threads = []

    def read(self, indices):
        self.threads.append(threading.current_thread())
        return super().read(indices)


@pytest.mark.parametrize("worth_a_thread", [False, True])
def test_what_is_read_in_no_time_is_read_without_a_thread(worth_a_thread, monkeypatch):
    monkeypatch.setattr(window, "AT_ONCE_S", 0.0 if worth_a_thread else 60.0)
    source = Readers(1000)
    pipe = Pipeline(source, batch_size=4, seed=1, epochs=1)
    with pipe.iterator(window=4) as iterator:
        found = list(iterator)
    here = [thread is threading.main_thread() for thread in source.threads]
    assert not here[0]  # nothing is known yet
    assert any(here) is not worth_a_thread
    assert all(here[1:]) is not worth_a_thread
    plan = pipe.plan
    for batch, records in zip(found, map(plan.records, range(len(found))), strict=True):
        np.testing.assert_equal([number(each) for each in batch], records)


def test_functions_are_worth_a_thread_however_fast_the_source_is(monkeypatch):
    monkeypatch.setattr(window, "AT_ONCE_S", 60.0)
    source = Readers(400)
    pipe = Pipeline(source, batch_size=4, seed=1, epochs=1).map(number, version="1")
    with pipe.iterator(window=4) as iterator:
        list(iterator)
    assert threading.main_thread() not in source.threads


@pytest.mark.parametrize("workers", [0, 1])
def test_a_window_has_a_size_in_bytes(workers, monkeypatch):
    """`Columns` takes 8 bytes of numbers, 8 of rows, and a few of text, for each record."""
    monkeypatch.setattr(prefetcher, "WINDOW_BYTES", 3 * 64 * 24)
    sizes = []
    opened = prefetcher.Prefetcher._open

    def noted(self):
        before = self._planned_to
        found = opened(self)
        sizes.append((self._planned_to - before) // 64)
        return found

    monkeypatch.setattr(prefetcher.Prefetcher, "_open", noted)
    with Pipeline(Columns(6400), batch_size=64, seed=1, epochs=1).iterator(workers=workers) as it:
        assert len(list(it)) == 100
    # Several windows are begun before the first batch is there, by workers above all.
    assert set(sizes[6:]) <= {0, 1, 2, 3}
    assert 3 in sizes[6:]


def test_a_batch_larger_than_a_window_may_be_is_one_alone(monkeypatch):
    monkeypatch.setattr(prefetcher, "WINDOW_BYTES", 16)
    source = Records(640)
    with Pipeline(source, batch_size=16, seed=1, epochs=1).iterator(prefetch=0) as iterator:
        assert len(list(iterator)) == 40
    assert [len(call) for call in source.calls] == [16, *[16] * 39]

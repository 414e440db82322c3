"""Skipped records that do not come back: in pipelines, far away, in large numbers."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grain
import numpy as np
import pytest
from document_source import Documents
from memory_source import Records, number

from datapipe import Concatenate, Kept, Mismatch, Pipeline
from datapipe.integers import LIMIT
from datapipe.order import lasting_skips as lasting_module
from datapipe.order.examples import Examples, Segment
from datapipe.order.lasting_skips import LastingSkips
from datapipe.order.permute import Permutation
from datapipe.order.plan import Plan
from datapipe.order.skips import Skips
from datapipe.order.streams import Stream
from formats.errors import Misuse


def made(**options):
    options = {"batch_size": 5, "seed": 4, "epochs": 4, "skip_records": True, **options}
    return Pipeline(options.pop("source", Records(33)), **options)


def records(batches):
    return [number(record) for batch in batches for record in batch]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("remainder", ["carry", "keep", "drop"])
def test_what_is_skipped_does_not_come_back(prefetch, remainder):
    batches = made(remainder=remainder).iterator(prefetch=prefetch)
    plan = batches.plan
    for _ in range(9):  # into the second epoch
        next(batches)
    gone = set(plan.records(range(10, 12)).tolist())
    batches.skip(plan.addresses(plan.span(0, 10, 12)))
    at = batches.next_example
    rest = records(batches)
    assert len(gone) == 10
    assert not gone & set(rest)
    wanted, epoch = [], at // 33
    for epoch in range(at // 33, 4):
        order = Permutation(33, seed=4, epoch=epoch)(np.arange(33)).tolist()
        left = [r for r in order[max(0, at - 33 * epoch) :] if r not in gone]
        full = len(left) // 5 * 5 if remainder == "drop" else len(left)
        wanted += left[:full]
    assert rest == (wanted[: len(wanted) // 5 * 5] if remainder == "carry" else wanted)


def test_resumed_anywhere_the_rest_is_the_same():
    batches = made().iterator()
    batches.skip([(3, 9), (40, 44)])
    states, served = [batches.get_state()], []
    for batch in batches:
        served += [number(record) for record in batch]
        states.append(batches.get_state())
    for k in range(0, len(states), 4):
        again = made().iterator(prefetch=0, window=1 + k % 3)
        again.set_state(json.loads(json.dumps(states[k])))
        assert again.get_state() == states[k]
        assert records(again) == served[5 * k :]
    assert states[0]["skips"] == [3, 6, 31, 4]


def test_states_of_both_ways_are_told_apart():
    lasts, comes_back = made().iterator(), made(skip_records=False).iterator()
    with pytest.raises(Mismatch, match=r"plan\.skips: saved 'records', here nothing"):
        comes_back.set_state(lasts.get_state())
    with pytest.raises(Mismatch, match=r"plan\.skips: saved nothing, here 'records'"):
        lasts.set_state(comes_back.get_state())


@pytest.mark.parametrize(
    "options",
    [
        {"source": Documents([3] * 40), "pack": Concatenate(4, lengths="length")},
        {"source": grain.MapDataset.range(33).shuffle(seed=1)},
        {"source": grain.MapDataset.range(33).shuffle(seed=1), "filter": Kept.of_ids(range(9), 33)},
    ],
)
def test_what_the_epoch_decides_does_not_last(options):
    with pytest.raises(Misuse, match="skip_records: an item of source may be another one"):
        made(**options)


def test_all_records_skipped_is_the_end():
    batches = made(epochs=None).iterator()
    batches.skip([(33, 66)])
    assert len(records(batches)) == 30  # the first epoch, and no full batch behind it
    kept = made(epochs=None, remainder="keep").iterator()
    kept.skip([(33, LIMIT)])
    assert len(records(kept)) == 33


def test_too_many_are_refused(monkeypatch):
    monkeypatch.setattr(lasting_module, "LIMIT_ITEMS", 1000)
    plan = Plan.of(10**9, 8, seed=1)
    wide = [(5, 5 + 1001)]
    assert plan.skipping(wide).skips
    lasts = Plan(plan.order, 8, skip_records=True)
    assert lasts.skipping([(5, 1005)]).skips
    with pytest.raises(Misuse, match="at most 1000 skipped records of a source, found 1001: leave"):
        lasts.skipping(wide)
    # Epochs without a record left do not count one by one.
    little = Plan(Examples.of(7, 1), 2, skip_records=True).skipping([(3, 10**17)])
    assert [batch.tolist() for batch in little.examples(0, 5)] == [[0, 1]]


# -- far away --------------------------------------------------------------------------------------


class Counted:
    """How many epochs had their order looked at."""

    def __init__(self, monkeypatch):
        self.epochs = []
        order_of = Stream.order_of

        def counted(stream, epoch):
            self.epochs.append(epoch)
            return order_of(stream, epoch)

        monkeypatch.setattr(Stream, "order_of", counted)


@pytest.mark.parametrize("remainder", ["carry", "keep", "drop"])
def test_far_away_costs_what_near_costs(monkeypatch, remainder):
    skips = Skips.of((i * 900_000, i * 900_000 + 3) for i in range(1000))
    plan = Plan(Examples.of(10**9, seed=3), 256, remainder, (skips,), skip_records=True)
    at = 2 * 10**17 + 123_456_789
    counted = Counted(monkeypatch)
    batches = plan.examples(at, 3)
    rows = plan.rows(10**15)
    after = plan.advance(at, 10**9)
    assert len(counted.epochs) < 20
    gone = Permutation(10**9, seed=3)(np.array([e for a, b in skips.ranges for e in range(a, b)]))
    assert not np.isin(plan.locate(np.concatenate(batches)).items, gone).any()
    left = 10**9 - 3000
    if remainder == "carry":
        first = 10**15 * 256
        epoch, inside = divmod(first, left)
        order = Permutation(10**9, seed=3, epoch=epoch)
        positions = np.sort(order.inverse(gone))
        found = np.setdiff1d(np.arange(inside, inside + 3300), positions)
        before = np.searchsorted(positions, inside)  # fewer than it takes, one step is enough
        wanted = found[found - np.searchsorted(positions, found) >= inside][:256]
        assert before < 3300
        assert rows.items.tolist() == order(wanted).tolist()
    assert (np.diff(np.concatenate(batches)) >= 1).all()
    assert after > at + 256 * 10**9


def test_far_away_in_a_mixture(monkeypatch):
    segments = tuple(
        Segment(i * 10**6, (10**9 + i * 10, 10**6 + i, 77), (2000 + i, 1000, 3)) for i in range(9)
    )
    skips = tuple(Skips.of((i * 10**4 + s, i * 10**4 + 9) for i in range(300)) for s in range(3))
    plan = Plan(Examples(segments, seed=3), 256, skips=skips, skip_records=True)
    plan.records(0)  # which items are left out
    counted = Counted(monkeypatch)
    assert plan.records(10**14).size == 256
    assert plan.advance(0, 10**14) > 256 * 10**14
    assert len(counted.epochs) < 60
    (last,) = plan.examples(plan.advance(10**15, 10**5))
    assert last.size == 256
    assert plan._ranks.rank(int(last[0])) == plan._ranks.rank(10**15) + 256 * 10**5


@pytest.mark.parametrize("shuffle", ["global", "blocks"])
def test_a_plan_that_was_used_goes_to_another_process(shuffle):
    plan = made(shuffle=shuffle, remainder="keep").plan.skipping([(3, 9), (40, 44)])
    wanted = plan.rows(range(plan.batches_left(0)))
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert [each.tolist() for each in again.rows(range(28))] == [each.tolist() for each in wanted]
    assert replace(plan, skips=()) != plan


# -- the table -------------------------------------------------------------------------------------


def test_many_threads_and_another_process():
    stream = Examples.of(50, seed=1).streams[0]
    left = LastingSkips(stream, Skips.of([(3, 9), (60, 66)]))
    ranks = np.arange(400)
    wanted = left.select(ranks)
    assert wanted.size == np.unique(wanted).size
    again = pickle.loads(pickle.dumps(left))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: again.select(ranks[at : at + 80]), range(0, 320, 5)))
    for at, part in zip(range(0, 320, 5), found, strict=True):
        assert part.tolist() == wanted[at : at + 80].tolist()
    assert [left.rank(example) for example in wanted.tolist()] == ranks.tolist()

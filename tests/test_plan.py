"""The plan against an oracle that writes every example down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datapipe.permute import LIMIT, Permutation
from datapipe.plan import Plan, Skips
from formats.errors import Misuse


class Oracle:
    """All examples of a finite plan in a list; knows nothing of ranks."""

    def __init__(self, plan, horizon):
        self.plan = plan
        self.horizon = horizon
        records = []
        for epoch in range(horizon):
            every = np.arange(plan.record_count)
            order = (
                Permutation(plan.record_count, seed=plan.seed, epoch=epoch)(every)
                if plan.shuffle == "global"
                else every
            )
            records += order.tolist()
        self.records = records
        skipped = {e for start, stop in plan.skips.ranges for e in range(start, stop)}
        self.kept = [e for e in range(len(records)) if e not in skipped]

    def batches(self, next_example):
        """Lists of examples."""
        rest = [e for e in self.kept if e >= next_example]
        size = self.plan.batch_size
        found = [rest[at : at + size] for at in range(0, len(rest), size)]
        ends = self.plan.epochs is not None
        if found and len(found[-1]) < size and (not ends or self.plan.remainder == "drop"):
            found.pop()
        return found


@st.composite
def plans(draw, finite=None):
    records = draw(st.integers(1, 23))
    epochs = draw(st.integers(1, 4))
    finite = draw(st.booleans()) if finite is None else finite
    ranges = draw(
        st.lists(
            st.tuples(st.integers(0, 4 * 23), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1])),
            max_size=5,
        )
    )
    plan = Plan(
        record_count=records,
        batch_size=draw(st.integers(1, records + 3)),
        seed=draw(st.integers(0, 3)),
        shuffle=draw(st.sampled_from(["global", "none"])),
        epochs=epochs if finite else None,
        remainder=draw(st.sampled_from(["drop", "keep"])),
    ).skipping(ranges)
    return plan, Oracle(plan, epochs if finite else 300 // records + 1)


@given(plans(), st.data())
def test_forwards(case, data):
    plan, oracle = case
    at = data.draw(st.integers(0, len(oracle.records) if plan.epochs else plan.record_count * 4))
    batches = oracle.batches(at)
    if plan.epochs:
        assert plan.batches_left(at) == len(batches)
        asked = data.draw(st.integers(0, len(batches) + 2))
    else:
        assert plan.batches_left(at) is None
        asked = data.draw(st.integers(0, len(batches)))
    wanted = [e for batch in batches[:asked] for e in batch]
    assert plan.examples(at, asked).tolist() == wanted
    assert plan.advance(at, asked) == (wanted[-1] + 1 if wanted else at)
    located = plan.locate(np.array(wanted, np.int64))
    assert located.records.tolist() == [oracle.records[e] for e in wanted]
    assert located.epochs.tolist() == [e // plan.record_count for e in wanted]


@given(plans(), st.data())
def test_any_walk_is_the_same_walk(case, data):
    """Batch by batch, or in strides: the same examples in the same order."""
    plan, oracle = case
    wanted = [e for batch in oracle.batches(0) for e in batch]
    at, found = 0, []
    while len(found) < len(wanted):
        stride = data.draw(st.integers(1, 4))
        found += plan.examples(at, stride).tolist()
        at = plan.advance(at, stride)
    assert found[: len(wanted)] == wanted
    if plan.epochs:
        assert found == wanted
        assert plan.batches_left(at) == 0


@given(plans(), st.data())
def test_records_of_batches(case, data):
    plan, oracle = case
    batches = oracle.batches(0)
    first = data.draw(st.integers(0, len(batches)))
    stop = data.draw(st.integers(first, len(batches) + (2 if plan.epochs else 0)))
    wanted = [oracle.records[e] for batch in batches[first:stop] for e in batch]
    assert plan.records(range(first, stop)).tolist() == wanted
    if first < len(batches):
        assert plan.records(first).tolist() == [oracle.records[e] for e in batches[first]]
    if plan.epochs:
        assert plan.batch_count == len(batches)


@given(plans(), st.data())
def test_backwards(case, data):
    plan, oracle = case
    record = data.draw(st.integers(0, plan.record_count - 1))
    epochs = range(plan.epochs or 3)
    last = epochs.stop * plan.record_count
    wanted = sorted(
        {
            index
            for index, batch in enumerate(oracle.batches(0))
            for e in batch
            if oracle.records[e] == record and e < last
        }
    )
    assert list(plan.batches(record, epochs=epochs)) == wanted
    if plan.epochs:
        assert list(plan.batches(record)) == wanted


@given(plans(), st.data())
def test_span_is_what_the_batches_hold(case, data):
    plan, oracle = case
    at = data.draw(st.integers(0, plan.record_count))
    batches = oracle.batches(at)
    first = data.draw(st.integers(0, len(batches)))
    stop = data.draw(st.integers(first, len(batches)))
    ranges = plan.span(at, first, stop)
    assert all(start < stop for start, stop in ranges)
    assert ranges == sorted(ranges)
    wanted = [e for batch in batches[first:stop] for e in batch]
    assert [e for start, stop in ranges for e in range(start, stop)] == wanted


@given(plans(), st.data())
def test_skipping_a_span_closes_up(case, data):
    """Skipped batches are gone; those before and behind are what they were."""
    plan, oracle = case
    before = oracle.batches(0)
    first = data.draw(st.integers(0, len(before)))
    stop = data.draw(st.integers(first, len(before)))
    after = plan.skipping(plan.span(0, first, stop))
    wanted = [e for batch in before[:first] + before[stop:] for e in batch]
    count = (len(wanted) + plan.batch_size - 1) // plan.batch_size
    found = after.examples(0, count).tolist()
    assert found[: len(wanted)] == wanted


@given(plans(), st.integers(1, 30))
def test_another_batch_size_serves_the_same_examples(case, other):
    plan, oracle = case
    changed = Plan(
        plan.record_count, other, plan.seed, plan.shuffle, plan.epochs, "keep", plan.skips
    )
    count = len(oracle.kept) // other
    assert changed.examples(0, count).tolist() == oracle.kept[: count * other]
    if plan.epochs:
        assert changed.examples(0, count + 1).tolist() == oracle.kept


@given(plans())
def test_describe(case):
    plan, oracle = case
    described = plan.describe(0, min(5, len(oracle.batches(0)) + (1 if plan.epochs else 0)))
    for index, (batch, examples) in enumerate(
        zip(described, oracle.batches(0)[:5], strict=bool(plan.epochs))
    ):
        assert batch.batch == index
        assert [e for start, stop in batch.examples for e in range(start, stop)] == examples
        assert batch.records.tolist() == [oracle.records[e] for e in examples]
        epochs = {e // plan.record_count for e in examples}
        assert batch.epochs == (min(epochs), max(epochs) + 1)


@pytest.mark.parametrize("records", [1, 2, 5, 7, 8, 12])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7])
def test_every_record_once_per_epoch(records, batch_size):
    plan = Plan(records, batch_size, seed=4, epochs=3, remainder="keep")
    found = plan.records(range(plan.batch_count))
    assert found.size == 3 * records
    for epoch in range(3):
        held = found[epoch * records : (epoch + 1) * records]
        assert sorted(held.tolist()) == list(range(records))


def test_remainder_concerns_the_end_only():
    dropped = Plan(10, 4, seed=0, shuffle="none", epochs=3)
    kept = Plan(10, 4, seed=0, shuffle="none", epochs=3, remainder="keep")
    assert dropped.batch_count == 7
    assert kept.batch_count == 8
    assert dropped.records(2).tolist() == [8, 9, 0, 1]  # over the border of two epochs
    assert kept.records(7).tolist() == [8, 9]
    assert dropped.records(7).size == 0
    assert dropped.batches(9) == (2, 4)
    assert kept.batches(9) == (2, 4, 7)


# -- skips -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=8))
def test_skips_are_a_set(pairs):
    ranges = [(start, start + length) for start, length in pairs]
    skips = Skips.of(ranges)
    held = {e for start, stop in ranges for e in range(start, stop)}
    assert {e for start, stop in skips.ranges for e in range(start, stop)} == held
    for one, other in zip(skips.ranges[:-1], skips.ranges[1:], strict=True):
        assert one[1] < other[0]
    kept = [e for e in range(90) if e not in held]
    assert skips.at(np.arange(len(kept))).tolist() == kept
    for example in range(90):
        assert skips.rank(example) == sum(e < example for e in kept)
        assert skips.holds(example) == (example in held)
    assert Skips.of(reversed(ranges)) == skips
    assert skips.union([(5, 7)]) == Skips.of([*ranges, (5, 7)])


@pytest.mark.parametrize(
    ("ranges", "text"),
    [
        ([(5, 4)], r"stop of a range must be an integer in \[5,"),
        ([(-1, 4)], "start of a range"),
        ([(0, LIMIT + 1)], "stop of a range"),
        ([(0.0, 1)], "start of a range"),
        ([7], "pair"),
        ([(1, 2, 3)], "pair"),
        (["ab"], "start of a range"),
    ],
)
def test_refuses_ranges_that_are_none(ranges, text):
    with pytest.raises(Misuse, match=text):
        Skips.of(ranges)


# -- far away --------------------------------------------------------------------------------------


def test_far_away_costs_what_near_costs():
    """No loop over batches or examples: 10^12 batches on, with 10,000 skips before."""
    skips = Skips.of((i * 10**9, i * 10**9 + 77) for i in range(10_000))
    plan = Plan(10**9, 256, seed=3, skips=skips)
    at = 2**61
    examples = plan.examples(at, 4)
    far = plan.advance(at, 10**12)
    records = plan.records(10**15)
    assert examples.tolist() == list(range(at, at + 1024))
    assert far == at + 256 * 10**12
    assert records.size == 256
    # A loop over the batches between would run into the time limit of the tests.


def test_the_largest_plans():
    plan = Plan(LIMIT, 3, seed=1, epochs=1)
    assert plan.batch_count == LIMIT // 3
    assert plan.records(LIMIT // 3 - 1).size == 3
    record = int(plan.records(10**17)[1])
    assert plan.batches(record) == (10**17,)
    assert Plan(LIMIT, 3, seed=1).examples(LIMIT - 2).size == 0
    with pytest.raises(Misuse, match="epochs"):
        Plan(LIMIT, 3, seed=1, epochs=2)


def test_numpy_integers_do_not_overflow():
    plan = Plan(np.int32(2**31 - 1), np.int32(2**30), seed=np.int64(1), epochs=np.int8(100))
    assert plan.batch_count == (2**31 - 1) * 100 // 2**30
    assert plan.span(0, 5, 6) == [(5 * 2**30, 6 * 2**30)]


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"record_count": 0}, "record_count"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
        ({"shuffle": "blocks"}, "shuffle must be"),
        ({"remainder": "pad"}, "remainder must be"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_refuses_a_plan_that_is_none(change, text):
    with pytest.raises(Misuse, match=text):
        Plan(**{"record_count": 5, "batch_size": 2, "seed": 1, **change})


def test_refuses_questions_that_have_no_answer():
    plan = Plan(5, 2, seed=1, epochs=2)
    with pytest.raises(Misuse, match=r"an example must be an integer in \[0, 10\], found 11"):
        plan.batches_left(11)
    with pytest.raises(Misuse, match="record must be"):
        plan.batches(5)
    with pytest.raises(Misuse, match="step 1"):
        plan.records(range(0, 4, 2))
    with pytest.raises(Misuse, match="stop"):
        plan.span(0, 3, 2)
    with pytest.raises(Misuse, match=r"has no end: say which epochs, such as epochs=range\(3\)"):
        Plan(5, 2, seed=1).batches(3)

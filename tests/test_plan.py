"""The plan against an oracle that writes every example down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_oracle import Oracle

from datapipe.integers import LIMIT
from datapipe.order.block_shuffle import Blocks
from datapipe.order.examples import Examples, Segment
from datapipe.order.plan import Plan
from datapipe.order.skips import Skips
from formats.errors import Misuse

HORIZON = 160


@st.composite
def orders(draw, sources=None):
    """One source or several, in one segment or more."""
    count = draw(st.integers(1, 3)) if sources is None else sources
    items = [draw(st.integers(1, 23)) for _ in range(count)]
    first, segments = 0, []
    for _ in range(draw(st.integers(1, 3))):
        counts = draw(st.lists(st.integers(0, 4), min_size=len(items), max_size=len(items)))
        counts[draw(st.integers(0, len(items) - 1))] += 1
        segments.append(Segment(first, tuple(items), tuple(counts)))
        first += draw(st.integers(1, 50))
        items = [each + draw(st.integers(0, 5)) for each in items]
        if sources is None and draw(st.booleans()):
            items.append(draw(st.integers(1, 9)))
    shuffle = draw(st.sampled_from(["global", "none", "blocks"]))
    blocks = ()
    if shuffle == "blocks":
        size = draw(st.integers(1, 6))
        blocks = tuple(Blocks([*range(0, n, size), n], 2) for n in segments[-1].items)
    return Examples(
        tuple(segments),
        seed=draw(st.integers(0, 3)),
        shuffle=shuffle,
        epochs=draw(st.none() | st.integers(1, 4)),
        blocks=blocks,
    )


@st.composite
def plans(draw):
    single = draw(st.booleans())
    order = draw(orders(1 if single else None))
    skips = [
        Skips.of((a, a + n) for a, n in pairs)
        for pairs in draw(
            st.lists(
                st.lists(st.tuples(st.integers(0, 90), st.integers(0, 12)), max_size=4),
                min_size=order.source_count,
                max_size=order.source_count,
            )
        )
    ]
    remainder = draw(st.sampled_from(["carry", "keep", "drop"])) if single else "carry"
    if order.source_count > 1:
        remainder = "carry"
    size, lasting = draw(st.integers(1, 26)), draw(st.booleans())
    plan = Plan(order, size, remainder, tuple(skips), skip_records=lasting)
    return plan, Oracle(plan, HORIZON)


@given(orders())
def test_examples_are_what_is_written_down(order):
    oracle = Oracle(Plan(order, 1), HORIZON)
    count = len(oracle.rows)
    examples, *found = (column.tolist() for column in order.locate(np.arange(count)))
    assert examples == [*range(count)]
    assert list(zip(*found, strict=True)) == oracle.rows
    if oracle.ended:
        assert order.end == count
    else:
        assert order.end >= count
    ordinals = [0] * order.source_count
    for example, (source, _, _) in enumerate(oracle.rows):
        assert order.ordinals(example) == tuple(ordinals)
        assert order.example(source, ordinals[source]) == example
        ordinals[source] += 1


@given(orders())
def test_no_item_twice_within_an_epoch(order):
    oracle = Oracle(Plan(order, 1), HORIZON)
    assert len(set(oracle.rows)) == len(oracle.rows)


@given(plans(), st.data())
def test_forwards(case, data):
    plan, oracle = case
    at = data.draw(st.integers(0, len(oracle.rows)))
    batches = oracle.batches(at)
    asked = data.draw(st.integers(0, len(batches) + (2 if oracle.ended else 0)))
    if oracle.ended:
        assert plan.batches_left(at) == len(batches)
    if plan.order.epochs is None:
        assert plan.batches_left(at) is None
    wanted = batches[:asked]
    assert [each.tolist() for each in plan.examples(at, asked)] == wanted
    assert plan.advance(at, asked) == (wanted[-1][-1] + 1 if wanted else at)


@given(plans(), st.data())
def test_any_walk_is_the_same_walk(case, data):
    """Batch by batch, or in strides: the same examples in the same order."""
    plan, oracle = case
    wanted = oracle.batches(0)
    at, found = 0, []
    while len(found) < len(wanted):
        stride = data.draw(st.integers(1, 4))
        found += [each.tolist() for each in plan.examples(at, stride)]
        at = plan.advance(at, stride)
    assert found[: len(wanted)] == wanted
    if oracle.ended:
        assert found == wanted
        assert plan.batches_left(at) == 0


@given(plans(), st.data())
def test_items_of_batches(case, data):
    plan, oracle = case
    batches = oracle.batches(0)
    first = data.draw(st.integers(0, len(batches)))
    stop = data.draw(st.integers(first, len(batches) + (2 if oracle.ended else 0)))
    wanted = [oracle.rows[e] for batch in batches[first:stop] for e in batch]
    _, *found = (column.tolist() for column in plan.rows(range(first, stop)))
    assert list(zip(*found, strict=True)) == wanted
    described = plan.describe(first, stop - first)
    assert [each.batch for each in described] == list(range(first, min(stop, len(batches))))
    for each, batch in zip(described, batches[first:stop], strict=True):
        assert [e for start, stop in each.ranges for e in range(start, stop)] == batch
        examples, *columns = (column.tolist() for column in each.rows)
        assert examples == batch
        assert list(zip(*columns, strict=True)) == [oracle.rows[e] for e in batch]


@given(plans(), st.data())
def test_backwards(case, data):
    plan, oracle = case
    source = data.draw(st.integers(0, plan.order.source_count - 1))
    item = data.draw(st.integers(0, plan.order.streams[source].items - 1))
    batches = oracle.batches(0)
    known = [epoch for s, epoch, _ in oracle.rows if s == source]
    epochs = range(max(known, default=-1) if not oracle.ended else plan.order.epochs)
    wanted = {
        index
        for index, batch in enumerate(batches)
        for e in batch
        if (oracle.rows[e][0], oracle.rows[e][2]) == (source, item) and oracle.rows[e][1] in epochs
    }
    found = plan.batches(item, source=source, epochs=epochs)
    assert [batch for batch in found if batch < len(batches)] == sorted(wanted)
    if oracle.ended:
        assert list(plan.batches(item, source=source)) == sorted(wanted)


@given(plans(), st.data())
def test_span_is_what_the_batches_hold(case, data):
    plan, oracle = case
    at = data.draw(st.integers(0, len(oracle.rows)))
    batches = oracle.batches(at)
    first = data.draw(st.integers(0, len(batches)))
    stop = data.draw(st.integers(first, len(batches)))
    ranges = plan.span(at, first, stop)
    assert all(start < stop for start, stop in ranges)
    assert ranges == sorted(ranges)
    wanted = [e for batch in batches[first:stop] for e in batch]
    assert [e for start, stop in ranges for e in range(start, stop)] == wanted
    addresses = {a for start, stop in plan.addresses(ranges) for a in range(start, stop)}
    assert addresses == oracle.addresses(wanted)


@given(plans(), st.integers(1, 26), st.data())
def test_what_was_skipped_stays_so_with_other_batches_and_weights(case, other, data):
    """Batches are skipped; then batch size and weights change: the same rows stay away."""
    plan, oracle = case
    before = oracle.batches(0)
    first = data.draw(st.integers(0, len(before)))
    stop = data.draw(st.integers(first, len(before)))
    bad = {oracle.rows[e] for batch in before[first:stop] for e in batch}
    skipped = plan.skipping(plan.addresses(plan.span(0, first, stop)))
    last = plan.order.segments[-1]
    at = last.first + data.draw(st.integers(1, 30))
    counts = data.draw(
        st.lists(st.integers(1, 4), min_size=len(last.items), max_size=len(last.items))
    )
    order = Examples(
        (*plan.order.segments, Segment(at, last.items, tuple(counts))),
        plan.order.seed,
        plan.order.shuffle,
        plan.order.epochs,
        plan.order.blocks,
    )
    changed = Plan(order, other, plan.remainder, skipped.skips, skip_records=plan.skip_records)
    again = Oracle(changed, HORIZON)
    batches = again.batches(0)
    assert [each.tolist() for each in changed.examples(0, len(batches))] == batches
    served = {again.rows[e] for batch in batches for e in batch}
    assert not served & bad
    if plan.skip_records:
        since = {(source, item): epoch for source, epoch, item in sorted(bad, reverse=True)}
        assert all(epoch < since.get((s, item), epoch + 1) for s, epoch, item in served)


@given(plans())
def test_skipping_says_what_is_skipped(case):
    plan, _ = case
    assert replace(plan, skips=()).skipping(plan.skipped) == plan


@pytest.mark.parametrize("records", [1, 2, 5, 7, 8, 12])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7])
def test_every_record_once_per_epoch(records, batch_size):
    plan = Plan.of(records, batch_size, seed=4, epochs=3, remainder="keep")
    found = plan.records(range(plan.batches_left(0)))
    assert found.size == 3 * records
    for epoch in range(3):
        held = found[epoch * records : (epoch + 1) * records]
        assert sorted(held.tolist()) == list(range(records))


def test_remainders():
    def rows(remainder):
        plan = Plan.of(5, 2, seed=0, shuffle="none", epochs=3, remainder=remainder)
        return [plan.records(batch).tolist() for batch in range(plan.batches_left(0))]

    assert rows("carry") == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 1], [2, 3]]
    assert rows("keep") == [[0, 1], [2, 3], [4]] * 3
    assert rows("drop") == [[0, 1], [2, 3]] * 3


def test_weights_have_exact_counts_in_every_block():
    order = Examples((Segment(0, (10**6, 10**6), (3, 1)),), seed=1)
    sources = order.locate(np.arange(4000)).sources.reshape(-1, 4)
    assert (np.sort(sources, axis=1) == [0, 0, 0, 1]).all()


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
    assert skips.select(np.arange(len(kept))).tolist() == kept
    for example in range(90):
        assert skips.rank(example) == sum(e < example for e in kept)
    assert skips.mask(np.arange(90)).tolist() == [example in held for example in range(90)]
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
    for remainder, short in (("carry", 0), ("drop", 10**9 % 256)):
        plan = Plan(Examples.of(10**9, seed=3), 256, remainder, (skips,))
        at = 2 * 10**18
        examples = plan.examples(at, 3)
        far = plan.advance(at, 10**9 * (10**9 // 256))
        assert np.concatenate(examples).tolist() == list(range(at, at + 768))
        assert far + short == at + 10**18 if short else far > at
        assert plan.records(10**15).size == 256


def test_far_away_in_a_mixture():
    segments = tuple(
        Segment(i * 10**6, (10**9 + i * 10, 10**8 + i, 77), (2000 + i, 1000, 3)) for i in range(50)
    )
    skips = tuple(Skips.of((i * 10**7 + s, i * 10**7 + 9) for i in range(1000)) for s in range(3))
    plan = Plan(Examples(segments, seed=3), 256, skips=skips)
    assert plan.advance(0, 10**15) > 256 * 10**15
    assert plan.records(10**15).size == 256
    wide = Skips.of([(10**6, 10**15)])  # a gap that nobody may walk through
    gapped = Plan(Examples(segments[:1], seed=3), 256, skips=(wide, wide))
    assert gapped.records(3000).size == 256
    # A loop over the batches between would run into the time limit of the tests.


def test_the_largest_plans():
    plan = Plan.of(LIMIT, 3, seed=1, epochs=1)
    assert plan.batches_left(0) == LIMIT // 3
    assert plan.records(LIMIT // 3 - 1).size == 3
    record = int(plan.records(10**17)[1])
    assert plan.batches(record) == (10**17,)
    assert Plan.of(LIMIT, 3, seed=1).examples(LIMIT - 2) == []
    with pytest.raises(Misuse, match="epochs"):
        Plan.of(LIMIT, 3, seed=1, epochs=2)


def test_numpy_integers_do_not_overflow():
    plan = Plan.of(np.int32(2**31 - 1), np.int32(2**30), seed=np.int64(1), epochs=np.int8(100))
    assert plan.batches_left(0) == (2**31 - 1) * 100 // 2**30
    assert plan.span(0, 5, 6) == [(5 * 2**30, 6 * 2**30)]


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"items": 0}, "items of a source"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"seed": True}, "seed"),
        ({"shuffle": "chunks"}, "shuffle must be"),
        ({"shuffle": "blocks"}, "wanted blocks of"),
        ({"remainder": "pad"}, "remainder must be"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_refuses_a_plan_that_is_none(change, text):
    with pytest.raises(Misuse, match=text):
        Plan.of(**{"items": 5, "batch_size": 2, "seed": 1, **change})


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ((), "begins at example 0"),
        ((Segment(1, (5,), (1,)),), "begins at example 0"),
        ((Segment(0, (5,), (1,)), Segment(0, (5,), (1,))), "segment 1: first example"),
        ((Segment(0, (5, 6), (1, 1)), Segment(3, (5,), (1,))), "wanted 2 sources or more"),
        ((Segment(0, (5,), (1,)), Segment(3, (4,), (1,))), "a source grows"),
    ],
)
def test_refuses_segments_that_make_no_order(segments, text):
    with pytest.raises(Misuse, match=text):
        Examples(segments, seed=1)


def test_refuses_questions_that_have_no_answer():
    plan = Plan.of(5, 2, seed=1, epochs=2)
    with pytest.raises(Misuse, match=r"an example must be an integer in \[0, 10\], found 11"):
        plan.batches_left(11)
    with pytest.raises(Misuse, match="item must be"):
        plan.batches(5)
    with pytest.raises(Misuse, match="source must be"):
        plan.batches(1, source=1)
    with pytest.raises(Misuse, match="step 1"):
        plan.records(range(0, 4, 2))
    with pytest.raises(Misuse, match="stop"):
        plan.span(0, 3, 2)
    with pytest.raises(Misuse, match=r"has no end: say which epochs, such as epochs=range\(3\)"):
        Plan.of(5, 2, seed=1).batches(3)
    with pytest.raises(Misuse, match="a skip of source 1, here are 1"):
        plan.skipping([(LIMIT + 1, LIMIT + 2)])
    with pytest.raises(Misuse, match="of one source"):
        plan.skipping([(LIMIT - 1, LIMIT + 2)])
    with pytest.raises(Misuse, match="for one source, here are 2"):
        Plan(Examples((Segment(0, (5, 5), (1, 1)),), seed=1), 2, "drop")

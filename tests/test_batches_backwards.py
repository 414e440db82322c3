"""From a record back to its batches: whatever epochs are asked for, and by the right plan only."""

from __future__ import annotations

import numpy as np
import pytest
from document_source import Documents
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Records

from datapipe import Concatenate, Misuse, Pack, Pipeline, Plan

LENGTHS = [5, 0, 17, 3, 8, 8, 1, 30, 2, 11]
EPOCHS = 4
BOUNDS = st.integers(-7, 9)
STEPS = st.integers(-4, 4).filter(bool)


@given(BOUNDS, BOUNDS, STEPS, st.integers(0, 9))
def test_epochs_that_there_are_not_hold_nothing(start, stop, step, item):
    plan = Plan.of(10, 3, seed=1, epochs=EPOCHS)
    asked = range(start, stop, step)
    wanted = {
        batch
        for batch in range(plan.batches_left(0))
        for row_epoch, row in zip(plan.rows(batch).epochs, plan.records(batch), strict=True)
        if row == item and row_epoch in asked
    }
    assert plan.batches(item, epochs=asked) == tuple(sorted(wanted))


@pytest.mark.parametrize("kind", [Pack, Concatenate, None])
def test_pipelines_take_the_same_ranges(kind):
    pack = None if kind is None else kind(8, lengths="length")
    pipe = Pipeline(Documents(LENGTHS), batch_size=2, seed=1, epochs=EPOCHS, pack=pack)
    wanted = pipe.batches(7)
    assert wanted
    for asked in (range(-2, EPOCHS), range(10**9), range(EPOCHS + 5, -9, -1)):
        assert pipe.batches(7, epochs=asked) == wanted
    odd = {*pipe.batches(7, epochs=range(1, 2)), *pipe.batches(7, epochs=range(3, 4))}
    assert {*pipe.batches(7, epochs=range(-3, EPOCHS, 2))} == odd
    assert pipe.batches(7, epochs=range(-5, 0)) == ()


def test_without_an_end_epochs_reach_as_far_as_examples_do():
    plan = Plan.of(10, 3, seed=1)
    assert plan.batches(3, epochs=range(-1, 2)) == plan.batches(3, epochs=range(2))
    far = (1 << 62) // 10
    assert len(plan.batches(3, epochs=range(far - 2, 1 << 70))) <= 2


def test_the_plan_of_another_pipeline_is_refused():
    pipe = Pipeline(Records(40), batch_size=4, seed=1, epochs=2)
    two = {"a": Records(40), "b": Records(8)}
    for other in (Pipeline(two, batch_size=4, seed=1), Pipeline(Records(41), batch_size=4, seed=1)):
        for ask in (
            lambda plan: pipe.pieces(5, plan=plan),
            lambda plan: pipe.batches(0, plan=plan),
        ):
            with pytest.raises(Misuse, match=r"plan: wanted one of this pipeline.*\(40,\) items"):
                ask(other.plan)
    with pipe.iterator() as iterator:
        iterator.skip([(0, 4)])
        np.testing.assert_equal(pipe.pieces(0, plan=iterator.plan).records, pipe.plan.rows(1).items)

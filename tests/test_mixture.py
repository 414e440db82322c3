"""Several sources in one pipeline: what comes out, where it goes on, what is left out for good."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Columns, Records

import ckpt
from datapipe import BadRecord, Mismatch, Misuse, NotFound, Pipeline
from datapipe.integers import LIMIT
from datapipe.order.mixture import Mixture

SIZES = {"web": 40, "code": 11}


def pipeline(*, batch_size=4, weights=None, epochs=None, **sizes):
    sources = {name: Columns(count, name=name) for name, count in {**SIZES, **sizes}.items()}
    weights = {"web": 3, "code": 1} if weights is None else weights
    return Pipeline(sources, batch_size=batch_size, seed=3, weights=weights, epochs=epochs)


def tagged(**options):
    """Rows say which source they are of."""
    pipe = pipeline(**options)
    return pipe.map(lambda row: {"id": row["id"], "of": len(row["text"])}, version="1")


def rows_of(batch, plan, number):
    _, sources, epochs, items = plan.rows(number)
    assert batch["id"].tolist() == items.tolist()
    return list(zip(sources.tolist(), epochs.tolist(), items.tolist(), strict=True))


# -- the mixture -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_whole_weights_are_met_exactly(weights):
    mixture = Mixture.of(weights)
    total = sum(weights)
    assert all(c * total == w * mixture.size for c, w in zip(mixture.counts, weights, strict=True))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(lambda w: sum(w) > 0))
def test_any_weights_are_met_nearly(weights):
    mixture = Mixture.of(weights)
    assert 1 <= mixture.size <= 4096
    least = sum(weight > 0 for weight in weights)
    for count, weight in zip(mixture.counts, weights, strict=True):
        assert (count > 0) == (weight > 0)
        # Each that gets its one example although it weighs less takes it from another one.
        assert abs(count / mixture.size - weight / sum(weights)) <= (1 + least) / 4096


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any), st.integers(0, 300))
def test_every_source_has_had_its_share_at_any_time(counts, number):
    mixture = Mixture(tuple(counts))
    for count, had in zip(counts, mixture.ordinals(number), strict=True):
        assert abs(had - number * count / mixture.size) <= len(counts)


def test_weights_of_numpy():
    weights = [np.float32(0.5), np.int8(1), np.float64(0.5)]
    assert Mixture.of(weights) == Mixture.of([1, 2, 1])


@pytest.mark.parametrize(
    "weights",
    [
        *([], [0, 0], [-1, 2], [float("nan")], [float("inf")], ["1"], [True], [1] * 1001),
        *([1e308, 1e308], [10**400, 1], [np.True_], [None]),
    ],
)
def test_refuses_weights_that_are_none(weights):
    with pytest.raises(Misuse, match="weight"):
        Mixture.of(weights)


# -- the pipeline ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"prefetch": 0, "window": 1}, {"threads": 3}])
def test_serves_what_the_plan_says(options):
    pipe = pipeline(epochs=4)
    with pipe.iterator(**options) as iterator:
        served = [row for i, batch in enumerate(iterator) for row in rows_of(batch, pipe.plan, i)]
    assert len(served) == 4 * pipe.plan.batches_left(0)
    assert len(set(served)) == len(served)
    assert [source for source, _, _ in served].count(1) * 3 == len(served) * 3 // 4
    assert max(epoch for source, epoch, _ in served if source == 1) == 3  # code ends the run


def test_by_default_each_source_weighs_what_it_holds():
    sources = {name: Records(count, name=name) for name, count in SIZES.items()}
    plan = Pipeline(sources, batch_size=51, seed=1, epochs=1).plan
    _, sources, _, items = plan.rows(0)
    held = {(s, i) for s, i in zip(sources.tolist(), items.tolist(), strict=True)}
    assert held == {*((0, i) for i in range(40)), *((1, i) for i in range(11))}


def test_one_read_per_source_and_window():
    pipe = pipeline()
    with pipe.iterator(prefetch=0, window=4) as iterator:
        for _ in range(1 + 2 + 4):
            next(iterator)
    assert [len(source.calls) for source in pipe.sources.values()] == [3, 3]


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_goes_on_from_every_state(at):
    pipe = tagged()
    with pipe.iterator() as whole, tagged(batch_size=2).iterator() as half:
        for _ in range(at):
            next(whole)
        half.set_state(json.loads(json.dumps(whole.get_state())))
        for _ in range(6):
            wanted = next(whole)
            first, second = next(half), next(half)
            for name in wanted:
                np.testing.assert_array_equal(
                    wanted[name], np.concatenate([first[name], second[name]])
                )


def test_seeks_far_without_reading():
    pipe = pipeline()
    with pipe.iterator(prefetch=0) as iterator:
        iterator.seek(10**15)
        iterator.set_state(iterator.get_state())
        assert not any(source.calls for source in pipe.sources.values())
        next(iterator)


def test_a_state_stays_small():
    pipe = pipeline()
    iterator = pipe.iterator()
    empty = len(json.dumps(iterator.get_state(), separators=(",", ":")))
    iterator.skip([(i * 4000, i * 4000 + 256) for i in range(1000)])
    full = len(json.dumps(iterator.get_state(), separators=(",", ":")))
    assert empty <= 1024
    assert full - empty <= 16 * 1000


def test_skipped_examples_stay_away_when_weights_and_batch_size_change():
    with pipeline().iterator() as iterator:
        start = iterator.get_state()
        bad = iterator.span(start, 5, 9)
        seen = {row for i in range(5, 9) for row in rows_of_plan(iterator.plan, i)}
        iterator.skip(bad)
        state = iterator.get_state()
    changed = pipeline(batch_size=5, weights={"web": 1, "code": 2}, epochs=1)
    with pytest.raises(Mismatch, match=r"segment.counts: saved \[3, 1\], here \[1, 2\]"):
        changed.iterator().set_state(state)
    iterator = changed.iterator()
    iterator.skip(bad)
    served = {
        row for i in range(iterator.plan.batches_left(0)) for row in rows_of_plan(iterator.plan, i)
    }
    assert not served & seen


def rows_of_plan(plan, number):
    _, *origins = plan.rows(number)
    return list(zip(*(each.tolist() for each in origins), strict=True))


def test_a_source_of_other_columns_is_named():
    sources = {"a": Columns(20), "b": Records(20)}
    iterator = Pipeline(sources, batch_size=4, seed=1).iterator()
    with pytest.raises(Mismatch, match="source 1: records of bytes"):
        next(iterator)


def test_a_bad_record_of_the_second_source_is_named_and_can_be_skipped():
    sources = {"a": Records(20), "b": Records(20, name="shaky", bad=range(20))}
    pipe = Pipeline(sources, batch_size=4, seed=1)
    with pipe.iterator() as iterator:
        with pytest.raises(BadRecord, match="shaky-shard") as caught:
            next(iterator)
        example = int(str(caught.value).split("in example ")[1].split(",")[0])
        assert pipe.plan.locate(np.array([example])).items.tolist() == [caught.value.index]
        iterator.skip([(LIMIT, LIMIT + 20)])  # all of b, for its first epoch
        assert set(pipe.plan.rows(0).sources.tolist()) == {0, 1}
        assert set(iterator.plan.rows(0).sources.tolist()) == {0}
        assert len(next(iterator)) == 4


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: Pipeline({}, batch_size=1, seed=1), NotFound, "no source is given"),
        (lambda: pipeline(code=0), NotFound, "code holds no records"),
        (lambda: pipeline(weights={"web": 1}), Misuse, "wanted one for each of"),
        (lambda: pipeline(weights={"web": 1, "code": -1}), Misuse, "a weight must be"),
        (lambda: Pipeline({"": Records(3)}, batch_size=1, seed=1), Misuse, "the name of a source"),
        (lambda: Pipeline({"a": "b"}, batch_size=1, seed=1), Misuse, "formats.open_source"),
    ],
)
def test_wrong_use(call, error, text):
    with pytest.raises(error, match=text):
        call()


# -- with a manager --------------------------------------------------------------------------------


def test_a_rewind_leaves_out_what_the_bad_steps_used(tmp_path: Path) -> None:
    state = {"w": jnp.zeros(3)}
    pipe = tagged()
    with ckpt.CheckpointManager(tmp_path / "run") as manager, pipe.iterator() as data:
        manager.resume(like=state, data=data)
        served = {}
        for step in range(1, 13):
            served[step] = rows_of_plan(data.plan, step - 1)
            next(data)
            if step % 3 == 0:
                manager.save(step, state, data=data)
        manager.rewind(6, skip_steps=range(8, 11), reason="bad", like=state, data=data)
        bad = {row for step in range(8, 11) for row in served[step]}
        again = {row for i in range(6, 40) for row in rows_of_plan(data.plan, i)}
        assert not bad & again
        assert {*served[7], *served[11], *served[12]} <= again
        for step in range(7, 10):
            next(data)
            manager.save(step, state, data=data)
    with ckpt.CheckpointManager(tmp_path / "run") as manager, pipe.iterator() as data:
        assert manager.resume(like=state, data=data).step == 9
        assert not bad & {row for i in range(40) for row in rows_of_plan(data.plan, i)}

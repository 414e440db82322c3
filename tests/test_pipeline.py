"""The pipeline: what it serves, how it reads, and what the package exports."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
from memory_source import Columns, Records, number

import datapipe
from datapipe import Pipeline


def ids_of(pipe, **options):
    """Record ids of all batches, in order."""
    with pipe.map(number, version="1").iterator(**options) as batches:
        return [batch.tolist() for batch in batches]


# -- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("remainder", ["carry", "drop", "keep"])
@pytest.mark.parametrize(("count", "batch_size"), [(1, 1), (7, 7), (10, 3), (12, 4), (13, 12)])
def test_serves_what_the_plan_says(count, batch_size, remainder, shuffle):
    pipe = Pipeline(
        Records(count),
        batch_size=batch_size,
        seed=5,
        epochs=3,
        shuffle=shuffle,
        remainder=remainder,
    )
    plan = pipe.plan
    served = ids_of(pipe)
    assert len(served) == plan.batches_left(0)
    assert served == [plan.records(index).tolist() for index in range(len(served))]
    if remainder == "keep":
        together = [record for batch in served for record in batch]
        for epoch in range(3):
            held = together[epoch * count : (epoch + 1) * count]
            assert sorted(held) == list(range(count))


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("threads", [1, 3])
def test_how_it_is_made_changes_nothing(prefetch, window, threads):
    pipe = (
        Pipeline(Records(53), batch_size=6, seed=1, epochs=2, remainder="keep")
        .map(number, version="1")
        .random_map(lambda n, rng: {"n": n, "r": rng.random(2)}, version="1")
    )
    wanted = list(pipe.iterator(prefetch=0, window=1))
    with pipe.iterator(prefetch=prefetch, window=window, threads=threads) as batches:
        np.testing.assert_equal(list(batches), wanted)


def test_bytes_are_not_cut_to_the_length_of_the_first():
    pipe = Pipeline(Records(30), batch_size=10, seed=0, shuffle=False, epochs=1)
    batches = list(pipe)
    wanted = [Records(30)[index] for index in range(30)]
    assert [record for batch in batches for record in batch] == wanted
    assert all(batch.dtype == object and batch.shape == (10,) for batch in batches)
    texts = pipe.map(lambda record: {"text": record.decode()}, version="1")
    assert [t for batch in texts for t in batch["text"]] == [record.decode() for record in wanted]


def test_arrays_of_texts_are_not_cut_either():
    pipe = Pipeline(Records(30), batch_size=10, seed=0, shuffle=False, epochs=1)
    batch = next(pipe.map(lambda record: np.array([record.decode()]), version="1").iterator())
    assert batch.tolist() == [[Records(30)[index].decode()] for index in range(10)]


def test_columns_come_as_columns():
    pipe = Pipeline(Columns(20), batch_size=8, seed=3, epochs=1)
    wanted = pipe.plan.records(0)
    first = next(pipe.iterator())
    assert first["id"].tolist() == wanted.tolist()
    np.testing.assert_array_equal(first["row"], np.stack([wanted, 2 * wanted], 1))
    assert first["row"].dtype == np.float32
    assert first["text"].tolist() == ["x" * (i % 5) + str(i) for i in wanted.tolist()]
    each = next(pipe.map(lambda row: row, version="1").iterator())
    np.testing.assert_equal(each, first)


def test_map_batch_follows_map():
    pipe = Pipeline(Records(20), batch_size=5, seed=3, epochs=1).map(number, version="1")
    doubled = pipe.map_batch(lambda batch: {"n": batch, "twice": batch * 2}, version="1")
    for plain, batch in zip(pipe, doubled, strict=True):
        np.testing.assert_array_equal(batch["n"], plain)
        np.testing.assert_array_equal(batch["twice"], plain * 2)
    raw = Pipeline(Records(20), batch_size=5, seed=3, epochs=1).map_batch(
        lambda records: np.array([number(record) for record in records]), version="1"
    )
    np.testing.assert_equal(list(raw), list(pipe))


def test_a_pipeline_is_a_value():
    pipe = Pipeline(Records(20), batch_size=5, seed=3, epochs=1)
    mapped = pipe.map(number, version="1")
    assert pipe.transforms == ()
    assert len(mapped.transforms) == 1
    again = pickle.loads(pickle.dumps(mapped))  # to workers, not to disk
    np.testing.assert_equal(list(again), list(mapped))
    with pytest.raises(AttributeError):
        pipe.seed = 4


# -- random_map ------------------------------------------------------------------------------------


def draws(batch_size, *, seed=1, epochs=2, before=0, **options):
    """(epoch, record) -> what the generator gave."""
    pipe = Pipeline(Records(11), batch_size=batch_size, seed=seed, epochs=epochs, remainder="keep")
    pipe = pipe.map(number, version="1")
    for _ in range(before):
        pipe = pipe.map(lambda n: n, version="1")
    pipe = pipe.random_map(lambda n, rng: (n, rng.integers(2**60)), version="1")
    rows = [
        row for n, r in pipe.iterator(**options) for row in zip(n.tolist(), r.tolist(), strict=True)
    ]
    return {(at // 11, n): r for at, (n, r) in enumerate(rows)}


def test_random_numbers_belong_to_seed_epoch_record_and_place():
    wanted = draws(4)
    assert len(set(wanted.values())) == 22  # each (epoch, record) has its own
    assert draws(3) == wanted
    assert draws(11, prefetch=0, window=4) == wanted
    assert not set(draws(4, seed=2).values()) & set(wanted.values())
    assert not set(draws(4, before=1).values()) & set(wanted.values())


def test_random_numbers_are_frozen():
    """Part of what a resumed run repeats: a release may not change them."""
    assert draws(4)[0, 7] == 1084300643327581813
    assert draws(4)[1, 7] == 563853973679597599


def test_two_random_maps_are_unrelated():
    pipe = Pipeline(Records(9), batch_size=9, seed=1, epochs=1)
    pipe = pipe.random_map(lambda record, rng: rng.random(), version="1")
    pipe = pipe.random_map(lambda first, rng: (first, rng.random()), version="1")
    first, second = next(pipe.iterator())
    assert not set(first.tolist()) & set(second.tolist())


# -- reads -----------------------------------------------------------------------------------------


def test_one_read_for_a_window():
    source = Records(400)
    pipe = Pipeline(source, batch_size=8, seed=2, epochs=1)
    list(pipe.iterator(prefetch=0, window=4))
    # 50 batches in windows of 1, 2, 4, ..., 4, 3: the first batch waits for no others.
    assert [call.size for call in source.calls] == [8, 16, *[32] * 11, 24]


def test_reads_are_without_repeats_where_epochs_meet():
    source = Records(10)
    pipe = Pipeline(source, batch_size=7, seed=2, epochs=3)
    served = [row for batch in pipe.iterator(window=4) for row in batch.tolist()]
    assert any(call.size < 28 for call in source.calls[1:])
    for call in source.calls:
        assert np.unique(call).size == call.size
    assert served == [source[record] for record in pipe.plan.records(range(4)).tolist()]


def test_batches_of_a_window_do_not_share_rows():
    source = Records(60)
    pipe = Pipeline(source, batch_size=4, seed=2, epochs=1)
    wanted = [batch.tolist() for batch in pipe.iterator(prefetch=0, window=1)]
    found = []
    for batch in pipe.iterator(prefetch=2, window=8):
        found.append(batch.tolist())
        batch[:] = b"overwritten"
    assert found == wanted


def test_what_is_read_needs_no_thread():
    pipe = Pipeline(Records(400), batch_size=8, seed=2, epochs=1)
    mapped = pipe.map(bytes, version="1")
    for each, in_threads in ((pipe, False), (mapped, True)):
        with each.iterator(prefetch=1, window=8) as iterator:
            for _ in range(7 + 8):  # windows of 1, 2, 4 and 8 batches
                next(iterator)
            ahead = iterator._prefetcher
            next(iterator)  # the first of a window: it, and the next, may have been handed over
            window = ahead._windows[0]
            window.batch(0)
            assert window.is_at_hand(1) is not in_threads


def test_seeking_and_planning_read_nothing():
    source = Records(1000)
    pipe = Pipeline(source, batch_size=8, seed=2, epochs=40)
    iterator = pipe.iterator(prefetch=0)
    state = iterator.get_state()
    iterator.seek(30_000)
    iterator.skip([(30_000, 30_100)])
    iterator.set_state(state)
    iterator.span(state, 5, 9)
    pipe.plan.records(77)
    pipe.plan.describe(3, 4)
    assert source.calls == []
    iterator.seek(30_000)
    next(iterator)
    assert [call.size for call in source.calls] == [8]


# -- the package -----------------------------------------------------------------------------------


def test_the_plan_needs_neither_jax_nor_grain():
    code = (
        "import sys, datapipe, datapipe.order.plan, datapipe.state, datapipe.pipeline\n"
        "assert datapipe.Plan.of(10, 2, seed=1).records(0).size == 2\n"
        "assert not {'jax', 'grain', 'tensorstore'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_exported_names():
    for name in datapipe.__all__:
        assert getattr(datapipe, name).__name__ == name
    assert set(datapipe.__all__) <= set(dir(datapipe))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = datapipe.Nothing

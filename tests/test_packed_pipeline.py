"""Filter and packing in a pipeline: every token, resumed anywhere, read by any number of hosts."""

from __future__ import annotations

import dataclasses
import json
import pickle

import jax
import numpy as np
import pytest
from document_source import Documents
from hypothesis import given
from hypothesis import strategies as st
from packing_oracle import as_row, packed_by_hand, rows_by_hand, stacked

from datapipe import BadRecord, Concatenate, Mismatch, Misuse, Pack, Pipeline, Where
from datapipe.batches.batch import Recipe
from datapipe.batches.substitutes import Replaced
from datapipe.batches.window import Window
from datapipe.order.permute import Permutation

LENGTHS = [5, 0, 17, 3, 8, 8, 1, 30, 2, 11, 0, 6, 9, 4, 4, 13, 7, 1, 1, 20]
BOTH = [Pack(8, lengths="length", window=6), Concatenate(8, lengths="length")]


def rows_of(source, pipe_seed, filter_least, pack, epochs, *, number=0, shuffle=True):
    """All rows of all epochs by the oracle; `filter_least` of the score, None: no filter."""
    kept = [d for d in range(len(source)) if filter_least is None or d % 10 >= filter_least]
    documents = [source.document(d) for d in kept]
    lengths = [len(each) for each in documents]
    found = []
    for epoch in range(epochs) if kept else ():
        if isinstance(pack, Pack):
            rows = packed_by_hand(lengths, pack.capacity, pack.window, pack.strategy)
            keys = {"seed": pipe_seed, "epoch": epoch, "stream": number}
            if shuffle and rows:
                rows = [rows[i] for i in Permutation(len(rows), **keys)(np.arange(len(rows)))]
        else:
            order = np.arange(len(kept))
            if shuffle:
                keys = {"seed": pipe_seed, "epoch": epoch, "stream": number}
                order = Permutation(len(kept), **keys)(order)
            rows = rows_by_hand(lengths, order.tolist(), pack.capacity, pack.remainder)
        found += [as_row(row, documents, pack.capacity, pack.pad) for row in rows]
    return found


def made(pack, batch_size=3, *, source=None, epochs=3, least=2, seed=11, **options):
    source = Documents(LENGTHS) if source is None else source
    conditions = None if least is None else Where("score", ">=", least)
    return Pipeline(
        source,
        batch_size=batch_size,
        seed=seed,
        epochs=epochs,
        filter=conditions,
        pack=pack,
        **options,
    )


# -- what comes out --------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=40),
    st.integers(1, 20),
    st.integers(1, 4),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
    st.data(),
)
def test_every_token_is_where_it_should_be(lengths, capacity, batch_size, least, shuffle, data):
    if data.draw(st.booleans()):
        window = data.draw(st.integers(1, 50))
        strategy = data.draw(st.sampled_from(["first-fit", "best-fit"]))
        pack = Pack(capacity, lengths="length", window=window, strategy=strategy, pad=-1)
    else:
        remainder = data.draw(st.sampled_from(["drop", "keep"]))
        pack = Concatenate(capacity, lengths="length", remainder=remainder, pad=-1)
    source = Documents(lengths)
    wanted = rows_of(source, 11, least, pack, 2, shuffle=shuffle)
    if len(wanted) // 2 < batch_size:
        return
    pipe = made(pack, batch_size, source=source, epochs=2, least=least, shuffle=shuffle)
    batches = list(pipe.iterator(prefetch=0, window=3))
    assert len(batches) == len(wanted) // batch_size
    for number, batch in enumerate(batches):
        rows = wanted[number * batch_size : (number + 1) * batch_size]
        np.testing.assert_equal(batch, stacked(rows, np.int32))
        assert {name: column.dtype for name, column in batch.items()} == dict.fromkeys(batch, "i4")


@pytest.mark.parametrize("pack", BOTH)
def test_resumed_anywhere_in_a_new_object_the_rest_is_the_same(pack):
    pipe = made(pack)
    batches = pipe.iterator()
    states, served = [batches.get_state()], []
    for batch in batches:
        served.append(batch)
        states.append(batches.get_state())
    assert len(served) > 8
    for k, state in enumerate(states):
        again = made(pack).iterator(prefetch=k % 3, window=1 + k % 4)
        again.set_state(json.loads(json.dumps(state)))
        assert again.get_state() == state
        np.testing.assert_equal(list(again), served[k:])


@pytest.mark.parametrize("pack", BOTH)
def test_another_batch_size_goes_on_with_the_same_rows(pack):
    first = made(pack, 3).iterator()
    for _ in range(4):
        next(first)
    second = made(pack, 5).iterator()
    second.set_state(first.get_state())
    wanted = rows_of(Documents(LENGTHS), 11, 2, pack, 3)[12:]
    for number, batch in enumerate(second):
        np.testing.assert_equal(batch, stacked(wanted[5 * number : 5 * number + 5], np.int32))


@pytest.mark.parametrize("pack", BOTH)
def test_hosts_that_read_their_rows_make_the_same_batch(pack):
    pipe = made(pack, 8, epochs=4)
    whole = list(pipe)
    assert len(whole) > 3
    parts = []
    for host in range(4):
        own = made(pack, 8, epochs=4)
        recipe = Recipe(tuple(own.sources.values()), (), own.seed)
        rows = np.arange(2 * host, 2 * host + 2)
        window = Window(recipe, own.plan, 0, len(whole), rows, Replaced())
        parts.append([window.batch(index).batch for index in range(window.count)])
    for number, batch in enumerate(whole):
        for name, column in batch.items():
            together = np.concatenate([part[number][name] for part in parts])
            np.testing.assert_array_equal(together, column)


@pytest.mark.parametrize("pack", BOTH)
def test_global_arrays_and_their_state(pack):
    mesh = jax.make_mesh((4,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    pipe = made(pack, 4)
    plain, sharded = pipe.iterator(), pipe.iterator(sharding=sharding)
    for batch, there in zip(plain, sharded, strict=True):
        assert isinstance(there["tokens"], jax.Array)
        np.testing.assert_equal(jax.device_get(there), batch)
        assert plain.get_state() == sharded.get_state()


@pytest.mark.parametrize("pack", [Pack(8, lengths="length", window=6), BOTH[1]])
def test_several_packed_sources(pack):
    web, code = Documents(LENGTHS), Documents([7] * 12, name="code")
    pipe = Pipeline(
        {"web": web, "code": code},
        batch_size=4,
        seed=11,
        epochs=2,
        filter={"web": Where("score", ">=", 2)},
        pack=pack,
        weights={"web": 3, "code": 1},
    )
    wanted = [rows_of(web, 11, 2, pack, 3), rows_of(code, 11, None, pack, 3, number=1)]
    for number, batch in enumerate(pipe):
        sources = pipe.plan.rows(number).sources.tolist()
        rows = [wanted[source].pop(0) for source in sources]
        np.testing.assert_equal(batch, stacked(rows, np.int32))
    assert number > 8


def test_records_of_bytes():
    pack = Pack(8, lengths=LENGTHS, window=6, dtype="int32")
    source = Documents(LENGTHS, as_bytes=True)
    pipe = Pipeline(source, batch_size=3, seed=11, epochs=1, pack=pack)
    wanted = rows_of(source, 11, None, pack, 1)
    for number, batch in enumerate(pipe):
        np.testing.assert_equal(batch, stacked(wanted[3 * number : 3 * number + 3], np.int32))


def test_functions_come_after_packing():
    pipe = made(BOTH[0]).map(lambda row: {"sum": row["tokens"].sum()}, version="1")
    sums = [batch["sum"].tolist() for batch in pipe]
    assert sums == [batch["tokens"].sum(1).tolist() for batch in made(BOTH[0])]


def test_only_filtered():
    pipe = made(None, 4, epochs=1, shuffle=False)
    assert [row for batch in pipe for row in batch["score"].tolist()] == [*range(2, 10)] * 2
    assert len(pipe.source) == 16


@pytest.mark.parametrize("pack", BOTH)
def test_other_settings_of_the_same_pipeline(pack):
    pipe = dataclasses.replace(made(pack), seed=12)
    np.testing.assert_equal(list(pipe), list(made(pack, seed=12)))
    pipe = dataclasses.replace(made(pack), shuffle=False)
    np.testing.assert_equal(list(pipe), list(made(pack, shuffle=False)))


def test_orders_that_documents_cannot_have():
    with pytest.raises(Misuse, match=r"wanted one of global, .* found 'windows'"):
        made(BOTH[1]).source.shuffled("windows", 1, 0, 16)


# -- cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", BOTH)
def test_a_window_is_one_sorted_read_without_repeats(pack):
    source = Documents(LENGTHS)
    pipe = made(pack, source=source)
    source.calls.clear()
    batches = pipe.iterator(prefetch=0, window=1)
    batches.seek(9)
    batches.get_state()
    batches.plan.describe(2, 3)
    pipe.pieces(range(4))
    assert source.calls == []
    next(batches)
    (call,) = source.calls
    assert call.tolist() == np.unique(pipe.pieces(3).records).tolist()


def test_columns_are_read_once_for_all_that_come_of_a_pipeline():
    source = Documents(LENGTHS)
    pipe = made(BOTH[1], source=source)
    assert [call.tolist() for call in source.calls] == [[*range(20)]]  # score and length
    source.calls.clear()
    pipe.map(lambda row: row, version="1").map_batch(lambda batch: batch, version="1")
    again = pickle.loads(pickle.dumps(pipe))
    assert source.calls == []
    np.testing.assert_equal(list(again), list(pipe))


@pytest.mark.parametrize("pack", BOTH)
def test_a_state_is_small(pack):
    state = made(pack).iterator().get_state()
    assert len(json.dumps(state)) <= 1024


# -- where it comes from ---------------------------------------------------------------------------


@pytest.mark.parametrize("pack", BOTH)
def test_from_a_batch_to_its_documents_and_back(pack):
    source = Documents(LENGTHS)
    pipe = made(pack, source=source)
    holding = {}
    for number, batch in enumerate(pipe):
        held = pipe.pieces(number)
        remade = np.zeros_like(batch["tokens"])
        for row, _, _, record, start, length, offset in zip(
            *(e.tolist() for e in held), strict=True
        ):
            stretch = source.document(record)[start : start + length]
            remade[row, offset : offset + length] = stretch
        np.testing.assert_array_equal(remade, batch["tokens"])
        for token in batch["tokens"][batch["segment_ids"] > 0].tolist():
            holding.setdefault(divmod(token, 1000), set()).add(number)
    for record, length in enumerate(LENGTHS):
        every = set()
        for token in range(length):
            wanted = holding.get((record, token), set())
            assert set(pipe.batches(record, token=token)) == wanted
            every |= wanted
        assert pipe.batches(record) == tuple(sorted(every))
    together = pipe.pieces(range(3))
    assert together.records[together.rows >= 6].tolist() == pipe.pieces(2).records.tolist()


def test_from_a_filtered_batch_and_back():
    pipe = made(None, 4, epochs=2)
    for number, batch in enumerate(pipe):
        held = pipe.pieces(number)
        assert (held.records % 10).tolist() == batch["score"].tolist()
        assert set(held.lengths.tolist()) == {-1}
        assert all(number in pipe.batches(record) for record in held.records.tolist())
    assert pipe.batches(1) == ()


def test_skipped_rows_are_told_by_the_plan_of_the_iterator():
    batches = made(BOTH[0]).iterator()
    batches.skip([(0, 3)])
    pipe = made(BOTH[0])
    assert pipe.pieces(0, plan=batches.plan).records.tolist() == pipe.pieces(1).records.tolist()


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", BOTH)
def test_a_document_that_cannot_be_read_is_named_with_its_row(pack):
    source = Documents(LENGTHS)
    pipe = made(pack, source=source, epochs=1)
    (first, *_) = pipe.batches(9)
    source.bad = {9}
    batches = pipe.iterator()
    served = [next(batches) for _ in range(first)]
    assert len(served) == first
    with pytest.raises(BadRecord, match="rotten") as caught:
        next(batches)
    rows = pipe.plan.records(first).tolist()
    held = pipe.pieces(first)
    assert caught.value.index in {rows[row] for row in held.rows[held.records == 9].tolist()}


@pytest.mark.parametrize("kind", [Pack, Concatenate])
def test_documents_that_are_not_as_long_as_the_index_says(kind):
    lengths = [length + (d == 7) for d, length in enumerate(LENGTHS)]
    pipe = made(kind(8, lengths=lengths), epochs=1)
    with pytest.raises(Mismatch, match="shelf 7") as caught:
        list(pipe)
    assert caught.value.differences == ("document 5 (shelf 7): wanted 31 tokens, found 30",)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"pack": Pack(9, lengths="length", window=6)}, ["capacity", "bins"]),
        ({"pack": Pack(8, lengths="length", window=7)}, ["pack_window"]),
        ({"pack": Pack(8, lengths="length", window=6, pad=1)}, ["pad"]),
        ({"pack": BOTH[1]}, ["pack", "document_order"]),
        ({"least": 3}, ["filter"]),
    ],
)
def test_a_state_of_another_packing_is_refused(change, fields):
    state = made(BOTH[0]).iterator().get_state()
    options = {"pack": BOTH[0]} | change
    with pytest.raises(Mismatch) as caught:
        made(**options).iterator().set_state(state)
    named = " ".join(caught.value.differences)
    for field in fields:
        assert f"sources.source.{field}: saved" in named


def test_another_order_of_documents_is_refused():
    state = made(BOTH[1]).iterator().get_state()
    with pytest.raises(Mismatch, match=r"document_order: saved 'global', here 'grain'"):
        made(BOTH[1], shuffle="grain").iterator().set_state(state)
    with pytest.raises(Mismatch, match=r"plan\.seed: saved 11, here 12"):
        made(BOTH[1], seed=12).iterator().set_state(state)

"""Bad records and their substitutes: what is served, and what the state tells."""

from __future__ import annotations

import json

import numpy as np
import pytest
from document_source import Documents
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_source import Columns, Records
from replacing_oracle import BAD, PAIRS, ids_of, made, rows, seeded, served, substitute, wanted
from turning_source import Turning

from datapipe import Concatenate, Pack, Pipeline, Where
from datapipe.batches.substitutes import Replaced, candidates
from datapipe.state import State

# -- substitutes -----------------------------------------------------------------------------------


def test_published_substitutes():
    """They may never change: a resumed run would serve others."""
    assert [next(candidates(0, id, 1000)) for id in range(6)] == [933, 568, 861, 324, 926, 271]
    assert list(candidates(3, 37, 10**9))[:4] == [702426951, 57479258, 843671065, 54389023]
    assert len(list(candidates(0, 5, 10))) == 64


@given(
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2**62 - 1)), max_size=12),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 2**62 - 1)), max_size=12),
)
def test_a_set_of_records(some, more):
    replaced = Replaced.of(some).union(more)
    both = some | more
    assert list(replaced.pairs()) == sorted(both)
    assert [list(ids) for ids in replaced.ids] == ids_of(both)
    assert len(replaced) == len(both)
    for source in range(5):
        for id in {id for _, id in both} | {0, 2**62 - 1}:
            assert ((source, id) in replaced) == ((source, id) in both)
            assert replaced.mask(source, np.array([id]))[0] == ((source, id) in both)


@given(st.sets(st.tuples(st.integers(0, 1), st.integers(0, 2**62 - 1)), max_size=12))
def test_a_state_says_what_is_replaced(pairs):
    pipe = Pipeline({"a": Records(9), "b": Records(9)}, batch_size=3, seed=1)
    state = {**pipe.iterator().get_state(), "replaced": ids_of(pairs)}
    parsed = State.from_json(json.loads(json.dumps(state)))
    assert set(parsed.replaced.pairs()) == pairs
    assert parsed.to_json() == state
    iterator = pipe.iterator()
    iterator.set_state(state)
    assert iterator.get_state() == state


def test_sixteen_bytes_for_each_in_a_state():
    iterator = Pipeline(Records(10**9), batch_size=3, seed=1).iterator()
    state = iterator.get_state()
    empty = len(json.dumps(state))
    records = np.random.default_rng(5).choice(10**9, 1000, replace=False)
    state["replaced"] = [sorted(records.tolist())]
    iterator.set_state(state)
    assert len(json.dumps(iterator.get_state())) <= empty + 16 * 1000


# -- what is served --------------------------------------------------------------------------------


@pytest.mark.parametrize("says_which", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"prefetch": 0, "window": 1}, {"prefetch": 3, "window": 8}, {"prefetch": 4, "threads": 3}],
)
def test_another_record_takes_the_place(says_which, options):
    pipe = made(Records(60, bad=BAD, says_which=says_which))
    batches, met = wanted(pipe)
    assert len(met[0]) < len(met[-1]) == len(BAD)
    with pipe.iterator(**options) as iterator:
        for batch, known in zip(batches, met, strict=True):
            assert next(iterator).tolist() == batch
            # Those that were met ahead do not count.
            assert iterator.get_state()["replaced"] == ids_of(known)


@pytest.mark.parametrize("seed", range(6))
def test_random_damage(seed):
    bad = seeded(seed, 40, 14)
    pipe = made(Records(40, bad=[record for _, record in bad]), seed=seed, batch_size=9)
    assert rows(pipe) == wanted(pipe, bad, 40)[0], f"seed {seed}"


@pytest.mark.parametrize("source", [Records, Columns])
def test_without_functions_of_examples(source):
    clean = Pipeline(source(60), batch_size=7, seed=11, epochs=1)
    pipe = Pipeline(source(60, bad=BAD), batch_size=7, seed=11, epochs=1, on_bad_record="replace")
    whole = source(60).read(np.arange(60))
    batches, _ = wanted(pipe)
    for batch, plain, records in zip(pipe, clean, batches, strict=True):
        if source is Records:
            assert batch.tolist() == [whole[record] for record in records]
            continue
        for name, column in whole.items():
            assert batch[name].dtype == plain[name].dtype
            assert batch[name].shape == plain[name].shape
            np.testing.assert_array_equal(batch[name], [column[record] for record in records])


def test_several_sources():
    sources = {"a": Records(30, bad=[3, 4]), "b": Records(50, name="b", bad=[4, 20, 21])}
    bad = {(0, 3), (0, 4), (1, 4), (1, 20), (1, 21)}
    pipe = made(sources, weights={"a": 1, "b": 2}, epochs=2)
    found, met = served(pipe.plan, range(pipe.plan.batches_left(0)), [30, 50], bad)
    iterator = pipe.iterator()
    assert [batch.tolist() for batch in iterator] == [[r for _, r in batch] for batch in found]
    assert iterator.get_state()["replaced"] == ids_of(met[-1]) == [[3, 4], [4, 20, 21]]


def test_a_function_that_fails_for_a_record():
    def choke(value):
        if value in BAD:
            raise OSError("image file is truncated")  # as decoders of images do, without a number
        return value

    pipe = made(bad=()).map(choke, version="1").map_batch(lambda batch: batch + 0, version="1")
    assert rows(pipe) == wanted(pipe)[0]
    both = made(bad=BAD[:2]).map(choke, version="1")
    assert rows(both) == wanted(pipe)[0]


def test_a_substitute_has_the_random_numbers_of_its_own_record():
    def drawn(value, rng):
        return value, rng.integers(2**40)

    clean, pipe = (
        made(bad=bad, epochs=1, batch_size=60).random_map(drawn, version="1") for bad in ((), BAD)
    )
    ((records, draws),) = clean
    ((found, others),) = pipe
    draw_of = dict(zip(records.tolist(), draws.tolist(), strict=True))
    assert [draw_of[record] for record in found.tolist()] == others.tolist()
    assert not set(BAD) & set(found.tolist())


def test_items_that_the_epoch_decides():
    source = Turning(5, bad=[(1, 2), (2, 0)])
    pipe = Pipeline(source, batch_size=5, seed=0, shuffle=False, epochs=3, on_bad_record="replace")
    iterator = pipe.iterator(window=3)
    found = [batch.tolist() for batch in iterator]
    in_place = {7: substitute(0, 7, 5, {(0, 2)}), 10: substitute(0, 10, 5, {(0, 0)})}
    assert found == [
        [b"%d:%d" % (epoch, in_place.get(5 * epoch + item, item)) for item in range(5)]
        for epoch in range(3)
    ]
    assert iterator.get_state()["replaced"] == [[7, 10]]


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [7, 4])
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 3, "threads": 2}])
def test_a_resume_anywhere_equals_the_undisturbed_run(batch_size, options):
    """From every state, also with another batch size: the examples that follow are the same."""
    straight = made()
    whole = [record for batch in rows(made(batch_size=1)) for record in batch]
    iterator = straight.iterator()
    for at in range(straight.plan.batches_left(0)):
        state = json.loads(json.dumps(iterator.get_state()))
        resumed = made(batch_size=batch_size).iterator(**options)
        resumed.set_state(state)
        rest = [record for batch in resumed for record in batch.tolist()]
        assert rest == whole[7 * at :][: len(rest)]
        assert len(whole) - 7 * at - len(rest) < batch_size
        next(iterator)


@pytest.mark.parametrize("policy", ["raise", "replace"])
@pytest.mark.parametrize("at", [0, 2, 9, 13])
def test_what_was_replaced_stays_so_when_the_file_is_mended(policy, at):
    """Whatever the policy says by then."""
    iterator = made().iterator()
    for _ in range(at):
        next(iterator)
    _, met = wanted(made())
    known = met[at - 1] if at else set()
    resumed = made(bad=(), on_bad_record=policy).iterator()
    resumed.set_state(iterator.get_state())
    rest = [batch.tolist() for batch in resumed]
    assert rest == wanted(made(), known)[0][at:]
    if at == 9:  # an epoch is over, and all are known
        assert known == PAIRS
        assert rest == wanted(made())[0][at:]
    assert resumed.get_state()["replaced"] == ids_of(known)


def test_a_state_from_before_knows_nothing_of_it():
    iterator = made().iterator()
    start = iterator.get_state()
    whole = [batch.tolist() for batch in iterator]
    iterator.set_state(start)
    assert iterator.get_state()["replaced"] == []
    assert [batch.tolist() for batch in iterator] == whole
    iterator.seek(7)
    assert iterator.get_state()["replaced"] == [BAD]
    assert next(iterator).tolist() == whole[1]


def test_skips_and_rewinds_mean_the_same_examples():
    """What a step held is counted in examples: which record is served there is another matter."""
    iterator, clean = made().iterator(), made(bad=()).iterator()
    for _ in range(4):
        next(iterator), next(clean)
    state, plain = iterator.get_state(), clean.get_state()
    assert state["replaced"]
    for size in (7, 5):
        ranges = iterator.span(state, 1, 3, batch_size=size)
        assert ranges == clean.span(plain, 1, 3, batch_size=size)
        after = iterator.position_after(state, 3, batch_size=size)
        assert after == clean.position_after(plain, 3, batch_size=size)
    for _ in range(3):
        next(iterator)
    ranges = iterator.span(state, 1, 3)
    iterator.set_state(state)
    iterator.skip(ranges)
    pipe = made()
    plan = pipe.plan.skipping(ranges)
    found, _ = served(plan, range(4, plan.batches_left(0)), [60], PAIRS)
    assert [batch.tolist() for batch in iterator] == [[r for _, r in batch] for batch in found]


def test_a_bad_record_that_is_skipped_is_never_met():
    pipe = made(epochs=1)
    at = {r: e for e, r in enumerate(pipe.plan.records(range(pipe.plan.batches_left(0))).tolist())}
    others = set(BAD) & set(at)
    iterator = pipe.iterator()
    iterator.skip([(at[record], at[record] + 1) for record in others])
    rest = [record for batch in iterator for record in batch.tolist()]
    assert not others & set(rest)
    assert iterator.get_state()["replaced"] == []


class Mended(Records):
    """Records that are bad until a few reads were made."""

    def __init__(self, count, bad, reads):
        super().__init__(count, bad=bad)
        self.reads = reads

    def read(self, indices):
        if len(self.calls) >= self.reads:
            self.bad = set()
        return super().read(indices)


@pytest.mark.parametrize("reads", range(1, 12))
@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 5, "window": 4}])
def test_mended_while_the_run_goes_on(reads, options):
    """Once its substitute is delivered a record is replaced: also in what was made ahead."""
    source = Mended(6, [1, 4], reads)
    pipe = made(source, batch_size=3, epochs=6)
    plan = pipe.plan
    with pipe.iterator(**options) as iterator:
        for index in range(plan.batches_left(0)):
            known = {(0, id) for ids in iterator.get_state()["replaced"] for id in ids}
            batch = next(iterator).tolist()
            known |= {(0, id) for ids in iterator.get_state()["replaced"] for id in ids}
            found, _ = served(plan, range(index, index + 1), [6], known)
            assert batch == [record for _, record in found[0]], f"batch {index}"


class Recovering(Records):
    """A record that is bad at the first few reads of it."""

    def __init__(self, count, bad, failures):
        super().__init__(count, bad=[bad])
        self.failures = failures

    def read(self, indices):
        self.failures -= bool(self.bad & {*np.asarray(indices).tolist()})
        if self.failures < 0:
            self.bad = set()
        return super().read(indices)


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 5, "window": 4}])
@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_substitute_that_was_good_when_it_was_made_ahead(options, failures):
    """What is served is what a resume from there would serve, where that is known to be bad."""
    items, first = 12, 4  # which stands in for others
    others = {(0, r) for r in range(items) if r != first and substitute(0, r, items, ()) == first}
    assert others
    for seed in range(12):
        pipe = made(Recovering(items, first, failures), batch_size=2, seed=seed, epochs=1)
        with pipe.iterator(**options) as iterator:
            iterator.set_state({**iterator.get_state(), "replaced": ids_of(others)})
            for index in range(pipe.plan.batches_left(0)):
                batch = next(iterator).tolist()
                met = {(0, id) for ids in iterator.get_state()["replaced"] for id in ids}
                found, _ = served(pipe.plan, range(index, index + 1), [items], met)
                assert batch == [record for _, record in found[0]], f"seed {seed}, batch {index}"


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_damage_any_interruptions(data):
    """Random damage, batch sizes that change and resumes: one sequence of examples."""
    items = data.draw(st.integers(4, 30))
    bad = data.draw(st.sets(st.integers(0, items - 1), max_size=items // 2))
    pairs = {(0, record) for record in bad}
    seed = data.draw(st.integers(0, 100))

    def piped(size):
        return made(Records(items, bad=bad), batch_size=size, seed=seed, epochs=2)

    whole = [r for batch in wanted(piped(1), pairs, items)[0] for r in batch]
    state, found = piped(1).iterator().get_state(), []
    while len(found) < len(whole):
        size = data.draw(st.integers(1, min(items, len(whole) - len(found))))
        iterator = piped(size).iterator(prefetch=data.draw(st.integers(0, 3)))
        iterator.set_state(state)
        for _ in range(data.draw(st.integers(1, 4))):
            found += next(iterator, np.zeros(0, np.int64)).tolist()
        state = iterator.get_state()
        iterator.close()
    assert found == whole


# -- views and segments ----------------------------------------------------------------------------


def test_a_row_with_a_bad_document_is_replaced_by_another_row():
    lengths = [3, 5, 2, 7, 4, 6, 1, 5, 3, 4, 2, 6]
    for pack in (Pack(8, lengths="length"), Concatenate(8, lengths="length")):
        options = {"batch_size": 3, "seed": 2, "epochs": 2, "pack": pack}
        clean = Pipeline(Documents(lengths), **options)
        source = Documents(lengths)
        pipe = Pipeline(source, **options, on_bad_record="replace")
        source.bad = {4}  # the index of lengths is made
        good = [row for batch in clean for row in batch["tokens"].tolist()]
        bad = [any(4000 <= token < 5000 for token in row) for row in good]
        iterator = pipe.iterator()
        found = [row for batch in iterator for row in batch["tokens"].tolist()]
        assert any(bad)
        assert len(found) == len(good)
        for row, planned, is_bad in zip(found, good, bad, strict=True):
            assert (row != planned) == is_bad
            assert row in good  # a whole row of this epoch or, where they are the same, of all
        assert iterator.get_state()["replaced"]
        again = pipe.iterator()
        again.set_state(iterator.get_state() | {"next_example": 0})
        np.testing.assert_equal(list(again), list(pipe.iterator()))


def test_what_a_filter_leaves_out_does_not_stand_in():
    lengths = [1 + number % 5 for number in range(40)]
    source = Documents(lengths)
    pipe = Pipeline(
        source,
        batch_size=4,
        seed=2,
        epochs=3,
        on_bad_record="replace",
        filter=Where("length", ">=", 3),
    )
    source.bad = {3, 11, 19, 27, 35}
    found = [length for batch in pipe for length in batch["length"].tolist()]
    assert set(found) == {3, 4, 5}
    assert len(found) == 4 * pipe.plan.batches_left(0)


def test_what_is_replaced_outlives_a_change_of_the_data():
    before = made({"a": Records(30, bad=[3, 4])}, batch_size=5).iterator()
    for _ in range(6):
        next(before)
    state = before.get_state()
    assert state["replaced"] == [[3, 4]]
    sources = {"a": Records(30), "b": Records(20, name="b", bad=[7])}
    after = made(sources, batch_size=5, weights={"a": 1, "b": 1}).iterator(on_change="segment")
    after.set_state(state)
    assert after.get_state()["replaced"] == [[3, 4]]
    rest = [batch.tolist() for batch in after]
    bad = {(0, 3), (0, 4), (1, 7)}
    found, _ = served(after.plan, range(6, 6 + len(rest)), [30, 20], bad)
    assert rest == [[record for _, record in batch] for batch in found]
    assert after.get_state()["replaced"] == [[3, 4], [7]]

"""The pipeline: what comes out, identity and state, errors."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Columns, Records, number

import datapipe
from datapipe import BadRecord, Damaged, Mismatch, Misuse, NotFound, Pipeline, Unsupported
from datapipe.batches.substitutes import Replaced
from datapipe.order.plan import Plan
from datapipe.state import State, identity, mismatch


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
    assert len(served) == plan.batch_count
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


# -- identity and state ----------------------------------------------------------------------------


def base(**changes):
    arguments = {"batch_size": 4, "seed": 1, "epochs": 2, **changes}
    source = arguments.pop("source", None) or Records(20)
    return Pipeline(source, **arguments).map(number, version="1")


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (lambda: base(seed=2), "plan.seed: saved 1, here 2"),
        (lambda: base(shuffle=False), "plan.shuffle: saved 'global', here 'none'"),
        (lambda: base(source=Records(21)), "segment.items: saved [20], here [21]"),
        (
            lambda: base(source=Records(20, name="b")),
            "sources.source.name: saved 'memory', here 'b'",
        ),
        (
            lambda: Pipeline(Records(20), batch_size=4, seed=1).map(number, version="2"),
            "transforms[0]: saved 'map 1', here 'map 2'",
        ),
        (
            lambda: base().map_batch(lambda b: b, version="1"),
            "transforms[1]: saved nothing, here 'map_batch 1'",
        ),
        (
            lambda: Pipeline(Records(20), batch_size=4, seed=1),
            "transforms[0]: saved 'map 1', here nothing",
        ),
    ],
)
def test_a_state_of_other_data_is_refused(other, line):
    iterator = base().iterator(prefetch=0)
    next(iterator)
    changed = other().iterator(prefetch=0)
    before = changed.get_state()
    with pytest.raises(Mismatch, match="the saved position belongs to other data") as caught:
        changed.set_state(iterator.get_state())
    assert line in caught.value.differences
    assert line in str(caught.value)
    assert changed.get_state() == before


def test_all_differences_are_told_at_once():
    state = base().iterator().get_state()
    with pytest.raises(Mismatch) as caught:
        base(seed=2, shuffle=False, source=Records(30)).iterator().set_state(state)
    told = " ".join(caught.value.differences)
    for part in ("plan.seed", "plan.shuffle", "sources.source.fingerprint", "segment.items"):
        assert part in told


def test_batch_size_and_length_of_the_run_are_no_part_of_it():
    state = base().iterator().get_state()
    for changes in ({"batch_size": 7}, {"epochs": 5}, {"epochs": None}, {"remainder": "keep"}):
        iterator = base(**changes).iterator()
        iterator.set_state(state)
        assert json.dumps(iterator.get_state()) == json.dumps(state)


def test_a_position_beyond_the_end_is_refused():
    iterator = base(epochs=3).iterator(prefetch=0)
    iterator.seek(50)
    with pytest.raises(Mismatch, match=r"saved 50, here the last epoch ends at 40; give more"):
        base(epochs=2).iterator().set_state(iterator.get_state())


def test_the_state_is_small_and_plain_json():
    class Wide(Records):
        def fingerprint(self):
            files = [{"name": f"shard-{i:05d}", "digest": "f" * 32} for i in range(4000)]
            many = {f"field-{i}": "v" * 20 for i in range(100)}
            return {"files": files, "digest": "d" * 32, **many}

    iterator = base(source=Wide(20)).iterator()
    state = iterator.get_state()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) <= 1024
    iterator.skip((3 * 10**9 + 100 * i, 3 * 10**9 + 100 * i + 10) for i in range(100))
    skipped = json.dumps(iterator.get_state(), separators=(",", ":"))
    assert len(skipped) <= 1024 + 32 * 100


def test_a_state_is_a_copy():
    iterator = base().iterator()
    state = iterator.get_state()
    state["plan"]["seed"] = 99
    state["skips"].append(1)
    state["transforms"].clear()
    assert iterator.get_state() == base().iterator().get_state()


def good():
    known = identity(Plan.of(20, 4, seed=1), {"source": {"a": 1}}, ["map 1"])
    return State(8, ((9, 12), (15, 16)), Replaced.of([(0, 5), (0, 17)]), known).to_json()


def test_parse_is_the_inverse_of_emit():
    assert State.from_json(good()).to_json() == good()
    assert State.from_json(json.loads(json.dumps(good()))).to_json() == good()
    assert mismatch(State.from_json(good()).identity, good()) == []


@pytest.mark.parametrize(
    ("path", "value", "error", "text"),
    [
        ((), None, Damaged, "not a data state"),
        ((), [], Damaged, "not a data state"),
        ((), {"next_index": 3}, Damaged, "states of other loaders do not fit"),
        (("format",), 4, Unsupported, "format 4: this release reads formats 2 to 3"),
        (("format",), 1, Unsupported, "format 1: this release reads formats 2 to 3"),
        (("format",), "2", Damaged, "format: wanted an integer"),
        (("format",), 2, Damaged, "unknown fields.*replaced"),
        (("next_example",), -1, Damaged, "next_example"),
        (("next_example",), 2**63, Damaged, "next_example"),
        (("next_example",), True, Damaged, "next_example"),
        (("next_example",), 1.0, Damaged, "next_example"),
        (("skips",), "ab", Damaged, "skips: wanted a list"),
        (("skips",), [9], Damaged, "wanted pairs of gap and length"),
        (("skips", 0), -1, Damaged, r"skips\[0\], a gap"),
        (("skips", 0), [12, 9], Damaged, r"skips\[0\], a gap"),
        (("skips", 1), 0, Damaged, r"skips\[1\], a length"),
        (("skips", 2), 0, Damaged, r"skips\[2\], a gap"),  # adjacent: would be one range
        (("skips", 1), 2**62, Damaged, "is of two sources"),
        (("replaced",), 7, Damaged, "replaced: wanted a list"),
        (("replaced", 0), "ab", Damaged, r"replaced\[0\]: wanted a list"),
        (("replaced", 0), [-1], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [2**62], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [True], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [5, 5], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [5, 4], Damaged, r"replaced\[0\], a record"),
        (("replaced", 0), [], Damaged, "the last of which has some"),
        (("replaced",), [[], [3]], Damaged, "records of 1 sources or fewer"),
        (("segments",), [], Damaged, "begins at example 0"),
        (("segments", 0), {"first": 1, "items": [20], "counts": [1]}, Damaged, "example 0"),
        (("segments", 0), {"first": 0, "items": [20], "counts": [0]}, Damaged, "a mixture wants"),
        (("segments", 0), {"first": 0, "items": [20], "counts": [1, 1]}, Damaged, "a count for"),
        (("segments", 0), {"first": 0, "items": [2, 2], "counts": [1, 1]}, Damaged, "1 sources"),
        (("segments", 0), {"first": 0}, Damaged, "missing fields"),
        (("segments", 0), 7, Damaged, "wanted an object"),
        (("plan",), [], Damaged, "plan: wanted an object"),
        (("plan", "seed"), None, Damaged, "plan: wanted names"),
        (("sources",), {}, Damaged, "sources: wanted a list"),
        (("sources",), [], Damaged, "items of 0 sources"),
        (("sources", 0), ["a"], Damaged, "wanted a new name and an object"),
        (("sources", 0), [1, {}], Damaged, "wanted a new name and an object"),
        (("sources", 0, 1), {1: 2}, Damaged, "wanted names"),
        (("transforms",), [3], Damaged, "transforms: wanted texts"),
        (("extra",), 3, Damaged, "unknown fields"),
    ],
)
def test_a_state_is_parsed_as_hostile(path, value, error, text):
    state = copy.deepcopy(good())
    if path:
        *inner, last = path
        place = state
        for key in inner:
            place = place[key]
        place[last] = value
    else:
        state = value
    with pytest.raises(error, match=text):
        State.from_json(state)


def test_a_state_of_format_2_is_read():
    state = {**good(), "format": 2}
    del state["replaced"]
    assert State.from_json(state).to_json() == {**good(), "replaced": []}


@pytest.mark.parametrize("field", sorted(good()))
def test_a_missing_field_is_named(field):
    state = good()
    del state[field]
    with pytest.raises(Damaged, match=field):
        State.from_json(state)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(good())), JSON_VALUES)
def test_no_value_gets_past_the_parser_unseen(field, value):
    """Either an error of ours, or a state that means what it says."""
    state = {**good(), field: value}
    try:
        parsed = State.from_json(state)
    except datapipe.DataError:
        return
    assert json.dumps(parsed.to_json()) == json.dumps(state)


# -- errors ----------------------------------------------------------------------------------------


def test_an_empty_source():
    with pytest.raises(NotFound, match="holds no records"):
        Pipeline(Records(0), batch_size=1, seed=1)


def test_a_batch_larger_than_the_source():
    with pytest.raises(Misuse, match="a batch of 21 is larger than the source, which holds 20"):
        base(batch_size=21)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Pipeline("a*.array_record", batch_size=1, seed=1), "formats.open_source"),
        (lambda: base(seed=-1), "seed must be"),
        (lambda: base(shuffle="chunks"), "shuffle must be True, False, or one of"),
        (lambda: base(shuffle_window=2), "shuffle_window is for shuffle='blocks'"),
        (lambda: base(shuffle="blocks", shuffle_window=0), "shuffle_window must be"),
        (lambda: base(epochs=0), "epochs must be"),
        (lambda: base(remainder="pad"), "remainder must be"),
        (lambda: base().map(3, version="1"), ".map wants a function"),
        (lambda: base().map(number, version=1), ".map wants a version"),
        (lambda: base().map(number, version=""), ".map wants a version"),
        (
            lambda: base().map_batch(len, version="1").map(number, version="1"),
            ".map after .map_batch",
        ),
        (
            lambda: base().map_batch(len, version="1").random_map(number, version="1"),
            ".random_map after .map_batch",
        ),
        (lambda: base().iterator(prefetch=-1), "prefetch must be"),
        (lambda: base().iterator(window=0), "window must be"),
        (lambda: base().iterator(threads=True), "threads must be"),
    ],
)
def test_wrong_use_is_told(call, text):
    with pytest.raises(Misuse, match=text):
        call()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda n: np.zeros(n % 3), r"has float64\[\d\], record \d+ has float64\[\d\]; make them"),
        (lambda n: {"a": {"b": n if n % 2 else float(n)}}, r"at \['a'\]\['b'\]: record"),
        (lambda n: {"a": 1} if n % 2 else {"b": 1}, r"a dict of \["),
        (lambda n: np.int32(n) if n % 2 else np.int64(n), r"int(32|64)\[\]"),
        (lambda n: (n,) * (1 + n % 2), "a tuple of"),
        (lambda n: {"big": 2**70}, "an integer at .*big.* does not fit in 64 bits"),
    ],
)
def test_examples_that_do_not_fit_together(function, text):
    pipe = Pipeline(Records(10), batch_size=10, seed=1).map(number, version="1")
    with pytest.raises(Mismatch, match=text):
        next(pipe.map(function, version="1").iterator())


@pytest.mark.parametrize("says_which", [True, False])
@pytest.mark.parametrize("options", [{"prefetch": 0, "window": 1}, {"prefetch": 3, "window": 8}])
def test_a_bad_record_is_named_in_its_own_batch(says_which, options):
    pipe = Pipeline(Records(60, bad=[37], says_which=says_which), batch_size=5, seed=1, epochs=1)
    plan = pipe.plan
    (at,) = plan.batches(37)
    example = int(np.flatnonzero(plan.records(range(plan.batch_count)) == 37)[0])
    assert at > 2
    iterator = pipe.map(number, version="1").iterator(**options)
    for index in range(at):  # those before come, although they share a window with it
        assert next(iterator).tolist() == plan.records(index).tolist()
    for _ in range(2):  # and it is no accident that passes
        with pytest.raises(BadRecord, match="memory-shard-3, record 7") as caught:
            next(iterator)
        assert iterator.next_example == 5 * at
        assert caught.value.index == 37
        assert f"plan.addresses([({example}, {example + 1})])" in str(caught.value)
        cause = caught.value.__cause__
        assert isinstance(cause, BadRecord if says_which else RuntimeError)
    iterator.skip([(example, example + 1)])  # the cure that the message names
    rest = [record for batch in iterator for record in batch.tolist()]
    wanted = plan.skipping([(example, example + 1)]).records(range(at, plan.batch_count))
    assert rest == wanted.tolist()
    assert 37 not in rest


@pytest.mark.parametrize("prefetch", [0, 2])
def test_trouble_that_passes_costs_no_batch(prefetch):
    class Shaky(Records):
        troubles = 3

        def read(self, indices):
            if self.troubles:
                self.troubles -= 1
                raise datapipe.StoreFailed("no answer yet")
            return super().read(indices)

    pipe = Pipeline(Shaky(20), batch_size=4, seed=1, epochs=1).map(number, version="1")
    iterator = pipe.iterator(prefetch=prefetch, window=1)
    for _ in range(4):
        try:
            first = next(iterator)
            break
        except datapipe.StoreFailed:
            assert iterator.next_example == 0
    assert first.tolist() == pipe.plan.records(0).tolist()
    assert len(list(iterator)) == 4


def test_a_function_that_fails_names_the_record():
    def choke(value):
        if value == 7:
            raise ValueError("seven")
        return value

    pipe = Pipeline(Records(20), batch_size=20, seed=1).map(number, version="1")
    with pytest.raises(
        BadRecord, match=r"record 7 \(memory-shard-0, record 7\) fails in"
    ) as caught:
        next(pipe.map(choke, version="4").iterator())
    assert "in .map 4: ValueError: seven" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_function_of_batches_that_fails_keeps_its_error():
    def choke(batch):
        raise KeyError("tokens")

    pipe = Pipeline(Records(20), batch_size=4, seed=1).map_batch(choke, version="2")
    with pytest.raises(KeyError, match="tokens") as caught:
        next(pipe.iterator())
    # Grain, once it is imported, adds a note of its own.
    assert "in .map_batch 2 of the batch of examples 0 to 3" in caught.value.__notes__


def test_a_function_cannot_end_the_data_by_accident():
    pipe = Pipeline(Records(20), batch_size=4, seed=1)
    for prefetch in (0, 2):
        iterator = pipe.map_batch(lambda batch: next(iter(())), version="1").iterator(
            prefetch=prefetch
        )
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(iterator)


def test_a_source_that_returns_less_is_caught():
    class Short(Records):
        def read(self, indices):
            return super().read(indices)[:-1]

    with pytest.raises(Misuse, match=r"Short.read was asked for 4 records and returned \[3\]"):
        next(Pipeline(Short(20), batch_size=4, seed=1).iterator())


def test_trouble_of_the_store_is_no_bad_record():
    class Away(Records):
        def read(self, indices):
            raise datapipe.StoreFailed("no answer")

    with pytest.raises(datapipe.StoreFailed, match="no answer"):
        next(Pipeline(Away(20), batch_size=4, seed=1).iterator())


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

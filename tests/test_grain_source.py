"""Grain's random-access datasets as sources: what is served is what Grain itself has there."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_source import Columns, Records

from datapipe import BadRecord, GrainSource, Kept, Mismatch, Misuse, Pack, Pipeline, Where
from formats import open_source, write_array_record

COUNT = 11


def example(number):
    return {"id": number, "row": np.arange(number, number + 3), "pair": (b"%d" % number, "é" * 3)}


def jittered(value, rng):
    return {"x": value, "noise": rng.random(2)}


def base():
    return grain.MapDataset.range(COUNT)


CHAINS = {
    "source": lambda: grain.MapDataset.source([np.float32(i) for i in range(COUNT)]),
    "map": lambda: base().map(example),
    "map_with_index": lambda: base().map_with_index(lambda index, value: (index, value)),
    "random_map": lambda: base().seed(7).random_map(jittered),
    "shuffle": lambda: base().shuffle(seed=3).map(example),
    "shuffle_then_random": lambda: base().seed(4).shuffle().random_map(jittered).map(dict),
    "window_shuffle": lambda: base().pipe(
        grain.experimental.WindowShuffleMapDataset, window_size=4, seed=2
    ),
    "mix": lambda: grain.MapDataset.mix([base(), base().map(lambda x: -x)], [0.25, 0.75]),
    "concatenate": lambda: grain.MapDataset.concatenate([base(), base().map(lambda x: -x)]),
    "zip": lambda: grain.experimental.ZipMapDataset([base(), base().shuffle(seed=1)]),
    "slice": lambda: base()[1::3],
    "slice_of_endless": lambda: base().shuffle(seed=5).repeat()[4:27],
    "repeat": lambda: base().shuffle(seed=5).repeat(2),
    "batch": lambda: base().map(example).batch(2, drop_remainder=True),
}


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.asarray(a).dtype.kind in "OSU" or np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def rows_of(batches):
    """Each row of each batch as a tree of its own."""
    return [
        jax.tree.map(lambda leaf: leaf[row], batch)  # noqa: B023  (called at once)
        for batch in batches
        for row in range(len(jax.tree.leaves(batch)[0]))
    ]


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("window", [1, 8])
def test_served_as_it_stands_it_is_grains_own_order_through_the_epochs(name, window):
    dataset = CHAINS[name]()
    pipe = Pipeline(dataset, batch_size=3, seed=0, shuffle=False, epochs=4)
    found = rows_of(pipe.iterator(window=window, prefetch=0))
    wanted = list(dataset.repeat(4))
    assert len(found) == len(wanted) // 3 * 3 > 8
    for one, other in zip(found, wanted, strict=False):
        same(one, other)


LINKS = [
    lambda d, n: d.shuffle(seed=n),
    lambda d, n: d.seed(n).random_map(lambda value, rng: value + int(rng.integers(0, 1000))),
    lambda d, n: d[n % 2 :: 1 + n % 3],
    lambda d, n: d.map(lambda value: value + n),
    lambda d, n: d.map_with_index(lambda index, value: value * 3 + index),
    lambda d, n: grain.MapDataset.mix([d, grain.MapDataset.range(5)], [0.5, 0.5]),
    lambda d, n: grain.MapDataset.concatenate([d, grain.MapDataset.source([7, 7, 8])]),
    lambda d, n: d.repeat(2),
]


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(8, 20),
    links=st.lists(st.tuples(st.sampled_from(LINKS), st.integers(0, 99)), max_size=4),
    batch_size=st.integers(1, 2),
    window=st.sampled_from([1, 8]),
)
def test_any_chain_is_read_in_batches_as_one_by_one(count, links, batch_size, window):
    dataset = grain.MapDataset.source(list(range(count)))
    for link, number in links:
        if len(dataset) >= 8:
            dataset = link(dataset, number)
    pipe = Pipeline(dataset, batch_size=batch_size, seed=0, shuffle=False, epochs=3)
    found = np.concatenate(list(pipe.iterator(prefetch=0, window=window)))
    assert found.tolist() == [dataset[index] for index in range(found.size)]
    assert found.size >= 3 * len(dataset) - batch_size


@pytest.mark.parametrize("name", ["map", "shuffle_then_random", "mix", "slice_of_endless"])
def test_shuffled_by_the_pipeline_every_element_is_in_every_epoch(name):
    dataset = CHAINS[name]()
    pipe = Pipeline(dataset, batch_size=4, seed=9, epochs=3, remainder="keep")
    found = rows_of(pipe)
    rows = pipe.plan.rows(range(pipe.plan.batches_left(0)))
    assert sorted(rows.items[: len(dataset)].tolist()) == list(range(len(dataset)))
    for one, item, epoch in zip(found, rows.items.tolist(), rows.epochs.tolist(), strict=True):
        same(one, dataset[epoch * len(dataset) + item])


@settings(deadline=None, max_examples=8)
@given(stop=st.integers(0, 9), batch_size=st.integers(1, 5), prefetch=st.integers(0, 2))
def test_any_state_restores_into_another_object(stop, batch_size, prefetch):
    def pipe():
        return Pipeline(CHAINS["shuffle_then_random"](), batch_size=batch_size, seed=1).map(
            lambda tree: tree, version="1"
        )

    with pipe().iterator(prefetch=prefetch) as batches:
        for _ in range(stop):
            next(batches)
        state = batches.get_state()
        rest = [next(batches) for _ in range(6)]
    with pipe().iterator(prefetch=2 - prefetch, window=3) as other:
        other.set_state(state)
        same(rows_of(rest), rows_of(next(other) for _ in range(6)))


def test_the_state_is_the_same_in_every_process():
    code = (
        "import sys; sys.path.insert(0, 'tests'); import test_grain_source as t, json\n"
        "from datapipe import Pipeline\n"
        "pipe = Pipeline(t.CHAINS['shuffle_then_random'](), batch_size=2, seed=1)\n"
        "print(json.dumps(pipe.iterator().get_state()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pipe = Pipeline(CHAINS["shuffle_then_random"](), batch_size=2, seed=1)
    assert json.loads(done.stdout) == pipe.iterator().get_state()


# -- trees -----------------------------------------------------------------------------------------


def test_elements_are_stacked_as_outputs_of_map_are():
    alone = next(iter(Pipeline(CHAINS["map"](), batch_size=3, seed=0, shuffle=False)))
    assert alone["id"].tolist() == [0, 1, 2]
    assert alone["row"].shape == (3, 3)
    assert alone["pair"][0].dtype == object
    mapped = Pipeline(Records(COUNT), batch_size=3, seed=0, shuffle=False).map(
        lambda record: example(int(record.rstrip(b"."))), version="1"
    )
    same(alone, next(iter(mapped)))


def test_elements_that_do_not_fit_are_named():
    dataset = base().map(lambda i: np.zeros(3 if i == 5 else 2))
    with pytest.raises(Mismatch, match=r"record 0 has float64\[2\], record 5 has float64\[3\]"):
        list(Pipeline(dataset, batch_size=8, seed=0, shuffle=False))


def test_functions_of_the_pipeline_come_behind_the_chain():
    pipe = Pipeline(base().map(example), batch_size=4, seed=0, shuffle=False)
    pipe = pipe.map(lambda tree: {"twice": tree["id"] * 2}, version="1")
    pipe = pipe.map_batch(lambda batch: batch["twice"] + 1, version="1")
    assert next(iter(pipe)).tolist() == [1, 3, 5, 7]


def test_one_of_several_sources():
    pipe = Pipeline(
        {"grain": base().map(lambda i: {"id": np.int64(-i)}), "columns": Columns(7)},
        batch_size=8,
        seed=2,
        weights={"grain": 3, "columns": 1},
    )
    batch = next(iter(pipe.map(lambda tree: {"id": tree["id"]}, version="1")))
    rows = pipe.plan.rows(0)
    wanted = [-i if s == 0 else i for s, i in zip(rows.sources, rows.items, strict=True)]
    assert batch["id"].tolist() == wanted
    with pytest.raises(Mismatch, match="do not fit in one batch"):
        next(iter(pipe))


def test_a_filter_of_the_pipeline_leaves_the_epochs_of_the_chain():
    dataset = CHAINS["shuffle_then_random"]()
    kept = Kept.of_ids([1, 4, 5, 10], COUNT)
    pipe = Pipeline(dataset, batch_size=4, seed=0, shuffle=False, epochs=3, filter=kept)
    wanted = [dataset[epoch * COUNT + i] for epoch in range(3) for i in (1, 4, 5, 10)]
    for one, other in zip(rows_of(pipe), wanted, strict=True):
        same(one, other)
    with pytest.raises(Misuse, match=r"no column 'x': the source has records of bytes, or trees"):
        Pipeline(base(), batch_size=2, seed=0, filter=Where("x", ">", 1))
    with pytest.raises(Misuse, match="pack the source beneath it"):
        Pipeline(base(), batch_size=1, seed=0, pack=Pack(8, lengths=np.ones(COUNT, int)))


# -- reading ---------------------------------------------------------------------------------------


class Counting:
    """A source of Grain that counts what is asked of it, and how."""

    def __init__(self, batches=None, count=64, liar=False):
        self.count, self.liar = count, liar
        self.single, self.many = [], []
        if batches is not None:
            setattr(self, batches, self._many)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.single.append(index)
        return {"id": index}

    def _many(self, indices):
        self.many.append(list(indices))
        return [{"id": -index if self.liar else index} for index in indices]


@pytest.mark.parametrize("batches", ["_getitems", "__getitems__"])
def test_a_window_is_one_call_of_a_source_that_reads_batches(batches):
    source = Counting(batches)
    dataset = grain.MapDataset.source(source).shuffle(seed=1).map(lambda tree: tree)
    iterator = Pipeline(dataset, batch_size=4, seed=0).iterator(prefetch=0, window=4)
    source.single.clear(), source.many.clear()
    found = [next(iterator)["id"].tolist() for _ in range(15)]
    plain = Pipeline(grain.MapDataset.source(Counting()).shuffle(seed=1), batch_size=4, seed=0)
    assert found == [batch["id"].tolist() for _, batch in zip(range(15), plain, strict=False)]
    # Three of the first are read twice, to see that batches are what single elements are.
    assert len(source.single) == 3
    assert [len(call) for call in source.many] == [3, 4, 8, 16, 16, 16]


@pytest.mark.parametrize("batches", ["_getitems", "__getitems__"])
def test_batches_that_are_not_what_single_elements_are_do_not_count(batches):
    source = Counting(batches, liar=True)
    pipe = Pipeline(grain.MapDataset.source(source), batch_size=4, seed=0, shuffle=False)
    assert next(pipe.iterator(prefetch=0))["id"].tolist() == [0, 1, 2, 3]
    assert len(source.many) == 1


def test_a_source_of_ours_in_a_chain_is_read_in_batches(tmp_path):
    write_array_record(tmp_path / "a.array_record", [b"%d" % i for i in range(100)])
    calls = []
    with open_source(tmp_path / "a.array_record") as source:
        read = source.read
        source.read = lambda rows: calls.append(len(rows)) or read(rows)
        dataset = grain.MapDataset.source(source).map(int)
        batches = Pipeline(dataset, batch_size=32, seed=0, shuffle=False).iterator(prefetch=0)
        calls.clear()
        assert next(batches).tolist() == list(range(32))
        assert calls[-1] == 32
        assert sum(calls[:-1]) == 6  # to see that batches are what single elements are
        del source.read
        assert grain.MapDataset.source(source)._getitems([3, 1]) == [b"3", b"1"]


def test_an_element_that_cannot_be_made_is_named_or_replaced():
    def choked(number):
        if number == 5:
            raise ValueError("choked")
        return np.int64(number)

    dataset = grain.MapDataset.source(Counting("_getitems")).map(lambda tree: choked(tree["id"]))
    pipe = Pipeline(dataset, batch_size=4, seed=0, shuffle=False)
    batches = pipe.iterator(prefetch=0)
    assert next(batches).tolist() == [0, 1, 2, 3]
    wanted = r"record 5 \(element 5 of MapMapDataset 64 < .*choked.*example 5, in epoch 0"
    with pytest.raises(BadRecord, match=wanted) as caught:
        next(batches)
    assert caught.value.index == 5
    replacing = Pipeline(
        dataset, batch_size=4, seed=0, shuffle=False, epochs=2, on_bad_record="replace"
    )
    batches = replacing.iterator(prefetch=0)
    found = [batch.tolist() for batch in batches]
    assert len(found) == 32
    assert found[1][0] == 4
    assert found[1][1] == found[17][1] != 5
    assert len(batches.get_state()["replaced"]) == 1


def test_it_is_pickled_with_its_functions():
    source = GrainSource(CHAINS["shuffle_then_random"](), version="3")
    fingerprint = source.fingerprint()
    found = pickle.loads(pickle.dumps(source))
    wanted = np.array([3, 1]), np.array([0, 2])
    same(found.read_epochs(*wanted), source.read_epochs(*wanted))
    assert found.fingerprint() == fingerprint
    fresh = pickle.loads(pickle.dumps(GrainSource(CHAINS["shuffle_then_random"](), version="3")))
    assert fresh.fingerprint() == fingerprint
    source.close()
    with pytest.raises(Misuse, match="closed"):
        source.read_epochs(*wanted)


STEADY = {"source", "map", "slice", "concatenate", "batch"}


@pytest.mark.parametrize("name", CHAINS)
def test_what_does_the_same_in_every_epoch_is_read_once_for_all_of_them(name):
    dataset = CHAINS[name]()
    source = GrainSource(dataset)
    assert source.varies == (name not in STEADY)
    if name in STEADY:
        for item in range(len(dataset)):
            same(dataset[item], dataset[item + 3 * len(dataset)])


# -- what is refused -------------------------------------------------------------------------------


def test_elements_that_were_left_out_are_refused():
    with pytest.raises(Misuse, match=r"take .filter out of it.*filter="):
        Pipeline(base().filter(lambda i: i > 2).map(example), batch_size=2, seed=0)
    sparse = base().map(lambda i: None if i == 3 else i)
    batches = Pipeline(sparse, batch_size=2, seed=0, shuffle=False).iterator(prefetch=0)
    next(batches)
    with pytest.raises(BadRecord, match=r"element 3 of .*marks what was left out.*filter="):
        next(batches)


@pytest.mark.parametrize("chain", [lambda d: d.repeat(), lambda d: d.repeat().shuffle(seed=1)[::2]])
def test_datasets_without_end_are_refused(chain):
    with pytest.raises(Misuse, match=r"take .repeat\(\) out of it, the pipeline has epochs="):
        Pipeline(chain(base()), batch_size=2, seed=0)


def test_a_long_dataset_has_an_end():
    far = grain.MapDataset.range(10**15)
    batches = Pipeline(far, batch_size=2, seed=0).iterator(prefetch=0)
    batches.seek(10**15 - 2)
    assert len(next(batches)) == 2


def test_what_has_no_random_access_is_refused_with_the_cure():
    streams = [
        base().to_iter_dataset(),
        iter(base().to_iter_dataset()),
        grain.load([1, 2, 3]),
    ]
    for stream in streams:
        with pytest.raises(Misuse, match=r"has no random access.*as `data` to the checkpoint"):
            Pipeline(stream, batch_size=1, seed=0)
    with pytest.raises(Misuse, match=r"wanted a grain.MapDataset, found list"):
        GrainSource([1])
    with pytest.raises(Misuse, match="version must be a text of 0 to 64"):
        GrainSource(base(), version="v" * 65)


OTHERS = {
    "elements": lambda: GrainSource(base().map(lambda i: i + 1), version="1"),
    "length": lambda: GrainSource(grain.MapDataset.range(12).map(lambda i: i), version="1"),
    "version": lambda: GrainSource(base().map(lambda i: i), version="2"),
    "seed": lambda: GrainSource(base().shuffle(seed=1).map(lambda i: i), version="1"),
    "dtype": lambda: GrainSource(base().map(np.int32), version="1"),
    "chain": lambda: GrainSource(base().map(lambda i: i).map(lambda i: i), version="1"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_dataset_is_refused(other):
    def iterator(source):
        return Pipeline(source, batch_size=2, seed=0).iterator()

    state = iterator(GrainSource(base().map(lambda i: i), version="1")).get_state()
    iterator(GrainSource(base().map(lambda j: j), version="1")).set_state(state)
    with pytest.raises(Mismatch, match=r"sources\.source\.fingerprint"):
        iterator(OTHERS[other]()).set_state(state)


def test_the_last_digits_of_what_is_computed_do_not_matter():
    """Another processor has other ones."""

    def iterator(fn):
        return Pipeline(base().map(fn), batch_size=2, seed=0).iterator()

    def computed(number, factor=1.0):
        logs = np.log(np.arange(1, 200, dtype=np.float32) + number) * np.float32(factor)
        return {"logs": logs, "mean": float(logs.mean()), "nan": np.array([np.nan, 1.0])}

    def turned(number):
        return {**computed(number), "logs": computed(number)["logs"][::-1]}

    def negative(number):
        return {**computed(number), "mean": -computed(number)["mean"]}

    state = iterator(computed).get_state()
    iterator(lambda number: computed(number, 1 + 2e-7)).set_state(state)
    for other in (lambda number: computed(number, 1.01), turned, negative):
        with pytest.raises(Mismatch, match=r"sources\.source\.sample"):
            iterator(other).set_state(state)


def test_a_state_of_other_files_beneath_the_chain_is_refused():
    one, other = (Pipeline(grain.MapDataset.source(_Ours(n)), batch_size=2, seed=0) for n in "ab")
    with pytest.raises(Mismatch, match=r"sources\.source\.fingerprint"):
        other.iterator().set_state(one.iterator().get_state())


class _Ours(Records):
    def __init__(self, name):
        super().__init__(COUNT, name=name)


def test_elements_that_chance_decides_are_refused():
    rng = np.random.default_rng(0)
    chain = base().map(lambda i: rng.random())
    with pytest.raises(Misuse, match=r"element 0 of .* is another one when it is read again"):
        Pipeline(chain, batch_size=2, seed=0).iterator()


def test_worker_processes_serve_the_same():
    pipe = Pipeline(CHAINS["shuffle_then_random"](), batch_size=3, seed=6)
    with pipe.iterator(workers=1) as batches, pipe.iterator(prefetch=0) as wanted:
        for _ in range(8):
            same(next(batches), next(wanted))
        state = batches.get_state()
        assert state == wanted.get_state()
        batches.set_state(state)
        same(next(batches), next(wanted))

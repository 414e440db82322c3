"""What functions of the pipeline hand back: whole batches and examples, or an error with a name."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memory_source import Columns, Records, number
from worker_traces import no_traces  # noqa: F401 - a fixture

from datapipe import Mismatch, Pipeline

pytestmark = pytest.mark.usefixtures("no_traces")

Pair = collections.namedtuple("Pair", ["ids", "rows"])


def sharded():
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))


WAYS = {
    "in the process": dict,
    "ahead": lambda: {"prefetch": 2, "threads": 2},
    "by workers": lambda: {"workers": 1},
    "sharded": lambda: {"sharding": sharded()},
    "sharded, by workers": lambda: {"sharding": sharded(), "workers": 1},
}


def ways_of(cases, by_workers):
    """Pairs of case and way: only some by workers, which take a second to start."""
    pairs = [(case, way) for case in cases for way in ("in the process", "sharded")]
    return [*pairs, *((case, "by workers") for case in by_workers)]


def first(pipe, way="in the process"):
    with pipe.iterator(**WAYS[way]()) as iterator:
        return next(iterator)


def columns(**options):
    return Pipeline(Columns(40), **{"batch_size": 8, "seed": 3, "epochs": 1} | options)


def numbers(**options):
    pipe = Pipeline(Records(40), **{"batch_size": 8, "seed": 3, "epochs": 1} | options)
    return pipe.map(number, version="1")


# -- batches ---------------------------------------------------------------------------------------


def cut(batch):
    return {"id": batch["id"], "row": batch["row"][:-1]}


@pytest.mark.parametrize("way", WAYS)
def test_other_rows_are_refused_the_same_way_wherever_batches_are_made(way):
    pipe = columns().map_batch(lambda b: {"id": b["id"], "row": b["row"]}, version="1")
    wanted = (
        r"^\.map_batch cut \(function 2 of the pipeline, version='b'\) must return a tree of "
        r"arrays with a row for each of the 8 rows .* Pipeline\(filter=.*\n"
        r"  \['row'\]: wanted 8 rows, found float32 of shape \[7, 2\]\n"
    )
    with pytest.raises(Mismatch, match=wanted) as caught:
        first(pipe.map_batch(cut, version="b"), way)
    assert "in .map_batch b of the batch of examples 0 to 7" in caught.value.__notes__
    assert len(caught.value.differences) == 1


BAD_BATCHES = {
    "fewer": (lambda b: b[:3], "the batch: wanted 8 rows, found int64 of shape [3]"),
    "none left": (lambda b: b[:0], "found int64 of shape [0]"),
    "more": (lambda b: np.concatenate([b, b]), "found int64 of shape [16]"),
    "another axis first": (lambda b: np.stack([b, b]), "found int64 of shape [2, 8]"),
    "a sum": (lambda b: b.sum(), "found int64 of shape []"),
    "an array without axes": (lambda b: {"n": np.array(3)}, "['n']: wanted 8 rows, found int64"),
    "a number beside": (lambda b: {"n": b, "mean": 1.5}, "['mean']: wanted 8 rows, found float"),
    "a text beside": (lambda b: (b, "train"), "[1]: wanted 8 rows, found str 'train'"),
    "a list of numbers": (lambda b: {"n": b.tolist()}, "['n'][0]: wanted 8 rows, found int"),
    "a deep one": (lambda b: {"n": b, "x": [(b, b[1:])]}, "['x'][0][1]: wanted 8 rows"),
    "a field": (lambda b: Pair(b, b[1:]), "[1]: wanted 8 rows, found int64 of shape [7]"),
    "of JAX": (lambda b: jax.numpy.zeros(5), "found float32 of shape [5]"),
    "a node of JAX": (lambda b: (Wrapped(b, b[1:]),), "[0].rows: wanted 8 rows, found int64 of"),
    "a generator": (lambda b: (each for each in b), "found generator"),
    "None": (lambda b: None, "returned None, wanted a tree of arrays: is a `return` missing?"),
    "nothing": (lambda b: {}, "returned {}, wanted a tree of arrays"),
    "an object": (lambda b: object(), "which is no array"),
}


@pytest.mark.parametrize(("case", "way"), ways_of(BAD_BATCHES, ["a sum", "a generator"]))
def test_what_is_no_batch(case, way):
    make, wanted = BAD_BATCHES[case]
    with pytest.raises(Mismatch) as caught:
        first(numbers().map_batch(make, version="1"), way)
    assert wanted in str(caught.value)
    assert "<lambda> (function 2 of the pipeline, version='1')" in str(caught.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Wrapped:
    """An inner node to JAX, and to nobody else."""

    ids: np.ndarray
    rows: np.ndarray


GOOD_BATCHES = {
    "an array": lambda b: b + 1,
    "a dict": lambda b: {"n": b, "m": np.zeros((8, 0))},
    "a tuple": lambda b: (b, {"x": [b]}),
    "a named tuple": lambda b: Pair(b, b * 2),
    "a part that is not there": lambda b: {"n": b, "mask": None},
    "of JAX": lambda b: {"n": jax.numpy.asarray(b, "int32")},
    "a node of JAX": lambda b: {"n": Wrapped(b, np.ones((8, 2)))},
}


@pytest.mark.parametrize("way", ["in the process", "sharded"])
@pytest.mark.parametrize("case", GOOD_BATCHES)
def test_what_is_a_batch(case, way):
    make = GOOD_BATCHES[case]
    found = first(numbers().map_batch(make, version="1"), way)
    wanted = make(first(numbers()))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, two)


def test_every_function_answers_for_itself():
    pipe = numbers().map_batch(lambda b: (b, b.sum()), version="one")
    pipe = pipe.map_batch(lambda pair: pair[0], version="two")
    with pytest.raises(Mismatch, match=r"function 2 of the pipeline, version='one'"):
        first(pipe)


@pytest.mark.parametrize("way", ["in the process", "by workers"])
def test_the_short_batch_of_an_epoch(way):
    def padded(batch):
        return np.resize(batch, 8)

    pipe = numbers(batch_size=8, remainder="keep", epochs=2).map_batch(lambda b: b, version="1")
    uneven = Pipeline(Records(20), batch_size=8, seed=1, epochs=2, remainder="keep")
    uneven = uneven.map(number, version="1")
    assert [len(batch) for batch in uneven.map_batch(lambda b: b * 2, version="1")] == [8, 8, 4] * 2
    assert all(len(batch) == 8 for batch in pipe)
    with uneven.map_batch(padded, version="1").iterator(**WAYS[way]()) as iterator:
        next(iterator), next(iterator)
        before = iterator.get_state()
        with pytest.raises(Mismatch, match=r"wanted 4 rows, found int64 of shape \[8\]"):
            next(iterator)
        assert iterator.get_state() == before


def test_bad_records_that_are_replaced_leave_no_holes():
    source = Records(40, bad=[3, 4, 17])
    pipe = Pipeline(source, batch_size=8, seed=3, epochs=1, on_bad_record="replace")
    pipe = pipe.map(number, version="1")
    whole = pipe.map_batch(lambda batch: batch, version="1")
    assert [len(batch) for batch in whole] == [8] * 5
    holes = pipe.map_batch(lambda batch: batch[batch > 5], version="1")
    with pytest.raises(Mismatch, match="Leave records out by Pipeline"):
        list(holes)


def test_functions_that_have_no_name_of_their_own():
    class Cutter:
        def __call__(self, batch, *, by=1):
            return batch[by:]

        def cut(self, batch):
            return batch[1:]

    for fn, name in [
        (Cutter(), r"Cutter \("),
        (functools.partial(Cutter(), by=2), r"Cutter \("),
        (Cutter().cut, r"Cutter\.cut \("),
        (functools.partial(functools.partial(cut)), r"map_batch cut \("),
    ]:
        base = columns() if "batch cut" in name else numbers()
        with pytest.raises(Mismatch, match=name):
            first(base.map_batch(fn, version="1"))


# -- examples --------------------------------------------------------------------------------------


def slipped(value):
    yield value


async def waited_for(value):
    return value


BAD_EXAMPLES = {
    "a generator": (slipped, "returned a generator, wanted an example: take `yield`"),
    "a map": (lambda value: map(abs, [value]), "returned a map"),
    "an iterator": (lambda value: iter([value]), "returned a list_iterator"),
    "a zip inside": (lambda value: {"n": zip([value])}, "has a zip at ['n'] of an example"),
    "a deep one": (lambda value: (1, [slipped(value)]), "has a generator at [1][0] of an example"),
    "None": (lambda value: None, "returned None, wanted an example: is a `return` missing?"),
}


@pytest.mark.parametrize("policy", ["raise", "replace"])
@pytest.mark.parametrize(("case", "way"), ways_of(BAD_EXAMPLES, ["a generator"]))
def test_what_is_no_example(case, way, policy):
    fn, wanted = BAD_EXAMPLES[case]
    source = Records(40)
    pipe = Pipeline(source, batch_size=8, seed=3, on_bad_record=policy)
    with pytest.raises(Mismatch) as caught:
        first(pipe.map(number, version="1").map(fn, version="x"), way)
    assert wanted in str(caught.value)
    assert f"{fn.__qualname__} (function 2 of the pipeline, version='x')" in str(caught.value)


def test_a_coroutine():
    made = []

    def remembered(value):
        made.append(waited_for(value))
        return made[-1]

    with pytest.raises(Mismatch, match="returned a coroutine, wanted an example"):
        first(numbers().map(remembered, version="1"))
    for each in made:
        each.close()


@pytest.mark.parametrize("policy", ["raise", "replace"])
def test_the_function_at_fault_is_named_and_not_the_one_behind_it(policy):
    pipe = numbers(on_bad_record=policy).map(slipped, version="a").map(lambda n: n + 1, version="b")
    with pytest.raises(Mismatch, match=r"\.map slipped \(function 2 of the pipeline, version='a'"):
        first(pipe)
    drawn = numbers(on_bad_record=policy).random_map(lambda n, rng: slipped(n), version="c")
    with pytest.raises(Mismatch, match=r"\.random_map .*<lambda> \(function 2 .* version='c'"):
        first(drawn)


def test_values_that_may_be_missing_stay():
    pipe = numbers().map(lambda n: {"n": n, "label": None}, version="1")
    assert first(pipe)["label"].tolist() == [None] * 8
    fields = numbers().map(lambda n: (n, range(n), {n}), version="1")
    assert first(fields)[1].tolist() == [range(n) for n in first(fields)[0]]


def test_what_no_process_can_send_says_so():
    pipe = numbers().map(lambda n: threading.Lock(), version="1")
    assert first(pipe).shape == (8,)
    with pytest.raises(Mismatch, match=r"cannot be sent .* pickle .*lock.*: return arrays, texts"):
        first(pipe, "by workers")

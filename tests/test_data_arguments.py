"""What callers give the pipeline is taken as meant, or refused by the name of the argument."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
import pytest
from memory_source import Records
from odd_values import FROM_0, ODD, TEXT, UNHASHABLE, WHOLE

from datapipe import (
    Concatenate,
    GrainSource,
    Kept,
    Mismatch,
    Misuse,
    NotFound,
    Pack,
    Permutation,
    Pipeline,
    Plan,
    Where,
)
from datapipe.order.examples import Examples
from formats.source import Column, Spec


@dataclass(frozen=True)
class Case:
    """One argument: `named` in each refusal, as a pattern; `works`: names of odd values that do."""

    call: Callable[[Any], Any]
    named: str
    works: frozenset[str] | set[str] = frozenset()
    left_out: frozenset[str] | set[str] = frozenset()
    errors: tuple[type[Exception], ...] = (Misuse, Mismatch)


class Documents(Records):
    """Two tokens each."""

    spec = Spec((Column("x", "array", "int64"), Column("tokens", "array", "int64", (2,))))

    def read(self, indices):
        ids = np.asarray(indices)
        return {"x": ids.copy(), "tokens": np.stack([ids, ids], axis=1)}


def pipe(**options):
    return Pipeline(**{"source": Records(20), "batch_size": 4, "seed": 1} | options)


def two(**options):
    return pipe(source={"a": Records(20), "b": Records(30, name="b")}, **options)


def packed(kind, **options):
    pack = kind(**{"capacity": 8, "lengths": [2] * 20} | options)
    return pipe(source=Documents(20), pack=pack, batch_size=1)


def where(*condition):
    return pipe(source=Documents(20), filter=Where(*condition), batch_size=1)


def plan(**options):
    return Plan(**{"order": Examples.of(20, 1), "batch_size": 4} | options)


PLAN = Plan.of(20, 4, seed=1, epochs=2)
BIG = WHOLE | {"2**31", "2**62"}
SEED = FROM_0 | {"2**31", "2**62", "2**63"}
EMPTY = {"[]", "()"}
NONE = {"None"}

PIPELINE = {
    "source": Case(lambda v: pipe(source=v), r"source|no source", errors=(Misuse, NotFound)),
    "one of sources": Case(lambda v: pipe(source={"a": Records(20), "b": v}), "source"),
    "name": Case(
        lambda v: pipe(source={v: Records(20)}), "the name of a source", TEXT | {"NUL"}, UNHASHABLE
    ),
    "batch_size": Case(lambda v: pipe(batch_size=v), "batch", WHOLE),
    "seed": Case(lambda v: pipe(seed=v), "seed", SEED),
    "shuffle": Case(lambda v: pipe(shuffle=v), "shuffle", {"True", "False", "np.True_"}),
    "shuffle_window": Case(
        lambda v: pipe(shuffle="blocks", shuffle_window=v), "window", WHOLE | NONE
    ),
    "epochs": Case(lambda v: pipe(epochs=v), "epochs", WHOLE | NONE | {"2**31"}),
    "remainder": Case(lambda v: pipe(remainder=v), "remainder"),
    "filter": Case(
        lambda v: pipe(filter=v), "filter|x: no such file", NONE | {"{}"}, errors=(Misuse, NotFound)
    ),
    "a filter": Case(lambda v: pipe(filter=[v]), "filter"),
    "pack": Case(lambda v: pipe(pack=v), "pack", NONE | {"{}"}),
    "weights": Case(lambda v: two(weights=v), "weights", NONE),
    "a weight": Case(
        lambda v: two(weights={"a": 1, "b": v}),
        "weight",
        {"0", "3", "0.5", "3.0", "2**31", "2**62", "2**63", "2**70", "np.int64", "np.uint8"}
        | {"np.float64"},
    ),
    "name of a weight": Case(lambda v: two(weights={"a": 1, v: 1}), "weights", (), UNHASHABLE),
    "skip_records": Case(
        lambda v: pipe(skip_records=v), "skip_records", {"True", "False", "np.True_"}
    ),
    "on_bad_record": Case(lambda v: pipe(on_bad_record=v), "on_bad_record"),
    "bad_record_limit": Case(
        lambda v: pipe(bad_record_limit=v), "bad_record_limit", FROM_0 | {"2**31", "2**62"}
    ),
    "transforms": Case(lambda v: pipe(transforms=v), "transforms", {"()"}),
    **{
        f"{kind} fn": Case(
            lambda v, kind=kind: getattr(pipe(), kind)(v, version="1"),
            rf"\.{kind} wants a function",
            {"function", "class"},
        )
        for kind in ("map", "random_map", "map_batch")
    },
    **{
        f"{kind} version": Case(
            lambda v, kind=kind: getattr(pipe(), kind)(len, version=v),
            rf"\.{kind}: its version",
            TEXT | {"NUL"},
        )
        for kind in ("map", "random_map", "map_batch")
    },
    "GrainSource": Case(GrainSource, "grain.MapDataset"),
    "GrainSource version": Case(
        lambda v: GrainSource(grain.MapDataset.range(10), version=v),
        "version",
        TEXT | {"NUL", "''"},
    ),
    "pieces": Case(
        lambda v: pipe().pieces(v), "batch|stop", FROM_0 | {"range(3)", "2**31", "2**62"}
    ),
    "pieces plan": Case(lambda v: pipe().pieces(1, plan=v), "plan", NONE),
    "batches record": Case(lambda v: pipe(epochs=2).batches(v), "record", FROM_0),
    "batches token": Case(lambda v: pipe(epochs=2).batches(1, token=v), "token", NONE),
    "batches source": Case(lambda v: pipe(epochs=2).batches(1, source=v), "source", NONE),
    "batches epochs": Case(lambda v: pipe().batches(1, epochs=v), "epochs", {"range(3)"}),
    "batches plan": Case(lambda v: pipe(epochs=2).batches(1, plan=v), "plan", NONE),
}

ITERATOR = {
    "on_change": Case(lambda v: pipe().iterator(on_change=v), "on_change"),
    "sharding": Case(lambda v: pipe().iterator(sharding=v), "sharding", NONE),
    "prefetch": Case(lambda v: pipe().iterator(prefetch=v), "prefetch", FROM_0),
    "window": Case(lambda v: pipe().iterator(window=v), "window", WHOLE),
    "threads": Case(lambda v: pipe().iterator(threads=v), "threads", WHOLE),
    "workers": Case(lambda v: pipe().iterator(workers=v), "workers", {"0"}, WHOLE),
}

POSITION = {
    "seek": Case(lambda v: started().seek(v), "example", FROM_0),
    "skip": Case(lambda v: started().skip(v), "range", EMPTY),
    "a range to skip": Case(lambda v: started().skip([v]), "range", {"(1, 2)", "array([1, 2])"}),
    "stop of a range": Case(lambda v: started().skip([(0, v)]), "stop|range", FROM_0 | BIG),
    "span first": Case(lambda v: started().span(STATE, v, 9), "first|stop", FROM_0),
    "span stop": Case(lambda v: started().span(STATE, 0, v), "stop", FROM_0 | BIG),
    "span skips": Case(lambda v: started().span(STATE, 0, 1, v), "range", EMPTY),
    "a range of span": Case(
        lambda v: started().span(STATE, 0, 1, [v]), "range", {"(1, 2)", "array([1, 2])"}
    ),
    "span batch_size": Case(
        lambda v: started().span(STATE, 0, 1, batch_size=v), "batch_size", BIG | NONE
    ),
    "position_after": Case(lambda v: started().position_after(STATE, v), "batches", FROM_0 | BIG),
}

STAGES = {
    **{
        f"{kind.__name__} {name}": Case(
            lambda v, kind=kind, name=name: packed(kind, **{name: v}), named, works
        )
        for kind in (Pack, Concatenate)
        for name, named, works in [
            ("capacity", "capacity", WHOLE),
            ("tokens", "tokens", ()),
            ("pad", "pad", {"-1", "2**31", "2**62"} | FROM_0),
        ]
    },
    "Pack lengths": Case(
        lambda v: packed(Pack, lengths=v),
        "length|column|x: no such file",
        TEXT,
        errors=(Misuse, NotFound),
    ),
    "Concatenate lengths": Case(
        lambda v: packed(Concatenate, lengths=v),
        "length|column|x: no such file",
        TEXT,
        errors=(Misuse, NotFound),
    ),
    "Pack dtype": Case(lambda v: packed(Pack, dtype=v), "dtype", NONE | {"np.int64", "class"}),
    "Pack strategy": Case(lambda v: packed(Pack, strategy=v), "strategy"),
    "Pack oversize": Case(lambda v: packed(Pack, oversize=v), "oversize"),
    "Pack window": Case(lambda v: packed(Pack, window=v), "window", BIG),
    "Concatenate remainder": Case(lambda v: packed(Concatenate, remainder=v), "remainder"),
    "Where column": Case(lambda v: where(v, ">", 1), "column", TEXT),
    "Where operator": Case(lambda v: where("x", v, 1), "operator", (), UNHASHABLE),
    "Where value": Case(
        lambda v: where("x", ">=", v),
        "column|>=",
        {"0", "3", "-1", "0.5", "3.0", "-2**70", "True", "False", "1j", "np.int64", "np.uint8"}
        | {"np.float64", "np.True_", "array(3)"},
        {"2**31", "2**62", "2**63", "2**70", "10**400", "inf", "nan"},  # nothing is left: NotFound
    ),
    "Where values": Case(
        lambda v: where("x", "in", v),
        "column|in: wanted",
        {"[1]", "(1, 2)", "array([1, 2])", "range(3)", "iterator"},
        EMPTY | {"{}"},  # nothing is left: NotFound
    ),
    "Where one of values": Case(
        lambda v: where("x", "in", [1, v]),
        "column",
        {"0", "3", "-1", "3.0", "2**31", "2**62", "True", "False", "np.int64", "np.uint8"}
        | {"np.float64", "np.True_", "array(3)"},
    ),
    "Kept.of_mask": Case(Kept.of_mask, "mask"),
    "Kept.of_ids": Case(
        lambda v: Kept.of_ids(v, 20),
        "kept|ind",
        EMPTY | {"[1]", "(1, 2)", "array([1, 2])", "range(3)"},
    ),
    "Kept.of_ids records": Case(lambda v: Kept.of_ids([1], v), "records|index 1", BIG),
    "Kept ids": Case(lambda v: Kept(v, 20), "Kept.ids", {"array([1, 2])"}),
    "Kept records": Case(lambda v: Kept(np.array([1]), v), "Kept.records", FROM_0 | BIG),
    "Kept.items": Case(
        lambda v: Kept.of_ids([1, 3], 20).items(v),
        "ind",
        FROM_0 | EMPTY | {"[1]", "(1, 2)", "array(3)", "array([1, 2])", "range(3)"},
    ),
    "Kept.load": Case(
        lambda v: Kept.load(v, Records(20)), "path|x: no such file", errors=(Misuse, NotFound)
    ),
}

INDICES = FROM_0 | EMPTY | {"[1]", "(1, 2)", "array(3)", "array([1, 2])", "range(3)"}
ORDER = {
    "Permutation n": Case(lambda v: Permutation(v, 1), "n must", BIG),
    "Permutation seed": Case(lambda v: Permutation(5, v), "seed", SEED),
    "Permutation epoch": Case(lambda v: Permutation(5, 1, v), "epoch", SEED),
    "Permutation stream": Case(lambda v: Permutation(5, 1, 0, v), "stream", SEED),
    "Permutation()": Case(Permutation(5, 1), "ind", INDICES),
    "Permutation.inverse": Case(Permutation(5, 1).inverse, "ind", INDICES),
    "Plan.of items": Case(lambda v: Plan.of(v, 4, seed=1), "items", BIG),
    "Plan order": Case(lambda v: plan(order=v), "order"),
    "Plan batch_size": Case(lambda v: plan(batch_size=v), "batch_size", BIG),
    "Plan remainder": Case(lambda v: plan(remainder=v), "remainder"),
    "Plan skips": Case(lambda v: plan(skips=v), "skips", {"()"}),
    "Plan skip_records": Case(
        lambda v: plan(skip_records=v), "skip_records", {"True", "False", "np.True_"}
    ),
    "batches_left": Case(PLAN.batches_left, "an example", FROM_0),
    "examples": Case(PLAN.examples, "an example", FROM_0),
    "examples batches": Case(lambda v: PLAN.examples(0, v), "batches", FROM_0 | BIG),
    "advance": Case(lambda v: PLAN.advance(v, 0), "an example", FROM_0),
    "advance batches": Case(lambda v: PLAN.advance(0, v), "batches", FROM_0 | BIG),
    "locate": Case(PLAN.locate, "ind", INDICES),
    "records": Case(PLAN.records, "batch|stop", FROM_0 | BIG | {"range(3)"}),
    "describe": Case(PLAN.describe, "batch", FROM_0 | BIG),
    "describe count": Case(lambda v: PLAN.describe(0, v), "count", FROM_0 | BIG),
    "span": Case(lambda v: PLAN.span(v, 0, 1), "an example", FROM_0),
    "skipping": Case(PLAN.skipping, "range", EMPTY),
    "present": Case(PLAN.present, "range", EMPTY),
    "addresses": Case(PLAN.addresses, "range", EMPTY),
    "a range of addresses": Case(
        lambda v: PLAN.addresses([v]), "range", {"(1, 2)", "array([1, 2])"}
    ),
    "Plan.batches": Case(PLAN.batches, "an item", FROM_0),
    "Plan.batches source": Case(lambda v: PLAN.batches(1, source=v), "source", {"0"}),
    "Plan.batches epochs": Case(
        lambda v: PLAN.batches(1, epochs=v), "epochs", {"range(3)", "None"}
    ),
}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Weights of all sizes are warned of."""
    logging.getLogger("datapipe").setLevel(logging.ERROR)
    yield
    logging.getLogger("datapipe").setLevel(logging.NOTSET)


def started():
    return pipe(epochs=2).iterator(prefetch=0)


STATE = started().get_state()


def check(case, value_name):
    value = ODD[value_name]()
    if value_name in case.works:
        case.call(value)
        return
    with pytest.raises(case.errors) as caught:
        case.call(value)
    assert re.search(case.named, str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("table", "name"),
    [
        pytest.param(table, name, id=name)
        for table in (PIPELINE, ITERATOR, POSITION, STAGES, ORDER)
        for name in table
    ],
)
def test_an_argument_works_or_is_named(table, name):
    case = table[name]
    faults = []
    for value_name in ODD:
        if value_name in case.left_out:
            continue
        try:
            check(case, value_name)
        except BaseException as error:
            faults.append(f"{value_name}: {type(error).__name__}: {str(error)[:200]}")
    assert not faults, "\n".join(faults)


def test_numbers_of_numpy_do_not_overflow_later():
    plan = Plan.of(np.uint16(300), np.uint8(200), seed=np.uint8(1), epochs=np.uint8(250))
    same = Plan.of(300, 200, seed=1, epochs=250)
    assert plan == same
    for number in (np.uint8(250), np.int16(250)):
        assert plan.batches_left(number) == same.batches_left(250)
        assert plan.advance(number, number) == same.advance(250, 250)
        assert plan.span(number, number, number) == []
        assert [e.tolist() for e in plan.examples(number, np.uint8(2))] == [
            e.tolist() for e in same.examples(250, 2)
        ]
        assert plan.describe(number, number)[-1].batch == same.describe(250, 250)[-1].batch
        assert plan.batches(number, epochs=range(3)) == same.batches(250, epochs=range(3))
    one = pipe(batch_size=np.uint8(4), epochs=np.uint8(200)).iterator(prefetch=np.uint8(0))
    one.seek(np.uint8(200))
    assert type(one.get_state()["next_example"]) is int
    assert one.next_example + 300 == 500

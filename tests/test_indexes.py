"""Filters and lengths: from columns, from sidecars, and what is refused of both."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from document_source import Documents
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Records
from turning_source import Turning

import formats
from datapipe import (
    Concatenate,
    Damaged,
    DataError,
    Kept,
    Mismatch,
    Misuse,
    NotFound,
    Pack,
    Pipeline,
    Where,
)
from datapipe.sources import sidecar
from datapipe.sources.documents import Documents as Packable
from datapipe.sources.indexes import VERSION, Lengths
from datapipe.sources.origin import Origin
from datapipe.sources.scanning import batches, column_of, kept_where
from datapipe.sources.sidecar import Sidecar

LENGTHS = [5, 0, 17, 3, 8]


# -- filters ---------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=50))
def test_items_of_kept_records_and_back(mask):
    kept = Kept.of_mask(np.array(mask, bool))
    ids = [i for i, keep in enumerate(mask) if keep]
    assert kept.ids.tolist() == ids
    items = kept.items(np.arange(len(mask))).tolist()
    assert items == [ids.index(i) if keep else -1 for i, keep in enumerate(mask)]
    again = Kept.of_ids(ids, len(mask))
    assert again.digest == kept.digest
    assert Kept.of_ids(ids, len(mask) + 1).digest != kept.digest


@pytest.mark.parametrize("mask", [[1, 0], [[True]], ["a"], [0.5]])
def test_what_is_no_mask(mask):
    with pytest.raises(Misuse, match="a mask has one boolean per record"):
        Kept.of_mask(mask)


@pytest.mark.parametrize("ids", [[1, 1], [2, 1], [5], [-1], [[1]], [0.5]])
def test_what_is_no_list_of_ids(ids):
    with pytest.raises(Misuse):
        Kept.of_ids(ids, 5)


BATCH = {
    "n": np.array([1, 2, 3, 4]),
    "text": ["a", None, "b", "a"],
    "wide": np.zeros((4, 2)),
    "ragged": [np.arange(2)] * 4,
}


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        (("n", "==", 2), [0, 1, 0, 0]),
        (("n", "!=", 2), [1, 0, 1, 1]),
        (("n", "<", 2), [1, 0, 0, 0]),
        (("n", "<=", 2), [1, 1, 0, 0]),
        (("n", ">", 2.5), [0, 0, 1, 1]),
        (("n", ">=", 3), [0, 0, 1, 1]),
        (("n", "in", {2, 4, 9}), [0, 1, 0, 1]),
        (("n", "not in", range(1, 3)), [0, 0, 1, 1]),
        (("text", "==", "a"), [1, 0, 0, 1]),
        (("text", "!=", "a"), [0, 0, 1, 0]),
        (("text", "in", ["b", "c"]), [0, 0, 1, 0]),
        (("text", "not in", ["b", "c"]), [1, 0, 0, 1]),
    ],
)
def test_conditions(condition, wanted):
    found = Where(*condition)(BATCH)
    assert found.dtype == np.bool_
    assert found.tolist() == [bool(each) for each in wanted]


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        (("n", "=", 2), "operator: wanted one of ==, !=, "),
        (("text", "in", "ab"), "in: wanted a list of values, found 'ab'"),
        (("n", "in", 3), "in: wanted a list of values, found 3"),
        (("m", "<", 2), "no column 'm', the source has n, text, wide, ragged"),
        (("text", "<", 2), "column 'text' <: "),
        (("n", "<", "x"), "column 'n'"),
        (("n", "<", [1, 2]), "<: wanted one value, found [1, 2]"),
        (("ragged", "<", 2), "column 'ragged' <: "),
        (("wide", "<", 2), "column 'wide' has (2,) values a record"),
    ],
)
def test_conditions_that_make_no_sense(condition, told):
    with pytest.raises(Misuse) as caught:
        Where(*condition)(BATCH)
    assert told in str(caught.value)


def test_several_conditions_must_all_hold():
    source = Documents([3] * 25000)
    kept = kept_where(source, [Where("score", ">", 3), Where("score", "not in", [7])])
    assert kept.ids.tolist() == [d for d in range(25000) if d % 10 in (4, 5, 6, 8, 9)]
    assert [len(call) for call in source.calls] == [64, 512, 4096, 8192, 8192, 3944]


def test_large_records_are_read_few_at_a_time():
    class Large(Records):
        def read(self, indices):
            self.calls.append(indices)
            return [bytes(2 << 20)] * len(indices)

    source = Large(200)
    assert [first for first, _ in batches(source)] == [0, 64, 96, 128, 160, 192]


@pytest.mark.parametrize("value", ["1", 2.5, float("nan"), 2**70, -(2**63) - 1, None, (1, 2)])
@pytest.mark.parametrize("operator", ["in", "not in"])
def test_values_that_no_column_can_hold(value, operator):
    with pytest.raises(Misuse, match=r"column 'n' .*in: wanted values of int64, found"):
        Where("n", operator, [1, value])(BATCH)


def test_values_are_compared_as_ones_of_the_column():
    large = np.array([2**63 + 1, 2**63 + 2, 5], np.uint64)
    assert Where("n", "in", [2**63 + 1, 5.0])({"n": large}).tolist() == [True, False, True]
    assert Where("n", "in", [])({"n": large}).tolist() == [False] * 3
    small = np.array([0.1, 0.5], np.float32)
    assert Where("x", "in", [0.1])({"x": small}).tolist() == [True, False]
    texts = np.array(["a", "bc"])
    assert Where("t", "in", ["bcd", "a"])({"t": texts}).tolist() == [True, False]


def test_a_file_does_not_hide_a_column(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "length").write_text("no sidecar")
    Pipeline(Documents(LENGTHS), batch_size=1, seed=1, pack=Pack(8, lengths="length"))


def test_items_of_an_epoch_are_no_documents():
    with pytest.raises(Misuse, match="other items in every epoch"):
        Packable.of(Turning(5), Lengths.of([1] * 5), "", "uint16")


class Narrowing(Documents):
    """Documents that can be asked for some columns; `narrow` are the sources that were made so."""

    def select(self, columns):
        self.narrow = [*getattr(self, "narrow", []), (columns, Narrowing(self.lengths))]
        return self.narrow[-1][1]

    def close(self):
        self.closed = True


def test_a_source_for_some_columns_is_closed_again():
    source = Narrowing(LENGTHS)
    conditions = [Where("score", ">", 1), Where("length", ">", 1), Where("score", "<", 4)]
    assert kept_where(source, conditions).ids.tolist() == [2, 3]
    assert column_of(source, "length").tolist() == LENGTHS
    with pytest.raises(Misuse, match="no column"):
        column_of(source, "nothing")
    assert [columns for columns, _ in source.narrow] == [
        ["score", "length"],
        ["length"],
        ["nothing"],
    ]
    assert all(narrow.closed for _, narrow in source.narrow)
    assert source.calls == []


@pytest.mark.parametrize("write", ["parquet", "arrow"])
@pytest.mark.parametrize("cache", [False, True])
def test_columns_that_are_not_read_otherwise(tmp_path, write, cache):
    columns = {
        "tokens": [np.arange(length, dtype=np.int32) for length in LENGTHS],
        "length": np.array(LENGTHS),
        "score": np.array([1.0, 2.0, 3.0, 4.0, 5.0]),
    }
    path = tmp_path / f"a.{write}"
    getattr(formats, f"write_{write}")(path, columns)
    options = {"cache": tmp_path / "cache"} if cache and write == "parquet" else {}
    with formats.open_source(path, columns=["tokens"], **options) as source:
        narrow = source.select(["score", "length"])
        assert [each.name for each in narrow.spec.columns] == ["score", "length"]
        assert narrow.read([4])["score"].tolist() == [5.0]
        pipe = Pipeline(
            source,
            batch_size=1,
            seed=1,
            shuffle=False,
            epochs=1,
            filter=Where("score", ">=", 3),
            pack=Pack(10, lengths="length"),
        )
        assert next(pipe.iterator())["tokens"].tolist() == [list(range(10))]
        with pytest.raises(Misuse, match=r"no column 'scor'.*did you mean 'score'"):
            kept_where(source, [Where("scor", ">", 1)])


# -- sidecars --------------------------------------------------------------------------------------


def kept_at(path, source, ids=(0, 2, 4)):
    Kept.of_ids(ids, len(source)).save(path, Origin.of(source, "filters:good", "3"))
    return path


def lengths_at(path, source):
    Lengths.of(source.lengths).save(path, Origin.of(source, "filters:count", "1"))
    return path


def test_a_pipeline_of_sidecars_is_that_of_columns(tmp_path):
    source = Documents(LENGTHS)
    options = {"batch_size": 1, "seed": 1, "epochs": 2}
    by_column = Pipeline(
        source, filter=Where("score", "in", [0, 2, 4]), pack=Pack(9, lengths="length"), **options
    )
    kept = kept_at(tmp_path / "kept", source)
    pack = Pack(9, lengths=str(lengths_at(tmp_path / "lengths", source)))
    by_sidecar = Pipeline(source, filter=kept, pack=pack, **options)
    assert by_sidecar.identity == by_column.identity
    np.testing.assert_equal(list(by_sidecar), list(by_column))
    direct = Pipeline(source, filter=Kept.load(kept, source), pack=pack, **options)
    assert direct.identity == by_column.identity


def test_sidecars_of_other_data_are_refused_with_what_differs(tmp_path):
    source, other = Documents(LENGTHS), Documents([*LENGTHS, 3], name="more")
    for path, load in [
        (kept_at(tmp_path / "kept", source), Kept.load),
        (lengths_at(tmp_path / "lengths", source), Lengths.load),
    ]:
        load(path, source)
        with pytest.raises(Mismatch, match=r"ckpt data index") as caught:
            load(path, other)
        told = "\n".join(caught.value.differences)
        assert "name: wanted more, found documents" in told
        assert "records: wanted 6, found 5" in told
    with pytest.raises(Mismatch, match="kind: wanted kept version 1, found lengths version 1"):
        Kept.load(tmp_path / "lengths", source)
    with pytest.raises(NotFound):
        Kept.load(tmp_path / "none", source)


def test_a_sidecar_is_of_the_records_whichever_columns_are_read(tmp_path):
    rows = {"a": np.arange(5), "b": np.arange(5)}
    formats.write_parquet(tmp_path / "x.parquet", rows)
    with (
        formats.open_source(tmp_path / "x.parquet", columns=["a"]) as one,
        formats.open_source(tmp_path / "x.parquet", columns=["b"]) as other,
    ):
        kept = kept_at(tmp_path / "kept", one)
        assert Kept.load(kept, other).ids.tolist() == [0, 2, 4]
    formats.write_parquet(tmp_path / "x.parquet", {"a": np.arange(7), "b": np.arange(7)})
    with (
        formats.open_source(tmp_path / "x.parquet") as changed,
        pytest.raises(Mismatch, match="bytes: wanted"),
    ):
        Kept.load(kept, changed)


def test_any_damage_is_told(tmp_path):
    source = Documents(LENGTHS)
    good = kept_at(tmp_path / "kept", source).read_bytes()
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    path = tmp_path / "damaged"
    for _ in range(400):
        raw = bytearray(good)
        kind = rng.randrange(3)
        if kind == 0:
            at = rng.randrange(len(raw))
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del raw[rng.randrange(len(raw)) :]
        else:
            raw += bytes(rng.randrange(1, 100))
        path.write_bytes(raw)
        if kind == 0 and at >= len(good) - 40:  # behind the three numbers: padding
            assert Kept.load(path, source).ids.tolist() == [0, 2, 4]
            continue
        with pytest.raises((Damaged, Mismatch), match="damaged"):
            Kept.load(path, source)
    path.write_bytes(good)
    assert len(Kept.load(path, source)) == 3


@pytest.mark.parametrize(
    ("kind", "about", "arrays", "told"),
    [
        ("kept", {"records": 5}, {"ids": [3, 1]}, "strictly ascending"),
        ("kept", {"records": 5}, {"ids": [0, 5]}, "outside [0, 5)"),
        ("kept", {"records": 5}, {"ids": [-1]}, "outside [0, 5)"),
        ("kept", {"records": 6}, {"ids": [0]}, "records must be an integer in [5, 5]"),
        ("kept", {"records": "5"}, {"ids": [0]}, "records must be an integer"),
        ("kept", {}, {"ids": [0]}, "records must be an integer"),
        ("kept", {"records": 5}, {"no": [0]}, "wanted one array, ids, found ['no']"),
        ("kept", {"records": 5, "source.digest": 7}, {"ids": [0]}, "digest must be a text"),
        ("kept", {"records": 5, "function": 7}, {"ids": [0]}, "function must be a text"),
        ("lengths", {"records": 5}, {"tokens": [1, 2]}, "wanted 5 lengths, found 2"),
        ("lengths", {"records": 5}, {"tokens": [1, 2, 3, 4, -5]}, "has a length of -5"),
    ],
)
def test_hostile_sidecars(tmp_path, kind, about, arrays, told):
    source = Documents(LENGTHS)
    path = tmp_path / "index"
    flat = {name: np.array(each, np.int64) for name, each in arrays.items()}
    sidecar.write(path, Sidecar(kind, VERSION, Origin.of(source).to_json() | about, flat))
    with pytest.raises(Damaged) as caught:
        (Kept if kind == "kept" else Lengths).load(path, source)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "head",
    [
        b"[]",
        b"{}",
        b"\xff" * 40,
        b"[" * 100_000,
        b'{"kind":"kept","version":1,"about":{},"arrays":[{"name":"ids","dtype":"int64",'
        b'"count":1152921504606846975}],"digest":"0"}',
        b'{"kind":"kept","version":1,"about":{},"arrays":[{"name":"ids","dtype":"object",'
        b'"count":1}],"digest":"0"}',
        b'{"kind":"kept","version":1,"about":{"a":[1]},"arrays":[],"digest":"0"}',
        b'{"kind":["kept"],"version":1,"about":{},"arrays":[],"digest":"0"}',
        b'{"kind":"kept","version":true,"about":{},"arrays":[],"digest":"0"}',
        b'{"kind":"kept","version":1,"about":{},"arrays":[],"digest":5}',
    ],
)
def test_headers_that_are_none(tmp_path, head):
    path = tmp_path / "index"
    path.write_bytes(b"LGINDEX1" + len(head).to_bytes(8, "little") + head)
    with pytest.raises(Damaged, match="index"):
        Kept.load(path, Documents(LENGTHS))
    for size in (0, 1 << 21, (1 << 64) - 1):
        path.write_bytes(b"LGINDEX1" + size.to_bytes(8, "little") + head)
        with pytest.raises(Damaged, match="a header of"):
            Kept.load(path, Documents(LENGTHS))


def test_what_lies_in_place_of_a_sidecar(tmp_path):
    source = Documents(LENGTHS)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("pipe", "directory"):
        with pytest.raises(DataError, match=name):
            Kept.load(tmp_path / name, source)


# -- wrong use in a pipeline -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"filter": 3}, Misuse, "source: filter: wanted a Where or several, a Kept, or the path"),
        ({"filter": []}, Misuse, "filter: wanted a Where"),
        ({"filter": {"web": Where("score", ">", 1)}}, Misuse, "no source 'web', here are source"),
        ({"filter": Where("scores", ">", 1)}, Misuse, "no column 'scores', the source has tokens"),
        ({"filter": Where("score", ">", 99)}, NotFound, "source holds no records"),
        ({"filter": Kept.of_ids([0], 4)}, Misuse, "an index of 4 records for a source of 5"),
        ({"filter": "/nowhere/kept"}, NotFound, "/nowhere/kept"),
        ({"pack": 8}, Misuse, "source: pack: wanted a Pack or a Concatenate, found 8"),
        ({"pack": {"web": Pack(8, lengths="length")}}, Misuse, "pack: no source 'web'"),
        ({"pack": Pack(0, lengths="length")}, Misuse, "capacity must be an integer in [1,"),
        ({"pack": Pack(8, lengths="len")}, Misuse, "'len' is no sidecar"),
        ({"pack": Pack(8, lengths="tokens")}, Misuse, "'tokens': wanted numbers, found a list"),
        ({"pack": Pack(8, lengths=[1, 2])}, Misuse, "wanted one for each of 5 documents, found 2"),
        ({"pack": Pack(8, lengths="length", tokens="text")}, Misuse, "no column 'text' of tokens"),
        ({"pack": Pack(8, lengths="length", tokens="score")}, Misuse, "'score' is no list of tok"),
        ({"pack": Pack(8, lengths="length", dtype="int8")}, Misuse, "holds int32: leave out dtype"),
        (
            {"pack": Pack(8, lengths="length", pad=2**31)},
            Misuse,
            "pad must be an integer in [-2147",
        ),
        ({"pack": Pack(8, lengths="length", pad=0.5)}, Misuse, "pad must be an integer"),
        (
            {"pack": Pack(8, lengths="length", oversize="refuse")},
            Misuse,
            "document 2 has 17 tokens",
        ),
        ({"pack": Concatenate(64, lengths="length")}, NotFound, "source holds no records"),
        ({"pack": Concatenate(8, lengths="length"), "batch_size": 9}, Misuse, "batch of 9 is larg"),
    ],
)
def test_wrong_use_is_told(options, kind, told):
    with pytest.raises(kind) as caught:
        Pipeline(Documents(LENGTHS), **({"batch_size": 1, "seed": 1} | options))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "told"),
    [(None, "such as dtype='uint16'"), ("float32", "wanted integers"), ("x", "wanted integers")],
)
def test_bytes_need_the_dtype_of_their_tokens(dtype, told):
    source = Documents(LENGTHS, as_bytes=True)
    with pytest.raises(Misuse) as caught:
        Pipeline(source, batch_size=1, seed=1, pack=Pack(8, lengths=LENGTHS, dtype=dtype))
    assert told in str(caught.value)
    with pytest.raises(Misuse, match="records of bytes"):
        column_of(source, "length")


def test_some_sources_concatenated_and_others_not():
    sources = {"web": Documents(LENGTHS), "code": Documents(LENGTHS, name="code")}
    with pytest.raises(Misuse, match=r"Concatenate is for all sources or none.*web, code"):
        Pipeline(sources, batch_size=1, seed=1, pack={"web": Concatenate(8, lengths="length")})


def test_an_index_of_bins_is_made_once(tmp_path, monkeypatch):
    from datapipe.sources import stages

    pack = Pack(9, lengths="length", index=tmp_path / "bins")
    first = Pipeline(Documents(LENGTHS), batch_size=1, seed=1, epochs=1, pack=pack)
    with monkeypatch.context() as patched:
        patched.setattr(stages, "pack", None)  # nobody may call it
        second = Pipeline(Documents(LENGTHS), batch_size=1, seed=1, epochs=1, pack=pack)
    assert second.identity == first.identity
    np.testing.assert_equal(list(second), list(first))
    with pytest.raises(Mismatch, match="documents: wanted 6, found 5"):
        Pipeline(Documents([*LENGTHS, 1]), batch_size=1, seed=1, pack=pack)

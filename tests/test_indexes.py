"""Filters and lengths: from columns, from sidecars, and what is refused of both."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from document_source import Documents
from hypothesis import given
from hypothesis import strategies as st
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
from datapipe.sources.scanning import Values, answers
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


def test_a_file_does_not_hide_a_column(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "length").write_text("no sidecar")
    Pipeline(Documents(LENGTHS), batch_size=1, seed=1, pack=Pack(8, lengths="length"))


def test_items_of_an_epoch_are_no_documents():
    with pytest.raises(Misuse, match="other items in every epoch"):
        Packable.of(Turning(5), Lengths.of([1] * 5), "", "uint16")


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
        answers(source, [Values("length")])


def test_some_sources_concatenated_and_others_not():
    sources = {"web": Documents(LENGTHS), "code": Documents(LENGTHS, name="code")}
    with pytest.raises(Misuse, match=r"Concatenate is for all sources or none.*web, code"):
        Pipeline(sources, batch_size=1, seed=1, pack={"web": Concatenate(8, lengths="length")})


@pytest.mark.parametrize("shuffle", [False, "none"])
def test_as_stored_some_sources_may_be_concatenated(shuffle):
    packs = {"web": Concatenate(8, lengths="length"), "code": Pack(8, lengths="length")}
    sources = {name: Documents(LENGTHS, name=name) for name in packs}
    pipe = Pipeline(sources, batch_size=1, seed=1, epochs=1, shuffle=shuffle, pack=packs)
    assert len(next(pipe.iterator(prefetch=0))["tokens"]) == 1


@pytest.mark.parametrize("column", ["score", "flags", "shares"])
def test_tokens_are_integers(column, tmp_path):
    columns = {
        "score": [0.5] * 4,
        "flags": np.ones((4, 3), bool),
        "shares": [np.ones(3, np.float32)] * 4,
        "length": [3] * 4,
    }
    formats.write_parquet(tmp_path / "a.parquet", columns)
    with formats.open_source(tmp_path / "a.parquet") as source:
        pack = Pack(8, lengths="length", tokens=column)
        with pytest.raises(Misuse, match=f"column '{column}' is no list of tokens"):
            Pipeline(source, batch_size=1, seed=1, pack=pack)


def test_files_that_tell_no_sizes_are_told_apart_by_their_digest():
    def told(files):
        source = Documents(LENGTHS)
        about = source.fingerprint() | {"files": files}
        source.fingerprint = lambda: about
        return Origin.of(source).source

    files = [{"name": "a", "records": 3}, {"name": "b", "records": 2, "bytes": 7}]
    found = told(files)
    assert (found["files"], found.get("bytes")) == (2, None)
    assert told([*files, 3])["files"] == 3
    assert told([files[1]])["bytes"] == 7
    assert len({told(each)["digest"] for each in (files, files[1:], [])}) == 3


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

"""Conditions on columns, and the columns read for them from end to end."""

from __future__ import annotations

import numpy as np
import pytest
from document_source import Documents
from memory_source import Records

import formats
from datapipe import Misuse, Pack, Pipeline, Where
from datapipe.sources.scanning import Values, answers, batches, meeting_all

LENGTHS = [5, 0, 17, 3, 8]


def kept_where(source, conditions):
    """The numbers of the records that meet all of the conditions."""
    return meeting_all(answers(source, conditions)).ids.tolist()


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
    assert kept == [d for d in range(25000) if d % 10 in (4, 5, 6, 8, 9)]
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
    assert kept_where(source, conditions) == [2, 3]
    assert answers(source, [Values("length")])[0].tolist() == LENGTHS
    with pytest.raises(Misuse, match="no column"):
        answers(source, [Values("nothing")])
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

"""Columns that filter and packing want are read once, together."""

from __future__ import annotations

import numpy as np
import pytest

import formats
from datapipe import Concatenate, Kept, Misuse, Pack, Pipeline, Where
from datapipe.sources.scanning import Values, answers
from formats.parquet import ParquetSource

RECORDS = 500
LENGTHS = [1 + number % 9 for number in range(RECORDS)]


@pytest.fixture
def source(tmp_path):
    formats.write_parquet(
        tmp_path / "a.parquet",
        {
            "tokens": [np.arange(length, dtype=np.int32) for length in LENGTHS],
            "length": np.array(LENGTHS),
            "score": np.arange(RECORDS) / RECORDS,
            "language": ["de", "en"] * (RECORDS // 2),
        },
        row_group_size=100,
    )
    with formats.open_source(tmp_path / "a.parquet", columns=["tokens"]) as found:
        yield found


@pytest.fixture
def reads(monkeypatch) -> list[tuple[list[str], list[int]]]:
    """Columns and rows of each read of a Parquet source."""
    found = []
    real = ParquetSource.read

    def read(self, indices):
        found.append(([column.name for column in self.spec.columns], list(indices)))
        return real(self, indices)

    monkeypatch.setattr(ParquetSource, "read", read)
    return found


@pytest.mark.parametrize("kind", [Pack, Concatenate])
@pytest.mark.parametrize("filter", [Where("score", ">=", 0.5), None])
def test_filter_and_lengths_are_read_together(source, reads, kind, filter):
    pipe = Pipeline(source, batch_size=1, seed=1, filter=filter, pack=kind(16, lengths="length"))
    columns = ["length"] if filter is None else ["score", "length"]
    assert {tuple(names) for names, _ in reads} == {tuple(columns)}
    assert [row for _, rows in reads for row in rows] == list(range(RECORDS))
    kept = range(0 if filter is None else RECORDS // 2, RECORDS)
    (view,) = pipe.sources.values()
    assert view.documents.lengths.tokens.tolist() == [LENGTHS[record] for record in kept]


def test_a_column_that_both_want_is_read_once(source, reads):
    conditions = [Where("length", ">", 2), Where("language", "==", "de"), Where("length", "<", 8)]
    Pipeline(source, batch_size=1, seed=1, filter=conditions, pack=Pack(16, lengths="length"))
    assert {tuple(names) for names, _ in reads} == {("length", "language")}
    assert sum(len(rows) for _, rows in reads) == RECORDS


def test_what_is_given_reads_nothing(source, reads):
    kept = Kept.of_ids(np.arange(0, RECORDS, 3), RECORDS)
    Pipeline(source, batch_size=1, seed=1, filter=kept, pack=Pack(16, lengths=LENGTHS))
    assert reads == []


@pytest.mark.parametrize(
    ("filter", "lengths", "told"),
    [
        (Where("score", ">", 0), "lenght", r"lengths: 'lenght' is no sidecar.*did you mean"),
        (Where("score", ">", 0), "language", r"lengths: 'language' is no .*wanted numbers"),
        (Where("score", ">", 0), "score", r"lengths: 'score' is no .*one integer for each"),
        (Where("scor", ">", 0), "length", r"^source: [^:]*has no column 'scor'"),
        (Where("language", "<", 3), "length", r"^source: filter: column 'language' <"),
        (Where("scor", ">", 0), "lenght", r"lengths: 'lenght' is no sidecar.*'lenght'"),
    ],
)
def test_errors_say_which_of_them_it_is(source, filter, lengths, told):
    with pytest.raises(Misuse, match=told):
        Pipeline(source, batch_size=1, seed=1, filter=filter, pack=Pack(16, lengths=lengths))


def test_answers_of_nothing(tmp_path):
    formats.write_parquet(tmp_path / "a.parquet", {"x": np.zeros(0)})
    with formats.open_source(tmp_path / "a.parquet") as empty:
        met, values = answers(empty, [Where("x", ">", 1), Values("x")])
    assert (met.size, values.size) == (0, 0)

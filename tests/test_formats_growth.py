"""What a grown source was before: by the fingerprint of its leading files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import formats
from formats.errors import Mismatch
from formats.growth import leading


def array_record(place: Path, records: int) -> None:
    formats.write_array_record(
        place, [b"%d in %s" % (i, place.name.encode()) for i in range(records)]
    )


def parquet(place: Path, records: int) -> None:
    formats.write_parquet(place, {"id": np.arange(records), "of": [place.name] * records})


def arrow(place: Path, records: int) -> None:
    formats.write_arrow(place, {"id": np.arange(records), "of": [place.name] * records})


def tokens(place: Path, records: int) -> None:
    np.save(place, np.arange(records * 4 + 3, dtype=np.uint16) + len(place.name))


FORMATS = {
    ".array_record": (array_record, {}),
    ".parquet": (parquet, {}),
    ".arrow": (arrow, {}),
    ".npy": (tokens, {"window": 4}),
}


@pytest.fixture(params=FORMATS)
def kind(request):
    return request.param


def write(kind: str, place: Path, **records: int) -> None:
    place.mkdir(exist_ok=True, parents=True)
    for name, count in records.items():
        FORMATS[kind][0](place / f"{name}{kind}", count)


def fingerprint(kind: str, pattern: object, **options: object) -> dict:
    with formats.open_source(pattern, **FORMATS[kind][1], **options) as source:
        return source.fingerprint()


def test_leading_files_have_the_fingerprint_they_had_alone(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path, a=5, b=3)
    pattern = tmp_path / f"*{kind}"
    before = fingerprint(kind, pattern)
    write(kind, tmp_path, c=7)
    after = fingerprint(kind, pattern)
    assert leading(after, 8) == [before]
    assert leading(after, 15) == [after]
    assert leading(after, 5) == [fingerprint(kind, tmp_path / f"a{kind}")]


def test_a_file_of_its_own_may_become_a_pattern(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path, a=5)
    before = fingerprint(kind, tmp_path / f"a{kind}")
    write(kind, tmp_path, b=3)
    assert leading(fingerprint(kind, tmp_path / f"*{kind}"), 5) == [before]


def test_shards_in_another_directory(kind: str, tmp_path: Path) -> None:
    """The fixed part of the pattern gets shorter, and the names longer."""
    write(kind, tmp_path / "data" / "day-1", a=5, b=3)
    write(kind, tmp_path / "data" / "day-2", a=4)
    deep, middle, flat = (tmp_path / "data" / "day-1" / f"*{kind}", "data", "")
    patterns = [
        [deep, tmp_path / "data" / "day-2" / f"*{kind}"],
        tmp_path / middle / "*" / f"*{kind}",
        tmp_path / flat / "*" / "*" / f"*{kind}",
    ]
    before = fingerprint(kind, deep)
    for number, pattern in enumerate(patterns):
        found = leading(fingerprint(kind, pattern), 8)
        assert before in found
        assert len(found) == (3 if number == 2 else 2)


def test_a_cached_source_grows_as_the_one_it_is_of(tmp_path: Path) -> None:
    write(".parquet", tmp_path / "p", a=5, b=3)
    before = fingerprint(".parquet", tmp_path / "p" / "*", cache=tmp_path / "cache")
    write(".parquet", tmp_path / "p", c=7)
    after = fingerprint(".parquet", tmp_path / "p" / "*", cache=tmp_path / "cache")
    assert leading(after, 8) == [before]


def test_windows_of_other_lengths_are_other_records(tmp_path: Path) -> None:
    write(".npy", tmp_path, a=5, b=3)
    with formats.open_source(tmp_path / "*.npy", window=4) as source:
        before = source.fingerprint()
    with formats.open_source(tmp_path / "*.npy", window=2) as source:
        after = source.fingerprint()
    assert before not in [each for n in (11, 18) for each in leading(after, n)]
    with pytest.raises(Mismatch, match=r"no whole number of files \(a.npy lies across\)"):
        leading(after, 8)


def test_a_file_that_was_too_short_may_have_been_there_or_not(tmp_path: Path) -> None:
    write(".npy", tmp_path, a=5, b=0, c=0, d=2)
    after = fingerprint(".npy", tmp_path / "*.npy")
    found = [[file["name"] for file in each["files"]] for each in leading(after, 5)]
    assert found == [["a.npy"], ["a.npy", "b.npy"], ["a.npy", "b.npy", "c.npy"]]


def test_a_file_that_changed_or_moved_in_is_no_leading_one(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path, b=5)
    before = fingerprint(kind, tmp_path / f"*{kind}")
    write(kind, tmp_path, a=5, c=1)
    assert before not in leading(fingerprint(kind, tmp_path / f"*{kind}"), 5)
    write(kind, tmp_path, a=2)
    with pytest.raises(Mismatch, match=f"b{kind} lies across.*a file that was there has changed"):
        leading(fingerprint(kind, tmp_path / f"*{kind}"), 5)
    with pytest.raises(Mismatch, match="no whole number of files: a file"):
        leading(fingerprint(kind, tmp_path / f"*{kind}"), 9)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"records": 4}, "tells of no files"),
        ({"records": 4, "files": "many"}, "tells of no files"),
        ({"records": 4, "files": [{"name": "a"}]}, "tells of no files"),
        ({"records": 4, "files": [4]}, "tells of no files"),
        ({"records": 4, "files": [{"name": "a", "records": "4"}]}, "tells of no files"),
        ({"records": 4, "files": [{"name": 3, "records": 4}]}, "tells of no files"),
        ({"records": 4, "files": [{"name": "a", "records": 9}]}, "hold 9 records, and it has 4"),
        ({"files": [{"name": "a", "records": 9}]}, "hold 9 records, and it has None"),
    ],
)
def test_a_source_of_something_else(given: dict, text: str) -> None:
    with pytest.raises(Mismatch, match=text):
        leading(given, 2)

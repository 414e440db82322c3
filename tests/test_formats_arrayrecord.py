"""ArrayRecord sources against a plain list, through threads, forks, pickles and damage."""

from __future__ import annotations

import itertools
import os
import pickle
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import formats
from formats import arrayrecord
from formats.files import find

SEED = 7


def write_shards(directory: Path, shards: list[list[bytes]], *, group_size: int = 1) -> None:
    for number, records in enumerate(shards):
        path = directory / f"part-{number:03d}.array_record"
        formats.write_array_record(path, records, group_size=group_size)


def some_records(count: int, seed: int = SEED) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [rng.bytes(int(rng.integers(0, 200))) for _ in range(count)]


@hypothesis.given(
    shards=st.lists(st.lists(st.binary(max_size=40), max_size=12), min_size=1, max_size=4),
    group_size=st.sampled_from([1, 3]),
    data=st.data(),
)
@hypothesis.settings(max_examples=40)
def test_reads_what_a_list_would_give(tmp_path_factory, shards, group_size, data):
    directory = tmp_path_factory.mktemp("shards")
    write_shards(directory, shards, group_size=group_size)
    oracle = [record for shard in shards for record in shard]
    with formats.open_source(str(directory / "*.array_record")) as source:
        assert len(source) == len(oracle)
        assert list(source) == oracle
        for _ in range(3):
            rows = data.draw(
                st.lists(st.integers(0, len(oracle) - 1), max_size=30) if oracle else st.just([])
            )
            assert source.read(rows) == [oracle[row] for row in rows]
            assert source.read(np.array(rows, np.int64)) == [oracle[row] for row in rows]
        for row in range(len(oracle)):
            number, position = place(shards, row)
            file = directory / f"part-{number:03d}.array_record"
            assert source.where(row) == f"{file}, record {position}"


def place(shards: list[list[bytes]], row: int) -> tuple[int, int]:
    for number, shard in enumerate(shards):
        if row < len(shard):
            return number, row
        row -= len(shard)
    raise AssertionError


def test_one_call_per_shard(tmp_path, monkeypatch):
    write_shards(tmp_path, [some_records(50), [], some_records(50)])
    source = formats.ArrayRecordSource(find(tmp_path / "*.array_record"))
    calls = []
    real = source._read_file

    def spy(number, positions):
        calls.append((number, positions))
        return real(number, positions)

    monkeypatch.setattr(source, "_read_file", spy)
    source.read(np.random.default_rng(SEED).integers(0, 100, 400))
    assert [number for number, _ in calls] == [0, 2]
    assert all(positions == sorted(positions) for _, positions in calls)


class Counting:
    """A reader that notes its calls: positions read one by one, and how many together."""

    def __init__(self, reader):
        self.reader = reader
        self.alone = []
        self.together = []

    def seek(self, position):
        self.alone.append(position)
        self.reader.seek(position)

    def read(self, *positions):
        if positions:
            self.together.append(len(positions[0]))
        return self.reader.read(*positions)

    def __getattr__(self, name):
        return getattr(self.reader, name)


def counting(monkeypatch):
    """The readers that are opened from now on."""
    readers = []
    real = arrayrecord._reader

    def opened(file):
        readers.append(Counting(real(file)))
        return readers[-1]

    monkeypatch.setattr(arrayrecord, "_reader", opened)
    return readers


def test_records_in_memory_are_read_one_by_one_in_the_order_of_the_file(tmp_path, monkeypatch):
    records = some_records(100)
    write_shards(tmp_path, [records[:30], records[30:60], records[60:]])
    source = formats.open_source(tmp_path / "*.array_record")
    readers = counting(monkeypatch)
    monkeypatch.setattr(arrayrecord, "_waits", lambda: 0)
    rng = np.random.default_rng(SEED)
    for rows in (rng.integers(0, 100, 512), np.arange(100), rng.integers(30, 60, 20)):
        assert source.read(rows) == [records[row] for row in rows], f"seed {SEED}"
        positions = [
            (rows[(rows >= first) & (rows < stop)] - first).tolist()
            for first, stop in ((0, 30), (30, 60), (60, 100))
        ]
        assert [reader.alone for reader in readers] == [sorted(each) for each in positions]
        assert not any(reader.together for reader in readers)
        for reader in readers:
            reader.alone.clear()


def test_records_that_are_waited_for_are_read_by_one_call_per_shard(tmp_path, monkeypatch):
    records = some_records(100)
    write_shards(tmp_path, [records[:30], records[30:60], records[60:]])
    source = formats.open_source(tmp_path / "*.array_record")
    readers = counting(monkeypatch)
    waits = itertools.count()
    monkeypatch.setattr(arrayrecord, "_waits", lambda: 10 * next(waits))
    rows = np.random.default_rng(SEED).permutation(100)
    for call in range(1 + 2 * (arrayrecord._COLD_CALLS + 1)):
        assert source.read(rows) == [records[row] for row in rows], f"seed {SEED}"
        # The first record tells, and is looked at again after some calls.
        tried = call % (arrayrecord._COLD_CALLS + 1) == 0
        assert [len(reader.alone) for reader in readers] == [int(tried)] * 3
        assert [reader.together for reader in readers] == [[n - tried] for n in (30, 30, 40)]
        for reader in readers:
            reader.alone.clear()
            reader.together.clear()


def test_a_few_waits_are_no_reason_to_read_together(tmp_path, monkeypatch):
    records = some_records(100)
    write_shards(tmp_path, [records])
    source = formats.open_source(tmp_path / "*.array_record")
    readers = counting(monkeypatch)
    waits = iter([0, 2, 2, 2, 2, 2, 2, 2, 2])
    monkeypatch.setattr(arrayrecord, "_waits", lambda: next(waits))
    assert source.read(np.arange(100)) == records
    assert len(readers[0].alone) == 100
    assert not readers[0].together


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_open_files_stay_within_the_limit(tmp_path, monkeypatch):
    write_shards(tmp_path, [[b"%d" % number] for number in range(12)])
    monkeypatch.setattr("resource.getrlimit", lambda _: (8, 8))
    before = open_descriptors()
    source = formats.open_source(tmp_path / "*.array_record")
    for _ in range(3):
        assert source.read(np.arange(12)) == [b"%d" % number for number in range(12)]
    assert open_descriptors() <= before + 4


def test_a_flipped_bit_names_file_and_record(tmp_path):
    """Any bit of any byte that matters gives an error or the right bytes, never wrong ones."""
    records = [b"record %d " % number * 9 for number in range(12)]
    write_shards(tmp_path, [[b"ok"], records])
    path = tmp_path / "part-001.array_record"
    sound = path.read_bytes()
    used = max(place for place, byte in enumerate(sound[:65536]) if byte) + 1
    rng = np.random.default_rng(SEED)
    places = [*range(0, used, 5), *range(65536, 65536 + 200)]
    bad: list[formats.BadRecord] = []
    refused: list[str] = []
    for at in places:
        damaged = bytearray(sound)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            source = formats.open_source(tmp_path / "*.array_record")
        except formats.Damaged as error:
            refused.append(str(error))
            continue
        wanted = [b"ok", *records]
        try:
            assert source.read(np.arange(13)) == wanted, f"byte {at}, seed {SEED}"
        except formats.BadRecord as error:
            bad.append(error)
            rest = [row for row in range(13) if row != error.index]
            assert source.read(rest) == [wanted[row] for row in rest], f"byte {at}, seed {SEED}"
    assert len(refused) > 10
    assert all(str(path) in message for message in refused)
    assert {error.position for error in bad} == set(range(12)), f"seed {SEED}"
    for error in bad:
        assert (error.file, error.index) == (str(path), error.position + 1)
        assert f"{path}, record {error.position} (record {error.index} of" in str(error)


def test_a_bad_record_survives_pickling(tmp_path):
    error = formats.BadRecord("text", index=3, file="f", position=2)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.index, again.file, again.position) == ("text", 3, "f", 2)


def test_a_file_rewritten_behind_an_open_source_is_noticed(tmp_path):
    write_shards(tmp_path, [some_records(5)])
    source = formats.open_source(tmp_path / "*.array_record")
    write_shards(tmp_path, [some_records(6)])
    with pytest.raises(formats.Mismatch, match="wanted 5 records, found 6"):
        source.read([0])


def test_fingerprint_sees_content_names_and_order(tmp_path):
    def digest(name: str, shards: list[list[bytes]]) -> str:
        directory = tmp_path / name
        directory.mkdir()
        write_shards(directory, shards)
        source = formats.open_source(directory / "*.array_record")
        return source.fingerprint()["digest"]

    records = [b"record %03d" % number for number in range(40)]
    first = digest("a", [records[:20], records[20:]])
    assert digest("b", [records[:20], records[20:]]) == first, "the directory does not matter"
    changed = [*records[:11], b"Record 011", *records[12:]]
    others = {
        digest("c", [records[:21], records[21:]]),
        digest("d", [records[20:], records[:20]]),
        digest("e", [records]),
        digest("f", [changed[:20], changed[20:]]),
    }
    assert len(others | {first}) == 5


def test_fingerprint_tells_what_it_stands_for(tmp_path):
    write_shards(tmp_path, [some_records(4), []])
    found = formats.open_source(tmp_path / "*.array_record").fingerprint()
    assert (found["format"], found["records"], found["columns"]) == ("array_record", 4, [])
    assert [(f["name"], f["records"]) for f in found["files"]] == [
        ("part-000.array_record", 4),
        ("part-001.array_record", 0),
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.array_record"
    formats.write_array_record(path, [b"old"])
    with pytest.raises(formats.Misuse, match="record 1 is of type str, wanted bytes"):
        formats.write_array_record(path, [b"new", "text"])  # type: ignore[list-item]

    def stops():
        yield b"new"
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        formats.write_array_record(path, stops())
    assert os.listdir(tmp_path) == ["a.array_record"]
    assert formats.open_source(path).read([0]) == [b"old"]
    assert formats.write_array_record(path, [b"new", b""]) == 2
    assert formats.open_source(path).read([1, 0]) == [b"", b"new"]
    with pytest.raises(formats.Misuse, match="group_size"):
        formats.write_array_record(path, [], group_size=0)
    with pytest.raises(formats.NotFound, match=r"there is no directory .*absent"):
        formats.write_array_record(tmp_path / "absent/x.array_record", [b"x"])

"""Files that are damaged, and mended while a run stands still: ArrayRecord, Parquet, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from replacing_oracle import ids_of, served

import formats
from datapipe import BadRecord, Pipeline

COUNT = 1200
BYTES = 2048
VOCABULARY = 1000


@dataclass(frozen=True)
class Case:
    """Files of COUNT records; `offset` is of a byte whose damage makes `bad` records bad."""

    pattern: Path
    damaged: Path
    offset: int
    bad: set[int]
    said: str

    def flip(self):
        """Damage the file, or mend it."""
        data = bytearray(self.damaged.read_bytes())
        data[self.offset] ^= 0xFF
        self.damaged.write_bytes(data)

    def pipe(self, **options):
        arguments = {"batch_size": 32, "seed": 3, "epochs": 2, "on_bad_record": "replace"}
        source = formats.open_source(self.pattern, **self.options)
        return Pipeline(source, **{**arguments, **options}).map(first_number, version="1")

    @property
    def options(self):
        return {"window": BYTES // 2} if self.pattern.suffix == ".npy" else {}


def first_number(record):
    """The number that a record begins with; refuses tokens that no vocabulary has."""
    if isinstance(record, dict) and "tokens" in record:
        if (record["tokens"] >= VOCABULARY).any():
            raise ValueError("no such token")
        return int(record["tokens"][0]) + VOCABULARY * int(record["tokens"][1])
    blob = record["blob"] if isinstance(record, dict) else record
    return int.from_bytes(blob[:4], "little")


def blobs():
    rng = np.random.default_rng(4)
    return [number.to_bytes(4, "little") + rng.bytes(BYTES - 4) for number in range(COUNT)]


def array_record(directory):
    records = blobs()
    for number in range(2):
        path = directory / f"part-{number}.array_record"
        formats.write_array_record(path, records[number * 600 :][:600])
    offset = path.read_bytes().index(records[900][1000:1100])
    return Case(directory / "*.array_record", path, offset, {900}, "record 300 ")


def parquet(directory):
    records = blobs()
    for number in range(2):
        path = directory / f"part-{number}.parquet"
        formats.write_parquet(path, {"blob": records[number * 600 :][:600]}, row_group_size=4)
    column = pq.read_metadata(path).row_group(90).column(0)
    offset = (column.dictionary_page_offset or column.data_page_offset) + 3000
    return Case(directory / "*.parquet", path, offset, {960, 961, 962, 963}, "row 36[0-3] ")


def tokens(directory):
    values = np.random.default_rng(4).integers(0, VOCABULARY, (COUNT, BYTES // 2), np.uint16)
    values[:, 0], values[:, 1] = np.arange(COUNT) % VOCABULARY, np.arange(COUNT) // VOCABULARY
    path = directory / "all.npy"
    np.save(path, values.reshape(-1))
    offset = path.stat().st_size - 2 * values[700:].size + 1501
    return Case(path, path, offset, {700}, "no such token")


@pytest.fixture(params=[array_record, parquet, tokens], ids=lambda make: make.__name__)
def case(request, tmp_path):
    found = request.param(tmp_path)
    sound = found.pipe().identity
    found.flip()
    # Else a state of the one would be refused for the other, as of other data.
    assert found.pipe().identity == sound
    return found


def test_a_damaged_file(case):
    pipe = case.pipe()
    pairs = {(0, record) for record in case.bad}
    found, met = served(pipe.plan, range(pipe.plan.batches_left(0)), [COUNT], pairs)
    whole = [[record for _, record in batch] for batch in found]
    iterator = pipe.iterator()
    states = [iterator.get_state()]
    for batch, known in zip(whole, met, strict=True):
        assert next(iterator).tolist() == batch
        states.append(iterator.get_state())
        assert states[-1]["replaced"] == ids_of(known)
    assert met[-1] == pairs

    # Still damaged: from anywhere. With workers, threads and another batch size, too.
    for at, options in ((5, {"threads": 2}), (31, {"prefetch": 0}), (50, {"workers": 1})):
        with case.pipe().iterator(**options) as resumed:
            resumed.set_state(states[at])
            assert [batch.tolist() for batch in resumed] == whole[at:]
    smaller = case.pipe(batch_size=8).iterator()
    smaller.set_state(states[40])
    rest = [record for batch in smaller for record in batch.tolist()]
    assert rest[: 32 * len(whole[40:])] == [record for batch in whole[40:] for record in batch]

    # Mended: what is known is replaced all the same.
    case.flip()
    at = COUNT // 32 + 1
    assert met[at - 1] == pairs
    for policy in ("raise", "replace"):
        mended = case.pipe(on_bad_record=policy).iterator()
        mended.set_state(states[at])
        assert [batch.tolist() for batch in mended] == whole[at:]
    fresh = case.pipe(on_bad_record="raise")
    assert [batch.tolist() for batch in fresh] == fresh.plan.records(range(len(whole))).reshape(
        -1, 32
    ).tolist()


def test_the_error_names_file_and_place(case):
    pipe = case.pipe(on_bad_record="raise")
    with pytest.raises(BadRecord, match=case.said) as caught:
        list(pipe.iterator())
    assert str(case.damaged) in str(caught.value)
    assert caught.value.index in case.bad
    if case.pattern.suffix != ".npy":
        assert caught.value.file == str(case.damaged)
        assert caught.value.position == caught.value.index - 600

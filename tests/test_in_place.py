"""Functions that work in place: each row is its own, also where a record comes twice."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np
import pytest
from memory_source import Records

from datapipe import Pipeline
from formats.source import Column, Spec

COUNT = 7


class Lists(Records):
    """Columns of lists: arrays of any length, and plain objects."""

    spec = Spec((Column("ragged", "ragged", "int64"), Column("any", "object")))

    def read(self, indices: Any) -> Any:
        ids = [int(record.rstrip(b".")) for record in super().read(indices)]
        return {
            "ragged": [np.arange(id, id + 1 + id % 3) for id in ids],
            "any": [{"seen": [id]} for id in ids],
        }


class Trees(Records):
    """Examples of any form, of a source that does not say so."""

    def read(self, indices: Any) -> Any:
        ids = [int(record.rstrip(b".")) for record in super().read(indices)]
        return [{"ragged": np.arange(id, id + 1 + id % 3), "any": {"seen": [id]}} for id in ids]


def element(number: int) -> dict[str, Any]:
    return {"ragged": np.arange(number, number + 1 + number % 3), "any": {"seen": [number]}}


def changed(example: dict[str, Any]) -> dict[str, Any]:
    example["ragged"] += 100
    example["any"]["seen"].append(-1)
    return {"sum": int(example["ragged"].sum()), "length": len(example["any"]["seen"])}


SOURCES = {
    "columns": lambda: Lists(COUNT),
    "trees": lambda: Trees(COUNT),
    "grain": lambda: grain.MapDataset.range(COUNT).map(element),
    "grain_shuffled": lambda: grain.MapDataset.range(COUNT).shuffle(seed=3).map(element),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("batch_size", [2, 5, 7])
def test_a_map_in_place_does_not_see_the_window(name: str, batch_size: int) -> None:
    pipe = Pipeline(SOURCES[name](), batch_size=batch_size, seed=2, epochs=6, remainder="carry")
    pipe = pipe.map(changed, version="1")
    found = []
    for window in (1, 8):
        with pipe.iterator(window=window) as batches:
            found.append([{k: v.tolist() for k, v in batch.items()} for batch in batches])
    assert found[0] == found[1]
    assert {length for batch in found[0] for length in batch["length"]} == {2}


@pytest.mark.parametrize("window", [1, 8])
def test_rows_of_a_batch_share_nothing(window: int) -> None:
    pipe = Pipeline(Lists(5), batch_size=4, seed=2, epochs=8, remainder="carry")
    with pipe.iterator(window=window) as batches:
        for batch in batches:
            for column in batch.values():
                assert len({id(value) for value in column}) == len(column)


def test_a_copy_can_be_written_to_where_the_first_can() -> None:
    class Frozen(Lists):
        def read(self, indices: Any) -> Any:
            found = super().read(indices)
            for value in found["ragged"]:
                value.flags.writeable = False
            return found

    pipe = Pipeline(Frozen(5), batch_size=4, seed=2, epochs=8, remainder="carry")
    with pipe.iterator(window=8) as batches:
        assert not any(v.flags.writeable for batch in batches for v in batch["ragged"])

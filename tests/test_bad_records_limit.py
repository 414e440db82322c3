"""Bad records that are too many, what is told of them, and what is no fault of a record."""

from __future__ import annotations

import logging
import pickle
import re

import numpy as np
import pytest
from memory_source import Records
from replacing_oracle import BAD, ids_of, made, rows, wanted

import datapipe
from datapipe import BadRecord, Misuse
from datapipe.batches.faults import Fault

# -- the log and the limit -------------------------------------------------------------------------


def test_each_is_told_once(caplog):
    pipe = made()
    with caplog.at_level(logging.WARNING, "datapipe"):
        rows(pipe, prefetch=4)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(BAD)
    order = pipe.plan.rows(range(pipe.plan.batches_left(0)))
    for record in BAD:
        (line,) = [line for line in lines if line.startswith(f"record {record} (")]
        assert f"memory-shard-{record // 10}, record {record % 10}" in line
        assert "cannot be read: BadRecord: rotten" in line
        example = int(np.flatnonzero(order.items == record)[0])
        assert f"example {example}, in epoch 0" in line or "another" in line


def test_no_more_than_the_limit(caplog):
    pipe = made(bad_record_limit=4)
    _, met = wanted(pipe)
    fits = sum(len(known) <= 4 for known in met)
    assert 0 < fits < len(met)
    iterator = pipe.iterator(prefetch=6)
    for _ in range(fits):
        next(iterator)
    for _ in range(2):
        with pytest.raises(BadRecord, match=rf"{len(met[fits])} records are bad") as caught:
            next(iterator)
        assert iterator.next_example == 7 * fits
        text = str(caught.value)
        assert "bad_record_limit=4" in text
        assert "raise the limit" in text
        assert f"{len(met[fits - 1])} are replaced already" in text
        (first, *_) = met[fits] - met[fits - 1]
        assert f"memory-shard-{first[1] // 10}" in text
        assert "example" in text
        assert caught.value.index in {record for _, record in met[fits]}
    assert iterator.get_state()["replaced"] == ids_of(met[fits - 1])
    more = made(bad_record_limit=6).iterator()
    more.set_state(iterator.get_state())
    assert [batch.tolist() for batch in more] == wanted(pipe)[0][fits:]


def test_a_function_that_fails_for_all_stops_soon():
    calls = []

    def choke(value):
        calls.append(value)
        raise ValueError("no such column")

    pipe = made(bad=(), bad_record_limit=5).map(choke, version="1")
    with pytest.raises(BadRecord, match=r"(?s)6 records are bad.*and 3 more") as caught:
        rows(pipe, prefetch=0)
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(calls) == 6


def test_no_record_is_left_to_stand_in():
    pipe = made(Records(12, bad=range(12)), bad_record_limit=1000)
    with pytest.raises(BadRecord, match="so are all 64 records that could stand in"):
        next(pipe.iterator())


def test_what_is_no_fault_of_a_record():
    def failing(error):
        def choke(value, *_):
            if value == 17:
                raise error
            return value

        return choke

    for error in (
        OSError(5, "input/output error"),
        MemoryError(),
        TimeoutError(),
        datapipe.StoreFailed("no answer"),
    ):
        for policy in ("raise", "replace"):
            with pytest.raises(type(error)) as caught:
                rows(made(bad=(), on_bad_record=policy).map(failing(error), version="1"))
            assert caught.value is error
            assert re.search(r"record 17 .*fails in \.map", "\n".join(error.__notes__))
    by_chance = ValueError("by chance")
    drawing = made(bad=()).random_map(lambda value, rng: value, version="1")
    for pipe in (
        made(bad=()).random_map(failing(by_chance), version="1"),
        drawing.map(failing(by_chance), version="1"),
    ):
        with pytest.raises(ValueError, match="by chance") as caught:
            rows(pipe)
        assert caught.value is by_chance
        assert re.search(r"record 17 .*fails in .*iterator\.skip", "\n".join(by_chance.__notes__))


@pytest.mark.parametrize(
    "error", [datapipe.StoreFailed("no answer"), OSError(5, "input/output error")]
)
def test_a_store_that_fails_is_no_bad_record(error):
    class Away(Records):
        def read(self, indices):
            if 17 in np.asarray(indices):
                raise error
            return super().read(indices)

    with pytest.raises(type(error)) as caught:
        rows(made(Away(60, bad=[3, 4])))
    assert caught.value is error


def test_a_message_names_the_policy():
    pipe = made(on_bad_record="raise")
    with pytest.raises(BadRecord, match=r'Pipeline\(\.\.\., on_bad_record="replace"\)'):
        rows(pipe)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_bad_record": "ignore"}, "on_bad_record must be one of raise, replace"),
        ({"bad_record_limit": -1}, "bad_record_limit must be an integer"),
        ({"bad_record_limit": True}, "bad_record_limit must be an integer"),
        ({"bad_record_limit": 1.5}, "bad_record_limit must be an integer"),
    ],
)
def test_arguments_out_of_range(options, text):
    with pytest.raises(Misuse, match=text):
        made(**options)


def test_the_policy_is_no_part_of_the_identity():
    one, two = made(on_bad_record="raise"), made(bad_record_limit=3)
    assert one.identity == two.identity


def test_a_fault_crosses_processes():
    fault = Fault(0, 7, 7, "shelf 7", "shelf", 7, 12, 1, "cannot be read")
    assert pickle.loads(pickle.dumps(fault)) == fault

"""A weight that is too small for a block of examples is met by more than it asks for, and told."""

from __future__ import annotations

import logging
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Records

from datapipe import Pipeline
from datapipe.order.mixture import Mixture


def made(weights, counts=None):
    counts = counts or dict.fromkeys(weights, 100)
    sources = {name: Records(count, name=name) for name, count in counts.items()}
    return Pipeline(sources, batch_size=4, seed=1, weights=weights)


def test_it_is_told_once_with_both_shares(caplog):
    with caplog.at_level(logging.INFO, "datapipe"):
        pipe = made({"web": 1.0, "code": 0.1, "wiki": 1e-5})
        pipe = pipe.map(len, version="1").map_batch(lambda batch: batch, version="1")
        pipe.iterator(prefetch=0).close()
        assert pipe.plan.end
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("datapipe", "WARNING")
    assert "wiki gets 0.0244% and wants 0.000909%" in record.getMessage()
    assert "one of 4096 examples" in record.getMessage()
    assert "web" not in record.getMessage()
    assert "code" not in record.getMessage()


def test_sizes_of_sources_are_weights_as_well(caplog):
    made(None, {"large": 1_000_000, "small": 3})
    assert "small gets 0.0244% and wants 0.0003%" in caplog.text


def test_only_a_few_of_many_are_named(caplog):
    made({"large": 1, **{f"s{number}": 1e-7 for number in range(900)}})
    (record,) = caplog.records
    assert "s3 gets 0.0244% and wants 1e-05%, and 896 more" in record.getMessage()
    assert "s4 " not in record.getMessage()


@pytest.mark.parametrize(
    "weights",
    [
        {"a": 1, "b": 1},
        {"a": 1, "b": 0},
        {"a": 4095, "b": 1},
        {"a": 8000, "b": 2},
        {"a": np.float32(0.7), "b": Fraction(3, 10)},
        {"a": 1 / 3, "b": 2 / 3, "c": 0.01},
    ],
)
def test_weights_that_are_met_are_not_spoken_of(caplog, weights):
    made(weights)
    assert not caplog.records


@given(st.lists(st.floats(0, 1) | st.floats(0, 1e-3), min_size=1, max_size=8).filter(any))
def test_those_that_get_more_than_twice_their_share(weights):
    mixture = Mixture.of(weights)
    exact = [Fraction(each) / sum(map(Fraction, weights)) for each in weights]
    got = [Fraction(count, mixture.size) for count in mixture.counts]
    raised = mixture.raised(weights)
    for number, (wanted, there) in enumerate(zip(exact, got, strict=True)):
        told = [each for each in raised if each[0] == number]
        if there > wanted * Fraction(201, 100):
            assert told == [(number, pytest.approx(float(wanted)), pytest.approx(float(there)))]
        if there < wanted * Fraction(199, 100):
            assert not told

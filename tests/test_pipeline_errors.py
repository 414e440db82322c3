"""Wrong use of a pipeline, and records, functions and sources that fail."""

from __future__ import annotations

import numpy as np
import pytest
from base_pipeline import base
from memory_source import Records, number

import datapipe
from datapipe import BadRecord, Mismatch, Misuse, NotFound, Pipeline


def test_an_empty_source():
    with pytest.raises(NotFound, match="holds no records"):
        Pipeline(Records(0), batch_size=1, seed=1)


def test_a_batch_larger_than_the_source():
    with pytest.raises(Misuse, match="a batch of 21 is larger than the source, which holds 20"):
        base(batch_size=21)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Pipeline("a*.array_record", batch_size=1, seed=1), "formats.open_source"),
        (lambda: base(seed=-1), "seed must be"),
        (lambda: base(shuffle="chunks"), "shuffle must be True, False, or one of"),
        (lambda: base(shuffle_window=2), "shuffle_window is for shuffle='blocks'"),
        (lambda: base(shuffle="blocks", shuffle_window=0), "shuffle_window must be"),
        (lambda: base(epochs=0), "epochs must be"),
        (lambda: base(remainder="pad"), "remainder must be"),
        (lambda: base().map(3, version="1"), ".map wants a function"),
        (lambda: base().map(number, version=1), ".map: its version must be a text of 1 to 64"),
        (lambda: base().map(number, version=""), ".map: its version must be a text of 1 to 64"),
        (
            lambda: base().map_batch(len, version="1").map(number, version="1"),
            ".map after .map_batch",
        ),
        (
            lambda: base().map_batch(len, version="1").random_map(number, version="1"),
            ".random_map after .map_batch",
        ),
        (lambda: base().iterator(prefetch=-1), "prefetch must be"),
        (lambda: base().iterator(window=0), "window must be"),
        (lambda: base().iterator(threads=True), "threads must be"),
    ],
)
def test_wrong_use_is_told(call, text):
    with pytest.raises(Misuse, match=text):
        call()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda n: np.zeros(n % 3), r"has float64\[\d\], record \d+ has float64\[\d\]; make them"),
        (lambda n: {"a": {"b": n if n % 2 else float(n)}}, r"at \['a'\]\['b'\]: record"),
        (lambda n: {"a": 1} if n % 2 else {"b": 1}, r"a dict of \["),
        (lambda n: np.int32(n) if n % 2 else np.int64(n), r"int(32|64)\[\]"),
        (lambda n: (n,) * (1 + n % 2), "a tuple of"),
        (lambda n: {"big": 2**70}, "an integer at .*big.* does not fit in 64 bits"),
    ],
)
def test_examples_that_do_not_fit_together(function, text):
    pipe = Pipeline(Records(10), batch_size=10, seed=1).map(number, version="1")
    with pytest.raises(Mismatch, match=text):
        next(pipe.map(function, version="1").iterator())


@pytest.mark.parametrize("says_which", [True, False])
@pytest.mark.parametrize("options", [{"prefetch": 0, "window": 1}, {"prefetch": 3, "window": 8}])
def test_a_bad_record_is_named_in_its_own_batch(says_which, options):
    pipe = Pipeline(Records(60, bad=[37], says_which=says_which), batch_size=5, seed=1, epochs=1)
    plan = pipe.plan
    (at,) = plan.batches(37)
    example = int(np.flatnonzero(plan.records(range(plan.batches_left(0))) == 37)[0])
    assert at > 2
    iterator = pipe.map(number, version="1").iterator(**options)
    for index in range(at):  # those before come, although they share a window with it
        assert next(iterator).tolist() == plan.records(index).tolist()
    for _ in range(2):  # and it is no accident that passes
        with pytest.raises(BadRecord, match="memory-shard-3, record 7") as caught:
            next(iterator)
        assert iterator.next_example == 5 * at
        assert caught.value.index == 37
        assert f"plan.addresses([({example}, {example + 1})])" in str(caught.value)
        cause = caught.value.__cause__
        assert isinstance(cause, BadRecord if says_which else RuntimeError)
    iterator.skip([(example, example + 1)])  # the cure that the message names
    rest = [record for batch in iterator for record in batch.tolist()]
    wanted = plan.skipping([(example, example + 1)]).records(range(at, plan.batches_left(0)))
    assert rest == wanted.tolist()
    assert 37 not in rest


@pytest.mark.parametrize("prefetch", [0, 2])
def test_trouble_that_passes_costs_no_batch(prefetch):
    class Shaky(Records):
        troubles = 3

        def read(self, indices):
            if self.troubles:
                self.troubles -= 1
                raise datapipe.StoreFailed("no answer yet")
            return super().read(indices)

    pipe = Pipeline(Shaky(20), batch_size=4, seed=1, epochs=1).map(number, version="1")
    iterator = pipe.iterator(prefetch=prefetch, window=1)
    for _ in range(4):
        try:
            first = next(iterator)
            break
        except datapipe.StoreFailed:
            assert iterator.next_example == 0
    assert first.tolist() == pipe.plan.records(0).tolist()
    assert len(list(iterator)) == 4


def test_a_function_that_fails_names_the_record():
    def choke(value):
        if value == 7:
            raise ValueError("seven")
        return value

    pipe = Pipeline(Records(20), batch_size=20, seed=1).map(number, version="1")
    with pytest.raises(
        BadRecord, match=r"record 7 \(memory-shard-0, record 7\) fails in"
    ) as caught:
        next(pipe.map(choke, version="4").iterator())
    assert "in .map 4: ValueError: seven" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_function_of_batches_that_fails_keeps_its_error():
    def choke(batch):
        raise KeyError("tokens")

    pipe = Pipeline(Records(20), batch_size=4, seed=1).map_batch(choke, version="2")
    with pytest.raises(KeyError, match="tokens") as caught:
        next(pipe.iterator())
    # Grain, once it is imported, adds a note of its own.
    assert "in .map_batch 2 of the batch of examples 0 to 3" in caught.value.__notes__


def test_a_function_cannot_end_the_data_by_accident():
    pipe = Pipeline(Records(20), batch_size=4, seed=1)
    for prefetch in (0, 2):
        iterator = pipe.map_batch(lambda batch: next(iter(())), version="1").iterator(
            prefetch=prefetch
        )
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            next(iterator)


def test_a_source_that_returns_less_is_caught():
    class Short(Records):
        def read(self, indices):
            return super().read(indices)[:-1]

    with pytest.raises(Misuse, match=r"Short.read was asked for 4 records and returned \[3\]"):
        next(Pipeline(Short(20), batch_size=4, seed=1).iterator())


def test_trouble_of_the_store_is_no_bad_record():
    class Away(Records):
        def read(self, indices):
            raise datapipe.StoreFailed("no answer")

    with pytest.raises(datapipe.StoreFailed, match="no answer"):
        next(Pipeline(Away(20), batch_size=4, seed=1).iterator())

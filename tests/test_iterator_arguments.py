"""Arguments of an iterator that mean nothing: refused in words, and nothing has changed then."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from memory_source import Records, number
from number_batches import flat, numbers

from datapipe import DataError, Misuse, Pipeline

END = 1 << 62
NOT_RANGES = [
    (5, r"a list of pairs \(start, stop\), such as \[\(8, 12\)\], found 5"),
    (None, "found None"),
    (1.5, "found 1.5"),
    ((8, 12), r"a range is a pair \(start, stop\), found 8"),
    (range(3), "found 0"),
    ("ab", "found 'ab'"),
    ([5], "found 5"),
    ([None], "found None"),
    (["ab"], "start of a range must be an integer.* found 'a'"),
    ([(1.0, 2)], "found 1.0"),
    ([(True, 2)], "found True"),
    ([(2, 1)], r"stop of a range must be an integer in \[2, .* found 1"),
    ([(-1, 2)], "found -1"),
    ([(0, 1 << 80)], "found"),
]


@pytest.mark.parametrize("options", [{"prefetch": 0}, {"prefetch": 3, "threads": 2}])
def test_what_is_no_position_is_refused(options):
    pipe = numbers()
    with pipe.iterator(**options) as iterator:
        next(iterator)
        before = iterator.get_state()
        for wrong in (True, None, 1.0, "1", np.float32(2), np.array(3), [4], -1, 70, 1 << 63):
            with pytest.raises(Misuse, match=r"an example must be an integer in \[0, 69\], found"):
                iterator.seek(wrong)
        for wrong, message in NOT_RANGES:
            with pytest.raises(Misuse, match=message):
                iterator.skip(wrong)
            with pytest.raises(Misuse, match=message):
                iterator.span(before, 0, 1, skips=wrong)
            with pytest.raises(Misuse, match=message):
                iterator.position_after(before, 1, skips=wrong)
        with pytest.raises(Misuse, match="found 3"):
            iterator.skip(iter([(1, 2), 3]))
        for wrong in (None, 5, "x", {}, [before]):
            with pytest.raises(DataError, match="found"):
                iterator.set_state(wrong)
        assert iterator.get_state() == before
        assert flat(iterator) == flat(pipe)[4:]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_numbers_of_numpy_are_numbers(kind):
    pipe = numbers()
    iterator = pipe.iterator()
    iterator.seek(kind(8))
    assert type(iterator.next_example) is int
    iterator.skip(np.array([[8, 10], [12, 14]]).astype(kind))
    plain = pipe.iterator()
    plain.skip([(8, 10), (12, 14)])
    plain.seek(8)
    assert iterator.get_state() == plain.get_state()
    assert flat(iterator) == flat(plain)


@pytest.mark.parametrize("remainder", ["carry", "keep", "drop"])
@pytest.mark.parametrize("shuffle", [True, False, "blocks"])
def test_a_plan_without_end_ends_where_numbers_do(shuffle, remainder):
    pipe = numbers(epochs=None, shuffle=shuffle, remainder=remainder)
    for before_end in (0, 1, 9):
        with pipe.iterator() as iterator:
            iterator.seek(END - before_end)
            rest = flat(iterator)
            assert before_end - 9 < len(rest) <= before_end
            again = pipe.iterator(prefetch=0)
            again.set_state(iterator.get_state())
            assert flat(again) == []
    with pipe.iterator() as iterator, pytest.raises(Misuse, match=f"{END}.*, found {END + 1}"):
        iterator.seek(END + 1)


def test_a_mixture_without_end_ends_there_too():
    pipe = Pipeline(
        {"a": Records(23), "b": Records(31)}, weights={"a": 1, "b": 3}, batch_size=4, seed=1
    )
    with pipe.map(number, version="1").iterator() as iterator:
        iterator.seek(END - 9)
        assert len(list(iterator)) == 2
        iterator.seek(END)
        assert list(iterator) == []


def test_an_iterator_is_not_copied():
    with numbers().iterator() as iterator:
        next(iterator)
        for copying in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(
                Misuse, match=r"cannot be copied.*pipe\.iterator\(\), and set_state"
            ):
                copying(iterator)
        assert flat(iterator) == flat(numbers())[4:]

"""Every field of a data state by itself: of another JSON type it is refused, or means the same."""

from __future__ import annotations

import copy
import json

import pytest
from memory_source import Records, number

from datapipe import Damaged, DataError, Misuse, Pipeline
from datapipe.identity import condensed
from datapipe.state import State


class Told(Records):
    """Its fingerprint has a field of each JSON type that states keep."""

    def fingerprint(self):
        fields = {"ratio": 1.0, "is_whole": True, "parts": 1, "empty": 0, "none": ""}
        return super().fingerprint() | fields


def two(**options):
    sources = {"a": Told(40), "b": Records(60, name="b", bad=[5, 20, 33, 51])}
    pipe = Pipeline(sources, batch_size=4, seed=1, **options)
    return pipe.map(number, version="1")


def one(**options):
    return Pipeline(Told(30), batch_size=4, seed=0, **options).map(number, version="1")


PIPES = {
    "plain": lambda: one(),
    "keep": lambda: one(remainder="keep", shuffle=False),
    "two": lambda: two(weights={"a": 1, "b": 1}, on_bad_record="replace"),
    "blocks": lambda: two(shuffle="blocks", shuffle_window=1, on_bad_record="replace"),
    "lasting": lambda: one(skip_records=True),
}


def saved(name):
    with PIPES[name]().iterator(prefetch=0) as iterator:
        for _ in range(12):
            next(iterator)
        iterator.skip([(2, 3), (4, 5)])
        return json.loads(json.dumps(iterator.get_state()))


def places(value, path=()):
    """All paths in a JSON value, the inner ones as well."""
    yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*path, key))
    if isinstance(value, list):
        for index, each in enumerate(value):
            yield from places(each, (*path, index))


def at(value, path):
    for key in path:
        value = value[key]
    return value


def with_(value, path, new):
    if not path:
        return new
    changed = copy.deepcopy(value)
    at(changed, path[:-1])[path[-1]] = new
    return changed


def of_other_types(value):
    """Values of all JSON types but that of `value`; such as Python takes for equal come first."""
    near = [float(value), str(value), bool(value)] if type(value) is int else []
    near += [int(value), str(value)] if type(value) in (bool, float) else []
    near += [list(value), dict.fromkeys(value)] if isinstance(value, str) else []
    near += [dict(enumerate(value)), ""] if isinstance(value, list) else []
    near += [list(value), [*value.items()]] if isinstance(value, dict) else []
    others = [*near, None, True, False, 0, 1, 7, 0.0, 1.0, 2.5, "", "1", [], [1], {}, {"a": 1}]
    return [each for each in others if type(each) is not type(value)]


@pytest.mark.parametrize("name", PIPES)
def test_a_field_of_another_type_is_refused_or_means_the_same(name):
    state = saved(name)
    assert name not in ("two", "blocks") or state["replaced"]
    pipe = PIPES[name]()
    tried = 0
    with pipe.iterator(prefetch=0) as iterator:
        iterator.set_state(state)
        wanted = json.dumps(iterator.get_state())
        for path in places(state):
            for other in of_other_types(at(state, path)):
                tried += 1
                try:
                    iterator.set_state(with_(state, path, other))
                except DataError:
                    continue
                assert json.dumps(iterator.get_state()) == wanted, (path, other)
    assert tried > 400


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("plain", ("plan", "version"), True),
        ("plain", ("plan", "version"), 1.0),
        ("plain", ("plan", "permutation"), True),
        ("plain", ("plan", "seed"), False),
        ("plain", ("plan", "seed"), 0.0),
        ("plain", ("plan", "seed"), -1),
        ("plain", ("plan", "shuffle"), 3),
        ("blocks", ("plan", "blocks"), True),
        ("blocks", ("plan", "shuffle_window"), True),
        ("lasting", ("plan", "skips"), 1),
        ("plain", ("sources", 0, 1, "ratio"), float("nan")),
        ("plain", ("sources", 0, 1, "ratio"), float("inf")),
    ],
)
def test_what_cannot_be_true_is_damaged(name, path, value):
    with pytest.raises(Damaged, match=f"data state, {path[0]}"):
        State.from_json(with_(saved(name), path, value))


# -- texts -----------------------------------------------------------------------------------------

HALF = "\ud83d"  # of a pair of surrogates: no character of Unicode


def test_texts_that_no_file_can_hold_are_refused_at_once():
    with pytest.raises(Misuse, match=r"the name of a source must be .* UTF-8, found 'a\\ud83d'"):
        Pipeline({"a" + HALF: Records(8)}, batch_size=4, seed=1)
    base = Pipeline(Records(8), batch_size=4, seed=1)
    for method in ("map", "random_map", "map_batch"):
        with pytest.raises(Misuse, match=rf"^\.{method}: its version must .* UTF-8"):
            getattr(base, method)(len, version=HALF)


def test_what_a_source_tells_of_itself_is_written_as_far_as_it_can_be():
    class Odd(Records):
        def fingerprint(self):
            return {"name": "x" + HALF, HALF: "y", "digest": "d", "files": [HALF]}

    with Pipeline(Odd(8), batch_size=4, seed=1).iterator(prefetch=0) as iterator:
        state = iterator.get_state()
        json.dumps(state, ensure_ascii=False).encode()
        iterator.set_state(state)
    told = condensed({"name": "x" + HALF})
    assert told["fingerprint"] != condensed({"name": "x"})["fingerprint"], "the digest knows it"
    for wrong in ([1], None, {"a": float("nan")}, {"a": {1, 2}}, {"a": b"x"}):
        with pytest.raises(Misuse, match="the fingerprint of the source is no JSON"):
            condensed(wrong)

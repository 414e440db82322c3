"""Structure records: classes looked up and never imported, templates, hostile records."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import types
from collections import defaultdict, namedtuple
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import TREES, Dense, Keyed, round_trip, same

from ckpt.errors import CheckpointError, Damaged, Misuse, Unsupported
from ckpt.leaves import LeafSpec, specs_from_json
from ckpt.tree import flatten, unflatten, with_structure_of
from ckpt.values import revive

CASES = "tree_cases"


def test_functions_as_static_data_need_a_template() -> None:
    tree = {"f": jax.tree_util.Partial(math.sqrt, jnp.ones(2)), "d": defaultdict(lambda: 0, a=1)}
    flat = flatten(tree)
    values = {leaf.name: leaf.value for leaf in flat.leaves}
    for name in tree:
        with pytest.raises(Unsupported, match=r"cannot be rebuilt from its record.*like="):
            unflatten({"version": 1, "tree": flat.structure["tree"]["dict"][name]}, [0])
    found = with_structure_of(tree, values)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["d"].default_factory is tree["d"].default_factory
    with pytest.raises(Misuse, match="no value for 1 leaf of the template: d/a"):
        with_structure_of(tree, {"f/0/0": 1})


def test_local_classes_need_a_template() -> None:
    local = namedtuple("local", "x")
    flat = flatten([local(1)])
    with pytest.raises(Unsupported, match=r"node 0: .*local cannot be rebuilt"):
        unflatten(flat.structure, [1])
    assert with_structure_of([local(1)], {"0/x": 2}) == [local(2)]


@pytest.fixture
def module() -> Any:
    name = "lastgood_test_model"
    module = types.ModuleType(name)
    source = (
        "import collections, dataclasses, jax\nState = collections.namedtuple('State', 'mu nu')"
    )
    exec(source, module.__dict__)
    sys.modules[name] = module
    yield module
    sys.modules.pop(name, None)


def test_classes_are_found_but_never_imported(
    module: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    flat = flatten(module.State(1, 2))
    assert unflatten(flat.structure, [1, 2]) == module.State(1, 2)
    del sys.modules[module.__name__]
    (tmp_path / f"{module.__name__}.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unsupported, match=r"import lastgood_test_model before restoring.*like="):
        unflatten(flat.structure, [1, 2])


def test_a_class_that_changed_is_refused(module: Any) -> None:
    structure = flatten(module.State(1, 2)).structure
    module.State = namedtuple("State", "nu mu")
    assert unflatten(structure, [1, 2]) == module.State(nu=2, mu=1), "fields go by name"
    module.State = namedtuple("State", "mu nu xi")
    with pytest.raises(
        Unsupported, match=r"had the fields \['mu', 'nu'\].*has \['mu', 'nu', 'xi'\]"
    ):
        unflatten(structure, [1, 2])
    dense = flatten(Dense(1, 2, 3)).structure
    dense["tree"]["static"] = {"name": "x", "width": 5}
    assert unflatten(dense, [1, 2]) == Dense(1, 2, 5, "x"), "static fields go by name, too"
    dense["tree"]["static"] = {"name": "x", "height": 5}
    with pytest.raises(Unsupported, match="now; restore with a template"):
        unflatten(dense, [1, 2])
    keyed = flatten(Keyed(1, 2)).structure
    keyed["tree"]["keys"] = ["right", "left"]
    with pytest.raises(Unsupported, match="restore with a template"):
        unflatten(keyed, [1, 2])


def test_too_deep_trees_and_unsortable_keys_are_named() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(Unsupported, match=r"node 0/0/0.*: wanted a tree of at most 128 levels"):
        flatten(loop)
    deep: Any = 1
    for _ in range(128):
        deep = {"a": deep}
    assert same(deep, round_trip(deep))
    with pytest.raises(
        Unsupported, match=r"node x: a dict with keys that have no order \(object\)"
    ):
        flatten({"x": {object(): 1, object(): 2}})


HOSTILE = [
    None, 1, [], {}, "x", {"version": 1}, {"version": 2, "tree": 0}, {"version": True, "tree": 0},
    {"version": 1, "tree": 0, "more": 1},
]  # fmt: skip
HOSTILE_TREES = [
    True, 0.0, "x", [0], {}, {"dict": [0]}, {"list": {"0": 0}}, {"list": [1]}, {"list": [0, 0]},
    {"list": [-1]}, {"list": []}, {"list": [0], "more": 1}, {"what": [0]}, {"dict_items": [0]},
    {"dict_items": [[[1], 0]]}, {"dict_items": [[1, 0], [1, None]]},
    {"dict_items": [[{"x": 1}, 0]]},
    {"defaultdict": [["a", 0]], "factory": "eval"}, {"defaultdict": [["a", 0]], "factory": 1},
    {"namedtuple": "os:system", "fields": {"command": 0}},
    {"namedtuple": "builtins:tuple", "fields": {"x": 0}},
    {"namedtuple": "", "fields": {"x": 0}}, {"namedtuple": "a:b", "fields": [0]},
    {"namedtuple": f"{CASES}:Pair", "fields": {"mu": 0}},
    {"namedtuple": f"{CASES}:Pair.__new__", "fields": {"mu": 0, "nu": None}},
    {"dataclass": f"{CASES}:Dense", "fields": {"kernel": 0}, "static": {}},
    {"dataclass": f"{CASES}:Dense", "fields": {"kernel": 0},
     "static": {"bias": 1, "width": 1, "name": 1}},
    {"dataclass": f"{CASES}:Odd", "fields": {}, "static": {}},
    {"dataclass": "subprocess:Popen", "fields": {"args": 0}, "static": {}},
    {"node": f"{CASES}:Dense", "keys": ["kernel"], "children": [0], "static": {"tuple": [1, 2]}},
    {"node": f"{CASES}:Dense", "keys": ["kernel"], "children": [0], "static": None},
    {"node": f"{CASES}:Keyed", "keys": ["left"], "children": [0], "static": None},
    {"node": f"{CASES}:Keyed", "keys": ["left"], "children": [0, 0], "static": None},
    {"node": f"{CASES}:Plain", "keys": ["1"], "children": [0], "static": None},
    {"node": f"{CASES}:Plain", "keys": ["0"], "children": [0], "static": {"float": "1e9"}},
    {"node": "subprocess:Popen", "keys": ["args"], "children": [0], "static": None},
    {"opaque": "", "type": "x", "keys": [], "children": []},
]  # fmt: skip


@pytest.mark.parametrize("record", [*HOSTILE, *({"version": 1, "tree": t} for t in HOSTILE_TREES)])
def test_hostile_records_are_refused(record: Any) -> None:
    with pytest.raises((Damaged, Unsupported)):
        unflatten(record, ["value"])


def test_records_may_not_nest_without_end() -> None:
    record: Any = 0
    for _ in range(100_000):
        record = {"list": [record]}
    with pytest.raises(Damaged, match="nested more than 128 deep"):
        unflatten({"version": 1, "tree": record}, [1])
    while isinstance(record, dict):  # its own destructor would recurse
        record = record.pop("list").pop()
    static: Any = 0
    for _ in range(100):
        static = [static]
    record = {"node": f"{CASES}:Plain", "keys": [], "children": [], "static": static}
    with pytest.raises(Damaged, match="nested more than"):
        unflatten({"version": 1, "tree": record}, [])


TAGS = """
    dict dict_items ordered_dict defaultdict factory list tuple namedtuple dataclass node opaque
    static fields keys children type int float bytes complex dtype surrogates
"""
CLASSES = [f"{CASES}:{name}" for name in ("Pair", "Dense", "Plain", "Keyed", "Odd", "Loss.x")]
WORDS = st.sampled_from([*TAGS.split(), *CLASSES]) | st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | WORDS,
    lambda c: st.lists(c, max_size=3) | st.dictionaries(WORDS, c, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_no_json_crashes_the_reader(value: Any) -> None:
    with contextlib.suppress(CheckpointError):
        unflatten({"version": 1, "tree": value}, [1, 2])
    with contextlib.suppress(CheckpointError):
        LeafSpec.from_json(value)


@given(TREES, st.data())
def test_no_damaged_record_crashes_the_reader(tree: Any, data: st.DataObject) -> None:
    flat = flatten(tree)
    record = json.loads(json.dumps([flat.structure["tree"], [s.to_json() for s in flat.specs]]))
    places = []

    def visit(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                visit(node[key])

    visit(record)
    node, key = data.draw(st.sampled_from(places))
    node[key] = data.draw(JSON)
    with contextlib.suppress(CheckpointError):
        specs = specs_from_json(record[1])
        unflatten({"version": 1, "tree": record[0]}, [0] * len(specs))
        for spec in specs:
            revive(None, spec)

"""Trees: exact round trips through JSON and bytes, and the names of leaves."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import KEYS, TREES, Dense, Keyed, Nothing, Pair, Plain, round_trip, same

from ckpt.tree import flatten, with_structure_of


@given(TREES)
def test_any_tree_comes_back_exactly(tree: Any) -> None:
    found = round_trip(tree)
    assert same(tree, found), f"saved {tree!r}, found {found!r}"


@given(TREES)
def test_names_and_params_are_unique_and_printable(tree: Any) -> None:
    specs = flatten(tree).specs
    names, params = [s.name for s in specs], [s.param for s in specs]
    assert len(set(names)) == len(names), names
    assert len(set(params)) == len(params), params
    assert all(name and name.isprintable() for name in names), names
    keys = [str(tuple(key for key, _ in s.keys)) for s in specs if s.orbax]
    assert len(set(keys)) == len(keys), "Orbax tells leaves apart by these"
    for spec in specs:
        assert spec.param.encode()
        assert not spec.param.endswith("/")
        assert spec.param == ".".join(key for key, _ in spec.keys) or not spec.orbax


@given(TREES)
def test_a_template_gives_the_nodes_and_names_the_leaves(tree: Any) -> None:
    flat = flatten(tree)
    found = with_structure_of(tree, {leaf.name: leaf.value for leaf in flat.leaves})
    assert same(tree, found), f"saved {tree!r}, found {found!r}"


@given(st.recursive(st.integers(), lambda c: st.one_of(
    st.lists(c, max_size=4), st.dictionaries(KEYS, c), st.builds(Pair, c, c),
    st.builds(Dense, c, c), st.builds(Keyed, c, c), st.dictionaries(st.integers(), c),
    st.dictionaries(KEYS, c).map(OrderedDict)), max_leaves=12))  # fmt: skip
def test_order_of_leaves_is_that_of_jax(tree: Any) -> None:
    assert [leaf.value for leaf in flatten(tree).leaves] == jax.tree.leaves(tree)


def test_names_read_well() -> None:
    tree = {
        "params": {"dense": Dense(1, 2), "a/b": 3, "": 4},
        "opt": (Pair(5, [6]), Plain((7,), None)),
        "steps": {1: 8},
        "mixed": {1: 9, "1": 10},
    }
    assert {leaf.name: leaf.value for leaf in flatten(tree).leaves} == {
        "params/dense/kernel": 1,
        "params/dense/bias": 2,
        "params/a~1b": 3,
        "params/~e": 4,
        "opt/0/mu": 5,
        "opt/0/nu/0": 6,
        "opt/1/0": 7,
        "steps/1": 8,
        "mixed/~int:1": 9,
        "mixed/1": 10,
    }
    assert [leaf.name for leaf in flatten(7).leaves] == ["~"]


def test_of_leaves_that_orbax_confuses_the_first_keeps_the_name() -> None:
    specs = flatten({"a": {"b": 1}, "a.b": 2, "~/a.b": 3, "x/": 4, "": 5}).specs
    assert [(s.name, s.param, s.orbax) for s in specs] == [
        ("~e", "~/~e", False),
        ("a/b", "a.b", True),
        ("a.b", "~~/a.b", False),
        ("x~1", "~/x~1", False),
        ("~0~1a.b", "~/a.b", True),
    ]


def test_empty_nodes_are_listed_in_tree_order() -> None:
    flat = flatten({"a": [None, 1, {}], "b": Nothing(), "c": (), "d": [[], 2]})
    assert [(e.keys[-1][0], e.orbax_type, e.before) for e in flat.empties] == [
        ("0", "None", 0),
        ("2", "Dict", 1),
        ("b", "None", 1),
        ("c", "Tuple", 1),
        ("0", "List", 1),
    ]


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1, 9))),
        optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
        optax.multi_transform({"x": optax.adam(1e-3), "y": optax.sgd(0.1)}, {"w": "x", "b": "y"}),
        optax.MultiSteps(optax.adam(1e-3), every_k_schedule=4),
        optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1.0, 0.0, 9), weight_decay=0.1),
        optax.lookahead(optax.adafactor(1e-3), 5, 0.5),
    ],
    ids=["chain", "masked", "multi_transform", "MultiSteps", "inject_hyperparams", "lookahead"],
)  # fmt: skip
def test_optax_states_come_back_without_a_template(optimizer: Any) -> None:
    params: Any = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    if optimizer.init.__qualname__.startswith("lookahead"):
        params = optax.LookaheadParams.init_synced(params)
    state = optimizer.init(params)
    found = round_trip(state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert all(map(same, jax.tree.leaves(state), jax.tree.leaves(found)))

"""Shortcuts of repeated saves: the same outline, plan and bytes as when everything is made anew."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ckpt import btree, commit, layout, snapshot, tree
from ckpt.arena import Arena
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.image import Header
from ckpt.leaves import LeafSpec, each_from_json
from ckpt.outline import Outline
from ckpt.recurring import Template


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", owner={"run": "tests"}, slots=2)
    yield arena
    arena.close(remove=True)


def state(step: int) -> dict[str, Any]:
    return {
        "w": jnp.full((4, 8), float(step)),
        "odd": {"a.b": jnp.ones(3) * step, "a": {"b": jnp.zeros(2)}},
        "ä": [np.arange(3) + step, (), None],
        "digest": "#" * 32,
        "count": step,
        "key": jax.random.key(step),
        "empty": jnp.zeros((0, 3)),
    }


def header_of(
    tree_: Any, step: int, arena: Arena, previous: snapshot.SnapshotPlan | None = None
) -> tuple[Header, snapshot.SnapshotPlan]:
    meta = {
        "step": step,
        "attempt": 3,
        "branch": 1,
        "process": 0,
        "processes": 1,
        "time_ns": 1_700_000_000_000_000_000 + step,
        "data": {},
        "record": {"parent": None, "device": "cpu:0", "metrics": {"loss": step / 3}},
    }
    known = None if previous is None else previous.outline
    taken = snapshot.take(tree.flatten(tree_, known=known), arena, meta, previous=previous)
    taken.slot.release()
    return taken.header, taken.plan


def test_files_of_later_steps_are_those_made_anew(arena: Arena) -> None:
    known, plan = commit.Known(), None
    for step in (1, 2, 3):
        header, plan = header_of(state(step), step, arena, plan)
        anew, _ = header_of(state(step), step, arena)
        assert header.digest == anew.digest
        assert commit.step_files([header], known=known) == commit.step_files([anew])


def test_another_structure_attempt_or_device_is_not_taken_for_the_same(arena: Arena) -> None:
    known = commit.Known()
    first, _ = header_of(state(1), 1, arena)
    states = [
        state(2) | {"new": 1},
        state(2) | {"w": jnp.zeros((8, 4))},
        state(2) | {"digest": "other"},
        {key: value for key, value in state(2).items() if key != "empty"},
    ]
    for other in states:
        commit.step_files([first], known=known)
        header, _ = header_of(other, 2, arena)
        assert commit.step_files([header], known=known) == commit.step_files([header])
    for change in ({"attempt": 4}, {"record": {**first.meta["record"], "device": "cpu:1"}}):
        commit.step_files([first], known=known)
        header, _ = header_of(state(2), 2, arena)
        header.meta.update(change)
        assert commit.step_files([header], known=known) == commit.step_files([header])


def test_the_tree_record_is_the_canonical_text(arena: Arena) -> None:
    header, _ = header_of(state(5), 5, arena)
    text = commit.step_files([header])[layout.TREE]
    document = layout.unseal(text, "here")
    assert layout.seal(document) == text
    digests = commit.leaf_digests([header])
    assert {leaf["param"]: leaf["digest"] for leaf in document["leaves"] if "digest" in leaf} == (
        digests
    )


def test_a_text_that_looks_like_a_digest_is_no_gap() -> None:
    document = {"leaves": [{"digest": ""}, {"digest": ""}], "static": {"digest": "#" * 32}}

    def make(digest: str) -> bytes:
        leaves = [{"digest": digest}] * 2
        return layout.canonical({**document, "leaves": leaves})

    assert Template.cut(make, 2) is None
    harmless = Template.cut(lambda digest: make(digest).replace(b"static", b""), 3)
    assert harmless is not None
    quoted = Template.cut(
        lambda d: (
            json.dumps({"a": f'"digest":"{"#" * 32}"', "digest": d}).replace(": ", ":").encode()
        ),
        1,
    )
    assert quoted is not None
    assert json.loads(quoted.fill(["0" * 32]))["digest"] == "0" * 32


def test_a_renewed_index_is_the_one_encoded_anew() -> None:
    entries = btree.Entries(
        keys=[b"a", b"b"],
        files=["f"],
        file=np.array([0, -1]),
        offset=np.array([7, 0], np.uint64),
        length=np.array([9, 0], np.uint64),
        inline=[b"x"],
    )
    one = btree.encode(entries, "n", b"1" * 16, 5)
    other = btree.encode(entries, "n", b"2" * 16, 2**63)
    assert btree.renewed(one, b"2" * 16, 2**63) == other
    empty = btree.Entries(
        [], [], np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    )
    assert btree.renewed(btree.encode(empty, "n", b"1" * 16, 5), b"2" * 16, 6) == btree.encode(
        empty, "n", b"2" * 16, 6
    )


# --- outlines --------------------------------------------------------------------------------


def outline(tree_: Any, known: Outline | None = None) -> Outline:
    return tree.flatten(tree_, known=known).outline


def test_an_outline_is_used_again_for_other_values() -> None:
    known = outline(state(1))
    again = tree.flatten(state(2) | {"digest": "#" * 32}, known=known)
    assert again.outline is known
    assert [leaf.name for leaf in again.leaves] == [spec.name for spec in known.specs]
    for value, wanted in zip(again.values, tree.flatten(state(2)).values, strict=True):
        assert value is wanted or np.array_equal(
            jax.random.key_data(value)
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            else value,
            jax.random.key_data(wanted)
            if jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
            else wanted,
        )


class Static:
    """A node whose static data is compared loosely."""

    def __init__(self, child: Any, static: Any) -> None:
        self.child, self.static = child, static


jax.tree_util.register_pytree_with_keys(
    Static,
    lambda node: (((jax.tree_util.GetAttrKey("child"), node.child),), node.static),
    lambda static, children: Static(children[0], static),
)

DIFFERENT: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
    ("dtype", lambda: jnp.zeros(3), lambda: jnp.zeros(3, jnp.bfloat16)),
    ("shape", lambda: jnp.zeros(3), lambda: jnp.zeros(4)),
    ("weak type", lambda: jnp.asarray(1.0), lambda: jnp.asarray(1.0, jnp.float32)),
    ("kind", lambda: jnp.zeros(3), lambda: np.zeros(3, np.float32)),
    ("scalar kind", lambda: np.zeros((), np.int32), lambda: np.int32(0)),
    ("byte order", lambda: np.zeros(3, ">f4"), lambda: np.zeros(3, "<f4")),
    ("type of a number", lambda: 1, lambda: True),
    ("size of a number", lambda: 1, lambda: 2**70),
    ("a large number", lambda: 2**70, lambda: 2**71),
    ("text", lambda: "a", lambda: "b"),
    ("bytes", lambda: b"a", lambda: b"b"),
    ("committed", lambda: jnp.zeros(3), lambda: jax.device_put(jnp.zeros(3), jax.devices()[0])),
    (
        "device",
        lambda: jax.device_put(1, jax.devices()[0]),
        lambda: jax.device_put(1, jax.devices()[1]),
    ),
    ("key", lambda: jax.random.key(0), lambda: jax.random.key(0, impl="rbg")),
    ("static", lambda: Static(1, 1), lambda: Static(1, 2)),
    ("type of static", lambda: Static(1, 1), lambda: Static(1, True)),
    ("type of a key", lambda: {1: 0}, lambda: {True: 0}),
    ("order of keys", lambda: OrderedDict(a=1, b=2), lambda: OrderedDict(b=1, a=2)),
    ("empty node", lambda: [1, None], lambda: [1, ()]),
    ("names", lambda: {"a": 1}, lambda: {"b": 1}),
]


@pytest.mark.parametrize(("name", "one", "other"), DIFFERENT, ids=[case[0] for case in DIFFERENT])
def test_whatever_the_record_says_makes_another_outline(
    name: str, one: Callable[[], Any], other: Callable[[], Any]
) -> None:
    first, second = {"x": one()}, {"x": other()}
    known = outline(first)
    assert outline(first, known) is known
    found = outline(second, known)
    assert found is not known
    assert found.record == outline(second).record
    assert outline(first, found) is not found


def test_static_data_changed_in_place_is_noticed() -> None:
    node = Static(1, [1, 2])
    known = outline(node)
    node.static.append(3)
    found = outline(node, known)
    assert found is not known
    assert json.loads(found.record)["structure"]["tree"]["static"] == [1, 2, 3]


def test_what_is_refused_is_refused_after_a_good_tree_too(arena: Arena) -> None:
    good = {"x": jnp.zeros(3), "y": jnp.zeros(3)}
    known = outline(good)
    with pytest.raises(Unsupported, match="leaf x"):
        outline({"x": object(), "y": 1}, known)
    with pytest.raises(Misuse, match="tracer"):
        jax.jit(lambda x: outline({"x": x, "y": x}, known))(jnp.zeros(3))
    within: dict[str, Any] = {}
    within["x"] = within
    with pytest.raises(Unsupported, match="contains itself"):
        outline(within, known)
    mixed = outline({1: jnp.zeros(3), "y": jnp.zeros(3)}, known)
    assert [spec.name for spec in mixed.specs] == ["~int:1", "y"]
    _, plan = header_of(good, 1, arena)
    good["y"].delete()
    with pytest.raises(Misuse, match="leaf y: the array is deleted"):
        header_of(good, 2, arena, plan)


# --- leaves of one kind, checked once --------------------------------------------------------


def entries() -> list[dict[str, Any]]:
    """Leaves as a file has them: the first two differ by name only."""
    values = {f"w{i}": jnp.zeros((1, 2)) for i in range(3)} | {"n": 3, "s": "text"}
    return json.loads(outline(values).record)["leaves"]


def test_specs_read_together_are_those_read_one_by_one() -> None:
    flat = tree.flatten(state(1))
    listed = json.loads(flat.outline.record)["leaves"] * 2
    found = list(each_from_json(listed))
    assert found == [LeafSpec.from_json(entry) for entry in listed]
    assert tuple(found[: len(found) // 2]) == flat.specs


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"param": None},
        {"keys": [["a", 3]]},
        {"keys": [["a", True]]},
        {"keys": "a"},
        {"keys": [3]},
        {"shape": [1, -2]},
        {"shape": [[1], 2]},
        {"shape": {"1": 2}},
        {"shape": None},
        {"kind": "none"},
        {"kind": ["jax"]},
        {"dtype": "float33"},
        {"dtype": 3},
        {"storage_shape": [2, 1]},
        {"storage_dtype": "int8"},
        {"committed": 7},
        {"orbax": "yes"},
        {"more": 1},
    ],
)
def test_a_hostile_leaf_among_good_ones_is_refused(change: dict[str, Any], number: int) -> None:
    listed = entries()
    listed[number].update(change)
    with pytest.raises((Damaged, Unsupported)):
        list(each_from_json(listed))


def test_what_is_equal_but_of_another_type_does_not_get_in() -> None:
    listed = entries()
    listed[3]["shape"] = listed[3]["storage_shape"] = [True, 2.0]
    found = list(each_from_json(listed))
    assert [type(n) for n in (*found[3].shape, *(found[3].storage_shape or ()))] == [int] * 4

"""Orbax's small JSON files as values; that Orbax reads them is tested in `test_orbax_opens`."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any

import pytest

from ckpt import orbax_json
from ckpt.errors import Damaged
from ckpt.specs import ArraySpec


@dataclass(frozen=True)
class Leaf:
    param: str
    keys: tuple[tuple[str, int], ...]
    kind: str = "jax"
    storage_dtype: str | None = "float32"
    inline: Any = None
    impl: str | None = None
    orbax: bool = True


def array(param: str) -> ArraySpec:
    return ArraySpec(param, "float32", (4, 2), (2, 2))


W = Leaf("a.w", (("a", 2), ("w", 2)))
KEY = Leaf("k", (("k", 2),), "key", "uint32", impl="rbg")
ARRAYS = [array("a.w"), array("k")]


def value_types(*leaves: Leaf) -> list[str]:
    metadata = json.loads(orbax_json.tree_metadata(leaves, [array(leaf.param) for leaf in leaves]))
    return [entry["value_metadata"]["value_type"] for entry in metadata["tree_metadata"].values()]


def test_tree_metadata() -> None:
    empty = [((("e", 2),), "Dict"), ((("n", 2),), "NamedTuple")]
    assert json.loads(orbax_json.tree_metadata([W, KEY], ARRAYS, empty)) == {
        "custom_metadata": None,
        "store_array_data_equal_to_fill_value": True,
        "use_ocdbt": True,
        "use_zarr3": True,
        "tree_metadata": {
            "('a', 'w')": {
                "key_metadata": [{"key": "a", "key_type": 2}, {"key": "w", "key_type": 2}],
                "value_metadata": {
                    "value_type": "jax.Array",
                    "skip_deserialize": False,
                    "write_shape": [2, 2],
                },
            },
            "('k',)": {
                "key_metadata": [{"key": "k", "key_type": 2}],
                "value_metadata": {
                    "value_type": "jax.Array",
                    "skip_deserialize": False,
                    "write_shape": [2, 2],
                },
            },
            "('e',)": {
                "key_metadata": [{"key": "e", "key_type": 2}],
                "value_metadata": {"value_type": "Dict", "skip_deserialize": True},
            },
            "('n',)": {
                "key_metadata": [{"key": "n", "key_type": 2}],
                "value_metadata": {"value_type": "None", "skip_deserialize": True},
            },
        },
    }


def test_tree_metadata_is_in_tree_order() -> None:
    leaves = [Leaf(f"l.{at}", (("l", 2), (str(at), 1))) for at in (10, 2, 0, 1)]
    metadata = json.loads(
        orbax_json.tree_metadata(
            leaves, [array(leaf.param) for leaf in leaves], [((("b", 2),), "List")]
        )
    )
    order = ["('b',)", *(f"('l', '{at}')" for at in (0, 1, 2, 10))]
    assert list(metadata["tree_metadata"]) == order


def test_paths_that_look_the_same_are_listed_once() -> None:
    first, second = Leaf("1", (("1", 2),)), Leaf("~1", (("1", 2),), orbax=False)
    assert value_types(first, second) == ["jax.Array"]


@pytest.mark.parametrize(
    ("leaf", "wanted"),
    [
        (Leaf("x", (("x", 2),), "numpy"), "np.ndarray"),
        (Leaf("x", (("x", 2),), "numpy", "int64"), "np.ndarray"),
        (Leaf("x", (("x", 2),), "numpy_scalar", "float16"), "scalar"),
        (Leaf("x", (("x", 2),), "numpy_scalar", "bfloat16"), "np.ndarray"),
        (Leaf("x", (("x", 2),), "int", "int64"), "scalar"),
        (Leaf("x", (("x", 2),), "bool", "bool"), "scalar"),
        (Leaf("x", (("x", 2),), "complex", "complex128"), "np.ndarray"),
        (Leaf("x", (("x", 2),), "int", None, 10**30), "None"),
        (Leaf("x", (("x", 2),), "bytes", None, {"bytes": ""}), "None"),
        (Leaf("x", (("x", 2),), "str", None, "text"), "string"),
        (Leaf("x", (("x", 2),), "str", None, {"surrogates": ""}), "None"),
        (Leaf("x/y", (("x/y", 2),), "str", None, "text"), "None"),
        (Leaf("x~y", (("x~y", 2),), "str", None, "text"), "None"),
        (Leaf("x", (("x", 2),), orbax=False), "None"),
    ],
)
def test_types_of_values(leaf: Leaf, wanted: str) -> None:
    assert value_types(leaf) == [wanted]


def test_shardings_and_array_metadatas_are_those_of_jax_arrays() -> None:
    leaves = [W, KEY, Leaf("n", (("n", 2),), "numpy")]
    found = json.loads(orbax_json.shardings(leaves, "cuda:0"))
    assert {base64.urlsafe_b64decode(name).decode() for name in found} == {"a.w", "k"}
    one = {"sharding_type": "SingleDeviceSharding", "device_str": "cuda:0"}
    assert [json.loads(value) for value in found.values()] == [one, one]
    rows = json.loads(orbax_json.array_metadatas(leaves, ARRAYS))["array_metadatas"]
    assert [row["array_metadata"] for row in rows] == [
        {"param_name": "a.w", "write_shape": [2, 2], "chunk_shape": [2, 2], "ext_metadata": None},
        {
            "param_name": "k",
            "write_shape": [2, 2],
            "chunk_shape": [2, 2],
            "ext_metadata": {"random_key_impl": "rbg"},
        },
    ]


def test_files() -> None:
    text = Leaf("t", (("t", 2),), "str", None, "text")
    found = orbax_json.files(
        [W, text], ARRAYS, item="state", device="cpu:0", init_ns=1, commit_ns=2
    )
    assert json.loads(found["state/_strings.json"]) == {"t": "text"}
    assert json.loads(found["_CHECKPOINT_METADATA"])["commit_timestamp_nsecs"] == 2
    assert found["orbax.checkpoint"] == b""
    without = orbax_json.files([W], ARRAYS, item="state", device="cpu:0", init_ns=1, commit_ns=2)
    assert found.keys() - without.keys() == {"state/_strings.json"}


def test_a_leaf_without_its_array_is_damage() -> None:
    with pytest.raises(
        Damaged, match=r"leaf 'a.w': wanted its array in an image, found it in none"
    ):
        orbax_json.tree_metadata([W], [])

"""Leaves: every kind and dtype exactly, refusals, agreement with TensorStore and Orbax."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from orbax.checkpoint import v1 as ocp_v1
from tree_cases import Dense, Keyed, Nothing, Pair, Plain, round_trip, same

from ckpt import dtypes
from ckpt.errors import Damaged, Misuse, Unsupported
from ckpt.leaves import EmptySpec, LeafSpec, differences, logical_view, storage_view
from ckpt.specs import dtype_of
from ckpt.tree import flatten
from ckpt.values import revive, stored

STANDARD = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64
    complex128
"""
EXTENDED = [n for n in dir(ml_dtypes) if not n.startswith("_") and n not in ("finfo", "iinfo")]
EXTENDED = [n for n in EXTENDED if isinstance(getattr(ml_dtypes, n), type)]
ALL = [np.dtype(getattr(ml_dtypes, n, n)) for n in [*STANDARD.split(), *EXTENDED]]
NOT_IN_XLA = {"int1", "uint1", "complex32", "bcomplex32", "float6_e2m3fn", "float6_e3m2fn"}
IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]


def every_bit_pattern(dtype: np.dtype) -> np.ndarray:
    """Elements of all bit patterns of a small dtype, of seeded random ones of a large one."""
    if dtype.itemsize > 1:
        rng = np.random.default_rng(7)
        return rng.integers(0, 256, 64 * dtype.itemsize, np.uint8).view(dtype)
    bits = 1 if dtype.name == "bool" else int(re.findall(r"\d+", dtype.name)[0])
    return np.arange(2**bits, dtype=np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_keeps_every_bit(dtype: np.dtype) -> None:
    values = every_bit_pattern(dtype)
    tree = {"flat": values, "scalar": values[1], "point": values[1].reshape(()), "none": values[:0]}
    found = round_trip(tree)
    assert same(tree, found), f"{dtype}: saved {tree}, found {found}"


@pytest.mark.parametrize("dtype", [d for d in ALL if d.name not in NOT_IN_XLA], ids=str)
def test_every_dtype_of_jax_comes_back_as_numpy(dtype: np.dtype) -> None:
    with jax.enable_x64(True):
        value = jnp.asarray(every_bit_pattern(dtype))
    assert same(value, round_trip(value))


@pytest.mark.parametrize("name", ["float32", ">i2", ">c8", "datetime64[us]", ">m8[7D]", "M8"])
def test_byte_order_and_time_units_are_kept(name: str) -> None:
    values = np.arange(6).astype("i2").astype(name).reshape(2, 3)
    assert same({"a": values, "t": values[1, 2]}, round_trip({"a": values, "t": values[1, 2]}))


def test_any_memory_order_becomes_c_order() -> None:
    values = np.arange(24).reshape(2, 3, 4)
    for view in (values.T, np.asfortranarray(values), values[:, ::-1, 1:3], values[::2, :0]):
        found = round_trip(view)
        assert same(view, found)
        assert found.flags.c_contiguous


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_what_tensorstore_reads_is_what_it_would_write(dtype: np.dtype) -> None:
    spec = flatten([every_bit_pattern(dtype)]).specs[0]
    assert spec.storage_dtype is not None
    host = storage_view(every_bit_pattern(dtype), spec)
    assert host.dtype == dtype_of(spec.storage_dtype)
    metadata = {
        "shape": list(host.shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(host.shape)}},
        "data_type": spec.storage_dtype,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]
        if dtype.itemsize > 1
        else ["bytes"],
    }
    context = ts.Context()
    kvstore = {"driver": "memory"}
    array = ts.open(
        {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata, "create": True,
         "store_data_equal_to_fill_value": True}, context=context,
    ).result()  # fmt: skip
    array.write(host).result()
    held = ts.KvStore.open(kvstore, context=context).result()["c/0"]
    assert held == host.tobytes(), spec
    if spec.orbax:
        assert spec.storage_dtype == dtype.name, "other readers find the same numbers"


def test_the_views_of_a_shard_are_inverse_and_share_memory() -> None:
    for value in (np.arange(6, dtype=np.float32), np.zeros(3, ml_dtypes.uint4)):
        spec = flatten(value).specs[0]
        assert np.shares_memory(storage_view(value, spec), value)
        assert np.shares_memory(logical_view(storage_view(value[1:], spec), spec), value)
        assert same(value[1:], logical_view(storage_view(value[1:], spec), spec))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_keys_of_every_implementation(impl: str, shape: tuple[int, ...]) -> None:
    keys = jax.random.key(5, impl=impl)
    keys = jax.random.split(keys, shape) if shape else keys
    assert same(keys, round_trip(keys))
    spec = flatten({"k": keys}).specs[0]
    assert (spec.kind, spec.impl, spec.shape, spec.orbax) == ("key", impl, shape, 0 not in shape)
    data = stored(keys, spec)
    assert (data.dtype, data.shape) == (np.uint32, spec.storage_shape)
    abstract = flatten({"k": jax.ShapeDtypeStruct(shape, keys.dtype)}, abstract=True).specs[0]
    assert differences([spec], [abstract]) == []
    assert abstract.storage_shape == spec.storage_shape


def test_float0_is_kept_without_bytes() -> None:
    gradient = jax.grad(lambda i: 1.0 * i[0].sum(), allow_int=True)((jnp.arange(3),))
    spec = flatten(gradient).specs[0]
    assert (spec.dtype, spec.storage_dtype, spec.orbax) == ("float0", None, False)
    (found,) = round_trip(gradient)
    assert (found.dtype, found.shape) == (jax.dtypes.float0, (3,))


def test_numbers_beyond_all_bounds() -> None:
    value = [10**5000, -(2**63) - 1, 2**63, float("inf"), -0.0, complex(-0.0, float("-inf"))]
    assert same(value, round_trip(value))
    assert list(round_trip({10**5000: 1})) == [10**5000]


def test_what_a_jax_array_is_bound_to() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    pinned = device.with_memory_kind("pinned_host")
    specs = flatten(
        {"free": jnp.ones(2), "here": jax.device_put(jnp.ones(2), device),
         "host": jax.device_put(jnp.ones(2), pinned), "weak": jnp.asarray(1.0)}
    ).specs  # fmt: skip
    assert [(s.committed, s.memory_kind, s.weak_type) for s in specs] == [
        (False, None, False),
        (True, None, False),
        (True, "pinned_host", False),
        (False, None, True),
    ]


REFUSED = [
    (np.array([None]), "numpy.ndarray of dtype object"),
    (np.array(["text"]), "numpy.ndarray of dtype <U4"),
    (np.zeros(2, [("x", "f4")]), r"numpy.ndarray of dtype \[\('x', '<f4'\)\]"),
    (np.zeros(2, "V8"), r"numpy.ndarray of dtype \|V8"),
    (np.longdouble(1), "numpy.longdouble of dtype"),
    (np.str_("text"), "numpy.str_"),
    (np.ma.masked_array([1, 2], [True, False]), "numpy.ma.MaskedArray"),
    (np.rec.array([(1,)], [("x", int)]), "numpy.rec.recarray"),
    ({1, 2}, "builtins.set"),
    (len, "builtins.builtin_function_or_method"),
    (Path("x"), "PosixPath"),
    (object(), "builtins.object"),
    (jnp.float32, "builtins|jax"),
]


@pytest.mark.parametrize(("value", "kind"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_other_types_are_refused_by_name(value: Any, kind: str) -> None:
    with pytest.raises(Unsupported, match=f"leaf params/odd: a .*(?:{kind})"):
        flatten({"params": {"odd": value, "x": 1}})


def test_arrays_without_values_are_refused_by_name() -> None:
    used = jnp.ones(3)
    jax.jit(lambda x: x + 1, donate_argnums=0)(used)
    with pytest.raises(Misuse, match="leaf opt/mu: the array is deleted, or was donated"):
        flatten({"opt": {"mu": used}})
    assert flatten(used, abstract=True).specs[0].shape == (3,)
    with pytest.raises(Misuse, match=r"leaf a: .*found a jax.ShapeDtypeStruct"):
        flatten({"a": jax.ShapeDtypeStruct((3,), np.float32)})
    with pytest.raises(Misuse, match="leaf a: wanted an array, found a tracer"):
        jax.jit(lambda x: flatten({"a": x}))(1.0)


def test_stored_bytes_that_are_not_those_of_the_leaf() -> None:
    spec = flatten({"w": np.ones((2, 3), np.float32)}).specs[0]
    with pytest.raises(
        Damaged, match=r"leaf w: wanted stored float32\[2, 3\], found float32\[3, 2\]"
    ):
        revive(np.ones((3, 2), np.float32), spec)
    with pytest.raises(Damaged, match="found nothing"):
        revive(None, spec)
    text = flatten({"t": "x"}).specs[0].to_json()
    with pytest.raises(Damaged, match="leaf t: wanted a str in the tree record, found a int"):
        revive(None, LeafSpec.from_json(text | {"inline": 3}))
    key = flatten(jax.random.key(0)).specs[0].to_json() | {"impl": "none"}
    with pytest.raises(Unsupported, match="PRNG implementation 'none'"):
        revive(np.zeros(2, np.uint32), LeafSpec.from_json(key))


GOOD = flatten({"w": np.ones((2, 3), np.float32)}).specs[0].to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "object"}, {"dtype": "O"}, {"dtype": 3}, {"shape": [2, -3]}, {"shape": "23"},
        {"shape": [2, 2.0]}, {"shape": [True, 3]}, {"shape": [1] * 65}, {"kind": "int"},
        {"kind": "pickle"}, {"kind": ["numpy"]}, {"storage_dtype": "float64"}, {"keys": [["w", 3]]},
        {"storage_dtype": None}, {"storage_shape": [3, 2]}, {"storage_shape": None}, {"name": None},
        {"keys": [["w"]]}, {"keys": "w"}, {"orbax": 1}, {"weak_type": None}, {"more": 1},
        {"dtype": "datetime64[99999999999s]"}, {"dtype": ">uint8"}, {"dtype": ">>float32"},
    ],
    ids=str,
)  # fmt: skip
def test_specs_that_contradict_themselves_are_refused(change: Any) -> None:
    assert LeafSpec.from_json(json.loads(json.dumps(GOOD))).shape == (2, 3)
    with pytest.raises((Damaged, Unsupported)):
        LeafSpec.from_json(json.loads(json.dumps(GOOD)) | change)


def test_empty_specs_come_back() -> None:
    for spec in flatten({"a": [None, 1, {}], "b": ()}).empties:
        assert EmptySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    for value in (None, [], [[], "None", -1], [[["a", 1, 2]], "None", 0], [[], "Set", 0]):
        with pytest.raises(Damaged):
            EmptySpec.from_json(value)


def test_all_differences_at_once_by_name() -> None:
    key = jax.random.key(0)
    saved = {
        "a": np.ones((4, 2), np.float32), "b": 1, "c": 1.5, "d": key, "e": "x", "f": jnp.ones(2),
        "g": np.ones(2, ">f4"), "gone": 1, "h": np.int64(3), "i": 2**70, "j": np.zeros((), bool),
    }  # fmt: skip
    wanted = {
        "a": np.ones((4, 4), np.float32), "b": 1.0, "c": np.float32(1), "d": np.ones(2, np.uint32),
        "e": b"x", "f": jax.ShapeDtypeStruct((2,), jnp.bfloat16), "g": jnp.ones(2), "h": 3,
        "i": 1, "j": True, "new": {"x": jax.random.key(0, impl="rbg")},
    }  # fmt: skip
    specs = [flatten(tree, abstract=True).specs for tree in (saved, wanted)]
    assert differences(*specs) == [
        "a: wanted float32[4,4], found float32[4,2]",
        "b: wanted Python float, found Python int",
        "c: wanted float32[], found Python float",
        "d: wanted uint32[2], found threefry2x32 key[]",
        "e: wanted Python bytes, found Python str",
        "f: wanted bfloat16[2], found float32[2]",
        "gone: wanted nothing, found Python int",
        "new/x: wanted rbg key[], found nothing",
    ]
    assert differences(specs[0], specs[0]) == []
    other = flatten({"d": jax.random.key(0, impl="rbg")}).specs
    assert differences(flatten({"d": key}).specs, other) == [
        "d: wanted rbg key[], found threefry2x32 key[]"
    ]


ORBAX_TREE: Any = {
    "params": {"dense": Dense(jnp.ones((2, 3)), np.zeros(3, ml_dtypes.bfloat16))},
    "a/b": jnp.ones(1),
    "opt": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init({"w": jnp.ones(2)}),
    "many": [jnp.full(1, i) for i in range(12)],
    "empty": [None, jnp.ones(1), {}, (), Nothing(), []],
    "steps": {1: np.ones(2), 20: np.arange(3)},
    "nodes": [Plain((jnp.ones(1), [1]), "x"), Keyed(True, 2.5), Pair("text", 7)],
    "é": jax.random.split(jax.random.key(1, impl="rbg"), 3),
}  # fmt: skip


@pytest.mark.parametrize("version", [0, 1])
def test_names_are_those_that_orbax_writes(version: int, tmp_path: Path) -> None:
    if version == 0:
        ocp.PyTreeCheckpointer().save(tmp_path / "step", ORBAX_TREE)
    else:
        ocp_v1.save(tmp_path / "step", ORBAX_TREE)
    (file,) = (tmp_path / "step").rglob("_METADATA")
    written = json.loads(file.read_text())["tree_metadata"]
    flat = flatten(ORBAX_TREE)
    ours: list[Any] = list(flat.specs)
    for empty in reversed(flat.empties):
        ours.insert(empty.before, empty)

    assert list(written) == [str(tuple(key for key, _ in spec.keys)) for spec in ours]
    for entry, spec in zip(written.values(), ours, strict=True):
        assert [(k["key"], k["key_type"]) for k in entry["key_metadata"]] == list(spec.keys)
        if isinstance(spec, EmptySpec):
            assert entry["value_metadata"]["value_type"] == spec.orbax_type, spec
            assert entry["value_metadata"]["skip_deserialize"]
        else:
            assert not entry["value_metadata"]["skip_deserialize"]

    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{file.parent}/"}).result()
    found = {key.decode().rpartition("/")[0] for key in store.list().result() if b"zar" in key}
    assert found == {s.param for s in flat.specs if s.storage_dtype is not None}
    strings = json.loads((file.parent / "_strings.json").read_text())
    assert strings == {s.param: s.inline for s in flat.specs if s.kind == "str"}
    assert all(s.orbax for s in flat.specs)


def test_the_writer_can_read_specs_without_jax() -> None:
    code = "import sys, ckpt.leaves; sys.exit('jax' in sys.modules or 'tensorstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_names_of_dtypes_are_distinct() -> None:
    names = [dtypes.logical_name(dtype) for dtype in ALL]
    assert None not in names
    assert len(set(names)) == len(ALL)
    for name in ("", "O", "object", "f4", "<f4", "datetime64[q]", "float0 ", "V8", "str"):
        with pytest.raises(Unsupported):
            dtypes.parse(name)

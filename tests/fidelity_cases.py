"""States of every kind that a checkpoint holds, and what Orbax does not see of each.

As a program: restores each case from the run that it is given, in a process that saved none of it,
and prints what differs.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from tree_cases import (
    Dense,
    Frozen,
    Keyed,
    Loss,
    Mixed,
    Nothing,
    Pair,
    Plain,
    Sparse,
    Swapped,
    Twins,
    same,
)


class Case(NamedTuple):
    """A state, made anew at each call, and the leaves that Orbax does not see."""

    make: Callable[[], Any]
    hidden: tuple[str, ...] = ()


def x(number: float) -> jax.Array:
    return jnp.arange(3, dtype=jnp.float32) + number


def numbered(keys: list[Any]) -> dict[Any, jax.Array]:
    return {key: x(i) for i, key in enumerate(keys)}


# --- nodes -------------------------------------------------------------------------------------

TEXTS = ["dense", "a b", "%", "%2F", "%41", "A", ".", "..", "é", "e\u0301", "名前", "\u202e", "\n"]
TILDES = ["~", "~0", "~1", "a/b", "a~1b", "/", "a//b", "~e", "~u0000", "\0", "\ud800", "~ud800"]
NODES = {
    "text keys": Case(lambda: numbered(TEXTS)),
    "keys like escapes": Case(
        lambda: numbered([*TILDES, "", "x", "x/"]), ("~e", "~1", "x~1", "~ud800")
    ),
    "keys with dots": Case(
        lambda: {"a.b.c": x(0), "a": {"b": {"c": x(1)}, "b.c": x(2)}, "a.b": {"c": x(3)}},
        ("a/b.c", "a.b/c", "a.b.c"),
    ),
    "keys like files": Case(
        lambda: numbered(["w", "w/c/0", "w/zarr.json", "zarr.json"]) | {"..": {"w": x(4)}}
    ),
    "number keys": Case(lambda: {"steps": numbered([10, 9, 2, -1, 0, 2**70]), "f": {0.5: x(9)}}),
    "keys of several types": Case(
        lambda: numbered([1, "1", 1.5, None, (1, "a"), b"1", "~int:1"]),
        ("1",),
    ),
    "nodes under keys that look alike": Case(
        lambda: {
            "list and dict": {1: [x(0)], "1": {"a": x(1), "e": {}}},
            "dict and leaf": {1: {"a": x(2)}, "1": x(3)},
            "leaf and dict": {1: x(4), "1": {"a": x(5)}},
            "nothing and leaf": {1: {}, "1": x(6), "1~1": x(7)},
        },
        (
            "dict and leaf/1",
            "leaf and dict/1/a",
            "list and dict/1/a",
            "nothing and leaf/1",
        ),
    ),
    "sequences": Case(lambda: {"l": [x(i) for i in range(12)], "t": (x(0), [(x(1),), x(2)])}),
    "namedtuples": Case(lambda: [Pair(x(0), [Loss(x(1)), Loss(Pair(x(2), None), {})]), Nothing()]),
    "dataclasses": Case(
        lambda: {
            "plain": Dense(x(0), None),
            "static": Dense(x(1), Dense(x(2), [], 3, "in"), (8, -0.0), {"b": b"\0", "n": None}),
            "frozen": Frozen(kernel=[x(3)], width=2**70),
            "swapped": [Swapped(x(4), x(5), name="text"), Swapped.Inner(x(6))],
        }
    ),
    "a deep tree": Case(lambda: functools.reduce(lambda tree, _: {"a": tree}, range(128), x(0))),
    "registered nodes": Case(
        lambda: [Plain((x(0), [x(1)]), {"tag": (1, True, 1.0)}), Keyed(Plain((), None), x(2))]
    ),
    "nodes with odd places": Case(
        lambda: [Sparse(x(0), [x(1)]), Mixed({"a": x(2)}, Sparse(None, x(3)))]
    ),
    "nodes with keys of their own": Case(
        lambda: {"t": Twins(x(0), [x(1)]), "u": Twins({"a": x(2)}, [x(3)])},
        ("t/odd~1key", "t/odd~1key~1/0", "u/odd~1key/a", "u/odd~1key~1/0"),
    ),
    "empty nodes": Case(
        lambda: {
            "here": [None, {}, [], (), Nothing(), OrderedDict(), defaultdict(int), Plain((), 1)],
            "deep": {"a": {"b": {"c": {}}}, "l": [[[]], ((),)], "n": Pair(None, Loss(None))},
            "between": [x(0), None, x(1), {}, x(2), ()],
        }
    ),
    "ordered dicts": Case(
        lambda: {
            "o": OrderedDict([("b", x(0)), ("a", x(1)), (3, OrderedDict([(2, x(2)), (1, x(3))]))]),
            "d": defaultdict(list, {"b": x(4), "a": x(5)}),
            "n": defaultdict(None, {2: x(6), 1: x(7)}),
        }
    ),
    "a leaf": Case(lambda: x(0), ("~",)),
    "a number": Case(lambda: 2.5, ("~",)),
    "nothing": Case(lambda: None),
    "an empty dict": Case(dict),
    "an empty list": Case(list),
    "an empty tuple": Case(tuple),
    "only empty nodes": Case(lambda: {"a": [None, ()], "b": {}}),
}  # fmt: skip

# --- leaves ------------------------------------------------------------------------------------

JAX_IN_NUMPY_ONLY = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn", "complex32", "bcomplex32"}
NOT_IN_TENSORSTORE = JAX_IN_NUMPY_ONLY | {"uint2", "uint4", "float8_e4m3"}
SMALL = [
    name
    for name in sorted(dir(ml_dtypes))
    if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
]
IN_JAX = [name for name in SMALL if name not in JAX_IN_NUMPY_ONLY]
IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def of_dtype(name: str) -> np.ndarray:
    return np.array([[0, 1, 0], [1, 1, 0]]).astype(np.dtype(getattr(ml_dtypes, name, name)))


def frozen() -> np.ndarray:
    values = np.arange(6.0)
    values.flags.writeable = False
    return values


def keys() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for impl in IMPLS:
        key = jax.random.key(3, impl=impl)
        found[impl] = {
            "one": key,
            "many": jax.random.split(key, (2, 3)),
            "raw": jax.random.key_data(key),
        }
    found["none"] = jax.random.split(jax.random.key(0), 0)
    return {**found, "old": jax.random.PRNGKey(5)}


def with_64_bits() -> dict[str, jax.Array]:
    with jax.enable_x64(True):
        names = ("int64", "uint64", "float64", "complex128")
        return {name: jnp.asarray(of_dtype(name)) for name in names}


def bound() -> dict[str, jax.Array]:
    """Arrays by what they are bound to: device, memory, mesh, or nothing; weak and strong."""
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    split = NamedSharding(mesh, PartitionSpec("a", "b"))
    device = SingleDeviceSharding(jax.devices()[3])
    values = {
        "strong": jnp.arange(32.0).reshape(8, 4),
        "weak": jnp.full((8, 4), 0.1),
        "weak int": jnp.full((8, 4), 3),
        "small": jnp.ones((8, 4), jnp.int4),
        "key": jax.random.split(jax.random.key(1), (8, 4)),
    }
    found = dict(values)
    for name, value in values.items():
        for place, sharding in (("device", device), ("mesh", split)):
            found[f"{name} {place}"] = jax.device_put(value, sharding)
            for kind in ("pinned_host", "unpinned_host"):
                there = sharding.with_memory_kind(kind)
                found[f"{name} {place} {kind}"] = jax.device_put(value, there)
    return {**found, "0-d weak": jnp.asarray(1.0), "0-d": jnp.float32(2)}


LEAVES = {
    "Python numbers": Case(
        lambda: {
            "bool": [True, False],
            "int": [0, -1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63)],
            "big": [2**63, -(2**63) - 1, 10**400],
            "float": [0.1, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324],
            "complex": [1j, complex(-0.0, float("nan")), complex(float("inf"), 5e-324)],
        },
        ("big/0", "big/1", "big/2"),
    ),
    "text and bytes": Case(
        lambda: {
            "text": ["", "é\0\n", "x" * 10_000, "\ud800"],
            "bytes": [b"", bytes(range(256))],
            "dir/file": "text",
            "~": ["more"],
        },
        ("bytes/0", "bytes/1", "dir~1file", "text/3", "~0/0"),
    ),
    "NumPy scalars": Case(
        lambda: {
            "numbers": [np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16(0.1)],
            "more": [np.float64("nan"), np.float32(-0.0), np.complex64(1j), np.complex128(2)],
            "small": [ml_dtypes.bfloat16(3), ml_dtypes.float8_e5m2(0.5), ml_dtypes.int4(-2)],
            "hidden": [ml_dtypes.uint4(9), ml_dtypes.float8_e4m3(0.5)],
        },
        ("hidden/0", "hidden/1"),
    ),
    "NumPy layouts": Case(
        lambda: {
            "C": np.arange(6.0).reshape(2, 3),
            "F": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "strided": np.arange(20)[::3],
            "reversed": np.arange(24).reshape(2, 3, 4)[:, ::-1, 1:3],
            "broadcast": np.broadcast_to(np.float32(3), (2, 3)),
            "read-only": frozen(),
            "unaligned": np.frombuffer(b"\1" * 17, np.uint8)[1:].view(np.float64),
            "big-endian": [np.arange(3).astype(name) for name in (">f4", ">i8", ">c16", ">u2")],
            "0-d": [np.array(3.5), np.array(True), np.array(7, ">i4")],
            "nan": np.array([0x7FC00001, 0xFF800001, 0x80000000], np.uint32).view(np.float32),
        }
    ),
    "no elements": Case(
        lambda: {
            "numpy": [np.zeros((0,)), np.zeros((2, 0, 3), np.int8)],
            "jax": [jnp.zeros((0, 4)), jnp.zeros((3, 0), jnp.bfloat16)],
            "some": x(0),
        },
        ("jax/0", "jax/1", "numpy/0", "numpy/1"),
    ),
    "dates": Case(
        lambda: {
            "array": np.array(["2020-02-29", "NaT"], "M8[D]"),
            "scalars": [np.datetime64(5, "ns"), np.timedelta64(-3, "7s"), np.datetime64("NaT")],
            "big-endian": np.arange(3).astype(">m8[us]"),
        },
        ("array", "big-endian", "scalars/0", "scalars/1", "scalars/2"),
    ),
    "small dtypes of NumPy": Case(
        lambda: {name: of_dtype(name) for name in SMALL}, tuple(sorted(NOT_IN_TENSORSTORE))
    ),
    "small dtypes of jax": Case(
        lambda: {name: jnp.asarray(of_dtype(name)) for name in IN_JAX},
        tuple(name for name in IN_JAX if name in NOT_IN_TENSORSTORE),
    ),
    "dtypes of jax": Case(
        lambda: {
            name: jnp.asarray(of_dtype(name))
            for kinds in (["bool", "complex64"], ["int8", "int16", "int32"], ["float16", "float32"])
            for name in (*kinds, *(f"u{kind}" for kind in kinds if kind.startswith("int")))
        }
    ),
    "64 bits": Case(with_64_bits),
    "float0": Case(
        lambda: jax.grad(lambda w, i: w.sum() * i[0], (0, 1), allow_int=True)(x(0), jnp.arange(3)),
        ("1",),
    ),
    "keys": Case(keys, ("none",)),
    "bound arrays": Case(bound),
    "many dimensions": Case(
        lambda: {"32": jnp.ones((1,) * 31 + (2,)), "33": np.ones((1,) * 32 + (2,))}, ("33",)
    ),
}  # fmt: skip

CASES = NODES | LEAVES


def check(run: Path) -> list[str]:
    """The cases that do not come back from a run, the steps of which are the cases in order."""
    import ckpt

    wrong = []
    for step, (name, case) in enumerate(CASES.items()):
        found = ckpt.restore(run, step=step).state
        if not same(case.make(), found):
            wrong.append(f"{name}: saved {case.make()!r:.500}, found {found!r:.500}")
    return wrong


if __name__ == "__main__":
    print("\n".join(check(Path(sys.argv[1]))))

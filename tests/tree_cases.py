"""Trees of every kind, for the tests: node classes, a strategy, a round trip, exact equality."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from jax.tree_util import SequenceKey

from ckpt.leaves import specs_from_json, storage_view
from ckpt.tree import flatten, unflatten
from ckpt.values import revive, stored

Pair = namedtuple("Pair", "mu nu")
Nothing = namedtuple("Nothing", "")


class Loss(NamedTuple):
    value: Any
    history: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Dense:
    kernel: Any
    bias: Any
    width: Any = dataclasses.field(default=0, metadata={"static": True})
    name: Any = dataclasses.field(default="", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    width: int = dataclasses.field(metadata={"static": True})
    kernel: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias", "kernel"],
    meta_fields=["name", "width"],
    drop_fields=["cache"],
)
@dataclasses.dataclass
class Swapped(Dense):
    """Its fields in another order, one of them left out, one made by itself."""

    cache: Any = None
    size: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = len(self.name)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Inner:
        kernel: Any


@jax.tree_util.register_pytree_node_class
class Plain:
    """Registered without key paths; its static data is not a tuple."""

    def __init__(self, children: tuple[Any, ...], tag: Any) -> None:
        self.children, self.tag = children, tag

    def tree_flatten(self) -> tuple[Any, Any]:
        return self.children, self.tag

    @classmethod
    def tree_unflatten(cls, tag: Any, children: Any) -> Plain:
        return cls(tuple(children), tag)


class Keyed:
    """Registered with key paths by functions."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


jax.tree_util.register_pytree_with_keys(
    Keyed,
    lambda k: (
        ((jax.tree_util.GetAttrKey("left"), k.left), (jax.tree_util.GetAttrKey("right"), k.right)),
        None,
    ),
    lambda _, children: Keyed(*children),
)


class Sparse(Keyed):
    """Its places in a sequence are not the first ones."""


class Mixed(Keyed):
    """One child by place, one by name."""


jax.tree_util.register_pytree_with_keys(
    Sparse,
    lambda s: (((SequenceKey(5), s.left), (SequenceKey(7), s.right)), None),
    lambda _, children: Sparse(*children),
)
jax.tree_util.register_pytree_with_keys(
    Mixed,
    lambda m: (((SequenceKey(0), m.left), (jax.tree_util.GetAttrKey("x"), m.right)), None),
    lambda _, children: Mixed(*children),
)


@dataclasses.dataclass(frozen=True)
class Odd:
    """A key entry that Orbax does not know."""

    def __str__(self) -> str:
        return "odd/key"


class Twins:
    """Two children that call themselves the same, by keys of an unknown class."""

    def __init__(self, one: Any, two: Any) -> None:
        self.one, self.two = one, two


jax.tree_util.register_pytree_with_keys(
    Twins, lambda t: (((Odd(), t.one), (Odd(), t.two)), ()), lambda _, children: Twins(*children)
)


def round_trip(tree: Any) -> Any:
    """What comes back after all that is kept went through JSON and bytes."""
    flat = flatten(tree)
    record = json.loads(json.dumps([flat.structure, [spec.to_json() for spec in flat.specs]]))
    specs = specs_from_json(record[1])
    assert specs == flat.specs
    values = []
    for leaf, spec in zip(flat.leaves, specs, strict=True):
        array = None
        if spec.storage_dtype is not None:
            held = stored(leaf.value, spec)
            host = storage_view(np.asarray(held), spec) if spec.kind in ("jax", "key") else held
            assert host.flags.c_contiguous
            array = np.frombuffer(host.tobytes(), host.dtype).reshape(spec.storage_shape)
        values.append(revive(array, spec))
    return unflatten(record[0], values)


def same(saved: Any, found: Any) -> bool:
    """Equal in type, value, dtype and bits, as far as a restore to the host keeps them."""
    if isinstance(saved, jax.Array) and jax.dtypes.issubdtype(saved.dtype, jax.dtypes.prng_key):
        data = [np.asarray(jax.random.key_data(keys)) for keys in (saved, found)]
        return saved.dtype == found.dtype and np.array_equal(*data)
    if isinstance(saved, jax.Array):
        return saved is found or same(np.asarray(saved), found)
    if isinstance(saved, np.ndarray) and saved.dtype == jax.dtypes.float0:
        # JAX has a class of its own for these.
        return type(found) is np.ndarray and (saved.dtype, saved.shape) == (
            found.dtype,
            found.shape,
        )
    if type(saved) is not type(found):
        return False
    if isinstance(saved, np.ndarray | np.generic):
        return (saved.dtype, saved.shape, saved.tobytes()) == (
            found.dtype,
            found.shape,
            found.tobytes(),
        )
    if isinstance(saved, float):
        return struct.pack("d", saved) == struct.pack("d", found)
    if isinstance(saved, complex):
        return same((saved.real, saved.imag), (found.real, found.imag))
    if isinstance(saved, dict):
        order = isinstance(saved, OrderedDict)
        keys = [list(d) if order else sorted(d, key=repr) for d in (saved, found)]
        return (
            len(saved) == len(found)
            and all(map(same, *keys))
            and getattr(saved, "default_factory", None) is getattr(found, "default_factory", None)
            and all(same(saved[key], found[key]) for key in saved)
        )
    if isinstance(saved, list | tuple):
        return len(saved) == len(found) and all(map(same, saved, found))
    if dataclasses.is_dataclass(saved):
        names = [field.name for field in dataclasses.fields(saved)]
        return all(same(getattr(saved, name), getattr(found, name)) for name in names)
    if isinstance(saved, Plain | Keyed | Twins):
        return same(vars(saved), vars(found))
    return saved == found


DTYPES = [
    "float32 >f4 float16 bfloat16 float8_e4m3fn float8_e4m3 float6_e2m3fn int4 uint4 int2 bool",
    "uint8 int64 >i8 complex64 >c16 datetime64[ns] timedelta64[3s] >M8[D]",
]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    name = draw(st.sampled_from(" ".join(DTYPES).split()))
    shape = draw(st.sampled_from([(), (0,), (3,), (2, 3), (2, 0, 1), (1, 1, 4)]))
    values = np.arange(math.prod(shape)) % 2
    array = values.astype(np.dtype(getattr(ml_dtypes, name, name))).reshape(shape)
    order = draw(st.sampled_from(["C", "F", "reversed"]))
    if order == "reversed" and shape:
        return array[..., ::-1]
    return np.asarray(array, order="F" if order == "F" else "C")


KEYS = st.text() | st.sampled_from(
    ["", ".", "/", "~", "~1", "a.b", "a/b", "é", "\ud800", "\n", "0"]
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**40]),
    st.floats(),
    st.complex_numbers(),
    KEYS,
    st.binary(max_size=9),
    arrays(),
    st.sampled_from([np.float32(0.1), np.bool_(True), np.int8(-3), np.datetime64("NaT"),
                     ml_dtypes.bfloat16(3), ml_dtypes.int4(-2), np.complex64(1j)]),
    st.sampled_from([jnp.arange(3.0), jnp.asarray(1), jnp.zeros((0, 2)), jax.random.key(3)]),
)  # fmt: skip


def nodes(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    mixed = KEYS | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
    constants = st.none() | st.integers() | st.text() | st.tuples(st.floats(allow_nan=False))
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(KEYS, children, max_size=4),
        st.dictionaries(st.integers(), children, max_size=4),
        st.dictionaries(mixed, children, max_size=4),
        st.lists(st.tuples(mixed, children), max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, children, max_size=3).map(lambda d: defaultdict(list, d)),
        st.builds(Pair, children, children),
        children.map(Loss),
        st.just(Nothing()),
        st.builds(Dense, children, children, constants, constants),
        st.builds(Plain, st.lists(children, max_size=3).map(tuple), constants),
        st.builds(Keyed, children, children),
        st.builds(Sparse, children, children),
        st.builds(Mixed, children, children),
        st.builds(Twins, children, children),
    )


TREES = st.recursive(LEAVES, nodes, max_leaves=12)

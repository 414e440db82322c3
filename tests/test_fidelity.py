"""Whatever a state consists of comes back as it was: with a template, without, in a new process.

The cases are in `fidelity_cases`. Each is a step of one run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fidelity_cases import CASES, Case
from hypothesis import given, settings
from tree_cases import TREES, Dense, Pair, same

import ckpt
from ckpt import tree
from ckpt.leaves import LeafSpec
from tools.bench.readers import by_v0, by_v1

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sharding info not provided when restoring:UserWarning"
)
HERE = Path(__file__).parent
STEPS = {name: step for step, name in enumerate(CASES)}
every_case = pytest.mark.parametrize(("name", "case"), CASES.items(), ids=list(CASES))


@contextlib.contextmanager
def wide(name: str) -> Iterator[None]:
    """JAX with 64 bits where a case needs them; not in this thread only, as Orbax has others."""
    jax.config.update("jax_enable_x64", name == "64 bits")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fidelity") / "run"
    with ckpt.CheckpointManager(root, arena=root.with_name("arena")) as manager:
        for name, case in CASES.items():
            manager.save(STEPS[name], case.make())
    return root


def is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def equal(saved: Any, found: Any) -> bool:
    """Equal leaves: type, dtype, shape, bits; of a jax array also all that it is bound to."""
    if not isinstance(saved, jax.Array):
        return same(saved, found)
    return (
        isinstance(found, jax.Array)
        and traits(saved) == traits(found)
        and same(bits(saved), bits(found))
    )


def traits(array: jax.Array) -> tuple[Any, ...]:
    weak = not is_key(array) and array.weak_type
    place = (array.committed, array.sharding, array.sharding.memory_kind)
    return (array.dtype, array.shape, weak, *place)


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if is_key(array) else array)


def abstract(state: Any) -> Any:
    """A template without values for its jax arrays."""

    def one(value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return value
        sharding = value.sharding if value.committed else None
        weak = not is_key(value) and value.weak_type
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding, weak_type=weak)

    flat = tree.flatten(state)
    return tree.with_values(state, flat.specs, [one(value) for value in flat.values])


# --- restored ----------------------------------------------------------------------------------


@every_case
def test_comes_back_without_a_template(run: Path, name: str, case: Case) -> None:
    found = ckpt.restore(run, step=STEPS[name]).state
    assert same(case.make(), found), f"saved {case.make()!r}, found {found!r}"
    for leaf in tree.flatten(found).values:
        assert is_key(leaf) or not isinstance(leaf, jax.Array), "all but keys is on the host"


@every_case
@pytest.mark.parametrize("template", [lambda state: state, abstract], ids=["values", "abstract"])
def test_comes_back_into_a_template(
    run: Path, name: str, case: Case, template: Callable[[Any], Any]
) -> None:
    with wide(name):
        saved = case.make()
        found = ckpt.restore(run, template(saved), step=STEPS[name]).state
        flat, again = tree.flatten(saved), tree.flatten(found)
        assert again.structure == flat.structure
        assert again.specs == flat.specs
        for leaf, other in zip(flat.leaves, again.values, strict=True):
            assert equal(leaf.value, other), f"{leaf.name}: {leaf.value!r}, found {other!r}"


def test_all_comes_back_in_a_new_process(run: Path) -> None:
    child = [sys.executable, str(HERE / "fidelity_cases.py"), str(run)]
    found = subprocess.run(child, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == ""


def test_classes_come_from_loaded_modules_only(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "run", {"opt": [Pair(Dense(1, 2.5, 8), "text")], "step": 3})
    script = """
import sys, ckpt
try:
    ckpt.restore(sys.argv[1])
except ckpt.Unsupported as error:
    print(error)
print("tree_cases" in sys.modules)
like = {"opt": [[[0, 0.0], ""]], "step": 0}
try:
    ckpt.restore(sys.argv[1], like)
except ckpt.Mismatch as error:
    print("opt/0/mu/kernel: wanted nothing, found Python int" in error.differences)
import tree_cases
print(ckpt.restore(sys.argv[1]).state)
"""
    child = [sys.executable, "-c", script, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    found = subprocess.run(child, capture_output=True, text=True, timeout=120, env=environment)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert "node opt/0/mu: the class tree_cases:Dense is not loaded; import tree_cases" in lines[0]
    assert lines[1:3] == ["False", "True"]
    assert lines[3] == (
        "{'opt': [Pair(mu=Dense(kernel=1, bias=2.5, width=8, name=''), nu='text')], 'step': 3}"
    )


# --- seen by Orbax -----------------------------------------------------------------------------

GONE = object()


def at(found: Any, spec: LeafSpec) -> Any:
    for key, kind in spec.keys:
        try:
            found = found[int(key) if kind == 1 else key]
        except (LookupError, TypeError):
            return GONE
    return found


def seen(saved: Any) -> Any:
    """What Orbax makes of a leaf: Python's scalars of NumPy's, and no byte order but its own."""
    if isinstance(saved, np.generic) and saved.dtype.char in "?bhilqBHILQefd":
        return saved.item()
    if isinstance(saved, np.ndarray | np.generic | complex):
        array = np.asarray(saved)
        return array.astype(array.dtype.newbyteorder("="))
    return saved


def count(found: Any) -> int:
    """Leaves but for `None`, which stands for all that Orbax does not see."""
    if isinstance(found, dict):
        return sum(map(count, found.values()))
    if isinstance(found, list | tuple):
        return sum(map(count, found))
    return found is not None


def must_be_seen(read: Callable[[Path], Any], step: Path, state: Any, hidden: set[str]) -> None:
    flat = tree.flatten(state)
    found = read(step)
    for leaf in flat.leaves:
        value = at(found, leaf.spec)
        if leaf.name in hidden:
            assert value is None, f"{leaf.name}: hidden, and yet {value!r}"
            continue
        told = f"{leaf.name}: {leaf.value!r}, Orbax: {value!r}"
        if isinstance(leaf.value, jax.Array):
            assert isinstance(value, jax.Array), told
            assert value.dtype == leaf.value.dtype, told
            assert same(bits(leaf.value), bits(value)), told
        else:
            assert same(seen(leaf.value), value), told
    assert count(found) == len(flat.specs) - len(hidden)


READERS = {"v0": by_v0, "v1": by_v1}


@every_case
@pytest.mark.parametrize("reader", READERS)
def test_orbax_sees_all_but_what_the_step_names(
    run: Path, name: str, case: Case, reader: str
) -> None:
    hidden = ckpt.metadata(run, step=STEPS[name]).hidden_from_orbax
    assert sorted(hidden) == sorted(case.hidden)
    step = run / "branch-1" / str(STEPS[name])
    with wide(name):
        must_be_seen(READERS[reader], step, case.make(), set(hidden))


@settings(max_examples=20)
@given(TREES)
def test_any_tree_comes_back_and_is_seen(state: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="lastgood-fidelity-") as directory:
        run = Path(directory) / "run"
        with ckpt.CheckpointManager(run, arena=Path(directory) / "arena") as manager:
            manager.save(0, state)
        for found in (ckpt.restore(run).state, ckpt.restore(run, state).state):
            assert tree.flatten(found).structure == tree.flatten(state).structure
            assert same(tree.flatten(state).values, [
                bits(value) if isinstance(value, jax.Array) and not is_key(value) else value
                for value in tree.flatten(found).values
            ])  # fmt: skip
        hidden = set(ckpt.metadata(run).hidden_from_orbax)
        for read in READERS.values():
            must_be_seen(read, run / "branch-1" / "0", state, hidden)


# --- refused -----------------------------------------------------------------------------------

REFUSED = {
    "objects": np.array([{}, None], object),
    "text": np.array(["a", "bc"]),
    "variable text": np.array(["a"], np.dtypes.StringDType()),
    "bytes": np.array([b"a"]),
    "records": np.zeros(2, [("x", "f4"), ("y", "i4")]),
    "long doubles": np.ones(2, np.longdouble),
    "masked": np.ma.masked_array([1, 2], [True, False]),
    "a function": jax.nn.relu,
    "a set": {1, 2},
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_held_is_refused_by_name_and_nothing_is_written(
    tmp_path: Path, value: Any
) -> None:
    state = {"params": [jnp.ones(2), {"odd": value}]}
    with pytest.raises(ckpt.Unsupported, match=r"leaf params/1/odd: a .* cannot be held exactly"):
        ckpt.save(tmp_path / "once", state)
    with ckpt.CheckpointManager(tmp_path / "run", arena=tmp_path / "arena") as manager:
        with pytest.raises(ckpt.Unsupported, match=r"leaf params/1/odd: .*convert it to numbers"):
            manager.save(1, state)
        manager.save(1, {"params": [jnp.ones(2), {"odd": 0}]}).wait()
        assert manager.all_steps() == [1]
    with pytest.raises(ckpt.NotFound):
        ckpt.restore(tmp_path / "once")


def test_a_template_of_another_kind_of_leaf_is_refused_by_name(run: Path) -> None:
    like = CASES["Python numbers"].make()
    like["float"][0], like["big"][0], like["bool"] = 1, 7.0, (True, False)
    with pytest.raises(ckpt.Mismatch) as caught:
        ckpt.restore(run, like, step=STEPS["Python numbers"])
    assert caught.value.differences == (
        "big/0: wanted Python float, found Python int",
        "float/0: wanted Python int, found Python float",
    )


def test_numbers_of_python_come_back_from_what_jit_made_of_them(tmp_path: Path) -> None:
    start = {"step": 0, "rate": 0.0, "phase": 0j}
    state = jax.jit(
        lambda s: {"step": s["step"] + 1, "rate": s["rate"] + 0.1, "phase": s["phase"] + 1j}
    )(start)
    assert [state[name].weak_type for name in start] == [True] * 3
    ckpt.save(tmp_path / "run", state)
    found = ckpt.restore(tmp_path / "run", start).state
    assert same(found, {name: value.item() for name, value in state.items()})
    for name, other in (("step", 0.0), ("step", np.int64(0)), ("rate", 0), ("phase", False)):
        with pytest.raises(ckpt.Mismatch, match=f"{name}: wanted"):
            ckpt.restore(tmp_path / "run", {**start, name: other})
    strong = {"step": jnp.zeros((), jnp.int32), "vector": jnp.full(1, 3)}
    ckpt.save(tmp_path / "strong", strong)
    with pytest.raises(ckpt.Mismatch) as caught:
        ckpt.restore(tmp_path / "strong", {"step": 0, "vector": 3})
    assert caught.value.differences == (
        "step: wanted Python int, found int32[]",
        "vector: wanted Python int, found int32[1]",
    )

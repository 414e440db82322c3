"""Steps of ours opened by plain TensorStore, by Orbax v0 and by Orbax v1."""

from __future__ import annotations

import gc
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax_steps import ATTEMPT, STEP, Leaf, Nothing, Pair, mesh_sharding, sample_tree, write_step

from ckpt import image, ocdbt, orbax_json, specs
from ckpt.specs import ArraySpec, dtype_of
from tools.bench.readers import by_tensorstore, by_v0, by_v1, v0, v1

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sharding info not provided when restoring:UserWarning"
)

DTYPES = sorted(specs.DTYPES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("opens")
    write_step(root, sample_tree())
    yield root
    shutil.rmtree(root)


# -- readers


BARE: dict[str, Callable[[Path], Any]] = {
    "v0, no arguments": by_v0,
    "v0, StandardRestore": lambda step: by_v0(step, v0.args.StandardRestore()),
    "v0, PyTreeRestore": lambda step: by_v0(step, v0.args.PyTreeRestore()),
    "v1": by_v1,
}


# -- comparison


def plain(tree: Any) -> Any:
    """What Orbax makes of a tree when it has no template: dicts, lists, Python's scalars."""
    match tree:
        case tuple() if hasattr(tree, "_fields"):
            return plain(tree._asdict()) or None
        case dict():
            return {str(key): plain(value) for key, value in tree.items()}
        case list() | tuple():
            return [plain(item) for item in tree] if tree else tree
        case bool() | float() | str() | None:
            return tree
        case int():
            return tree if -(2**63) <= tree < 2**63 else None
        case bytes():
            return None
        case complex():
            return np.asarray(tree)
        case np.generic():
            known = tree.dtype.kind in "biuf"
            return tree.item() if known else np.asarray(tree)
    return tree


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, dict):
        assert type(found) is dict, where
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(wanted, list | tuple):
        assert type(found) is type(wanted), where
        assert len(found) == len(wanted), where
        for number, value in enumerate(wanted):
            assert_same(found[number], value, f"{where}/{number}")
    elif isinstance(wanted, jax.Array) and jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        assert found.dtype == wanted.dtype, where
        assert_same(jax.random.key_data(found), jax.random.key_data(wanted), where)
    elif isinstance(wanted, jax.Array | np.ndarray):
        assert isinstance(found, jax.Array) == isinstance(wanted, jax.Array), where
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes(), where
    else:
        assert type(found) is type(wanted), where
        assert found == wanted, where


# -- opened


@pytest.mark.parametrize("reader", BARE)
def test_opens_without_a_template(root: Path, reader: str) -> None:
    found = BARE[reader](root / str(STEP))
    assert_same(found, plain(sample_tree()))


def array_tree() -> dict[str, Any]:
    """What v0 takes as a template: no strings, no scalars of NumPy."""
    tree = sample_tree()
    arrays = {key: tree[key] for key in ("params", "opt", "key", "keys", "empty")}
    return arrays | {"scalars": tree["scalars"][:3]}


def other_place(value: Any) -> Any:
    """A template leaf, on another mesh than the one it was saved from."""
    if not isinstance(value, jax.Array):
        return value
    spec = ("b", "a") if value.shape == (16, 4) else ("a",) if value.shape == (8,) else ()
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=mesh_sharding(2, *spec))


@pytest.mark.parametrize(
    "reader", [lambda step, like: by_v0(step, v0.args.StandardRestore(like)), by_v1]
)
def test_opens_with_a_template_on_another_mesh(
    tmp_path: Path, reader: Callable[[Path, Any], Any]
) -> None:
    tree = array_tree()
    template = jax.tree.map(other_place, tree)
    found = reader(write_step(tmp_path, tree), template)
    assert type(found["opt"][0]) is Pair
    assert type(found["empty"]["named"]) is Nothing
    assert_same(found, tree)
    for value, like in zip(jax.tree.leaves(found), jax.tree.leaves(template), strict=True):
        if isinstance(like, jax.ShapeDtypeStruct):
            assert value.sharding.is_equivalent_to(like.sharding, value.ndim)


def test_v1_tells_what_is_there(tmp_path: Path) -> None:
    tree = {"w": sample_tree()["params"]["w"], "i": 3, "key": jax.random.key(0)}
    step = write_step(tmp_path, tree)
    assert v1.is_orbax_checkpoint(step)
    found = v1.metadata(step)
    assert (found.init_timestamp_nsecs, found.commit_timestamp_nsecs) == (1, 2)
    w = found.metadata["w"]
    assert (w.shape, w.dtype) == ((16, 4), np.float32)


def test_v0_tells_what_is_there(root: Path) -> None:
    handlers = v0.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add("state", v0.args.StandardRestore)
    with v0.CheckpointManager(root, handler_registry=handlers) as manager:
        assert manager.all_steps() == [STEP]
        found = manager.metadata(STEP)
    assert found.commit_timestamp_nsecs == 2
    assert found.item_metadata["state"]["params"]["w"].shape == (16, 4)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_opens(tmp_path: Path, name: str) -> None:
    values = np.arange(16).astype(dtype_of(name)).reshape(4, 4)
    tree = {"host": values, "zero": np.array(values[1, 1])}
    if name not in ("int64", "uint64", "float64", "complex128"):  # jax has these in x64 mode
        tree["device"] = jax.device_put(values, mesh_sharding(4, "a"))
    step = write_step(tmp_path, tree, limit_bytes=16)
    for param, wanted in tree.items():
        found = by_tensorstore(step, param)
        assert (found.dtype, found.tobytes()) == (values.dtype, np.asarray(wanted).tobytes())
    for reader in BARE.values():
        assert_same(reader(step), tree)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        3,
        "text",
        jnp.arange(5),
        [jnp.ones(2), {}, *map(jnp.int32, range(12))],
        {"": jnp.ones(1), "c": jnp.ones(())},
        {"s": "only"},
    ],
)
def test_odd_trees_open(tmp_path: Path, tree: Any) -> None:
    step = write_step(tmp_path, tree)
    assert_same(by_v1(step), tree)
    assert_same(by_v0(step), tree)


def test_names_that_orbax_confuses_cost_it_one_leaf(tmp_path: Path) -> None:
    """What Orbax cannot hold is `None` to it, and all other leaves are what they were."""
    arrays = [ArraySpec("a.b", "int8", (2,), (2,)), ArraySpec("a%2Eb", "int8", (2,), (2,))]
    first = Leaf("a.b", [("a.b", 2)], "jax", "int8")
    second = Leaf("a%2Eb", [("a", 2), ("b", 2)], "jax", "int8", orbax=False)
    slash = Leaf("x/y", [("x/y", 2)], "str", None, "text")
    small = orbax_json.files(
        [first, second, slash], arrays, item="state", device="cpu:0", init_ns=0, commit_ns=0
    )
    step = write_step(tmp_path, {"a.b": jnp.array([1, 2], jnp.int8)})
    for name, content in small.items():
        (step / name).write_bytes(content)
    for reader in BARE.values():
        found = reader(step)
        assert found == {"a.b": found["a.b"], "a": {"b": None}, "x/y": None}
        assert found["a.b"].tolist() == [1, 2]


def test_same_step_same_bytes(tmp_path: Path) -> None:
    first, second = (write_step(tmp_path / name, sample_tree()) for name in "ab")
    files = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    assert len(files) == 11
    for path in files:
        assert (first / path).read_bytes() == (second / path).read_bytes(), path


# -- damaged


def refused(step: Path, param: str) -> list[str]:
    """The readers that refuse a step, with TensorStore looking at one array."""
    readers: dict[str, Callable[[], Any]] = {
        "tensorstore": lambda: by_tensorstore(step, param),
        "v0": lambda: by_v0(step),
        "v1": lambda: by_v1(step),
    }
    refusing = []
    for name, read in readers.items():
        try:
            read()
        except Exception as error:  # Orbax raises bare ones, from TensorStore's
            first = error
            while first.__cause__ is not None:
                first = first.__cause__
            assert isinstance(first, ValueError | FileNotFoundError), first
            refusing.append(name)
    return refusing


ALL = ["tensorstore", "v0", "v1"]


def images_of(step: Path) -> list[Path]:
    return sorted((step / "state" / "d").glob("*.image"))


def header_of(path: Path) -> image.Header:
    whole = path.read_bytes()
    return image.decode(lambda at, length: whole[at : at + length], len(whole), path.name)


@pytest.fixture
def orbax_leftovers() -> Iterator[None]:
    """Where one read fails, Orbax drops others half-way; what Python says of those is not heard."""
    heard, sys.unraisablehook = sys.unraisablehook, lambda _: None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield
        gc.collect()
    sys.unraisablehook = heard


@pytest.mark.usefixtures("orbax_leftovers")
@pytest.mark.parametrize("leaf", ["w", "scale", "keys", "host", "int"])
def test_a_flipped_bit_in_any_chunk_is_an_error(tmp_path: Path, leaf: str) -> None:
    sample = sample_tree()
    tree = {"int": 7, "keys": sample["keys"], **sample["params"], **sample["opt"][1]}
    step = write_step(tmp_path, {leaf: tree[leaf]})
    assert refused(step, leaf) == []
    seed = int.from_bytes(np.random.default_rng().bytes(4), "little")
    random = np.random.default_rng(seed)
    for path in images_of(step):
        whole = path.read_bytes()
        for offset, length in image.payload_ranges(header_of(path)).tolist():
            for bit in random.integers(8 * length, size=5).tolist():
                broken = bytearray(whole)
                broken[offset + bit // 8] ^= 1 << bit % 8
                path.write_bytes(broken)
                assert refused(step, leaf) == ALL, f"{path.name} at {offset}, {bit=}, {seed=}"
        path.write_bytes(whole)


@pytest.mark.usefixtures("orbax_leftovers")
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("what", ["absent", "empty", "cut"])
def test_a_missing_part_of_an_image_is_an_error(tmp_path: Path, process: int, what: str) -> None:
    w = sample_tree()["params"]["w"]
    step = write_step(tmp_path, {"w": w})
    assert refused(step, "w") == []
    path = images_of(step)[process]
    whole = path.read_bytes()
    end = int(image.payload_ranges(header_of(path)).sum(axis=1).max())
    path.unlink()
    if what != "absent":
        path.write_bytes(b"" if what == "empty" else whole[: end - 1])
    assert refused(step, "w") == ALL


@pytest.mark.usefixtures("orbax_leftovers")
def test_a_chunk_left_out_of_the_index_is_an_error_to_orbax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index is never made so; to plain TensorStore such a chunk is zeros."""
    step = write_step(tmp_path, {"w": sample_tree()["params"]["w"]})
    monkeypatch.setattr(ocdbt, "_check_complete", lambda *_: None)
    header = header_of(images_of(step)[0])
    nodes = f"d/a{ATTEMPT}.index"
    database = ocdbt.index([header], [f"d/a{ATTEMPT}-p0.image"], nodes, uuid=bytes(16), time_ns=1)
    (step / "state" / nodes).write_bytes(database.nodes)
    (step / "state" / "manifest.ocdbt").write_bytes(database.manifest)
    assert refused(step, "w") == ["v0", "v1"]


@pytest.mark.usefixtures("orbax_leftovers")
@pytest.mark.parametrize("name", ["manifest.ocdbt", f"d/a{ATTEMPT}.index"])
def test_an_absent_index_is_an_error(tmp_path: Path, name: str) -> None:
    step = write_step(tmp_path, {"w": sample_tree()["params"]["w"]})
    (step / "state" / name).unlink()
    assert refused(step, "w") == ALL

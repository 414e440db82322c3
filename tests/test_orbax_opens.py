"""Steps of ours opened by plain TensorStore, by Orbax v0 and by Orbax v1."""

from __future__ import annotations

import collections
import gc
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ckpt import image, ocdbt, orbax_json
from ckpt.image import ArraySpec, ShardSpec

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Orbax and what it imports
    import orbax.checkpoint as v0
    import orbax.checkpoint.experimental.v1 as v1

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sharding info not provided when restoring:UserWarning"
)

ATTEMPT, STEP = 3, 40
DTYPES = sorted(image._DTYPES)
Pair = collections.namedtuple("Pair", "x y")
Nothing = collections.namedtuple("Nothing", "")


@dataclass
class Leaf:
    """A leaf spec as `orbax_json` wants it."""

    param: str
    keys: list[tuple[str, int]]
    kind: str
    storage_dtype: str | None
    inline: Any = None
    impl: str | None = None
    orbax: bool = True


def key_path(path: tuple[Any, ...]) -> list[tuple[str, int]]:
    def one(key: Any) -> tuple[str, int]:
        match key:
            case jax.tree_util.SequenceKey():
                return str(key.idx), 1
            case jax.tree_util.GetAttrKey():
                return key.name, 2
        return str(key.key), 2

    return [one(key) for key in path]


def is_empty(node: Any) -> bool:
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def empty_type(node: Any) -> str:
    return {dict: "Dict", list: "List", tuple: "Tuple"}.get(type(node), "None")


def stored(value: Any) -> tuple[str, Any]:
    """Kind of a leaf, and what an image holds of it."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return "key", jax.random.key_data(value)
    if isinstance(value, jax.Array):
        return "jax", value
    if isinstance(value, np.ndarray):
        return "numpy", value
    if isinstance(value, np.generic):
        return "numpy_scalar", np.asarray(value)
    kind = type(value).__name__
    if kind in ("str", "bytes") or (kind == "int" and not -(2**63) <= value < 2**63):
        return kind, None
    return kind, np.asarray(value)


def write_step(root: Path, tree: Any, limit_bytes: int = 48) -> Path:
    """A step in two images: devices 0 to 3 belong to process 0, which has all else, too."""
    leaves: list[Leaf] = []
    arrays: list[ArraySpec] = []
    shards: tuple[list[ShardSpec], list[ShardSpec]] = ([], [])
    sources: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
    for path, value in flat:
        if is_empty(value):
            continue
        keys = key_path(path)
        param = ".".join(key for key, _ in keys)
        kind, held = stored(value)
        impl = str(jax.random.key_impl(value)) if kind == "key" else None
        dtype = held.dtype.name if held is not None else None
        leaves.append(Leaf(param, keys, kind, dtype, value if kind == "str" else None, impl))
        if held is None:
            continue
        parts = [(0, (0,) * held.ndim, np.asarray(held))]
        if isinstance(held, jax.Array):
            parts = [
                (
                    int(shard.device.id >= 4),
                    tuple(part.start or 0 for part in shard.index),
                    np.asarray(shard.data),
                )
                for shard in held.addressable_shards
                if shard.replica_id == 0
            ]
        chunk = image.chunk_shape(parts[0][2].shape, held.dtype.itemsize, limit_bytes)
        for process, start, data in parts:
            shards[process].append(ShardSpec(len(arrays), start, data.shape))
            sources[process].append(data)
        arrays.append(ArraySpec(param, held.dtype.name, held.shape, chunk))

    step = root / str(STEP)
    (step / "state" / "d").mkdir(parents=True)
    headers, paths = [], []
    for process in range(2):
        plan = image.plan(arrays, shards[process], {})
        buffer = bytearray(plan.size_bytes)
        headers.append(image.fill(plan, buffer, sources[process]))
        paths.append(f"d/a{ATTEMPT}-p{process}.image")
        (step / "state" / paths[-1]).write_bytes(buffer)
    nodes = f"d/a{ATTEMPT}.index"
    database = ocdbt.index(headers, paths, nodes, uuid=bytes(16), time_ns=1)
    (step / "state" / nodes).write_bytes(database.nodes)
    (step / "state" / "manifest.ocdbt").write_bytes(database.manifest)
    empty = [(key_path(path), empty_type(node)) for path, node in flat if is_empty(node)]
    device = str(jax.local_devices()[0])
    small = orbax_json.files(
        leaves, arrays, empty, item="state", device=device, init_ns=1, commit_ns=2
    )
    for name, content in small.items():
        (step / name).parent.mkdir(exist_ok=True)
        (step / name).write_bytes(content)
    (step / "commit_success.txt").write_bytes(b"{}")
    return step


def mesh_sharding(rows: int, *spec: str | None) -> NamedSharding:
    devices = np.array(jax.devices()).reshape(rows, -1)
    return NamedSharding(Mesh(devices, ("a", "b")), PartitionSpec(*spec))


def sample_tree() -> dict[str, Any]:
    split, rows = mesh_sharding(4, "a", "b"), mesh_sharding(4, "b")
    return {
        "params": {
            "w": jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(16, 4), split),
            "b": jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), rows),
            "scale": jnp.float32(2.5),
            "none": jnp.zeros((0, 3), jnp.float32),
            "a/b %20é?#": jnp.arange(3),
        },
        "opt": [Pair(jnp.ones(2), None), {"host": np.arange(6, dtype=np.int64).reshape(2, 3)}],
        "scalars": (7, 2.5, True, np.float32(0.1), np.int16(-3)),
        "other": (1 + 2j, ml_dtypes.bfloat16(3), np.complex64(1j)),
        "hidden": [b"raw", 10**30, "shown"],
        "name": "run 17",
        "key": jax.random.key(3),
        "keys": jax.device_put(jax.random.split(jax.random.key(4, impl="rbg"), 8), rows),
        "empty": {"dict": {}, "list": [], "tuple": (), "none": None, "named": Nothing()},
        "by number": {5: jnp.ones(1), 10: jnp.zeros(1)},
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("opens")
    write_step(root, sample_tree())
    yield root
    shutil.rmtree(root)


# -- readers


def by_tensorstore(step: Path, param: str) -> np.ndarray:
    base = f"file://{step}/state/"
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": param}}
    return ts.open(spec, read=True, context=ts.Context()).result().read().result()


def by_v0(step: Path, args: Any = None) -> Any:
    with v0.CheckpointManager(step.parent) as manager:
        given = v0.args.Composite(state=args) if args is not None else None
        return manager.restore(int(step.name), args=given)["state"]


def by_v1(step: Path, template: Any = None) -> Any:
    return v1.load(step, template)


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
    values = np.arange(16).astype(image.dtype_of(name)).reshape(4, 4)
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
        [jnp.ones(2), {}],
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
    path = images_of(step)[process]
    whole = path.read_bytes()
    end = int(image.payload_ranges(header_of(path)).sum(axis=1).max())
    path.unlink()
    if what != "absent":
        path.write_bytes(b"" if what == "empty" else whole[: end - 1])
    assert refused(step, "w") == ALL


@pytest.mark.usefixtures("orbax_leftovers")
@pytest.mark.parametrize("name", ["manifest.ocdbt", f"d/a{ATTEMPT}.index"])
def test_an_absent_index_is_an_error(tmp_path: Path, name: str) -> None:
    step = write_step(tmp_path, {"w": sample_tree()["params"]["w"]})
    (step / "state" / name).unlink()
    assert refused(step, "w") == ALL

"""Steps that Orbax wrote, read by us, against what Orbax itself restores from them."""

from __future__ import annotations

import collections
import json
import pathlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint.experimental import v1

import ckpt
from ckpt import attempts, orbax
from ckpt.errors import CheckpointError, Damaged, Mismatch, Misuse, NotFound, Unsupported
from ckpt.store import FileStore

Pair = collections.namedtuple("Pair", "x y")

BUNDLED = (
    pathlib.Path(next(iter(ocp.__path__)))
    / "experimental/v1/_src/testing/compatibility/checkpoints"
)
BUNDLED_STEPS = [
    str(step.relative_to(BUNDLED)) for step in sorted(BUNDLED.glob("v?_checkpoints/*/*/*"))
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Orbax warns about what we do not test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def state(*, numpy_scalars: bool = True, strings: bool = True) -> dict[str, Any]:
    spread = NamedSharding(mesh(), PartitionSpec("a", "b"))
    tree = {
        "w": jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), spread),
        "b": jnp.asarray(np.arange(3), jnp.bfloat16),
        "f8": jnp.asarray(np.arange(3), jnp.float8_e4m3fn),
        "i4": jnp.asarray(np.arange(5), jnp.int4),
        "mask": jnp.array([True, False]),
        "c": jnp.array([1 + 2j], jnp.complex64),
        "zeros": jnp.zeros((40, 30)),
        "big": jax.random.normal(jax.random.key(1), (64, 64)),
        "n": np.arange(5, dtype=np.int64),
        "count": 3,
        "rate": 2.5,
        "layers": [jnp.ones(2), {"q": np.float32(3) if numpy_scalars else jnp.ones(())}],
        "pair": (jnp.full((), 7.0), 1),
        "named": Pair(jnp.ones(2), 2),
        "by_number": {1: jnp.ones(2), 0: jnp.zeros(2)},
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 8),
        "none": None,
        "no_dict": {},
        "no_list": [],
        "no_tuple": (),
    }
    if strings:
        tree["name"] = "hello"
    return tree


def save_manager(path: pathlib.Path) -> pathlib.Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(3, args=ocp.args.StandardSave(state(strings=False)))
        manager.wait_until_finished()
    return path / "3"


def save_standard(path: pathlib.Path) -> pathlib.Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "step_07", state(strings=False))
    return path / "step_07"


def save_pytree(path: pathlib.Path, **options: Any) -> pathlib.Path:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path / "5", state())
    return path / "5"


def save_v1(path: pathlib.Path) -> pathlib.Path:
    v1.save(path / "9", state(numpy_scalars=False))
    return path / "9"


SAVERS: dict[str, Callable[[pathlib.Path], pathlib.Path]] = {
    "manager": save_manager,
    "standard": save_standard,
    "v1": save_v1,
    "zarr2": lambda path: save_pytree(path, use_ocdbt=False),
    "zarr3": lambda path: save_pytree(path, use_ocdbt=False, use_zarr3=True),
    "ocdbt-zarr2": save_pytree,
    "ocdbt-zarr3": lambda path: save_pytree(path, use_zarr3=True),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], pathlib.Path]:
    """One step per saver, written when first asked for and read-only."""
    found: dict[str, pathlib.Path] = {}

    def get(name: str) -> pathlib.Path:
        if name not in found:
            found[name] = SAVERS[name](tmp_path_factory.mktemp(name))
        return found[name]

    return get


def by_orbax(directory: pathlib.Path) -> Any:
    """What the handler of Orbax's first generation restores from an item, of either generation."""
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    with ocp.PyTreeCheckpointer() as checkpointer:
        if (directory / "_sharding").exists():
            return checkpointer.restore(directory)
        tree = {"a": as_numpy, "b": {"c": as_numpy}}  # Orbax asks for more where it is missing
        return checkpointer.restore(directory, restore_args=tree)


def item_directory(step: pathlib.Path) -> pathlib.Path:
    names = [n for n in ("default", "state", "items") if (step / n).is_dir()]
    return step / names[0] if names else step


def plain(value: Any) -> Any:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ("key", str(jax.random.key_impl(value)), plain(jax.random.key_data(value)))
    if isinstance(value, jax.Array | np.ndarray):
        array = np.asarray(value)
        return (array.dtype.name, array.shape, array.tobytes())
    return (type(value).__name__, value)


def is_leaf(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple) and not value)


def assert_same(found: Any, wanted: Any) -> None:
    left, shape_found = jax.tree.flatten(found, is_leaf=is_leaf)
    right, shape_wanted = jax.tree.flatten(wanted, is_leaf=is_leaf)
    assert shape_found == shape_wanted
    assert [plain(x) for x in left] == [plain(x) for x in right]


def test_the_wheel_ships_checkpoints_of_both_generations() -> None:
    names = "\n".join(BUNDLED_STEPS)
    for kind in ("v0_checkpoints/direct", "v0_checkpoints/composite", "v1_checkpoints/composite"):
        assert kind in names, f"{BUNDLED}: nothing of {kind}; found:\n{names}"
    assert len(BUNDLED_STEPS) > 30


@pytest.mark.parametrize("name", BUNDLED_STEPS)
def test_bundled_step_gives_what_orbax_gives(name: str) -> None:
    step = BUNDLED / name
    try:
        wanted = by_orbax(item_directory(step))
    except Exception:
        for read in (orbax.read_tree, ckpt.restore):
            with pytest.raises(CheckpointError) as caught:
                read(step)
            assert str(step) in str(caught.value)
        return
    assert orbax.is_orbax_step(step)
    assert_same(orbax.read_tree(step), wanted)
    assert_same(ckpt.restore(step).state, wanted)
    assert_same(ckpt.restore(step, like=jax.tree.map(np.asarray, wanted)).state, wanted)
    assert wanted["a"].shape == (8,)


def test_bundled_steps_that_must_be_refused_are() -> None:
    refused = [name for name in BUNDLED_STEPS if "missing_pytree_data_" in name]
    refused = [name for name in refused if name.endswith(("_d", ".ocdbt"))]
    assert len(refused) == 6
    for name in refused:
        for read in (orbax.read_tree, ckpt.restore):
            with pytest.raises(Damaged):
                read(BUNDLED / name)


@pytest.mark.parametrize("saver", SAVERS)
def test_fresh_step_gives_what_orbax_gives(
    saver: str, saved: Callable[[str], pathlib.Path]
) -> None:
    step = saved(saver)
    found = orbax.read_tree(step)
    assert_same(found, by_orbax(item_directory(step)))
    assert isinstance(found["w"], np.ndarray)
    assert isinstance(found["layers"], list)
    assert isinstance(found["pair"], list)
    assert set(found["named"]) == {"x", "y"}


def test_v1_api_agrees(saved: Callable[[str], pathlib.Path]) -> None:
    assert_same(orbax.read_tree(saved("v1")), v1.load(saved("v1")))


@pytest.mark.parametrize("saver", ["manager", "v1", "zarr2"])
def test_specs_tell_shapes_without_values(saver: str, saved: Callable[[str], pathlib.Path]) -> None:
    found = {spec.param: spec for spec in orbax.specs(saved(saver))}
    assert (found["w"].shape, found["w"].dtype) == ((8, 8), "float32")
    assert found["i4"].dtype == "int4"
    assert (found["keys"].shape, found["keys"].dtype, found["keys"].impl) == (
        (8, 4),
        "uint32",
        "rbg",
    )
    assert (found["none"].value_type, found["none"].shape) == ("None", None)
    assert found["layers.1.q"].keys == (("layers", 2), ("1", 1), ("q", 2))
    assert found["count"].value_type == "scalar"


@pytest.mark.parametrize("saver", ["manager", "v1", "zarr3"])
@pytest.mark.parametrize("budget_bytes", [1, 1 << 30])
def test_values_under_other_shardings(
    saver: str, budget_bytes: int, saved: Callable[[str], pathlib.Path]
) -> None:
    other = Mesh(np.array(jax.devices()), ("d",))
    wanted = {
        "w": NamedSharding(other, PartitionSpec(None, "d")),
        "zeros": NamedSharding(other, PartitionSpec("d")),
        "b": NamedSharding(other, PartitionSpec()),
        "f8": SingleDeviceSharding(jax.devices()[5]),
        "i4": NamedSharding(other, PartitionSpec()),
        "keys": NamedSharding(other, PartitionSpec("d")),
        "key": SingleDeviceSharding(jax.devices()[1]),
        "n": None,
        "named.x": NamedSharding(mesh(), PartitionSpec("b")),
    }
    found = orbax.read(saved(saver), wanted, budget_bytes=budget_bytes)
    assert found.keys() == wanted.keys()
    expected = state()
    for param, sharding in wanted.items():
        value = expected["named"].x if param == "named.x" else expected[param]
        assert plain(found[param]) == plain(value), param
        if sharding is not None:
            assert found[param].sharding == sharding, param


def test_narrowing_is_refused(saved: Callable[[str], pathlib.Path]) -> None:
    with pytest.raises(Unsupported, match=r"n: saved as int64, .* jax_enable_x64"):
        orbax.read(saved("v1"), {"n": SingleDeviceSharding(jax.devices()[0])})


def test_sharding_that_does_not_fit(saved: Callable[[str], pathlib.Path]) -> None:
    uneven = NamedSharding(mesh(), PartitionSpec("a"))
    with pytest.raises(Mismatch, match=r"b: wanted .* found shape \[3\]"):
        orbax.read(saved("v1"), {"b": uneven})


def test_unknown_names_are_all_reported(saved: Callable[[str], pathlib.Path]) -> None:
    with pytest.raises(Mismatch) as caught:
        orbax.read(saved("v1"), {"w": None, "wrong": None, "w.0": None})
    assert [line.split(":")[0] for line in caught.value.differences] == ["wrong", "w.0"]


def test_items_and_their_choice(tmp_path: pathlib.Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(
            12,
            args=ocp.args.Composite(
                one=ocp.args.StandardSave({"x": jnp.ones(2)}),
                two=ocp.args.StandardSave({"x": jnp.zeros(2)}),
                note=ocp.args.JsonSave({"lr": 0.5}),
            ),
        )
        manager.wait_until_finished()
    step = tmp_path / "run" / "12"
    assert orbax.items(step) == {"one": "pytree", "two": "pytree", "note": "json"}
    assert orbax.read_json(step, "note") == {"metadata": {"lr": 0.5}}
    assert_same(orbax.read_tree(step, "two"), {"x": np.zeros(2, np.float32)})
    with pytest.raises(Misuse, match="one, two: say item="):
        orbax.read_tree(step)
    with pytest.raises(NotFound, match="wanted item 'three', found note, one, two"):
        orbax.read_tree(step, "three")
    shutil.move(step / "two", step / "items")
    assert_same(orbax.read_tree(step), {"x": np.zeros(2, np.float32)})
    with pytest.raises(NotFound, match="JSON item"):
        orbax.read_json(step, "one")


def test_grain_state_beside_a_step(tmp_path: pathlib.Path) -> None:
    v1.save(tmp_path / "4", {"x": jnp.ones(2)})
    (tmp_path / "4" / "iter").mkdir()
    (tmp_path / "4" / "iter" / "process_0-of-2.json").write_text('{"next": 3}')
    assert orbax.items(tmp_path / "4") == {"state": "pytree", "iter": "json"}
    assert orbax.read_json(tmp_path / "4", "iter") == {"process_0-of-2.json": {"next": 3}}


def test_step_names(tmp_path: pathlib.Path) -> None:
    v1.save(tmp_path / "40", {"x": jnp.ones(2)})
    for name in ("0007", "7", "100", "step_12", "step_0013", "a_step_14", "8x"):
        shutil.copytree(tmp_path / "40", tmp_path / name)
    for name in ("41.orbax-checkpoint-tmp", "42.orbax-checkpoint-tmp-1712"):
        shutil.copytree(tmp_path / "40", tmp_path / name)
        assert not orbax.is_orbax_step(tmp_path / name)
        with pytest.raises(NotFound, match="unfinished"):
            orbax.read_tree(tmp_path / name)
    (tmp_path / "50").mkdir()
    (tmp_path / "51").write_text("a file")
    (tmp_path / "52" / "deep").mkdir(parents=True)
    assert orbax.steps(tmp_path) == [7, 40, 100]
    assert orbax.step_names(tmp_path)[7] == "7"
    assert orbax.steps(tmp_path, prefix="step") == [12, 13]
    assert orbax.steps(tmp_path / "nothing") == []
    assert orbax.is_orbax_step(tmp_path / "40")
    assert not orbax.is_orbax_step(tmp_path / "52")


def test_a_directory_that_is_no_step(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotFound, match="found nothing"):
        orbax.read_tree(tmp_path)
    (tmp_path / "photo.jpg").write_bytes(b"x")
    (tmp_path / "album").mkdir()
    with pytest.raises(NotFound, match=r"wanted a step of Orbax .* found album, photo.jpg"):
        orbax.specs(tmp_path)


def test_old_single_file_format_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "checkpoint").write_bytes(b"msgpack")
    with pytest.raises(Unsupported, match="msgpack"):
        orbax.read_tree(tmp_path)


def copy(step: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    shutil.copytree(step, target)
    return target


def change_tree(step: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = item_directory(step) / "_METADATA"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def test_an_absent_chunk_is_damage_but_zeros_where_the_metadata_says_so(
    saved: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    step = copy(saved("zarr2"), tmp_path / "1")
    (step / "w" / "2.1").unlink()
    with pytest.raises(Damaged, match=r"1: w: cannot be read: NOT_FOUND.*w/2\.1"):
        orbax.read_tree(step)
    assert plain(orbax.read(step, {"b": None})["b"]) == plain(state()["b"])
    change_tree(step, lambda tree: tree.pop("store_array_data_equal_to_fill_value"))
    assert_same(orbax.read_tree(step), by_orbax(step))
    assert np.all(orbax.read(step, {"w": None})["w"][4:6, 4:] == 0)


def claim(step: pathlib.Path, **changes: Any) -> None:
    file = step / "w" / ".zarray"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("zeros", [False, True])
def test_a_shape_that_no_memory_could_hold_is_refused_before_it_is_allocated(
    saved: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, zeros: bool
) -> None:
    """TensorStore ends the process when it cannot allocate what metadata claims."""
    step = copy(saved("zarr2"), tmp_path / "1")
    if zeros:
        change_tree(step, lambda tree: tree.pop("store_array_data_equal_to_fill_value"))
    for rows in (10**13, 10**16):
        claim(step, shape=[rows, 8])
        with pytest.raises(
            Unsupported, match=rf"1: w: float32\[{rows}, 8\] takes .* this host has"
        ):
            orbax.read_tree(step)
    assert plain(orbax.read(step, {"b": None})["b"]) == plain(state()["b"])


def test_zeros_for_absent_chunks_are_believed_up_to_a_bound(
    saved: Callable[[str], pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = copy(saved("zarr2"), tmp_path / "1")
    change_tree(step, lambda tree: tree.pop("store_array_data_equal_to_fill_value"))
    monkeypatch.setattr(orbax, "_FILLED_BYTES", 1000)
    assert_same(orbax.read_tree(step), by_orbax(step))
    shape = json.loads((step / "w" / ".zarray").read_text())["shape"]
    claim(step, shape=[30 * shape[0], shape[1]])
    found = orbax.read(step, {"w": None})["w"]
    assert found.shape == (30 * shape[0], shape[1])
    assert not found[shape[0] :].any()
    claim(step, shape=[90 * shape[0], shape[1]])
    with pytest.raises(Damaged, match=r"1: w: float32.*zeros for all the others are not believed"):
        orbax.read(step, {"w": None})
    for file in (step / "w").glob("[0-9]*"):
        file.unlink()
    claim(step, shape=[1000, shape[1]])
    with pytest.raises(Damaged, match=r"the chunks that are there 0;"):
        orbax.read(step, {"w": None})


def test_one_place_tells_what_a_step_is(
    saved: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    """A run of ours lists what this module does, also steps that have lost their metadata."""
    whole = saved("manager")
    for number in range(1, 5):
        copy(whole, tmp_path / f"{number}")
    for name in ("_CHECKPOINT_METADATA", "default/_METADATA"):
        (tmp_path / "2" / name).unlink()
    shutil.rmtree(tmp_path / "3")
    (tmp_path / "3" / "photos").mkdir(parents=True)
    (tmp_path / "4").rename(tmp_path / "4.orbax-checkpoint-tmp")
    assert orbax.steps(tmp_path) == [1, 2]
    listed = attempts.list_run(FileStore(tmp_path)).steps
    assert [(step.step, step.attempt) for step in listed] == [(1, 0), (2, 0)]
    with pytest.raises(Damaged, match="wanted _METADATA, without which nothing tells the leaves"):
        orbax.read_tree(tmp_path / "2")


DAMAGE: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
    "no manifest": (lambda d: (d / "manifest.ocdbt").unlink(), "manifest.ocdbt"),
    "no data": (lambda d: shutil.rmtree(d / "d"), "cannot be read"),
    "no child": (lambda d: shutil.rmtree(d / "ocdbt.process_0"), "big: cannot be read"),
    "cut manifest": (lambda d: (d / "manifest.ocdbt").write_bytes(b"\x0c\xdb"), "cannot be read"),
    "no tree": (lambda d: (d / "_METADATA").unlink(), "_METADATA"),
    "tree is no JSON": (lambda d: (d / "_METADATA").write_text("{"), "wanted JSON"),
    "tree is a list": (lambda d: (d / "_METADATA").write_text("[]"), "tree_metadata"),
    "no strings": (lambda d: (d / "_strings.json").unlink(), "name is a string"),
    "strings lost": (lambda d: (d / "_strings.json").write_text("{}"), "name: wanted a string"),
    "key metadata": (
        lambda d: (d / "array_metadatas/process_0").write_text('{"array_metadatas": [3]}'),
        "no array metadata",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_reported_with_its_place(
    damage: str, saved: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    step = copy(saved("v1"), tmp_path / "9")
    change, text = DAMAGE[damage]
    change(step / "state")
    with pytest.raises(Damaged, match=text) as caught:
        orbax.read_tree(step)
    assert str(step) in str(caught.value)


def test_a_cut_file_is_damage(saved: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    step = copy(saved("v1"), tmp_path / "9")
    whole = {file: file.read_bytes() for file in sorted((step / "state").glob("**/d/*"))}
    harmless, messages = [], []
    for file, data in whole.items():
        file.write_bytes(data[: len(data) // 2])
        try:
            orbax.read_tree(step)
            harmless.append(file)
        except Damaged as error:
            messages.append(str(error))
        file.write_bytes(data)
    assert all(str(step) in message for message in messages)
    # What is not found out is not needed: the nodes of each writer's own index.
    assert messages
    for file in harmless:
        file.unlink()
    assert_same(orbax.read_tree(step), orbax.read_tree(saved("v1")))


def test_optional_files_may_be_absent(
    saved: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    step = copy(saved("v1"), tmp_path / "9")
    for name in (
        "_CHECKPOINT_METADATA",
        "orbax.checkpoint",
        "commit_success.txt",
        "state/_sharding",
    ):
        (step / name).unlink()
    assert orbax.is_orbax_step(step)
    assert_same(orbax.read_tree(step), orbax.read_tree(saved("v1")))
    shutil.rmtree(step / "state" / "array_metadatas")
    found = orbax.read_tree(step)["keys"]
    assert plain(found) == plain(jax.random.key_data(state()["keys"])), (
        "key data, as Orbax gives it"
    )


def test_leaves_that_share_a_name_are_refused(tmp_path: pathlib.Path) -> None:
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}, "c": jnp.ones(1)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", tree)
    with pytest.raises(Damaged, match=r"\('a', 'b'\) and \('a\.b',\) share the name 'a\.b'"):
        orbax.read_tree(tmp_path / "1")
    assert orbax.read(tmp_path / "1", {"c": None})["c"] == 1


def test_unknown_value_types_are_named(
    saved: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    step = copy(saved("v1"), tmp_path / "9")

    def change(tree: dict[str, Any]) -> None:
        tree["tree_metadata"]["('b',)"]["value_metadata"]["value_type"] = "my.Type"

    change_tree(step, change)
    with pytest.raises(Unsupported, match=r"b: value type 'my.Type' is not read"):
        orbax.read_tree(step)


def test_names_in_plain_directories_cannot_leave_the_step(tmp_path: pathlib.Path) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "1", {"x": jnp.ones(2)})
    shutil.copytree(tmp_path / "1" / "x", tmp_path / "outside")

    def change(tree: dict[str, Any]) -> None:
        entry = tree["tree_metadata"].pop("('x',)")
        entry["key_metadata"][0]["key"] = "../outside"
        tree["tree_metadata"]["('../outside',)"] = entry

    change_tree(tmp_path / "1", change)
    with pytest.raises(Damaged, match="no name for a directory"):
        orbax.read_tree(tmp_path / "1")


def test_a_begun_deletion_is_respected(
    saved: Callable[[str], pathlib.Path], tmp_path: pathlib.Path
) -> None:
    step = copy(saved("v1"), tmp_path / "9")
    (step / "_CHECKPOINT_DELETION").write_text('{"checkpointable_name": "state"}')
    for item in (None, "state"):
        with pytest.raises(Damaged, match="deletion of item 'state'"):
            orbax.read_tree(step, item)


def test_rich_types_bring_tuples_back(tmp_path: pathlib.Path) -> None:
    rich = (
        ocp.options.PyTreeMetadataOptions if hasattr(ocp.options, "PyTreeMetadataOptions") else None
    )
    if rich is None:
        from orbax.checkpoint._src.metadata.pytree_metadata_options import (
            PyTreeMetadataOptions as rich,  # noqa: N813
        )
    tree = {"t": (jnp.ones(2), [jnp.zeros(1)]), "p": Pair(jnp.ones(1), (2,)), "e": ()}
    handler = ocp.PyTreeCheckpointHandler(pytree_metadata_options=rich(support_rich_types=True))
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "1", tree)
    found = orbax.read_tree(tmp_path / "1")
    wanted = {"t": tree["t"], "p": {"x": tree["p"].x, "y": (2,)}, "e": ()}
    assert_same(found, wanted)


def test_many_leaves(tmp_path: pathlib.Path) -> None:
    tree = {f"l{i}": np.full((4, 4), i, np.float32) for i in range(1500)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", tree)
    assert_same(orbax.read_tree(tmp_path / "1"), tree)

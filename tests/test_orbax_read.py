"""Steps that Orbax wrote, read by us, against what Orbax itself restores from them."""

from __future__ import annotations

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint.experimental import v1
from orbax_saved import (
    SAVERS,
    Pair,
    Saved,
    assert_same,
    by_orbax,
    item_directory,
    mesh,
    plain,
    state,
)

import ckpt
from ckpt import attempts, orbax
from ckpt.errors import CheckpointError, Damaged, Mismatch, Misuse, NotFound, Unsupported
from ckpt.store import FileStore

BUNDLED = (
    pathlib.Path(next(iter(ocp.__path__)))
    / "experimental/v1/_src/testing/compatibility/checkpoints"
)
BUNDLED_STEPS = [
    str(step.relative_to(BUNDLED)) for step in sorted(BUNDLED.glob("v?_checkpoints/*/*/*"))
]


pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax warns about what we do not test


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


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
def test_fresh_step_gives_what_orbax_gives(saver: str, saved: Saved) -> None:
    step = saved(saver)
    found = orbax.read_tree(step)
    assert_same(found, by_orbax(item_directory(step)))
    assert isinstance(found["w"], np.ndarray)
    assert isinstance(found["layers"], list)
    assert isinstance(found["pair"], list)
    assert set(found["named"]) == {"x", "y"}


def test_v1_api_agrees(saved: Saved) -> None:
    assert_same(orbax.read_tree(saved("v1")), v1.load(saved("v1")))


@pytest.mark.parametrize("saver", ["manager", "v1", "zarr2"])
def test_specs_tell_shapes_without_values(saver: str, saved: Saved) -> None:
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
def test_values_under_other_shardings(saver: str, budget_bytes: int, saved: Saved) -> None:
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


def test_narrowing_is_refused(saved: Saved) -> None:
    with pytest.raises(Unsupported, match=r"n: saved as int64, .* jax_enable_x64"):
        orbax.read(saved("v1"), {"n": SingleDeviceSharding(jax.devices()[0])})


def test_sharding_that_does_not_fit(saved: Saved) -> None:
    uneven = NamedSharding(mesh(), PartitionSpec("a"))
    with pytest.raises(Mismatch, match=r"b: wanted .* found shape \[3\]"):
        orbax.read(saved("v1"), {"b": uneven})


def test_unknown_names_are_all_reported(saved: Saved) -> None:
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


def test_one_place_tells_what_a_step_is(saved: Saved, tmp_path: pathlib.Path) -> None:
    """A run of ours lists what this module does, also steps that have lost their metadata."""
    whole = saved("manager")
    for number in range(1, 5):
        shutil.copytree(whole, tmp_path / f"{number}")
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

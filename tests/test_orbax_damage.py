"""Steps of Orbax that are damaged, incomplete or made to mislead: refused, with the place."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from orbax_saved import (
    Saved,
    assert_same,
    by_orbax,
    item_directory,
    plain,
    save_pytree,
    state,
)

from ckpt import orbax
from ckpt.errors import Damaged, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore")  # Orbax warns about what we do not test


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("saved"))


def copy(step: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    shutil.copytree(step, target)
    return target


def change_tree(step: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = item_directory(step) / "_METADATA"
    tree = json.loads(file.read_text())
    change(tree)
    file.write_text(json.dumps(tree))


def test_an_absent_chunk_is_damage_but_zeros_where_the_metadata_says_so(
    saved: Saved, tmp_path: pathlib.Path
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
    saved: Saved, tmp_path: pathlib.Path, zeros: bool
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
    saved: Saved,
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


def test_a_shard_that_is_there_counts_with_all_its_chunks(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zarr v3 writes shards of many chunks: one key each."""
    step = save_pytree(tmp_path, use_ocdbt=False, use_zarr3=True)
    change_tree(step, lambda tree: tree.pop("store_array_data_equal_to_fill_value"))
    metadata = json.loads((step / "big" / "zarr.json").read_text())
    (sharding,) = metadata["codecs"]
    assert sharding["name"] == "sharding_indexed"
    sharding["configuration"]["chunk_shape"] = [4, 4]
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [64, 64]
    values = np.random.default_rng(1).standard_normal((64, 64), np.float32)
    shutil.rmtree(step / "big")
    kvstore = {"driver": "file", "path": f"{step}/big/"}
    keys = ("shape", "data_type", "chunk_grid", "codecs", "chunk_key_encoding", "fill_value")
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": {k: metadata[k] for k in keys}}
    ts.open(spec, create=True).result().write(values).result()
    assert len([file for file in (step / "big").rglob("*") if file.is_file()]) == 2
    monkeypatch.setattr(orbax, "_FILLED_BYTES", 1000)
    np.testing.assert_array_equal(orbax.read(step, {"big": None})["big"], values)
    shutil.rmtree(step / "big" / "c")
    with pytest.raises(Damaged, match=r"5: big: .* the chunks that are there 0;"):
        orbax.read(step, {"big": None})


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
    damage: str, saved: Saved, tmp_path: pathlib.Path
) -> None:
    step = copy(saved("v1"), tmp_path / "9")
    change, text = DAMAGE[damage]
    change(step / "state")
    with pytest.raises(Damaged, match=text) as caught:
        orbax.read_tree(step)
    assert str(step) in str(caught.value)


def test_a_cut_file_is_damage(saved: Saved, tmp_path: pathlib.Path) -> None:
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


def test_optional_files_may_be_absent(saved: Saved, tmp_path: pathlib.Path) -> None:
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


def test_unknown_value_types_are_named(saved: Saved, tmp_path: pathlib.Path) -> None:
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


def test_a_begun_deletion_is_respected(saved: Saved, tmp_path: pathlib.Path) -> None:
    step = copy(saved("v1"), tmp_path / "9")
    (step / "_CHECKPOINT_DELETION").write_text('{"checkpointable_name": "state"}')
    for item in (None, "state"):
        with pytest.raises(Damaged, match="deletion of item 'state'"):
            orbax.read_tree(step, item)

"""What Orbax's checkpointers write into one directory of any name: opened by the public calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from cli_runs import answer, refusal
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

import ckpt
from ckpt.errors import Damaged, Mismatch, Misuse, NotFound, Unsupported

NAMES = ("final", "7", "step_07", "model.v2", "0012")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Orbax warns about what is not tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tree() -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    spread = NamedSharding(mesh, PartitionSpec("d"))
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)
    return {"w": jax.device_put(rows, spread), "b": {"c": jnp.arange(3)}, "n": 4}


def both() -> dict[str, Any]:
    return {"model": tree(), "average": {"w": jnp.full((2, 2), 0.5)}}


def by_standard(path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree())
    return tree()


def by_pytree(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree())
    return tree()


def by_v1(path: Path) -> Any:
    v1.save_pytree(path, tree())
    return tree()


def by_v1_of_several(path: Path) -> Any:
    v1.save_checkpointables(path, both())
    return both()


def by_v1_of_one(path: Path) -> Any:
    v1.save_checkpointables(path, {"model": tree()})
    return tree()


def by_composite(path: Path) -> Any:
    arguments = {name: ocp.args.StandardSave(value) for name, value in both().items()}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, ocp.args.Composite(**arguments))
    return both()


WRITERS: dict[str, Callable[[Path], Any]] = {
    "StandardCheckpointer": by_standard,
    "PyTreeCheckpointer": by_pytree,
    "save_pytree": by_v1,
    "save_checkpointables": by_v1_of_several,
    "save_checkpointables of one": by_v1_of_one,
    "CompositeCheckpointHandler": by_composite,
}
Written = tuple[Path, Any]


@pytest.fixture(scope="module", params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A directory that is not written to, and what was saved in it; another name each time."""
    name = NAMES[list(WRITERS).index(request.param) % len(NAMES)]
    path = tmp_path_factory.mktemp("orbax") / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return path, WRITERS[request.param](path)


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_values_on_the_host(written: Written) -> None:
    path, wanted = written
    restored = ckpt.restore(path)
    assert_same(restored.state, wanted)
    assert restored.step == (7 if path.name == "7" else 0)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored.state))


def test_values_as_the_template_says(written: Written) -> None:
    path, wanted = written
    found = ckpt.restore(path, like=wanted).state
    assert_same(found, wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(one) is type(other)
        if isinstance(one, jax.Array):
            assert one.sharding == other.sharding


def test_all_differences_from_the_template(written: Written) -> None:
    path, wanted = written
    wrong = jax.tree.map(lambda leaf: leaf if isinstance(leaf, int) else jnp.zeros(5), wanted)
    with pytest.raises(Mismatch) as caught:
        ckpt.restore(path, like=[wrong])
    assert len(caught.value.differences) == 2 * len(jax.tree.leaves(wanted))
    with pytest.raises(Mismatch) as caught:
        ckpt.restore(path, like=wrong)
    arrays = [leaf for leaf in jax.tree.leaves(wanted) if not isinstance(leaf, int)]
    assert len(caught.value.differences) == len(arrays)


def test_the_command_describes_it(written: Written) -> None:
    path, wanted = written
    found = answer("inspect", path)
    assert (found["format"], found["location"], found["id"]) in (
        ("orbax", str(path), None),
        ("orbax", str(path), {"step": 7, "branch": 0, "attempt": 0}),  # its parent is a root
    )
    flat = jax.tree_util.tree_flatten_with_path(wanted)[0]
    names = {".".join(key.key for key in keys): np.shape(leaf) for keys, leaf in flat}
    assert {leaf["name"]: tuple(leaf["shape"]) for leaf in found["leaves"]} == names


def test_what_only_steps_of_ours_have_is_refused_by_its_path(written: Written) -> None:
    path, _ = written
    for call in (ckpt.metadata, ckpt.verify):
        with pytest.raises(Unsupported, match="written by Orbax") as caught:
            call(path)
        assert str(caught.value).startswith(f"{path}: ")
    assert f"{path}: written by Orbax" in refusal("verify", path, code=2)


def test_it_is_no_run(tmp_path: Path) -> None:
    path = tmp_path / "final"
    by_standard(path)
    with pytest.raises(Unsupported, match="one step of Orbax, in no run"):
        ckpt.open(path)
    with pytest.raises(Unsupported, match="written by Orbax"):
        ckpt.restore(path, data=object())
    with pytest.raises(Misuse, match="is step 0; step=3 was asked for"):
        ckpt.restore(path, step=3)
    for command in ("ls", "log"):
        assert "one step of Orbax, in no run" in refusal(command, path, code=2)


def test_a_run_beside_it_stays_a_run(tmp_path: Path) -> None:
    """Items named by numbers look like steps; a file that only steps have tells them apart."""
    numbered = {"1": {"w": jnp.ones(2)}, "2": {"w": jnp.zeros(2)}}
    v1.save_checkpointables(tmp_path / "items", numbered)
    assert_same(ckpt.restore(tmp_path / "items").state, numbered)

    for step in (1, 2):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "root" / str(step), {"w": jnp.full(2, step)})
    restored = ckpt.restore(tmp_path / "root")
    assert (restored.step, restored.state["w"].tolist()) == (2, [2, 2])

    ckpt.save(tmp_path / "root", {"w": jnp.full(2, 3)})
    assert ckpt.restore(tmp_path / "root").step == 3


def test_the_item_that_orbax_prefers_is_taken(tmp_path: Path) -> None:
    v1.save_checkpointables(tmp_path / "both", {"state": tree(), "other": {"w": jnp.ones(2)}})
    assert_same(ckpt.restore(tmp_path / "both").state, tree())
    names = [leaf["name"] for leaf in answer("inspect", tmp_path / "both")["leaves"]]
    assert names == ["b.c", "n", "w"]


def test_unfinished_and_broken_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "final"
    by_standard(path)
    (path / "manifest.ocdbt").unlink()
    with pytest.raises(Damaged, match=r"wanted manifest\.ocdbt"):
        ckpt.restore(path)
    unfinished = path.rename(tmp_path / "final.orbax-checkpoint-tmp-12")
    with pytest.raises(NotFound):
        ckpt.restore(unfinished)

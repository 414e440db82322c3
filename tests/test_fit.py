"""Restoring into a template that differs on purpose: partial, renamed, cast, missing, extra."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
from ckpt import Fit

MESH = jax.make_mesh((8,), ("x",))
ROWS = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("x"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fit") / "run"
    with ckpt.CheckpointManager(root, arena=root.with_name("arena")) as manager:
        manager.save(3, tree())
        manager.wait_until_finished()
    return root


def tree() -> dict:
    return {
        "params": {
            "dense": {"kernel": jnp.arange(64.0).reshape(16, 4), "bias": jnp.arange(4.0)},
            "dense2": np.arange(5, dtype=np.int32),
        },
        "opt": {"mu": jnp.full(7, 2.0), "key": jax.random.key(1)},
        "step": 3,
    }


def test_a_part_keeps_the_rest_of_the_template(saved: Path) -> None:
    like = jax.tree.map(lambda x: x, tree())
    like["opt"] = {"mu": jnp.zeros(3), "nu": 5}
    like["params"]["dense"]["bias"] = jnp.ones(4)
    found = ckpt.restore(saved, like, fit=Fit(partial=["params/dense/kernel", "step"])).state
    np.testing.assert_array_equal(
        found["params"]["dense"]["kernel"], tree()["params"]["dense"]["kernel"]
    )
    assert found["opt"] is not tree()["opt"]
    np.testing.assert_array_equal(found["opt"]["mu"], np.zeros(3))
    np.testing.assert_array_equal(found["params"]["dense"]["bias"], np.ones(4))
    # A subtree means its own leaves, not names that begin alike.
    part = ckpt.restore(saved, like, fit=Fit(partial=["params/dense"])).state
    np.testing.assert_array_equal(part["params"]["dense"]["bias"], np.arange(4.0))
    by_function = ckpt.restore(
        saved, like, fit=Fit(partial=lambda name: name.endswith("bias"))
    ).state
    np.testing.assert_array_equal(by_function["params"]["dense"]["bias"], np.arange(4.0))


def test_a_part_reads_no_more_than_it_needs(saved: Path) -> None:
    restored = ckpt.restore(saved, tree(), fit=Fit(partial=["params/dense/bias"]))
    assert restored.report.bytes_read <= 16 + 4


def test_a_path_that_selects_nothing_is_an_error(saved: Path) -> None:
    with pytest.raises(ckpt.Misuse, match=r"'param' is no leaf or subtree .*opt, params, step"):
        ckpt.restore(saved, tree(), fit=Fit(partial=["param"]))
    with pytest.raises(ckpt.Misuse, match="wanted a collection"):
        Fit(partial="params")


def test_leaves_that_stay_need_values(saved: Path) -> None:
    like = {"step": 0, "more": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(
        ckpt.Mismatch, match=r"more: wanted an array, found float32\[2\] without values"
    ):
        ckpt.restore(saved, like, fit=Fit(missing="keep", extra="ignore"))


@pytest.mark.parametrize(
    "rename",
    [
        {"net/w": "params/dense/kernel", "net/b": "params/dense/bias"},
        lambda name: {"net/w": "params/dense/kernel", "net/b": "params/dense/bias"}[name],
    ],
)
def test_renamed(saved: Path, rename) -> None:
    like = {
        "net": {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=ROWS), "b": jnp.ones(4)}
    }
    found = ckpt.restore(saved, like, fit=Fit(rename=rename, extra="ignore")).state
    assert found["net"]["w"].sharding == ROWS
    np.testing.assert_array_equal(found["net"]["w"], np.arange(64.0).reshape(16, 4))
    with pytest.raises(ckpt.Mismatch) as caught:
        ckpt.restore(saved, like, fit=Fit(rename=rename))
    assert "params/dense2: wanted nothing, found int32[5]" in caught.value.differences


def test_a_subtree_renamed(saved: Path) -> None:
    like = {
        "p": {"d": {"kernel": jnp.ones((16, 4)), "b": jnp.ones(4)}, "dense2": np.ones(5, np.int32)},
        "pp": np.ones(7, np.float32),
    }
    rename = {"p": "params", "p/d": "params/dense", "p/d/b": "params/dense/bias", "pp": "opt/mu"}
    found = ckpt.restore(saved, like, fit=Fit(rename=rename, extra="ignore")).state
    np.testing.assert_array_equal(found["p"]["d"]["kernel"], tree()["params"]["dense"]["kernel"])
    np.testing.assert_array_equal(found["p"]["d"]["b"], np.arange(4.0))
    np.testing.assert_array_equal(found["p"]["dense2"], np.arange(5))
    np.testing.assert_array_equal(found["pp"], np.full(7, 2.0))
    with pytest.raises(ckpt.Mismatch, match=r"p/d/b: .* found nothing under the name params/d/b"):
        ckpt.restore(saved, like, fit=Fit(rename={"p": "params"}, extra="ignore"))
    with pytest.raises(ckpt.Mismatch, match=r"pp: wanted float32\[7\], found nothing"):
        ckpt.restore(saved, like, fit=Fit(rename={"p": "opt"}, extra="ignore"))


def test_a_renaming_that_names_nothing_is_an_error(saved: Path) -> None:
    turned = {"params/dense/kernel": "net/w"}
    with pytest.raises(ckpt.Misuse, match=r"'params/dense/kernel' is no leaf .*has net; a key is"):
        ckpt.restore(saved, {"net": {"w": jnp.ones(4)}}, fit=Fit(rename=turned, extra="ignore"))
    for key in ("param", "params/dense/", "params/dens", ""):
        with pytest.raises(ckpt.Misuse, match=f"rename: {key!r} is no leaf or subtree"):
            ckpt.restore(saved, tree(), fit=Fit(rename={key: "x"}, missing="keep"))
    with pytest.raises(ckpt.Misuse, match=r"rename: what it gives for .*: wanted .* NoneType"):
        ckpt.restore(saved, tree(), fit=Fit(rename=lambda name: None))


def test_two_leaves_from_one_are_refused(saved: Path) -> None:
    like = {"a": jnp.ones(4), "b": jnp.ones(4)}
    with pytest.raises(ckpt.Misuse, match="a and b both come from params/dense/bias"):
        ckpt.restore(saved, like, fit=Fit(rename=lambda name: "params/dense/bias"))


def test_cast(saved: Path) -> None:
    like = tree()
    like["params"]["dense"]["kernel"] = jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=ROWS)
    like["params"]["dense2"] = np.zeros(5, np.float64)
    with pytest.raises(ckpt.Mismatch, match=r"kernel: wanted bfloat16\[16,4\], found float32"):
        ckpt.restore(saved, like)
    found = ckpt.restore(saved, like, fit=Fit(cast=True)).state
    kernel = found["params"]["dense"]["kernel"]
    assert (kernel.dtype, kernel.sharding) == (jnp.bfloat16, ROWS)
    np.testing.assert_array_equal(kernel, np.arange(64).reshape(16, 4).astype(jnp.bfloat16))
    assert found["params"]["dense2"].dtype == np.float64
    only = Fit(cast=lambda name: name == "params/dense2")
    with pytest.raises(ckpt.Mismatch, match="kernel"):
        ckpt.restore(saved, like, fit=only)
    like["params"]["dense"]["kernel"] = jnp.ones((16, 5), jnp.bfloat16)
    with pytest.raises(ckpt.Mismatch, match=r"wanted bfloat16\[16,5\]"):
        ckpt.restore(saved, like, fit=Fit(cast=True))


def test_missing_and_extra(saved: Path) -> None:
    like = {**tree(), "ema": jnp.full(3, 9.0)}
    del like["opt"]
    with pytest.raises(ckpt.Mismatch) as caught:
        ckpt.restore(saved, like)
    assert caught.value.differences == (
        "ema: wanted float32[3], found nothing",
        "opt/key: wanted nothing, found threefry2x32 key[]",
        "opt/mu: wanted nothing, found float32[7]",
    )
    found = ckpt.restore(saved, like, fit=Fit(missing="keep", extra="ignore")).state
    np.testing.assert_array_equal(found["ema"], np.full(3, 9.0))
    assert found["step"] == 3
    with pytest.raises(ckpt.Misuse, match="missing: wanted 'error' or 'keep'"):
        Fit(missing="ignore")


def test_in_a_manager(saved: Path) -> None:
    with ckpt.CheckpointManager(saved, arena=saved.with_name("arena")) as manager:
        restored = manager.restore(3, like={"step": 0}, fit=Fit(extra="ignore"))
        assert restored.state == {"step": 3}

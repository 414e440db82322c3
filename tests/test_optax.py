"""States of Optax, saved in training and restored: they train on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from trained import Batch, Training, go_on, save_half_way, undisturbed

import ckpt
from ckpt import tree
from tools.bench.bits import bits

MULTI = {"x": optax.adam(1e-2), "y": optax.set_to_zero()}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.cosine_decay_schedule(1e-2, 9)),
        optax.ema(0.9),
    ),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "multi_transform": lambda: optax.multi_transform(MULTI, {"w": "x", "b": "y"}),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(1e-2, 0.0, 9), weight_decay=0.1
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(1e-2, momentum=0.9), 3),
    "lookahead": lambda: optax.lookahead(optax.adafactor(1e-2), 2, 0.5),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(1e-2)),
    "scale_by_lbfgs": lambda: optax.scale_by_lbfgs(memory_size=3),
}


def own(leaf: Any) -> Any:
    """Some optimizers begin with one array in two places, which could not be donated."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 else leaf


def training(name: str) -> Training:
    optimizer = OPTIMIZERS[name]()

    def start() -> Any:
        params: Any = {"w": jnp.linspace(-1.0, 1.0, 4)[:, None], "b": jnp.zeros(1)}
        if name == "lookahead":
            params = optax.LookaheadParams.init_synced(params)
        opt = OPTIMIZERS[name]().init(params)
        return jax.tree.map(own, {"params": params, "opt": opt, "step": 0, "scale": 0.5})

    def step(state: Any, batch: Batch) -> Any:
        inputs, targets = batch

        def loss(params: Any) -> jax.Array:
            return state["scale"] * jnp.mean((inputs @ params["w"] + params["b"] - targets) ** 2)

        fast = state["params"].fast if name == "lookahead" else state["params"]
        gradient = jax.grad(loss)(fast)
        updates, opt = optimizer.update(gradient, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt": opt, "step": state["step"] + 1}

    return Training(start, jax.jit(step, donate_argnums=0))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_on(name: str, tmp_path: Path) -> None:
    train = training(name)
    structure = save_half_way(train, tmp_path / "run")
    wanted = undisturbed(train)
    for like in (train.start(), jax.eval_shape(train.start)):
        found = ckpt.restore(tmp_path / "run", like).state
        assert jax.tree.structure(found) == jax.tree.structure(like)
        assert bits(go_on(train, found)) == wanted
    found = ckpt.restore(tmp_path / "run").state
    assert tree.flatten(found).structure == structure
    assert jax.tree.structure(found) == jax.tree.structure(train.start())
    assert bits(go_on(train, found)) == wanted
    assert ckpt.metadata(tmp_path / "run").hidden_from_orbax == ()

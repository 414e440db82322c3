"""States of Flax, NNX and Linen, saved in training and restored: they train on as before."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from memory_source import Columns
from trained import END, HALF, Batch, Training, batch, go_on, save_half_way, undisturbed

import ckpt
from ckpt import tree
from datapipe import Pipeline
from tools.bench.bits import bits

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Flax and what it imports
    import flax
    import flax.linen as nn
    from flax import nnx, struct
    from flax.core import FrozenDict
    from flax.training.train_state import TrainState


# --- NNX ---------------------------------------------------------------------------------------


class Net(nnx.Module):
    """With all that a state of NNX can have: statistics, keys, a list, named axes."""

    def __init__(self, rngs: nnx.Rngs, *, on_mesh: bool = False) -> None:
        normal = nnx.initializers.lecun_normal()
        split = nnx.with_partitioning(normal, (None, "model"), eager_sharding=on_mesh)
        self.first = nnx.Linear(4, 8, kernel_init=split, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.more = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(8, 1, use_bias=False, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32), note="rows")

    def __call__(self, inputs: jax.Array) -> jax.Array:
        self.seen[...] += len(inputs)
        hidden = self.drop(nnx.relu(self.norm(self.first(inputs))))
        for layer in self.more:
            hidden = nnx.relu(layer(hidden))
        return self.last(hidden)


def both() -> tuple[Net, nnx.Optimizer]:
    net = Net(nnx.Rngs(0, dropout=1))
    return net, nnx.Optimizer(net, optax.adamw(1e-2), wrt=nnx.Param)


def nnx_training() -> Training:
    graph = nnx.graphdef(both())

    def step(state: Any, batch: Batch) -> Any:
        net, optimizer = nnx.merge(graph, state)
        inputs, targets = batch

        def loss(net: Net) -> jax.Array:
            return jnp.mean((net(inputs) - targets) ** 2)

        optimizer.update(net, nnx.grad(loss)(net))
        return nnx.state((net, optimizer))

    return Training(lambda: nnx.state(both()), jax.jit(step, donate_argnums=0))


def test_a_state_of_nnx_trains_on(tmp_path: Path) -> None:
    training = nnx_training()
    structure = save_half_way(training, tmp_path / "run")
    wanted = undisturbed(training)
    names = ckpt.metadata(tmp_path / "run").leaves
    assert {"0/drop/rngs/key/value", "0/norm/mean/value", "1/step/value"} <= names.keys()
    assert names["0/drop/rngs/key/value"].impl == "threefry2x32"
    for like in (training.start(), nnx.state(nnx.eval_shape(both))):
        found = ckpt.restore(tmp_path / "run", like).state
        assert jax.tree.structure(found) == jax.tree.structure(like)
        assert bits(go_on(training, found)) == wanted
    found = ckpt.restore(tmp_path / "run").state
    assert type(found) is nnx.State
    assert type(found[0]["norm"]["mean"]) is nnx.BatchStat
    assert found[0]["first"]["kernel"].out_sharding == (None, "model")
    assert found[0]["seen"].note == "rows"
    assert tree.flatten(found).structure == structure
    assert bits(go_on(training, found)) == wanted


def test_a_state_of_nnx_goes_to_another_mesh(tmp_path: Path) -> None:
    auto = (jax.sharding.AxisType.Auto,)

    def net() -> Net:
        return Net(nnx.Rngs(3), on_mesh=True)

    saved: Any = None
    for devices in (4, 2):
        mesh = jax.make_mesh((devices,), ("model",), axis_types=auto)
        with jax.set_mesh(mesh):
            if saved is None:
                saved = nnx.state(net())
                ckpt.save(tmp_path / "run", saved)
            _, like = nnx.get_abstract_model(net, mesh)
            found = ckpt.restore(tmp_path / "run", like).state
        assert bits(found) == bits(saved)
        assert found["first"]["kernel"].sharding.shard_shape((4, 8)) == (4, 8 // devices)
        placed = jax.tree.map(lambda value, target: value.sharding == target.sharding, found, like)
        assert all(jax.tree.leaves(placed))


def test_a_part_of_a_state_of_nnx(tmp_path: Path) -> None:
    net = Net(nnx.Rngs(0))
    graph, params, rest = nnx.split(net, nnx.Param, ...)
    ckpt.save(tmp_path / "run", {"params": params, "rest": rest, "pure": nnx.to_pure_dict(params)})
    found = ckpt.restore(tmp_path / "run").state
    again = nnx.merge(graph, found["params"], found["rest"])
    assert bits(nnx.state(again)) == bits(nnx.state(net))
    assert jax.tree.structure(found["pure"]) == jax.tree.structure(nnx.to_pure_dict(params))
    like = {"params": jax.tree.map(jnp.zeros_like, params)}
    found = ckpt.restore(tmp_path / "run", like, fit=ckpt.Fit(partial=["params"])).state
    assert bits(found["params"]) == bits(params)


def test_a_module_of_nnx_needs_a_template(tmp_path: Path) -> None:
    net = Net(nnx.Rngs(0))
    ckpt.save(tmp_path / "run", {"graph": nnx.graphdef(net), "net": net})
    with pytest.raises(
        ckpt.Unsupported,
        match=r"(?s)node graph: a flax.nnx.*GraphDef cannot be rebuilt .*template \(like=\)",
    ):
        ckpt.restore(tmp_path / "run")
    other = Net(nnx.Rngs(5))
    assert bits(nnx.state(other)) != bits(nnx.state(net))
    found = ckpt.restore(tmp_path / "run", {"graph": nnx.graphdef(other), "net": other}).state
    assert type(found["net"]) is Net
    assert bits(nnx.state(found["net"])) == bits(nnx.state(net))


def test_flax_is_not_imported_for_a_state_of_it(tmp_path: Path) -> None:
    ckpt.save(tmp_path / "run", nnx.state(Net(nnx.Rngs(0)), nnx.BatchStat))
    script = """
import sys, ckpt
try:
    ckpt.restore(sys.argv[1])
except ckpt.Unsupported as error:
    print(error)
print("flax" in sys.modules)
import flax.nnx
print(type(ckpt.restore(sys.argv[1]).state))
"""
    child = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "run")]
    found = subprocess.run(child, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    refused, imported, kind = found.stdout.splitlines()
    assert "flax.nnx.variablelib:BatchStat is not loaded; import flax.nnx" in refused
    assert (imported, kind) == ("False", "<class 'flax.nnx.statelib.State'>")


# --- Linen -------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Named axes of both kinds, statistics, dropout."""

    @nn.compact
    def __call__(self, inputs: jax.Array, *, train: bool) -> jax.Array:
        normal = nn.initializers.lecun_normal()
        split = nn.with_partitioning(normal, (None, "model"))
        hidden = nn.Dense(8, kernel_init=split)(inputs)
        hidden = nn.relu(nn.BatchNorm(use_running_average=not train)(hidden))
        hidden = nn.Dropout(0.3, deterministic=not train)(hidden)
        logical = nn.with_logical_partitioning(normal, ("embed", None))
        return nn.Dense(1, kernel_init=logical)(hidden)


class State(TrainState):
    batch_stats: Any
    key: jax.Array


@struct.dataclass
class Ema:
    """A dataclass of Flax without functions."""

    params: Any
    decay: float = struct.field(pytree_node=False)
    names: tuple[str, ...] = struct.field(pytree_node=False, default=())


MODEL, ADAM = Layers(), optax.adam(1e-2)


def linen_state() -> State:
    variables = MODEL.init(jax.random.key(0), batch(0)[0], train=False)
    return State.create(
        apply_fn=MODEL.apply, tx=ADAM, key=jax.random.key(1, impl="rbg"), **variables
    )


def linen_step(state: State, batch: Batch) -> State:
    inputs, targets = batch
    dropout = jax.random.fold_in(state.key, state.step)

    def loss(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        found, changed = state.apply_fn(
            variables, inputs, train=True, rngs={"dropout": dropout}, mutable=["batch_stats"]
        )
        return jnp.mean((found - targets) ** 2), changed

    gradient, changed = jax.grad(loss, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradient, **changed)


LINEN = Training(linen_state, jax.jit(linen_step, donate_argnums=0))


def test_a_state_of_linen_trains_on(tmp_path: Path) -> None:
    save_half_way(LINEN, tmp_path / "run")
    wanted = undisturbed(LINEN)
    for like in (linen_state(), jax.eval_shape(linen_state)):
        found = ckpt.restore(tmp_path / "run", like).state
        assert jax.tree.structure(found) == jax.tree.structure(like)
        assert found.step == HALF
        kernel = found.params["Dense_0"]["kernel"]
        assert (type(kernel), kernel.names) == (nn.Partitioned, (None, "model"))
        assert type(found.params["Dense_1"]["kernel"]) is nn.LogicallyPartitioned
        assert bits(go_on(LINEN, found)) == wanted


def test_functions_of_a_train_state_need_a_template(tmp_path: Path) -> None:
    save_half_way(LINEN, tmp_path / "run")
    with pytest.raises(ckpt.Unsupported) as caught:
        ckpt.restore(tmp_path / "run")
    for part in ("the root of the tree: a test_flax:State", "static data: ", "template (like=)"):
        assert part in str(caught.value)


def test_all_but_the_functions_of_a_train_state_needs_none(tmp_path: Path) -> None:
    def parts(state: State) -> dict[str, Any]:
        names = ("step", "params", "opt_state", "batch_stats", "key")
        return {name: getattr(state, name) for name in names}

    state = go_on(LINEN, linen_state(), 0, HALF)
    structure = jax.tree.structure(parts(state))
    ckpt.save(tmp_path / "run", parts(state))
    found = ckpt.restore(tmp_path / "run").state
    assert jax.tree.structure(found) == structure
    assert bits(go_on(LINEN, linen_state().replace(**found))) == undisturbed(LINEN)


def test_nodes_of_flax_come_back_without_a_template(tmp_path: Path) -> None:
    params = linen_state().params
    saved = {
        "frozen": FrozenDict({"b": {"x": jnp.ones(2)}, "a": FrozenDict(), "1": np.arange(3)}),
        "ema": Ema(params, 0.99, ("Dense_0", "Dense_1")),
        "boxed": nn.Partitioned(jnp.ones((2, 3)), names=("data", None)),
        "logical": nn.LogicallyPartitioned(jnp.zeros(2), names=("embed",)),
        "plain": flax.core.unfreeze(nn.meta.unbox(params)),
    }
    ckpt.save(tmp_path / "run", saved)
    found = ckpt.restore(tmp_path / "run").state
    assert jax.tree.structure(found) == jax.tree.structure(saved)
    assert bits(found) == bits(saved)
    assert (found["ema"].decay, found["boxed"].names) == (0.99, ("data", None))
    assert ckpt.metadata(tmp_path / "run").hidden_from_orbax == ()


def test_a_run_takes_a_new_train_state(tmp_path: Path) -> None:
    """Its step is a number at the start, and an array after the first update."""

    def trained(steps: int) -> State:
        tier = ckpt.Shared(tmp_path / "run", every=HALF)
        manager = ckpt.CheckpointManager(tier, arena=tmp_path / "arena")
        with Pipeline(Columns(64), batch_size=1, seed=1).iterator() as data, manager:
            with ckpt.Run(manager, linen_state(), data, steps=steps) as run:
                for number, _ in run:
                    run.update(LINEN.step(run.state, batch(number - 1)))
            return run.state

    trained(HALF)
    assert bits(trained(END)) == undisturbed(LINEN)

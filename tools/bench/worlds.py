"""Where a state lives while it is trained: on JAX devices, or in PyTorch tensors on the CPU."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from tools.bench.cases import DECAY, Case, values

_GROUP = 100  # leaves in one call of the jitted train step


class World(abc.ABC):
    """Makes states, trains them, and tells what they hold."""

    @abc.abstractmethod
    def state(self, case: Case, seed: int) -> Any:
        """The state of step 0."""

    @abc.abstractmethod
    def train(self, state: Any) -> Any:
        """The next state, computed; the memory of the old one is used again."""

    @abc.abstractmethod
    def template(self, case: Case) -> Any:
        """What to restore into."""

    @abc.abstractmethod
    def ready(self, state: Any) -> Any:
        """The state, once all of it is there."""

    @abc.abstractmethod
    def leaves(self, state: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Leaves by path, on the host, as `cases.values` has them."""


@final
class Jax(World):
    """`{node: {leaf: jax.Array}}`; over several devices as a mesh of two by two."""

    def __init__(self, devices: int) -> None:
        import jax

        self._sharding: dict[int, Any] = {}
        mesh = jax.make_mesh((2, 2), ("x", "y")) if devices == 4 else None
        for rank in (1, 2):
            if mesh is None:
                self._sharding[rank] = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            else:
                spec = jax.sharding.PartitionSpec(*("x", "y")[:rank])
                self._sharding[rank] = jax.sharding.NamedSharding(mesh, spec)
        self._step = jax.jit(lambda group: [leaf * DECAY for leaf in group], donate_argnums=0)

    def state(self, case: Case, seed: int) -> Any:
        import jax

        def put(array: np.ndarray) -> Any:
            # A copy of XLA's own: what shares memory with NumPy cannot be donated.
            return jax.device_put(array, self._sharding[array.ndim], may_alias=False)

        return jax.block_until_ready(_nested((n, put(array)) for n, array in values(case, seed)))

    def train(self, state: Any) -> Any:
        import jax

        leaves, treedef = jax.tree.flatten(state)
        trained: list[Any] = []
        del state
        for start in range(0, len(leaves), _GROUP):
            trained += self._step(leaves[start : start + _GROUP])
        return jax.block_until_ready(jax.tree.unflatten(treedef, trained))

    def template(self, case: Case) -> Any:
        import jax

        def leaf(shape: tuple[int, ...]) -> Any:
            return jax.ShapeDtypeStruct(shape, np.float32, sharding=self._sharding[len(shape)])

        return _nested((name, leaf(shape)) for name, shape in case.shapes.items())

    def ready(self, state: Any) -> Any:
        import jax

        return jax.block_until_ready(state)

    def leaves(self, state: Any) -> Iterator[tuple[str, np.ndarray]]:
        for node, children in state.items():
            for name, leaf in children.items():
                yield f"{node}/{name}", np.asarray(leaf)


@final
class Torch(World):
    """`{path: torch.Tensor}`."""

    def state(self, case: Case, seed: int) -> Any:
        import torch

        return {name: torch.from_numpy(array) for name, array in values(case, seed)}

    def train(self, state: Any) -> Any:
        for leaf in state.values():
            leaf.mul_(float(DECAY))
        return state

    def template(self, case: Case) -> Any:
        import torch

        return {name: torch.empty(shape) for name, shape in case.shapes.items()}

    def ready(self, state: Any) -> Any:
        return state

    def leaves(self, state: Any) -> Iterator[tuple[str, np.ndarray]]:
        for name, leaf in sorted(state.items()):
            yield name, leaf.numpy()


def _nested(leaves: Iterator[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {}
    for path, leaf in leaves:
        node, name = path.split("/")
        tree.setdefault(node, {})[name] = leaf
    return tree

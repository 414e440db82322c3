"""A training loop whose step takes milliseconds, over a state that is much too large for that.

A step donates the whole state. It rewrites one leaf, changes one row of every other where it lies,
and multiplies matrices beside it, on all cores, for as long as a step is to take.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from tools.bench.cases import DECAY, Case
from tools.bench.worlds import World

_PROBED = (0, 16)  # rounds of the two kinds of step that tell what one round takes
_PROBES = 40
_BATCH, _WIDTH = 256, 512


class Loop:
    """A state in training; `rounds` matrix products in a step, see `calibrate`."""

    def __init__(self, world: World, case: Case, seed: int, rounds: int) -> None:
        self._world = world
        self.state = world.state(case, seed)
        """`{node: {leaf: f32 of rows by columns}}`; each step donates it."""
        self.rounds = rounds
        self.steps = 0
        """How many were made."""
        generator = np.random.Generator(np.random.SFC64(seed))
        weights = generator.standard_normal((_WIDTH, _WIDTH), np.float32) / np.sqrt(_WIDTH)
        self._weights = jnp.asarray(weights, jnp.float32)
        self._batch = jnp.asarray(generator.standard_normal((_BATCH, _WIDTH), np.float32))
        self._step = jax.jit(_step, donate_argnums=0)

    def train(self, steps: int = 1) -> list[float]:
        """Seconds that each step took, until all of the new state was there."""
        found = []
        for _ in range(steps):
            begun = time.perf_counter()
            self.state, loss = self._step(
                self.state, self._weights, self._batch, self.steps, self.rounds
            )
            jax.block_until_ready((self.state, loss))
            found.append(time.perf_counter() - begun)
            self.steps += 1
        return found

    def calibrate(self, step_s: float) -> None:
        """Set `rounds` so that a step takes about `step_s`, if the state alone does not."""
        self.train(3)
        took = []
        for self.rounds in _PROBED:
            took.append(statistics.median(self.train(_PROBES)))
        round_s = max(1e-6, (took[1] - took[0]) / (_PROBED[1] - _PROBED[0]))
        self.rounds = max(0, round((step_s - took[0]) / round_s))

    def digest(self) -> str:
        """Of the state as it is: xxh3-128 over the bytes of all leaves, by path.

        Through copies: a view on the host would keep an array from being donated.
        """
        found = xxhash.xxh3_128()
        for leaf in jax.tree.leaves(self.state):
            found.update(np.asarray(jnp.copy(leaf)).reshape(-1).view(np.uint8).data)
        return found.hexdigest()


def digest_of(state: Any) -> str:
    """As `Loop.digest`, of a state that nobody donates any more."""
    found = xxhash.xxh3_128()
    for leaf in jax.tree.leaves(state):
        found.update(np.asarray(leaf).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _step(state: Any, weights: Any, batch: Any, number: Any, rounds: Any) -> tuple[Any, Any]:
    def product(_: Any, found: Any) -> Any:
        return jnp.tanh(found @ weights)

    loss = jnp.mean(jax.lax.fori_loop(0, rounds, product, batch))
    leaves, treedef = jax.tree.flatten(state)
    trained = [leaves[0] * DECAY]
    for leaf in leaves[1:]:
        at = number % leaf.shape[0]
        row = jax.lax.dynamic_slice_in_dim(leaf, at, 1) * DECAY
        trained.append(jax.lax.dynamic_update_slice_in_dim(leaf, row, at, 0))
    return jax.tree.unflatten(treedef, trained), loss

"""A training run that is saved half-way: what comes back must train on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

import ckpt
from ckpt import tree
from tools.bench.bits import Bits, bits

HALF, END = 3, 6
Batch = tuple[jax.Array, jax.Array]


class Training(NamedTuple):
    """A state, made anew at each call, and a train step that donates it."""

    start: Callable[[], Any]
    step: Callable[[Any, Batch], Any]


def batch(number: int) -> Batch:
    """Inputs float32[8, 4] and targets float32[8, 1]."""
    inputs = jax.random.normal(jax.random.fold_in(jax.random.key(17), number), (8, 4))
    return inputs, inputs.sum(1, keepdims=True) ** 2


def go_on(training: Training, state: Any, first: int = HALF, end: int = END) -> Any:
    for number in range(first, end):
        state = training.step(state, batch(number))
    return state


def undisturbed(training: Training) -> Bits:
    return bits(go_on(training, training.start(), 0))


def save_half_way(training: Training, root: Path) -> Any:
    """Saves as it trains on; returns the record of the structure that was saved."""
    with ckpt.CheckpointManager(root, arena=root.with_name("arena")) as manager:
        state = go_on(training, training.start(), 0, HALF)
        structure = tree.flatten(state).structure
        manager.save(HALF, state)
        state = go_on(training, state)  # the arrays that were saved are donated
        assert bits(state) == undisturbed(training)
    return structure

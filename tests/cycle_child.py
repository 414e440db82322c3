"""The trainer that `test_cycles.py` kills and starts again: a donating loop with all tiers.

A script for `nurseries`, whose lives are `train`. What a trainer is told goes to a pipe, at whose
other end an observer writes it down.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from nurseries import serve
from rows import Rows

import ckpt.reading
from ckpt import attempts, image
from ckpt.manager import CheckpointManager
from ckpt.pending import Pending
from ckpt.retention import Keep
from ckpt.run import Run
from ckpt.spike import SpikeGuard
from ckpt.tiers import Local, Memory, Shared

KEPT = {"memory": 1, "local": 3, "shared": 4}
"""How many of the newest steps each tier keeps."""

BAD_EVERY = 120
"""Of so many examples two in a row are bad: the loss spikes on them."""

GUARD = SpikeGuard(
    window=32,
    warm_up=10,
    consecutive=1,
    cool_down=3,
    lag=1,
    margin=4,
    skip_before=2,
    skip_after=3,
    max_rewinds=1000,
)


class Stream(Rows):
    """The examples, as an iterator."""

    def __next__(self) -> np.ndarray:
        return np.array(self.take(), np.int32)


def state_at_start() -> dict[str, Any]:
    key = jax.random.key(3)
    return {
        "weights": jax.random.normal(key, (256, 512)),
        "moments": {"first": jnp.zeros((256, 512)), "second": jnp.zeros((256, 512))},
        "key": key,
        "step": jnp.zeros((), jnp.int32),
    }


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
    key, noise = jax.random.split(state["key"])
    mixed = jax.random.fold_in(noise, batch[0] * 7919 + batch[1])
    gradient = jax.random.normal(mixed, (256, 512)) + 0.1 * state["weights"]
    first = 0.9 * state["moments"]["first"] + gradient
    second = 0.99 * state["moments"]["second"] + gradient**2
    bad = jnp.any(batch % BAD_EVERY >= BAD_EVERY - 2)
    loss = 2.0 + 0.1 * jax.random.uniform(mixed) + jnp.where(bad, 100.0, 0.0)
    return {
        "weights": state["weights"] - 0.01 * first / (1e-6 + jnp.sqrt(second)),
        "moments": {"first": first, "second": second},
        "key": key,
        "step": state["step"] + 1,
    }, loss


def digest_of(state: dict[str, Any]) -> str:
    whole = xxhash.xxh3_128()
    for leaf in jax.tree.leaves({**state, "key": jax.random.key_data(state["key"])}):
        whole.update(np.asarray(leaf).tobytes())
    return whole.hexdigest()


class Trainer:
    """One life, between a start and a kill."""

    def __init__(self, place: str, pipe: int, steps: int, pause_s: float) -> None:
        self.pipe, self.steps, self.pause_s = pipe, steps, pause_s
        self.place = Path(place)
        self.told: list[tuple[Pending, int | None, set[str]]] = []
        """Saves, the attempts that made them, and the tiers of which the observer knows."""

    def say(self, event: str, **figures: Any) -> None:
        """To the observer outside, who writes it down."""
        os.write(self.pipe, (json.dumps({"event": event, **figures}) + "\n").encode())

    def run(self) -> None:
        manager = CheckpointManager(
            Memory(every=1, keep=Keep(last=KEPT["memory"])),
            Local(self.place / "local", every=3, keep=Keep(last=KEPT["local"], branches=0)),
            Shared(self.place / "run", every=6, keep=Keep(last=KEPT["shared"], branches=1)),
            arena=self.place / "arena",
        )
        writer = None
        stream = Stream()
        with manager, Run(manager, state_at_start(), stream, steps=self.steps, guard=GUARD) as run:
            report = run.restored.report
            attempt = manager.status().attempt
            self.say("restored", step=run.step, attempt=attempt, tier=report.tier)
            for _, batch in run:
                if (pid := manager.status().writer_pid) != writer:
                    writer = pid
                    self.say("writer", pid=pid)
                rewinds = len(run.rewinds)
                state, loss = train_step(run.state, batch)
                pending = run.update(state, loss=loss)
                if len(run.rewinds) > rewinds:
                    self.say("rewound", step=run.step)
                    self.told.clear()
                if pending is not None:
                    self.told.append((pending, manager.status().attempt, set()))
                self.tell()
                time.sleep(self.pause_s)
        self.say("ended", step=run.step, digest=digest_of(run.state), skips=stream.skips)

    def tell(self) -> None:
        """What was acknowledged since."""
        for pending, attempt, told in self.told:
            for tier in pending.tiers:
                if tier not in told and pending.done(tier):
                    told.add(tier)
                    self.say("acknowledged", step=pending.step, attempt=attempt, tier=tier)
        self.told = [each for each in self.told if len(each[2]) < len(each[0].tiers)]


@contextlib.contextmanager
def paused(what: str, nth: int, told: Path) -> Iterator[None]:
    """Stop in the middle of a call, so that the trainer can be killed there."""
    owner, name = {
        "copy": (image, "copy_chunks"),
        "decide": (attempts, "record"),
        "claim": (attempts, "claim"),
    }[what]
    original = getattr(owner, name)
    calls = 0

    def act(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            told.touch()
            time.sleep(30)
        return original(*args, **kwargs)

    setattr(owner, name, act)
    try:
        yield
    finally:
        setattr(owner, name, original)


def train(
    place: str,
    pipe: str,
    steps: int,
    pause_s: float,
    environment: dict[str, str],
    at: list[Any] | None,
) -> int:
    os.setpgid(0, 0)
    os.environ.update(environment)
    descriptor = os.open(pipe, os.O_WRONLY)
    try:
        trainer = Trainer(place, descriptor, steps, pause_s)
        with paused(at[0], at[1], Path(at[2])) if at else contextlib.nullcontext():
            trainer.run()
    except BaseException:
        with open(Path(place, "errors"), "a") as file:
            traceback.print_exc(file=file)
        return 3
    return 0


def main() -> None:
    assert ckpt.reading, "imported, so that no trainer has to"
    serve(train)


if __name__ == "__main__":
    main()

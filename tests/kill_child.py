"""The trainer that `test_kill.py` kills: saves, rewinds now and then, and says what it was told.

A script for `nurseries`, whose lives are `train`. `function of step and skips` is all there is to a
state.
"""

from __future__ import annotations

import json
import os
import random
import traceback
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash
from nurseries import serve
from rows import Rows

import ckpt.reading
from ckpt.manager import CheckpointManager
from ckpt.retention import Keep
from ckpt.tiers import Shared

WORDS = 1 << 18
"""Of eight bytes, in the large leaf: an image takes some milliseconds to write."""


def state_at(step: int, skips: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """The state after `step` batches, from nothing: what every restore is compared with."""
    rows, digest = Rows(), 0
    rows.skip(list(skips))
    for _ in range(step):
        digest = after(digest, rows.take())
    return state_of(step, digest)


def after(digest: int, batch: list[int]) -> int:
    """One step of training."""
    return xxhash.xxh3_64_intdigest(f"{digest} {batch}".encode())


def state_of(step: int, digest: int) -> dict[str, Any]:
    words = np.arange(WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(digest)
    return {
        "large": words.reshape(512, -1),
        "small": [words[i : i + 5].astype(np.uint16) for i in range(20)],
        "step": step,
        "digest": str(digest),
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        (one["step"], one["digest"]) == (other["step"], other["digest"])
        and np.array_equal(one["large"], other["large"])
        and all(map(np.array_equal, one["small"], other["small"]))
    )


KEPT = 3


class Trainer:
    """One life, between a start and a kill."""

    def __init__(self, root: str, arena: str, acks: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.acks = os.open(acks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.manager = CheckpointManager(Shared(root, keep=Keep(last=KEPT)), arena=arena)
        self.rows = Rows()
        self.step = self.digest = 0

    def say(self, event: str, **figures: Any) -> None:
        """What happened, so that it is known after death."""
        os.write(self.acks, (json.dumps({"event": event, **figures}) + "\n").encode())
        os.fsync(self.acks)

    def start(self) -> None:
        restored = self.manager.resume(data=self.rows)
        self.take_over(restored.step, restored.state if restored.step else state_of(0, 0))
        report = restored.report
        lost = [each.step for each in report.lost]
        self.say("restored", step=self.step, skips=self.rows.skips, lost=lost, fresh=report.fresh)

    def take_over(self, step: int, state: dict[str, Any]) -> None:
        if not same(state, state_at(step, self.rows.skips)):
            raise AssertionError(f"step {step} is not what it was: {state['step']=}")
        self.step, self.digest = step, int(state["digest"])

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            pending = []
            for _ in range(self.rng.randint(1, 6)):
                self.digest = after(self.digest, self.rows.take())
                self.step += 1
                state = state_of(self.step, self.digest)
                pending.append(self.manager.save(self.step, state, data=self.rows))
                if self.rng.random() < 0.5:
                    self.acknowledge(pending)
            self.acknowledge(pending)
            if self.rng.random() < 0.5:
                self.rewind()

    def acknowledge(self, pending: list[Any]) -> None:
        while pending:
            each = pending.pop(0)
            each.wait()
            self.say("saved", step=each.step)

    def rewind(self) -> None:
        older = self.manager.all_steps()[-KEPT:-1]  # what retention leaves
        if not older:
            return
        to = self.rng.choice(older)
        bad = self.rng.randint(to + 1, self.step)
        self.say("rewinding", to=to, bad=bad)
        restored = self.manager.rewind(
            to, skip_steps=range(bad, bad + 1), reason="drill", data=self.rows
        )
        assert restored.step == to, restored
        self.take_over(to, restored.state)
        self.say("rewound", step=to, skips=self.rows.skips)


def train(root: str, arena: str, acks: str, seed: int, rounds: int, errors: str) -> int:
    try:
        trainer = Trainer(root, arena, acks, seed)
        trainer.start()
        trainer.run(rounds)
        trainer.manager.close()
        trainer.say("closed")
    except BaseException:
        with open(errors, "a") as file:
            traceback.print_exc(file=file)
        return 3
    return 0


def main() -> None:
    assert ckpt.reading, "imported, so that no trainer has to"
    serve(train)


if __name__ == "__main__":
    main()

"""What is going to happen in a demo: drawn from the seed, before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass

LEAST_STEPS = 60


@dataclass(frozen=True)
class Script:
    """The course of the disturbed run. Steps count updates from 1, batches of the plan from 0."""

    steps: int  # updates to complete
    seed: int  # of weights, dropout, data order, noise and kills
    every: int  # updates between saves
    poison: range  # batches whose records become noise
    first_kill: int  # the first save at or after this step is interrupted
    second_kill: int  # of the saves after the rewind, the one that is interrupted, from 0

    @staticmethod
    def drawn(steps: int, seed: int) -> Script:
        """Raises ValueError for a run too short to hold it all."""
        if steps < LEAST_STEPS:
            raise ValueError(f"--steps {steps}: the demo needs at least {LEAST_STEPS}")
        chance = random.Random(seed)
        every = max(4, steps // 15)
        start = round(steps * chance.uniform(0.55, 0.65))
        return Script(
            steps=steps,
            seed=seed,
            every=every,
            poison=range(start, start + 8),
            first_kill=every * chance.randint(2, (start - 2) // every - 1),
            second_kill=chance.randint(1, (steps - start) // every - 2),
        )

    def moment(self, number: int, save_s: float) -> float:
        """Seconds after a save has begun at which kill `number` comes.

        save_s: what a save has taken so far, at the least.
        """
        return random.Random(f"{self.seed} kill {number}").uniform(0, 0.6 * save_s)

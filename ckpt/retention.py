"""Which steps stay: a pure policy over the lineage (FORMAT.md section 7)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.arguments import must_be, whole_number
from ckpt.errors import Misuse
from ckpt.lineage import Lineage, StepId


@dataclass(frozen=True)
class Best:
    """Keep the `count` best steps by a metric; ties go to the newer step."""

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        must_be(self.metric, str, "Best: metric", "the name of a metric")
        whole_number(self.count, "Best: count")
        if self.mode not in ("min", "max"):
            raise Misuse(f"Best(mode={self.mode!r}): wanted 'min' or 'max'")


@dataclass(frozen=True)
class Keep:
    """What stays: the `last` newest, each multiple of `every`, and the `best`. All by default."""

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    branches: int | None = None
    """How many abandoned branches stay, the newest of them; all without a number."""

    def __post_init__(self) -> None:
        if self.branches is not None:
            whole_number(self.branches, "Keep: branches (leave it out to keep all)", least=0)
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None:
                whole_number(value, f"Keep: {name} (leave it out to keep all)")
        if self.best is not None:
            must_be(self.best, Best, "Keep: best", "ckpt.Best('loss')")


def doomed(
    keep: Keep,
    line: Lineage,
    steps: Sequence[StepId],
    *,
    metrics: Mapping[int, Mapping[str, float]] | None = None,
    pinned: Collection[StepId] = (),
) -> list[StepId]:
    """The counting `steps` (ascending) that may be deleted.

    Never among them: the newest, the fork point of the newest branch until two steps of that
    branch count, what is pinned, and what Orbax wrote.

    Args:
        metrics: figures by step number; a step without a finite figure is not among the best.
    """
    if not steps or (keep.last is None and keep.every is None and keep.best is None):
        return []
    stay = set(pinned) | {steps[-1]}
    stay |= fork_points(line, steps)
    stay |= {step for step in steps if step.attempt == 0}
    if keep.last is not None:
        stay |= set(steps[-keep.last :])
    if keep.every is not None:
        stay |= {step for step in steps if step.step % keep.every == 0}
    if keep.best is not None:
        stay |= set(best(keep.best, steps, metrics or {}))
    return [step for step in steps if step not in stay]


def fork_points(line: Lineage, steps: Sequence[StepId]) -> set[StepId]:
    """The step at which the newest branch forked, while fewer than two of its steps count."""
    if not line or line[0].after < 0:
        return set()
    branch = line[0].branch
    own = [step for step in steps if step.branch == branch]
    if len(own) >= 2:
        return set()
    before = [step for step in steps if step.branch != branch]
    return {before[-1]} if before else set()


def best(
    policy: Best, steps: Sequence[StepId], metrics: Mapping[int, Mapping[str, float]]
) -> list[StepId]:
    """The best steps by `policy`, best first."""
    sign = 1.0 if policy.mode == "min" else -1.0
    known = [
        (sign * value, -step.step, step)
        for step in steps
        if math.isfinite(value := metrics.get(step.step, {}).get(policy.metric, math.nan))
    ]
    return [step for _, _, step in sorted(known)[: policy.count]]

"""Which steps of a tier stay: a pure policy (FORMAT.md section 7)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckpt.arguments import must_be, whole_number
from ckpt.errors import Misuse
from ckpt.lineage import Lineage, StepId, counting


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
    """What stays: the `last` newest, each multiple of `every`, and the `best`. All by default.

    These three are about steps of the lineage. What lies on branches that were left stays, or goes
    by `branches`.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    branches: int | None = None
    """How many abandoned branches stay, the newest of them, with all their steps; all without a
    number. The steps of a branch before the point where it was left belong to the lineage."""

    def __post_init__(self) -> None:
        if self.branches is not None:
            whole_number(self.branches, "Keep: branches (leave it out to keep all)", least=0)
        for name in ("last", "every"):
            value = getattr(self, name)
            if value is not None:
                whole_number(value, f"Keep: {name} (leave it out to keep all)")
        if self.best is not None:
            must_be(self.best, Best, "Keep: best", "ckpt.Best('loss')")


Metrics = Mapping[str, float]


def doomed(
    keep: Keep,
    line: Lineage,
    steps: Iterable[StepId],
    *,
    metrics: Mapping[StepId, Metrics] | None = None,
    pinned: Collection[StepId] = (),
) -> list[StepId]:
    """The committed `steps` of a tier that may be deleted, ascending.

    Never among them: the newest that counts (if none does, the newest of the newest branch), the
    fork point of the newest branch until two steps of that branch count, what is `pinned`, what
    Orbax wrote, and what attempts wrote that are newer than the lineage.

    Args:
        line: the lineage of the attempt that asks.
        metrics: figures by step. Only steps of the lineage can be the best: what a branch reached
            that was left says nothing of the run as it is now. A step without a finite figure is
            not among the best.
        pinned: all that is to stay for other reasons.
    """
    there = list(steps)
    counted = counting(line, there)
    left = abandoned(line, there)
    go = {
        *_surplus(keep, counted, metrics or {}),
        *(step for branch in _surplus_branches(keep, left) for step in left[branch]),
    }
    stay = {*pinned, *fork_points(line, counted)}
    if counted:
        stay.add(counted[-1])
    elif left:
        stay.add(left[max(left)][-1])
    return sorted(step for step in go - stay if step.attempt)


def _surplus(
    keep: Keep, counted: Sequence[StepId], metrics: Mapping[StepId, Metrics]
) -> set[StepId]:
    """The counting steps that no rule asks for."""
    if keep.last is None and keep.every is None and keep.best is None:
        return set()
    stay: set[StepId] = set()
    if keep.last is not None:
        stay |= set(counted[-keep.last :])
    if keep.every is not None:
        stay |= {step for step in counted if step.step % keep.every == 0}
    if keep.best is not None:
        stay |= set(best(keep.best, counted, metrics))
    return set(counted) - stay


def _surplus_branches(keep: Keep, left: Collection[int]) -> list[int]:
    """The abandoned branches beyond the newest `keep.branches`."""
    if keep.branches is None:
        return []
    return sorted(left, reverse=True)[keep.branches :]


def abandoned(line: Lineage, steps: Iterable[StepId]) -> dict[int, list[StepId]]:
    """The steps that do not count, by branch, ascending.

    Not among them: what Orbax wrote, and what is newer than the lineage, of which it can tell
    nothing.
    """
    newest = line[0].attempt if line else 0
    there = [step for step in steps if 0 < step.attempt <= newest]
    count = set(counting(line, there))
    found: dict[int, list[StepId]] = {}
    for step in sorted(there):
        if step not in count:
            found.setdefault(step.branch, []).append(step)
    return found


def fork_points(line: Lineage, steps: Sequence[StepId]) -> set[StepId]:
    """The step at which the newest branch forked, while fewer than two of its steps count.

    Args:
        steps: those that count, ascending.
    """
    if not line or line[0].after < 0:
        return set()
    branch = line[0].branch
    own = [step for step in steps if step.branch == branch]
    if len(own) >= 2:
        return set()
    before = [step for step in steps if step.branch != branch]
    return {before[-1]} if before else set()


def why_kept(
    line: Lineage, steps: Iterable[StepId], step: StepId, pinned: Collection[StepId]
) -> str | None:
    """Why not even the user may delete a step; None when nothing is against it."""
    counted = counting(line, steps)
    if counted and step == counted[-1]:
        return "is the newest of the run; rewind() before deleting it"
    if not step.attempt:
        return "was written by Orbax, and is not ours to delete"
    if step in pinned:
        return "is pinned; ckpt.unpin() it before deleting it"
    if step in fork_points(line, counted):
        return (
            f"is where branch {line[0].branch} forked, which has fewer than two steps; save "
            "another one before deleting it"
        )
    return None


def best(policy: Best, steps: Iterable[StepId], metrics: Mapping[StepId, Metrics]) -> list[StepId]:
    """The best steps by `policy`, best first."""
    sign = 1.0 if policy.mode == "min" else -1.0
    known = [
        (sign * value, -step.step, step)
        for step in steps
        if math.isfinite(value := metrics.get(step, {}).get(policy.metric, math.nan))
    ]
    return [step for _, _, step in sorted(known)[: policy.count]]

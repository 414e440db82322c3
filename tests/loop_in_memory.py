"""A manager in memory, and what a run trains against it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckpt.errors import NotFound
from ckpt.loading import Loading
from ckpt.processes import TIMEOUT_S, Alone, Processes
from ckpt.retention import Keep
from ckpt.run import Run
from ckpt.spike import SpikeGuard
from ckpt.tiers import Shared, Tiers

GUARD = SpikeGuard(
    window=16,
    warm_up=8,
    cool_down=3,
    consecutive=2,
    margin=4,
    skip_before=2,
    skip_after=6,
    max_rewinds=3,
)


class Batches:
    """Batch k holds the number k of the plan; `bad` numbers make the loss spike."""

    batch_size = 1

    def __init__(self, length: int = 10_000) -> None:
        self.length, self.next, self.skips = length, 0, []  # type: ignore[var-annotated]

    def skip(self, ranges: Any) -> None:
        raise AssertionError("the manager in memory puts them into `skips`")

    def span(self, state: Any, first: int, stop: int, skips: Any = ()) -> Any:
        raise AssertionError("the manager in memory counts them itself")

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> int:
        while any(first <= self.next < stop for first, stop in self.skips):
            self.next += 1
        if self.next >= self.length:
            raise StopIteration
        self.next += 1
        return self.next - 1

    def get_state(self) -> dict[str, Any]:
        return {"next": self.next, "skips": copy.deepcopy(self.skips)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.next, self.skips = state["next"], copy.deepcopy(state["skips"])

    def ahead(self, count: int) -> list[int]:
        twin = Batches(self.length)
        twin.set_state(self.get_state())
        return [next(twin) for _ in range(count)]


@dataclass
class Restored:
    step: int
    state: Any
    extra: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    guard: Any = None
    guard_before_rewind: Any = None


class Pending:
    def ended(self) -> bool:
        return True


class MemoryManager:
    """What `Run` uses of a manager, in memory. Survives its Run, as a store does."""

    def __init__(self, every: int = 5, keep: Keep | None = None) -> None:
        self.every = every
        self.tiers = Tiers.of([Shared("memory", every=every, keep=keep or Keep())])
        self.lineage: dict[int, tuple[Restored, dict[str, Any]]] = {}
        self.log: list[tuple[Any, ...]] = []
        self.skips: list[tuple[int, int]] = []
        self.reasons: list[str] = []
        self.guard_before_rewind: Any = None
        self.fails: BaseException | None = None
        self.refuses_rewind: BaseException | None = None
        self.notes: list[dict[str, Any]] = []
        self.processes: Processes = Alone()
        self.timeout_s = TIMEOUT_S

    def note(self, entry: dict[str, Any]) -> None:
        json.dumps(entry, allow_nan=False)
        self.notes.append(entry)

    def should_save(self, step: int) -> bool:
        return step % self.every == 0

    def all_steps(self) -> list[int]:
        return sorted(self.lineage)

    def wait_until_finished(self) -> None:
        self.log.append(("waited",))
        if self.fails:
            raise self.fails

    def save(
        self,
        step: int,
        state: Any,
        *,
        data: Any,
        metrics: Any,
        extra: Any,
        guard: Any,
        force: bool,
    ) -> Pending | None:
        if not (force or self.should_save(step)):
            return None
        assert step not in self.lineage
        assert all(isinstance(value, float) for value in metrics.values())
        state = jax.tree.map(np.array, state)
        self.lineage[step] = Restored(step, state, extra, metrics, guard), data.get_state()
        self.log.append(("saved", step))
        self.guard_before_rewind = None
        return Pending()

    def resume(self, *, like: Any, data: Any, must_exist: bool, loading: Loading) -> Restored:
        assert loading == Loading()
        if not self.lineage:
            if must_exist:
                raise NotFound("nothing")
            return Restored(0, like)
        return self._position(max(self.lineage), data)

    def rewind(
        self,
        to: int,
        *,
        skip_steps: range,
        reason: str,
        like: Any,
        data: Any,
        guard: Any,
        loading: Loading,
    ) -> Restored:
        assert loading == Loading()
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(like))
        if self.refuses_rewind:
            raise self.refuses_rewind
        self.log.append(("rewound", to, skip_steps))
        assert skip_steps.start > to, "the real one refuses what `to` has learnt from"
        self.reasons.append(reason)
        _, state = self.lineage[to]
        batches = Batches()
        batches.set_state(state)
        coming = batches.ahead(skip_steps.stop)
        picked = [coming[step - to - 1] for step in skip_steps if step > to]
        self.skips += [(number, number + 1) for number in picked]
        self.lineage = {step: it for step, it in self.lineage.items() if step <= to}
        self.guard_before_rewind = guard
        return self._position(to, data)

    def _position(self, step: int, data: Any) -> Restored:
        restored, state = self.lineage[step]
        data.set_state(state)
        data.skips = sorted({*map(tuple, data.skips), *self.skips})
        restored = copy.deepcopy(restored)
        restored.guard_before_rewind = self.guard_before_rewind
        return restored


def start() -> dict[str, Any]:
    return {"sum": jnp.zeros(4, jnp.int32), "poison": jnp.float32(0)}


def plain(state: Any) -> dict[str, Any]:
    return {"sum": np.asarray(state["sum"]).tolist(), "poison": float(state["poison"])}


def train(state: Any, batch: int, bad: frozenset[int]) -> tuple[Any, jax.Array]:
    """Any order of batches gives another `sum`; a bad batch leaves the loss high for long."""
    folded = (jnp.asarray(state["sum"]) * 31 + batch) % 100_003
    poison = jnp.float32(np.float32(state["poison"]) * np.float32(0.9) + 9 * (batch in bad))
    loss = 2.0 + 0.1 * (batch % 3) + poison
    return {**state, "sum": folded, "poison": poison}, loss


def run_to(
    manager: Any,
    steps: int,
    *,
    bad: frozenset[int] = frozenset(),
    guard: SpikeGuard | None = GUARD,
    data: Batches | None = None,
    crash_after: int | None = None,
) -> tuple[Run, Batches]:
    data = data or Batches()
    done = 0
    with Run(manager, start(), data, steps=steps, guard=guard) as run:
        for _, batch in run:
            new_state, loss = train(run.state, batch, bad)
            run.update(new_state, loss=loss)
            done += 1
            if done == crash_after:
                raise KeyboardInterrupt
    return run, data


def reference(steps: int, skipped: set[int], bad: frozenset[int] = frozenset()) -> dict[str, Any]:
    data = Batches()
    data.skips = [(number, number + 1) for number in sorted(skipped)]
    run, _ = run_to(MemoryManager(), steps, data=data, bad=bad, guard=None)
    return plain(run.state)


class Unreadable:
    def __float__(self) -> float:
        raise AssertionError("read too early")

"""Keepers under watch, and tiers in memory for them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckpt import log
from ckpt.errors import StoreFailed
from ckpt.keeping import Keeper
from ckpt.lineage import Lineage, Reach, StepId
from ckpt.messages import Failed, Report, Said
from ckpt.retention import Keep
from ckpt.store import FileStore, Store

WAIT_S = 60


def one(number: int) -> StepId:
    return StepId(number, 1, 1)


LINE: Lineage = (Reach(1, 1, -1, None),)


class Held:
    """A tier in memory. With the gate closed, deletions hang."""

    on_host = False

    def __init__(self, keep: Keep, steps: Collection[StepId] = ()) -> None:
        self.keep = keep
        self.there = set(steps)
        self.figures: dict[StepId, Mapping[str, float]] = {}
        self.queued: set[StepId] = set()
        self.asked: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fails: dict[StepId, Exception] = {}

    def steps(self) -> Sequence[StepId]:
        self.asked["steps"] += 1
        return sorted(self.there)

    def metrics(self, step: StepId) -> Mapping[str, float]:
        self.asked[f"metrics of {step.step}"] += 1
        return self.figures.get(step, {})

    def delete(self, step: StepId, owner: int) -> None:
        self.entered.set()
        assert self.gate.wait(WAIT_S), "nobody opened the gate"
        if step in self.fails:
            raise self.fails[step]
        self.there.discard(step)

    def kept(self) -> Collection[StepId]:
        return self.queued


class Watched:
    """Keepers, and what they told."""

    def __init__(self) -> None:
        self.told: list[Report] = []
        self.keepers: list[Keeper] = []

    def keeper(self, home: Any, places: Mapping[str, Any], **how: Any) -> Keeper:
        keeper = Keeper(home, places, self.told.append, **how)
        self.keepers.append(keeper)
        return keeper

    @property
    def failed(self) -> list[BaseException]:
        return [each.error for each in self.told if isinstance(each, Failed)]

    @property
    def warnings(self) -> list[str]:
        return [each.text for each in self.told if isinstance(each, Said) and each.level > 20]


def events(home: Store, attempt: int = 1) -> list[tuple[Any, ...]]:
    """(kind, step number) of each line."""
    found = log.read(home, attempt)
    assert found.unreadable == 0
    return [(event.kind, event.members.get("step")) for event in found.events]


def begun(watched: Watched, home: Any, places: Mapping[str, Any], **how: Any) -> Keeper:
    keeper = watched.keeper(home, places, **how)
    keeper.begin(1, LINE)
    return keeper


def settled(keeper: Keeper, timeout_s: float = WAIT_S) -> bool:
    """Wait until all is done that was queued before; False when that takes longer."""
    done = threading.Event()
    keeper.settle(done.set)
    return done.wait(timeout_s)


class Unreachable:
    """A store that can be down."""

    def __init__(self, inner: FileStore) -> None:
        self.inner = inner
        self.location = inner.location
        self.down = False

    def __getattr__(self, name: str) -> Any:
        if self.down:
            raise StoreFailed(f"{name}: nobody answers")
        return getattr(self.inner, name)

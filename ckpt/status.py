"""How the saves of a manager are doing, as `CheckpointManager.status()` tells it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

from ckpt.lineage import Lineage, StepId, counts
from ckpt.messages import Trouble


@dataclass(frozen=True)
class TierStatus:
    """One tier."""

    newest: int | None = None
    """The newest step that this manager has brought there, or has gone on from."""
    under_way: int = 0
    """Saves that are not there yet."""
    failing_since_ns: int | None = None
    """Since when (ns since 1970) nothing gets there; None: it works."""
    error: str = ""
    """What it says."""

    @property
    def works(self) -> bool:
        """Nothing is known against it."""
        return self.failing_since_ns is None


@dataclass(frozen=True)
class Status:
    """All tiers and the writer."""

    attempt: int | None
    """That owns the run as far as this manager knows; None before the first start."""
    tiers: dict[str, TierStatus] = field(default_factory=dict)
    writer: str = "process"
    """ "process" or "thread"."""
    writer_pid: int | None = None
    writer_restarts: int = 0
    slots: int = 0
    """Of the arena; 0 before the first start."""
    slots_free: int = 0
    skipped: int = 0
    """Saves that were left out because no slot was free."""

    @property
    def degraded(self) -> bool:
        """Does a tier fail that is still being tried, or has memory no room for what it keeps?"""
        return any(not tier.works for tier in self.tiers.values())


@final
class Progress:
    """What each tier has got, and what ails it. Thread-safe: reports come from other threads.

    Args:
        tiers: their names, nearest first.
    """

    def __init__(self, tiers: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._line: Lineage | None = None
        self._newest: dict[str, StepId | None] = dict.fromkeys(tiers)
        self._failed: StepId | None = None
        self._troubles: dict[str, Trouble] = {}

    def begin(self, line: Lineage, newest: Mapping[str, StepId | None]) -> None:
        """An attempt has decided: what other branches reached says nothing any more.

        Args:
            newest: of each tier, of the steps that count from now on.
        """
        with self._lock:
            self._line = line
            self._newest = {tier: newest.get(tier) for tier in self._newest}
            self._failed = None

    def reached(self, step: StepId, tier: str) -> None:
        """A tier has a step."""
        with self._lock:
            before = self._newest[tier]
            if self._counts(step) and (before is None or before < step):
                self._newest[tier] = step

    def failed(self, step: StepId) -> None:
        """A durable tier will not have it."""
        with self._lock:
            if self._counts(step) and (self._failed is None or self._failed < step):
                self._failed = step

    def trouble(self, report: Trouble) -> None:
        """A tier fails and is tried again; without a text: it works again."""
        with self._lock:
            self._troubles.pop(report.tier, None)
            if report.text:
                self._troubles[report.tier] = report

    def falls_short(self, report: Trouble) -> None:
        """A tier goes on with less than it was to have; there is nothing to be tried again."""
        with self._lock:
            self._troubles[report.tier] = report

    def newest(self, tier: str) -> StepId | None:
        """The newest step there."""
        with self._lock:
            return self._newest.get(tier)

    def troubles(self, tiers: Container[str]) -> str:
        """All that is known against some tiers, in words."""
        with self._lock:
            return "; ".join(
                f"{tier}: {each.text}" for tier, each in self._troubles.items() if tier in tiers
            )

    def is_behind(self, memory: str) -> bool:
        """Is there a newer step in the tier `memory`, or one that failed, than in all others?"""
        with self._lock:
            durable = [step for tier, step in self._newest.items() if tier != memory and step]
            copied = [step for step in (self._newest.get(memory), self._failed) if step]
        return max(copied, default=_NONE) > max(durable, default=_NONE)

    def tiers(self, under_way: Mapping[str, int]) -> dict[str, TierStatus]:
        """All of them, given how many saves are under way to each."""
        with self._lock:
            found = {}
            for tier, step in self._newest.items():
                number = None if step is None else step.step
                found[tier] = TierStatus(number, under_way.get(tier, 0))
                if (trouble := self._troubles.get(tier)) is not None:
                    found[tier] = dataclasses.replace(
                        found[tier], failing_since_ns=trouble.since_ns, error=trouble.text
                    )
        return found

    def _counts(self, step: StepId) -> bool:
        return self._line is None or counts(self._line, step)


_NONE = StepId(-1, 0, 0)

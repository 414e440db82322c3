"""How the saves of a manager are doing, as `CheckpointManager.status()` tells it."""

from __future__ import annotations

from dataclasses import dataclass, field


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
        """Does a tier fail that is still being tried?"""
        return any(not tier.works for tier in self.tiers.values())

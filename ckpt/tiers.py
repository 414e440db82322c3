"""Where snapshots go, how often, and what stays there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ckpt.errors import Misuse
from ckpt.retention import Keep


@dataclass(frozen=True)
class Shared:
    """A tier that holds steps, reachable by all processes."""

    location: str | os.PathLike[str]
    every: int = 1
    """Save the steps that are multiples of this."""
    keep: Keep = field(default_factory=Keep)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise Misuse(f"Shared(every={self.every}): wanted at least 1")

"""Where snapshots go, how often, and what stays there."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from ckpt.arguments import must_be, whole_number
from ckpt.errors import Misuse
from ckpt.retention import Keep
from ckpt.store import check_location


@dataclass(frozen=True)
class Shared:
    """A tier that holds steps, reachable by all processes."""

    location: str | os.PathLike[str]
    every: int = 1
    """Save the steps that are multiples of this."""
    keep: Keep = field(default_factory=Keep)
    compression: Literal["zstd"] | None = None
    """How the chunks of steps are stored there. Compressing takes up to four cores in the
    background and, until the step is written, memory beside the arena: what the compressed step
    takes, and a few chunks while it is made. It pays where the store is slow, or values repeat;
    float weights shrink by less than a tenth. Steps say themselves how they are stored: a run may
    change it from one start to the next, in all its processes."""

    def __post_init__(self) -> None:
        check_location(self.location)
        whole_number(self.every, "Shared: every")
        must_be(self.keep, Keep, "Shared: keep", "ckpt.Keep(...), such as Keep(last=3)")
        if self.compression not in (None, "zstd"):
            raise Misuse(f"Shared(compression={self.compression!r}): wanted 'zstd' or None")

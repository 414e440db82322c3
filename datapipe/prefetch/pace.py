"""How far to work ahead of the trainer, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from datapipe.integers import integer
from formats.errors import Misuse

_LIMITS: Final = {
    "prefetch": (0, 1 << 20),
    "window": (1, 1 << 20),
    "threads": (1, 1 << 10),
    "workers": (0, 1 << 10),
}
_WINDOW_OF_WORKERS: Final = 1024


@dataclass(frozen=True)
class Pace:
    """How far to work ahead, and with what; see `Pipeline.iterator`.

    Raises:
      Misuse: an argument is out of range.
    """

    prefetch: int = 2
    window: int = 16
    threads: int = 1
    workers: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            object.__setattr__(self, name, integer(name, getattr(self, name), least, most))
        if self.workers and self.threads > 1:
            raise Misuse(
                f"threads={self.threads} with workers={self.workers}: workers make one batch at a "
                "time each; take more workers instead of threads"
            )
        if self.workers and self.window > _WINDOW_OF_WORKERS:
            raise Misuse(
                f"window={self.window} with workers: at most {_WINDOW_OF_WORKERS} batches, since "
                "each worker has two windows"
            )

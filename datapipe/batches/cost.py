"""What a batch cost: seconds by stage, records, bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

STAGES: Final = ("reading", "functions", "stacking", "placing")


@dataclass
class Cost:
    """What making one batch took, by stage, in seconds of wall time; or a sum over batches.

    records: rows of the batch.
    size_bytes: of the batch on the host.
    """

    records: int = 0
    size_bytes: int = 0
    reading_s: float = 0.0
    functions_s: float = 0.0
    stacking_s: float = 0.0
    placing_s: float = 0.0

    def of(self, stage: str) -> _Stopwatch:
        """A context manager that adds the time of its block to a stage, one of `STAGES`."""
        return _Stopwatch(self, stage)

    def add_time(self, stage: str, seconds: float) -> None:
        """Adds to the time of a stage."""
        setattr(self, f"{stage}_s", getattr(self, f"{stage}_s") + seconds)

    def add(self, other: Cost) -> None:
        """Adds another cost."""
        self.records += other.records
        self.size_bytes += other.size_bytes
        self.reading_s += other.reading_s
        self.functions_s += other.functions_s
        self.stacking_s += other.stacking_s
        self.placing_s += other.placing_s

    @property
    def longest(self) -> str:
        """The stage that took most."""
        return max(STAGES, key=lambda stage: float(getattr(self, f"{stage}_s")))


class _Stopwatch:
    """See `Cost.of`. A generator would make a small batch a tenth slower."""

    __slots__ = ("_cost", "_stage", "_start")

    def __init__(self, cost: Cost, stage: str) -> None:
        self._cost = cost
        self._stage = stage

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self._cost.add_time(self._stage, time.perf_counter() - self._start)

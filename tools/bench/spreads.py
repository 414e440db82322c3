"""Figures of several pairs: the median with the range, and ratios taken pair by pair."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest over the pairs."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, found: Sequence[float]) -> Spread:
        return cls(statistics.median(found), min(found), max(found))

    @classmethod
    def of_ratios(cls, ours: Sequence[float], others: Sequence[float]) -> Spread:
        return cls.of([a / b for a, b in zip(ours, others, strict=True)])

    def to_json(self) -> dict[str, float]:
        return asdict(self)

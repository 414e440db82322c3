"""All checks, in the order of a report."""

from __future__ import annotations

from typing import Final

from datapipe.conformance import belonging, counts, ending, packing, reading, resuming, skipping
from datapipe.conformance.check import Check

checks: Final[tuple[Check, ...]] = (
    *resuming.CHECKS,
    *counts.CHECKS,
    *belonging.CHECKS,
    *skipping.CHECKS,
    *packing.CHECKS,
    *reading.CHECKS,
    *ending.CHECKS,
)

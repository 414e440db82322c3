"""A training run's data as a pure function: exact shuffles, exact positions, exact skips."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datapipe.iterator import Iterator
    from datapipe.order.permute import Permutation
    from datapipe.order.plan import Plan
    from datapipe.pipeline import Pipeline
    from datapipe.prefetch.stats import Stats
    from datapipe.sources.grain_source import GrainSource
    from datapipe.sources.indexes import Kept
    from datapipe.sources.scanning import Where
    from datapipe.sources.stages import Concatenate, Pack
    from formats.errors import (
        BadRecord,
        Damaged,
        DataError,
        Mismatch,
        Misuse,
        NotFound,
        StoreFailed,
        Unsupported,
        WorkerFailed,
    )

_HOME = {
    "BadRecord": "formats.errors",
    "Concatenate": "datapipe.sources.stages",
    "Damaged": "formats.errors",
    "DataError": "formats.errors",
    "GrainSource": "datapipe.sources.grain_source",
    "Iterator": "datapipe.iterator",
    "Kept": "datapipe.sources.indexes",
    "Mismatch": "formats.errors",
    "Misuse": "formats.errors",
    "NotFound": "formats.errors",
    "Pack": "datapipe.sources.stages",
    "Permutation": "datapipe.order.permute",
    "Pipeline": "datapipe.pipeline",
    "Plan": "datapipe.order.plan",
    "Stats": "datapipe.prefetch.stats",
    "StoreFailed": "formats.errors",
    "Unsupported": "formats.errors",
    "Where": "datapipe.sources.scanning",
    "WorkerFailed": "formats.errors",
}

__all__ = [
    "BadRecord",
    "Concatenate",
    "Damaged",
    "DataError",
    "GrainSource",
    "Iterator",
    "Kept",
    "Mismatch",
    "Misuse",
    "NotFound",
    "Pack",
    "Permutation",
    "Pipeline",
    "Plan",
    "Stats",
    "StoreFailed",
    "Unsupported",
    "Where",
    "WorkerFailed",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

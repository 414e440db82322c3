"""A training run's data as a pure function: exact shuffles, exact positions, exact skips."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datapipe.grain_source import GrainSource
    from datapipe.indexes import Kept
    from datapipe.iterator import Iterator
    from datapipe.permute import Permutation
    from datapipe.pipeline import Pipeline
    from datapipe.plan import Plan
    from datapipe.scanning import Where
    from datapipe.stages import Concatenate, Pack
    from datapipe.stats import Stats
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
    "Concatenate": "datapipe.stages",
    "Damaged": "formats.errors",
    "DataError": "formats.errors",
    "GrainSource": "datapipe.grain_source",
    "Iterator": "datapipe.iterator",
    "Kept": "datapipe.indexes",
    "Mismatch": "formats.errors",
    "Misuse": "formats.errors",
    "NotFound": "formats.errors",
    "Pack": "datapipe.stages",
    "Permutation": "datapipe.permute",
    "Pipeline": "datapipe.pipeline",
    "Plan": "datapipe.plan",
    "Stats": "datapipe.stats",
    "StoreFailed": "formats.errors",
    "Unsupported": "formats.errors",
    "Where": "datapipe.scanning",
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

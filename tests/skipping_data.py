"""Iterators of a run whose batches are skipped, and the examples in ranges of them."""

from __future__ import annotations

from typing import Any

from memory_source import Columns

from datapipe import Pipeline


def iterator(batch_size: int, remainder: Any = "carry") -> Any:
    pipeline = Pipeline(Columns(97), batch_size=batch_size, seed=3, remainder=remainder)
    return pipeline.iterator(prefetch=0)


def members(ranges: Any) -> set[int]:
    return {example for start, stop in ranges for example in range(start, stop)}

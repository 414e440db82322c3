"""Pipelines whose files and weights change, and what is looked at of their iterators."""

from __future__ import annotations

from typing import Any

import numpy as np
from memory_source import Records

from datapipe import Pipeline
from formats.source import sealed


class Shards(Records):
    """A source of files in memory; its rows are its number and theirs."""

    def __init__(self, name: str, files: tuple[int, ...]) -> None:
        super().__init__(sum(files), name=name)
        self.files = files

    def read(self, indices: Any) -> Any:
        super().read(indices)
        return {"of": np.full(len(indices), ord(self.name[-1])), "id": np.array(indices)}

    def fingerprint(self) -> dict[str, Any]:
        files = [
            {"name": f"{self.name}-{number}", "records": count, "sample": f"{count}"}
            for number, count in enumerate(self.files)
        ]
        return sealed({"format": "memory", "records": self.count, "files": files})


def pipeline(
    files: dict[str, tuple[int, ...]] | None = None,
    weights: tuple[int, ...] = (3, 1),
    **options: Any,
) -> Pipeline:
    files = {"a": (20, 20), "b": (11,)} if files is None else files
    sources = {name: Shards(name, each) for name, each in files.items()}
    shares = dict(zip(sources, weights, strict=True))
    options = {"batch_size": 4, "seed": 3, **options}
    return Pipeline(sources, weights=shares, **options)


def opening(*args: Any, **options: Any) -> Any:
    return pipeline(*args, **options).iterator(prefetch=0, on_change="segment")


def rows(batch: Any) -> list[tuple[int, int]]:
    return list(zip((batch["of"] - ord("a")).tolist(), batch["id"].tolist(), strict=True))


def taken(iterator: Any, batches: int) -> list[tuple[int, int]]:
    return [row for _ in range(batches) for row in rows(next(iterator))]


def segments(iterator: Any) -> list[tuple[int, list[int], list[int]]]:
    found = iterator.get_state()["segments"]
    return [(each["first"], each["items"], each["counts"]) for each in found]

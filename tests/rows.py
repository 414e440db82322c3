"""A stream of examples 0, 1, 2, ... in batches of two, which can skip; the least a run needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Rows:
    """An iterator as the manager wants it, whose position and skips can be looked at."""

    batch_size = 2

    def __init__(self) -> None:
        self.next_example = 0
        self.skips: list[tuple[int, int]] = []

    def get_state(self) -> dict[str, Any]:
        return {"next_example": self.next_example, "skips": [list(s) for s in self.skips]}

    def set_state(self, state: dict[str, Any]) -> None:
        self.next_example = state["next_example"]
        self.skips = [(start, stop) for start, stop in state["skips"]]

    def skip(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.skips = sorted({*self.skips, *ranges})

    def span(
        self, state: dict[str, Any], first: int, stop: int, skips: Sequence[tuple[int, int]] = ()
    ) -> list[tuple[int, int]]:
        rows = Rows()
        rows.set_state(state)
        rows.skip(skips)
        batches = [rows.take() for _ in range(stop)][first:]
        return [(example, example + 1) for batch in batches for example in batch]

    def __next__(self) -> list[int]:
        return self.take()

    def take(self) -> list[int]:
        found: list[int] = []
        while len(found) < self.batch_size:
            if not any(start <= self.next_example < stop for start, stop in self.skips):
                found.append(self.next_example)
            self.next_example += 1
        return found

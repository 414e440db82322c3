"""Numbers in messages."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """`1 step`, `2 steps`, `1,000 leaves`; `many` where it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"

"""An iterator of nothing but a state."""

from __future__ import annotations

from typing import Any


class Stream:
    """An iterator with a state that a test chooses."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state

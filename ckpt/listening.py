"""For threads that listen to the board of a run beside the trainer, and end when it does."""

from __future__ import annotations

import threading
from typing import final
from weakref import WeakKeyDictionary

from ckpt.processes import Processes

_PIECE_S = 0.25
"""A thread that is to end looks up so often."""

_numbers: WeakKeyDictionary[Processes, int] = WeakKeyDictionary()


def number_on(board: Processes) -> int:
    """Keeps apart what follows one another on a board; all processes ask for the same."""
    _numbers[board] = _numbers.get(board, 0) + 1
    return _numbers[board]


class Ended(Exception):
    """The thread that asks is to end."""


@final
class Leaving(Processes):
    """A board on which nobody waits any longer once `ended` is set: `get` raises `Ended` then."""

    def __init__(self, board: Processes, ended: threading.Event) -> None:
        self._board, self._ended = board, ended
        self.index, self.count = board.index, board.count

    def put(self, key: str, text: str) -> None:
        self._board.put(key, text)

    def get(self, key: str, wait_s: float) -> str | None:
        while True:
            if self._ended.is_set():
                raise Ended
            text = self._board.get(key, min(wait_s, _PIECE_S))
            wait_s -= _PIECE_S
            if text is not None or wait_s <= 0:
                return text

    def below(self, prefix: str) -> dict[str, str]:
        return self._board.below(prefix)

    def remove(self, prefix: str) -> None:
        self._board.remove(prefix)

"""Threads that stand for the processes of a run, over a board in memory."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from ckpt.errors import PeerFailed
from ckpt.processes import Processes


class Board:
    """What the coordination service does, in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()
        self.most = 0
        """The most keys that there ever were."""
        self.gone = False
        self.questions = 0


class Member(Processes):
    """One of several threads that talk over a board; with a seed, slow and uneven ones."""

    def __init__(self, board: Board, index: int, count: int, seed: int | None = None) -> None:
        self.board, self.index, self.count = board, index, count
        self._rng = None if seed is None else random.Random(seed * 100 + index)

    def _reach(self) -> None:
        if self._rng is not None:
            time.sleep(self._rng.choice([0, 0, 0.0005, 0.003]))
        if self.board.gone:
            raise PeerFailed("the board is gone")

    def put(self, key: str, text: str) -> None:
        self._reach()
        with self.board.changed:
            self.board.texts[key] = text
            self.board.most = max(self.board.most, len(self.board.texts))
            self.board.changed.notify_all()

    def get(self, key: str, wait_s: float) -> str | None:
        self._reach()
        with self.board.changed:
            self.board.questions += 1
            self.board.changed.wait_for(lambda: key in self.board.texts, wait_s)
            return self.board.texts.get(key)

    def below(self, prefix: str) -> dict[str, str]:
        self._reach()
        with self.board.changed:
            return {
                key.rsplit("/", 1)[1]: text
                for key, text in self.board.texts.items()
                if key.startswith(f"{prefix}/")
            }

    def remove(self, prefix: str) -> None:
        self._reach()
        with self.board.changed:
            for key in [key for key in self.board.texts if key.startswith(f"{prefix}/")]:
                del self.board.texts[key]


def at_once(
    act: Callable[[Member], Any], count: int = 3, *, seed: int | None = None, board: Any = None
) -> list[Any]:
    """What `act` gives, or raises, in each of several members."""
    board = board or Board()
    found: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            found[index] = act(Member(board, index, count, seed))
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), f"stuck, seed {seed}"
    return found

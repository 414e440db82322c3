"""A board in memory, over which threads settle matters as processes do."""

from __future__ import annotations

import threading

from ckpt.processes import Processes


class Board:
    """What the coordination service does, in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()
        self.questions = 0


class Member(Processes):
    """One of several threads that talk over a board."""

    def __init__(self, board: Board, index: int, count: int) -> None:
        self.board, self.index, self.count = board, index, count

    def put(self, key: str, text: str) -> None:
        with self.board.changed:
            self.board.texts[key] = text
            self.board.changed.notify_all()

    def get(self, key: str, wait_s: float) -> str | None:
        with self.board.changed:
            self.board.questions += 1
            self.board.changed.wait_for(lambda: key in self.board.texts, wait_s)
            return self.board.texts.get(key)

    def below(self, prefix: str) -> dict[str, str]:
        with self.board.changed:
            return {
                key.rsplit("/", 1)[1]: text
                for key, text in self.board.texts.items()
                if key.startswith(f"{prefix}/")
            }

    def remove(self, prefix: str) -> None:
        with self.board.changed:
            for key in [key for key in self.board.texts if key.startswith(f"{prefix}/")]:
                del self.board.texts[key]

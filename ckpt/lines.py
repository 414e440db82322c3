"""Lines out of what a stream socket delivers, piece by piece."""

from __future__ import annotations

from typing import final

from ckpt.errors import Damaged

LINE_LIMIT_BYTES = 64 * 2**20
"""No message comes near this."""


@final
class Lines:
    """Puts pieces together; a line that was not ended is never given out."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._begun = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are complete now.

        Raises:
            Damaged: one is longer than any message.
        """
        *ended, rest = data.split(b"\n")
        if ended:
            ended[0] = bytes(self._begun) + ended[0]
            self._begun.clear()
        self._begun += rest
        if max(map(len, [*ended, self._begun])) > self._limit_bytes:
            raise Damaged(f"a message of more than {self._limit_bytes} bytes: it cannot be one")
        return ended

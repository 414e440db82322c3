"""What is to be written, in one buffer or window by window: an image need not fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final


class Windows(Protocol):
    """Bytes that come in pieces, from several threads at a time."""

    @property
    def size_bytes(self) -> int: ...

    def window(self, start: int, stop: int) -> memoryview:
        """The bytes from `start` to `stop`; at a page of memory if `start` is that of a file."""


Source = memoryview | Windows


def size_of(source: Source) -> int:
    """In bytes."""
    return source.nbytes if isinstance(source, memoryview) else source.size_bytes


def window_of(source: Source, start: int, stop: int) -> memoryview:
    """Some bytes of it."""
    if isinstance(source, memoryview):
        return source.cast("B")[start:stop]
    return source.window(start, stop)


@final
class Told:
    """A source of which somebody is told, each time that a window of it is asked for."""

    def __init__(self, source: Source, asked: Callable[[], None]) -> None:
        self._source = source
        self._asked = asked

    @property
    def size_bytes(self) -> int:
        return size_of(self._source)

    def window(self, start: int, stop: int) -> memoryview:
        self._asked()
        return window_of(self._source, start, stop)

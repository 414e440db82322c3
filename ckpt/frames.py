"""One chunk as one zstd frame, and out of it again; what is read is not trusted.

A chunk's length follows from its array. So a frame is refused that does not say this length, goes
on behind its end, or asks for more window than every reader grants; and what it says is never an
allocation.
"""

from __future__ import annotations

import threading
from typing import Any, Final, final

import xxhash

from ckpt.errors import Damaged

LEVEL: Final = 1
"""Of compression. Level 3 takes half as long again and saves nothing on weights."""

WINDOW_BYTES: Final = 8 << 20
"""The most that a frame may ask a reader to remember; RFC 8878 asks readers to grant as much."""

MOST_TIMES: Final = 32768
"""A frame holds at most so many times its length: 128 KiB in a block of 4 bytes."""

_MAGIC = b"\x28\xb5\x2f\xfd"
_PIECE_BYTES = 1 << 20
_CHECKSUM_BYTES = 4
_REPEATED, _RESERVED = 1, 3  # types of blocks


@final
class Inflater:
    """Takes chunks out of frames; for one thread at a time."""

    def __init__(self) -> None:
        import zstandard  # here: most commands and runs never meet a frame

        self._zstandard = zstandard
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)

    def into(self, target: memoryview, frame: memoryview) -> None:
        """Fill `target` (u8, the length of the chunk) from a frame; nothing beyond is written.

        Raises:
            Damaged: it is not one frame of exactly as many bytes. Names no place.
        """
        self._check(frame, len(target))
        try:
            reader = self._decompressor.stream_reader(frame, read_across_frames=False)
            found = reader.readinto(target)
            more = reader.read(1)
        except self._zstandard.ZstdError as error:
            raise Damaged(f"zstd frame: {error}") from error
        if found != len(target) or more:
            raise Damaged(f"zstd frame: wanted {len(target)} bytes, found {found}{'+' * len(more)}")

    def digest(self, frame: memoryview, nbytes: int) -> bytes:
        """The xxh3-128 of a chunk of `nbytes`, in little memory. Raises as `into`."""
        self._check(frame, nbytes)
        hasher, left = xxhash.xxh3_128(), nbytes
        piece = memoryview(bytearray(min(nbytes, _PIECE_BYTES)))
        try:
            reader = self._decompressor.stream_reader(frame, read_across_frames=False)
            while left and (found := reader.readinto(piece[: min(left, len(piece))])):
                hasher.update(piece[:found])
                left -= found
            more = reader.read(1)
        except self._zstandard.ZstdError as error:
            raise Damaged(f"zstd frame: {error}") from error
        if left or more:
            found = nbytes - left
            raise Damaged(f"zstd frame: wanted {nbytes} bytes, found {found}{'+' * len(more)}")
        return hasher.digest()

    def _check(self, frame: memoryview, nbytes: int) -> None:
        try:
            found: Any = self._zstandard.get_frame_parameters(frame)
            header_bytes = self._zstandard.frame_header_size(frame)
        except self._zstandard.ZstdError as error:
            raise Damaged(f"zstd frame: {error}") from error
        if frame[:4] != _MAGIC or found.content_size != nbytes:
            raise Damaged(f"zstd frame: wanted one of {nbytes} bytes, says {found.content_size}")
        if found.dict_id or found.window_size > WINDOW_BYTES:
            raise Damaged(
                f"zstd frame: wanted no dictionary and a window of at most {WINDOW_BYTES} bytes, "
                f"found dictionary {found.dict_id} and a window of {found.window_size}"
            )
        end = _end_of_blocks(frame, header_bytes) + _CHECKSUM_BYTES * found.has_checksum
        if end != len(frame):
            raise Damaged(f"zstd frame: wanted its end at byte {len(frame)}, found it at {end}")


class _Here(threading.local):
    inflater: Inflater | None = None


_here = _Here()


def inflater() -> Inflater:
    """The one of this thread; making one takes longer than a small chunk does."""
    if _here.inflater is None:
        _here.inflater = Inflater()
    return _here.inflater


def _end_of_blocks(frame: memoryview, at: int) -> int:
    """First byte behind the last block, or any number beyond the frame if there is no such."""
    last = 0
    while not last and at < len(frame):
        header = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED:
            break
        at += 3 + (1 if kind == _REPEATED else size)
    return at if last else len(frame) + 1

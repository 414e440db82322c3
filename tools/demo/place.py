"""Where the demo works and where its picture goes: looked at before anything runs."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from ckpt.errors import StoreFailed

ROOM_BYTES = 256 << 20
"""What has to be free: corpus, checkpoints of both runs and compiled code, and then some."""

_FULL_BYTES = 16 << 20
"""With less than a step needs to spare, a failure is put down to the full disk."""


def prepared(directory: Path | None, picture: Path) -> Path:
    """The directory to work in, made if need be; a temporary one without `directory`.

    picture: file that is going to be written; what is there already is left as it is.

    Raises:
        ValueError: there is something in the directory.
        StoreFailed: it, or the place of the picture, cannot be written, or has no room.
    """
    made = None
    try:
        if directory is not None:
            if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
                message = "wanted a new or empty directory, found something in it"
                raise ValueError(f"{directory}: {message}")
            directory.mkdir(parents=True, exist_ok=True)
        _probe(picture)
        place = directory
        if place is None:
            place = made = Path(tempfile.mkdtemp(prefix="lastgood-demo-"))
        free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        if made is not None:
            made.rmdir()
        where = error.filename or directory or picture.parent
        raise StoreFailed(
            f"{where}: the demo cannot write there: {error.strerror or error}; "
            "give --dir a directory that can be written"
        ) from error
    if free_bytes < ROOM_BYTES:
        if made is not None:
            made.rmdir()
        raise StoreFailed(
            f"{place}: the demo needs {ROOM_BYTES >> 20} MiB, found {free_bytes >> 20} MiB free; "
            "make room, or give --dir a directory on another disk"
        )
    return place


def is_full(place: Path, error: Exception) -> bool:
    """Whether an error came because hardly anything can be written there any more."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    try:
        return shutil.disk_usage(place).free < _FULL_BYTES
    except OSError:
        return False


def _probe(picture: Path) -> None:
    """Write what a picture takes beside it, and open it if it is there. Leaves nothing behind."""
    if picture.exists():
        picture.open("ab").close()
    with tempfile.TemporaryFile(dir=picture.parent) as probe:
        probe.write(bytes(1 << 18))
        probe.flush()
        os.fsync(probe.fileno())

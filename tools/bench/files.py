"""Files of a checkpoint: how many bytes they take, and whether the page cache has them."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_PROBES = 64  # per file


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A new directory in `directory`, removed at the end with all that is in it."""
    place = directory / "lastgood-bench"
    place.mkdir(parents=True)
    try:
        yield place
    finally:
        shutil.rmtree(place)


@contextlib.contextmanager
def memory(place: Path) -> Iterator[Path]:
    """A new directory in shared memory, removed at the end; where there is none, in `place`."""
    parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else place
    with tempfile.TemporaryDirectory(prefix="lastgood-bench-", dir=parent) as name:
        yield Path(name)


def tree(directory: Path) -> Iterator[Path]:
    """All files below a directory."""
    for parent, _, names in os.walk(directory):
        yield from (Path(parent) / name for name in names)


def size_bytes(directory: Path) -> int:
    """What the files below a directory occupy."""
    return sum(512 * os.lstat(path).st_blocks for path in tree(directory))


def drop_cache(directory: Path) -> str:
    """Ask the system to forget the pages of these files; returns `cold`, or what is left."""
    for path in tree(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return cache_state(directory)


def cache_state(directory: Path) -> str:
    """`cold`, `warm`, or the share of probed pages that are in the page cache."""
    found = [hit for path in tree(directory) for hit in _probe(path)]
    if not found:
        return "unknown"
    share = sum(found) / len(found)
    return "cold" if share < 0.01 else "warm" if share > 0.99 else f"{share:.0%} warm"


def _probe(path: Path) -> Iterator[bool]:
    """For some pages of a file: would a read find it without waiting for the disk?"""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        step = max(4096, size // _PROBES // 4096 * 4096)
        for offset in range(0, size, step):
            try:
                os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
                yield True
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    return
                if error.errno != errno.EAGAIN:
                    raise
                yield False
    finally:
        os.close(descriptor)

"""What the machine can do with the same bytes: written by hand, without any library of ours."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tools.bench import files

_WINDOW_BYTES = 16 << 20
_PAGE_BYTES = 4096
_THREADS = 2


def measure(path: Path, nbytes: int) -> dict[str, float | str]:
    """Seconds to write, read and copy `nbytes`, rounded up to pages; the file is removed.

    write_s: O_DIRECT from warm pages by two threads, with fsync (`write` says if buffered);
    read_s: `preadv` by two threads into fresh memory, page cache as in `read`;
    copy_s: into warm memory, by two threads.
    """
    nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
    source = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    source[:] = np.resize(np.frombuffer(os.urandom(1 << 20), np.uint8), nbytes)
    try:
        write_s, how = _write(path, source)
        state = files.drop_cache(path.parent)
        read_s = _read(path, nbytes)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return {
        "write_s": write_s,
        "write": how,
        "read_s": read_s,
        "read": state,
        "copy_s": _copy(source),
    }


def read_written(path: Path, nbytes: int) -> float:
    """Seconds to read `nbytes` that were just written into fresh memory, by two threads.

    Out of a file in shared memory this is the bare copy. The file is removed.
    """
    nbytes = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
    try:
        np.resize(np.frombuffer(os.urandom(1 << 20), np.uint8), nbytes).tofile(path)
        return _read(path, nbytes)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _write(path: Path, source: np.ndarray) -> tuple[float, str]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    begun = time.perf_counter()
    try:
        descriptor, how = os.open(path, flags | os.O_DIRECT, 0o600), "O_DIRECT"
    except OSError:
        descriptor, how = os.open(path, flags, 0o600), "buffered"
    try:
        with contextlib.suppress(OSError):
            os.posix_fallocate(descriptor, 0, source.nbytes)
        view = memoryview(source.data)

        def window(start: int) -> None:
            stop = min(start + _WINDOW_BYTES, source.nbytes)
            while start < stop:
                start += os.pwrite(descriptor, view[start:stop], start)

        _in_threads(window, source.nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - begun, how


def _read(path: Path, nbytes: int) -> float:
    descriptor = os.open(path, os.O_RDONLY)
    begun = time.perf_counter()
    try:
        target = memoryview(np.empty(nbytes, np.uint8).data)

        def window(start: int) -> None:
            stop = min(start + _WINDOW_BYTES, nbytes)
            while start < stop:
                start += os.preadv(descriptor, [target[start:stop]], start)

        _in_threads(window, nbytes)
        return time.perf_counter() - begun
    finally:
        os.close(descriptor)


def _copy(source: np.ndarray) -> float:
    target = np.frombuffer(mmap.mmap(-1, source.nbytes), np.uint8)
    target[:] = source  # warm

    def window(start: int) -> None:
        target[start : start + _WINDOW_BYTES] = source[start : start + _WINDOW_BYTES]

    begun = time.perf_counter()
    _in_threads(window, source.nbytes)
    return time.perf_counter() - begun


def _in_threads(window: Callable[[int], None], nbytes: int) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(window, range(0, nbytes, _WINDOW_BYTES)):
            pass

"""Reads of an image: past the page cache where that pays, and the same bytes in every case."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt import disk
from ckpt.errors import Damaged, StoreFailed
from ckpt.grid import PAGE_BYTES
from ckpt.open_images import FileImage

SIZE = (5 << 20) + 3 * 4096


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[Path, bytes]]:
    data = np.random.default_rng(5).bytes(SIZE)
    path = tmp_path / "image"
    path.write_bytes(data)
    yield path, data
    path.unlink()


def forget(path: Path) -> None:
    """Out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def paged(nbytes: int, shift: int = 0) -> np.ndarray:
    raw = np.empty(nbytes + PAGE_BYTES + shift, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES + shift
    return raw[start : start + nbytes]


class Calls:
    """Counts what is read through which descriptor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, image: FileImage) -> None:
        self.direct_bytes = self.buffered_bytes = 0
        real = os.preadv

        def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
            count = real(descriptor, buffers, offset, flags)
            if not flags:
                if descriptor == image._direct:
                    self.direct_bytes += count
                else:
                    self.buffered_bytes += count
            return count

        monkeypatch.setattr(os, "preadv", preadv)


def must_be_direct(path: Path) -> None:
    """Skip where the file system has no direct reads, or keeps what it was asked to forget."""
    forget(path)
    twin = path.with_name("twin")  # to ask may begin to read ahead
    twin.write_bytes(bytes(4096))
    forget(twin)
    descriptor = os.open(twin, os.O_RDONLY)
    direct = disk.open_direct(descriptor)
    cached = disk.is_cached(descriptor, 0)
    os.close(descriptor)
    twin.unlink()
    if direct >= 0:
        os.close(direct)
    if direct < 0 or cached:
        pytest.skip("a file system without direct reads")


@pytest.mark.parametrize(
    ("offset", "nbytes", "shift", "direct_bytes"),
    [
        (0, SIZE, 0, SIZE),
        (4096, (2 << 20) + 100, 0, 2 << 20),  # the rest of a page comes through the cache
        (4096, 2 << 20, 64, 0),  # a buffer between pages
        (4097, 2 << 20, 0, 0),  # a place between pages
        (8192, 4096, 0, 0),  # too little to pay
    ],
)
def test_what_is_not_cached_goes_past_the_cache(
    written: tuple[Path, bytes],
    monkeypatch: pytest.MonkeyPatch,
    offset: int,
    nbytes: int,
    shift: int,
    direct_bytes: int,
) -> None:
    path, data = written
    must_be_direct(path)
    target = paged(nbytes, shift)
    with FileImage(path) as image:
        calls = Calls(monkeypatch, image)
        image.read_into([(offset, memoryview(target.data))])
        assert calls.direct_bytes == direct_bytes
        assert calls.buffered_bytes == nbytes - direct_bytes
    assert target.tobytes() == data[offset : offset + nbytes]


def test_what_is_cached_comes_from_the_cache(
    written: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, data = written
    path.read_bytes()
    target = paged(SIZE)
    with FileImage(path) as image:
        calls = Calls(monkeypatch, image)
        image.read_into([(0, memoryview(target.data))])
        assert calls.direct_bytes == 0
    assert target.tobytes() == data


@pytest.mark.parametrize("refused", ["open", "read", "probe"])
def test_where_direct_reads_are_refused(
    written: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    path, data = written
    forget(path)
    target = paged(SIZE)
    real = os.preadv
    with FileImage(path) as image:
        if refused == "open":
            monkeypatch.setattr(disk, "open_direct", lambda descriptor: -1)

        def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
            if refused == "read" and descriptor == image._direct:
                raise OSError(errno.EINVAL, "planted")
            if refused == "probe" and flags:
                raise OSError(errno.EOPNOTSUPP, "planted")
            return real(descriptor, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", preadv)
        image.read_into([(0, memoryview(target.data))])
    assert target.tobytes() == data


def test_a_failing_disk_is_a_failing_store(
    written: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = written
    must_be_direct(path)
    real = os.preadv
    with FileImage(path) as image:

        def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
            if descriptor == image._direct:
                raise OSError(errno.EIO, "planted")
            return real(descriptor, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(StoreFailed, match="planted"):
            image.read_into([(0, memoryview(paged(SIZE).data))])


def test_a_file_that_was_cut_meanwhile_is_damaged(written: tuple[Path, bytes]) -> None:
    path, _ = written
    with FileImage(path) as image:
        os.truncate(path, (2 << 20) + 5)
        forget(path)
        with pytest.raises(Damaged, match="ends at byte 2097157, wanted bytes up to"):
            image.read_into([(0, memoryview(paged(SIZE).data))])


def test_descriptors_are_closed(written: tuple[Path, bytes]) -> None:
    path, _ = written
    must_be_direct(path)
    with FileImage(path) as image:
        image.read_into([(0, memoryview(paged(SIZE).data))])
        assert open_descriptors(path) == 2
    image.close()
    assert open_descriptors(path) == 0


def open_descriptors(path: Path) -> int:
    """Of this file: what other threads of the process open and close is no matter."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.path.samestat(os.stat(f"/proc/self/fd/{name}"), path.stat())
    return found

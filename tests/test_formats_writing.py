"""Files are written whole or not at all, and what the disk refuses is told by their name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import formats
from datapipe.sources import sidecar
from datapipe.sources.sidecar import Sidecar
from formats import StoreFailed

WRITERS: dict[str, Callable[[Path], object]] = {
    "array_record": lambda path: formats.write_array_record(path, [b"a", b"b"]),
    "arrow": lambda path: formats.write_arrow(path, {"x": [1, 2]}),
    "parquet": lambda path: formats.write_parquet(path, {"x": [1, 2]}),
    "sidecar": lambda path: sidecar.write(path, Sidecar("kept", 1, {}, {"ids": np.arange(2)})),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_the_disk_refuses_is_told(
    writer: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"as it was")

    def refused(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refused)
        with pytest.raises(StoreFailed, match=f"{path}: cannot be written .*No space left"):
            WRITERS[writer](path)
    assert path.read_bytes() == b"as it was"
    assert os.listdir(tmp_path) == ["file"]
    WRITERS[writer](path)
    assert path.read_bytes() != b"as it was"
    assert os.listdir(tmp_path) == ["file"]


def test_what_records_raise_is_theirs(tmp_path: Path) -> None:
    def records():
        yield b"a"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        formats.write_array_record(tmp_path / "file", records())
    assert not os.listdir(tmp_path)

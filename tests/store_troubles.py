"""Helpers of the tests of file stores: what lies in one, and system calls that fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.store import FileStore


def raw_files(root: Path) -> dict[str, bytes]:
    """Everything below a directory, temporary names too."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def fail_on(
    monkeypatch: pytest.MonkeyPatch, function: str, number: int, when: Callable[..., bool]
) -> None:
    """Let a function of `os` fail with an errno on calls that `when` picks."""
    real = getattr(os, function)

    def call(*args: Any, **options: Any) -> Any:
        if when(*args):
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    monkeypatch.setattr(os, function, call)


def writes_of(store: FileStore) -> dict[str, Callable[[], object]]:
    return {
        "put": lambda: store.put("a/x", b"new"),
        "put_many": lambda: store.put_many({"a/x": b"new", "a/z": b"new"}),
        "put_if_absent": lambda: store.put_if_absent("a/n", b"new"),
        "append": lambda: store.append("a/log", b"new"),
    }

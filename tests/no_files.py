"""What may lie where a file was wanted, and is none."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

KINDS = ("pipe", "directory", "socket", "device", "symbolic link")


def put_in_the_way(path: Path, kind: str, target: Path) -> None:
    """One of `KINDS` at a path where nothing is; a link leads to `target`."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        directory = os.open(path.parent, os.O_DIRECTORY)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{directory}/{path.name}")  # a longer path is refused
        os.close(directory)
    elif kind == "device":
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        assert kind == "symbolic link"
        path.symlink_to(target)


def remove(path: Path, kind: str) -> None:
    """What was put there."""
    if kind == "directory":
        path.rmdir()
    else:
        path.unlink()

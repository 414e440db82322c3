"""Slots of an arena with small images in them, and processes that meddle with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt import image, owning
from ckpt.arena import Arena, Slot
from ckpt.image import Plan
from ckpt.slot_files import SlotFiles
from ckpt.specs import ArraySpec, ShardSpec

OWNER = {"run": "runs/a"}


def plan_of(n: int, step: int) -> Plan:
    return image.plan(
        [ArraySpec("a", "int64", (n,), (n,))], [ShardSpec(0, (0,), (n,))], {"step": step}
    )


def put(arena: Arena, step: int, n: int = 100) -> Slot:
    plan = plan_of(n, step)
    slot = arena.claim(plan.size_bytes, timeout_s=0)
    image.fill(plan, slot.buffer, [np.arange(n) * step])
    slot.filled()
    return slot


def steps(arena: Arena) -> dict[int, int]:
    return {found.slot: found.header.meta["step"] for found in arena.valid_images()}


def child(code: str, *arguments: Any) -> subprocess.Popen[str]:
    """A Python process that runs `code`; its own session, so that nothing else is signalled."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def forked(path: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that opened the arena at `path`, ran `code` with it, and has a fork that sleeps.

    The fork has let go of what it inherited, and is ended behind.
    """
    parent = child(FORKING.format(code=code), path)
    assert parent.stdout is not None
    fork = int(parent.stdout.readline())
    try:
        yield parent
    finally:
        os.kill(fork, signal.SIGKILL)
        parent.communicate()


FORKING = """
import os, sys, time
from ckpt.arena import Arena
arena = Arena(sys.argv[1], owner={{"run": "forks"}}, slots=1)
{code}
pid = os.fork()
if pid == 0:
    print(os.getpid(), flush=True)  # by now it has let go of what it inherited
    time.sleep(60)
    os._exit(0)
sys.stdin.readline()
"""


class Place:
    """A place of so many bytes, for the slots of the arenas in a directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parent: Path, size_bytes: int) -> None:
        self.parent, self.size_bytes = parent, size_bytes
        monkeypatch.setattr(SlotFiles, "free_bytes", lambda _: self.free_bytes)
        monkeypatch.setattr(owning, "_free_bytes", lambda _: self.free_bytes)

    @property
    def free_bytes(self) -> int:
        slots = self.parent.rglob("slot-*")
        return self.size_bytes - sum(512 * slot.stat().st_blocks for slot in slots)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena(tmp_path / "arena", owner=OWNER)
    yield arena
    arena.close(remove=True)
    assert not (tmp_path / "arena").exists()

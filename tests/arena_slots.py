"""Slots of an arena with small images in them, and processes that meddle with them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np

from ckpt import image
from ckpt.arena import Arena, Slot
from ckpt.image import Plan
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

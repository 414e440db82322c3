"""Settings every test runs under: several CPU devices, strict dtypes, stacks dumped on a hang."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import contextlib
import faulthandler
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from ckpt.arena import stale_arenas

faulthandler.enable()

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No arena without a live owner and no child process is there when the tests are over."""
    shared = Path(f"/dev/shm/lastgood-{os.getuid()}")
    before = {arena.directory for arena in stale_arenas(shared)} if shared.is_dir() else set()
    yield
    if shared.is_dir():
        left = {arena.directory for arena in stale_arenas(shared)} - before
        assert not left, f"arenas left in shared memory: {left}"
        with contextlib.suppress(OSError):
            shared.rmdir()
    children = {pid: name for pid, name in _children() if "resource_tracker" not in name}
    assert not children, f"processes left: {children}"


def _children() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    yield int(entry.name), command

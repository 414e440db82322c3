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

from ckpt import tiers
from ckpt.manager import CheckpointManager
from ckpt.owning import stale_arenas

faulthandler.enable()

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("soak", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# A process takes a third of a second to start, and knows nothing of what a test has patched. Tests
# of the writer as a process say so; those that start trainers of their own have it in any case.
CheckpointManager.__init__.__kwdefaults__["writer"] = "thread"  # type: ignore[index]
tiers.PATIENCE_S = 0.0  # what fails shall be told at once


SHARED = Path(f"/dev/shm/lastgood-{os.getuid()}")
_before = pytest.StashKey[set[Path]]()


def _stale() -> set[Path]:
    return {arena.directory for arena in stale_arenas(SHARED)} if SHARED.is_dir() else set()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_before] = _stale()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """No arena without a live owner and no child process is there when all tests are over."""
    if hasattr(session.config, "workerinput"):
        return  # other workers may be in the middle of a kill
    left = [f"arena {path}" for path in _stale() - session.config.stash[_before]]
    left += [f"process {pid}: {name}" for pid, name in _children() if _is_ours(name)]
    with contextlib.suppress(OSError):
        SHARED.rmdir()
    if left:
        print("\nLeft behind:", *left, sep="\n  ")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _is_ours(command: str) -> bool:
    return "resource_tracker" not in command and "exec(eval(sys.stdin" not in command


def _children() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    yield int(entry.name), command

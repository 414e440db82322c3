"""File systems that are full, read-only, closed or without O_DIRECT, for real and not by a double.

Each scene is a process in a mount namespace of its own: when it ends, its mounts are gone.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disk_child import SCENES

_LIMIT_S = 120.0
_OTHER_USER = ("no access", "closed")


@functools.cache
def namespace(*, root: bool) -> tuple[str, ...]:
    """The command that begins a mount namespace; empty where this user can have none."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return ()
    ways = [("unshare", "-m")] if root else [("unshare", "-m"), ("unshare", "-Urm")]
    for way in ways:
        command = [*way, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return way
    return ()


@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene: str, tmp_path: Path) -> None:
    other_user = scene in _OTHER_USER
    if other_user and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    way = namespace(root=other_user)
    if not way:
        pytest.skip("this user cannot mount a file system of its own")
    here = Path(__file__).parent
    command = [*way, sys.executable, str(here / "disk_child.py"), scene, str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_LIMIT_S, env=_environment()
    )
    assert done.returncode == 0, done.stderr
    assert not os.path.ismount(tmp_path / "disk")


def _environment() -> dict[str, str]:
    here = Path(__file__).parent.parent
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"}

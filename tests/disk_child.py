"""What `test_real_disks.py` runs in a mount namespace of its own, so that no mount outlives it.

`python disk_child.py SCENE DIRECTORY`; it ends with an assertion where something is not as it must
be. The file systems are real: full, read-only, without O_DIRECT, or closed to this user.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.manager import CheckpointManager
from ckpt.store import FileStore

WORDS = 1 << 16
"""Of eight bytes, in the large leaf: half a MiB."""


def state_of(step: int, words: int = WORDS) -> dict[str, Any]:
    values = np.arange(words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(step)
    return {"large": values, "small": values[:5].astype(np.uint16), "step": step}


def must_be(step: int, found: Any, words: int = WORDS) -> None:
    wanted = state_of(step, words)
    assert found["step"] == step, found["step"]
    for name in ("large", "small"):
        assert found[name].tobytes() == wanted[name].tobytes(), f"step {step}: {name}"


def mount(kind: str, directory: Path, options: str = "") -> Path:
    directory.mkdir()
    given = ["-o", options] if options else []
    subprocess.run(["mount", "-t", kind, *given, kind, str(directory)], check=True)
    return directory


def trainer(root: Path, arena: Path) -> CheckpointManager:
    tier = ckpt.Shared(root, keep=ckpt.Keep(), patience_s=0)
    return CheckpointManager(tier, arena=arena, writer="thread")


def save(manager: CheckpointManager, step: int, words: int = WORDS) -> None:
    pending = manager.save(step, state_of(step, words))
    assert pending is not None
    pending.wait(timeout=60)


def fill(path: Path, leave_pages: int = 0) -> None:
    """Take all that is free, but for some pages."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate(max(0, file.tell() - 4096 * leave_pages))


def fills_up(place: Path) -> None:
    """Step after step until the disk is full: told, nothing lost, and it goes on with space."""
    disk = mount("tmpfs", place / "disk", "size=3m")
    root = disk / "run"
    with trainer(root, place / "arena") as manager:
        manager.resume()
        step, told = 0, ""
        while not told:
            try:
                save(manager, step + 1)
                step += 1
            except ckpt.StoreFailed as error:
                told = str(error)
        assert 2 <= step <= 5, step
        for part in ("No space left", "bytes are free", "keep fewer steps", str(root)):
            assert part in told, told
        must_be(step, ckpt.restore(root).state)
        assert ckpt.verify(root).intact
        assert ckpt.open(root).all_steps() == list(range(1, step + 1))
        manager.delete(1)
        save(manager, step + 2)
    with trainer(root, place / "arena") as manager:
        restored = manager.resume()
        assert restored.step == step + 2, restored.step
        must_be(step + 2, restored.state)
    report = ckpt.verify(root)
    assert (report.intact, report.unfinished) == (True, ()), report


def full_at_every_page(place: Path) -> None:
    """A start and a save with k free pages, for every k until there are enough."""
    disk = mount("tmpfs", place / "disk", "size=1m")
    root, filler, words = disk / "run", disk / "filler", 64
    with trainer(root, place / "arena") as manager:
        manager.resume()
        save(manager, 1, words)
    newest, failed, pages = 1, set[str](), 0
    while True:
        fill(filler, pages)
        enough = False
        try:
            with trainer(root, place / "arena") as manager:
                manager.resume()
                save(manager, newest + 1, words)
                newest, enough = newest + 1, True
        except ckpt.StoreFailed as error:
            if "No space left" not in str(error):
                raise
            failed.add(str(error).split(":", 1)[0].removeprefix(str(root)).split("/")[1])
            at = ckpt.restore(root)  # a reader needs no space
            assert at.step == newest, (pages, at.step)
            must_be(newest, at.state, words)
        filler.unlink()
        with trainer(root, place / "arena") as manager:
            restored = manager.resume()
            # Whatever was complete may have been published.
            assert restored.step - newest in (0, 1), (pages, restored.step, newest)
            must_be(restored.step, restored.state, words)
            save(manager, restored.step + 1, words)
            newest = restored.step + 1
            for old in manager.all_steps()[:-2]:
                manager.delete(old)
        report = ckpt.verify(root)
        assert (report.intact, report.unfinished) == (True, ()), (pages, report)
        if enough:
            break
        pages += 1
    assert pages > 8, pages
    assert {"attempts", "branch-1"} <= failed, failed


def read_only(place: Path) -> None:
    """Readers do not mind; a trainer is told, and goes on when it may write again."""
    disk = mount("tmpfs", place / "disk")
    root = disk / "run"
    with trainer(root, place / "arena") as manager:
        manager.resume()
        save(manager, 1)
    living = trainer(root, place / "arena")
    living.resume()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    must_be(1, ckpt.restore(root).state)
    assert ckpt.verify(root).intact
    assert ckpt.open(root).all_steps() == [1]
    must_be_told(lambda: save(living, 2), "Read-only file system")
    with trainer(root, place / "arena-2") as manager:
        must_be_told(manager.resume, "Read-only file system")
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    save(living, 3)
    living.close()
    with trainer(root, place / "arena") as manager:
        must_be(3, manager.resume().state)
    assert ckpt.verify(root).intact


def without_direct_writes(place: Path) -> None:
    """A file system that refuses O_DIRECT when a file is opened."""
    disk = mount("ramfs", place / "disk")
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(disk / "x", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    root = disk / "run"
    for start in (1, 3):
        with trainer(root, place / "arena") as manager:
            restored = manager.resume()
            if restored.step:
                must_be(restored.step, restored.state)
            for step in (start, start + 1):
                save(manager, step)
    must_be(4, ckpt.restore(root).state)
    assert ckpt.verify(root).intact


def no_access(place: Path) -> None:
    """Another user owns the run: what may be read is read, and that it may not be written told."""
    root = of_root() / "run"
    with trainer(root, place / "arena") as manager:
        manager.resume()
        save(manager, 1)
    become_nobody(root)
    must_be(1, ckpt.restore(root).state)
    must_be_told(lambda: FileStore(root).put("x", b""), "this user needs write access")
    with trainer(root, root.parent / "open/arena") as manager:
        must_be_told(manager.resume, "this user needs write access")


def closed(place: Path) -> None:
    """What lies in a directory that this user cannot enter is not absent."""
    root = of_root() / "run"
    with trainer(root, place / "arena") as manager:
        manager.resume()
        save(manager, 1)
    os.chmod(root / "branch-1", 0o700)
    become_nobody(root)
    must_be_told(lambda: ckpt.restore(root), "this user needs")
    must_be_told(lambda: ckpt.verify(root), "this user needs")
    os.chmod(root.parent / "open", 0)
    must_be_told(lambda: ckpt.restore(root.parent / "open/run"), "this user needs")


def of_root() -> Path:
    """A directory that everybody can reach; only this namespace sees what lies in it."""
    place = Path("/mnt")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(place)], check=True)
    return place


def become_nobody(root: Path) -> None:
    """From now on another user, who has a directory `open` beside the run."""
    ckpt.restore(root)  # imports what it needs: the other user may not reach the libraries
    ckpt.verify(root)
    (root.parent / "open").mkdir()
    os.chown(root.parent / "open", 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def must_be_told(act: Callable[[], object], text: str) -> None:
    with pytest.raises(ckpt.StoreFailed, match=text):
        act()


SCENES = {
    "fills up": fills_up,
    "full at every page": full_at_every_page,
    "read-only": read_only,
    "without direct writes": without_direct_writes,
    "no access": no_access,
    "closed": closed,
}

if __name__ == "__main__":
    SCENES[sys.argv[1]](Path(sys.argv[2]))

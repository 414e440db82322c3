"""A writer that is stopped (SIGSTOP) before each change of a tier, and wakes too late.

It publishes steps, and deletes those that retention gives up. Meanwhile another attempt has taken
the run over, has saved and has ended. What the old writer does then changes nothing that counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pauses.sitecustomize import PAUSE

import ckpt

LIMIT_S = 60.0
MOST = 80
"""More changes than a writer makes."""


def state_of(step: int, owner: int) -> dict[str, Any]:
    return {"w": np.random.default_rng((step, owner)).standard_normal(3000)}


def manager(root: Path, name: str, writer: Any = "thread") -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(
        ckpt.Memory(),
        ckpt.Local(root.with_name("local"), keep=ckpt.Keep(last=1, branches=0)),
        ckpt.Shared(root, keep=ckpt.Keep(last=1)),
        arena=root.with_name(name),
        writer=writer,
    )


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def disturb(root: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What the writer was about to do at its change number `nth`; None if it made fewer."""
    told = root.with_name("told")
    old, is_played = manager(root, "old", "process"), False
    with monkeypatch.context() as patch:
        hooks = str(Path(__file__).parent / "pauses")
        patch.syspath_prepend(hooks)
        patch.setenv(PAUSE, f"*:{nth}:{told}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(ckpt.Superseded))  # told once more at the end
            stack.enter_context(old)
            old.resume()
            pendings = [old.save(step, state_of(step, 1)) for step in (1, 2, 3)]
            end = time.monotonic() + LIMIT_S
            while not told.exists():
                ended = all(each is not None and each.ended() for each in pendings)
                if ended and told_nothing(old, told):
                    return None
                assert time.monotonic() < end
                time.sleep(0.005)
            pid = old.status().writer_pid
            assert pid is not None
            while not stopped(pid):
                time.sleep(0.002)
            acknowledged = [p.step for p in pendings if p is not None and p.ended() and not p.error]
            patch.delenv(PAUSE)
            with manager(root, "new") as new:
                restored = new.resume(like=state_of(0, 0))
                went_on_from = restored.step
                assert went_on_from >= max(acknowledged, default=0)
                for step in (went_on_from + 1, went_on_from + 2):
                    pending = new.save(step, state_of(step, 2))
                    assert pending is not None
                    pending.wait(timeout=LIMIT_S)
                new._saves.settle()
            steps = ckpt.open(root).all_steps()
            os.kill(pid, signal.SIGCONT)
            for pending in pendings:
                assert pending is not None
                assert pending.ended(LIMIT_S)
                if pending.step > went_on_from:
                    with pytest.raises(ckpt.Superseded):
                        pending.wait("shared")
            with pytest.raises(ckpt.Superseded):
                old.save(9, state_of(9, 1)).wait("shared", timeout=LIMIT_S)  # type: ignore[union-attr]
            is_played = True
    assert is_played
    what = told.read_text()
    reader = ckpt.open(root)
    assert reader.all_steps() == steps, what
    for step in steps:
        owner = 1 if step <= went_on_from else 2
        found = reader.restore(step).state["w"]
        np.testing.assert_array_equal(found, state_of(step, owner)["w"], err_msg=what)
    report = ckpt.verify(root)
    assert report.intact, f"{what}: {report.damage}"
    with manager(root, "next") as last:
        restored = last.resume(like=state_of(0, 0))
        assert (restored.step, restored.report.tier) == (went_on_from + 2, "local"), what
        np.testing.assert_array_equal(restored.state["w"], state_of(restored.step, 2)["w"], what)
        last._saves.settle()
    assert not [p for p in root.rglob("*") if "orbax-checkpoint-tmp" in p.name], what
    assert not list(root.with_name("local").rglob("*.tmp-*")), what
    assert len(list(root.with_name("local").rglob("*.image"))) <= 2, what
    return what


def told_nothing(old: ckpt.CheckpointManager, told: Path) -> bool:
    """Everything is done, be it in the log: the writer will make no further change."""
    settled = threading.Event()

    def settle() -> None:
        with contextlib.suppress(ckpt.CheckpointError):
            old._saves.settle()
            settled.set()

    asking = threading.Thread(target=settle, daemon=True)  # no answer comes while it is stopped
    asking.start()
    while asking.is_alive() and not told.exists():
        asking.join(0.005)
    return settled.is_set() and not told.exists()


def test_a_writer_that_was_paused_at_any_write_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for nth in range(1, MOST):
        what = disturb(tmp_path / str(nth) / "run", nth, monkeypatch)
        if what is None:
            break
        found.append(what.split()[0])
    else:
        pytest.fail(
            f"the writer made more than {MOST} changes, and not all were disturbed: {found}"
        )
    of_store = ("write_image", "put_many", "move", "append", "delete_tree")
    of_images = ("write", "delete")
    assert {
        *(f"FileStore.{name}" for name in of_store),
        *(f"LocalImages.{name}" for name in of_images),
    } <= set(found), found
    print(len(found), found)

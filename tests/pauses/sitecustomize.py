"""Makes a writer process stop in the middle of a chosen call, so that it can be killed there.

Python imports a module of this name at its start if it finds one. `LASTGOOD_TEST_PAUSE` is
`<class>.<method>:<which call of it>:<file that tells that it has come>`; there the writer sleeps
for a while. With `*` alone it is the so manieth change of a store or a Local tier, and the writer
stops there (SIGSTOP) until it is sent SIGCONT.
"""

import importlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

PAUSE = "LASTGOOD_TEST_PAUSE"
_LONG_S = 3.0
_MODULES = {"FileStore": "ckpt.store", "LocalImages": "ckpt.local"}


CHANGES = {
    "FileStore": (
        *("put_many", "put_if_absent", "delete", "delete_tree", "move", "write_image", "append"),
    ),
    "LocalImages": ("write", "delete", "clear"),
}


def stop_at(nth: int, told: Path) -> None:
    """Patch all methods that change something; before change number `nth` the process stops."""
    calls = 0
    lock = threading.Lock()

    def patched(original: Any) -> Any:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            with lock:
                calls += 1
                is_here = calls == nth
            if is_here:
                told.write_text(f"{original.__qualname__} {args[1:2]!r:.100}")
                os.kill(os.getpid(), signal.SIGSTOP)
            return original(*args, **kwargs)

        return act

    for owner, names in CHANGES.items():
        cls = getattr(importlib.import_module(_MODULES[owner]), owner)
        for name in names:
            setattr(cls, name, patched(getattr(cls, name)))


def pause_at(target: str, nth: int, told: Path) -> None:
    """Patch `target`: its call number `nth` tells that it has come, and sleeps before it acts."""
    owner, name = target.split(".")
    module = importlib.import_module(_MODULES[owner])
    cls = getattr(module, owner)
    original = getattr(cls, name)
    calls = 0

    def paused(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            told.touch()
            time.sleep(_LONG_S)
        return original(*args, **kwargs)

    setattr(cls, name, paused)


if os.environ.get(PAUSE) and "ckpt.writer_process" in sys.orig_argv:
    _target, _nth, _told = os.environ.pop(PAUSE).split(":")
    if _target == "*":
        stop_at(int(_nth), Path(_told))
    else:
        pause_at(_target, int(_nth), Path(_told))

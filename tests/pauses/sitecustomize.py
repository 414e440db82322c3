"""Makes a writer process stop in the middle of a chosen call, so that it can be killed there.

Python imports a module of this name at its start if it finds one. `LASTGOOD_TEST_PAUSE` is
`<class or module>.<name>:<which call of it>:<file that tells that it has come>`.
"""

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

PAUSE = "LASTGOOD_TEST_PAUSE"
_LONG_S = 3.0
_MODULES = {"FileStore": "ckpt.store", "LocalImages": "ckpt.local"}


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
    pause_at(_target, int(_nth), Path(_told))

"""Checkpoints for JAX training runs that restore exactly.

Names are resolved when they are first used, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.errors import AlreadyExists as AlreadyExists
    from ckpt.errors import CheckpointError as CheckpointError
    from ckpt.errors import Damaged as Damaged
    from ckpt.errors import InUse as InUse
    from ckpt.errors import Mismatch as Mismatch
    from ckpt.errors import Misuse as Misuse
    from ckpt.errors import NotFound as NotFound
    from ckpt.errors import PeerFailed as PeerFailed
    from ckpt.errors import StoreFailed as StoreFailed
    from ckpt.errors import Superseded as Superseded
    from ckpt.errors import Unsupported as Unsupported
    from ckpt.fit import Fit as Fit
    from ckpt.loading import Loading as Loading
    from ckpt.manager import CheckpointManager as CheckpointManager
    from ckpt.oneshot import metadata as metadata
    from ckpt.oneshot import open as open
    from ckpt.oneshot import pin as pin
    from ckpt.oneshot import restore as restore
    from ckpt.oneshot import rewind as rewind
    from ckpt.oneshot import save as save
    from ckpt.oneshot import unpin as unpin
    from ckpt.reader import Restored as Restored
    from ckpt.retention import Best as Best
    from ckpt.retention import Keep as Keep
    from ckpt.run import Run as Run
    from ckpt.spike import SpikeGuard as SpikeGuard
    from ckpt.spike import TooManyRewinds as TooManyRewinds
    from ckpt.status import Status as Status
    from ckpt.tiers import Local as Local
    from ckpt.tiers import Memory as Memory
    from ckpt.tiers import Shared as Shared
    from ckpt.verification import verify as verify

_HOMES = {
    "errors": (
        "AlreadyExists CheckpointError Damaged InUse Mismatch Misuse NotFound PeerFailed "
        "StoreFailed Superseded Unsupported"
    ),
    "fit": "Fit",
    "loading": "Loading",
    "manager": "CheckpointManager",
    "oneshot": "metadata open pin restore rewind save unpin",
    "reader": "Restored",
    "retention": "Best Keep",
    "run": "Run",
    "spike": "SpikeGuard TooManyRewinds",
    "status": "Status",
    "tiers": "Local Memory Shared",
    "verification": "verify",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ckpt.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

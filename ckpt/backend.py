"""A writer, in a thread or in a process: what a manager asks of it, and how it comes by one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from ckpt import flush, signals
from ckpt.local import LocalImages
from ckpt.messages import Setup, Tell, ToWriter
from ckpt.processes import Processes
from ckpt.store import Store
from ckpt.tiers import Durable, patience_of

WriterKind = Literal["process", "thread"]
GRACE_S = 30.0
"""How long the writer goes on after its trainer has died: what a platform leaves to a process."""


class Backend(Protocol):
    """A writer, in a thread or in a process."""

    def tell(self, message: ToWriter) -> None: ...
    def close(self) -> None: ...
    def leave(self, last: Callable[[], None]) -> threading.Thread: ...
    @property
    def is_alive(self) -> bool: ...


def setup_of(
    tiers: Mapping[str, Durable],
    stores: Mapping[str, Store],
    locals_: Mapping[str, LocalImages],
    arena: str,
    processes: Processes,
    timeout_s: float,
) -> Setup:
    """What a writer has to know.

    Args:
        stores: of the Shared tiers, by name; locals_: the images of the Local ones.
    """
    durable = {}
    for name, tier in tiers.items():
        # Where it is read, wherever we are.
        place = stores[name].location if name in stores else str(locals_[name].directory.parent)
        durable[name] = dataclasses.replace(tier, location=place, patience_s=patience_of(tier))
    return Setup(durable, arena, processes.index, processes.count, timeout_s, GRACE_S)


def start(
    kind: WriterKind, setup: Setup, tell: Tell, stores: Mapping[str, Store]
) -> tuple[Backend, signals.Installed | None]:
    """A writer, and what sends signals to it, if it is a process.

    Raises:
        StoreFailed: this process may not have more files or threads.
    """
    if kind == "thread":
        from ckpt.writer import Writer

        return Writer(setup, tell, stores, flush_choice=flush.choose), None
    from ckpt.companion import Companion

    companion = Companion(setup, tell)
    return companion, signals.install(companion.wake_fd)

"""A snapshot is taken as soon as there is a slot for it: how long, and what is said meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, final

from ckpt import snapshot
from ckpt.arena import Arena, NoFreeSlot
from ckpt.errors import StoreFailed
from ckpt.outline import Outline
from ckpt.pending import Background
from ckpt.tree import Flat

PATIENT_S = 10.0
"""After so long a save says that it waits for a slot."""
_log = logging.getLogger("ckpt")


@final
class Snapshots:
    """Takes the snapshots of a manager, each by the plan of the one before.

    Args:
        run: its location, for messages.
        why: tells in words why no slot of an arena is free.
        patience_s: how long a save waits for one.
    """

    def __init__(
        self, run: str, background: Background, why: Callable[[Arena], str], patience_s: float
    ) -> None:
        self._run, self._background = run, background
        self._why, self._patience_s = why, patience_s
        self.plan: snapshot.SnapshotPlan | None = None
        """Of the newest snapshot."""

    @property
    def outline(self) -> Outline | None:
        """Of the tree of the newest snapshot."""
        return None if self.plan is None else self.plan.outline

    def take(
        self, arena: Arena, flat: Flat, meta: Callable[[], dict[str, Any]] | dict[str, Any]
    ) -> snapshot.Snapshot:
        """Copy a state into a slot.

        Raises:
            StoreFailed: none came free in time. Superseded: a newer attempt owns the run.
        """
        begun = time.monotonic()
        while True:
            try:
                taken = snapshot.take(flat, arena, meta, previous=self.plan, timeout_s=PATIENT_S)
            except NoFreeSlot as error:
                self._go_on_waiting(arena, time.monotonic() - begun, error)
                continue
            self.plan = taken.plan
            return taken

    def _go_on_waiting(self, arena: Arena, waited_s: float, error: NoFreeSlot) -> None:
        """Say that it waits, and do not wait for what will not come."""
        if (superseded := self._background.superseded()) is not None:
            raise superseded
        text = f"{self._run}: no slot has come free for {waited_s:.0f} s: {self._why(arena)}"
        if waited_s > self._patience_s:
            raise StoreFailed(text) from error
        _log.warning("%s", text)

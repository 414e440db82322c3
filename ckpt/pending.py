"""Saves on their way, and what went wrong with them that nobody has been told yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import final

from ckpt.errors import Misuse, Superseded

TIER = "shared"


class Pending:
    """A save on its way. `wait` raises what went wrong; so does the next save if nobody asks."""

    def __init__(self, step: int, tiers: tuple[str, ...]) -> None:
        self.step = step
        self.tiers = tiers
        self.error: BaseException | None = None
        """What went wrong, once it has; to look here tells nobody."""
        self._done = threading.Event()
        self._heard = False

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self._done.is_set() else "on its way"
        return f"Pending(step={self.step}, {state})"

    def wait(self, tier: str | None = None, timeout: float | None = None) -> None:
        """Block until the step is acknowledged by a tier (all that are due without a name).

        "snapshot" returns at once: the copy was taken before `save` returned.

        Raises:
            Misuse: the tier is not due for this save.
            TimeoutError: not yet done after `timeout` seconds; the save goes on.
            CheckpointError: the save failed.
        """
        self._check(tier)
        if tier == "snapshot":
            return
        if not self._done.wait(timeout):
            raise TimeoutError(f"step {self.step}: not durable after {timeout} s; still writing")
        self._heard = True
        if self.error is not None:
            raise self.error

    def done(self, tier: str | None = None) -> bool:
        """Is the step acknowledged by the tier (by all that are due)? Raises what went wrong."""
        self._check(tier)
        if tier == "snapshot":
            return True
        if not self._done.is_set():
            return False
        self._heard = True
        if self.error is not None:
            raise self.error
        return True

    def _check(self, tier: str | None) -> None:
        if tier is not None and tier != "snapshot" and tier not in self.tiers:
            due = ", ".join(("snapshot", *self.tiers))
            raise Misuse(f"step {self.step}: tier {tier!r} is not due; due are: {due}")

    def finish(self, error: BaseException | None = None) -> None:
        """For the writer: the step is acknowledged, or will never be."""
        self.error = error
        self._done.set()

    def ended(self, timeout_s: float | None = 0) -> bool:
        """Is it acknowledged or failed, at the latest after `timeout_s`? Tells nobody."""
        return self._done.wait(timeout_s)

    @property
    def unheard_error(self) -> BaseException | None:
        """The error nobody has been told yet; telling it."""
        if self._done.is_set() and self.error is not None and not self._heard:
            self._heard = True
            return self.error
        return None


@final
class Background:
    """All saves of a manager on their way, and errors that belong to none of them.

    It does not hold the manager, which could never be collected otherwise.
    """

    def __init__(self) -> None:
        self.pendings: list[Pending] = []
        self.unheard: list[BaseException] = []
        """Errors that no Pending can tell."""

    def superseded(self) -> Superseded | None:
        """That another attempt has taken over, if a save met it."""
        errors = [each.error for each in self.pendings if each.ended()]
        found = [each for each in (*errors, *self.unheard) if isinstance(each, Superseded)]
        return found[-1] if found else None

    def wait(self, timeout_s: float | None) -> None:
        """Block until all have ended. Raises TimeoutError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for pending in list(self.pendings):
            left = None if end is None else max(0.0, end - time.monotonic())
            if not pending.ended(left):
                raise TimeoutError(f"step {pending.step}: not durable after {timeout_s} s")

    def raise_error(self, pendings: Sequence[Pending] | None = None) -> None:
        """Raise the oldest error that nobody has been told, of these saves or of all."""
        for pending in list(self.pendings) if pendings is None else pendings:
            if not pending.ended():
                continue
            if (error := pending.unheard_error) is not None:
                raise error
            self.pendings.remove(pending)
        if self.unheard:
            raise self.unheard.pop(0)

    def untold(self) -> list[BaseException]:
        """All that nobody has been told; telling it."""
        errors = [pending.unheard_error for pending in self.pendings]
        return [error for error in (*errors, *self.unheard) if error is not None]

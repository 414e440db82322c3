"""Saves on their way, and what went wrong with them that nobody has been told yet."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import final

from ckpt.arguments import time_limit
from ckpt.errors import Misuse, Superseded

SNAPSHOT = "snapshot"


@final
class Pending:
    """A save on its way to its tiers. `wait` raises what went wrong; so does the next save if
    nobody asks."""

    def __init__(self, step: int, tiers: Sequence[str]) -> None:
        self.step = step
        self._lock = threading.Condition()
        self._errors: dict[str, BaseException | None] = {}  # of tiers that have ended
        self._tiers = tuple(tiers)
        self._heard: set[str] = set()

    def __repr__(self) -> str:
        with self._lock:
            states = [f"{tier}: {self._state(tier)}" for tier in self._tiers]
        return f"Pending(step={self.step}, {', '.join(states)})"

    def _state(self, tier: str) -> str:
        if tier not in self._errors:
            return "on its way"
        return "done" if self._errors[tier] is None else "failed"

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers that are due, nearest first."""
        return self._tiers

    @property
    def error(self) -> BaseException | None:
        """What went wrong first, once something has; to look here tells nobody."""
        with self._lock:
            return next((error for error in self._errors.values() if error is not None), None)

    def wait(self, tier: str | None = None, timeout: float | None = None) -> None:
        """Block until the step is acknowledged by a tier (by all that are due without a name).

        "snapshot" returns at once: the copy was taken before `save` returned.

        Raises:
            Misuse: the tier is not due for this save.
            TimeoutError: not yet done after `timeout` seconds; the save goes on.
            CheckpointError: the save failed.
        """
        wanted, limit_s = self._wanted(tier), time_limit(timeout, "timeout")
        with self._lock:
            if not self._lock.wait_for(lambda: self._have_ended(wanted), limit_s):
                late = ", ".join(name for name in wanted if name not in self._errors)
                raise TimeoutError(
                    f"step {self.step}: not durable after {timeout} s; still writing to {late}"
                )
        self._raise(wanted)

    def done(self, tier: str | None = None) -> bool:
        """Is the step acknowledged by the tier (by all that are due)? Raises what went wrong."""
        wanted = self._wanted(tier)
        with self._lock:
            if not self._have_ended(wanted):
                return False
        self._raise(wanted)
        return True

    def _wanted(self, tier: str | None) -> tuple[str, ...]:
        if tier is None:
            return self._tiers
        if tier == SNAPSHOT:
            return ()
        if tier not in self._tiers:
            due = ", ".join((SNAPSHOT, *self._tiers))
            raise Misuse(f"step {self.step}: tier {tier!r} is not due; due are: {due}")
        return (tier,)

    def _have_ended(self, tiers: Iterable[str]) -> bool:
        return all(tier in self._errors for tier in tiers)

    def _raise(self, tiers: Sequence[str]) -> None:
        with self._lock:
            self._heard.update(tiers)
            errors = [error for tier in tiers if (error := self._errors[tier]) is not None]
        if errors:
            raise errors[0]

    def extend(self, tiers: Iterable[str]) -> None:
        """For the manager: these are due, too."""
        with self._lock:
            self._tiers = (*self._tiers, *(tier for tier in tiers if tier not in self._tiers))

    def finish(self, tier: str | None = None, error: BaseException | None = None) -> None:
        """For the writer: a tier has acknowledged the step, or never will; without a name: all."""
        with self._lock:
            for each in self._tiers if tier is None else (tier,):
                self._errors.setdefault(each, error)
            self._lock.notify_all()

    def has_ended(self, tier: str) -> bool:
        """Has this tier acknowledged the step, or failed? Tells nobody."""
        with self._lock:
            return tier in self._errors

    def ended(self, timeout_s: float | None = 0) -> bool:
        """Has every tier acknowledged or failed, after at most `timeout_s`? Tells nobody."""
        with self._lock:
            return self._lock.wait_for(lambda: self._have_ended(self._tiers), timeout_s)

    @property
    def unheard_error(self) -> BaseException | None:
        """The first error nobody has been told yet; telling it."""
        with self._lock:
            for tier, error in self._errors.items():
                if error is not None and tier not in self._heard:
                    # One store that fails is one piece of news, however many tiers it has.
                    self._heard.update(self._errors)
                    return error
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
        errors = [each.error for each in self.pendings]
        found = [each for each in (*errors, *self.unheard) if isinstance(each, Superseded)]
        return found[-1] if found else None

    def under_way(self) -> dict[str, int]:
        """How many saves are on their way to each tier that has any."""
        return Counter(
            tier
            for pending in list(self.pendings)
            for tier in pending.tiers
            if not pending.has_ended(tier)
        )

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
            # A failure is told as soon as it is known, though other tiers may be under way.
            if (error := pending.unheard_error) is not None:
                raise error
            if pending.ended():
                self.pendings.remove(pending)
        if self.unheard:
            raise self.unheard.pop(0)

    def untold(self) -> list[BaseException]:
        """All that nobody has been told; telling it."""
        errors = [pending.unheard_error for pending in self.pendings]
        return [error for error in (*errors, *self.unheard) if error is not None]

"""A job under way: which tiers have not ended, who needs its slot, and what stops it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from ckpt.lineage import Lineage, StepId
from ckpt.messages import Job


@final
class Course:
    """Shared by the threads of the tiers that a job visits.

    Args:
        job: its slot is held until no tier needs it any more.
        owner: the attempt that owned the run when it came; line: its lineage.
        local: those of its tiers that are Local, nearest first.
        released: called once, from any thread, when the slot is not needed any more.
    """

    def __init__(
        self,
        job: Job,
        owner: int,
        line: Lineage,
        local: Sequence[str],
        released: Callable[[], None],
    ) -> None:
        self.job, self.owner, self.line = job, owner, line
        self.arrived_s = time.monotonic()
        self._released = released
        self._changed = threading.Condition()
        self._open = set(job.tiers)
        self._needing = set(job.tiers) if job.slot is not None else set()
        self._promoting = {tier for tier in job.tiers if tier not in local}
        """Tiers that may take the image from a Local one; not yet at it."""
        self._local = tuple(local)
        self._landed: dict[str, bool] = {}
        """How it ended in Local tiers."""
        self._late: set[str] = set()
        """Local tiers that others do not wait for."""
        self._woken: set[str] = set()
        """Tiers that are not to wait any longer before the next try."""
        self._abandoned: BaseException | None = None
        self._superseded: BaseException | None = None

    @property
    def id(self) -> StepId:
        return self.job.id

    def is_open(self, tier: str) -> bool:
        """Has this tier not ended?"""
        with self._changed:
            return tier in self._open

    @property
    def open(self) -> frozenset[str]:
        """The tiers that have not ended."""
        with self._changed:
            return frozenset(self._open)

    def end(self, tier: str, *, landed: bool) -> bool:
        """A tier has ended, well or not. False if it had before: then nothing is to be told."""
        with self._changed:
            if tier not in self._open:
                return False
            self._open.discard(tier)
            self._changed.notify_all()
        if tier in self._local:
            self._land(tier, landed=landed)
        return True

    def _land(self, tier: str, *, landed: bool) -> None:
        with self._changed:
            self._landed[tier] = landed
            before = bool(self._needing)
            if landed:
                # All at once: a tier that finds the image damaged may hold the slot right after.
                self._needing -= self._promoting
                self._promoting.clear()
            last = before and not self._needing
            self._changed.notify_all()
        if last:
            self._released()

    # --- the slot ---------------------------------------------------------------------------

    def let_go(self, tier: str) -> None:
        """A tier does not need the slot any more. Idempotent."""
        with self._changed:
            last = self._needing == {tier}
            self._needing.discard(tier)
        if last:
            self._released()

    def hold(self, tier: str) -> bool:
        """A tier needs the slot after all; False if that was given back."""
        with self._changed:
            # From now on it lets go by itself: it may be in the middle of the slot.
            self._promoting.discard(tier)
            if self._needing:
                self._needing.add(tier)
            return bool(self._needing)

    def hold_up_none(self, tier: str) -> None:
        """A tier fails, or does not answer: whoever waits for its image takes the slot."""
        with self._changed:
            self._late.add(tier)
            self._changed.notify_all()

    def landed(self) -> list[str]:
        """The Local tiers of the job that have it, nearest first.

        Waits until one has it, or all that have not are in trouble.
        """

        def known() -> bool:
            ended = self._landed.keys() | self._late
            return any(self._landed.values()) or ended.issuperset(self._local)

        with self._changed:
            self._changed.wait_for(known)
            return [tier for tier in self._local if self._landed.get(tier)]

    # --- what stops it ------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """It will never be a step; images of it do no harm."""
        with self._changed:
            self._abandoned = self._abandoned or error
            self._changed.notify_all()

    def supersede(self, error: BaseException) -> None:
        """A newer attempt owns the run."""
        with self._changed:
            self._superseded = self._superseded or error
            self._changed.notify_all()

    def check(self, tier: str) -> None:
        """Raises what stops it in this tier."""
        error = self._stop(tier)
        if error is not None:
            raise error

    def pause(self, tier: str, pause_s: float) -> None:
        """Wait, no longer than until `wake`, and raise at once what stops it in this tier."""
        with self._changed:
            self._changed.wait_for(
                lambda: tier in self._woken or self._stop(tier) is not None, pause_s
            )
            self._woken.discard(tier)
        self.check(tier)

    def wake(self, tier: str) -> None:
        """End the pause of a tier, or the next one if there is none: once."""
        with self._changed:
            self._woken.add(tier)
            self._changed.notify_all()

    def _stop(self, tier: str) -> BaseException | None:
        if self._superseded is not None or tier in self._local:
            return self._superseded
        return self._abandoned

"""From "this process has done its share" to "the tier has the step".

A host tier has a step when all processes have their image of it; a Shared tier when process 0 has
published it. On the board each process puts up, for each tier, the newest step of which it has
done its share (tiers work in order, so this stands for all before it), and a failure under the
name of the step it belongs to. A thread looks at the board for as long as something is awaited:
nobody waits inside a train step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final

from ckpt.errors import CheckpointError, PeerFailed
from ckpt.lineage import StepId
from ckpt.pending import Pending
from ckpt.processes import Matter, Processes

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True)
class _Awaited:
    id: StepId
    tier: str
    end: float
    """Monotonic; when the others are given up."""


@final
class Acks:
    """Tells the Pendings of a manager.

    Args:
        shared: names of the Shared tiers.
        reached: told when a tier has a step.
        missed: told when a tier will not have a step, why, and whether a Pending has told of it or
            does now: there is none of a flush.
        given_up: told, on process 0, that another process will never do its share of a step.
        timeout_s: how long the others may take after this process, beside what `extra_s` says of
            the tier.
    """

    def __init__(
        self,
        processes: Processes,
        shared: Collection[str],
        reached: Callable[[StepId, str], None],
        missed: Callable[[StepId, str, BaseException, bool], None],
        given_up: Callable[[StepId, CheckpointError], None],
        *,
        timeout_s: float,
        extra_s: Callable[[str], float],
    ) -> None:
        self._processes = processes
        self._shared = shared
        self._reached, self._missed, self._given_up = reached, missed, given_up
        self._timeout_s, self._extra_s = timeout_s, extra_s
        self._lock = threading.Condition()
        self._pendings: dict[StepId, Pending] = {}
        self._failed: set[tuple[StepId, str]] = set()
        self._awaited: list[_Awaited] = []
        self._watched: set[StepId] = set()  # on process 0: until all parts can only be there
        self._looking = False
        self._told: dict[tuple[int, str], int] = {}  # (attempt, tier) -> newest step on the board

    def expect(self, step: StepId, pending: Pending) -> None:
        """A save has begun."""
        with self._lock:
            self._pendings[step] = pending
            if self._processes.count > 1 and self._processes.index == 0:
                self._watched.add(step)
                self._look()

    def done(self, step: StepId, tier: str) -> None:
        """This process has done its share, for a Shared tier on process 0: published the step."""
        if self._processes.count == 1:
            self._reached(step, tier)
            self._finish(step, tier, None)
            return
        if tier not in self._shared or self._processes.index == 0:
            try:
                self._put_up(step, tier)
            except PeerFailed as error:
                self._finish(step, tier, error)
                return
        end = time.monotonic() + 2 * self._timeout_s + self._extra_s(tier)
        with self._lock:
            self._awaited.append(_Awaited(step, tier, end))
            self._look()

    def failed(self, step: StepId, tier: str, error: BaseException) -> None:
        """This process cannot do its share, or the run cannot have it."""
        # What process 0 found out about a step holds for the run, with its type.
        decided = tier in self._shared and self._processes.index == 0
        self._of_tier(step, tier).fail(error, decided=decided)
        self._finish(step, tier, error)

    def settle(self, timeout_s: float) -> None:
        """Wait until the others have done their share of all of which this process has."""
        with self._lock:
            self._lock.wait_for(lambda: not self._awaited, timeout_s)

    def _put_up(self, step: StepId, tier: str) -> None:
        with self._lock:
            newest = max(step.step, self._told.get((step.attempt, tier), -1))
            self._told[step.attempt, tier] = newest
        self._processes.put(f"{_board(step, tier)}/{self._processes.index}", str(newest))

    def _finish(self, step: StepId, tier: str, error: BaseException | None) -> None:
        with self._lock:
            pending = self._pendings.get(step)
        if error is not None:  # before somebody who waits goes on
            is_told = (step, tier) in self._failed or (
                pending is not None and tier in pending.tiers
            )
            self._failed.add((step, tier))
            self._missed(step, tier, error, is_told)
        if pending is None:
            return
        with self._lock:
            pending.finish(tier, error)
            if pending.ended() and self._pendings.get(step) is pending:
                del self._pendings[step]
                self._watched.discard(step)

    def _of_tier(self, step: StepId, tier: str) -> Matter:
        return self._processes.matter(f"{matter_of(step)}/{tier}", self._timeout_s)

    # --- looking at the board, in a thread ---------------------------------------------------

    def _look(self) -> None:
        if not self._looking:
            self._looking = True
            threading.Thread(target=self._look_on, name="ckpt-acks", daemon=True).start()
        self._lock.notify_all()

    def _look_on(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._lock:
                awaited, watched = list(self._awaited), set(self._watched)
                if not awaited and not watched:
                    self._looking = False
                    return
            moved = [each for each in awaited if self._has_ended(each)]
            with self._lock:
                self._awaited = [each for each in self._awaited if each not in moved]
                self._lock.notify_all()
            for step in watched:
                self._watch(step)
            pause_s = _FIRST_PAUSE_S if moved else min(1.5 * pause_s, _LONGEST_PAUSE_S)
            with self._lock:
                if self._lock.wait(pause_s):
                    pause_s = _FIRST_PAUSE_S

    def _has_ended(self, each: _Awaited) -> bool:
        """Whether all have done their share, or somebody will not."""
        step, tier = each.id, each.tier
        try:
            if not self._all_there(step, tier):
                trouble = self._bad_news(step, tier)
                if trouble is None and time.monotonic() < each.end:
                    return False
                # Once more: it may have been said just before.
                if not self._all_there(step, tier):
                    raise trouble or self._too_late(step, tier)
            self._raise_failure(step, tier)
        except CheckpointError as error:
            self._finish(step, tier, error)
        else:
            self._reached(step, tier)
            self._finish(step, tier, None)
        return True

    def _all_there(self, step: StepId, tier: str) -> bool:
        return not self._missing(step, tier)

    def _missing(self, step: StepId, tier: str) -> list[int]:
        found = self._processes.below(_board(step, tier))
        wanted = [0] if tier in self._shared else range(self._processes.count)
        return [i for i in wanted if int(found.get(str(i), -1)) < step.step]

    def _too_late(self, step: StepId, tier: str) -> PeerFailed:
        process = next(iter(self._missing(step, tier)), 0)
        return PeerFailed(
            f"step {step.step}: process {process} of {self._processes.count} has not brought it to "
            f"tier {tier} within {2 * self._timeout_s + self._extra_s(tier):.0f} s; it may be dead "
            "or stuck"
        )

    def _bad_news(self, step: StepId, tier: str) -> CheckpointError | None:
        try:
            # A reason is better news than that somebody has left, which each check finds, too.
            for prefix in (matter_of(step), f"{matter_of(step)}/{tier}"):
                if self._processes.below(f"{prefix}/failed"):
                    self._processes.matter(prefix).check()
            self._processes.matter(matter_of(step)).check()
        except CheckpointError as error:
            return error
        return None

    def _raise_failure(self, step: StepId, tier: str) -> None:
        """A later step may have been brought there all the same."""
        found = self._processes.below(f"{matter_of(step)}/{tier}/failed")
        if any(int(process) != self._processes.index for process in found):
            self._of_tier(step, tier).check()

    def _watch(self, step: StepId) -> None:
        """Process 0 must not wait for a part that will not come."""
        with self._lock:
            pending = self._pendings.get(step)
        tiers = [] if pending is None else [t for t in pending.tiers if t in self._shared]
        for tier in tiers:
            error = self._bad_news(step, tier)
            if error is not None:
                self._given_up(step, error)
                with self._lock:
                    self._watched.discard(step)
                return
        if pending is None or not tiers or all(pending.has_ended(tier) for tier in tiers):
            with self._lock:
                self._watched.discard(step)


def matter_of(step: StepId) -> str:
    """The name under which the processes settle one save."""
    return f"a{step.attempt}/s{step.step}"


def _board(step: StepId, tier: str) -> str:
    return f"a{step.attempt}/done/{tier}"

"""How much saves slow the steps down that they run beside. No device is asked.

The steps that no save ran beside tell what a step takes. What the others took beyond the median of
those is charged to the saves; where several were on their way, in equal shares. A step that was
long for another reason must not be charged: one that compiled, or behind which the trainer
evaluated.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Protocol, final

_KEPT = 128
"""So many undisturbed steps, and so many pauses between them, are remembered."""
_LEAST = 5
"""So many undisturbed steps must have been seen before their median means something."""
_WAITING = 64
"""Steps, for each save, that wait for such a median; further ones are left out."""
_LONG = 10.0
"""An undisturbed step of so many medians was a pause."""
_TOO_LONG, _TOO_LONG_S = 50.0, 1.0
"""A step of more medians and more seconds was a pause, whatever ran beside it."""


@dataclass(frozen=True)
class Inflation:
    """What one save cost the steps beside it, without what `save` itself took."""

    step: int
    inflation_s: float
    """Below 0 when the steps happened to be faster than the others."""
    steps: int
    """Steps that ran beside the save. With 0 of them nothing is known."""
    pauses: int
    """Further ones that were left out as something else."""


@dataclass(eq=False)
class _Flight:
    """A save on its way."""

    excess_s: float = 0.0
    steps: int = 0
    pauses: int = 0


@final
class StepTimes:
    """Takes the duration of each step, and tells the cost of each save that has ended. Pure.

    A call takes some microseconds; memory is bounded.
    """

    def __init__(self) -> None:
        self._flights: dict[int, _Flight] = {}
        self._quiet: deque[float] = deque()
        self._sorted: list[float] = []
        self._pauses: deque[float] = deque(maxlen=_KEPT)
        self._waiting: list[tuple[float, tuple[_Flight, ...]]] = []
        """Steps beside saves, seen before there was a median."""

    def began(self, step: int) -> None:
        """The save of a step is on its way from now on."""
        self._flights[step] = _Flight()

    def passed(self, duration_s: float, ended: Collection[int] = ()) -> list[Inflation]:
        """A step took so long. `ended`: saves that have ended since the one before.

        The saves that ended are charged for this step, too. Returns what they cost.
        """
        beside = tuple(self._flights.values())
        median_s = self._median()
        if not beside:
            self._add(duration_s, median_s)
        elif median_s is not None:
            self._charge(duration_s, beside, median_s)
        elif len(self._waiting) < _WAITING * len(beside):
            self._waiting.append((duration_s, beside))
        return self.ended(ended)

    def ended(self, steps: Collection[int]) -> list[Inflation]:
        """What these saves cost, without another step: after a rewind, and at the end of a run."""
        if self._waiting and (median_s := self._median()) is not None:
            waiting, self._waiting = self._waiting, []
            for duration_s, beside in waiting:
                self._charge(duration_s, beside, median_s)
        found = []
        for step in sorted(self._flights.keys() & set(steps)):
            flight = self._flights.pop(step)
            cost_s = round(flight.excess_s, 6)
            found.append(Inflation(step, cost_s, flight.steps, flight.pauses))
            self._waiting = [each for each in self._waiting if flight not in each[1]]
        return found

    def _median(self) -> float | None:
        count = len(self._sorted)
        return self._sorted[count // 2] if count >= _LEAST else None

    def _add(self, duration_s: float, median_s: float | None) -> None:
        if median_s is not None and duration_s > _LONG * median_s:
            self._pauses.append(duration_s)
        self._quiet.append(duration_s)
        insort(self._sorted, duration_s)
        if len(self._quiet) > _KEPT:
            del self._sorted[bisect_left(self._sorted, self._quiet.popleft())]

    def _charge(self, duration_s: float, beside: tuple[_Flight, ...], median_s: float) -> None:
        pause = self._is_pause(duration_s, median_s)
        for flight in beside:
            if pause:
                flight.pauses += 1
            else:
                flight.steps += 1
                flight.excess_s += (duration_s - median_s) / len(beside)

    def _is_pause(self, duration_s: float, median_s: float) -> bool:
        """Longer than any save would make it, or as long as pauses that no save ran beside."""
        if duration_s > max(_TOO_LONG * median_s, _TOO_LONG_S):
            return True
        return duration_s > _LONG * median_s and any(
            duration_s / 2 <= pause_s <= duration_s * 2 for pause_s in self._pauses
        )


class Save(Protocol):
    """What is asked of a save on its way."""

    def ended(self) -> bool:
        """Is it durable, or has it failed?"""


@final
class Stopwatch:
    """Takes the times of a training loop.

    Args:
        tell: is given what each save cost.
        clock: seconds, from anywhere.
    """

    def __init__(
        self, tell: Callable[[Inflation], object], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._tell, self._clock = tell, clock
        self._times = StepTimes()
        self._saves: dict[int, Save] = {}
        self._since: float | None = None
        self._apart_s = 0.0

    def lap(self) -> None:
        """A step is over."""
        now = self._clock()
        if self._since is not None:
            ended = [step for step, save in self._saves.items() if save.ended()]
            self._report(self._times.passed(now - self._since - self._apart_s, ended))
        self._since, self._apart_s = now, 0.0

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What happens inside belongs to no step."""
        begun = self._clock()
        try:
            yield
        finally:
            self._apart_s += self._clock() - begun

    def began(self, step: int, save: Save) -> None:
        """The save of a step is on its way."""
        if step not in self._saves:
            self._saves[step] = save
            self._times.began(step)

    def stop(self) -> None:
        """All saves have ended, and the loop pauses: the next step is not timed."""
        self._report(self._times.ended(list(self._saves)))
        self._since = None

    def _report(self, found: list[Inflation]) -> None:
        for inflation in found:
            del self._saves[inflation.step]
            self._tell(inflation)

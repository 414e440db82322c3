"""The mean over the processes of a value that each has its own of: late, and without waiting.

A thread in each process reads the values as they get ready and settles them with the others in
rounds. In a round each puts up what it has read since the round before, be it nothing; all then
know the same values, and take the same means from them. Whoever takes part in a round has heard
the one before, so process 0 takes that one down.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, final

from ckpt.errors import PeerFailed
from ckpt.listening import Ended, Leaving, number_on
from ckpt.processes import TIMEOUT_S, Matter, Processes


def mean(values: Sequence[float]) -> float:
    """Of one value for each process: the same bits everywhere. One that is not finite wins."""
    for value in values:
        if not math.isfinite(value):
            return value
    scale = 1.0
    try:
        total = math.fsum(values)
    except OverflowError:
        scale = 2.0 ** -len(values).bit_length()
        total = math.fsum(value * scale for value in values)
    # Rounding must not lead beyond the values, nor beyond what is finite.
    return min(max(total / len(values) / scale, min(values)), max(values))


@final
class Averages:
    """Values are given in order, and their means taken in the same order.

    All processes give and take alike. With one process it costs nothing: a value is read when it
    is taken.

    Args:
        timeout_s: how long `take` waits for the others.
    """

    def __init__(self, processes: Processes, timeout_s: float = TIMEOUT_S) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._changed = threading.Condition()
        # What follows is looked at and changed under that condition.
        self._unread: deque[Any] = deque()
        self._given = 0
        self._taken = 0
        self._means: dict[int, float] = {}  # by the number of the value
        self._known = 0  # numbers below this have a mean
        self._round = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if processes.count > 1:
            self._name = f"averages-{number_on(processes)}"
            self._thread = threading.Thread(target=self._talk, name="ckpt-averages", daemon=True)
            self._thread.start()

    def give(self, value: Any) -> None:
        """The value of this process: a number, or an array that will hold one. Never waits."""
        with self._changed:
            self._unread.append(value)
            self._given += 1
            self._changed.notify_all()

    def take(self) -> float:
        """The mean of the oldest value that was given and not taken.

        Raises:
            PeerFailed: another process failed, left, or was not heard of in time.
        """
        if self._thread is None:
            self._taken += 1
            return float(self._unread.popleft())
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._taken in self._means or self._error is not None, self._timeout_s
            )
            if self._taken in self._means:
                self._taken += 1
                return self._means.pop(self._taken - 1)
            if self._error is not None:
                raise self._error
            number = self._round
        assert not there
        raise PeerFailed(self._silent(number))

    def drop(self) -> None:
        """What was given and not taken is wanted no more; all processes drop the same."""
        with self._changed:
            self._taken = self._given
            self._means.clear()
            if self._thread is None:
                self._unread.clear()

    def close(self, error: BaseException | None = None) -> None:
        """End the thread. With an error the others hear it when they wait for this process."""
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout=10.0)
        if error is not None:
            self._fail(error)
        with self._changed:
            self._unread.clear()

    # --- the thread ---------------------------------------------------------------------------

    def _talk(self) -> None:
        heard: list[deque[float]] = [deque() for _ in range(self._processes.count)]
        try:
            while self._is_wanted():
                fresh = self._read()
                found = self._matter(self._round, self._ended).gather("values", fresh)
                if self._processes.index == 0 and self._round:
                    self._matter(self._round - 1).forget()
                for each, values in zip(heard, found, strict=True):
                    each.extend(values)
                self._learn(heard)
        except Ended:
            pass
        except BaseException as error:
            self._fail(error)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _is_wanted(self) -> bool:
        """Wait for something to say or to hear; false at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended.is_set() or self._unread or self._given > self._known
            )
            return not self._ended.is_set()

    def _read(self) -> list[float]:
        """All values that are ready, at least one if there is any: waits for the device here."""
        with self._changed:
            unread, self._unread = self._unread, deque()
        fresh: list[float] = []
        while unread and (not fresh or _is_ready(unread[0])):
            fresh.append(float(unread.popleft()))
        with self._changed:
            self._unread.extendleft(reversed(unread))
        return fresh

    def _learn(self, heard: list[deque[float]]) -> None:
        with self._changed:
            self._round += 1
            while all(heard):
                value = mean([each.popleft() for each in heard])
                if self._known >= self._taken:
                    self._means[self._known] = value
                self._known += 1
            self._changed.notify_all()

    def _matter(self, number: int, ended: threading.Event | None = None) -> Matter:
        board = self._processes if ended is None else Leaving(self._processes, ended)
        # Who does not come may well evaluate, or compile: it is `take` that loses patience.
        return board.matter(f"{self._name}/{number}", math.inf)

    def _fail(self, error: BaseException) -> None:
        """Others may be in this round, or already in the next."""
        for number in (self._round, self._round + 1):
            self._matter(number).fail(error)

    def _silent(self, number: int) -> str:
        found: set[str] = set()
        with contextlib.suppress(PeerFailed):
            found = set(self._processes.below(f"{self._name}/{number}/values"))
        missing = [i for i in range(1, self._processes.count) if str(i) not in found]
        return (
            f"process {', '.join(map(str, missing)) or 0} of {self._processes.count} gave no value "
            f"within {self._timeout_s:.0f} s; it may be dead or stuck, or has made another number "
            "of updates"
        )


def _is_ready(value: Any) -> bool:
    ready = getattr(value, "is_ready", None)
    return True if ready is None else bool(ready())

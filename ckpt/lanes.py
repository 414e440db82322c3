"""The lane of a tier: its jobs one after the other, tried again while there is patience.

A thread may be stuck in a call that does not return. So whoever looks at a lane from outside can
tell how long nothing has moved, and end its jobs in its place; when the call returns after all, the
lane goes on with the next job that has not ended.
"""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

from ckpt.course import Course
from ckpt.errors import StoreFailed
from ckpt.messages import Trouble

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
SILENT_S = 5.0
"""A call that takes longer is told of."""
SLOWEST_BYTES_PER_S = 8 << 20
"""A bulk write that is slower than this passes for one that does not move."""

Figures = dict[str, Any]


class Delivery(Protocol):
    """One job on its way into one tier."""

    def run(self) -> Figures:
        """Go on where the last call failed, to the end.

        Raises:
            StoreFailed: may be called again. CheckpointError: for good.
        """


class Owner(Protocol):
    """What a lane tells to whom it belongs, from its own thread or from that of `look`."""

    def done(self, course: Course, tier: str, figures: Figures) -> None: ...
    def failed(self, course: Course, tier: str, error: BaseException) -> None: ...
    def make_room(self, course: Course, tier: str) -> None: ...
    def trouble(self, report: Trouble) -> None: ...
    def idle(self) -> None: ...


@final
class Lane:
    """A thread that brings jobs into a tier, in order.

    Args:
        bulk_bytes: how much of an image may be under way at a time, asked for and not written.
        deliver: makes the delivery of a job.
    """

    def __init__(
        self,
        tier: str,
        patience_s: float,
        bulk_bytes: int,
        deliver: Callable[[Course, Lane], Delivery],
        owner: Owner,
    ) -> None:
        self.tier = tier
        self._patience_s = patience_s
        self._bulk_bytes = bulk_bytes
        self._deliver = deliver
        self._owner = owner
        self._lock = threading.Condition()
        self._waiting: deque[Course | None] = deque()
        self._current: Course | None = None
        self._is_busy = False
        self._moved_s: float | None = None
        """When something moved last; None: nobody waits for the store."""
        self._since_s: float | None = None
        """When the failures in a row began."""
        self._is_silent = False
        """There was no failure but silence."""
        self._thread = threading.Thread(target=self._loop, name=f"ckpt-{tier}", daemon=True)
        # Not lazily: at the end of the interpreter no thread can be started any more.
        self._thread.start()

    def submit(self, course: Course) -> None:
        """Queue a job. One that waits for the store is tried at once: it may be back."""
        with self._lock:
            self.answered()
            self._waiting.append(course)
            if self._since_s is not None:
                course.hold_up_none(self.tier)
            self._lock.notify_all()

    def answered(self) -> None:
        """What this tier needs has answered somebody else: a job that waits is tried at once."""
        with self._lock:
            if self._current is not None:
                self._current.wake(self.tier)

    def end(self) -> None:
        """End the thread behind what is queued, without waiting for one that is stuck."""
        with self._lock:
            self._waiting.append(None)
            self._lock.notify_all()
        if not self.is_stuck():
            self._thread.join()

    @property
    def is_idle(self) -> bool:
        """Is there nothing to do?"""
        with self._lock:
            return not self._is_busy and not self._waiting

    # --- from outside -------------------------------------------------------------------------

    def look(self) -> None:
        """Tell of a store that does not answer, and end jobs whose patience is over."""
        now = time.monotonic()
        with self._lock:
            moved_s = self._moved_s
            if moved_s is None or now - moved_s < SILENT_S:
                return
            first = self._since_s is None
            if first:
                self._since_s, self._is_silent = moved_s, True
            limit_s, begun_s = self._limit_s, min(self._since_s or moved_s, moved_s)
            over = [
                course
                for course in (self._current, *self._waiting)
                if course is not None and now >= max(begun_s, course.arrived_s) + limit_s
            ]
            # Those that wait are taken away from the thread: it may wake up at any moment.
            taken = [course for course in over if course is not self._current]
            for course in taken:
                self._waiting.remove(course)
        if first:
            self._hold_up_none()
            self._owner.trouble(
                _trouble(self.tier, f"has not answered for {SILENT_S:g} s", now - moved_s)
            )
        for course in over:
            error = StoreFailed(f"{self.tier}: has not answered for {now - moved_s:.0f} s")
            self._owner.failed(course, self.tier, error)
        for course in taken:
            course.let_go(self.tier)

    def is_stuck(self) -> bool:
        """Has the thread been given up?"""
        with self._lock:
            moved_s = self._moved_s
        return moved_s is not None and time.monotonic() - moved_s >= self._limit_s

    @property
    def _limit_s(self) -> float:
        return max(self._patience_s, SILENT_S)

    # --- for deliveries -----------------------------------------------------------------------

    def beat(self, more_s: float = 0.0) -> None:
        """Something moves; the next time may be later by so much."""
        with self._lock:
            self._moved_s = time.monotonic() + more_s
            over = self._is_silent
            if over:
                self._since_s, self._is_silent = None, False
        if over:
            self._owner.trouble(Trouble(self.tier, ""))

    def beat_bulk(self) -> None:
        """A piece of an image was asked for."""
        self.beat(self._bulk_bytes / SLOWEST_BYTES_PER_S)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Something that does not wait for the store."""
        with self._lock:
            self._moved_s = None
        try:
            yield
        finally:
            self.beat()

    # --- the thread ---------------------------------------------------------------------------

    def _loop(self) -> None:
        while (course := self._next()) is not None:
            if course.is_open(self.tier):
                self._bring(course)
            course.let_go(self.tier)
            with self._lock:
                self._current, self._is_busy = None, False
            self._owner.idle()

    def _next(self) -> Course | None:
        with self._lock:
            self._lock.wait_for(lambda: self._waiting)
            self._current = self._waiting.popleft()
            self._is_busy = self._current is not None
            return self._current

    def _bring(self, course: Course) -> None:
        try:
            figures = self._try(course)
        except BaseException as error:
            _forget_locals(error)
            self._owner.failed(course, self.tier, error)
            course.let_go(self.tier)
            if is_full(error):
                self._make_room(course)
        else:
            self._owner.done(course, self.tier, figures)

    def _try(self, course: Course) -> Figures:
        course.check(self.tier)
        delivery = self._deliver(course, self)
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                with self._watched():
                    figures = delivery.run()
            except StoreFailed as error:
                left_s = self._fails(error)
                if left_s <= 0 or not course.is_open(self.tier):
                    raise
                full = is_full(error)
            else:
                self._works()
                return figures
            if full:
                self._make_room(course)
            course.pause(self.tier, min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self.beat()
        try:
            yield
        finally:
            with self._lock:
                self._moved_s = None

    def _make_room(self, course: Course) -> None:
        with self._watched():
            self._owner.make_room(course, self.tier)

    def _fails(self, error: StoreFailed) -> float:
        """Another failure; how many seconds of patience are left."""
        now = time.monotonic()
        with self._lock:
            first = self._since_s is None or self._is_silent
            since_s = self._since_s = now if self._since_s is None else self._since_s
            self._is_silent = False
        if first:
            self._hold_up_none()
            self._owner.trouble(_trouble(self.tier, str(error), now - since_s))
        return since_s + self._patience_s - now

    def _hold_up_none(self) -> None:
        """Other tiers wait neither for the image that this one has at hand nor for those behind."""
        with self._lock:
            for course in (self._current, *self._waiting):
                if course is not None:
                    course.hold_up_none(self.tier)

    def _works(self) -> None:
        with self._lock:
            over = self._since_s is not None
            self._since_s, self._is_silent = None, False
        if over:
            self._owner.trouble(Trouble(self.tier, ""))


def _trouble(tier: str, text: str, ago_s: float) -> Trouble:
    return Trouble(tier, text, time.time_ns() - int(ago_s * 1e9))


def is_full(error: BaseException | None) -> bool:
    """Is it the want of space that this error comes from?"""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def _forget_locals(error: BaseException | None) -> None:
    """An error may stay for long: the images that its frames hold must not."""
    known: list[BaseException] = []
    while error is not None and error not in known:
        traceback.clear_frames(error.__traceback__)
        known.append(error)
        error = error.__cause__ or error.__context__

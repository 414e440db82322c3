"""Working ahead: the batches that come next, made before they are asked for.

A queue of batches from a position on. Threads make them here, or worker processes whole windows of
them. Batches for devices are placed by one thread more, at most two beyond the one delivered: the
next one is under way while the trainer uses this one, and device memory is not filled with more.

All of it can be thrown away at any time and is: `restart` drops it, and it fills again from the
new position.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from datapipe.batches.batch import Made, Recipe
from datapipe.batches.faults import Fault, too_many
from datapipe.batches.substitutes import Replaced
from datapipe.batches.window import Window
from datapipe.order.plan import Plan
from datapipe.prefetch.lifetime import MOVED, Lifetime
from datapipe.prefetch.makers import Makers, Task
from datapipe.prefetch.pace import Pace
from datapipe.prefetch.stats import Meter, Stats
from formats.errors import Misuse, WorkerFailed

if TYPE_CHECKING:
    from datapipe.prefetch.device_feed import Feed
    from datapipe.prefetch.worker_pool import Job, WorkerPool

PLACED: Final = 2
"""Batches on devices beyond the one that was delivered, at most."""
WINDOW_BYTES: Final = 1 << 26
"""A window of more than one batch does not hold more, by the size of those delivered."""


class Ready(NamedTuple):
    """A batch that was made."""

    batch: Any
    next_example: int  # the position once it is delivered
    faults: tuple[Fault, ...]  # bad records that came up in it for the first time


@dataclass
class _Coming:
    """A batch that is being made."""

    made: Callable[[], Made]  # on the host; waits for it, or makes it now
    cancel: Callable[[], Any]
    done: Callable[[], Any]  # what `made` gives is not asked for again
    holds: Callable[[Sequence[Fault], Replaced], bool]  # see `Window.holds`
    next_example: int
    placed: Task[Made] | None = None


class Prefetcher:
    """The coming batches of a plan; `restart` says from where on.

    Args:
      recipe: sources and transforms.
      feed: puts batches on devices; None: they stay on the host.
      pace: how far, and with what.

    Raises:
      Misuse: there are to be workers, and part of the recipe cannot be sent to them.
    """

    def __init__(self, recipe: Recipe, feed: Feed | None, pace: Pace) -> None:
        self._recipe = recipe
        self._feed = feed
        self._rows = None if feed is None else feed.rows
        self._pace = pace
        self.lifetime = Lifetime()
        self._meter = Meter(pace)
        self._queue: deque[_Coming] = deque()
        self._batch_bytes = 0  # of the largest one
        bell = self.lifetime.bell
        self._makers = Makers(pace.threads, "datapipe", bell)
        self._placer = Makers(1, "datapipe-place", bell)
        self._pool: WorkerPool | None = None
        if pace.workers:
            self._pool = self._made_pool()
        _prefetchers.add(self)

    def restart(self, plan: Plan, next_example: int, replaced: Replaced) -> None:
        """Drops what was made, and goes on from this position of this plan.

        Records in `replaced` are replaced by others.
        """
        self._drop()
        self._meter.restart()
        if self._pool is not None:
            self._pool.restart()
        self._plan = plan
        self._replaced = replaced
        self._next_example = self._planned_to = next_example
        self._is_at_end = False
        self._windows: deque[Window | Job] = deque()
        self._used = 0  # of the first window
        self._is_quick = False  # it is worth no thread, since the one before was not
        self._window_size = 1  # the first batch must not wait for a whole window to be read

    def replace(self, replaced: Replaced) -> None:
        """From the batch on that comes next, more records are replaced.

        What was made ahead stays, as far as it holds the same records nevertheless.
        """
        self._replaced = replaced

    def start(self) -> None:
        """Starts to make as many batches as the pace allows."""
        self._fill(self._pace.prefetch)
        if self._feed is not None:
            self._place(self._feed)

    def next(self) -> Ready | None:
        """The next batch; waits for it. None at the end of the plan.

        After an error or an interrupt this object must be restarted.

        Raises:
          BadRecord: a record is bad and not to be replaced, or there are too many.
          Misuse: it was closed meanwhile.
        """
        asked = self._meter.clock()
        self._fill(1)
        if not self._queue:
            return None
        coming = self._queue[0]
        made = self._made(coming)
        if not coming.holds(made.faults, self._replaced):
            self.restart(self._plan, self._next_example, self._replaced)
            self._fill(1)
            coming = self._queue[0]
            made = self._made(coming)
        new = made.faults and tuple(f for f in made.faults if f.pair not in self._replaced)
        limit = self._recipe.tolerance.limit
        if new and len(self._replaced) + len(new) > limit:
            raise too_many(len(self._replaced), new, limit)
        if not self._queue or self._queue[0] is not coming:
            self.lifetime.refuse_closed()
            raise Misuse(MOVED)
        self._queue.popleft()
        self._batch_bytes = max(self._batch_bytes, made.cost.size_bytes)
        self._next_example = coming.next_example
        coming.done()
        self._meter.delivered(asked, made.cost)
        return Ready(made.batch, coming.next_example, new)

    def stats(self) -> Stats:
        """What was delivered, and how fast."""
        return self._meter.stats()

    def stop(self) -> None:
        """Ends the waiting for a batch, in whatever thread."""
        self.lifetime.is_closed = True
        self.lifetime.bell.ring()
        if self._pool is not None:
            self._pool.close(wait=False)

    def close(self, *, wait: bool) -> None:
        """Stops working; `wait`: until threads and processes have ended."""
        self.stop()
        self._drop()  # before the threads are waited for
        if self._pool is not None:
            self._pool.close(wait=wait)
        self._makers.close(wait=wait)
        self._placer.close(wait=wait)

    # -- the queue -----------------------------------------------------------------------------

    def _drop(self) -> None:
        for coming in list(self._queue):
            coming.cancel()
            if coming.placed is not None:
                coming.placed.drop()
        self._queue.clear()
        self.lifetime.bell.ring()

    def _made(self, coming: _Coming) -> Made:
        """Waits for it, or makes it now."""
        if coming.placed is None:
            return _placed(coming, self._feed)
        return self._result(coming.placed)

    def _result(self, task: Task[Made]) -> Made:
        """Waits until it is there, or nobody is to wait any more."""
        lifetime = self.lifetime
        lifetime.bell.wait(lambda: task.is_over or lifetime.is_closed)
        if task.is_dropped or not task.is_over:
            lifetime.refuse_closed()
            raise Misuse(MOVED)
        return task.result()

    def _fill(self, wanted: int) -> None:
        while len(self._queue) < wanted and self._has_window():
            self._queue.append(self._coming(self._windows[0], self._used))
            self._used += 1
        while self._pool is not None and self._pool.has_room and self._open():
            pass

    def _coming(self, window: Window | Job, index: int) -> _Coming:
        position = window.position_after(index)
        work, holds = partial(window.batch, index), partial(window.holds, index)
        if not isinstance(window, Window):
            return _Coming(work, _nothing, partial(window.done, index), holds, position)
        if self._pace.prefetch == 0 or self._is_quick or window.is_at_hand(index):
            return _Coming(work, _nothing, _nothing, holds, position)
        task = self._makers.submit(work)
        return _Coming(partial(self._result, task), task.drop, _nothing, holds, position)

    def _place(self, feed: Feed) -> None:
        """Has the first few of the queue placed on their devices."""
        if self._pace.prefetch == 0:
            return
        for coming in list(self._queue)[:PLACED]:
            if coming.placed is None:
                coming.placed = self._placer.submit(partial(_placed, coming, feed))

    def _made_pool(self) -> WorkerPool:
        from datapipe.prefetch.worker_pool import WorkerPool

        pace = self._pace
        return WorkerPool(self._recipe, self._rows, pace.workers, pace.window, self.lifetime)

    def _healed(self, pool: WorkerPool) -> WorkerPool:
        """Another one where the thread failed that leads the workers."""
        if not pool.is_lost:
            return pool
        pool.close(wait=True)
        try:
            return self._made_pool()
        except OSError as error:
            raise WorkerFailed(f"the workers cannot be started again: {error}") from error

    # -- windows -------------------------------------------------------------------------------

    def _has_window(self) -> bool:
        """Whether there is one with a batch that is not in the queue."""
        if self._windows and self._used == self._windows[0].count:
            window = self._windows.popleft()
            self._is_quick = isinstance(window, Window) and window.was_quick
            self._used = 0
        return bool(self._windows) or self._open()

    def _open(self) -> bool:
        """Begins another window; False at the end of the plan."""
        if self._is_at_end:
            return False
        fitting = max(1, WINDOW_BYTES // max(1, self._batch_bytes))
        start, size = self._planned_to, min(self._window_size, fitting)
        window: Window | Job
        if self._pool is not None:
            self._pool = self._healed(self._pool)
            window = self._pool.window(self._plan, start, size, self._replaced)
        else:
            recipe, plan, rows = self._recipe, self._plan, self._rows
            window = Window(recipe, plan, start, size, rows, self._replaced)
        if window.count == 0:
            self._is_at_end = True
            return False
        self._windows.append(window)
        self._planned_to = window.position_after(window.count - 1)
        self._window_size = min(2 * size, self._pace.window)
        return True


def _placed(coming: _Coming, feed: Feed | None) -> Made:
    """The batch where it belongs."""
    made = coming.made()
    if feed is not None:
        with made.cost.of("placing"):
            made = made._replace(batch=feed.place(made.batch))
        coming.done()
    return made


def _nothing() -> None:
    """Nothing to cancel or to let go: the batch is made when it is asked for."""


_prefetchers: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_prefetchers):
        if each.lifetime.is_ours:
            each.close(wait=True)


# While there is an interpreter that threads can run in; atexit comes after that.
getattr(threading, "_register_atexit", atexit.register)(_close_all)

"""Working ahead: the batches that come next, made before they are asked for.

A queue of batches from a position on, each made in a thread. It can be thrown away at any time and
is: `restart` drops it, and it fills again from the new position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from datapipe.batch import Made, Recipe
from datapipe.faults import Fault, too_many
from datapipe.plan import Plan
from datapipe.rows import Rows
from datapipe.substitutes import Replaced
from datapipe.window import Window
from formats.errors import Misuse

if TYPE_CHECKING:
    from datapipe.feed import Feed


@dataclass(frozen=True)
class Pace:
    """How far to work ahead, and with what; see `Pipeline.iterator`.

    Raises:
      Misuse: an argument is out of range.
    """

    prefetch: int = 2
    window: int = 8
    threads: int = 1

    def __post_init__(self) -> None:
        for name, least in (("prefetch", 0), ("window", 1), ("threads", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise Misuse(f"{name} must be an integer from {least} on, found {value!r}")


class Ready(NamedTuple):
    """A batch that was made."""

    batch: Any
    next_example: int  # the position once it is delivered
    faults: tuple[Fault, ...]  # bad records that came up in it for the first time


class _Coming(NamedTuple):
    """A batch that is being made."""

    result: Callable[[], Made]  # waits for it, or makes it now
    cancel: Callable[[], Any]
    next_example: int


class Ahead:
    """The coming batches of a plan; `restart` says from where on.

    Args:
      recipe: sources and transforms.
      feed: puts batches on devices; None: they stay on the host.
      pace: how far, and with what.
    """

    def __init__(self, recipe: Recipe, feed: Feed | None, pace: Pace) -> None:
        self._recipe = recipe
        self._feed = feed
        self._pace = pace
        self._queue: deque[_Coming] = deque()
        self._executor: ThreadPoolExecutor | None = None

    def restart(self, plan: Plan, next_example: int, replaced: Replaced) -> None:
        """Drops what was made, and goes on from this position of this plan.

        Records in `replaced` are replaced by others.
        """
        for coming in self._queue:
            coming.cancel()
        self._queue.clear()
        self._plan = plan
        self._replaced = replaced
        self._planned_to = next_example
        self._window: Window | None = None
        self._window_used = 0
        self._window_size = 1  # the first batch must not wait for a whole window to be read

    def replace(self, replaced: Replaced, next_example: int) -> None:
        """From the position of the queue, which this is, more records are replaced.

        What was made ahead stays, unless one of them is in it: it may have been good at the time.
        """
        new = Replaced.of(set(replaced.pairs()) - set(self._replaced.pairs()))
        if self._is_ahead(new, next_example):
            self.restart(self._plan, next_example, replaced)
        else:
            self._replaced = replaced

    def _is_ahead(self, records: Replaced, next_example: int) -> bool:
        """Is one of these in a batch that was made, or whose records were read?"""
        left = 0 if self._window is None else self._window.count - self._window_used
        batches = self._plan.examples(next_example, len(self._queue) + left)
        examples = np.concatenate([np.zeros(0, np.int64), *batches])
        rows = Rows(examples, *self._plan.locate(examples))
        return any(
            records.mask(number, rows.of(number).ids(self._recipe.sources[number])).any()
            for number in rows.numbers()
        )

    def start(self) -> None:
        """Starts to make as many batches as the pace allows."""
        self._fill(self._pace.prefetch)

    def next(self) -> Ready | None:
        """The next batch; waits for it. None at the end of the plan.

        After an error this object must be restarted.

        Raises:
          BadRecord: a record is bad and not to be replaced, or there are too many.
        """
        self._fill(1)
        if not self._queue:
            return None
        coming = self._queue[0]
        made = coming.result()
        new = tuple(fault for fault in made.faults if fault.pair not in self._replaced)
        limit = self._recipe.tolerance.limit
        if new and len(self._replaced) + len(new) > limit:
            raise too_many(len(self._replaced), new, limit)
        self._queue.popleft()  # only now: an interrupt while waiting loses nothing
        return Ready(made.batch, coming.next_example, new)

    def close(self, *, wait: bool) -> None:
        """Stops working; `wait`: until the threads have ended."""
        for coming in self._queue:
            coming.cancel()
        self._queue.clear()
        if self._executor is not None:
            self._executor.shutdown(wait=wait, cancel_futures=True)

    def _fill(self, wanted: int) -> None:
        while len(self._queue) < wanted:
            if self._window is None or self._window_used == self._window.count:
                rows = None if self._feed is None else self._feed.rows
                size = self._window_size
                window = Window(
                    self._recipe, self._plan, self._planned_to, size, rows, self._replaced
                )
                if window.count == 0:
                    return
                self._window, self._window_used = window, 0
                self._window_size = min(2 * self._window_size, self._pace.window)
            work = partial(_make, self._window, self._window_used, self._feed)
            self._planned_to = self._window.position_after(self._window_used)
            self._window_used += 1
            self._queue.append(self._submit(work))

    def _submit(self, work: Callable[[], Made]) -> _Coming:
        if self._pace.prefetch == 0:
            return _Coming(work, _nothing, self._planned_to)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._pace.threads, "datapipe")
        future = self._executor.submit(work)
        return _Coming(future.result, future.cancel, self._planned_to)


def _make(window: Window, index: int, feed: Feed | None) -> Made:
    try:
        made = window.batch(index)
    except StopIteration as error:  # from a function of the user: it would look like the end
        raise RuntimeError("a function of the pipeline raised StopIteration") from error
    return made if feed is None else made._replace(batch=feed.place(made.batch))


def _nothing() -> None:
    """Nothing to cancel: the batch is made when it is asked for."""

"""The iterator: batches in order, and a position that can be saved.

What it hands out is decided by three values: the position, the skips, and the records that turned
out to be bad and are replaced. All of them belong to what was *delivered*. Whoever changes one
drops what was made ahead under another (`datapipe.prefetch.prefetcher`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import grain

from datapipe import state as states
from datapipe.batches.substitutes import Replaced
from datapipe.order.plan import Plan
from datapipe.prefetch.prefetcher import Prefetcher
from datapipe.prefetch.stats import Stats
from datapipe.segments import Positions
from formats.errors import Misuse

_log = logging.getLogger("datapipe")


class Iterator(grain.DatasetIterator[Any]):
    """Batches of a pipeline from a position on; made by `Pipeline.iterator`.

    A batch is a tree of NumPy arrays with a leading axis of `batch_size` rows (fewer in a
    remainder that is kept), or of global `jax.Array`s where a sharding was given. For Grain this
    is a `DatasetIterator`; the same rule holds: one thread at a time.
    """

    united = ("replaced",)
    """What each process finds for itself: states of several processes have one union of it."""

    def __init__(self, positions: Positions, prefetcher: Prefetcher) -> None:
        super().__init__()
        self._positions = positions
        self._plan = positions.plan
        self._prefetcher = prefetcher
        self._next_example = 0
        self._replaced = Replaced()
        self._is_cut_short = True
        self._follow()

    # -- iterating -----------------------------------------------------------------------------

    def __next__(self) -> Any:
        """The next batch.

        Raises:
          StopIteration: the last epoch is over; also at every later call.
          BadRecord: a record of this batch cannot be read or mapped, and is not to be replaced, or
            too many have been; the position stays, as it does whatever else is raised.
          Misuse: the iterator is closed.
        """
        self._refuse_closed()
        self._follow()
        self._is_cut_short = True
        ready = self._prefetcher.next()
        if ready is None:
            self._is_cut_short = False
            raise StopIteration
        replaced = self._replaced
        if ready.faults:
            replaced = replaced.union(fault.pair for fault in ready.faults)
            self._prefetcher.replace(replaced)
        self._prefetcher.start()
        for fault in ready.faults:
            _log.warning("%s: another record takes its place", fault)
        # The last thing, and without a call, at which an interrupt could come in between.
        self._replaced = replaced
        self._next_example = ready.next_example
        self._is_cut_short = False
        return ready.batch

    def start_prefetch(self) -> None:
        """Starts to make batches, if `prefetch` allows any, before the first one is asked for."""
        self._refuse_closed()
        self._follow()
        self._is_cut_short = True
        self._prefetcher.start()
        self._is_cut_short = False

    def stats(self) -> Stats:
        """Batches and records delivered, how long they were waited for, and what takes longest."""
        return self._prefetcher.stats()

    def close(self) -> None:
        """Stops working ahead and waits for the threads. Only the state can be asked for then."""
        self._shutdown(wait=True)

    def __enter__(self) -> Iterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A collector may run in one of the threads that a plain close() would wait for.
        self._shutdown(wait=False)

    def __str__(self) -> str:
        return f"datapipe.Iterator(next_example={self._next_example})"

    # -- the position --------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan with the skips of this iterator."""
        return self._plan

    @property
    def batch_size(self) -> int:
        """Examples per batch, over all processes."""
        return self._plan.batch_size

    @property
    def next_example(self) -> int:
        """The position: one past the last example delivered."""
        return self._next_example

    def get_state(self) -> states.JSON:
        """The position after the batches *delivered*, the skips, and what they belong to.

        A JSON value, the same for any batch size and any number of processes and threads. Only
        `replaced` differs: each process knows the bad records that it came upon, and those that
        `set_state` told it. It tells of `remainder`, too, which another pipeline may have changed.
        """
        segments = states.segments_in(self._plan.order.segments)
        identity = {**self._positions.identity, "segments": segments}
        skipped = tuple(self._plan.skipped)
        remainder = self._plan.remainder
        found = states.State(self._next_example, skipped, self._replaced, identity, remainder)
        return found.to_json()

    def set_state(self, state: states.JSON) -> None:
        """Goes to a saved position; its skips, segments and replaced records become those here.

        Reads nothing. What is replaced there is replaced from here on, also if it could be read now
        and whatever `on_bad_record` says. With `on_change="segment"` a segment is opened there if
        the data has changed; the log says so.

        Raises:
          Mismatch: the state belongs to another source, seed, shuffle or other transforms, or
            lies beyond the end; `differences` lists all. The iterator is left as it was.
          Damaged, Unsupported: see `State.from_json`.
        """
        saved = states.State.from_json(state)
        resumed = self._positions.resumed(saved, self._plan)
        self._refuse_closed()
        if resumed.told:
            _log.warning("%s", resumed.told)
        if len(saved.replaced):
            _log.info("%d records are replaced, as the saved position says", len(saved.replaced))
        self._plan = resumed.plan
        self._next_example = saved.next_example
        self._replaced = saved.replaced
        self._is_cut_short = True
        self._follow()

    def seek(self, example: int) -> None:
        """Goes to an example, 0 to the end of the plan; skips and replaced records stay.

        Reads nothing.
        """
        self._refuse_closed()
        self._plan.batches_left(example)  # refuses what is no position
        example = int(example)
        self._next_example = example
        self._is_cut_short = True
        self._follow()

    def skip(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Never serves these examples, beside those already skipped.

        `ranges` are half-open, of addresses, as `span` gives them: the ordinals of each source,
        which are the examples where there is one source.

        Batches close up: the next batch is the next `batch_size` examples that are left. What was
        delivered before stays delivered; with more than one epoch the same *records* come back in
        the next epoch, as other examples, unless the pipeline has `skip_records=True`.
        """
        self._refuse_closed()
        self._plan = self._plan.skipping(ranges)
        self._is_cut_short = True
        self._follow()

    def span(
        self,
        state: states.JSON,
        first: int,
        stop: int,
        skips: Iterable[tuple[int, int]] = (),
        *,
        batch_size: int | None = None,
    ) -> list[tuple[int, int]]:
        """What batches first..stop-1 hold, counted from a saved state of this run.

        Under the segments, skips and remainder of that state, with `skips` beside them, and
        `batch_size` (None: the one here); ranges as `skip` takes them. Where a segment was opened
        after it, give what `toward` returns.

        Raises:
          Mismatch, Damaged, Unsupported: as `set_state`.
        """
        saved, plan = self._counted(state, skips, batch_size)
        return plan.addresses(plan.span(saved.next_example, first, stop))

    def position_after(
        self,
        state: states.JSON,
        batches: int,
        skips: Iterable[tuple[int, int]] = (),
        *,
        batch_size: int | None = None,
    ) -> int:
        """The `next_example` of the state that comes that many batches after a saved one.

        Arguments and errors as of `span`.
        """
        saved, plan = self._counted(state, skips, batch_size)
        return plan.advance(saved.next_example, batches)

    def toward(self, state: states.JSON, later: states.JSON | None) -> states.JSON:
        """A saved state of this run with the segments that were opened until a later one.

        So that `span` and `position_after` count what was served between the two. As it is, where
        `later` does not lie ahead; None: as this iterator would go on from it.

        Raises:
          Damaged, Unsupported: see `State.from_json`.
        """
        end = None if later is None else states.State.from_json(later)
        return self._positions.toward(states.State.from_json(state), end).to_json()

    def _counted(
        self, state: states.JSON, skips: Iterable[tuple[int, int]], batch_size: int | None
    ) -> tuple[states.State, Plan]:
        saved = states.State.from_json(state)
        plan = self._positions.counted(saved, skips)
        return saved, plan if batch_size is None else replace(plan, batch_size=batch_size)

    # -- within --------------------------------------------------------------------------------

    def _follow(self) -> None:
        """What is made ahead begins at the position, also after an error or an interrupt.

        Wherever that came: what was made until then is dropped. A batch that was half made cannot
        be made again from arrays that functions have changed in place.
        """
        if self._is_cut_short:
            self._prefetcher.restart(self._plan, self._next_example, self._replaced)
            self._is_cut_short = False

    def _shutdown(self, *, wait: bool) -> None:
        if getattr(self, "_closed", True):  # also where __init__ was never reached
            return
        super().close()
        self._prefetcher.close(wait=wait)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise Misuse("this iterator is closed; take a new one from the pipeline")


class Dataset(grain.IterDataset[Any]):
    """A pipeline as a Grain dataset; made by `Pipeline.dataset`."""

    def __init__(self, start: Callable[[], Iterator]) -> None:
        super().__init__()
        self._start = start

    def __iter__(self) -> Iterator:
        return self._start()

    def __str__(self) -> str:
        return "datapipe.Dataset"

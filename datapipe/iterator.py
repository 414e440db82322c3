"""The iterator: batches in order, and a position that can be saved.

What it hands out is decided by three values: the position, the skips, and the records that turned
out to be bad and are replaced. All of them belong to what was *delivered*. Whoever changes one
drops what was made ahead under another (`datapipe.prefetch.prefetcher`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import grain

from datapipe import state as states
from datapipe.batches.substitutes import Replaced
from datapipe.integers import integer
from datapipe.order.plan import Plan
from datapipe.prefetch.lifetime import MOVED
from datapipe.prefetch.prefetcher import Prefetcher
from datapipe.prefetch.stats import Stats
from datapipe.segments import Positions
from formats.errors import Misuse

_log = logging.getLogger("datapipe")


class _Position(NamedTuple):
    """What was delivered. One value, so that no thread ever sees parts of two."""

    plan: Plan
    next_example: int
    replaced: Replaced


class Iterator(grain.DatasetIterator[Any]):
    """Batches of a pipeline from a position on; made by `Pipeline.iterator`.

    A batch is a tree of NumPy arrays with a leading axis of `batch_size` rows (fewer in a
    remainder that is kept), or of global `jax.Array`s where a sharding was given. For Grain this
    is a `DatasetIterator`.

    Several threads may call it: one after the other is served, in any order, and each batch goes to
    one of them. `get_state`, `stats` and `close` do not wait for a batch that another thread waits
    for. It belongs to the process that made it: in a forked child all but `get_state`, `close` and
    the questions to the plan are refused.
    """

    united = ("replaced",)
    """What each process finds for itself: states of several processes have one union of it."""

    def __init__(self, positions: Positions, prefetcher: Prefetcher) -> None:
        super().__init__()
        self._positions = positions
        self._prefetcher = prefetcher
        self._lifetime = prefetcher.lifetime
        self._at = _Position(positions.plan, 0, Replaced())
        self._is_cut_short = True
        self._follow()

    # -- iterating -----------------------------------------------------------------------------

    def __next__(self) -> Any:
        """The next batch.

        Raises:
          StopIteration: the last epoch is over; also at every later call.
          BadRecord: a record of this batch cannot be read or mapped, and is not to be replaced, or
            too many have been; the position stays, as it does whatever else is raised.
          Misuse: the iterator is closed, also while this waits; or it is of another process.
        """
        lifetime = self._lifetime
        before = self._at
        after: _Position | None = None
        try:
            with lifetime.turn():
                before = self._at
                if lifetime.is_closed or self._is_cut_short:
                    lifetime.refuse_closed()
                    self._follow()
                self._is_cut_short = True
                ready = self._prefetcher.next()
                if ready is None:
                    self._is_cut_short = False
                    raise StopIteration
                replaced = before.replaced
                if ready.faults:
                    replaced = replaced.union(fault.pair for fault in ready.faults)
                    self._prefetcher.replace(replaced)
                self._prefetcher.start()
                for fault in ready.faults:
                    _log.warning("%s: another record takes its place", fault)
                at = _Position(before.plan, ready.next_example, replaced)
                if lifetime.is_closed or self._at is not before:
                    lifetime.refuse_closed()
                    raise Misuse(MOVED)
                # Without a call, at which an interrupt could come in between.
                self._at = after = at
                self._is_cut_short = False
                return ready.batch
        except BaseException:
            if after is not None and self._at is after:  # as the lock was let go: not delivered
                self._at = before
                self._is_cut_short = True
            raise

    # Grain would wrap it in a function in Python, within which an interrupt loses the batch.
    __next__.is_traceback_filtered = True  # type: ignore[attr-defined]

    def start_prefetch(self) -> None:
        """Starts to make batches, if `prefetch` allows any, before the first one is asked for."""
        with self._lifetime.turn():
            self._lifetime.refuse_closed()
            self._follow()
            self._is_cut_short = True
            self._prefetcher.start()
            self._is_cut_short = False

    def stats(self) -> Stats:
        """Batches and records delivered, how long they were waited for, and what takes longest."""
        self._lifetime.turn()
        return self._prefetcher.stats()

    def close(self) -> None:
        """Stops working ahead and waits for the threads. Only the state can be asked for then.

        A thread that waits for a batch gets Misuse, as does one that makes it itself (always so
        with `prefetch=0`), which is waited for. In a forked child nothing happens.
        """
        if not self._lifetime.is_ours:
            return
        super().close()
        self._prefetcher.stop()
        with self._lifetime.turn():
            self._prefetcher.close(wait=False)
        self._prefetcher.close(wait=True)  # behind it, so that others who wait are refused now

    def __enter__(self) -> Iterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_ending():  # all are closed by then, and modules may have lost what they import
            return
        lifetime = getattr(self, "_lifetime", None)  # None where __init__ was never reached
        if lifetime is not None and lifetime.is_ours:
            # A collector may run in one of the threads that a plain close() would wait for.
            self._prefetcher.close(wait=False)

    def __reduce__(self) -> NoReturn:
        raise Misuse(
            "an iterator cannot be copied or sent to another process: make one there with "
            "pipe.iterator(), and set_state(get_state()) of this one"
        )

    def __str__(self) -> str:
        return f"datapipe.Iterator(next_example={self.next_example})"

    # -- the position --------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan with the skips of this iterator."""
        return self._at.plan

    @property
    def batch_size(self) -> int:
        """Examples per batch, over all processes."""
        return self.plan.batch_size

    @property
    def next_example(self) -> int:
        """The position: one past the last example delivered."""
        return self._at.next_example

    def get_state(self) -> states.JSON:
        """The position after the batches *delivered*, the skips, and what they belong to.

        A JSON value, the same for any batch size and any number of processes and threads. Only
        `replaced` differs: each process knows the bad records that it came upon, and those that
        `set_state` told it. It tells of `remainder`, too, which another pipeline may have changed.
        """
        plan, next_example, replaced = self._at
        segments = states.segments_in(plan.order.segments)
        identity = {**self._positions.identity, "segments": segments}
        skipped = tuple(plan.skipped)
        found = states.State(next_example, skipped, replaced, identity, plan.remainder)
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
        with self._lifetime.turn():
            resumed = self._positions.resumed(saved, self.plan)
            self._lifetime.refuse_closed()
            if resumed.told:
                _log.warning("%s", resumed.told)
            if len(saved.replaced):
                _log.info(
                    "%d records are replaced, as the saved position says", len(saved.replaced)
                )
            self._move(_Position(resumed.plan, saved.next_example, saved.replaced))

    def seek(self, example: int) -> None:
        """Goes to an example, 0 to the end of the plan; skips and replaced records stay.

        Reads nothing.
        """
        with self._lifetime.turn():
            self._lifetime.refuse_closed()
            at = self._at
            example = integer("an example", example, 0, at.plan.end)
            self._move(at._replace(next_example=example))

    def skip(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Never serves these examples, beside those already skipped.

        `ranges` are half-open, of addresses, as `span` gives them: the ordinals of each source,
        which are the examples where there is one source.

        Batches close up: the next batch is the next `batch_size` examples that are left. What was
        delivered before stays delivered; with more than one epoch the same *records* come back in
        the next epoch, as other examples, unless the pipeline has `skip_records=True`.
        """
        with self._lifetime.turn():
            self._lifetime.refuse_closed()
            at = self._at
            self._move(at._replace(plan=at.plan.skipping(ranges)))

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
            at = self._at
            self._prefetcher.restart(*at)
            self._is_cut_short = self._at is not at  # by a signal handler

    def _move(self, to: _Position) -> None:
        self._at = to
        self._is_cut_short = True
        self._follow()


class Dataset(grain.IterDataset[Any]):
    """A pipeline as a Grain dataset; made by `Pipeline.dataset`."""

    def __init__(self, start: Callable[[], Iterator]) -> None:
        super().__init__()
        self._start = start

    def __iter__(self) -> Iterator:
        return self._start()

    def __str__(self) -> str:
        return "datapipe.Dataset"

"""Worker processes that make whole windows of batches, in the order of the plan.

A *task* is a window: a position, a number of batches, a slot for each. Whichever worker has least
to do gets the next one; what comes out does not depend on it. One thread here talks with all of
them. Who wants a batch waits until it rings a bell, so that nothing that a worker does or fails to
do stops a change of position or `close`.

A worker that dies is replaced, and what it had not delivered is given out again. Workers are
killed when they are not wanted any more: there is nothing in them to lose.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from datapipe.batches.batch import Made, Recipe
from datapipe.batches.faults import Fault
from datapipe.batches.substitutes import Replaced
from datapipe.batches.window import Window
from datapipe.order.plan import Plan
from datapipe.prefetch import worker as child
from datapipe.prefetch.exceptions import unpacked
from datapipe.prefetch.lifetime import MOVED, Lifetime
from datapipe.prefetch.ring import Bytes, Ring, anonymous, mapped, opened
from datapipe.prefetch.worker_process import WorkerProcess, pickled_work, start_worker
from formats.errors import Misuse, WorkerFailed

_log = logging.getLogger("datapipe")

DEATHS: Final = 3
"""So often workers may die without a batch being delivered in between."""
KEPT: Final = 4
"""Batches that the user may keep in slots; others are copied out of theirs."""


class _Place(NamedTuple):
    """Where a batch lies that was made."""

    memory: Bytes
    ring: Ring | None  # the memory is a slot of; None: it is the batch's own
    is_error: bool


_TAKEN: Final = _Place(np.zeros(0, np.uint8), None, is_error=False)


class Job:
    """A window whose batches are made by a worker."""

    def __init__(
        self,
        pool: WorkerPool,
        window: Window,
        number: int,
        generation: int,
        order: child.Order,
        start: int,
    ) -> None:
        self._pool = pool
        self._window = window
        self.number = number
        self.generation = generation
        self.order = order
        self.next_example = start
        self.taken = 0  # batches that need not be kept any more
        self.places: list[_Place | None] = [None] * window.count
        self.slots: dict[int, int] = {}  # by batch: granted, and nothing came yet
        self.ring: Ring | None = None

    @property
    def count(self) -> int:
        """Number of batches."""
        return self._window.count

    def position_after(self, index: int) -> int:
        """The position when batch `index` is delivered."""
        return self._window.position_after(index)

    def batch(self, index: int) -> Made:
        """Waits for a batch. Raises what making it raised, Misuse, WorkerFailed."""
        return self._pool.batch(self, index)

    def holds(self, index: int, faults: Sequence[Fault], replaced: Replaced) -> bool:
        """See `Window.holds`."""
        return self._window.holds(index, faults, replaced)

    def done(self, index: int) -> None:
        """Batch `index`, and those before it, are not asked for again."""
        self._pool.done(self, index)

    @property
    def missing(self) -> range:
        """What did not come yet."""
        first = next((i for i, place in enumerate(self.places) if place is None), self.count)
        return range(first, self.count)

    @property
    def missing_from(self) -> int:
        """The position of the first batch that did not come yet."""
        first = self.missing.start
        return self.next_example if first == 0 else self.position_after(first - 1)


class WorkerPool:
    """Worker processes and the windows they are at work on.

    Args:
      recipe: sources and transforms.
      rows: which rows of each batch to make; None: all of them.
      workers: number of processes.
      window: batches of a window, at most.
      lifetime: of the iterator. All calls are made in its process.

    Raises:
      Misuse: a source or a function cannot be sent to another process.
    """

    def __init__(
        self,
        recipe: Recipe,
        rows: NDArray[np.int64] | None,
        workers: int,
        window: int,
        lifetime: Lifetime,
    ) -> None:
        self._recipe = recipe
        self._rows = rows
        self._size = workers
        self._slots = 2 * workers * window + KEPT
        self._lifetime = lifetime
        # Entered as it is, and no Condition: see `datapipe.prefetch.makers`.
        self._lock = threading.RLock()
        with contextlib.ExitStack() as held:
            self._work = pickled_work(recipe, rows)
            held.callback(os.close, self._work.fd)
            self._control = anonymous(child.CONTROL_BYTES)
            held.callback(os.close, self._control)
            self._wanted = memoryview(mmap.mmap(self._control, child.CONTROL_BYTES)).cast("q")
            self._wake_read, self._wake = socket.socketpair()
            for end in (self._wake_read, self._wake):
                held.callback(end.close)
                end.setblocking(False)
            self._held = held.pop_all()  # descriptors
        self._thread: threading.Thread | None = None
        self.is_lost = False  # the thread failed: there will be no more workers
        self._is_closed = False
        self._is_there = True  # with descriptors and workers
        self._generation = 0
        self._numbers = 0
        self._order: child.Order | None = None
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[Job] = deque()  # not given to a worker
        self._jobs: dict[int, Job] = {}  # of this generation, until their last batch is taken
        self._ring: Ring | None = None
        self._is_short = False  # of slots
        self._deaths = 0
        self._failure: Exception | None = None

    # -- for who wants batches -------------------------------------------------------------------

    def restart(self) -> None:
        """Forgets all windows."""
        with self._lock:
            self._generation += 1
            self._wanted[0] = self._generation
            for job in self._jobs.values():
                self._forget(job, job.count)
            self._jobs.clear()
            self._waiting.clear()
            if not self.is_lost:
                self._deaths = 0
                self._failure = None
        self._lifetime.bell.ring()

    @property
    def has_room(self) -> bool:
        """Whether another window may be begun."""
        with self._lock:
            return len(self._jobs) < 2 * self._size

    def window(self, plan: Plan, next_example: int, count: int, replaced: Replaced) -> Job:
        """Begins a window of a plan; there must be room. It may hold fewer batches, or none."""
        planned = Window(self._recipe, plan, next_example, count, self._rows, replaced)
        order = self._order
        if order is None or order.plan is not plan or order.replaced is not replaced:
            order = self._order = child.Order(plan, replaced)
        with self._lock:
            self._numbers += 1
            job = Job(self, planned, self._numbers, self._generation, order, next_example)
            if job.count:
                self._jobs[job.number] = job
                self._waiting.append(job)
        self._start()
        self._signal()
        return job

    def batch(self, job: Job, index: int) -> Made:
        """See `Job.batch`."""
        self._lifetime.bell.wait(lambda: job.places[index] is not None or self._is_over(job))
        with self._lock:
            place = job.places[index]
            if place is None:
                if self._failure is not None:
                    raise self._failure
                self._lifetime.refuse_closed()
                raise Misuse(MOVED)
            self._deaths = 0
            ring, memory = place.ring, place.memory
            if ring is not None:
                memory = ring.handed_over(memory)
        value = opened(memory)
        if place.is_error:
            raise unpacked(value)
        made: Made = value
        return made

    def done(self, job: Job, index: int) -> None:
        """See `Job.done`."""
        with self._lock:
            self._forget(job, index + 1)
            if job.taken == job.count:
                self._jobs.pop(job.number, None)
            if self._is_short:
                self._signal()

    def close(self, *, wait: bool) -> None:
        """Kills the workers; `wait`: until they are gone. May be called from a collector."""
        self._is_closed = True
        thread = self._thread  # which may have failed and be about to leave
        if thread is None:
            self._leave()
            return
        self._signal()
        if wait and thread is not threading.current_thread():
            thread.join()

    def pids(self) -> list[int]:
        """The processes that are there now."""
        with self._lock:
            return [each.process.pid for each in self._workers]

    # -- within ----------------------------------------------------------------------------------

    def _is_over(self, job: Job) -> bool:
        """Whether no more of it will come."""
        is_stale = job.generation != self._generation
        return is_stale or self._is_closed or self._failure is not None

    def _forget(self, job: Job, stop: int) -> None:
        """Lets go of the batches before `stop`."""
        for index in range(job.taken, stop):
            if job.places[index] is not None:
                job.places[index] = _TAKEN
        job.taken = max(job.taken, stop)

    def _start(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="datapipe-workers", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads to be had: perhaps later
            self._thread = None
            raise

    def _signal(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is awake anyway
            self._wake.send(b"\0")

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:
                with self._lock:
                    self._hire()
                    self._give_out()
                ready = self._poll()
                with self._lock:
                    for each in list(self._workers):
                        if each.heard_of(ready):
                            self._hear(each)
                self._lifetime.bell.ring()
        except BaseException as error:
            with self._lock:
                self.is_lost = True
                self._failure = WorkerFailed(
                    f"the workers cannot be led any more: {error!r}. The position stays, and the "
                    "next call starts others; without workers goes pipe.iterator(workers=0)"
                )
                self._failure.__cause__ = error
            self._lifetime.bell.ring()
        finally:
            self._leave()

    def _poll(self) -> set[int]:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        for each in self._workers:
            for fd in each.fds:
                poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass
        return ready

    def _hire(self) -> None:
        """As many workers as there is work for."""
        busy = sum(bool(each.jobs) for each in self._workers)
        wanted = min(self._size, busy + len(self._waiting))
        while len(self._workers) < wanted and self._failure is None:
            try:
                self._workers.append(start_worker(self._control, self._work))
            except OSError as error:
                self._failure = WorkerFailed(f"a worker process cannot be started: {error}")
                self._failure.__cause__ = error

    def _give_out(self) -> None:
        while self._waiting:
            # Not behind a window that nobody wants any more: a function may hang in it.
            able = [each for each in self._workers if not self._is_behind(each)]
            if not able:
                return
            each = min(able, key=lambda one: len(one.jobs))
            job = self._waiting[0]
            self._is_short = self._ring is not None and self._ring.free < len(job.missing)
            # Slots come back: of windows nobody wants any more, and of batches that are taken.
            if len(each.jobs) == 2 or self._is_short:
                return
            self._waiting.popleft()
            each.jobs[job.number] = job
            self._send(each, job)

    def _is_behind(self, each: WorkerProcess) -> bool:
        return any(job.generation != self._generation for job in each.jobs.values())

    def _send(self, each: WorkerProcess, job: Job) -> None:
        missing = job.missing
        job.ring = self._ring
        if self._ring is not None:
            job.slots = {index: self._ring.grant() for index in missing}
        slots = (*job.slots.values(),)
        task = child.Task(
            job.number, job.generation, job.missing_from, missing.start, missing.stop, slots
        )
        with contextlib.suppress(ConnectionError):  # it is dead: heard of elsewhere
            if each.order is not job.order:
                each.send_order(job.order)
            if self._ring is not None and each.ring != self._ring.number:
                each.send_ring(self._ring)
            child.send(each.link, task)

    def _hear(self, each: WorkerProcess) -> None:
        """All that a worker has said, and whether it is dead."""
        is_over = each.has_ended()  # asked first: what it said before it died is heard below
        try:
            while True:
                message, fds = child.receive(each.link, socket.MSG_DONTWAIT)
                self._take(each, message, fds)
        except BlockingIOError:
            if is_over:
                self._bury(each)
        except (EOFError, ConnectionError):
            self._bury(each)

    def _take(self, each: WorkerProcess, message: Any, fds: list[int]) -> None:
        job = each.jobs[message.number]
        if isinstance(message, child.Dropped):
            self._release(each, job)
            return
        slot = job.slots.pop(message.batch, -1)
        ring = job.ring
        if message.is_enclosed:
            if ring is not None:
                ring.take_back(slot)
            memory = mapped(fds[0], message.size_bytes)
            os.close(fds[0])
            if ring is self._ring and not message.is_error:
                self._enlarge(message.size_bytes)
            ring = None
        else:
            assert ring is not None
            memory = ring.lend(slot, message.size_bytes)
        if job.generation == self._generation:
            job.places[message.batch] = _Place(memory, ring, message.is_error)
        if message.batch == job.count - 1:
            self._release(each, job)

    def _enlarge(self, size_bytes: int) -> None:
        """Slots for batches a little larger than this one; tasks that are out keep theirs."""
        before = 0 if self._ring is None else self._ring.slot_bytes
        self._ring = Ring(self._slots, max(2 * before, size_bytes + size_bytes // 4), KEPT)

    def _release(self, each: WorkerProcess, job: Job) -> None:
        """A worker has nothing to do with a job any more."""
        del each.jobs[job.number]
        for slot in job.slots.values():
            assert job.ring is not None
            job.ring.take_back(slot)
        job.slots = {}

    def _bury(self, each: WorkerProcess) -> None:
        """A worker died: what it was at goes to others, within the budget."""
        self._workers.remove(each)
        how = each.collect()
        lost = [job for job in each.jobs.values() if job.generation == self._generation]
        for job in list(each.jobs.values()):
            self._release(each, job)
        self._waiting.extendleft(reversed(lost))
        self._deaths += 1
        what = ", ".join(_batches(job) for job in lost) or "nothing"
        told = f"worker process {each.process.pid} of the pipeline {how}; it was to make {what}"
        if self._deaths < DEATHS:
            _log.warning("%s. Another one does it.", told)
            return
        self._failure = WorkerFailed(
            f"{told}. It is death {self._deaths} without a batch in between. Where memory ran "
            "out, take fewer workers or a smaller window; else see what the functions of the "
            "pipeline do to these examples with workers=0, or leave them out with iterator.skip"
        )
        _log.error("%s", self._failure)

    def _leave(self) -> None:
        """Everything goes; in the thread, or where there was none."""
        is_there, self._is_there = self._is_there, False
        if not is_there:
            return
        with self._lock:
            for each in self._workers:
                each.process.kill()
            for each in self._workers:
                each.collect()
            self._workers.clear()
            self._is_closed = True
        self._lifetime.bell.ring()
        self._held.close()


def _batches(job: Job) -> str:
    last = job.position_after(job.count - 1) - 1
    return f"{len(job.missing)} batches from example {job.missing_from} to {last}"

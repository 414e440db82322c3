"""The loop that turns snapshots into committed steps, in a thread of its own.

A job is a filled slot. Its way: image durable -> part durable -> (process 0: all parts there ->
small files -> publish -> retention). No jax here: the same loop can run in another process.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from ckpt import attempts, commit, layout, publishing
from ckpt.errors import (
    NotFound,
    PeerFailed,
    StoreFailed,
)
from ckpt.image import Header
from ckpt.lineage import Lineage, StepId
from ckpt.pending import Pending
from ckpt.processes import Matter, Processes
from ckpt.store import Store

_POLL_S = 0.02
_POLL_LIMIT_S = 0.5


class Slot(Protocol):
    """A filled slot of the arena."""

    buffer: memoryview

    def release(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """A snapshot to be made a step."""

    id: StepId
    slot: Slot
    header: Header
    line: Lineage
    pending: Pending
    figures: dict[str, Any] = field(default_factory=dict)


@final
class Writer:
    """Works off jobs in order.

    Args:
        compression: that of the tier; images are compressed before they are written.
        committed: called on process 0 after a step is acknowledged.
        lost: likewise after the store failed to hold one.
        failed: told what these two raised, which no Pending can tell any more.
        timeout_s: how long process 0 waits for the parts of the others.
    """

    def __init__(
        self,
        store: Store,
        processes: Processes,
        committed: Callable[[StepId, Lineage, dict[str, Any]], None],
        lost: Callable[[StepId, Lineage], None],
        failed: Callable[[BaseException], None],
        *,
        timeout_s: float,
        compression: str | None = None,
    ) -> None:
        self._store = store
        self._compression = compression
        self._processes = processes
        self._committed, self._lost = committed, lost
        self._failed = failed
        self._timeout_s = timeout_s
        self._known = commit.Known()
        self._settled: Matter | None = None
        """The save that was committed last."""
        # A SimpleQueue: `leave` may come in the middle of a `put`, from the garbage collector.
        self._jobs: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="ckpt-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job; its slot is released when the image is durable, or compressed elsewhere."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def leave(self, last: Callable[[], None]) -> threading.Thread:
        """As `close`, without waiting: the thread, which calls `last` when it is done."""
        self._jobs.put(last)
        return self._thread

    @property
    def is_alive(self) -> bool:
        """Is the thread there? It is not after `close`."""
        return self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if not isinstance(job, Job):
                job()
                return
            try:
                figures = self._write(job)
            except BaseException as error:
                job.pending.finish(error=error)
                if isinstance(error, StoreFailed) and self._processes.index == 0:
                    self._tell(functools.partial(self._lost, job.id, job.line))
                continue
            job.pending.finish()
            if figures is not None:
                self._tell(functools.partial(self._committed, job.id, job.line, figures))

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            what()
        except BaseException as error:  # the jobs behind this one must not wait for ever
            self._failed(error)

    def _write(self, job: Job) -> dict[str, Any] | None:
        """Returns the figures of the save on process 0, None elsewhere."""
        begun = time.monotonic()
        step, here = job.id, self._processes.index
        making = publishing.of(self._store).making(step)
        with self._processes.matter(matter_of(step), self._timeout_s) as matter:
            with attempts.explained(self._store, step.attempt):
                try:
                    attempts.look(self._store, step.attempt)
                    header, data = job.header, job.slot.buffer[: job.header.size_bytes]
                    if self._compression is not None:
                        header, data = _compressed(header, data)
                        job.slot.release()
                    commit.write_image(self._store, making, header, data)
                finally:
                    job.slot.release()
                del data  # what was compressed takes memory no longer than it must
                part = commit.part_of(header)
                self._store.put(f"{making}/{layout.part_name(step.attempt, here)}", part.emit())
            size_bytes = matter.decide("outcome", lambda: self._commit(job, header, making, matter))
        if here != 0:
            return None
        if self._settled is not None:
            # Whoever wrote a part of this step had heard how the one before it ended.
            self._settled.forget()
        self._settled = matter
        return {
            **job.figures,
            "durable_s": round(time.monotonic() - begun, 6),
            "bytes": size_bytes,
        }

    def _commit(self, job: Job, own: Header, making: str, matter: Matter) -> int:
        """Process 0: the parts of all, the small files, the marker. Returns the bytes of all."""
        with attempts.explained(self._store, job.id.attempt):
            headers = self._all_headers(making, job.id, own, matter)
            marker = commit.finish(self._store, job.id, headers, self._known)
            commit.publish(self._store, job.id, marker, job.line, owner=job.id.attempt)
        return sum(header.size_bytes for header in headers)

    def _all_headers(self, making: str, step: StepId, own: Header, matter: Matter) -> list[Header]:
        """Our own; of the others the parts, by name, then the headers of their images."""
        end = time.monotonic() + self._timeout_s
        headers = []
        for process in range(self._processes.count):
            if process == self._processes.index:
                headers.append(own)
                continue
            pause_s = _POLL_S
            while True:
                try:
                    part = commit.read_part(self._store, making, step.attempt, process)
                    break
                except NotFound:
                    matter.check()
                if time.monotonic() >= end:
                    raise PeerFailed(
                        f"step {step.step}: process {process} of {self._processes.count} has not "
                        f"written its part within {self._timeout_s:.0f} s; it may be dead or stuck"
                    )
                time.sleep(pause_s)
                pause_s = min(_POLL_LIMIT_S, pause_s * 1.5)
            headers.append(commit.read_header(self._store, making, part))
        return headers


def _compressed(header: Header, data: memoryview) -> tuple[Header, memoryview]:
    from ckpt.compressing import compressed  # here: most tiers have no use for it

    return compressed(header, data)


def matter_of(step: StepId) -> str:
    """The name under which the processes settle one save."""
    return f"a{step.attempt}/s{step.step}"

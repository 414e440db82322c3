"""What a writer was told and has not ended yet, so that another one can go on with it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import final

from ckpt.errors import CheckpointError
from ckpt.lineage import StepId
from ckpt.log import METRICS
from ckpt.messages import (
    Abandon,
    Begin,
    Close,
    Done,
    Failed,
    Flush,
    Job,
    Note,
    Noted,
    Released,
    Report,
    Settle,
    Settled,
    ToWriter,
    Trouble,
)

_NOTES = 1000
"""So many lines for the log are kept while there is no writer."""


@final
class Unfinished:
    """A pure ledger of messages and reports."""

    def __init__(self) -> None:
        self.closing = False
        self._begin: Begin | None = None
        self._jobs: list[Job] = []
        """With the tiers that have not ended, and without a slot once it was released."""
        self._abandons: dict[StepId, Abandon] = {}
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._metrics: dict[int, Note] = {}
        """Those that came late and are not in the log yet, by time."""
        self._settles: list[int] = []
        self._has_to_flush = False
        self._troubles: set[str] = set()

    @property
    def jobs(self) -> int:
        """How many have not ended."""
        return len(self._jobs)

    @property
    def metrics(self) -> int:
        """How many notes of metrics are not in the log yet."""
        return len(self._metrics)

    def told(self, message: ToWriter, *, reachable: bool = True) -> None:
        """The writer is about to be told this, or there is none to tell."""
        match message:
            case Begin():
                self._begin = message
                self._abandons.clear()
                self._has_to_flush = False
            case Job():
                self._jobs.append(message)
            case Abandon():
                self._abandons[message.id] = message
            case Settle():
                self._settles.append(message.number)
            case Flush():
                self._has_to_flush = True
            case Close():
                self.closing = True
            case Note(event={"time_ns": int(time_ns)}) if message.event.get("event") == METRICS:
                self._metrics[time_ns] = message
            case Note() if not reachable:
                self._notes.append(message)

    def heard(self, report: Report) -> None:
        """The writer has reported this."""
        match report:
            case Done() | Failed(id=StepId()):
                self._jobs = [
                    replace(job, tiers=tuple(t for t in job.tiers if t != report.tier))
                    if job.id == report.id
                    else job
                    for job in self._jobs
                ]
            case Released():
                self._jobs = [
                    replace(job, slot=None)
                    if (job.id, job.slot) == (report.id, report.slot)
                    else job
                    for job in self._jobs
                ]
            case Trouble():
                (self._troubles.add if report.text else self._troubles.discard)(report.tier)
            case Noted():
                self._metrics.pop(report.time_ns, None)
            case Settled():
                self._settles = [each for each in self._settles if each != report.number]
        ended = {job.id for job in self._jobs if not job.tiers and job.slot is None}
        self._jobs = [job for job in self._jobs if job.tiers or job.slot is not None]
        for id in ended - {job.id for job in self._jobs}:
            self._abandons.pop(id, None)

    def at_death(self) -> list[Report]:
        """What the writer has not come to report, although it is so; taken for heard."""
        reports: list[Report] = [Trouble(tier, "") for tier in sorted(self._troubles)]
        reports += [
            Released(job.id, job.slot)
            for job in self._jobs
            if job.slot is not None and not job.tiers
        ]
        for report in reports:
            self.heard(report)
        return reports

    def again(self) -> list[ToWriter]:
        """For a new writer, after its setup: all that the one before it has not ended."""
        messages: list[ToWriter] = [] if self._begin is None else [self._begin]
        messages += [*self._jobs, *self._abandons.values()]
        messages += [*self._metrics.values(), *self._notes]
        self._notes.clear()
        if self._has_to_flush:
            messages.append(Flush())
        messages += map(Settle, self._settles)
        if self.closing:
            messages.append(Close())
        return messages

    def failed(self, error: CheckpointError) -> list[Report]:
        """There is no writer: how everything ends. Nothing is left then but metrics, if there may
        be another writer."""
        reports: list[Report] = []
        for job in self._jobs:
            reports += [Failed(job.id, tier, error) for tier in job.tiers]
            if job.slot is not None:
                reports.append(Released(job.id, job.slot))
        reports += map(Settled, self._settles)
        if self.closing:
            reports += [Noted(time_ns, error) for time_ns in self._metrics]
            self._metrics.clear()
        self._jobs, self._settles = [], []
        self._abandons.clear()
        return reports

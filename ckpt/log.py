"""The log of an attempt: what it did, as lines of JSON (FORMAT.md section 9).

Only process 0 of the attempt writes it. No step needs it; what was measured late of a step is only
here.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt import layout
from ckpt.arguments import numbers_by_name
from ckpt.attempts import Listing
from ckpt.errors import Damaged, NotFound
from ckpt.lineage import StepId
from ckpt.store import Store

Json = Any

SAVE = "save"
DELETE = "delete"
METRICS = "metrics"
RETENTION_FAILED = "retention failed"
TROUBLE = "trouble"
RECOVERED = "recovered"
RESTARTED = "writer restarted"
REWOUND = "rewound"
INFLATION = "inflation"
SPIKE = "spike"
SKIPPED = "skipped"


@dataclass(frozen=True)
class Event:
    """One line."""

    kind: str
    """One of the names above, or one of a later release."""
    members: Mapping[str, Json] = field(default_factory=dict)
    """All but the kind and the time."""
    time_ns: int = 0

    @property
    def step(self) -> StepId | None:
        """The step it is about; None: about none, or about one that is not fully named."""
        found = [self.members.get(name) for name in ("step", "branch", "attempt")]
        numbers = [number for number in found if type(number) is int and number >= 0]
        return StepId(*numbers) if len(numbers) == 3 else None

    @property
    def tier(self) -> str:
        """The tier it is about, or an empty text."""
        found = self.members.get("tier")
        return found if isinstance(found, str) else ""

    def to_json(self) -> dict[str, Json]:
        """As it stands in the log, and as `Note` carries it, which has no time yet."""
        told = {"event": self.kind, **self.members}
        return {**told, "time_ns": self.time_ns} if self.time_ns else told


@dataclass(frozen=True)
class Log:
    """What could be read of a log."""

    events: tuple[Event, ...] = ()
    unreadable: int = 0
    """Lines that are no event: the last may be torn."""


# --- events ------------------------------------------------------------------------------------


def saved(step: StepId, tier: str, figures: Mapping[str, Json]) -> Event:
    """A step reached a tier; `figures` as blocking_s, durable_s, bytes."""
    return Event(SAVE, {**figures, **_named(step), "tier": tier})


def deleted(step: StepId, tier: str) -> Event:
    """Retention has deleted a step."""
    return Event(DELETE, {**_named(step), "tier": tier})


def measured(step: StepId, metrics: Any) -> Event:
    """Metrics that became known after the step was saved.

    Args:
        metrics: numbers by name. They stand beside those that were saved with the step; one that
            has the name of an earlier one takes its place.

    Raises:
        Misuse: they are no numbers by name.
    """
    return Event(METRICS, {**_named(step), "metrics": numbers_by_name(metrics)})


def retention_failed(tier: str, error: BaseException) -> Event:
    """What was to go stays until the next save."""
    return Event(RETENTION_FAILED, {"tier": tier, "error": str(error)})


def trouble(tier: str, text: str) -> Event:
    """A tier fails and is tried again."""
    return Event(TROUBLE, {"tier": tier, "error": text})


def recovered(tier: str, seconds: float) -> Event:
    """It works again, after `seconds`."""
    return Event(RECOVERED, {"tier": tier, "seconds": round(seconds, 3)})


def restarted(reason: str) -> Event:
    """The writer was dead and there is another one."""
    return Event(RESTARTED, {"reason": reason})


def rewound(parent: StepId, reason: str) -> Event:
    """The attempt began by going back."""
    return Event(REWOUND, {"parent": layout.emit_step_id(parent), "reason": reason})


def inflated(step: int, figures: Mapping[str, Json]) -> Event:
    """What the training steps lost while a step of this attempt was written in the background;
    `figures` as inflation_s, and over how many steps it was measured."""
    return Event(INFLATION, {**figures, "step": step})


def spiked(spike: Mapping[str, Json], to: int, suspect: Iterable[int]) -> Event:
    """The guard has sent the run back to `to`; `suspect`: the steps saved from the onset on."""
    return Event(SPIKE, {**spike, "to": to, "suspect": list(suspect)})


def skipped(step: int) -> Event:
    """A save that was due was left out: no slot was free."""
    return Event(SKIPPED, {"step": step})


def _named(step: StepId) -> dict[str, Json]:
    return {"step": step.step, "branch": step.branch, "attempt": step.attempt}


# --- lines -------------------------------------------------------------------------------------


def emit(event: Mapping[str, Json]) -> bytes:
    """The line of an event, given as `Event.to_json` does; without a time it happened now."""
    stamped = {**event, "time_ns": event.get("time_ns") or time.time_ns()}
    return json.dumps(stamped, sort_keys=True, default=str).encode() + b"\n"


def parse(text: bytes) -> Log:
    """The events of a log; what is none is counted."""
    events, unreadable = [], 0
    for line in text.split(b"\n"):
        if line.strip():
            event = _parse_line(line)
            if event is None:
                unreadable += 1
            else:
                events.append(event)
    return Log(tuple(events), unreadable)


def _parse_line(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    kind, time_ns = found.pop("event", None), found.pop("time_ns", 0)
    if not isinstance(kind, str):
        return None
    return Event(kind, found, time_ns if type(time_ns) is int else 0)


def read(store: Store, attempt: int) -> Log:
    """The log of an attempt; empty when it has none.

    Raises:
        Damaged: what stands there is no log. StoreFailed.
    """
    return parse(store.read_log(layout.log_name(attempt)))


# --- late metrics ------------------------------------------------------------------------------


def late_metrics(store: Store, listing: Listing) -> dict[StepId, dict[str, float]]:
    """What the logs of all attempts add to the metrics of steps; the later line wins.

    Raises:
        StoreFailed: the store did not answer. A log that is damaged adds nothing.
    """
    there = {f"{layout.LOG}/{entry.name}" for entry in store.list(layout.LOG)}
    found: dict[StepId, dict[str, float]] = {}
    for attempt in sorted(listing.numbers):
        if layout.log_name(attempt) in there:
            with contextlib.suppress(Damaged, NotFound):
                add_late(found, _metrics_lines(store.read_log(layout.log_name(attempt))))
    return found


def add_late(found: dict[StepId, dict[str, float]], events: Iterable[Event]) -> None:
    """Add the metrics of events, in their order."""
    for event in events:
        step, told = event.step, event.members.get("metrics")
        if event.kind == METRICS and step is not None and isinstance(told, dict):
            numbers = {name: value for name, value in told.items() if _is_number(value)}
            found.setdefault(step, {}).update(numbers)


def joined(
    saved_with: Mapping[str, float] | None, late: Mapping[str, float] | None
) -> dict[str, float] | None:
    """All metrics of a step: a late one takes the place of one that was saved with it."""
    if saved_with is None and not late:
        return None
    return {**(saved_with or {}), **(late or {})}


def _metrics_lines(text: bytes) -> Iterable[Event]:
    """Only those, without parsing the many that tell of saves."""
    for line in text.split(b"\n"):
        if b'"metrics"' in line:
            event = _parse_line(line)
            if event is not None:
                yield event


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not _too_large(value)


def _too_large(value: float) -> bool:
    try:
        math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return True
    return False

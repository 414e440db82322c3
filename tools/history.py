"""`ckpt log` as text: attempts as a graph, each with its saves and with what went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from ckpt import log as lines
from ckpt.lineage import StepId
from ckpt.log import Event
from ckpt.wording import counted
from tools.commands import AttemptRow, RunLog
from tools.views import (
    View,
    figures,
    is_number,
    moment,
    ranges,
    shortened,
    size,
    step_list,
    styled,
)

Json = Any
_SHOWN = 6
"""So many saves of an attempt have a line, the newest."""


def log(found: RunLog) -> View:
    """Attempts as a graph, newest first: each hangs on the attempt that saved its parent step."""
    yield styled(found.location)
    if not found.attempts:
        yield styled("no attempts")
    columns: list[int | None] = []  # of open lines: the attempt that each leads down to
    for row in found.attempts:
        own = [place for place, attempt in enumerate(columns) if attempt == row.attempt]
        if not own:
            own = [len(columns)]
            columns.append(row.attempt)
        for extra in own[1:]:
            columns[extra] = None
        mark = "*" if row.in_lineage else "o" if row.decided else "x"
        first = "".join(
            mark if place == own[0] else "/" if place in own else "|" if attempt else " "
            for place, attempt in enumerate(columns)
        )
        parent = row.parent.attempt if row.parent is not None else None
        columns[own[0]] = parent if parent else None
        while columns and columns[-1] is None:
            columns.pop()
        below = "".join("|" if attempt else " " for attempt in columns)
        width = max(len(first), len(below)) + 1
        title, *details = _attempt(row)
        line = Text(first.ljust(width))
        yield line.append(styled(title, "bold" if row.in_lineage else ""))
        for detail in details:
            yield Text(below.ljust(width)).append(styled(f"  {detail}"))
        yield Text(below)


def _attempt(row: AttemptRow) -> Iterator[str]:
    who = f"{row.host}, pid {row.pid}" if row.host is not None else "by whom is not known"
    yield f"{row.attempt}  {row.kind}  {moment(row.time_ns)}  {who}"
    if row.damage:
        yield f"damaged: {row.damage}"
    if not row.decided:
        yield "has not decided from which step it goes on: it died before, or is just starting"
        return
    origin = "from nothing" if row.parent is None else f"from {row.parent}"
    yield f"branch {row.branch}, {origin}" + ("" if row.in_lineage else "; not in the lineage")
    if row.reason:
        yield f"reason: {row.reason}"
    if row.new_skips:
        yield f"leaves out examples {ranges(row.new_skips)}"
    yield from _saves(row)
    yield from _others(row)


def _saves(row: AttemptRow) -> Iterator[str]:
    """Which steps were saved, then a line for each of the newest."""
    saves: dict[StepId, list[Event]] = {}
    inflation: dict[StepId, Json] = {}
    for event in _events(row):
        step = _step_of(event, row)
        if step is not None and event.kind == lines.SAVE:
            saves.setdefault(step, []).append(event)
        elif step is not None and event.kind == lines.INFLATION:
            inflation[step] = event.members.get("inflation_s")
    if not saves:
        if row.steps:
            yield step_list(row.steps)
        return
    yield f"{counted(len(saves), 'save')}: {step_list([step.step for step in saves])}"
    if len(saves) > _SHOWN:
        yield f"  the newest {_SHOWN} of them (--json has all):"
    cells = [_cells(saves[key], inflation.get(key)) for key in list(saves)[-_SHOWN:]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for told in cells:
        # Left out by all: no column.
        padded = (cell.ljust(width) for cell, width in zip(told, widths, strict=True) if width)
        yield "  " + "  ".join(padded).rstrip()


def _cells(events: Sequence[Event], inflation_s: Json) -> tuple[str, str, str, str, str]:
    """Step, blocking, size, time to each tier, inflation."""
    members: dict[str, Json] = {}
    for event in events:
        members = {**event.members, **members}
    nbytes = members.get("bytes")
    tiers = [
        f"{event.tier or 'durable'} {duration(event.members['durable_s'])}"
        if is_number(event.members.get("durable_s"))
        else event.tier
        for event in events
    ]
    inflation = members.get("inflation_s") if inflation_s is None else inflation_s
    return (
        f"step {members.get('step')}",
        _duration_of("blocking", members.get("blocking_s")),
        size(int(nbytes)) if isinstance(nbytes, int | float) and is_number(nbytes) else "",
        ", ".join(filter(None, tiers)),
        _duration_of("inflation", inflation),
    )


def _duration_of(name: str, value: Json) -> str:
    return f"{name} {duration(value)}" if is_number(value) else ""


def _others(row: AttemptRow) -> Iterator[str]:
    """Deletions, degradations, late metrics, and what only a later release understands."""
    events = list(_events(row))
    deleted: dict[str, list[Json]] = {}
    for event in events:
        if event.kind == lines.DELETE:
            deleted.setdefault(event.tier, []).append(event.members.get("step"))
    for tier, steps in deleted.items():
        where = f" of {tier}" if len(deleted) > 1 else ""
        yield f"deleted {counted(len(steps), 'step')}{where}: {shortened(steps)}"
    yield from _degradations(events)
    for event in events:
        told = event.members
        if event.kind == lines.METRICS:
            yield f"late metrics of step {told.get('step')}: {figures(told.get('metrics'))}"
        elif event.kind == lines.RESTARTED:
            yield f"{moment(event.time_ns)}  the writer was restarted: {told.get('reason')}"
        elif event.kind not in _KNOWN:
            yield json.dumps(event.to_json(), sort_keys=True)
    if row.unreadable_lines:
        yield f"{counted(row.unreadable_lines, 'line')} of its log cannot be read"


_KNOWN = (
    *(lines.SAVE, lines.DELETE, lines.INFLATION, lines.TROUBLE, lines.RECOVERED),
    *(lines.RETENTION_FAILED, lines.REWOUND),
)


def _degradations(events: Sequence[Event]) -> Iterator[str]:
    """Each spell in which a tier failed, and what retention could not do."""
    open_spells: dict[str, Event] = {}
    for event in events:
        if event.kind == lines.TROUBLE:
            open_spells.setdefault(event.tier, event)
        elif event.kind == lines.RECOVERED:
            begun = open_spells.pop(event.tier, None)
            why = f": {begun.members.get('error')}" if begun is not None else ""
            begun = begun or event
            seconds: Json = event.members.get("seconds")
            lasted = f" for {duration(seconds)}" if is_number(seconds) else ""
            yield f"{moment(begun.time_ns)}  {event.tier} failed{lasted}{why}"
    for begun in open_spells.values():
        error = begun.members.get("error")
        yield f"{moment(begun.time_ns)}  {begun.tier} failed, and has not recovered: {error}"
    failed = [event for event in events if event.kind == lines.RETENTION_FAILED]
    if failed:
        where = f" of {failed[-1].tier}" if failed[-1].tier else ""
        times = counted(len(failed), "time")
        yield f"retention{where} failed {times}, last: {failed[-1].members.get('error')}"


def _events(row: AttemptRow) -> Iterator[Event]:
    for told in row.events:
        members: Mapping[str, Json] = {
            name: value for name, value in told.items() if name not in ("event", "time_ns")
        }
        yield Event(str(told.get("event")), members, told.get("time_ns", 0))


def _step_of(event: Event, row: AttemptRow) -> StepId | None:
    """The step of an event; who drives a run knows it by its number only."""
    number = event.members.get("step")
    if event.step is None and type(number) is int:
        return StepId(number, row.branch or 0, row.attempt)
    return event.step


def duration(seconds: float) -> str:
    """`3.1 ms`, `0.42 s`, `75 s`."""
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.3g} s"

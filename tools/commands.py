"""What `ckpt ls`, `log` and `verify` answer, as plain values. Nothing here prints.

Free of jax and TensorStore, as is everything that these three need.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ckpt import attempts, layout
from ckpt.attempts import Listing
from ckpt.errors import CheckpointError, Damaged, NotFound, Unsupported
from ckpt.lineage import Remain, Skips, StepId, counts
from ckpt.log import Log, joined, late_metrics
from ckpt.log import read as read_log
from ckpt.manifest import Manifest, read_manifest
from ckpt.retention import Metrics
from ckpt.spike import Spike, suspects
from ckpt.store import Store
from tools import foreign
from tools.places import place_at, run_at

if TYPE_CHECKING:
    from ckpt.steps import Damage
    from ckpt.verification import Progress, Verification

Json = Any
State = Literal["committed", "abandoned", "suspect", "unfinished", "damaged"]

ENGINES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "grain", "array-record", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of this package and of what it stands on; None for what is not installed."""
    from importlib import metadata  # which the others are not to wait for

    found: dict[str, str | None] = {}
    for name in ("lastgood", *ENGINES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


# --- ls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepRow:
    """One step, or what is left of one."""

    step: int
    branch: int
    attempt: int | None
    """0: written by Orbax. None: nobody knows, its marker cannot be read."""
    state: State
    """abandoned: committed on a branch that was left. suspect: committed when a loss spike had
    begun already. damaged: marker or manifest are; whether the values are is for `verify` to say.
    """
    pinned: bool = False
    time_ns: int | None = None
    size_bytes: int | None = None
    """Of all files."""
    metrics: Mapping[str, float] | None = None
    """With those that were added late."""
    note: str = ""


@dataclass(frozen=True)
class RunListing:
    """What a run holds."""

    location: str
    attempt: int | None
    """The one whose lineage this is; None for a run that only Orbax has written."""
    branch: int | None
    steps: tuple[StepRow, ...]
    """By step, then branch."""


def ls(location: str, *, every_branch: bool = False) -> RunListing:
    """The steps of a run: its lineage, with what is damaged or unfinished anywhere in it.

    Reads markers, manifests and logs only. Which steps are suspect follows from the decisions of
    the attempts: that of a rewind by a guard holds the guard's state, with the onset of the spike.
    The manifest of such a step cannot tell, since the spike was not seen yet when it was saved; and
    a later manifest, which has the history of spikes, does not tell on which branch each one was.

    Args:
        every_branch: also steps of branches that were left, and steps being deleted or moved away.

    Raises:
        NotFound: no run there. Misuse: a step. Damaged: an attempt record. StoreFailed.
    """
    store = run_at(location)
    listing = attempts.list_run(store)
    line = listing.lineage
    pins = {layout.parse_pin_name(entry.name) for entry in store.list(layout.PINS)}
    late = late_metrics(store, listing)
    spikes = _spikes(listing)
    rows: list[StepRow] = []
    for step in listing.steps:
        is_counting = counts(line, step)
        if not (is_counting or every_branch):
            continue
        state: State = "committed" if is_counting else "abandoned"
        note = ""
        if step in spikes:
            state, note = "suspect", str(spikes[step])
        pinned = (step.branch, step.step) in pins
        rows += (
            replace(row, note=row.note or note)
            for row in _step_row(store, step, state, late.get(step), pinned=pinned)
        )
    for name, reason in listing.damaged:
        branch, number = _parse_name(name)
        pinned = (branch, number) in pins
        rows.append(StepRow(number, branch, None, "damaged", pinned, note=reason))
    for remain in listing.remains:
        if remain.state == "making" or every_branch:
            note = _remain_note(remain, listing)
            rows.append(
                StepRow(remain.step, remain.branch, remain.attempt, "unfinished", note=note)
            )
    rows.sort(key=lambda row: (row.step, row.branch, row.state))
    head = listing.head
    if head is None:
        return RunListing(store.location, None, None, tuple(rows))
    return RunListing(store.location, head.attempt, head.branch, tuple(rows))


def _spikes(listing: Listing) -> Mapping[StepId, Spike]:
    """The spike that each suspect step was saved after the onset of."""
    try:
        return suspects(listing.decisions, listing.steps)
    except Damaged:  # the guard's state is of a later release: the rest can be told all the same
        return {}


def _step_row(
    store: Store, step: StepId, state: State, late: Metrics | None, *, pinned: bool
) -> Iterator[StepRow]:
    """The row of a committed step; none when it was deleted meanwhile."""
    if not step.attempt:
        yield _orbax_row(store, step, state, pinned=pinned)
        return
    try:
        manifest = read_manifest(store, step)
    except (Damaged, NotFound, Unsupported) as error:
        if store.exists(layout.step_name(step.branch, step.step)):
            note = str(error)
            yield StepRow(step.step, step.branch, step.attempt, "damaged", pinned, note=note)
        return
    yield StepRow(
        step.step,
        step.branch,
        step.attempt,
        state,
        pinned,
        manifest.time_ns,
        size_of(manifest),
        joined(manifest.metrics, late),
    )


def size_of(manifest: Manifest) -> int:
    """Bytes of all files that a manifest names."""
    small = sum(size for size, _ in manifest.files.values())
    return small + sum(image.size_bytes for image in manifest.images)


def _orbax_row(store: Store, step: StepId, state: State, *, pinned: bool) -> StepRow:
    name = str(step.step)
    size = foreign.tree_bytes(store, name)
    time_ns = foreign.time_ns(store, f"{name}/{layout.ORBAX_STEP}")
    figures = foreign.numbers(foreign.json_or_none(store, f"{name}/metrics/metrics"))
    return StepRow(step.step, 0, 0, state, pinned, time_ns, size, figures, "written by Orbax")


def _parse_name(name: str) -> tuple[int, int]:
    """(branch, step) in the name of a step of ours."""
    branch, _, step = name.rpartition("/")
    return layout.parse_branch_name(branch) or 0, layout.parse_step_name(step) or 0


def _remain_note(remain: Remain, listing: Listing) -> str:
    if remain.state == "deleted":
        return "being deleted"
    if remain.state == "aside":
        return "counted for nothing; moved out of the way"
    if remain.attempt == max(listing.claims, default=0):
        return "being written, unless its trainer has died"
    return "left behind; the next attempt publishes or removes it"


# --- log ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttemptRow:
    """One attempt: who it was, where it came from, what it did."""

    attempt: int
    kind: str
    """start, resume, restore, rewind, fallback or fork; of an attempt without a decision what it
    set out to do."""
    time_ns: int | None
    host: str | None
    pid: int | None
    decided: bool
    """False: it died before it chose a step, or is about to choose one."""
    in_lineage: bool
    """What it saved may count; False: it was superseded, or its branch was left."""
    parent: StepId | None = None
    branch: int | None = None
    reason: str = ""
    new_skips: Skips = field(default_factory=dict)
    """Examples that this attempt was the first to leave out: iterator -> half-open ranges."""
    skips: Skips = field(default_factory=dict)
    """All that it leaves out."""
    steps: tuple[int, ...] = ()
    """Steps that it saved and that are still there, counting or not."""
    events: tuple[Mapping[str, Json], ...] = ()
    """Lines of its log: saves with their figures, deletions, degradations, late metrics."""
    damage: str = ""
    """Why its claim could not be read."""
    unreadable_lines: int = 0
    """Of its log: the last may be torn when the attempt died."""


@dataclass(frozen=True)
class RunLog:
    """The history of a run."""

    location: str
    attempts: tuple[AttemptRow, ...]
    """Newest first."""


def log(location: str) -> RunLog:
    """The attempts of a run, newest first.

    Raises: as `ls`.
    """
    store = run_at(location)
    listing = attempts.list_run(store)
    chain = {reach.attempt for reach in listing.lineage}
    rows, before = [], None
    for number in sorted({*listing.claims, *listing.decisions}):
        row = _attempt_row(store, listing, number, in_lineage=number in chain)
        if row.decided:
            new = added(row.skips, before.skips if before is not None else {})
            row = AttemptRow(**{**vars(row), "new_skips": new})
            before = row
        rows.append(row)
    return RunLog(store.location, tuple(reversed(rows)))


def _attempt_row(store: Store, listing: Listing, number: int, *, in_lineage: bool) -> AttemptRow:
    decision = listing.decisions.get(number)
    time_ns = host = pid = None
    kind, damage = "?", ""
    key = layout.claim_name(number)
    try:
        claim = layout.parse_claim(store.read(key), f"{store.location}/{key}")
        kind, time_ns, host, pid = claim.kind, claim.time_ns, claim.host, claim.pid
    except (Damaged, NotFound, Unsupported) as error:
        damage = str(error)
    told = _log_of(store, number)
    events = tuple(event.to_json() for event in told.events)
    if decision is None:
        return AttemptRow(
            number,
            kind,
            time_ns,
            host,
            pid,
            False,
            in_lineage,
            events=events,
            damage=damage,
            unreadable_lines=told.unreadable,
        )
    return AttemptRow(
        number,
        decision.kind,
        time_ns if time_ns is not None else decision.time_ns,
        host,
        pid,
        True,
        in_lineage,
        decision.parent,
        decision.branch,
        decision.reason,
        {},
        decision.skips,
        tuple(step.step for step in listing.steps if step.attempt == number),
        events,
        damage,
        told.unreadable,
    )


def _log_of(store: Store, attempt: int) -> Log:
    """What is readable of a log; an attempt is shown without it, too."""
    try:
        return read_log(store, attempt)
    except CheckpointError:
        return Log()


def added(skips: Skips, before: Skips) -> dict[str, list[tuple[int, int]]]:
    """The ranges of `skips` that are not in `before`; names without any are left out."""
    found = {name: _without(ranges, before.get(name, ())) for name, ranges in skips.items()}
    return {name: ranges for name, ranges in found.items() if ranges}


def _without(
    ranges: Sequence[tuple[int, int]], taken: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    left = []
    for start, stop in ranges:
        for first, last in sorted(taken):
            if start < min(first, stop):
                left.append((start, min(first, stop)))
            start = max(start, last)
        if start < stop:
            left.append((start, stop))
    return left


# --- verify ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckedStep:
    """What was found in one step."""

    name: str
    id: StepId | None
    counts: bool
    intact: bool
    bytes_read: int
    damage: tuple[Damage, ...]


@dataclass(frozen=True)
class Check:
    """What `verify` found at a location."""

    location: str
    intact: bool
    shallow: bool
    steps: tuple[CheckedStep, ...]
    records: tuple[Damage, ...]
    """Damaged attempt records. If the lineage cannot be told without them, there are no steps."""
    unfinished: tuple[str, ...]
    """Temporary names: no damage."""
    unverifiable: tuple[str, ...]
    """Steps of Orbax, which stores no digests."""
    bytes_read: int
    seconds: float


def verify(location: str, *, shallow: bool = False, progress: Progress | None = None) -> Check:
    """Compare a run or a step with the digests that were taken when it was saved.

    Args:
        shallow: leave out the chunks: small files and image headers only.

    Raises:
        NotFound: neither run nor step. Unsupported: one step of Orbax. StoreFailed.
    """
    from ckpt.verification import verify as verify_location

    begun = time.monotonic()
    orbax: list[str] = []
    with contextlib.suppress(Damaged):  # which is for `verify_location` to report
        place = place_at(location)
        if place.step is None:
            orbax = [str(step.step) for step in attempts.orbax_steps(place.store)]
    found = verify_location(location, shallow=shallow, progress=progress)
    steps = tuple(_checked(found))
    return Check(
        found.location,
        found.intact,
        shallow,
        steps,
        found.records,
        found.unfinished,
        tuple(orbax),
        sum(step.bytes_read for step in steps),
        time.monotonic() - begun,
    )


def _checked(found: Verification) -> Iterator[CheckedStep]:
    for step in found.steps:
        yield CheckedStep(
            step.name, step.id, step.counts, step.intact, step.bytes_read, step.damage
        )

"""What `ckpt rewind` is going to do, and doing it. Free of jax: no iterator is opened.

The examples of a range of batches are a pure function of saved positions and batch sizes, so they
are computed from the manifests of steps before and behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ckpt
from ckpt import attempts, layout
from ckpt.attempts import Listing
from ckpt.errors import Damaged, Misuse, NotFound
from ckpt.lineage import (
    Lineage,
    Skips,
    StepId,
    choose,
    counting,
    counts,
    join_skips,
    line_before,
    lineage,
    next_number,
    owner,
    reach_of,
)
from ckpt.reader import Reader
from ckpt.skipped import commit_of, course_of
from ckpt.spans import Counted
from ckpt.steps import Manifest, read_manifest
from ckpt.store import Store
from datapipe.order import permute
from datapipe.order.examples import Examples
from datapipe.order.plan import VERSION, Plan
from datapipe.segments import toward
from datapipe.state import State, segments_of
from formats.errors import DataError, Unsupported
from tools.places import run_at

Json = Any
Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class RewindPlan:
    """What a rewind will do to a run as it is now."""

    location: str
    to: StepId
    left_behind: tuple[StepId, ...]
    """Steps that will no longer count. They stay where they are."""
    attempt: int
    """The number that the rewind takes, and that of its branch, if nobody is faster."""
    supersedes: str
    """The newest attempt of now."""
    reason: str
    wanted_branch: int | None = None
    """That of `to`, if one was asked for."""
    batches: tuple[int, int] | None = None
    """Half-open, counted from 0."""
    counted_from: StepId | None = None
    """The step whose data state the examples were computed from."""
    as_seen_by: int | None = None
    """The attempt whose batches they are."""
    new_skips: Skips = field(default_factory=dict)
    """The examples of those batches: iterator -> half-open ranges."""
    skips: Skips = field(default_factory=dict)
    """All that will be left out."""
    covering: tuple[tuple[int, int], ...] = ()
    """Batches whose sizes no step tells any more: all examples are left out that they may have
    held."""


@dataclass(frozen=True)
class Rewound:
    """What a rewind did."""

    plan: RewindPlan
    to: StepId
    """An older step than planned, when that one is damaged."""
    attempt: int
    branch: int


def plan(
    location: str,
    to: int,
    *,
    reason: str,
    branch: int | None = None,
    skip_steps: range | None = None,
    skip_batches: range | None = None,
    seen_by: int | None = None,
) -> RewindPlan:
    """What going back to step `to` will do. Changes nothing.

    Args:
        branch: that of the step; by default the one on which it belongs to the lineage.
        skip_steps, skip_batches: half-open; step s used batch s - 1.
        seen_by: the attempt whose steps or batches they are, on whatever branch it is; needed
            only after a rewind that saved nothing yet. By default they are as the lineage of now
            counted them.

    Raises:
        NotFound: no such run or step. Misuse: the range makes no sense here, or the data state
        is not datapipe's. Damaged, StoreFailed.
    """
    store = run_at(location)
    listing = attempts.list_run(store)
    chosen = _chosen(store, listing, to, branch)
    _check_reason(reason)
    number = owner(listing.claims)
    head = listing.head
    found = RewindPlan(
        store.location,
        chosen,
        _left_behind(listing, chosen),
        next_number(listing.numbers),
        attempts.describe_claim(store, number) if number else "",
        reason,
        branch,
        skips=head.skips if head is not None else {},
    )
    batches = _batches(skip_steps, skip_batches, to)
    if batches is None:
        return found
    seen = listing.lineage if seen_by is None else _line_of(listing, seen_by)
    base, _ = _base(store, counting(seen, listing.steps), batches)
    if seen_by is None:
        _must_be_one(store, listing, batches)
    counted = examples(store, listing, seen, batches)
    new = join_skips({name: each.ranges for name, each in counted.items()})
    covering = {(part.start, part.stop) for each in counted.values() for part in each.covering}
    return replace(
        found,
        batches=(batches.start, batches.stop),
        counted_from=base,
        as_seen_by=reach_of(seen, batches.start + 1).attempt,
        new_skips=new,
        skips=join_skips(found.skips, new),
        covering=tuple(sorted(covering)),
    )


def _chosen(store: Store, listing: Listing, to: int, branch: int | None) -> StepId:
    """The step to go back to. Raises NotFound, Damaged."""
    if branch is None:
        return Reader(store).find(to)
    for place, reason in listing.damaged:
        if place == layout.step_name(branch, to):
            raise Damaged(reason)
    found = choose(listing.lineage, listing.steps, to, branch)
    assert found is not None
    return found


def _left_behind(listing: Listing, chosen: StepId) -> tuple[StepId, ...]:
    """The counting steps that will not count after a rewind."""
    line = line_before(listing.decisions, chosen)
    return tuple(step for step in listing.counting if not counts(line, step))


def carry_out(planned: RewindPlan) -> Rewound:
    """Do it. Raises as `ckpt.rewind`: InUse when a trainer of this host is alive, Damaged, ..."""
    skips = planned.new_skips or None
    to = ckpt.rewind(
        planned.location,
        planned.to.step,
        branch=planned.wanted_branch,
        skips=skips,
        reason=planned.reason,
    )
    head = attempts.list_run(run_at(planned.location)).head
    assert head is not None
    return Rewound(planned, to, head.attempt, head.branch)


def examples(store: Store, listing: Listing, line: Lineage, batches: range) -> dict[str, Counted]:
    """The examples that batches of a lineage held, by iterator, computed from what steps tell.

    Raises:
        Misuse: a state is not one of datapipe's, or holds no batch size; or no step is there.
    """
    steps = counting(line, listing.steps)
    _, manifest = _base(store, steps, batches)
    known: dict[StepId, Manifest | None] = {}

    def read(step: StepId) -> Manifest | None:
        if step not in known:
            try:
                known[step] = read_manifest(store, step)
            except (Damaged, NotFound):
                known[step] = None  # its neighbours tell as much
        return known[step]

    found = {}
    for name in sorted(manifest.data):
        _check_position(name, manifest.data[name], f"{store.location}: {manifest.id}")
        start = commit_of(manifest, name)
        assert start is not None
        course = course_of(name, line, steps, read, listing.decisions, _Saved())
        found[name] = course.held(batches, start)
    return found


@dataclass(frozen=True)
class _Saved:
    """The examples that follow a saved state of datapipe."""

    def span(
        self, state: Json, first: int, stop: int, skips: Sequence[tuple[int, int]], size: int
    ) -> Iterable[tuple[int, int]]:
        plan, at = self._plan(state, skips, size)
        return plan.addresses(plan.span(at, first, stop))

    def after(
        self, state: Json, batches: int, skips: Sequence[tuple[int, int]], size: int
    ) -> int | None:
        plan, at = self._plan(state, skips, size)
        return plan.advance(at, batches)

    def toward(self, state: Json, later: Json) -> Json:
        return toward(State.from_json(state), State.from_json(later)).to_json()

    def _plan(self, state: Json, skips: Sequence[tuple[int, int]], size: int) -> tuple[Plan, int]:
        saved = State.from_json(state)
        plan = _counting(saved, size)
        return plan.skipping([*saved.skips, *plan.present(skips)]), saved.next_example


def _counting(saved: State, size: int) -> Plan:
    """A plan whose batches hold the examples that those of the run hold.

    Raises: Unsupported where nobody but the pipeline can tell.
    """
    segments, told = segments_of(saved.identity["segments"]), saved.identity["plan"]
    remainder = saved.remainder or "carry"
    if "skips" not in told:
        # Which record stands where is not asked, so any seed will do.
        return Plan(Examples(segments, seed=0), size, remainder)
    known = {"version": VERSION, "permutation": permute.VERSION, "skips": "records"}
    if told.get("shuffle") == "blocks" or known.items() - told.items():
        raise Unsupported(
            "where skipped records stand in later epochs is not told by the state alone with "
            "shuffle='blocks', or if another release wrote it"
        )
    order = Examples(segments, told.get("seed", -1), told.get("shuffle", ""))
    return Plan(order, size, remainder, skip_records=True)


def _check_position(name: str, entry: Mapping[str, Json], where: str) -> None:
    cure = (
        "rewind without skipping, or in the trainer: manager.rewind(to, skip_steps=..., data=...)"
    )
    size = entry.get("batch_size")
    if "state" not in entry:
        raise Misuse(
            f"{where}: iterator {name!r} has a state for each process, which says nothing of the "
            f"batches of the run; {cure}"
        )
    try:
        _counting(State.from_json(entry["state"]), 1)
    except DataError as error:
        raise Misuse(
            f"{where}: the state of iterator {name!r} does not tell which examples a batch holds "
            f"({error}); {cure}"
        ) from error
    if type(size) is not int or size < 1:
        raise Misuse(f"{where}: iterator {name!r} was saved without its batch size; {cure}")


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise Misuse("--reason: wanted a few words for the log, found nothing")
    try:
        reason.encode()
    except UnicodeEncodeError as error:
        raise Misuse(f"--reason: wanted text, found what is not UTF-8: {error}") from error


def _batches(skip_steps: range | None, skip_batches: range | None, to: int) -> range | None:
    """Batches to leave out, from 0."""
    if skip_steps is not None and skip_batches is not None:
        raise Misuse("give --skip-steps or --skip-batches, not both")
    if skip_steps is not None:
        if skip_steps.start < 1:
            raise Misuse(f"--skip-steps {_text(skip_steps)}: steps count from 1")
        batches = range(skip_steps.start - 1, skip_steps.stop - 1)
    elif skip_batches is not None:
        batches = skip_batches
    else:
        return None
    if batches.start < to:
        raise Misuse(
            f"step {to} has learnt from batch {batches.start} already (step s uses batch s - 1): "
            f"skip nothing before step {to + 1}, or go back to step {batches.start} or earlier"
        )
    return batches


def _text(given: range) -> str:
    return f"{given.start}:{given.stop}"


def _base(store: Store, steps: Sequence[StepId], batches: range) -> tuple[StepId, Manifest]:
    """The newest step at or before the batches that says where the data stood."""
    for step in reversed(steps):
        if step.step > batches.start or not step.attempt:
            continue
        try:
            manifest = read_manifest(store, step)
        except (Damaged, NotFound):
            continue  # an older one says the same
        if manifest.data:
            return step, manifest
    raise Misuse(
        f"{store.location}: no step at or before {batches.start} was saved with `data=`, so nobody "
        f"knows the examples of batch {batches.start}; rewind without skipping"
    )


def _line_of(listing: Listing, attempt: int) -> Lineage:
    """The lineage as an attempt saw it that may have been left since."""
    if attempt not in listing.decisions:
        known = ", ".join(map(str, sorted(listing.decisions)))
        raise Misuse(f"--seen-by {attempt}: wanted one of the attempts {known}")
    return lineage(listing.decisions, listing.decisions[attempt])


def _must_be_one(store: Store, listing: Listing, batches: range) -> None:
    """The steps of a rewind that saved nothing can mean two things.

    It was made by a trainer that went on and died, or by hand, with the batches read off the curve
    of those before it.
    """
    head = listing.head
    if head is None or head.kind != "rewind" or len(listing.decisions) < 2:
        return
    reach = listing.lineage[0]
    if batches.stop <= reach.after or any(reach.holds(each) for each in listing.counting):
        return
    before = max(number for number in listing.decisions if number != head.attempt)
    lines = (_line_of(listing, before), listing.lineage)
    one, two = (
        {name: each.ranges for name, each in examples(store, listing, line, batches).items()}
        for line in lines
    )
    if join_skips(one) != join_skips(two):
        step = max(batches.start, reach.after) + 1
        raise Misuse(
            f"attempt {head.attempt} went back to {head.parent}, and has saved nothing since, so "
            f"step {step} can mean two things: --seen-by {before} for the steps before that rewind "
            f"(examples {_shown(one)}), --seen-by {head.attempt} for those after it (examples "
            f"{_shown(two)})"
        )


def _shown(skips: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    return "; ".join(
        f"{name} " + ", ".join(f"{start}:{stop}" for start, stop in ranges)
        for name, ranges in skips.items()
    )

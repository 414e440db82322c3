"""A run whose data changes on the way: what a saved position means for the pipeline of today.

Weights may change, a source may grow by files behind those it has, and sources may come in behind
those there are. Such a change opens a *segment* at the position from which the run goes on: every
source continues where it stood, what was served stays as it was, and the state has both. Going back
to before an opening drops the segment; it opens anew if the pipeline still differs from the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from datapipe.identity import condensed, mismatch
from datapipe.order.examples import Examples, Segment
from datapipe.order.plan import Plan
from datapipe.state import JSON, State, segments_in, segments_of
from formats.errors import Mismatch
from formats.growth import leading

OnChange = Literal["raise", "segment"]
ON_CHANGE: Final[tuple[OnChange, ...]] = ("raise", "segment")

_WRONG: Final = "the saved position belongs to other data"
_CURE: Final = (
    '; if the change is meant, pipeline.iterator(on_change="segment") goes on with it from there'
)


class Resumed(NamedTuple):
    """How a run goes on from a saved position."""

    plan: Plan
    told: str
    """What was opened and what was dropped, for the log; empty: nothing."""


@dataclass(frozen=True)
class Positions:
    """What saved positions mean for a pipeline.

    Args:
      plan: the one of the pipeline alone: one segment, nothing skipped.
      identity: of the pipeline.
      fingerprints: of its sources, by name, in the order of their numbers.
      on_change: what to do with a position of other weights, items or sources: "raise", or
        "segment": open one.
    """

    plan: Plan
    identity: JSON
    fingerprints: Mapping[str, Mapping[str, Any]]
    on_change: OnChange = "raise"

    def resumed(self, saved: State, before: Plan) -> Resumed:
        """The plan from a saved position on.

        Args:
          before: the plan until now, of which later segments may fall away.

        Raises:
          Mismatch: the state belongs to other data, or lies beyond the end.
        """
        opened = self._opened(saved)
        segments, there = _segments(opened), _segments(saved)
        plan = self._planned(segments)
        if saved.next_example > plan.end:
            beyond = (
                f"next_example: saved {saved.next_example}, here the last epoch ends at "
                f"{plan.end}; give more epochs"
            )
            raise Mismatch(f"{_WRONG}:", [beyond])
        told = [] if segments[-1] in there else [self._opening(there, plan.order)]
        gone = {s.first for s in (*before.order.segments[1:], *there[1:]) if s not in segments}
        if gone:
            listed = ", ".join(map(str, sorted(gone)))
            told.append(f"what had been opened at example {listed} is dropped")
        return Resumed(plan.skipping(saved.skips), "; ".join(told))

    def counted(self, saved: State, skips: Iterable[tuple[int, int]]) -> Plan:
        """The plan that a saved state tells, whatever is served today.

        Args:
          skips: addresses to leave out beside those of the state. Sources that the plan does not
            have are passed over.

        Raises:
          Mismatch: the state belongs to another run.
        """
        differences = mismatch(saved.identity, self.identity)
        obstacles = self._obstacles(saved) if differences else []
        if obstacles:
            raise Mismatch(f"{_WRONG}:", _all(differences, obstacles))
        plan = self._planned(_segments(saved))
        if saved.remainder is not None:
            plan = replace(plan, remainder=saved.remainder)
        return plan.skipping([*saved.skips, *plan.present(skips)])

    def toward(self, state: State, later: State | None) -> State:
        """A state as `later` knows it; None: as this pipeline goes on from it, if it can."""
        if later is not None:
            return toward(state, later)
        try:
            return replace(self._opened(state), remainder=self.plan.remainder)
        except Mismatch:
            return state

    def _opened(self, saved: State) -> State:
        """The state as the pipeline goes on from it."""
        differences = mismatch(saved.identity, self.identity)
        if not differences:
            return saved
        obstacles = self._obstacles(saved)
        if obstacles or self.on_change == "raise":
            cure = "" if obstacles else _CURE
            raise Mismatch(f"{_WRONG}{cure}:", _all(differences, obstacles))
        (mine,) = self.plan.order.segments
        kept = [each for each in _segments(saved) if each.first < saved.next_example]
        if not kept or (kept[-1].items, kept[-1].counts) != (mine.items, mine.counts):
            kept.append(replace(mine, first=saved.next_example))
        segments = segments_in(kept)
        return replace(saved, identity={**self.identity, "segments": segments})

    def _planned(self, segments: tuple[Segment, ...]) -> Plan:
        order = replace(self.plan.order, segments=segments)
        return replace(self.plan, order=order, skips=())

    # -- what a segment can express --------------------------------------------------------------

    def _obstacles(self, saved: State) -> list[str]:
        """Why no segment leads from a state to the pipeline; empty: one does."""
        theirs, mine = saved.identity, self.identity
        data: JSON = {"sources": [], "segments": mine["segments"]}
        lines = mismatch({**theirs, **data}, {**mine, **data})
        before, here = dict(theirs["sources"]), dict(mine["sources"])
        blocks = self.plan.order.blocks
        if [*here][: len(before)] != [*before]:
            lines.append(
                "sources: those that were there stay, under their names and in their order, be it "
                "with a weight of 0; new ones come behind them"
            )
            return lines
        for number, (name, known) in enumerate(before.items()):
            was = theirs["segments"][-1]["items"][number]
            now = mine["segments"][-1]["items"][number]
            if blocks and was <= now and known.get("blocks") != blocks[number].leading(was).digest:
                lines.append(
                    f"sources.{name}: the first {was} records were cut into other blocks, "
                    "which shuffle='blocks' keeps together"
                )
            if was == now and known["fingerprint"] == here[name]["fingerprint"]:
                continue
            reason = _not_grown(known, self.fingerprints[name], was, now)
            if reason:
                lines.append(f"sources.{name}: {reason}")
        return lines

    # -- for the log -----------------------------------------------------------------------------

    def _opening(self, there: Sequence[Segment], order: Examples) -> str:
        new = order.segments[-1]
        old = order.segments[-2] if len(order.segments) > 1 else there[-1]
        changes = []
        for number, name in enumerate(self.fingerprints):
            share = _share(new, number)
            if number >= len(old.items):
                changes.append(f"{name} is new, {new.items[number]} items, {share} of the examples")
                continue
            if share != _share(old, number):
                changes.append(f"{name} {_share(old, number)} -> {share} of the examples")
            if old.items[number] != new.items[number]:
                changes.append(
                    f"{name} {old.items[number]} -> {new.items[number]} items, the new ones from "
                    f"its epoch {_first_epoch(order, number)} on"
                )
        return f"a segment opens at example {new.first}: {', '.join(changes)}"


def toward(state: State, later: State) -> State:
    """A state with the remainder of `later` and the segments that open until there.

    Unchanged if `later` is not ahead of it in the same run.
    """
    at = state.next_example
    theirs, mine = later.identity, state.identity
    names = [[name for name, _ in each["sources"]] for each in (mine, theirs)]
    served = [[s for s in each["segments"] if s["first"] < at] for each in (mine, theirs)]
    if (
        later.next_example < at
        or mine["plan"] != theirs["plan"]
        or names[1][: len(names[0])] != names[0]
        or served[0] != served[1]
    ):
        return state
    identity = {**mine, **{k: theirs[k] for k in ("segments", "sources")}}
    return replace(state, identity=identity, remainder=later.remainder)


def _not_grown(
    known: Mapping[str, Any], fingerprint: Mapping[str, Any], was: int, now: int
) -> str | None:
    """Why these are not the records there were, with more behind them; None: they are."""
    if now <= was:
        return f"{was} records were saved, here are {now} others: a source can only grow"
    grown = f"grown from {was} to {now} records"
    try:
        before = leading(fingerprint, was)
    except Mismatch as error:
        return f"{grown}, and {error}"
    if any(condensed(each)["fingerprint"] == known["fingerprint"] for each in before):
        return None
    files = [file["name"] for file in before[0]["files"]]
    return (
        f"{grown}, and the first {was} are not those that were saved: {len(files)} files, "
        f"{files[0]} to {files[-1]}; new files stand behind those that were there, which keep "
        "their names and contents"
    )


def _all(differences: Sequence[str], obstacles: Sequence[str]) -> list[str]:
    """Each line once."""
    return list(dict.fromkeys([*differences, *obstacles]))


def _segments(state: State) -> tuple[Segment, ...]:
    return segments_of(state.identity["segments"])


def _share(segment: Segment, number: int) -> str:
    return f"{100 * segment.counts[number] / segment.mixture.size:.4g}%"


def _first_epoch(order: Examples, number: int) -> str:
    """The first epoch that has all items of a source."""
    epoch = order.streams[number].stretches[-1].epoch
    if order.epochs is None or epoch < order.epochs:
        return str(epoch)
    return f"{epoch} (with epochs={order.epochs} there is none: give more)"

"""States of data iterators, as JSON values; the iterators are known by what they can do."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from ckpt import foreign
from ckpt.arguments import shown
from ckpt.errors import Mismatch, Misuse
from ckpt.lineage import Skips
from ckpt.stored_states import loaded, stored
from ckpt.union import can_be_united

Json = Any
_log = logging.getLogger("ckpt")
DEFAULT_NAME = "data"
MAX_DEPTH = 100
"""Levels of a JSON value that is saved with a step; whoever reads it may have a short stack."""


@runtime_checkable
class Iterator(Protocol):
    """What an iterator must be able to do to be saved with a step."""

    def get_state(self) -> Json: ...

    def set_state(self, state: Json) -> None: ...


@runtime_checkable
class Skipping(Protocol):
    """What it must be able to do for batches to be skipped."""

    batch_size: int

    def skip(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Leave out half-open ranges of examples, from now on."""

    def span(
        self,
        state: Json,
        first: int,
        stop: int,
        skips: Sequence[tuple[int, int]] = (),
        *,
        batch_size: int | None = None,
    ) -> Iterable[tuple[int, int]]:
        """The examples that batches `first` to `stop - 1`, counted from `state`, hold.

        `skips` were left out beside those that the state knows of. Without the keyword
        `batch_size`, by default that of the iterator, batches of another size cannot be skipped.
        """


@runtime_checkable
class Prefetching(Protocol):
    """An iterator that can make batches before they are asked for."""

    def start_prefetch(self) -> None: ...


@runtime_checkable
class Positioned(Protocol):
    """An iterator of which not every range ends at a position: several sources are mixed."""

    def position_after(
        self,
        state: Json,
        batches: int,
        skips: Sequence[tuple[int, int]] = (),
        *,
        batch_size: int | None = None,
    ) -> int:
        """The `next_example` of the state so many batches later."""


@runtime_checkable
class Changing(Protocol):
    """An iterator whose order may change on the way: weights change, sources grow."""

    def toward(self, state: Json, later: Json) -> Json:
        """`state` as one on the way to `later` knows it: with the order in force until there.

        As it is, where `later` does not lie ahead; None: as the iterator would go on from it.
        """


@runtime_checkable
class Finding(Protocol):
    """One of which each process finds out something for itself that all are to know: bad records.

    A step has the union, which `set_state` then tells all processes, however many they are.
    """

    united: Sequence[str]
    """The members of the state that are such findings; see `ckpt.union`."""


def as_json(value: Json, what: str) -> Json:
    """A copy of a value as JSON gives it back: tuples are lists, NaN and infinities stay.

    Raises:
        Misuse: it is none, a key in it is no text, or it is nested deeper than records of a step
            may be.
    """
    try:
        text = json.dumps(value)
        copy = json.loads(text)
    except RecursionError as error:
        raise Misuse(f"{what}: wanted at most {MAX_DEPTH} levels, found a deeper one") from error
    except (TypeError, ValueError) as error:
        raise Misuse(f"{what}: wanted a JSON value: {error}") from error
    level = [(what, value)]
    for _ in range(MAX_DEPTH):
        level = [
            (f"{place}[{key!r:.40}]", child)
            for place, node in level
            for key, child in _members(node, place)
            if isinstance(child, dict | list | tuple)
        ]
        if not level:
            return copy
    raise Misuse(f"{what}: wanted at most {MAX_DEPTH} levels, found a deeper one")


def _members(node: Json, place: str) -> Iterable[tuple[Any, Json]]:
    if not isinstance(node, dict):
        return enumerate(node) if isinstance(node, list | tuple) else ()
    for key in node:
        if not isinstance(key, str):
            # JSON would make text of it without a word, and 1 and "1" one member.
            raise Misuse(
                f"{place}: wanted text as keys, found {shown(key)}; give str(key), and turn it "
                "back after a restore"
            )
    return node.items()


def named(data: Any) -> dict[str, Iterator]:
    """The iterators that `data` is: none, one, or a mapping by name.

    Raises:
        Misuse: something in it is no iterator with `get_state` and `set_state`.
    """
    if data is None:
        return {}
    found = dict(data) if isinstance(data, Mapping) else {DEFAULT_NAME: data}
    for name, each in found.items():
        if not isinstance(name, str) or not isinstance(each, Iterator):
            raise Misuse(
                f"data {name!r}: wanted an iterator with get_state and set_state, found "
                f"{type(each).__name__}; of a pipeline give `pipeline.iterator()`, of a dataset "
                "or DataLoader of Grain `iter(...)`"
            )
    return found


def take(data: Any) -> dict[str, Json]:
    """{name: {"state", "batch_size", "elastic"}} of all iterators; "united" where it is `Finding`.

    The state is as `stored` makes it. Elastic: it counts examples of the run, so that any number of
    processes can go on from it. That of another iterator is its process's own, even where all have
    the same at the moment.

    Raises:
        Misuse: a state is of no plain values, too deep or too large, or has not the findings that
            the iterator says it has.
    """
    taken = {}
    for name, each in named(data).items():
        what = f"data {name!r}: get_state()"
        state = as_json(stored(each.get_state(), what), what)
        taken[name] = {
            "state": state,
            "batch_size": getattr(each, "batch_size", None),
            "elastic": isinstance(each, Skipping) or foreign.is_position(state),
            **({"united": _findings(name, each, state)} if isinstance(each, Finding) else {}),
        }
    return taken


def _findings(name: str, iterator: Finding, state: Json) -> list[str]:
    members = list(iterator.united)
    for member in members:
        if not isinstance(state, dict) or not can_be_united(state.get(member)):
            raise Misuse(
                f"data {name!r}: `united` of {type(iterator).__name__} names {member!r}: wanted "
                "a list of integers in its state, ascending, or a list of such lists"
            )
    return members


def must_go_on(saved: Collection[str], data: Any, where: str) -> None:
    """The step before has states of the iterators `saved`: the next one is to have them, too.

    Raises:
        Misuse: `data` was forgotten. An empty mapping says that there is none on purpose.
    """
    if data is None and saved:
        raise Misuse(
            f"{where}: the step before has the position of the iterators "
            f"{', '.join(map(repr, sorted(saved)))}, and save() got no `data`: the run could not "
            "go on from there with the same data; give them to resume() and save(), or data={} to "
            "save none from now on"
        )


def note_left_out(saved: Collection[str], data: Any, where: str) -> None:
    """Warn of iterators whose saved states a restore leaves where they are."""
    left = sorted(saved) if data is None else sorted(set(saved) - named(data).keys())
    if left and (data is None or named(data)):
        _log.warning(
            "%s: has the position of the iterators %s, which were not given as `data` and stay "
            "where they are; give them, or data={} if there are none from now on",
            where,
            ", ".join(map(repr, left)),
        )


def put(
    data: Any,
    saved: Mapping[str, Json],
    skips: Skips,
    *,
    process: int,
    processes: int,
    where: str,
) -> None:
    """Position the iterators of one of several processes as saved, with the skips in force.

    Those that can begin at once to make the batches that follow.

    Raises:
        Mismatch: as `saved_for`; or an iterator does not take the state.
        Misuse: skips are in force and an iterator cannot skip.
    """
    found = saved_for(data, saved, process=process, processes=processes, where=where)
    for name, each in named(data).items():
        if isinstance(each, Skipping):
            each.set_state(found[name])
        else:
            foreign.set_state(each, found[name], f"{where}: data {name!r}")
        apply_skips(name, each, skips)
    for each in named(data).values():  # only now: an error would have put all of them back
        if isinstance(each, Prefetching):
            each.start_prefetch()


def saved_for(
    data: Any, saved: Mapping[str, Json], *, process: int, processes: int, where: str
) -> dict[str, Json]:
    """The state of each iterator of one of several processes, by name.

    Raises:
        Mismatch: an iterator was not saved, or was saved by another number of processes.
    """
    iterators = named(data)
    missing = [name for name in iterators if name not in saved]
    if missing:
        there = ", ".join(saved) or "none"
        raise Mismatch(
            f"{where}: no state of iterators {', '.join(missing)} was saved with this step "
            f"(saved: {there}); restore without `data`, or give the iterators their saved names"
        )
    return {name: state_of(saved, name, process, processes, where) for name in iterators}


@contextlib.contextmanager
def kept_on_error(data: Any) -> Generator[None]:
    """Whoever sees an error finds the iterators where they were, also those already positioned."""
    iterators = named(data)
    # A copy: what some iterators hand out they go on to change.
    before = {name: copy.deepcopy(each.get_state()) for name, each in iterators.items()}
    try:
        yield
    except BaseException:
        for name, each in iterators.items():
            try:
                each.set_state(before[name])
            except Exception:
                _log.exception("data %r could not be put back to where it was", name)
        raise


def apply_skips(name: str, iterator: Iterator, skips: Skips) -> None:
    """Put the skips of the run in force on an iterator."""
    ranges = [(int(start), int(stop)) for start, stop in skips.get(name, ())]
    if not ranges:
        return
    if not isinstance(iterator, Skipping):
        raise Misuse(
            f"data {name!r}: the run skips {len(ranges)} ranges of examples, and "
            f"{type(iterator).__name__} has no `skip`; {foreign.CURE}, or go on without `data`"
        )
    iterator.skip(ranges)


def state_of(
    saved: Mapping[str, Json], name: str, process: int, processes: int, where: str
) -> Json:
    """The state of one iterator for one of several processes.

    Raises:
        Mismatch: each process saved its own, and they were more or fewer.
        Damaged: it is none.
    """
    entry = saved[name]
    if "state" in entry:
        state = entry["state"]
    else:
        states = entry["states"]
        if processes != len(states):
            raise Mismatch(
                f"{where}: iterator {name!r} was saved with a state for each of {len(states)} "
                f"processes, here are {processes}; use {len(states)}, restore without `data`, or "
                "use an iterator whose state does not depend on their number, such as datapipe's, "
                "or Grain's ElasticIterator"
            )
        state = states[process]
    return loaded(state, f"{where}: iterator {name!r}")


@dataclass(frozen=True)
class SpansOf:
    """The examples that an iterator serves in batches of any size; see `ckpt.spans.Examples`.

    An iterator whose `span` takes no `batch_size` can only tell those of its own.
    """

    name: str
    iterator: Skipping

    def span(
        self, state: Json, first: int, stop: int, skips: Sequence[tuple[int, int]], size: int
    ) -> Iterable[tuple[int, int]]:
        """Raises Misuse: it cannot tell."""
        if size == self.iterator.batch_size:
            return self.iterator.span(state, first, stop, skips)
        if "batch_size" not in inspect.signature(self.iterator.span).parameters:
            raise Misuse(
                f"data {self.name!r}: the batch size is not known to have been "
                f"{self.iterator.batch_size} at that time, and `span` of "
                f"{type(self.iterator).__name__} knows no other; give it a keyword batch_size"
            )
        return self.iterator.span(state, first, stop, skips, batch_size=size)

    def after(
        self, state: Json, batches: int, skips: Sequence[tuple[int, int]], size: int
    ) -> int | None:
        """The position so many batches later, at least one."""
        if isinstance(self.iterator, Positioned):
            return self.iterator.position_after(state, batches, skips, batch_size=size)
        spans = list(self.span(state, 0, batches, skips, size))
        return int(spans[-1][1]) if spans else None

    def toward(self, state: Json, later: Json) -> Json:
        """The state with what is known later of the order behind it."""
        return _toward(self.iterator, state, later)


def spans_of(name: str, iterator: Iterator) -> SpansOf:
    """How the batches of an iterator are counted.

    Raises:
        Misuse: it cannot skip.
    """
    if not isinstance(iterator, Skipping):
        raise Misuse(
            f"data {name!r}: {type(iterator).__name__} cannot skip batches (no `span` and `skip`); "
            f"{foreign.CURE}, or rewind without skipping"
        )
    return SpansOf(name, iterator)


def check_moved(
    data: Any, before: Mapping[str, Json], now: Mapping[str, Json], steps: int, step: int
) -> None:
    """Since the last save data and step must have moved together.

    Raises:
        Misuse: they did not; says by how much.
    """
    for name, each in named(data).items():
        old, new = before.get(name), now[name]
        if old is None or not isinstance(each, Skipping):
            continue
        wanted = _next_example(each, _toward(each, old["state"], new["state"]), steps)
        found = new["state"].get("next_example") if isinstance(new["state"], dict) else None
        if wanted is None or found is None or found == wanted:
            continue
        moved = (found - wanted) / cast(Any, each).batch_size
        raise Misuse(
            f"step {step}: data {name!r} stands at example {found}, wanted {wanted}: {steps} "
            f"steps after the last save it has moved {abs(moved):g} batches too "
            f"{'far' if moved > 0 else 'little'}; call save after the step that used the batch "
            "and before the next one is taken"
        )


def _toward(iterator: Skipping, state: Json, later: Json) -> Json:
    return iterator.toward(state, later) if isinstance(iterator, Changing) else state


def _next_example(iterator: Skipping, state: Json, steps: int) -> int | None:
    if steps == 0:
        return state.get("next_example") if isinstance(state, dict) else None
    if isinstance(iterator, Positioned):
        return iterator.position_after(state, steps)
    spans = list(iterator.span(state, steps - 1, steps))
    return int(spans[-1][1]) if spans else None

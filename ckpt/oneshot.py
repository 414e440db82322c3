"""One call for one thing: save, restore, look, pin, rewind; without keeping a manager."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from ckpt import layout, states
from ckpt.arguments import check_step_number, must_be, whole_number
from ckpt.errors import Damaged, Misuse, NotFound, Unsupported
from ckpt.fit import EXACT, Fit
from ckpt.lineage import Skips, StepId
from ckpt.loading import DEFAULT, Loading
from ckpt.orbax_files import undescribed
from ckpt.processes import Alone
from ckpt.reader import (
    MISSING,
    Metadata,
    Reader,
    Restored,
    Template,
    check_how,
    metadata_of,
    restore_alone,
)
from ckpt.resolving import resolve
from ckpt.steps import open_step

Json = Any
Location = str | os.PathLike[str]


def save(
    location: Location,
    state: Any,
    *,
    step: int | None = None,
    data: Any = None,
    metrics: dict[str, Any] | None = None,
    extra: Json = None,
) -> int:
    """Save a state durably as the next step of the run at `location`; returns its number.

    The first step of a new run is 0. Give `step` to choose a number above the newest.

    A run whose newest step has data takes a step without only with `data={}`.

    Raises as `CheckpointManager.save`.
    """
    from ckpt.manager import CheckpointManager
    from ckpt.start import Wish

    with CheckpointManager(location, slots=1) as manager:
        newest = manager.latest_step()
        number = (0 if newest is None else newest + 1) if step is None else check_step_number(step)
        if newest is not None and number <= newest:
            raise Misuse(f"{location}: step {number} is not above the newest, {newest}")
        if newest is not None and data is None:
            # Before a running trainer is superseded for nothing.
            states.must_go_on(_data_of(manager._reader, newest), data, f"{location}: step {number}")
        manager._tenure.start(Wish("resume", load_values=False))
        pending = manager.save(number, state, data=data, metrics=metrics, extra=extra, force=True)
        assert pending is not None
        pending.wait()
    return number


def _data_of(reader: Reader, step: int) -> Collection[str]:
    """The iterators whose states a step has; of a damaged one the start will tell."""
    try:
        found = reader.find(step)
        return reader.manifest(found).data if found.attempt else ()
    except (Damaged, NotFound):
        return ()


def restore(
    location: Location,
    like: Any = MISSING,
    *,
    step: int | None = None,
    data: Any = None,
    fit: Fit = EXACT,
    loading: Loading = DEFAULT,
) -> Restored:
    """Restore a run's newest intact step, one of its steps, or a step by its own path.

    Also opens what Orbax wrote: its runs, their steps, and what its checkpointers save under any
    name. Of several pytree items in one step `default`, `state` or `items` is taken, as Orbax does;
    without one of these all come, as a dict by their names. Nothing is written.

    `fit` says what may differ from `like`, `loading` how memory and threads are used.

    Raises:
        NotFound, Damaged, Mismatch, Unsupported, StoreFailed.
    """
    check_how(fit, loading)
    step = None if step is None else check_step_number(step)
    place = resolve(location)
    if place.step is None:
        return Reader(place.store).restore(step, like=like, data=data, fit=fit, loading=loading)
    _must_be_it(location, place.step, step)
    if place.alone:
        return restore_alone(place, Template(like, fit, loading), data)
    reader = Reader(place.store)
    return reader.restore_step(place.step, like=like, data=data, fit=fit, loading=loading)


def _must_be_it(location: Location, found: StepId, wanted: int | None) -> None:
    if wanted is not None and wanted != found.step:
        raise Misuse(f"{location}: is step {found.step}; step={wanted} was asked for")


def metadata(location: Location, *, step: int | None = None) -> Metadata:
    """What is known of a step without reading values.

    Raises:
        NotFound, Damaged, StoreFailed. Unsupported: a step of Orbax.
    """
    step = None if step is None else check_step_number(step)
    place = resolve(location)
    if place.alone:
        raise undescribed(place.store.location)
    if place.step is None:
        return Reader(place.store).metadata(step)
    _must_be_it(location, place.step, step)
    return metadata_of(open_step(place.store, place.step))


def open(location: Location) -> Reader:
    """A read-only view of a run, for evaluators.

    Raises:
        NotFound: nothing is there. Unsupported: a step of Orbax that is in no run.
    """
    place = resolve(location)
    if place.alone:
        raise Unsupported(
            f"{location}: one step of Orbax, in no run; ckpt.restore() and `ckpt inspect` read it"
        )
    return Reader(place.store)


def pin(location: Location, step: int) -> StepId:
    """Keep a step of the lineage from retention, for as long as it is pinned."""
    number = check_step_number(step)
    reader = open(location)
    found = reader.find(number)
    text = layout.seal({"format": layout.FORMAT, "step": found.step, "branch": found.branch})
    reader.store.put(layout.pin_name(found), text)
    return found


def unpin(location: Location, step: int) -> StepId:
    """Hand a step back to retention."""
    number = check_step_number(step)
    reader = open(location)
    found = reader.find(number)
    reader.store.delete(layout.pin_name(found))
    return found


def rewind(
    location: Location,
    to: int,
    *,
    branch: int | None = None,
    skips: Skips | None = None,
    reason: str = "",
) -> StepId:
    """Make step `to` the one that the next `resume` goes on from, on a branch of its own.

    For use while no trainer runs; a live one on this host is refused, elsewhere it is superseded.

    Args:
        branch: that of the step; by default the one on which it belongs to the lineage. So one can
            go back to a branch that was left.
        skips: examples never to be served again: iterator name -> half-open ranges. They come on
            top of those of all rewinds before, on whatever branch those were made.

    Raises:
        NotFound: `to` is not in the lineage, or not on `branch`.
        InUse: a live manager on this host.
    """
    from ckpt.arena import Arena
    from ckpt.owning import default_directory
    from ckpt.start import Start, Wish

    check_step_number(to)
    branch = None if branch is None else whole_number(branch, "branch", least=0)
    must_be(reason, str, "reason", "text")
    if skips is not None:
        must_be(skips, Mapping, "skips", "half-open ranges by the name of the iterator")
    for name in skips or {}:
        must_be(name, str, "skips: the name of an iterator", "text")
    reader = open(location)
    run = reader.store.location
    arena = Arena(default_directory(run, 0), owner={"run": run, "doing": "rewind"}, slots=1)
    try:
        start = Start(reader.store, Alone().matter("rewind"))
        wish = Wish(
            "rewind",
            to,
            branch=branch,
            load_values=False,
            must_exist=True,
            skips=skips,
            reason=reason,
        )
        started = start.run(wish)
    finally:
        arena.close(remove=True)
    assert started.decision.parent is not None
    return started.decision.parent

"""A run seen from outside: list, look, restore; no lock, no claim, nothing written."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ckpt import attempts, layout, orbax_files, publishing, records, states
from ckpt.arguments import check_step_number, must_be, time_limit, whole_number
from ckpt.attempts import Listing
from ckpt.errors import Damaged, Misuse, NotFound, StoreFailed
from ckpt.fit import EXACT, Fit
from ckpt.lineage import Skips, StepId, choose, counting
from ckpt.loading import DEFAULT, Loading
from ckpt.log import joined, late_metrics
from ckpt.manifest import Manifest, check_ours, read_manifest
from ckpt.processes import Matter, here, of_tree
from ckpt.resolving import Place, nothing_there
from ckpt.retention import Best, best
from ckpt.store import FileStore, Store, open_store
from ckpt.wording import counted

if TYPE_CHECKING:  # who only lists a run is not to wait for what opens steps
    from ckpt.steps import Damage, OpenStep

Json = Any
_ROUNDS = 20
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "no template"})()
"""Stands for `like` not given: None is a tree, too."""


@dataclass(frozen=True, eq=False)
class Template:
    """What is to come out of a restore: a tree, what may differ from it, and how it is read."""

    like: Any = MISSING
    fit: Fit = EXACT
    loading: Loading = DEFAULT
    data: Any = None
    """Iterators that will be positioned: a step that has not all of them is refused unread."""
    process: tuple[int, int] | None = None
    """Whose iterators: index, and how many there are. None: as JAX counts."""

    def __post_init__(self) -> None:
        check_how(self.fit, self.loading)


@dataclass(frozen=True)
class Lost:
    """A newer step that was passed over."""

    step: int
    reason: str


@dataclass(frozen=True)
class RestoreReport:
    """Where a state came from and what it cost."""

    source: StepId | None = None
    """None: nothing was there, the run is fresh."""
    tier: str = ""
    """From which a manager restored it: memory, local, shared, local-2, ..."""
    fresh: bool = False
    lost: tuple[Lost, ...] = ()
    given_up: tuple[Lost, ...] = ()
    """Newer images on hosts that belong to no step: a process has none, or they do not fit
    together."""
    damage: tuple[Damage, ...] = ()
    """Files of the restored step that are damaged and were not needed; and nearer tiers, by name,
    in which the step is damaged."""
    records: tuple[Damage, ...] = ()
    """Attempt records that are absent or damaged; what they said is known from elsewhere, or was
    not needed."""
    rolled_forward: tuple[str, ...] = ()
    """What was done with steps that older attempts left in the making."""
    bytes_read: int = 0
    """By this process: whole chunks as they are stored, with what lies between small neighbours.
    This and the figures up to `place_s` are 0 for a step of Orbax, which TensorStore reads."""
    bytes_needed: int = 0
    """Of the parts of arrays that this process holds; replicas count once."""
    chunks: int = 0
    """How many were read and verified."""
    plan_s: float = 0.0
    read_s: float = 0.0
    """Reading, verifying, and copying what could not be read in place."""
    place_s: float = 0.0
    """Building device arrays."""
    seconds: float = 0.0
    """All of it, opening and matching the step included; also for a step of Orbax."""


@dataclass(frozen=True)
class Restored:
    """What `restore`, `resume` and `rewind` give."""

    step: int
    """0 for what Orbax saved in a directory whose name is no step number."""
    state: Any
    extra: Json = None
    metrics: dict[str, float] | None = None
    guard: Json = None
    """State of the spike guard that was saved with the step."""
    guard_before_rewind: Json = None
    """State of the guard when it asked for a rewind after which no step was saved yet."""
    report: RestoreReport = field(default_factory=RestoreReport)


@dataclass(frozen=True)
class Metadata:
    """What is known of a step without its values."""

    id: StepId
    parent: StepId | None
    time_ns: int
    leaves: dict[str, Any]
    """Leaf name -> LeafSpec."""
    metrics: dict[str, float] | None
    extra: Json
    data: dict[str, Json]
    environment: dict[str, Json]
    bytes: int
    hidden_from_orbax: tuple[str, ...]


def metadata_of(step: OpenStep) -> Metadata:
    """The metadata of an open step."""
    manifest = step.manifest
    return Metadata(
        manifest.id,
        manifest.parent,
        manifest.time_ns,
        {leaf.name: leaf for leaf in step.leaves},
        manifest.metrics,
        manifest.extra,
        manifest.data,
        manifest.environment,
        manifest.payload_bytes,
        tuple(step.hidden_from_orbax),
    )


@final
class Reader:
    """Read-only view of a run, for evaluators and tools; see `ckpt.open`."""

    def __init__(self, location: str | os.PathLike[str] | Store) -> None:
        self.store = location if isinstance(location, Store) else open_store(location)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held; for use in `with`."""

    def listing(self) -> Listing:
        """Everything the root holds, small files only."""
        return attempts.list_run(self.store)

    def all_steps(self) -> list[int]:
        """The steps of the lineage, ascending."""
        return [step.step for step in self.listing().counting]

    def latest_step(self) -> int | None:
        """The newest step of the lineage."""
        return max(self.all_steps(), default=None)

    def best_step(self, policy: Best) -> int | None:
        """The best step of the lineage by a metric; None when no step has it.

        Metrics that were added late count like those saved with the step.
        """
        must_be(policy, Best, "best_step: policy", "ckpt.Best('loss')")
        listing = self.listing()
        found, late = listing.counting, late_metrics(self.store, listing)
        metrics = {
            step: joined(self.manifest(step).metrics, late.get(step)) or {}
            for step in found
            if step.attempt
        }
        ranked = best(policy, found, metrics)
        return ranked[0].step if ranked else None

    def manifest(self, step: StepId) -> Manifest:
        """Manifest of a committed step."""
        must_be(step, StepId, "step", "a StepId, such as `find` gives")
        return read_manifest(self.store, step)

    def metadata(self, step: int | None = None) -> Metadata:
        """What is known of a step (the newest without a number) without reading values."""
        from ckpt.steps import open_step

        return metadata_of(open_step(self.store, self.find(step)))

    def find(self, step: int | None = None) -> StepId:
        """A step of the lineage, the newest without a number.

        Raises:
            NotFound: there is none.
        """
        step = None if step is None else check_step_number(step)
        listing = self.listing()
        _raise_if_damaged(listing, step)
        found = choose(listing.lineage, listing.steps, step)
        if found is None:
            raise NotFound(nothing_there(self.store, listing))
        return found

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = MISSING,
        data: Any = None,
        fit: Fit = EXACT,
        loading: Loading = DEFAULT,
    ) -> Restored:
        """A step of the lineage; without a number the newest that is intact.

        Args:
            like: the tree to restore into: structure, dtypes, shapes and shardings, given by
                arrays or `jax.ShapeDtypeStruct`. Without it exactly what was saved, on the host.
            data: iterators to position.
            fit: what may differ between `like` and what was saved.
            loading: memory and threads, and whether the memory of `like` is let go first.

        If `like` lies on devices of several processes, all of them must call this, and all get the
        same step or an error.

        Raises:
            NotFound, Damaged, Mismatch, StoreFailed, PeerFailed.
        """
        number = None if step is None else check_step_number(step)
        template = Template(like, fit, loading, data)
        with of_tree(self.store.location, like).matter("restore") as matter:
            return self._restore(matter, number, template)

    def _restore(self, matter: Matter, step: int | None, template: Template) -> Restored:
        for number in range(_ROUNDS):
            restored = self._round(matter, number, step, template)
            if restored is not None:
                return restored
        raise StoreFailed(
            f"{self.store.location}: {_ROUNDS} times the step to read was deleted meanwhile; let "
            "its trainer keep more steps (Keep(last=)), or pin one"
        )

    def _round(
        self, matter: Matter, number: int, step: int | None, template: Template
    ) -> Restored | None:
        """What one listing leads to; None when a trainer has deleted what it lists."""
        listing = self.listing()
        found = counting(listing.lineage, listing.steps)
        if step is not None:
            _raise_if_damaged(listing, step)
            found = [s for s in found if s == choose(listing.lineage, listing.steps, step)]
        elif not found and not listing.damaged_steps:
            raise NotFound(nothing_there(self.store, listing))
        lost: list[Lost] = []
        head = listing.head
        what = f"{number}: steps"
        named = matter.decide(what, lambda: [layout.emit_step_id(each) for each in found])
        where = f"{self.store.location}: steps of process 0"
        for candidate in (layout.parse_step_id(each, where) for each in reversed(named)):
            assert candidate is not None
            what = f"{number}: step {candidate.step}"
            try:
                read = functools.partial(self._read, candidate, template)
                restored = matter.vote(what, read)
            except Damaged as error:
                stands = functools.partial(publishing.of(self.store).stands, candidate)
                if not matter.decide(f"{what} stands", stands):
                    return None
                if step is not None:
                    raise
                lost.append(Lost(candidate.step, str(error)))
                continue
            skips = head.skips if head is not None else {}
            with states.kept_on_error(template.data):
                place = functools.partial(position, self.store, candidate, template.data, skips)
                matter.vote(f"{number}: data", place)
            from ckpt.steps import Damage

            records.told(self.store, listing.records.damage)
            return with_report(
                restored,
                lost=tuple(with_damaged(lost, listing, restored, step)),
                records=tuple(Damage(file, why) for file, why in listing.records.damage),
            )
        raise Damaged(every_step_damaged(self.store, with_damaged(lost, listing, None, step)))

    def restore_step(
        self,
        step: StepId,
        *,
        like: Any = MISSING,
        data: Any = None,
        fit: Fit = EXACT,
        loading: Loading = DEFAULT,
    ) -> Restored:
        """One committed step, whether it belongs to the lineage or not. Raises as `restore`."""
        must_be(step, StepId, "step", "a StepId, such as `find` gives")
        template = Template(like, fit, loading, data)
        with of_tree(self.store.location, like).matter("restore") as matter:
            restored = matter.vote("step", lambda: self._read(step, template))
            with states.kept_on_error(data):
                matter.vote("data", lambda: position(self.store, step, data, {}))
        return restored

    def _read(self, step: StepId, template: Template) -> Restored:
        if template.data is not None:
            check_ours(self.store, step)  # no other step has states of iterators
        return load(self.store, step, template)

    def wait_for_new_step(self, after: int | None = None, *, timeout: float | None = None) -> int:
        """Block until the lineage has a step newer than `after` (default: than now).

        Raises TimeoutError.
        """
        known = self.latest_step() if after is None else whole_number(after, "after", least=-1)
        limit_s = time_limit(timeout, "timeout")
        end = None if limit_s is None else time.monotonic() + limit_s
        while True:
            newest = self.latest_step()
            if newest is not None and (known is None or newest > known):
                return newest
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"{self.store.location}: no step after {known} in {timeout} s")
            time.sleep(0.2)


def position(store: Store, step: StepId, data: Any, skips: Skips) -> None:
    """Put iterators where they were when a step was saved.

    Raises:
        Mismatch: they were not saved with it, or by another number of processes.
    """
    if data is not None:
        index, count = here()
        saved = read_manifest(store, step).data
        where = f"{store.location}: {step}"
        states.put(data, saved, skips, process=index, processes=count, where=where)


def load(store: Store, step: StepId, template: Template) -> Restored:
    """Read and verify one committed step.

    Raises:
        Damaged: it is not what was saved.
        Mismatch: it is not what `like` says, or has no states of iterators for `data`.
    """
    begun = time.monotonic()
    if step.attempt == 0:
        return _load_orbax(store, Path(store.location) / str(step.step), step, template, begun)
    from ckpt.reading import read_tree
    from ckpt.steps import open_step

    try:
        opened = open_step(store, step)
    except NotFound as error:
        raise Damaged(f"{store.location}: {step} was listed and is gone: {error}") from error
    if template.data is not None:
        index, count = template.process or here()
        saved, where = opened.manifest.data, f"{store.location}: {step}"
        states.saved_for(template.data, saved, process=index, processes=count, where=where)
    given = template.like is not MISSING
    state, read = read_tree(
        opened,
        template.like if given else None,
        given=given,
        fit=template.fit,
        loading=template.loading,
    )
    manifest = opened.manifest
    report = RestoreReport(
        step,
        damage=opened.damage,
        bytes_read=read.bytes_read,
        bytes_needed=read.bytes_needed,
        chunks=read.chunks,
        plan_s=read.plan_s,
        read_s=read.read_s,
        place_s=read.place_s,
        seconds=time.monotonic() - begun,
    )
    return Restored(
        step.step,
        state,
        manifest.extra,
        manifest.metrics,
        manifest.guard,
        report=report,
    )


def restore_alone(place: Place, template: Template, data: Any) -> Restored:
    """What a step of Orbax in no run holds. Raises as `Reader.restore_step`."""
    store, step = place.store, place.step
    assert step is not None
    if data is not None:
        raise orbax_files.undescribed(store.location)
    with of_tree(store.location, template.like).matter("restore") as matter:
        read = functools.partial(
            _load_orbax, store, Path(store.location), step, template, time.monotonic()
        )
        return matter.vote("step", read)


def _load_orbax(
    store: Store, path: Path, step: StepId, template: Template, begun: float
) -> Restored:
    from ckpt.orbax_trees import restore_tree

    if not isinstance(store, FileStore):
        raise Misuse(f"{store.location}: steps of Orbax are read from file systems only")
    if template.fit != EXACT:
        raise Misuse(f"{store.location}: {step} is Orbax's; `fit` is for steps of ours")
    given = template.like is not MISSING
    state = restore_tree(path, template.like, given=given, loading=template.loading)
    return Restored(step.step, state, report=RestoreReport(step, seconds=time.monotonic() - begun))


def with_report(restored: Restored, **changes: Any) -> Restored:
    """The same with a changed report."""
    from dataclasses import replace

    return replace(restored, report=replace(restored.report, **changes))


def with_damaged(
    lost: Sequence[Lost], listing: Listing, restored: Restored | None, wanted: int | None
) -> list[Lost]:
    """`lost` and the steps that could not be listed, between those restored and wanted."""
    after = -1 if restored is None else restored.step
    found = [
        Lost(step, reason)
        for step, reason in listing.damaged_steps
        if after < step
        and (wanted is None or step <= wanted)
        and all(each.step != step for each in lost)
    ]
    return sorted([*lost, *found], key=lambda each: -each.step)


def _raise_if_damaged(listing: Listing, step: int | None) -> None:
    for number, reason in listing.damaged_steps:
        if number == step:
            raise Damaged(reason)


def every_step_damaged(store: Store, lost: list[Lost]) -> str:
    """Message for a lineage of which nothing can be restored."""
    lines = "".join(f"\n  step {each.step}: {each.reason}" for each in lost)
    found = "the one step" if len(lost) == 1 else f"all {counted(len(lost), 'step')}"
    return (
        f"{store.location}: {found} of the lineage {'is' if len(lost) == 1 else 'are'} damaged; "
        "nothing was changed."
        f" Run `ckpt verify {store.location}` for the whole report.{lines}"
    )


def check_how(fit: Any, loading: Any) -> None:
    """Raises Misuse for what does not say how to restore."""
    must_be(fit, Fit, "fit", "ckpt.Fit(...)")
    must_be(loading, Loading, "loading", "ckpt.Loading(...)")

"""A step that is saved again: does the state have the values that the step holds?

A step is written once. What a snapshot would write is compared by digests with what was written;
only leaves whose chunks were cut otherwise, as under another sharding, are read for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ckpt import leaves, snapshot, tree
from ckpt.arena import Arena
from ckpt.errors import AlreadyExists, Damaged, Misuse, NotFound
from ckpt.fit import EXACT, Fit
from ckpt.image import Header
from ckpt.leaves import LeafSpec
from ckpt.lineage import StepId
from ckpt.pending import Pending
from ckpt.reader import Template, load
from ckpt.specs import ArraySpec
from ckpt.steps import open_step
from ckpt.store import Store
from ckpt.tree import Flat

Json = Any
T = TypeVar("T")
_NAMED = 20
"""So many leaves are named in an error."""


@dataclass(frozen=True, eq=False)
class Held:
    """What is known of a step without its values."""

    specs: Sequence[LeafSpec]
    headers: Sequence[Header]
    """Of the images: of all processes, or of this one."""
    structure: Json = None
    """The structure record; None: the template of a restore has decided it."""


@dataclass(frozen=True, eq=False)
class Newest:
    """The newest step that an attempt has saved or restored."""

    id: StepId
    data: dict[str, Json]
    """States of the iterators that were given."""
    named: Collection[str]
    """The iterators whose states the next step is to have, too."""
    pending: Pending | None = None
    """None: it was restored."""
    held: Held | None = None
    meta: dict[str, Json] | None = None
    """Of the image that was written; None: it was restored."""
    stores: Sequence[Store] = ()
    """Where it can be read, the nearest first: slots are used again."""

    def again(
        self,
        step: int,
        state: Any,
        arena: Arena,
        plan: snapshot.SnapshotPlan | None,
        tiers: Sequence[str],
    ) -> tuple[Pending, snapshot.SnapshotPlan | None]:
        """The Pending of this step, for one who saves it again; and the plan of the snapshot.

        Raises:
            Misuse: `step` is an older one.
            AlreadyExists: the step holds something else; names the leaves.
            Damaged, StoreFailed, Unsupported.
        """
        if step < self.id.step:
            raise Misuse(
                f"step {step}: this attempt has already reached step {self.id.step}, and steps "
                "only grow on a branch; rewind() or restore(step=) to go back"
            )
        if self.pending is not None:
            # Reading it, should that be needed, must find it; and of a failed one nothing is there,
            # nor are all processes: where it failed, its number may still be free.
            self.pending.ended(None)
            if self.pending.error is not None:
                return self.pending, plan
        # Each process compares what it wrote. They do not settle it together: after a failure of
        # one of them, the same call can be the first for one process and the second for another.
        plan = Written(self.stores, self.id, self.held).must_be(state, arena, plan)
        if self.pending is not None:
            return self.pending, plan
        pending = Pending(step, tiers)
        pending.finish()
        return pending, plan


@dataclass(frozen=True, eq=False)
class Written:
    """A step and the state that may be the one in it."""

    stores: Sequence[Store]
    """The nearest first; the last is the home of the run."""
    step: StepId
    held: Held | None
    """None: to be read from a store."""

    def must_be(
        self, state: Any, arena: Arena, plan: snapshot.SnapshotPlan | None
    ) -> snapshot.SnapshotPlan:
        """Returns the plan of the snapshot that was taken for it.

        Raises:
            AlreadyExists: the step holds something else; names the leaves.
            Damaged, Misuse, StoreFailed, Unsupported.
        """
        flat = tree.flatten(state, known=None if plan is None else plan.outline)
        # Before the snapshot, which may take the very slot.
        held = self.held or (self._from_any(_held) if self.step.attempt else None)
        taken = snapshot.take(flat, arena, {}, previous=plan)
        taken.slot.release()
        lines: list[str] = []
        unsure = [spec.name for spec in flat.specs]
        if held is not None:
            lines, unsure = compare(held, flat, taken.header)
        if not lines and unsure:
            lines = self._read(state, unsure, flat, taken, arena)
        if lines:
            more = len(lines) - _NAMED
            raise AlreadyExists(
                f"{self.stores[-1].location}: step {self.step.step} is saved already, and holds "
                "other values than this state; it stays as it is, and this state was not saved: "
                "give it a later step number"
                + "".join(f"\n  {line}" for line in lines[:_NAMED])
                + (f"\n  and {more} more" if more > 0 else "")
            )
        return taken.plan

    def _from_any(self, read: Callable[[Store, StepId], T]) -> T:
        """What the nearest store gives that still has the step."""
        for store in self.stores[:-1]:
            with contextlib.suppress(Damaged, NotFound):
                return read(store, self.step)
        return read(self.stores[-1], self.step)

    def _read(
        self,
        state: Any,
        names: Sequence[str],
        flat: Flat,
        taken: snapshot.Snapshot,
        arena: Arena,
    ) -> list[str]:
        """The leaves `names`, read as the state has them, against the state."""
        wanted = set(names)
        fit = Fit(partial=wanted.__contains__) if self.step.attempt else EXACT
        template = Template(state, fit)
        found = self._from_any(lambda store, step: load(store, step, template)).state
        theirs = snapshot.take(tree.flatten(found), arena, {}, previous=taken.plan)
        theirs.slot.release()
        lines, unsure = compare(Held(flat.specs, [taken.header]), flat, theirs.header)
        return lines or [f"{name}: another sharding" for name in unsure]


def compare(held: Held, flat: Flat, header: Header) -> tuple[list[str], list[str]]:
    """Leaves of a snapshot that differ from a step, one line each; and those that may.

    Args:
        header: of the snapshot `flat`, of this process's share.
    """
    lines = leaves.differences(held.specs, flat.specs)
    if lines:
        return lines, []
    if held.structure is not None and held.structure != flat.structure:
        return ["the structure: the same leaves in other containers"], []
    before = {spec.name: spec for spec in held.specs}
    saved, here = _chunks(held.headers), _chunks([header])
    unsure = []
    for spec in flat.specs:
        old = before[spec.name]
        if spec.storage_dtype is None or old.storage_dtype is None:
            if (spec.storage_dtype, spec.inline) != (old.storage_dtype, old.inline):
                lines.append(f"{spec.name}: another value")
            continue
        was, now = saved[old.param], here[spec.param]
        if not was.as_cut(now):
            unsure.append(spec.name)
        elif any(was.digests[cell] != digest for cell, digest in now.digests.items()):
            lines.append(f"{spec.name}: other values")
    return lines, unsure


@dataclass(frozen=True, eq=False)
class _Chunks:
    """The chunks of one array that some images hold."""

    spec: ArraySpec
    digests: dict[tuple[int, ...], bytes]
    """By grid coordinates."""

    def as_cut(self, other: _Chunks) -> bool:
        """Are all chunks of the other here, of the same shape and dtype?"""
        mine, theirs = self.spec, other.spec
        return (mine.dtype, mine.shape, mine.chunk_shape) == (
            theirs.dtype,
            theirs.shape,
            theirs.chunk_shape,
        ) and self.digests.keys() >= other.digests.keys()


def _chunks(headers: Sequence[Header]) -> dict[str, _Chunks]:
    found: dict[str, _Chunks] = {}
    for header in headers:
        arrays = [found.setdefault(spec.param, _Chunks(spec, {})) for spec in header.arrays]
        columns = header.columns
        for number, cell, digest in zip(
            columns.array.tolist(), columns.grid.tolist(), columns.digest, strict=True
        ):
            array = arrays[number]
            array.digests[tuple(cell[: len(array.spec.shape)])] = digest.tobytes()
    return found


def _held(store: Store, step: StepId) -> Held:
    opened = open_step(store, step)
    return Held(opened.leaves, opened.headers)

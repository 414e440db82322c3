"""What lies at a location: a run, one step of a run, a step that Orbax wrote, or nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckpt import attempts, layout, orbax_files
from ckpt.attempts import Listing
from ckpt.errors import Damaged, NotFound
from ckpt.lineage import StepId
from ckpt.publishing import read_marker
from ckpt.roots import must_be_a_root
from ckpt.store import FileStore, Store, open_store
from ckpt.wording import counted


@dataclass(frozen=True)
class Place:
    """What a location turned out to be."""

    store: Store
    """Of the run's root; of the step itself when it is alone."""
    step: StepId | None
    """Set when the location is one step."""
    alone: bool = False
    """A step of Orbax in no run, as its checkpointers write them under any name. `step` has the
    number that is its name, or 0."""


def resolve(location: str | os.PathLike[str]) -> Place:
    """The run, or the one step, behind a location.

    Raises:
        NotFound: it is neither; says what is there.
        Damaged: a step whose marker is not what was written.
        Misuse: a directory inside a run.
    """
    store = open_store(location)
    path = store.location
    parent, name = os.path.split(path)
    grandparent, parent_name = os.path.split(parent)
    step, branch = layout.parse_step_name(name), layout.parse_branch_name(parent_name)
    if step is not None and branch is not None:
        root = open_store(grandparent)
        if not root.exists(layout.step_name(branch, step)):
            raise NotFound(f"{path}: no such step")
        try:
            return Place(root, read_marker(root, branch, step).id)
        except NotFound as error:
            raise Damaged(f"{path}: {layout.MARKER} is absent: no committed step") from error
    if isinstance(store, FileStore) and step is not None:
        root = open_store(parent)
        if StepId(step, 0, 0) in attempts.orbax_steps(root):
            return Place(root, StepId(step, 0, 0))
    if os.path.isfile(path):
        raise NotFound(f"{path}: a file; wanted the directory of a run or of a step")
    listing = attempts.list_run(store)
    if (listing.empty or (not listing.claims and orbax_files.is_marked(store))) and (
        orbax_files.holds_step(store)
    ):
        return Place(store, StepId(step or 0, 0, 0), alone=True)
    if listing.empty:
        raise NotFound(nothing_there(store, listing))
    must_be_a_root(store)
    return Place(store, None)


def nothing_there(store: Store, listing: Listing) -> str:
    """Message for a run without steps: what is there instead."""
    if listing.damaged:
        damaged = ", ".join(name for name, _ in listing.damaged[:5])
        return f"{store.location}: no committed step; damaged: {damaged}"
    if listing.claims:
        attempts_made = counted(len(listing.claims), "attempt")
        return f"{store.location}: a run of {attempts_made} without a saved step"
    names = sorted(entry.name for entry in store.list(""))
    there = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    if not names and isinstance(store, FileStore) and not Path(store.location).is_dir():
        return f"{store.location}: no such directory; check the path"
    return f"{store.location}: no checkpoint here; found {there or 'an empty directory'}"

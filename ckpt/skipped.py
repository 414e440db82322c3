"""Which examples a range of batches held, on the lineage on which they were served."""

from __future__ import annotations

from typing import Any

from ckpt import states
from ckpt.candidates import Sources
from ckpt.errors import Damaged, Misuse
from ckpt.lineage import Skips, join_skips, served
from ckpt.manifest import Manifest, read_manifest


def skips_of(sources: Sources, batches: range | None, data: Any) -> Skips:
    """The examples of a range of batches, counted from 0; empty without batches.

    Raises:
        Misuse: no `data`, an iterator in it cannot tell, or no step is there to count from.
        Mismatch, Damaged.
    """
    if not batches:
        return {}
    if data is None:
        raise Misuse("rewind with skips: give `data`, the iterators that are to skip")
    found: Skips = {}
    listing = sources.listing
    for reach, share in served(listing.lineage, batches):
        base = _base(sources, share.start)
        first = share.start - base.id.step
        relative = range(first, first + len(share))
        # A step on which a branch forked knows nothing of what was left out on that branch.
        seen_by = listing.decisions.get(reach.attempt)
        in_force = seen_by.skips if seen_by is not None else {}
        where = f"{sources.home.location}: {base.id}"
        found = join_skips(found, states.ranges_of(data, base.data, relative, in_force, where))
    return found


def _base(sources: Sources, batch: int) -> Manifest:
    """The newest step from which one can count on to a batch."""
    bases = [s for s in sources.counting if s.step <= batch and s.attempt]
    damaged: Damaged | None = None
    for step in reversed(bases):
        for store in sources.readable(step):
            try:
                return read_manifest(store, step)
            except Damaged as error:
                damaged = error
    if damaged is not None:
        raise damaged
    oldest = min(sources.counting, default=None)
    raise Misuse(
        f"rewind: no step at or before {batch} was saved, so the examples of batch {batch} are "
        f"not known; the oldest is {oldest}"
    )

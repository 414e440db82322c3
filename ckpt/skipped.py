"""Which examples a range of batches held, on the lineage on which they were served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt import states
from ckpt.candidates import Sources
from ckpt.errors import Damaged, Mismatch, Misuse, NotFound
from ckpt.lineage import Decision, Lineage, Skips, StepId, join_skips
from ckpt.manifest import Manifest, read_manifest
from ckpt.spans import Commit, Course, Examples, Now

Json = Any
_log = logging.getLogger("ckpt")


def skips_of(
    sources: Sources, batches: range | None, data: Any, serving: int | None = None
) -> Skips:
    """The examples of a range of batches, counted from 0; empty without batches.

    They are those that were served, whatever the batch size was then. Warns where that cannot be
    told, and more is left out instead.

    Args:
        serving: the attempt for which `data` has served so far, if any.

    Raises:
        Misuse: no `data`, an iterator in it cannot tell, or no step is there to count from.
        Mismatch, Damaged.
    """
    if not batches:
        return {}
    if data is None:
        raise Misuse("rewind with skips: give `data`, the iterators that are to skip")
    manifests = _Manifests(sources)
    base = manifests.base(batches.start)
    listing = sources.listing
    found: Skips = {}
    for name, each in states.named(data).items():
        spans = states.spans_of(name, each)
        if "state" not in base.data.get(name, ()):
            where = f"{sources.home.location}: {base.id}"
            raise Mismatch(f"{where}: no common state of iterator {name!r} was saved")
        today = spans.iterator.batch_size
        course = course_of(
            name,
            listing.lineage,
            sources.counting,
            manifests.read,
            listing.decisions,
            spans,
            Now(today, each.get_state(), serving),
        )
        start = commit_of(base, name) or Commit(
            base.id.step, base.id.attempt, base.data[name]["state"], today
        )
        counted = course.held(batches, start)
        for part in counted.covering:
            _log.warning(
                "%s: data %r: the batch size or mixture of steps %d to %d is not known for "
                "certain: all examples are left out that they may have used, %s",
                sources.home.location,
                name,
                part.start + 1,
                part.stop,
                counted.ranges,
            )
        found = join_skips(found, {name: counted.ranges})
    return found


def course_of(
    name: str,
    line: Lineage,
    steps: Sequence[StepId],
    read: Callable[[StepId], Manifest | None],
    decisions: Mapping[int, Decision],
    examples: Examples,
    now: Now | None = None,
) -> Course:
    """The commits of a lineage, as far as the iterator of that name is concerned.

    Args:
        steps: those that count.
    """
    ids = {step.step: step for step in steps if step.attempt}

    def commit(step: int) -> Commit | None:
        manifest = read(ids[step])
        return None if manifest is None else commit_of(manifest, name)

    # A step on which a branch forked knows nothing of what was left out on that branch.
    in_force = {number: each.skips.get(name, ()) for number, each in decisions.items()}
    return Course(line, sorted(ids), commit, in_force, examples, now)


def commit_of(manifest: Manifest, name: str) -> Commit | None:
    """What a step tells of one iterator; None if that is not its place and its batch size."""
    entry = manifest.data.get(name, {})
    size = entry.get("batch_size")
    if "state" not in entry or type(size) is not int or size < 1:
        return None
    return Commit(manifest.id.step, manifest.id.attempt, entry["state"], size)


class _Manifests:
    """Those of the steps that count, from the nearest tier that has them whole."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._read: dict[StepId, Manifest | None] = {}
        self._damaged: Damaged | None = None

    def read(self, step: StepId) -> Manifest | None:
        """None where no tier has it whole."""
        if step not in self._read:
            self._read[step] = self._find(step)
        return self._read[step]

    def _find(self, step: StepId) -> Manifest | None:
        for store in self._sources.readable(step):
            try:
                return read_manifest(store, step)
            except Damaged as error:
                self._damaged = error
            except NotFound:
                continue  # deleted meanwhile
        return None

    def base(self, batch: int) -> Manifest:
        """The newest step from which one can count on to a batch."""
        counting = self._sources.counting
        for step in reversed([s for s in counting if s.step <= batch and s.attempt]):
            manifest = self.read(step)
            if manifest is not None:
                return manifest
        if self._damaged is not None:
            raise self._damaged
        raise Misuse(
            f"rewind: no step at or before {batch} was saved, so the examples of batch {batch} "
            f"are not known; the oldest is {min(counting, default=None)}"
        )

"""What a tier has when an attempt begins, and what is due there of what lies on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt.imaged import MEMORY, HostImage
from ckpt.lineage import StepId, counting
from ckpt.start import Started
from ckpt.tiers import Durable


def newest_in(started: Started, tier: str) -> StepId | None:
    """The newest step of a tier that an attempt may go on from."""
    steps = started.shared.get(tier)
    if steps is None:
        steps = [image.id for image in started.images if image.tier == tier]
    return max(counting(started.line, steps), default=None)


def due_elsewhere(
    started: Started, tiers: Mapping[str, Durable]
) -> Iterator[tuple[HostImage, list[str]]]:
    """The images of this host that are due in further tiers, ascending; the newest goes everywhere.

    Args:
        tiers: the durable ones, nearest first.
    """
    parent = started.restored.report.source
    names = [MEMORY, *tiers]
    there = {name: newest_in(started, name) for name in tiers}
    images: dict[StepId, HostImage] = {}
    for image in started.images:  # the nearest of each step
        images.setdefault(image.id, image)
    for id, image in sorted(images.items()):
        due = [
            name
            for name, newest in there.items()
            if (newest is None or newest < id)
            and name not in started.silent
            and names.index(name) > names.index(image.tier)
            and (id == parent or id.step % tiers[name].every == 0)
        ]
        if due:
            yield image, due

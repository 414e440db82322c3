"""Where snapshots go, how often, and what stays there.

*Host tiers* (`Memory`, `Local`) hold images, one for each process and step, on the host that made
them. *Shared tiers* hold steps, which any host can read. The first shared tier is the home of the
run: it has the records that say which steps count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt.arguments import must_be, patience, whole_number
from ckpt.errors import Misuse
from ckpt.retention import Keep
from ckpt.store import absolute_location

PATIENCE_S = 600.0
"""How long a store may fail before the saves to it do."""


@dataclass(frozen=True)
class Memory:
    """The arena of each process: outlives the trainer, not the host.

    A step is there as soon as it has been copied. A start on the same host goes on from it.
    """

    every: int = 1
    """Save the steps that are multiples of this."""
    keep: Keep = field(default_factory=lambda: Keep(last=1))
    """Only `last`: so many of the newest stay, each in a slot of its own."""

    def __post_init__(self) -> None:
        whole_number(self.every, "Memory: every")
        must_be(self.keep, Keep, "Memory: keep", "ckpt.Keep(last=...)")
        if self.keep.last is None or self.keep != Keep(last=self.keep.last):
            raise Misuse(f"Memory(keep={self.keep}): wanted Keep(last=n); memory is bounded by it")


@dataclass(frozen=True)
class Local:
    """A directory on a disk of each host: an image file for each process and step.

    Runs and processes have directories of their own below it.
    """

    location: str | os.PathLike[str]
    every: int = 1
    """Save the steps that are multiples of this."""
    keep: Keep = field(default_factory=lambda: Keep(last=2, branches=0))
    """Without `best` where a run has several processes."""
    patience_s: float | None = None
    """How long the disk may fail before a save to it fails; by default ten minutes. With
    `math.inf` none ever does: it is in the log and in `status()`, and is tried again."""

    def __post_init__(self) -> None:
        _check(self, "Local")
        if "://" in (text := absolute_location(self.location)):
            raise Misuse(f"Local({text!r}): wanted a path; Shared is the tier for buckets")


@dataclass(frozen=True)
class Shared:
    """A tier that holds steps, reachable by all processes."""

    location: str | os.PathLike[str]
    every: int = 1
    """Save the steps that are multiples of this."""
    keep: Keep = field(default_factory=Keep)
    compression: Literal["zstd"] | None = None
    """How the chunks of steps are stored there. Compressing takes up to four cores in the
    background and, until the step is written, memory beside the arena: what the compressed step
    takes, and a few chunks while it is made. It pays where the store is slow, or values repeat;
    float weights shrink by less than a tenth. Steps say themselves how they are stored: a run may
    change it from one start to the next, in all its processes."""
    patience_s: float | None = None
    """How long the store may fail before a save to it fails; by default ten minutes. With
    `math.inf` none ever does: it is in the log and in `status()`, and is tried again."""

    def __post_init__(self) -> None:
        _check(self, "Shared")
        if self.compression not in (None, "zstd"):
            raise Misuse(f"Shared(compression={self.compression!r}): wanted 'zstd' or None")


Tier = Memory | Local | Shared
Durable = Local | Shared


def _check(tier: Durable, kind: str) -> None:
    absolute_location(tier.location)
    whole_number(tier.every, f"{kind}: every")
    must_be(tier.keep, Keep, f"{kind}: keep", "ckpt.Keep(...), such as Keep(last=3)")
    if tier.patience_s is not None:
        patience(tier.patience_s, f"{kind}: patience_s")


def patience_of(tier: Durable) -> float:
    """Seconds for which the tier may fail before saves to it do."""
    return PATIENCE_S if tier.patience_s is None else float(tier.patience_s)


@dataclass(frozen=True)
class Tiers:
    """The tiers of a manager by name, nearest first: memory, local, shared; the second of a kind is
    local-2 or shared-2."""

    by_name: dict[str, Tier]

    @classmethod
    def of(cls, given: Sequence[Any]) -> Tiers:
        """From what the caller gave; a path stands for `Shared(path)`.

        Raises:
            Misuse: no Shared tier, two Memory tiers, a farther one before a nearer one, or one
                location twice.
        """
        tiers = [
            each if isinstance(each, Memory | Local | Shared) else Shared(each) for each in given
        ]
        kinds = [_KINDS.index(type(each)) for each in tiers]
        if Shared not in map(type, tiers):
            raise Misuse(
                "CheckpointManager: wanted a Shared tier, which holds the records of the run; "
                "ckpt.Shared(path) may well be a path on this host"
            )
        if kinds != sorted(kinds):
            raise Misuse("CheckpointManager: wanted the nearest tier first: Memory, Local, Shared")
        if kinds.count(0) > 1:
            raise Misuse("CheckpointManager: wanted one Memory tier at most, there is one arena")
        found: dict[str, Tier] = {}
        places: dict[str, str] = {}
        for tier in tiers:
            kind = type(tier).__name__.lower()
            number = sum(type(other) is type(tier) for other in found.values()) + 1
            name = kind if number == 1 else f"{kind}-{number}"
            if not isinstance(tier, Memory):
                place = absolute_location(tier.location)
                place = place if "://" in place else os.path.realpath(place)
                if place in places:
                    raise Misuse(f"CheckpointManager: {places[place]} and {name} are both {place}")
                places[place] = name
            found[name] = tier
        return cls(found)

    def must_suit(self, processes: int) -> None:
        """Each process decides what goes from its own Local tiers, and all must decide alike.

        Raises:
            Misuse: a Local tier keeps the best steps, and there are several processes: metrics are
                those of process 0, and the others learn late of what is measured late.
        """
        for name, tier in self.local.items():
            if processes > 1 and tier.keep.best is not None:
                raise Misuse(
                    f"{name}: found Keep(best={tier.keep.best}) in a run of {processes} processes, "
                    "whose hosts would keep parts of different steps; give it to the Shared tier, "
                    "and Keep(last=...) or Keep(every=...) to this one"
                )

    def must_fit(self, slots: int) -> None:
        """Memory leaves a slot for the next snapshot.

        Raises:
            Misuse: it would hold all of them.
        """
        kept = self.kept_in_memory
        if slots <= kept:
            raise Misuse(
                f"CheckpointManager: slots: these tiers need {self.least_slots}, found {slots}: "
                f"{kept} for what Memory keeps, one to copy into, and one that is written out "
                f"meanwhile; with {kept + 1} each save waits until the one before is written"
            )

    @property
    def memory(self) -> Memory | None:
        """The Memory tier, if there is one."""
        found = self.by_name.get("memory")
        return found if isinstance(found, Memory) else None

    @property
    def home(self) -> Shared:
        """The first Shared tier: where the records of the run are."""
        found = self.by_name["shared"]
        assert isinstance(found, Shared)
        return found

    @property
    def durable(self) -> dict[str, Durable]:
        """All but memory."""
        return {name: t for name, t in self.by_name.items() if not isinstance(t, Memory)}

    @property
    def shared(self) -> dict[str, Shared]:
        """The Shared tiers, home first."""
        return {name: t for name, t in self.by_name.items() if isinstance(t, Shared)}

    @property
    def local(self) -> dict[str, Local]:
        """The Local tiers."""
        return {name: t for name, t in self.by_name.items() if isinstance(t, Local)}

    @property
    def least_slots(self) -> int:
        """Of the arena, for saves that do not wait for the one before: one to copy into while
        another is written out, and what memory keeps."""
        return 2 + self.kept_in_memory

    @property
    def kept_in_memory(self) -> int:
        """How many of the newest snapshots stay in memory."""
        return 0 if self.memory is None else self.memory.keep.last or 1

    def due(self, step: int) -> tuple[str, ...]:
        """Names of the tiers that save a step."""
        return tuple(name for name, tier in self.by_name.items() if step % tier.every == 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)


_KINDS: tuple[type, ...] = (Memory, Local, Shared)

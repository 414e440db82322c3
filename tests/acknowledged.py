"""What a trainer was told is somewhere, held against the records and the tiers of its run."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt import attempts
from ckpt.lineage import Decision, StepId, counting, counts, head, lineage
from ckpt.local import LocalImages
from ckpt.slot_files import SlotFiles
from ckpt.slots import step_of
from ckpt.store import FileStore

Events = Sequence[Mapping[str, Any]]
"""What trainers said: of each step its tier and the attempt that saved it ("acknowledged"), of each
start its attempt ("restored")."""


@dataclass(frozen=True)
class Found:
    """What there is of a run."""

    decisions: Mapping[int, Decision]
    there: Mapping[str, Collection[StepId]]
    """The steps by tier."""

    def __str__(self) -> str:
        """The newest of it."""
        decided = [str(self.decisions[number]) for number in sorted(self.decisions)[-8:]]
        tiers = [f"{tier}: {sorted(steps)[-12:]}" for tier, steps in self.there.items()]
        return "\n".join([*decided, *tiers])


def look(run: Path, local: Path, arena: Path) -> Found:
    """At all tiers, whoever owns them: nothing is locked, nothing changed."""
    listing = attempts.list_run(FileStore(run))
    memory: list[StepId] = []
    if arena.is_dir():
        directory_fd = os.open(arena, os.O_DIRECTORY)
        try:
            images = SlotFiles(arena, directory_fd).images()
        finally:
            os.close(directory_fd)
        memory = [step_of(each.header) for each in images]
    images_on_disk = LocalImages(local, str(run), 0).list()
    return Found(
        listing.decisions,
        {"memory": memory, "local": [each.id for each in images_on_disk], "shared": listing.steps},
    )


def not_gone_on_from(events: Events, decisions: Mapping[int, Decision]) -> list[str]:
    """The starts that went on from less than had been acknowledged, in any tier.

    A step that the run went back behind, after it was saved, needs not be there; nothing else
    excuses a start.
    """
    told: set[StepId] = set()
    wrong = []
    for event in events:
        if event["event"] == "acknowledged":
            told.add(_id(event, decisions))
        elif event["event"] == "restored":
            own = decisions[event["attempt"]]
            line = lineage(decisions, own)
            lost = [
                step
                for step in sorted(told)
                if not counts(line, step) and not _went_back(step, decisions, own.attempt)
            ]
            if lost or event["step"] != (own.parent.step if own.parent else 0):
                wrong.append(f"{dict(event)}, decided {own.parent}: lost {lost[-3:]}")
    return wrong


def not_in_their_tiers(events: Events, found: Found, kept: Mapping[str, int]) -> list[str]:
    """The newest acknowledged step of each tier, where it is not there, though retention would not
    have deleted it.

    Args:
        kept: how many counting steps each tier keeps.
    """
    line = lineage(found.decisions, head(found.decisions))
    went_back = max((n for n, each in found.decisions.items() if each.kind == "rewind"), default=0)
    wrong = []
    for tier, last in kept.items():
        told = counting(line, set(_told(events, found.decisions, tier)))
        # Of the newest that a tier kept before a rewind, some count no more: on a host perhaps all,
        # since steps that were flushed stand close together. At home the one gone back to stays.
        told = [step for step in told if tier == "shared" or step.attempt >= went_back]
        there = counting(line, found.there[tier])
        if told and told[-1] not in there:
            newer = sum(step > told[-1] for step in there)
            if newer < (last if told[-1].attempt >= went_back else 1):
                wrong.append(
                    f"{tier}: {told[-1]} was acknowledged, found {there}; the newest rewind was "
                    f"that of attempt {went_back}"
                )
    return wrong


def _told(events: Events, decisions: Mapping[int, Decision], tier: str) -> Iterable[StepId]:
    for event in events:
        if event["event"] == "acknowledged" and event["tier"] == tier:
            yield _id(event, decisions)


def _id(event: Mapping[str, Any], decisions: Mapping[int, Decision]) -> StepId:
    return StepId(event["step"], decisions[event["attempt"]].branch, event["attempt"])


def _went_back(step: StepId, decisions: Mapping[int, Decision], upto: int) -> bool:
    """Was it decided, after the step was saved and up to an attempt, to go back behind it?"""
    return any(
        each.kind == "rewind" and each.parent is not None and each.parent.step < step.step
        for number, each in decisions.items()
        if step.attempt < number <= upto
    )

"""The decisions of a run, as far as they are there; the others are rebuilt from the steps.

A manifest tells the decision of the attempt that made its step. So a decision that is absent or
damaged is known all the same, byte for byte, while one readable step of that attempt is there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt import layout, publishing
from ckpt.errors import CheckpointError, Damaged, NotFound, Unsupported
from ckpt.lineage import ORBAX_ROOT, Decision, StepId, head
from ckpt.manifest import Manifest, read_manifest
from ckpt.store import Store

_log = logging.getLogger("ckpt")


@dataclass(frozen=True)
class Records:
    """What is known of the decisions of a run."""

    decisions: dict[int, Decision] = field(default_factory=dict)
    """Those that were read, and those that were rebuilt."""
    rebuilt: tuple[Decision, ...] = ()
    damage: tuple[tuple[str, str], ...] = ()
    """(file, what is wrong with it)"""
    unknown_head: str = ""
    """Why nobody can say which decision is the newest; empty when it is known."""


def read_records(
    store: Store,
    named: Collection[int],
    steps: Sequence[StepId],
    damaged: Mapping[int, str],
) -> Records:
    """The decisions of the attempts `named`, and of those that `steps` tell of.

    Args:
        steps: the committed steps.
        damaged: attempts that made a step which is damaged, with the name of such a step.

    Raises:
        Unsupported: a record of a newer format.
    """
    decisions, broken = _read(store, sorted(named))
    makers: dict[int, list[StepId]] = {}
    for step in sorted(steps, reverse=True):
        if step.attempt != ORBAX_ROOT:
            makers.setdefault(step.attempt, []).append(step)
    rebuilt: list[Decision] = []
    damage: dict[int, str] = {}
    for number in sorted({*broken, *makers} - decisions.keys()):
        made = makers.get(number, [])
        if number not in broken:
            # It may have been written after the names were listed.
            late, broken_late = _read(store, [number])
            if late or not any(publishing.of(store).stands(step) for step in made):
                decisions.update(late)
                continue
            broken.update(broken_late)
        why = broken.get(number, "absent, though steps of that attempt are there")
        found = _told_by(store, made)
        if found is None:
            damage[number] = why
            continue
        decisions[number] = found[0]
        rebuilt.append(found[0])
        damage[number] = f"{why}; what it said is known from {found[1]}"
    newest = max(decisions, default=0)
    unknown = {n: why for n, why in damage.items() if n > newest}
    for number, name in damaged.items():
        if number > newest:
            unknown.setdefault(number, f"absent, and {name}, which could tell, is damaged")
    unneeded = {n for n in damage.keys() - decisions.keys() if n < newest}
    end = _end_of_chain(store, decisions, {*damaged, *(step.attempt for step in steps)})
    if end is not None:
        decisions[end.attempt] = end
        rebuilt.append(end)
        why = broken.get(end.attempt, "absent")
        damage[end.attempt] = f"{why}; nothing is there of what it or older ones told of"
        unneeded.discard(end.attempt)
    for number in unneeded:
        damage[number] += "; the steps of that attempt do not count while it is so"
    return Records(
        decisions,
        tuple(rebuilt),
        tuple((layout.decision_name(n), why) for n, why in sorted({**damage, **unknown}.items())),
        _unknown_head(store, unknown),
    )


def _read(store: Store, numbers: Sequence[int]) -> tuple[dict[int, Decision], dict[int, str]]:
    """Decisions by number, and why others are none; those that are absent are in neither."""
    keys = [layout.decision_name(number) for number in numbers]
    decisions, broken = {}, {}
    for number, key, data in zip(numbers, keys, store.read_many(keys), strict=True):
        if isinstance(data, NotFound):
            continue
        try:
            if not isinstance(data, bytes):
                raise data
            decision = layout.parse_decision(data, key)
            if decision.attempt != number:
                raise Damaged(f"{key}: holds the decision of attempt {decision.attempt}")
        except Damaged as error:
            broken[number] = str(error).removeprefix(f"{key}: ")
        else:
            decisions[number] = decision
    return decisions, broken


def _told_by(store: Store, made: Sequence[StepId]) -> tuple[Decision, StepId] | None:
    for step in made:
        try:
            decision = read_manifest(store, step).decision
        except (Damaged, NotFound, Unsupported):
            continue
        if decision is not None:
            return decision, step
    return None


def _end_of_chain(
    store: Store, decisions: dict[int, Decision], makers: Collection[int]
) -> Decision | None:
    """What stands for a decision that the chain needs, where it has nothing left to say.

    `makers` are the attempts whose steps are there, committed or damaged. Retention may have
    deleted all steps of an attempt and of those before it. Then its decision only tells that none
    of the older ones counts, and none is there.
    """
    current = head(decisions)
    while current is not None and current.parent is not None:
        parent = current.parent
        if parent.attempt == ORBAX_ROOT or parent.attempt >= current.attempt:
            return None
        if parent.attempt in decisions:
            current = decisions[parent.attempt]
            continue
        late, _ = _read(store, [parent.attempt])
        if late:
            decisions.update(late)
            continue
        if min(makers, default=0) <= parent.attempt:
            return None
        reason = f"its record was lost, and no step from before step {parent.step} is there"
        return Decision(parent.attempt, "resume", None, parent.branch, reason)
    return None


def _unknown_head(store: Store, unknown: dict[int, str]) -> str:
    if not unknown:
        return ""
    number = max(unknown)
    key = layout.decision_name(number)
    return (
        f"{store.location}/{key}: {unknown[number]}. It says where the newest attempt went on "
        f"from, so nothing is taken for the newest step; put {key} back from a copy of the run, or "
        f"restore a step by its path. To give attempt {number} up and go on from what was there "
        f"before it, move {key} and the steps of attempt {number} out of the run"
    )


def must_be_of_this_run(store: Store, manifest: Manifest) -> None:
    """A step that was copied here from another run has the numbers of one of ours.

    Its attempt had decided at another moment than the attempt of that number here. Where the record
    is absent or damaged, nobody can tell.

    Raises:
        Damaged: it belongs to another run.
    """
    key = layout.decision_name(manifest.id.attempt)
    try:
        ours = layout.parse_decision(store.read(key), key)
    except (NotFound, Damaged):
        return
    theirs = manifest.decision
    # As text: a guard may hold numbers that are not equal to themselves.
    if theirs is not None and layout.emit_decision(theirs) != layout.emit_decision(ours):
        name = layout.step_name(manifest.id.branch, manifest.id.step)
        raise Damaged(
            f"{store.location}/{name}: belongs to another run: wanted a step of the attempt that "
            f"{store.location}/{key} tells of (time_ns {ours.time_ns}), found one of an "
            f"attempt {manifest.id.attempt} with time_ns {theirs.time_ns}; put the step's own back"
        )


def write_back(store: Store, records: Records) -> None:
    """Put the decisions that were rebuilt where they belong; what is damaged there goes beside.

    Fine while others do the same: they write the same bytes. A failure is only told of: the next
    attempt rebuilds the decision again.
    """
    for decision in records.rebuilt:
        key = layout.decision_name(decision.attempt)
        text = layout.emit_decision(decision)
        try:
            try:
                found = store.read(key)
            except NotFound:
                store.put_if_absent(key, text)
                continue
            if found != text:
                store.put(f"{key}{layout.DAMAGED}", found)
                store.put(key, text)
        except CheckpointError as error:
            _log.warning("%s/%s: could not be written back: %s", store.location, key, error)


def told(store: Store, damage: Sequence[tuple[str, str]]) -> None:
    """Log what is wrong with the records."""
    for file, why in damage:
        _log.warning("%s/%s: %s", store.location, file, why)

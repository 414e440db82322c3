"""The records of a run in a store: claims, decisions, steps, temporary names.

What they mean is decided in `ckpt.lineage`; here they are only read and written.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt import layout, publishing
from ckpt.errors import AlreadyExists, CheckpointError, Damaged, Superseded
from ckpt.lineage import (
    Claim,
    Decision,
    Kind,
    Lineage,
    Remain,
    StepId,
    counting,
    covers,
    head,
    lineage,
    next_number,
    owner,
    owns,
)
from ckpt.store import Entry, Store


@dataclass(frozen=True)
class Listing:
    """What a run's root held when it was listed, small files only."""

    claims: tuple[int, ...] = ()
    decisions: dict[int, Decision] = field(default_factory=dict)
    steps: tuple[StepId, ...] = ()
    """Committed steps, counting or not."""
    damaged: tuple[tuple[str, str], ...] = ()
    """(name, reason) of final names that are no committed step."""
    remains: tuple[Remain, ...] = ()

    @property
    def head(self) -> Decision | None:
        return head(self.decisions)

    @property
    def lineage(self) -> Lineage:
        return lineage(self.decisions, self.head)

    @property
    def counting(self) -> list[StepId]:
        """The steps that count, ascending."""
        return counting(self.lineage, self.steps)

    @property
    def damaged_steps(self) -> list[tuple[int, str]]:
        """(step, reason) of damaged names where steps of the lineage lie, newest first."""
        found = []
        for name, reason in self.damaged:
            branch, step = layout.parse_full_step_name(name)
            if covers(self.lineage, branch, step):
                found.append((step, reason))
        return sorted(found, reverse=True)

    @property
    def empty(self) -> bool:
        """Nothing of ours and nothing of Orbax's."""
        return not (self.claims or self.steps or self.damaged or self.remains)


def list_run(store: Store) -> Listing:
    """Read all records; steps by their markers only.

    Raises:
        Damaged: a decision cannot be read: without it nothing can be said of the lineage.
        StoreFailed: the store did not answer.
    """
    claims = list_claims(store)
    named = (layout.parse_decision_name(entry.name) for entry in store.list(layout.ATTEMPTS))
    decided = [number for number in named if number is not None]
    keys = [layout.decision_name(number) for number in decided]
    decisions = {}
    for number, key, data in zip(decided, keys, store.read_many(keys), strict=True):
        if not isinstance(data, bytes):
            raise data
        where = f"{store.location}/{key}"
        decision = layout.parse_decision(data, where)
        if decision.attempt != number:
            raise Damaged(f"{where}: holds the decision of attempt {decision.attempt}")
        decisions[number] = decision
    states = publishing.of(store)
    root = store.list("")
    numbers = (layout.parse_branch_name(entry.name) for entry in root if entry.is_dir)
    branches = [states.list_branch(number) for number in numbers if number is not None]
    steps = [step for branch in branches for step in branch.steps] + _orbax_steps(store, root)
    return Listing(
        tuple(claims),
        decisions,
        tuple(sorted(steps)),
        tuple(each for branch in branches for each in branch.damaged),
        tuple(each for branch in branches for each in branch.remains),
    )


def orbax_steps(store: Store) -> list[StepId]:
    """Steps that Orbax wrote straight into the root."""
    return _orbax_steps(store, store.list(""))


def _orbax_steps(store: Store, root: Sequence[Entry]) -> list[StepId]:
    found = []
    for entry in root:
        step = layout.parse_step_name(entry.name) if entry.is_dir else None
        if step is None:
            continue
        names = {inner.name for inner in store.list(entry.name)}
        if names & {layout.ORBAX_STEP, layout.ORBAX_V1, "_METADATA", layout.MARKER, "default"}:
            found.append(StepId(step, 0, 0))
    return found


def list_claims(store: Store) -> list[int]:
    """The claimed numbers."""
    numbers = (layout.parse_claim_name(entry.name) for entry in store.list(layout.ATTEMPTS))
    return sorted(number for number in numbers if number is not None)


def claim(store: Store, kind: Kind, *, held: int | None = None) -> int:
    """Become the owner of the run: put the next number.

    Args:
        held: the attempt that the claimant has been so far. It may go on only as its successor:
            a trainer that was paused must not take the run back from who took it over.

    Raises:
        Superseded: `held` no longer owns the run.
    """
    while True:
        if held is not None:
            look(store, held)
        number = next_number(list_claims(store)) if held is None else held + 1
        record = Claim(number, kind, socket.gethostname(), os.getpid(), time.time_ns())
        try:
            store.put_if_absent(layout.claim_name(number), layout.emit_claim(record))
        except AlreadyExists:
            continue  # somebody was faster; take the number after theirs
        return number


def record(store: Store, decision: Decision) -> None:
    """Write the decision of an attempt, once."""
    key, text = layout.decision_name(decision.attempt), layout.emit_decision(decision)
    try:
        store.put_if_absent(key, text)
    except AlreadyExists:
        # Only this attempt writes it: an answer was lost, and the second try met the first.
        if store.read(key) != text:
            raise


def look(store: Store, attempt: int) -> None:
    """Is `attempt` still the owner?

    Raises:
        Superseded: a newer attempt has claimed the run; it is named.
    """
    claims = list_claims(store)
    if owns(attempt, claims):
        return
    number = owner(claims)
    raise Superseded(
        f"{store.location}: attempt {attempt} no longer owns the run: "
        f"{describe_claim(store, number)} took it over; stop this trainer, or start it again "
        "to go on from the newest step"
    )


def describe_claim(store: Store, number: int) -> str:
    """Attempt, host, pid and time of a claim, as far as they can be read."""
    try:
        found = layout.parse_claim(store.read(layout.claim_name(number)), layout.claim_name(number))
    except CheckpointError:
        return f"attempt {number}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.time_ns / 1e9))
    return f"attempt {number} ({found.kind}, pid {found.pid} on {found.host}, {when})"

"""The records of a run in a store: claims, decisions, steps, temporary names.

What they mean is decided in `ckpt.lineage`; here they are only read and written.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckpt import layout, orbax_files, publishing
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    Damaged,
    NotFound,
    StoreFailed,
    Superseded,
)
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
from ckpt.records import Records, read_records
from ckpt.store import Entry, Store


@dataclass(frozen=True)
class Listing:
    """What a run's root held when it was listed, small files only."""

    claims: tuple[int, ...] = ()
    """Numbers that have a claim or a decision, ascending."""
    steps: tuple[StepId, ...] = ()
    """Committed steps, counting or not."""
    damaged: tuple[tuple[str, str], ...] = ()
    """(name, reason) of final names that are no committed step."""
    remains: tuple[Remain, ...] = ()
    records: Records = field(default_factory=Records)
    """The decisions, and what is wrong with the records of some."""
    branches: tuple[int, ...] = ()
    """Branches that hold something of ours."""
    makers_of_damaged: tuple[int, ...] = ()
    """The attempts that made the damaged steps, as far as the names in them tell."""

    @property
    def decisions(self) -> dict[int, Decision]:
        """By attempt."""
        return self.records.decisions

    @property
    def numbers(self) -> set[int]:
        """Every attempt number that anything in the root carries."""
        made = {*(step.attempt for step in self.steps if step.attempt), *self.makers_of_damaged}
        return {*self.claims, *self.branches, *made, *(remain.attempt for remain in self.remains)}

    @property
    def head(self) -> Decision | None:
        """The newest decision; None for a run without one.

        Raises:
            Damaged: the newest attempt that decided has no readable decision.
        """
        if self.records.unknown_head:
            raise Damaged(self.records.unknown_head)
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
        Unsupported: a record of a newer format. StoreFailed: the store did not answer.
    """
    names = [entry.name for entry in store.list(layout.ATTEMPTS)]
    decided = [n for n in map(layout.parse_decision_name, names) if n is not None]
    states = publishing.of(store)
    root = store.list("")
    numbers = (layout.parse_branch_name(entry.name) for entry in root if entry.is_dir)
    present = [number for number in numbers if number is not None]
    branches = [states.list_branch(number) for number in present]
    steps = [step for branch in branches for step in branch.steps] + _orbax_steps(store, root)
    ours = [
        number
        for number, branch in zip(present, branches, strict=True)
        if branch.steps or branch.damaged or branch.remains
    ]
    damaged = tuple(each for branch in branches for each in branch.damaged)
    makers = {number: name for name, _ in damaged for number in _makers(store, name)}
    return Listing(
        tuple(_numbers(names)),
        tuple(sorted(steps)),
        damaged,
        tuple(each for branch in branches for each in branch.remains),
        read_records(store, decided, steps, makers),
        tuple(ours),
        tuple(makers),
    )


def _makers(store: Store, step: str) -> set[int]:
    """The attempts that parts in a damaged step tell of; none in what was put there by hand."""
    names = (entry.name for entry in store.list(step))
    return {n for n in map(layout.parse_part_name, names) if n is not None}


def orbax_steps(store: Store) -> list[StepId]:
    """Steps that Orbax wrote straight into the root."""
    return _orbax_steps(store, store.list(""))


def _orbax_steps(store: Store, root: Sequence[Entry]) -> list[StepId]:
    numbered = ((layout.parse_step_name(entry.name), entry) for entry in root if entry.is_dir)
    return [
        StepId(step, 0, 0)
        for step, entry in numbered
        if step is not None and orbax_files.is_step(store, entry.name)
    ]


def list_claims(store: Store) -> list[int]:
    """The claimed numbers: those with a claim, or with a decision whose claim is lost."""
    return _numbers([entry.name for entry in store.list(layout.ATTEMPTS)])


def _numbers(names: Sequence[str]) -> list[int]:
    pairs = ((layout.parse_claim_name(n), layout.parse_decision_name(n)) for n in names)
    return sorted({number for pair in pairs for number in pair if number is not None})


def claim(store: Store, kind: Kind, *, held: int | None = None) -> int:
    """Become the owner of the run: put the next number.

    Args:
        held: the attempt that the claimant has been so far. It may go on only as its successor:
            a trainer that was paused must not take the run back from who took it over.

    Raises:
        Superseded: `held` no longer owns the run.
        Damaged: the newest attempt that decided has no readable decision.
    """
    while True:
        if held is not None:
            look(store, held)
        listing = list_run(store)
        _ = listing.head  # not a number is taken in a run of which nobody knows what counts
        # Records may be lost: what carries a number was made by an attempt of that number.
        number = next_number(listing.numbers)
        if held is not None and number != held + 1:
            raise _superseded(store, held, number - 1)
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
    raise _superseded(store, attempt, owner(claims))


@contextlib.contextmanager
def explained(store: Store, attempt: int) -> Iterator[None]:
    """What vanishes under an attempt that was superseded is no fault of the store.

    Raises Superseded in place of such an error.
    """
    try:
        yield
    except (NotFound, StoreFailed, Damaged, AlreadyExists) as error:
        try:
            look(store, attempt)
        except Superseded as superseded:
            raise superseded from error
        except CheckpointError:
            pass
        raise


def _superseded(store: Store, attempt: int, by: int) -> Superseded:
    if by < attempt:
        return Superseded(
            f"{store.location}: attempt {attempt} no longer owns the run: its claim, "
            f"{layout.claim_name(attempt)}, is gone; stop this trainer, and start it again to go "
            "on from the newest step"
        )
    return Superseded(
        f"{store.location}: attempt {attempt} no longer owns the run: "
        f"{describe_claim(store, by)} took it over; stop this trainer, or start it again "
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

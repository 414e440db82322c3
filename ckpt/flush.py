"""Which snapshot is flushed when nobody asks the trainer: the newest that all processes have.

One process looks into its slots. Several cannot ask each other, since their trainers may be dead:
each puts down in the home of the run which steps lie in its slots, and reads what the others put
down (FORMAT.md, section 10). What all have put down for one round is what all decide by.

A *round* is one such exchange. Who begins takes the highest round that anybody has put down, or the
next one if that was put down by itself as well: the others are about to join that one. Who sees a
higher round while it waits joins it, with what its slots hold by then. A decision is safe whatever
happens: a step needs the parts of all processes, and a process that decided otherwise, or not at
all, brings none.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from ckpt import layout
from ckpt.errors import CheckpointError, Damaged, NotFound
from ckpt.lineage import Lineage, StepId, counts
from ckpt.messages import Begin, Setup
from ckpt.processes import Processes
from ckpt.slots import Slots, step_of
from ckpt.store import Store

_log = logging.getLogger("ckpt")

_HOLDING = re.compile(r"a([1-9][0-9]{0,17})-p(0|[1-9][0-9]{0,17})\.json")
_POLL_S = 0.05
_POLL_LIMIT_S = 0.5


def holding_name(owner: int, process: int) -> str:
    """Where a process of an attempt puts down what it has in its slots."""
    return f"{layout.FLUSH}/a{owner}-p{process}.json"


@dataclass(frozen=True)
class Holding:
    """What one process has in its slots, put down for a round."""

    owner: int
    """The attempt that owns the run."""
    process: int
    processes: int
    round: int
    steps: tuple[StepId, ...]
    """Ascending; all of them count."""

    @property
    def name(self) -> str:
        return holding_name(self.owner, self.process)

    def emit(self) -> bytes:
        return layout.seal(
            {
                "format": layout.FORMAT,
                "attempt": self.owner,
                "process": self.process,
                "processes": self.processes,
                "round": self.round,
                "steps": [layout.emit_step_id(step) for step in self.steps],
            }
        )

    @classmethod
    def parse(cls, data: bytes, where: str) -> Holding:
        """Raises Damaged, Unsupported."""
        doc = layout.unseal(data, where)
        steps = doc.get("steps")
        if not isinstance(steps, list):
            raise Damaged(f"{where}: 'steps': wanted a list, found {steps!r}")
        found = [layout.parse_step_id(each, where) for each in steps]
        return cls(
            layout.natural(doc, "attempt", where),
            layout.natural(doc, "process", where),
            layout.natural(doc, "processes", where),
            layout.natural(doc, "round", where),
            tuple(step for step in found if step is not None),
        )


def choose(slots: Slots, begin: Begin, setup: Setup, home: Store) -> tuple[StepId, int] | None:
    """The newest snapshot of the run that can be flushed, and the slot of this process's image.

    None: there is none, or the other processes have not said within half of the writer's grace what
    they hold.

    Raises:
        StoreFailed: the home does not answer, or the arena cannot be read.
    """

    def held() -> dict[StepId, int]:
        return _held(slots, begin.line, setup.index, setup.count)

    if setup.count == 1:
        return max(held().items(), default=None)
    patience_s = min(setup.timeout_s, setup.grace_s / 2)
    mine = Holding(begin.owner, setup.index, setup.count, 0, ())
    return _Exchange(home, mine, held).decide(patience_s)


def newest_of_all(holdings: Sequence[Holding]) -> StepId | None:
    """The newest step that every process holds; pure."""
    common = set.intersection(*(set(each.steps) for each in holdings))
    return max(common, default=None)


def meet(processes: Processes, run: str, timeout_s: float, *, in_order: bool) -> None:
    """Trainers that close flush at one time: their writers do not wait long for each other.

    Args:
        run: its location, for the log.
        in_order: the others can be expected to close, too; otherwise they are told not to wait.
    """
    closing = processes.matter("close", timeout_s)
    if not in_order:
        closing.fail(CheckpointError("it does not wait for the others"))
        return
    try:
        closing.gather("ready", True)
    except CheckpointError as error:
        _log.warning("%s: closing without the others: %s", run, error)


def clear(store: Store, owner: int) -> None:
    """Remove what the writers of attempts before `owner` put down, by process 0 of that attempt.

    Nothing depends on it: what fails is only told to the log.
    """
    try:
        for entry in store.list(layout.FLUSH):
            attempt = _attempt_of(entry.name)
            if attempt is not None and attempt < owner:
                store.delete(f"{layout.FLUSH}/{entry.name}")
    except CheckpointError as error:
        _log.warning("%s/%s: could not be cleared: %s", store.location, layout.FLUSH, error)


def _attempt_of(name: str) -> int | None:
    """The attempt in the name of such a file; None for a foreign one."""
    found = _HOLDING.fullmatch(name)
    return int(found.group(1)) if found else None


def _held(slots: Slots, line: Lineage, index: int, count: int) -> dict[StepId, int]:
    """The steps whose images lie in slots of this process, and that count."""
    found = {}
    for slot, header in slots.valid():
        with contextlib.suppress(Damaged):
            whose = (header.meta.get("process"), header.meta.get("processes"))
            if whose == (index, count) and counts(line, step := step_of(header)):
                found[step] = slot
    return found


@final
class _Exchange:
    """One process's part in finding out what all have."""

    def __init__(
        self, home: Store, mine: Holding, held: Callable[[], Mapping[StepId, int]]
    ) -> None:
        self._home, self._mine, self._held = home, mine, held
        self._slots: Mapping[StepId, int] = {}

    def decide(self, patience_s: float) -> tuple[StepId, int] | None:
        end = time.monotonic() + patience_s
        before = self._read(self._mine.process)
        mine = 0 if before is None else before.round
        highest = max((each.round for each in self._read_others()), default=0)
        self._join(highest if highest > mine else mine + 1)
        pause_s = _POLL_S
        while True:
            others = self._read_others()
            highest = max((each.round for each in others), default=0)
            if highest > self._mine.round:
                self._join(highest)
                continue
            same = [each for each in others if each.round == self._mine.round]
            if len(same) == self._mine.processes - 1:
                step = newest_of_all([self._mine, *same])
                return None if step is None else (step, self._slots[step])
            if time.monotonic() >= end:
                _log.warning(
                    "%s: %d of %d processes have not said which snapshots they hold within %.1f s",
                    self._home.location,
                    self._mine.processes - 1 - len(same),
                    self._mine.processes,
                    patience_s,
                )
                return None
            time.sleep(pause_s)
            pause_s = min(_POLL_LIMIT_S, 1.5 * pause_s)

    def _join(self, round_: int) -> None:
        self._slots = self._held()
        self._mine = replace(self._mine, round=round_, steps=tuple(sorted(self._slots)))
        self._home.put(self._mine.name, self._mine.emit())

    def _read_others(self) -> list[Holding]:
        mine = self._mine.process
        found = [self._read(k) for k in range(self._mine.processes) if k != mine]
        return [each for each in found if each is not None]

    def _read(self, process: int) -> Holding | None:
        """What a process has put down; None for nothing, or for what is no such thing."""
        key = holding_name(self._mine.owner, process)
        where = f"{self._home.location}/{key}"
        with contextlib.suppress(NotFound, Damaged):
            found = Holding.parse(self._home.read(key), where)
            wanted = (self._mine.owner, process, self._mine.processes)
            if (found.owner, found.process, found.processes) == wanted:
                return found
        return None

"""After a step is acknowledged: its figures into the log of the attempt, and retention.

Runs on process 0, in the writer's thread; nothing that fails here touches the step that was saved.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from ckpt import attempts, commit, layout, retention
from ckpt.errors import CheckpointError, Damaged, StoreFailed, Superseded
from ckpt.lineage import Lineage, StepId, counting
from ckpt.retention import Keep
from ckpt.steps import read_manifest
from ckpt.store import Store

_log = logging.getLogger("ckpt")


@final
class Keeper:
    """Deletes what `keep` gives up, and writes down what happened.

    Args:
        superseded: told when a newer attempt owns the run.
    """

    def __init__(self, store: Store, keep: Keep, superseded: Callable[[Superseded], None]) -> None:
        self._store = store
        self._keep = keep
        self._superseded = superseded

    def saved(self, step: StepId, line: Lineage, figures: dict[str, Any]) -> None:
        """A step of the attempt with lineage `line` was acknowledged."""
        where, attempt = self._store.location, step.attempt
        self._note({"event": "save", "step": step.step, **figures}, attempt)
        _log.info("%s: saved %s: %s", where, step, figures)
        self._clean(attempt, line)

    def lost(self, step: StepId, line: Lineage) -> None:
        """The store could not hold a step; if it is full, what may go makes room for the next."""
        self._clean(step.attempt, line)

    def _clean(self, attempt: int, line: Lineage) -> None:
        where = self._store.location
        try:
            for old in self.doomed(line):
                commit.delete_step(self._store, old, owner=attempt)
                self._note({"event": "delete", "step": old.step}, attempt)
        except Superseded as error:
            self._superseded(error)
        except CheckpointError as error:
            # What was to go stays until the next save.
            _log.warning("%s: retention: %s", where, error)
            self._note({"event": "retention failed", "error": str(error)}, attempt)

    def doomed(self, line: Lineage) -> list[StepId]:
        """The steps of a lineage that may go now."""
        if self._keep == Keep():
            return []
        found = counting(line, attempts.list_run(self._store).steps)
        pinned = self._pinned(found)
        metrics: dict[StepId, Mapping[str, float]] = {}
        if self._keep.best is not None:
            for step in found:
                try:
                    if step.attempt:
                        metrics[step] = read_manifest(self._store, step).metrics or {}
                except Damaged as error:
                    # One bad step must not end all retention; it stays for whoever looks into it.
                    _log.warning("%s: retention keeps %s: %s", self._store.location, step, error)
                    pinned.append(step)
        return retention.doomed(self._keep, line, found, metrics=metrics, pinned=pinned)

    def why_kept(self, step: StepId, line: Lineage) -> str | None:
        """Why not even the user may delete a step; None when nothing is against it."""
        found = counting(line, attempts.list_run(self._store).steps)
        return retention.why_kept(line, found, step, self._pinned([step]))

    def _pinned(self, steps: Sequence[StepId]) -> list[StepId]:
        pins = {layout.parse_pin_name(entry.name) for entry in self._store.list(layout.PINS)}
        return [step for step in steps if (step.branch, step.step) in pins]

    def _note(self, event: dict[str, Any], attempt: int) -> None:
        """A line in the log of the attempt; nothing depends on it."""
        line = json.dumps({"time_ns": time.time_ns(), **event}, sort_keys=True) + "\n"
        try:
            self._store.append(layout.log_name(attempt), line.encode())
        except StoreFailed as error:
            _log.warning("%s: log: %s", self._store.location, error)

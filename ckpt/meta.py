"""What an image says of its step: on process 0 the whole record, which finishes a commit."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt import layout, states
from ckpt.arguments import numbers_by_name
from ckpt.environment import environment
from ckpt.lineage import Decision, StepId
from ckpt.processes import Processes

Json = Any


@dataclass(frozen=True)
class Notes:
    """What the caller of `save` wants to be kept with a step.

    Raises:
        Misuse: metrics are no numbers by name, or another is no JSON value, whose keys are text.
    """

    metrics: Mapping[str, Any] | None = None
    extra: Json = None
    guard: Json = None

    def to_json(self) -> dict[str, Json]:
        """Members of the record."""
        return {
            "metrics": None if self.metrics is None else numbers_by_name(self.metrics),
            "extra": states.as_json(self.extra, "extra"),
            "guard": states.as_json(self.guard, "guard"),
        }


def meta_of(
    step: StepId,
    decision: Decision,
    data: dict[str, Json],
    notes: Notes,
    processes: Processes,
) -> dict[str, Json]:
    """The meta of this process's image; `data`: the states of its iterators."""
    record = {
        "parent": layout.emit_step_id(decision.parent),
        "decision": layout.decision_members(decision),
        "device": _device(),
        "environment": environment(),
        **notes.to_json(),
    }
    return {
        "step": step.step,
        "attempt": step.attempt,
        "branch": step.branch,
        "process": processes.index,
        "processes": processes.count,
        "time_ns": time.time_ns(),
        "decided_ns": decision.time_ns,
        "data": data,
        **({"record": record} if processes.index == 0 else {}),
    }


def _device() -> str:
    import jax

    return str(jax.local_devices()[0])

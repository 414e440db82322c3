"""Random histories of a run, by the pure functions alone, and what must come of them, told naively.

Each step remembers the steps before it, as its trainer saw them. Who goes on from a step has these
and those that it saves: that is the lineage, without reaches, chains or bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from ckpt.lineage import Decision, Lineage, Skips, StepId, choose, counting, decide, lineage

OPERATIONS = ("save", "save", "save", "resume", "rewind", "back", "fallback", "late", "retire")


@dataclass
class History:
    """A run, and what is known of it without its lineage."""

    own_branches: bool = False
    """As in a bucket, where each attempt has a branch of its own."""
    decisions: dict[int, Decision] = field(default_factory=dict)
    steps: set[StepId] = field(default_factory=set)
    """Committed."""
    before: dict[StepId, tuple[StepId, ...]] = field(default_factory=dict)
    """Of each step that ever was, those that counted for its trainer, and itself."""
    paths: dict[int, tuple[StepId, ...]] = field(default_factory=dict)
    """Of each attempt, what it went on from and what it has saved."""
    skips: set[int] = field(default_factory=set)
    """All examples that were ever left out."""
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin("start", None)

    @property
    def head(self) -> Decision:
        return self.decisions[max(self.decisions)]

    @property
    def line(self) -> Lineage:
        return lineage(self.decisions, self.head)

    @property
    def counts(self) -> list[StepId]:
        """The oracle: the steps of the run as it is now."""
        return [step for step in self.paths[self.head.attempt] if step in self.steps]

    def begin(self, kind, parent: StepId | None, skips: Skips | None = None) -> Decision:
        number = max(self.decisions, default=0) + 1
        found = counting(lineage(self.decisions, self.head), self.steps) if self.decisions else []
        decision = decide(
            number,
            kind,
            parent=parent,
            newest=max(found, default=None),
            current=self.head if self.decisions else None,
            own_branch=self.own_branches,
            skips=skips,
        )
        self.decisions[number] = decision
        self.paths[number] = self.before[parent] if parent is not None else ()
        self.skips |= {i for a, b in (skips or {}).get("data", ()) for i in range(a, b)}
        self.told.append(f"{number}: {kind} from {parent}, branch {decision.branch}, {skips}")
        return decision

    def save(self, attempt: int, number: int) -> None:
        """What an attempt saves counts for it, whoever owns the run by now."""
        step = StepId(number, self.decisions[attempt].branch, attempt)
        there = [s for s in self.steps if (s.branch, s.step) == (step.branch, step.step)]
        if any(s.attempt > attempt or s in self.counts for s in there):
            return  # refused
        self.steps -= set(there)
        self.steps.add(step)
        self.paths[attempt] = self.before[step] = (*self.paths[attempt], step)
        self.told.append(f"saved {step}")

    def delete(self, steps) -> None:
        self.steps -= set(steps)
        self.told.append(f"deleted {[str(step) for step in steps]}")

    def play(self, draw, operation: str) -> None:
        """One random operation."""
        counts = self.counts
        if operation == "save":
            last = max((s.step for s in self.paths[self.head.attempt]), default=0)
            self.save(self.head.attempt, last + draw(st.integers(1, 3), label="ahead"))
        elif operation == "late":
            attempt = draw(st.sampled_from(sorted(self.decisions)), label="attempt")
            last = max((s.step for s in self.paths[attempt]), default=0)
            if attempt != self.head.attempt:
                self.save(attempt, last + draw(st.integers(1, 3), label="ahead"))
        elif not counts:
            return
        elif operation in ("resume", "fallback"):
            parent = choose(self.line, self.steps)
            if operation == "fallback":
                parent = draw(st.sampled_from(counts), label="fallback")
            self.begin(operation, parent)
        elif operation == "rewind":
            to = draw(st.sampled_from(counts), label="rewind")
            self.begin("rewind", choose(self.line, self.steps, to.step), draw_skips(draw))
        elif operation == "back":
            to = draw(st.sampled_from(sorted(self.steps)), label="back")
            parent = choose(self.line, self.steps, to.step, to.branch)
            assert parent == to, self.told
            self.begin("rewind", parent, draw_skips(draw))


def draw_skips(draw) -> Skips | None:
    start = draw(st.integers(0, 40), label="skip")
    length = draw(st.integers(0, 5), label="length")
    return {"data": [(start, start + length)]} if length else None

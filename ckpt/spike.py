"""When has a loss spiked, and where does the run go back to? Pure: no clock, no device, no store.

A value is suspicious when it stands more than `threshold` median absolute deviations above the
median of the last `window` values. `consecutive` suspicious values in a row are a spike, and the
first of them is its onset; a value that is not finite is one by itself. The loss blows up *after*
the weights went bad, so the run goes back `margin` updates before the onset and leaves out the
batches around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from ckpt.arguments import shown, whole_number
from ckpt.errors import CheckpointError, Damaged, Misuse, NotFound
from ckpt.lineage import Decision, StepId, counts, lineage
from ckpt.wording import counted

if TYPE_CHECKING:
    from ckpt.tiers import Tiers

_JSON_VERSION = 1


class TooManyRewinds(CheckpointError):
    """The loss still spikes after `max_rewinds` rewinds. `history`: all spikes, oldest first."""

    def __init__(self, message: str, history: tuple[Spike, ...]) -> None:
        self.history = history
        super().__init__(message + "".join(f"\n  {spike}" for spike in history))


@dataclass(frozen=True)
class Spike:
    """One firing of the guard. `limit` is None where none was in force (a non-finite value)."""

    onset: int  # step of the first bad value
    seen: int  # step of the value that fired
    value: float
    limit: float | None

    def __str__(self) -> str:
        above = "" if self.limit is None else f", limit {self.limit:.6g}"
        return f"spike at step {self.onset}: value {self.value:.6g} at step {self.seen}{above}"

    def to_json(self) -> dict[str, Any]:
        return {
            "onset": self.onset,
            "seen": self.seen,
            "value": self.value if math.isfinite(self.value) else repr(self.value),
            "limit": self.limit,
        }


@dataclass(frozen=True)
class Rewind:
    """What the guard asks for: leave out the batches of the updates in `skip`, from before them on.

    The step to go back to depends on what is saved: `SpikeGuard.target`.
    """

    spike: Spike
    skip: range  # steps, half-open

    @property
    def onset(self) -> int:
        return self.spike.onset

    @property
    def reason(self) -> str:
        return str(self.spike)


@dataclass(frozen=True)
class GuardState:
    """All a guard knows between two values. Travels with each saved step, as JSON."""

    step: int = 0  # newest step observed
    count: int = 0  # values observed on this lineage, for the warm-up
    window: tuple[float, ...] = ()  # finite values, oldest first
    suspects: tuple[tuple[int, float], ...] = ()  # (step, value) above the limit, not yet a spike
    quiet_until: int = 0  # up to this step only non-finite values fire
    history: tuple[Spike, ...] = ()  # every spike of the run, also those rewound over

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; `from_json` gives back an equal state, every float exactly."""
        return {
            "version": _JSON_VERSION,
            "step": self.step,
            "count": self.count,
            "window": list(self.window),
            "suspects": [list(pair) for pair in self.suspects],
            "quiet_until": self.quiet_until,
            "history": [spike.to_json() for spike in self.history],
        }

    @staticmethod
    def from_json(value: Any) -> GuardState:
        """Raises `Damaged` when `value` is not what `to_json` wrote."""
        try:
            if value["version"] != _JSON_VERSION:
                raise ValueError(f"version {value['version']!r}")
            state = GuardState(
                step=_integer(value["step"]),
                count=_integer(value["count"]),
                window=tuple(_finite(x) for x in value["window"]),
                suspects=tuple((_integer(s), _finite(x)) for s, x in value["suspects"]),
                quiet_until=_integer(value["quiet_until"]),
                history=tuple(_spike(entry) for entry in value["history"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(
                f"the spike guard's state cannot be read: wanted version {_JSON_VERSION} with "
                f"step, count, window, suspects, quiet_until and history, found {str(value)[:200]} "
                f"({error}); go on without a guard, or restore an older step"
            ) from error
        return state


@dataclass(frozen=True)
class SpikeGuard:
    """Watches one value per update and says when to rewind.

    All lengths count updates. Same values, same decisions: also across restarts, since the state
    (`GuardState`) is part of each saved step, and whatever the moment at which a value arrives.

    threshold: median absolute deviations above the median; 10 are 6.7 sigma of a normal noise.
    min_rise: a rise below this share of the median is never suspicious (guards a window in which
        all values are nearly equal).
    consecutive: suspicious values in a row that make a spike; a lone bad batch is no spike.
    warm_up: values before the guard may fire.
    cool_down: updates from the first replaced batch on in which only non-finite values fire.
    lag: updates a value may be read late, so that no step waits for the device.
    margin: how far before the onset the run goes back, at least.
    skip_before, skip_after: batches left out before the onset, and from the onset on.
    max_rewinds: rewinds of the whole run before the guard gives up with `TooManyRewinds`.

    Raises `Misuse` for lengths that contradict each other.
    """

    window: int = 128
    threshold: float = 10.0
    min_rise: float = 0.05
    consecutive: int = 3
    warm_up: int = 100
    cool_down: int = 20
    lag: int = 2
    margin: int = 100
    skip_before: int = 50
    skip_after: int = 200
    max_rewinds: int = 10

    def __post_init__(self) -> None:
        least = {"window": 3, "consecutive": 1, "warm_up": 0, "cool_down": 0, "lag": 0}
        least |= {"margin": 1, "skip_before": 0, "skip_after": 1, "max_rewinds": 0}
        for name, bound in least.items():
            # A plain int, whatever was given: they are in the state, which is JSON.
            number = whole_number(getattr(self, name), f"SpikeGuard.{name}", bound)
            object.__setattr__(self, name, number)
        for name in ("threshold", "min_rise"):
            value = getattr(self, name)
            number_like = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number_like and math.isfinite(value) and value >= 0):
                raise Misuse(
                    f"SpikeGuard.{name}: wanted a finite number >= 0, found {shown(value)}"
                )
        if self.skip_before >= self.margin:
            raise Misuse(
                f"SpikeGuard.skip_before = {self.skip_before} must be below margin = "
                f"{self.margin}: the state gone back to has been trained on every batch before it"
            )

    @property
    def reach(self) -> int:
        """How many updates back a saved step must remain available for a rewind."""
        return self.margin + max(self.lag, self.consecutive - 1)

    def limit(self, state: GuardState) -> float | None:
        """Values above this are suspicious; None during the warm-up."""
        if state.count < self.warm_up or not state.window:
            return None
        middle = median(state.window)
        spread = median(abs(value - middle) for value in state.window)
        return middle + max(self.threshold * spread, self.min_rise * abs(middle))

    def observe(
        self, state: GuardState, step: int, value: float
    ) -> tuple[GuardState, Rewind | None]:
        """Take the value of update `step`; steps grow from call to call.

        After a `Rewind` go on with `rewound`. Raises `TooManyRewinds` instead of asking for one
        too many, `Misuse` for a step that does not follow.
        """
        step, value = int(step), float(value)
        if step <= state.step:
            raise Misuse(f"the guard has seen step {state.step} already, then came step {step}")
        limit = self.limit(state)
        suspects = (*state.suspects, (step, value))
        if not math.isfinite(value):
            return self._fire(state, suspects, limit)
        if limit is None or value <= limit or step <= state.quiet_until:
            values = (*state.window, *(suspect for _, suspect in suspects))
            state = replace(state, window=values[-self.window :], suspects=())
        elif len(suspects) >= self.consecutive:
            return self._fire(state, suspects, limit)
        else:
            state = replace(state, suspects=suspects)
        return replace(state, step=step, count=state.count + 1), None

    def target(self, steps: Iterable[int], onset: int) -> int:
        """The newest of the saved `steps` at least `margin` before `onset`.

        Without one, as early in a run, the oldest before the onset. Raises `NotFound` when there is
        none either.
        """
        steps = sorted(steps)
        before = [step for step in steps if step < onset]
        if not before:
            raise NotFound(
                f"no saved step to rewind to: wanted one before step {onset}, where the loss "
                f"spiked, found {steps[:8] or 'none'}; save more often, or keep more steps"
            )
        good = [step for step in before if step <= onset - self.margin]
        return good[-1] if good else before[0]

    def rewound(self, now: GuardState, saved: GuardState | None, to: int) -> GuardState:
        """The state to go on with at step `to`, whose commit held `saved` (None: held no guard).

        The values seen are those of the step gone back to; the history of spikes is never undone.
        """
        saved = saved or GuardState()
        first_new = now.history[-1].onset - self.skip_before
        return GuardState(
            step=to,
            count=saved.count,
            window=saved.window,
            quiet_until=max(first_new, to + 1) + self.cool_down - 1,
            history=now.history,
        )

    def _fire(
        self, state: GuardState, suspects: tuple[tuple[int, float], ...], limit: float | None
    ) -> tuple[GuardState, Rewind]:
        (onset, _), (step, value) = suspects[0], suspects[-1]
        history = (*state.history, Spike(onset, step, value, limit))
        if len(history) > self.max_rewinds:
            raise TooManyRewinds(
                f"the loss spiked again at step {onset} after "
                f"{counted(self.max_rewinds, 'rewind')}, which is "
                "max_rewinds; rewinding does not cure this run. All spikes:",
                history,
            )
        skip = range(max(1, onset - self.skip_before), onset + self.skip_after)
        state = replace(state, step=step, count=state.count + 1, suspects=(), history=history)
        return state, Rewind(history[-1], skip)


def must_be_served(guard: SpikeGuard, tiers: Tiers) -> None:
    """Refuse a guard for whose rewinds no tier can ever hold a step that is `reach` updates old.

    Raises `Misuse`, which tells what the tier that reaches farthest would need.
    """
    farthest: tuple[int, str, int, int] | None = None
    for name, tier in tiers.by_name.items():
        last = tier.keep.last
        if last is None or tier.keep.every is not None or tier.keep.best is not None:
            return
        reach = (last - 1) * tier.every
        if reach >= guard.reach:
            return
        farthest = max(farthest or (reach, name, tier.every, last), (reach, name, tier.every, last))
    if farthest is None:
        return
    reach, name, every, last = farthest
    kept = -(-guard.reach // every) + 1
    raise Misuse(
        f"the guard goes back {counted(guard.reach, 'step')} (margin {guard.margin}, and up to "
        f"{guard.reach - guard.margin} until a spike is seen), but no tier keeps steps that long: "
        f"of the steps that {name} saves every {every} only the last {last} are kept, which reach "
        f"{reach} back; use Keep(last={kept}) there, Keep(every=...), or a smaller margin"
    )


def suspects(decisions: Mapping[int, Decision], steps: Iterable[StepId]) -> dict[StepId, Spike]:
    """The saved steps that a spike had begun before, each with the first such spike.

    Which they are follows from the attempts' records: a rewind by a guard has the guard's state,
    and leaves the lineage on which the spike was seen.

    Raises `Damaged` for records that contradict each other.
    """
    steps = list(steps)
    found: dict[StepId, Spike] = {}
    for number, decision in sorted(decisions.items()):
        before = [other for other in decisions if other < number]
        if decision.kind != "rewind" or decision.guard is None or not before:
            continue
        history = GuardState.from_json(decision.guard).history
        if history:
            left = lineage(decisions, decisions[max(before)])
            newer = (s for s in steps if s.step >= history[-1].onset and counts(left, s))
            found = {**dict.fromkeys(newer, history[-1]), **found}
    return found


def _spike(value: Mapping[str, Any]) -> Spike:
    bad, limit = value["value"], value["limit"]
    if isinstance(bad, str):
        if bad not in ("nan", "inf", "-inf"):
            raise ValueError(f"value {bad!r}")
        bad = float(bad)
    elif not isinstance(bad, float):
        raise ValueError(f"value {bad!r}")
    return Spike(
        _integer(value["onset"]),
        _integer(value["seen"]),
        bad,
        None if limit is None else _finite(limit),
    )


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _finite(value: Any) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite float")
    return value

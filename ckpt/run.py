"""The training loop with everything in it: resume, save, rewind on a spike, leave on preemption."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckpt import foreign, leaves, log, spike, states, tree
from ckpt.arguments import must_be, whole_number
from ckpt.averages import Averages
from ckpt.errors import Misuse, PeerFailed
from ckpt.loading import DEFAULT, Loading
from ckpt.preemption import Preemption
from ckpt.spike import GuardState, Rewind, SpikeGuard
from ckpt.step_times import Inflation, Stopwatch

if TYPE_CHECKING:
    from ckpt.manager import CheckpointManager, Pending, Restored


@dataclass(frozen=True)
class Rewound:
    """A rewind that took place."""

    onset: int  # step of the first bad value
    to: int  # step gone back to
    skip: range  # steps whose batches are left out
    reason: str


class Run:
    """Drives a training loop from wherever the run stands to `steps` completed updates.

    ::

        with ckpt.Run(manager, state, data, guard=ckpt.SpikeGuard(), steps=10_000) as run:
            for step, batch in run:
                new_state, loss = train_step(run.state, batch)
                run.update(new_state, loss=loss)

    Entering resumes through the manager: `state` (any tree) is the start of a fresh run and the
    `like` of every restore. The loop yields `(step, batch)`: `step` is the number that the update
    completes, so the first is 1, and step s is what is saved, logged and skipped as step s. `data`
    is one iterator with `get_state` and `set_state`.

    With a `guard`, the value named `metric` is watched; a spike rewinds the run inside `update`.
    It must be the same on all processes; where each sees only that of its own data, say
    `metric_is_local`, and the mean over them is watched, and saved. Each value is read `guard.lag`
    updates late, and at once where a step is saved, so that a step never holds a state whose loss
    was not looked at. A fresh run with a guard saves step 0. Where no step is left that is
    `guard.margin` before the spike, as early in a run, the oldest one before it is gone back to,
    and the reason says so. Entering refuses a guard that no tier's `Keep` can ever serve, and
    `data` that cannot skip.

    `loading` is for every restore. With its `donate` the arrays of `state` are gone after one, and
    after a rewind those that `update` was given, so that the peak is one state and not two.

    On SIGTERM (main thread only; earlier handlers are called too, and put back at the end) the
    current step is saved by all tiers at the next update, the loop ends and `preempted` is true.
    Among several processes this happens at the same update in all, a few updates later: by JAX's
    preemption service, and if that is off over JAX's coordination service. Leaving the
    loop saves the last step and waits until all that is due is durable; leaving it with an
    exception saves nothing more.

    It does not close the manager. Raises what the manager raises, also for background saves, and
    `TooManyRewinds`; `PeerFailed` if another process is not heard of that has a share in the mean,
    or in the decision where to stop.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        state: Any,
        data: Any,
        *,
        steps: int,
        guard: SpikeGuard | None = None,
        metric: str = "loss",
        metric_is_local: bool = False,
        must_exist: bool = False,
        loading: Loading = DEFAULT,
    ) -> None:
        whole_number(steps, "Run.steps, the number of updates to complete", least=0)
        must_be(loading, Loading, "Run.loading", "ckpt.Loading(...)")
        if guard is not None:
            must_be(guard, SpikeGuard, "Run.guard", "ckpt.SpikeGuard(...) or None")
        must_be(metric, str, "Run.metric", "the name of a value that update() is given")
        must_be(metric_is_local, bool, "Run.metric_is_local", "True or False")
        if not hasattr(data, "__next__"):
            raise Misuse(
                f"Run.data: wanted one iterator, found {type(data).__name__}; call .iterator() on "
                "a pipeline, and use the manager itself for several iterators"
            )
        self.steps = steps
        self.rewinds: list[Rewound] = []
        self.preempted = False
        self._manager, self._data = manager, data
        self._guard, self._metric, self._must_exist = guard, metric, must_exist
        self._metric_is_local = metric_is_local
        self._loading = loading
        self._state, self._step = state, 0
        self._restored: Restored | None = None
        self._guard_state = GuardState()
        self._unread: deque[tuple[int, Any]] = deque()  # (step, value) not observed yet
        self._metrics: dict[str, Any] = {}
        self._extra: Any = None
        self._saved_step: int | None = None
        self._look: Any = None
        self._taken = False  # a batch was handed out and its update has not come
        self._averages: Averages | None = None
        self._preemption = Preemption()
        self._stopwatch = Stopwatch(self._note_inflation)

    @property
    def state(self) -> Any:
        """The state after `step` updates; what `train_step` takes next."""
        return self._state

    @property
    def step(self) -> int:
        """Completed updates."""
        return self._step

    @property
    def restored(self) -> Restored:
        """What the last resume or rewind brought back: step, extra, metrics, report."""
        if self._restored is None:
            raise Misuse("the run has not been entered yet: use `with ckpt.Run(...) as run:`")
        return self._restored

    def __enter__(self) -> Run:
        if self._restored is not None:
            raise Misuse("a Run is entered once; make a new one to go on")
        if self._guard is not None:
            self._must_be_able_to_rewind(self._guard)
        restored = self._manager.resume(
            like=self._state,
            data=self._data,
            must_exist=self._must_exist,
            loading=self._loading,
        )
        self._continue_from(restored)
        if self._guard is not None:
            self._guard_state = _guard_state(restored.guard) or GuardState()
            if (before := _guard_state(restored.guard_before_rewind)) is not None:
                # Stopped between a rewind and the first step saved after it.
                self._guard_state = self._guard.rewound(before, self._guard_state, self._step)
            if self._step == 0 and 0 not in self._manager.all_steps():
                self._save(force=True)
        if self._guard is not None and self._metric_is_local:
            self._averages = Averages(self._manager.processes, self._manager.timeout_s)
        self._preemption.begin(self._manager.processes, self._manager.timeout_s)
        return self

    def _must_be_able_to_rewind(self, guard: SpikeGuard) -> None:
        """Better refused now than when the loss spikes."""
        spike.must_be_served(guard, self._manager.tiers)
        if not isinstance(self._data, states.Skipping):
            raise Misuse(
                f"Run.data: {type(self._data).__name__} cannot skip batches (no `batch_size`, "
                "`span` and `skip`), which the guard does when the loss spikes; "
                f"{foreign.CURE}, or a run without a guard"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._preemption.end()
            if self._averages is not None:
                self._averages.close(error)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        step = self.restored.step  # raises before `with`
        while not self.preempted:
            if self._taken:
                raise Misuse(
                    f"step {self._step + 1} got a batch but no update: call run.update(new_state, "
                    f"{self._metric}=...) once for each batch"
                )
            if self._preemption.says_stop:
                self.preempted = True
            elif self._step >= self.steps or (batch := self._next_batch()) is _END:
                # The guard may still send the run back when it reads the last values.
                if not self._observe(keep=0):
                    return
            else:
                step = self._step + 1
                self._taken = True
                yield step, batch

    def update(self, state: Any, *, extra: Any = None, **metrics: Any) -> Pending | None:
        """Completes a step: the point where step, state and data agree.

        state: the new state, with the leaves, dtypes and shapes of the one before.
        extra: JSON value to save with the step. metrics: scalars (arrays are read only when a
        step is saved, or late by the guard).

        Returns the save that began, if one did. After a rewind, `step` and `state` are those gone
        back to, and `rewinds` has one more entry.
        """
        if not self._taken:
            raise Misuse(
                f"update without a batch, after step {self._step}: call it once for each batch "
                "the run yields"
            )
        self._check_state(state)
        self._stopwatch.lap()
        if self._guard is not None:
            if self._metric not in metrics:
                raise Misuse(
                    f"the guard watches {self._metric!r}: wanted run.update(state, "
                    f"{self._metric}=...), found {sorted(metrics) or 'no metrics'}"
                )
            self._unread.append((self._step + 1, metrics[self._metric]))
            if self._averages is not None:
                self._averages.give(metrics[self._metric])
        self._taken = False
        self._step += 1
        self._state, self._metrics, self._extra = state, metrics, extra
        last = self._step >= self.steps
        last = self._preemption.stops_after_update(last=last) or last
        due = last or self._manager.should_save(self._step)
        if self._observe(keep=0 if due or self._guard is None else self._guard.lag):
            return None
        return self._save(force=last) if due else None

    def _check_state(self, state: Any) -> None:
        """One that no restore into the state before would accept is refused at once, not days later
        by the restart that needs it."""
        look = _look(state)
        if look is None or look != self._look:
            before = tree.flatten(self._state, abstract=True)
            lines = leaves.differences(tree.flatten(state, abstract=True).specs, before.specs)
            if lines:
                raise Misuse(
                    f"update {self._step + 1}: the new state is not what the state before was, and "
                    "could not be restored into it; give all leaves the dtypes and shapes that "
                    "they keep from the start:"
                    + "".join(f"\n  {line}" for line in lines[:_NAMED])
                    + (f"\n  and {len(lines) - _NAMED} more" if len(lines) > _NAMED else "")
                )
        self._look = look

    def _next_batch(self) -> Any:
        try:
            return next(self._data)
        except StopIteration:
            return _END

    def _save(self, *, force: bool) -> Pending | None:
        with self._stopwatch.apart():
            pending = self._manager.save(
                self._step,
                self._state,
                data=self._data,
                metrics={name: float(value) for name, value in self._metrics.items()},
                extra=self._extra,
                guard=None if self._guard is None else self._guard_state.to_json(),
                force=force,
            )
        if pending is not None:
            self._saved_step = self._step
            self._stopwatch.began(self._step, pending)
        return pending

    def _observe(self, *, keep: int) -> bool:
        """Shows the guard all but the newest `keep` values; true when that made the run rewind."""
        while self._guard is not None and len(self._unread) > keep:
            step, value = self._unread.popleft()
            if self._averages is not None:
                value = self._averages.take()
                if step == self._step:
                    self._metrics[self._metric] = value
            self._guard_state, rewind = self._guard.observe(self._guard_state, step, float(value))
            if rewind is not None:
                self._rewind(self._guard, rewind)
                return True
        return False

    def _rewind(self, guard: SpikeGuard, rewind: Rewind) -> None:
        # The target must not depend on how far a background save has come.
        self._manager.wait_until_finished()
        self._stopwatch.stop()
        saved_steps = self._manager.all_steps()
        to = guard.target(saved_steps, rewind.onset)
        # The memory goes to what is restored; whoever drives the run may hold these arrays, too.
        like, self._state = self._state if self._loading.donate else _specs(self._state), None
        reason = rewind.reason
        if to > (wanted := rewind.onset - guard.margin):
            reason += f"; no step at or before {wanted} is saved, so back to the oldest, {to}"
        # `to` has learnt from the batches up to its own: they cannot be left out any more.
        skip = range(max(rewind.skip.start, to + 1), rewind.skip.stop)
        with self._same_values():
            restored = self._manager.rewind(
                to,
                skip_steps=skip,
                reason=reason,
                like=like,
                data=self._data,
                guard=self._guard_state.to_json(),
                loading=self._loading,
            )
        saved = _guard_state(restored.guard)
        self._guard_state = guard.rewound(self._guard_state, saved, restored.step)
        self._unread.clear()
        if self._averages is not None:
            self._averages.drop()
        self._continue_from(restored)
        self.rewinds.append(Rewound(rewind.onset, restored.step, skip, reason))
        self._manager.note(
            log.spiked(
                rewind.spike.to_json(),
                restored.step,
                (step for step in saved_steps if step >= rewind.onset),
            ).to_json()
        )

    @contextlib.contextmanager
    def _same_values(self) -> Iterator[None]:
        """The others may not have seen the spike that this process saw."""
        try:
            yield
        except (Misuse, PeerFailed) as error:
            if self._averages is not None or self._manager.processes.count == 1:
                raise
            raise type(error)(
                f"{error}; the guard must see the same {self._metric} in all processes: where each "
                "has that of its own data, use Run(..., metric_is_local=True)"
            ) from error

    def _note_inflation(self, found: Inflation) -> None:
        if found.steps:
            self._manager.note(log.inflated(found.step, asdict(found)).to_json())

    def _continue_from(self, restored: Restored) -> None:
        self._restored = restored
        self._state, self._step = restored.state, restored.step
        self._look = _look(self._state)
        self._metrics, self._extra = dict(restored.metrics or {}), restored.extra
        self._saved_step = restored.step if restored.step else None

    def _finish(self) -> None:
        if self._taken:
            warnings.warn(
                f"the loop was left with a batch taken and not used: step {self._step} is not "
                f"saved, the newest saved step is {self._saved_step}; leave it after run.update",
                stacklevel=3,
            )
        elif not self._observe(keep=0) and self._saved_step != self._step:
            self._save(force=True)
        self._manager.wait_until_finished()
        self._stopwatch.stop()


_END = object()
_NAMED = 10
"""So many differences are named in an error."""


def _look(state: Any) -> Any:
    """What two states that fit each other have in common, cheap; None if JAX cannot flatten it."""
    import jax

    try:
        values, structure = jax.tree.flatten(state)
    except (TypeError, ValueError, RecursionError, SystemError):  # the last: a tree within itself
        return None
    kinds = [
        (value.dtype, value.shape) if hasattr(value, "dtype") else type(value) for value in values
    ]
    return structure, kinds


def _guard_state(value: Any) -> GuardState | None:
    return None if value is None else GuardState.from_json(value)


def _specs(state: Any) -> Any:
    """The same tree with each jax array replaced by its shape, dtype and sharding.

    Raises:
        Unsupported: a tree that no save would take.
    """
    import jax

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding,
            weak_type=getattr(leaf, "weak_type", False),  # typed keys have none
        )

    flat = tree.flatten(state, abstract=True)  # also keys of several types, unlike JAX
    return tree.with_values(state, flat.specs, [spec(value) for value in flat.values])

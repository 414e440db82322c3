"""CheckpointManager: the run as a trainer sees it. What is decided here is decided for the run."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, final

from ckpt import candidates, log, states
from ckpt.arena import MOST_SLOTS
from ckpt.arguments import check_step_number, must_be, seconds, time_limit, whole_number
from ckpt.backend import WriterKind
from ckpt.errors import CheckpointError, Misuse
from ckpt.fit import EXACT, Fit
from ckpt.loading import DEFAULT, Loading
from ckpt.meta import Notes
from ckpt.pending import Background, Pending
from ckpt.processes import TIMEOUT_S, Processes, of_run
from ckpt.reader import MISSING, Reader, Restored
from ckpt.retention import Best
from ckpt.saves import Saves
from ckpt.start import Wish, batches_of
from ckpt.status import Status
from ckpt.store import Store, local_path, open_store
from ckpt.tenure import Tenure
from ckpt.tiers import Tier, Tiers

Json = Any
P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger("ckpt")


def _one_at_a_time(
    call: Callable[Concatenate[CheckpointManager, P], T],
) -> Callable[Concatenate[CheckpointManager, P], T]:
    """Threads of a trainer may share its manager: their calls take turns."""

    @functools.wraps(call)
    def locked(self: CheckpointManager, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            return call(self, *args, **kwargs)

    return locked


@final
class CheckpointManager:
    """Saves and restores a run, together with the position in its data.

    Called by the same code in all processes of the job. One manager at a time may be live on a
    host for a run; a newer one elsewhere supersedes this one.

    Args:
        tiers: where steps go, the nearest first: `Memory`, `Local`, `Shared`; a path stands for
            `Shared(path)`. The first Shared one is the home of the run, with its records.
        slots: snapshots that may be in memory at a time: by default 2, so that a save is copied
            while the one before is still being written, and what Memory keeps beside.
        arena: directory of the slots, for this run alone, below which each of several processes has
            one of its own; by default a private one in /dev/shm.
        writer: "process", one that outlives this one and finishes what lies in the arena, also
            when this one is told to end (SIGTERM) or is killed; or "thread", which ends with it.
        busy: what a save does that finds no free slot: "wait" for one, or "skip" this save, in all
            processes; a save with `force` waits.
        timeout_s: how long to wait for another process before it is named as failed. When one dies,
            JAX ends the others, by default after 100 s: only a shorter time is heard of here.
    """

    def __init__(
        self,
        *tiers: Tier | str | os.PathLike[str],
        slots: int | None = None,
        arena: str | os.PathLike[str] | None = None,
        writer: WriterKind = "process",
        busy: Literal["wait", "skip"] = "wait",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.tiers = Tiers.of(tiers)
        _check_options(slots, writer, busy)
        self._stores: dict[str, Store] = {
            name: open_store(tier.location) for name, tier in self.tiers.shared.items()
        }
        self._store = self._stores["shared"]
        self._others = {n: store for n, store in self._stores.items() if n != "shared"}
        self._reader = Reader(self._store)
        # The writer's threads must not hold the manager, or it would never be collected.
        self._background = Background()
        self.processes: Processes = of_run(self._store.location)
        """Who takes part in the run, and the board on which they talk."""
        self.timeout_s = timeout_s = seconds(timeout_s, "CheckpointManager: timeout_s")
        self._saves = Saves(
            self.tiers,
            self._stores,
            self.processes,
            self._background,
            slots=self.tiers.least_slots if slots is None else slots,
            arena=None if arena is None else local_path(arena, "CheckpointManager: arena"),
            writer=writer,
            timeout_s=timeout_s,
        )
        self._tenure = Tenure(
            self.tiers,
            self._stores,
            self.processes,
            self._saves,
            self._background,
            skips_when_busy=busy == "skip",
            timeout_s=timeout_s,
        )
        self._ended = False
        """Whether nothing is held any more."""
        self._lock = threading.RLock()
        """Held by every call that changes something; never by the writer's threads."""
        self._collected = weakref.finalize(self, self._saves.let_go)
        self._collected.atexit = False
        # A trainer that ends without close() must not lose its last save.
        atexit.register(_close_quietly, weakref.ref(self))

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            why = "it closed its manager" if kind is None else f"it raised {kind.__name__}"
            self._close(why, in_order=kind is None)
        except CheckpointError:
            if kind is None:
                raise
            _log.exception("while the manager was closed after another error")

    def __repr__(self) -> str:
        attempt = self._tenure.attempt
        number = f"attempt {attempt.number}" if attempt else "no attempt yet"
        return f"CheckpointManager({self._store.location!r}, {number})"

    @property
    def location(self) -> str:
        """The root of the run."""
        return self._store.location

    # --- looking --------------------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """The steps of the lineage that can be gone on from, in any tier, ascending."""
        process = (self.processes.index, self.processes.count)
        found = candidates.look(
            self._store, self._others, self._saves.host_images(), process, self.tiers.kept_in_memory
        )
        return sorted({step.step for step in found.counting})

    def latest_step(self) -> int | None:
        """The newest of `all_steps`."""
        return max(self.all_steps(), default=None)

    def best_step(self, policy: Best | None = None) -> int | None:
        """The best step of the run's home by `policy`, or by that of a tier's `keep`."""
        policies = [tier.keep.best for tier in self.tiers.shared.values()]
        policy = policy or next((each for each in policies if each is not None), None)
        if policy is None:
            raise Misuse("best_step: no metric; give Best('loss'), or Keep(best=...) to the tier")
        return self._reader.best_step(policy)

    def should_save(self, step: int) -> bool:
        """Would `save` save this step?"""
        return bool(self.tiers.due(check_step_number(step)))

    def status(self) -> Status:
        """How the tiers and the writer are doing: what is where, what fails, what waits."""
        return self._saves.status(self._tenure.held)

    # --- starting -------------------------------------------------------------------------

    def resume(
        self,
        like: Any = MISSING,
        data: Any = None,
        *,
        must_exist: bool = False,
        fit: Fit = EXACT,
        loading: Loading = DEFAULT,
    ) -> Restored:
        """Go on from the newest intact step; a run without steps starts fresh with step 0.

        A fresh start is made only when the store answered and holds nothing; it returns `like`
        as the state, and leaves `data` where it is.

        Returns:
            `Restored`: `state`, like `like`; `step`, `metrics`, `extra` and `guard` as they were
            saved; `report`, with `fresh`, and with the newer steps that were passed over in `lost`.

        Args:
            must_exist: a run without steps is an error.
            fit: what may differ between `like` and what was saved.
            loading: memory and threads, and whether the memory of `like` is let go first.

        Raises:
            NotFound: `must_exist`, and nothing is there.
            Damaged: there are steps, and none is intact.
            Mismatch: the step is not what `like` says, or has no state of an iterator in `data`.
                Nothing was changed.
            InUse, StoreFailed, PeerFailed, Superseded.
        """
        return self._begin_anew(
            Wish("resume", None, like, data, must_exist=must_exist, fit=fit, loading=loading)
        )

    def restore(
        self,
        step: int | None = None,
        *,
        branch: int | None = None,
        like: Any = MISSING,
        data: Any = None,
        fit: Fit = EXACT,
        loading: Loading = DEFAULT,
    ) -> Restored:
        """Go on from a step of the lineage: the newest intact one, or exactly `step`.

        An older step than the newest opens a branch, and this call decides it: the next start goes
        on from `step`, even if nothing is saved after it. To look at a step, use `ckpt.restore`.

        Args:
            branch: of the step, also one that was left, where `step` alone names the one of the
                lineage.
            fit: what may differ between `like` and what was saved.
            loading: memory and threads, and whether the memory of `like` is let go first.

        Returns what `resume` does. Raises as it does; NotFound when there is nothing.
        """
        number = None if step is None else check_step_number(step)
        return self._begin_anew(
            Wish(
                "restore",
                number,
                like,
                data,
                branch=_check_branch(branch, step),
                must_exist=True,
                fit=fit,
                loading=loading,
            )
        )

    def rewind(
        self,
        to: int,
        *,
        branch: int | None = None,
        skip_steps: range | None = None,
        skip_batches: range | None = None,
        reason: str = "",
        like: Any = MISSING,
        data: Any = None,
        guard: Json = None,
        loading: Loading = DEFAULT,
    ) -> Restored:
        """Go back to step `to` on a branch of its own, and never serve some batches again.

        Args:
            branch: of step `to`, also one that was left; by default the lineage is gone back.
            skip_steps: half-open range of steps, as the newest attempt counted them; step s used
                the batch that made it step s.
            skip_batches: half-open range of batches counted from 0; batch b made step b + 1.
            reason: why, kept in the record of the attempt.
            guard: state of the spike guard, kept until a step is saved on the new branch.
            loading: as for `resume`: memory and threads, and whether `like` is let go first.

        If `to` is damaged, the next older intact step is taken; the report says so.

        Raises:
            NotFound: `to` is not in the lineage.
            Misuse: both ranges are given, a batch that `to` has learnt from, or `data` cannot skip.
        """
        check_step_number(to)
        must_be(reason, str, "reason", "text")
        guard = states.as_json(guard, "guard")
        batches = batches_of(skip_steps, skip_batches, to)
        return self._begin_anew(
            Wish(
                "rewind",
                to,
                like,
                data,
                branch=_check_branch(branch, to),
                must_exist=True,
                batches=batches,
                reason=reason,
                guard=guard,
                loading=loading,
            )
        )

    @_one_at_a_time
    def _begin_anew(self, wish: Wish) -> Restored:
        return self._tenure.start(wish)

    # --- saving ---------------------------------------------------------------------------

    @_one_at_a_time
    def save(
        self,
        step: int,
        state: Any,
        *,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        extra: Json = None,
        guard: Json = None,
        force: bool = False,
    ) -> Pending | None:
        """Copy the state and save it in the background, if the tier is due (or `force`).

        When it returns, the state may be donated or overwritten. `step` counts completed updates.
        Saving the step that was saved or restored last, with the values that it holds, gives the
        Pending of that save; data, metrics and extra stay as they were saved then.

        Args:
            state: a pytree; data: an iterator, or a mapping of names to iterators. An empty one
                says that there are none from now on.
            metrics: numbers by name, for `Keep(best=...)`; extra: any JSON value, with text as
                keys; tuples in it come back as lists.

        Returns:
            None when the tier is not due, without touching `data`.

        Raises:
            Misuse: a step number below the last, data and step did not move together, or no `data`
                though the step before has some.
            AlreadyExists: the step that was saved or restored last holds other values.
            Unsupported: a leaf that cannot be held; names it.
            CheckpointError: an earlier save failed in the background and nobody has been told.
                This one has begun all the same, as in the other processes.
        """
        step = check_step_number(step)
        notes = Notes(metrics, extra, guard)
        return self._tenure.save(step, state, data, notes, force=force)

    @_one_at_a_time
    def add_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Metrics of a step that were not known when it was saved, such as those of an evaluation.

        They go into the log of this attempt, in the background, and count as if they had been saved
        with the step: for `Keep(best=)`, `best_step` and the command line. A later one of the same
        name wins.

        Raises:
            NotFound: no such step in the lineage.
            Misuse: no numbers by name.
        """
        step = check_step_number(step)
        id = self._tenure.identify(step)
        self._saves.note({**log.measured(id, metrics).to_json(), "time_ns": time.time_ns()})

    @_one_at_a_time
    def note(self, event: Mapping[str, Json]) -> None:
        """A line of the trainer's own for the log of the attempt; "event" says what it is."""
        must_be(event, Mapping, "event", "a JSON object such as {'event': 'evaluated'}")
        self._tenure.begin()
        self._saves.note(states.as_json(dict(event), "event"))

    def wait_until_finished(self, timeout: float | None = None) -> None:
        """Block until all saves are durable. Raises what went wrong in the background."""
        self._background.wait(time_limit(timeout, "timeout"))
        with self._lock:
            self._tenure.raise_background_errors()

    @_one_at_a_time
    def delete(self, step: int) -> None:
        """Delete a step of the lineage.

        Raises:
            NotFound: no such step.
            Misuse: it is the newest, pinned, written by Orbax, or the one to go back to while the
                branch that forked there has fewer than two steps.
        """
        self._tenure.delete(check_step_number(step))

    def close(self) -> None:
        """Finish all saves and let go of the arena. Raises what nobody was told yet.

        What is only in memory goes to the durable tiers; if they will not have it, the arena stays
        for the next start on this host.
        """
        self._close("it closed its manager", in_order=True)

    @_one_at_a_time
    def _close(self, why: str, *, in_order: bool) -> None:
        if self._ended:
            return
        self._tenure.is_closed = True
        # Interrupted here, it is closed to its user, and another call goes on with the rest.
        self._saves.close(in_order=in_order)
        try:
            if self._tenure.calls:
                self.processes.leave(why)
        finally:
            self._saves.free_arena()
        self._collected.detach()
        self._ended = True
        self._tenure.raise_background_errors()


def _close_quietly(reference: weakref.ref[CheckpointManager]) -> None:
    """At the end of the interpreter: finish what is in flight, and shout if that fails."""
    manager = reference()
    if manager is not None and not manager._ended:
        try:
            manager._close("its interpreter ended", in_order=False)
        except Exception:
            _log.exception("%s: a save failed and nobody asked for it", manager.location)


def _check_options(slots: Any, writer: Any, busy: Any) -> None:
    if slots is not None:
        number = whole_number(slots, "CheckpointManager: slots")
        if number > MOST_SLOTS:
            raise Misuse(f"CheckpointManager: slots: wanted at most {MOST_SLOTS}, found {number}")
    for name, value, wanted in (
        ("writer", writer, ("process", "thread")),
        ("busy", busy, ("wait", "skip")),
    ):
        if value not in wanted:
            text = " or ".join(map(repr, wanted))
            raise Misuse(f"CheckpointManager: {name}: wanted {text}, found {value!r}")


def _check_branch(branch: Any, step: int | None) -> int | None:
    if branch is None:
        return None
    if step is None:
        raise Misuse("branch: give the step, too: its number on that branch")
    return whole_number(branch, "branch", least=0)

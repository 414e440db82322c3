"""CheckpointManager: the run as a trainer sees it. What is decided here is decided for the run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, final

from ckpt import attempts, commit, snapshot, states, tree
from ckpt.again import Held, Newest
from ckpt.arena import Arena
from ckpt.arguments import check_step_number, must_be
from ckpt.belongings import Belongings, wait_until_gone
from ckpt.errors import CheckpointError, Damaged, Misuse, NotFound, Superseded
from ckpt.fit import EXACT, Fit
from ckpt.keeper import Keeper
from ckpt.lineage import StepId, choose
from ckpt.loading import DEFAULT, Loading
from ckpt.meta import Notes, meta_of
from ckpt.owning import default_directory, remove_stale
from ckpt.pending import TIER, Background, Pending
from ckpt.processes import TIMEOUT_S, Matter, Processes, of_run
from ckpt.reader import (
    MISSING,
    Reader,
    Restored,
    check_how,
)
from ckpt.retention import Best
from ckpt.start import Start, Started, Wish, batches_of
from ckpt.store import Store, open_store
from ckpt.tiers import Shared
from ckpt.writer import Job, Writer, matter_of

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
        tier: where steps go; a path stands for `Shared(path)`.
        slots: snapshots that may be in memory at a time. With 2, a save is copied while the one
            before is still being written.
        arena: directory of the slots; by default a private one in /dev/shm.
        timeout_s: how long to wait for another process before it is named as failed. When one dies,
            JAX ends the others, by default after 100 s: only a shorter time is heard of here.
    """

    def __init__(
        self,
        tier: Shared | str | os.PathLike[str],
        *,
        slots: int = 2,
        arena: str | os.PathLike[str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.tier = tier if isinstance(tier, Shared) else Shared(tier)
        # The writer's thread must not hold the manager, or it would never be collected.
        self._background = Background()
        self._store: Store = open_store(self.tier.location)
        self._reader = Reader(self._store)
        self._keeper = Keeper(self._store, self.tier.keep, self._background.unheard.append)
        self._processes: Processes = of_run(self._store.location)
        self._timeout_s = timeout_s
        self._slots = slots
        self._arena_directory = Path(arena) if arena is not None else None
        self._arena: Arena | None = None
        self._writer: Writer | None = None
        self._calls = 0
        """Numbers what this manager settles with its peers: all processes make the same calls."""
        self._held: int | None = None
        """The newest attempt that this manager has claimed."""
        self._attempt: Started | None = None
        """That attempt, once it has decided."""
        self._plan: snapshot.SnapshotPlan | None = None
        self._last: Newest | None = None
        """Newest step saved or restored by this attempt."""
        self._superseded: Superseded | None = None
        """Raised by every later call: there is no way on for this manager."""
        self._closed = False
        self._ended = False
        """Whether nothing is held any more."""
        self._lock = threading.RLock()
        """Held by every call that changes something; never by the writer's thread."""
        self._belongings = Belongings(self.location, self._processes, self._background)
        self._collected = weakref.finalize(self, self._belongings.let_go)
        self._collected.atexit = False
        # A trainer that ends without close() must not lose its last save.
        atexit.register(_close_quietly, weakref.ref(self))

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._close("it closed its manager" if kind is None else f"it raised {kind.__name__}")
        except CheckpointError:
            if kind is None:
                raise
            _log.exception("while the manager was closed after another error")

    def __repr__(self) -> str:
        number = f"attempt {self._attempt.number}" if self._attempt else "no attempt yet"
        return f"CheckpointManager({self._store.location!r}, {number})"

    @property
    def location(self) -> str:
        """The root of the run."""
        return self._store.location

    # --- looking --------------------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """Committed steps of the lineage, ascending."""
        return self._reader.all_steps()

    def latest_step(self) -> int | None:
        """The newest committed step of the lineage."""
        return self._reader.latest_step()

    def best_step(self, policy: Best | None = None) -> int | None:
        """The best step by `policy`, or by that of the tier's `keep`."""
        policy = policy or self.tier.keep.best
        if policy is None:
            raise Misuse("best_step: no metric; give Best('loss'), or Keep(best=...) to the tier")
        return self._reader.best_step(policy)

    def should_save(self, step: int) -> bool:
        """Would `save` save this step?"""
        return check_step_number(step) % self.tier.every == 0

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
        return self._start(
            Wish("resume", None, like, data, must_exist=must_exist, fit=fit, loading=loading)
        )

    def restore(
        self,
        step: int | None = None,
        *,
        like: Any = MISSING,
        data: Any = None,
        fit: Fit = EXACT,
        loading: Loading = DEFAULT,
    ) -> Restored:
        """Go on from a step of the lineage: the newest intact one, or exactly `step`.

        An older step than the newest opens a branch, and this call decides it: the next start goes
        on from `step`, even if nothing is saved after it. To look at a step, use `ckpt.restore`.

        Args:
            fit: what may differ between `like` and what was saved.
            loading: memory and threads, and whether the memory of `like` is let go first.

        Returns what `resume` does. Raises as it does; NotFound when there is nothing.
        """
        number = None if step is None else check_step_number(step)
        return self._start(
            Wish("restore", number, like, data, must_exist=True, fit=fit, loading=loading)
        )

    def rewind(
        self,
        to: int,
        *,
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
        return self._start(
            Wish(
                "rewind",
                to,
                like,
                data,
                must_exist=True,
                batches=batches,
                reason=reason,
                guard=guard,
                loading=loading,
            )
        )

    @_one_at_a_time
    def _start(self, wish: Wish) -> Restored:
        check_how(wish.fit, wish.loading)  # before anything is claimed
        with self._matter() as matter:
            self._must_be_open()
            self._finish_attempt()
            self._own_arena()
            start = Start(self._store, matter, self._held, self._now_holds)
            self._attempt = started = start.run(wish)
        restored = started.restored
        self._last = None
        source = restored.report.source
        if source is not None:
            saved = self._data_of(source, started.number)
            if wish.load_values:
                states.note_left_out(saved, wish.data, f"{self.location}: step {source.step}")
            dropped = wish.data is not None and not states.named(wish.data)
            named = () if dropped else tuple(saved)
            self._last = Newest(source, states.take(wish.data), named)
        nbytes = restored.report.bytes_needed or snapshot.about_bytes(restored.state)
        if self._arena is not None and nbytes:
            self._arena.prepare(nbytes)  # while the train step is compiled
        return restored

    def _data_of(self, step: StepId, owner: int) -> Mapping[str, Json]:
        """The states of iterators that a step has."""
        try:
            return self._reader.manifest(step).data if step.attempt else {}
        except (NotFound, Damaged):
            attempts.look(self._store, owner)  # whoever took over may have deleted it
            raise

    def _now_holds(self, number: int) -> None:
        """The attempt before is over, even if nothing comes of this one."""
        self._held, self._attempt = number, None

    def _begin(self) -> Started:
        """The attempt of a trainer that saves without having resumed."""
        if self._attempt is None:
            self._start(Wish("start"))
        assert self._attempt is not None
        return self._attempt

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
        earlier = list(self._background.pendings)
        with self._peers_told(step):
            self._note_superseded()
            self._must_be_open()
            if not force and not self.should_save(step):
                return None
            self._begin()
            again = self._last is not None and step <= self._last.id.step
            if not again:
                pending = self._save(step, state, data, Notes(metrics, extra, guard))
        if again:
            # Peers are not told: they may be in the middle of the save of this very step.
            pending = self._saved_already(step, state)
        self._raise_background_errors([other for other in earlier if other is not pending])
        return pending

    def _save(
        self,
        step: int,
        state: Any,
        data: Any,
        notes: Notes,
    ) -> Pending:
        begun = time.monotonic()
        attempt = self._begin()
        if self._last is not None:
            states.must_go_on(self._last.named, data, f"{self.location}: step {step}")
        taken = states.take(data)
        if self._last is not None and self._last.data:
            states.check_moved(data, self._last.data, taken, step - self._last.id.step, step)
        known = None if self._plan is None else self._plan.outline
        flat = tree.flatten(state, known=known)
        step_id = StepId(step, attempt.decision.branch, attempt.number)
        meta = meta_of(step_id, attempt.decision, taken, notes, self._processes)
        assert self._arena is not None
        taken_snapshot = snapshot.take(flat, self._arena, meta, previous=self._plan)
        self._plan = taken_snapshot.plan
        pending = Pending(step, (TIER,))
        figures = {"blocking_s": round(time.monotonic() - begun, 6)}
        self._own_writer().submit(
            Job(
                step_id,
                taken_snapshot.slot,
                taken_snapshot.header,
                attempt.line,
                pending,
                figures,
            )
        )
        self._background.pendings.append(pending)
        held = Held(flat.specs, [taken_snapshot.header], flat.structure)
        self._last = Newest(step_id, taken, tuple(taken), pending, held)
        return pending

    def _saved_already(self, step: int, state: Any) -> Pending:
        assert self._last is not None
        assert self._arena is not None
        pending, self._plan = self._last.again(step, state, self._store, self._arena, self._plan)
        return pending

    def wait_until_finished(self, timeout: float | None = None) -> None:
        """Block until all saves are durable. Raises what went wrong in the background."""
        self._background.wait(timeout)
        self._raise_background_errors()

    @_one_at_a_time
    def delete(self, step: int) -> None:
        """Delete a step of the lineage.

        Raises:
            NotFound: no such step.
            Misuse: it is the newest, pinned, written by Orbax, or the one to go back to while the
                branch that forked there has fewer than two steps.
        """
        step = check_step_number(step)
        with self._matter() as matter:
            self._must_be_open()
            attempt = self._begin()
            matter.decide("deleted", lambda: self._delete(step, attempt))

    def _delete(self, step: int, attempt: Started) -> None:
        found = choose(attempt.line, self._reader.listing().steps, step)
        assert found is not None
        if why := self._keeper.why_kept(found, attempt.line):
            raise Misuse(f"step {step} {why}")
        commit.delete_step(self._store, found, owner=attempt.number)

    def close(self) -> None:
        """Finish all saves and let go of the arena. Raises what nobody was told yet."""
        self._close("it closed its manager")

    @_one_at_a_time
    def _close(self, why: str) -> None:
        if self._ended:
            return
        self._closed = True
        # Interrupted here, it is closed to its user, and another call goes on with the rest.
        if self._writer is not None:
            self._writer.close()
        try:
            if self._calls:
                self._processes.leave(why)
        finally:
            if self._arena is not None:
                self._arena.close(remove=True)
        self._collected.detach()
        self._ended = True
        self._raise_background_errors()

    # --- the other processes ------------------------------------------------------------------

    def _matter(self) -> Matter:
        """The next thing that all processes settle together."""
        self._calls += 1
        return self._processes.matter(f"call-{self._calls}", self._timeout_s)

    @contextlib.contextmanager
    def _peers_told(self, step: int) -> Iterator[None]:
        """Those who wait for the part of this process must know that it will not come."""
        try:
            yield
        except BaseException as error:
            if self._attempt is not None:
                step_id = StepId(step, self._attempt.decision.branch, self._attempt.number)
                self._processes.matter(matter_of(step_id)).fail(error)
            raise

    # --- the background ---------------------------------------------------------------------

    def _own_arena(self) -> None:
        """The lock that keeps a second live manager on this host away."""
        if self._arena is None:
            place = self._arena_directory
            if place is None:
                place = default_directory(self.location, self._processes.index)
                for stale in remove_stale(place.parent):
                    _log.info("freed %d bytes of a dead run at %s", *_freed(stale))
            wait_until_gone(place)
            self._arena = Arena(place, owner={"run": self.location}, slots=self._slots)
            self._belongings.arena = self._arena

    def _own_writer(self) -> Writer:
        if self._writer is None:
            self._writer = Writer(
                self._store,
                self._processes,
                self._keeper.saved,
                self._keeper.lost,
                self._background.unheard.append,
                timeout_s=self._timeout_s,
                compression=self.tier.compression,
            )
            self._belongings.writer = self._writer
        return self._writer

    def _finish_attempt(self) -> None:
        """Before another attempt: what is in flight belongs to the old one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._raise_background_errors()
        self._background.pendings.clear()

    @_one_at_a_time
    def _raise_background_errors(self, pendings: Sequence[Pending] | None = None) -> None:
        """Raise the oldest error of the background that nobody has been told."""
        self._note_superseded()
        self._background.raise_error(pendings)

    def _note_superseded(self) -> None:
        self._superseded = self._background.superseded() or self._superseded

    def _must_be_open(self) -> None:
        self._note_superseded()
        if self._closed:
            raise Misuse(f"{self.location}: the manager is closed")
        if self._superseded is not None:
            raise self._superseded


def _close_quietly(reference: weakref.ref[CheckpointManager]) -> None:
    """At the end of the interpreter: finish what is in flight, and shout if that fails."""
    manager = reference()
    if manager is not None and not manager._ended:
        try:
            manager.close()
        except Exception:
            _log.exception("%s: a save failed and nobody asked for it", manager.location)


def _freed(stale: Any) -> tuple[int, Path]:
    return stale.size_bytes, stale.directory

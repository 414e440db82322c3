"""The attempt that a manager holds: how it begins, what it has saved, how it ends."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import jax

from ckpt import attempts, clearing, keeping, log, mirrors, snapshot, states, tree
from ckpt.acks import matter_of
from ckpt.again import Held, Newest
from ckpt.errors import Damaged, Misuse, NotFound, Superseded
from ckpt.lineage import StepId, choose
from ckpt.manifest import read_manifest
from ckpt.meta import Notes, meta_of
from ckpt.pending import Background, Pending
from ckpt.processes import Matter, Processes
from ckpt.reader import Reader, Restored, check_how
from ckpt.saves import Saves
from ckpt.start import Start, Started, Wish
from ckpt.store import Store
from ckpt.tiers import Tiers

Json = Any
_log = logging.getLogger("ckpt")


@final
class Tenure:
    """What is decided with the other processes, one call at a time.

    Args:
        stores: of the Shared tiers, by name; "shared" is the home of the run.
        skips_when_busy: a save that finds no free slot is left out.
        timeout_s: how long to wait for another process before it is named as failed.
    """

    def __init__(
        self,
        tiers: Tiers,
        stores: Mapping[str, Store],
        processes: Processes,
        saves: Saves,
        background: Background,
        *,
        skips_when_busy: bool,
        timeout_s: float,
    ) -> None:
        self._tiers = tiers
        self._store = stores["shared"]
        self._others = {n: store for n, store in stores.items() if n != "shared"}
        self._reader = Reader(self._store)
        self._processes, self._saves, self._background = processes, saves, background
        self._skips_when_busy, self._timeout_s = skips_when_busy, timeout_s
        self.calls = 0
        """Numbers what this manager settles with its peers: all processes make the same calls."""
        self.held: int | None = None
        """The newest attempt that this manager has claimed."""
        self.attempt: Started | None = None
        """That attempt, once it has decided."""
        self.last: Newest | None = None
        """Newest step saved or restored by this attempt."""
        self._superseded: Superseded | None = None
        """Raised by every later call: there is no way on for this manager."""
        self.is_closed = False

    def start(self, wish: Wish) -> Restored:
        """Begin another attempt. Raises as `CheckpointManager.resume`."""
        check_how(wish.fit, wish.loading)  # before anything is claimed
        tree.must_end(wish.like)
        with jax.profiler.TraceAnnotation("ckpt.restore"), self._matter() as matter:
            self._must_be_open()
            self.finish_attempt()
            self._saves.own_arena()
            self._agree_on_records()
            start = Start(
                self._store,
                matter,
                self.held,
                self._now_holds,
                host=self._saves.host_images,
                others=self._others,
                kept_in_memory=self._tiers.kept_in_memory,
            )
            self.attempt = started = start.run(wish)
        self._saves.begin(started)
        restored = started.restored
        self.last = None
        source = restored.report.source
        if source is not None:
            saved = self._data_of(started, source)
            if wish.load_values:
                states.note_left_out(
                    saved, wish.data, f"{self._store.location}: step {source.step}"
                )
            dropped = wish.data is not None and not states.named(wish.data)
            named = () if dropped else tuple(saved)
            self.last = Newest(
                source, states.take(wish.data), named, stores=(started.source, self._store)
            )
        nbytes = restored.report.bytes_needed or snapshot.about_bytes(restored.state)
        self._saves.prepare(nbytes)  # while the train step is compiled
        return restored

    def _agree_on_records(self) -> None:
        """A home that was lost gets its records back from a further Shared tier."""
        if self._processes.index == 0 and self._others and not attempts.list_claims(self._store):
            for store in self._others.values():
                mirrors.copy_records(store, self._store)

    def _data_of(self, started: Started, step: StepId) -> Mapping[str, Json]:
        """The states of iterators that a step has."""
        try:
            return read_manifest(started.source, step).data if step.attempt else {}
        except (NotFound, Damaged):
            attempts.look(self._store, started.number)  # whoever took over may have deleted it
            raise

    def _now_holds(self, number: int) -> None:
        """The attempt before is over, even if nothing comes of this one."""
        self.held, self.attempt = number, None

    def begin(self) -> Started:
        """The attempt, if need be that of a trainer that saves without having resumed."""
        self._must_be_open()
        if self.attempt is None:
            self.start(Wish("start"))
        assert self.attempt is not None
        return self.attempt

    # --- saving ----------------------------------------------------------------------------

    def save(
        self, step: int, state: Any, data: Any, notes: Notes, *, force: bool
    ) -> Pending | None:
        """See `CheckpointManager.save`."""
        earlier = list(self._background.pendings)
        with self._peers_told(step):
            self._note_superseded()
            self._must_be_open()
            tiers = tuple(self._tiers) if force else self._tiers.due(step)
            if not tiers:
                return None
            self.begin()
            again = self.last is not None and step <= self.last.id.step
            pending = None
            if not again and (force or self._has_room(step)):
                pending = self._save(step, state, data, notes, tiers)
        if again:
            # Peers are not told: they may be in the middle of the save of this very step.
            pending = self._saved_already(step, state, tiers)
        self.raise_background_errors([other for other in earlier if other is not pending])
        return pending

    def _has_room(self, step: int) -> bool:
        """Whether to save at all, where saves do not wait for slots: one answer for the run."""
        if not self._skips_when_busy:
            return True
        here = self._saves.has_room()
        if self._processes.count > 1:
            with self._matter() as matter:
                here = all(matter.gather("room", here))
        if not here:
            self._saves.skipped += 1
            self._saves.note(log.skipped(step).to_json())
            _log.warning("%s: step %d is not saved: no slot is free", self._store.location, step)
        return here

    def _save(
        self, step: int, state: Any, data: Any, notes: Notes, tiers: Sequence[str]
    ) -> Pending:
        begun = time.monotonic()
        attempt = self.begin()
        with jax.profiler.TraceAnnotation("ckpt.save"):
            if self.last is not None:
                states.must_go_on(self.last.named, data, f"{self._store.location}: step {step}")
            taken = states.take(data)
            if self.last is not None and self.last.data:
                moved = step - self.last.id.step
                states.check_moved(data, self.last.data, taken, moved, step)
            flat = tree.flatten(state, known=self._saves.snapshots.outline)
            id = StepId(step, attempt.decision.branch, attempt.number)
            meta = meta_of(id, attempt.decision, taken, notes, self._processes)
            pending, held = self._saves.save(id, flat, meta, tiers, begun)
            self.last = Newest(
                id,
                taken,
                tuple(taken),
                pending,
                Held(flat.specs, [held.header], flat.structure),
                meta,
                (self._store,),
            )
        return pending

    def _saved_already(self, step: int, state: Any, tiers: Sequence[str]) -> Pending:
        last = self.last
        assert last is not None
        assert self._saves.arena is not None
        pending, self._saves.snapshots.plan = last.again(
            step, state, self._saves.arena, self._saves.snapshots.plan, tiers
        )
        missing = [tier for tier in tiers if tier not in pending.tiers]
        if missing and last.meta is not None and pending.error is None:
            flat = tree.flatten(state, known=self._saves.snapshots.outline)
            self._saves.extend(last.id, flat, last.meta, missing, pending)
        return pending

    def identify(self, step: int) -> StepId:
        """The step of the lineage that has a number; the newest may be on its way.

        Raises:
            NotFound: there is none.
        """
        attempt = self.begin()
        if self.last is not None and self.last.id.step == step:
            return self.last.id
        found = choose(attempt.line, self._reader.listing().steps, step)
        assert found is not None
        return found

    def delete(self, step: int) -> None:
        """See `CheckpointManager.delete`."""
        with self._matter() as matter:
            attempt = self.begin()
            matter.decide("deleted", lambda: self._delete(step, attempt))

    def _delete(self, step: int, attempt: Started) -> None:
        found = choose(attempt.line, self._reader.listing().steps, step)
        assert found is not None
        if why := keeping.why_kept(self._store, attempt.line, found):
            raise Misuse(f"step {step} {why}")
        clearing.delete_step(self._store, found, owner=attempt.number)

    # --- the other processes ------------------------------------------------------------------

    def _matter(self) -> Matter:
        """The next thing that all processes settle together."""
        self.calls += 1
        return self._processes.matter(f"call-{self.calls}", self._timeout_s)

    @contextlib.contextmanager
    def _peers_told(self, step: int) -> Iterator[None]:
        """Those who wait for the part of this process must know that it will not come."""
        try:
            yield
        except BaseException as error:
            if self.attempt is not None:
                step_id = StepId(step, self.attempt.decision.branch, self.attempt.number)
                self._processes.matter(matter_of(step_id)).fail(error)
            raise

    # --- the background ---------------------------------------------------------------------

    def finish_attempt(self) -> None:
        """Before another attempt: what is in flight belongs to the old one."""
        self._saves.settle()
        self.raise_background_errors()
        self._background.pendings.clear()

    def raise_background_errors(self, pendings: Sequence[Pending] | None = None) -> None:
        """Raise the oldest error of the background that nobody has been told."""
        self._note_superseded()
        self._background.raise_error(pendings)

    def _note_superseded(self) -> None:
        self._superseded = self._background.superseded() or self._superseded

    def _must_be_open(self) -> None:
        self._note_superseded()
        if self.is_closed:
            raise Misuse(f"{self._store.location}: the manager is closed")
        if self._superseded is not None:
            raise self._superseded

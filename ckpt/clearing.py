"""Deleting a step, and clearing up what older attempts left (FORMAT.md section 7)."""

from __future__ import annotations

from ckpt import attempts, commit, lineage, publishing
from ckpt.errors import AlreadyExists, Damaged, NotFound, Superseded
from ckpt.lineage import Remain, StepId
from ckpt.store import Store


def delete_step(store: Store, step: StepId, *, owner: int, home: Store | None = None) -> None:
    """Condemn, look, remove (FORMAT.md section 7).

    Args:
        home: where the claims of the run are, if not in `store`.

    Raises:
        Superseded: a newer attempt owns the run; the step was put back.
    """
    states = publishing.of(store)
    try:
        states.condemn(step, owner)
    except NotFound:
        return
    try:
        attempts.look(home or store, owner)
    except Superseded:
        states.put_back(step, owner)  # unless the new owner has dealt with it
        raise
    states.remove(step.branch, step.step, owner)


def roll_forward(store: Store, owner: int, listing: attempts.Listing) -> list[str]:
    """Publish, put back or remove what older attempts left; returns one line for each.

    Raises:
        Superseded: a newer attempt owns the run.
    """
    states = publishing.of(store)
    done = []
    line = listing.lineage
    kept = [
        (step, remain)
        for step, remain in lineage.condemned_under_head(line, listing.remains)
        if step not in listing.steps and states.was_committed(step, remain)
    ]
    for step, remain in kept:
        states.put_back(step, remain.attempt)
        done.append(f"put back {step}")
    remains = [
        Remain(r.branch, r.step, r.attempt, r.state, r.name, commit.is_complete(store, r))
        if r.state == "making" and r.attempt < owner
        else r
        for r in listing.remains
        if all(r is not remain for _, remain in kept)
    ]
    for action in lineage.roll_forward(owner, line, listing.steps, remains):
        remain = action.remain
        if isinstance(action, lineage.Publish):
            step = StepId(remain.step, remain.branch, remain.attempt)
            try:
                store.clear_temporaries(remain.name)
                headers = commit.read_headers(store, remain.name, remain.attempt)
                commit.publish(store, step, commit.finish(store, step, headers), line, owner=owner)
            except (NotFound, Damaged, AlreadyExists) as error:
                done.append(f"left {remain.name}: {error}")
                continue
            done.append(f"published {step}")
        else:
            _remove(store, remain, owner)
            done.append(f"removed {remain.name}")
    return done


def _remove(store: Store, remain: Remain, owner: int) -> None:
    """Condemn, look, remove: a newer attempt may have plans with what this one listed."""
    states = publishing.of(store)
    try:
        states.take_over(remain, owner)
    except NotFound:
        return
    attempts.look(store, owner)
    states.remove(remain.branch, remain.step, owner)

"""Stores of the protocol model: how they hold the states of steps, as `ckpt.publishing` does.

Immutable values; every change is one store operation and gives the store that follows, or None when
the step is not in the state that the change starts from.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ckpt.lineage import Remain, StepId

IMAGE, PART = 1, 2
WHOLE = IMAGE | PART
"""What lies in the directory of a step, as bits."""


class Tier(NamedTuple):
    """A store that renames. A step under a final name: (branch, step, attempt, files)."""

    final: frozenset[tuple[int, int, int, int]] = frozenset()
    making: frozenset[tuple[int, int, int, int, int]] = frozenset()
    """The same, and the attempt that makes it, which its name tells: a later one may, of images."""
    trash: frozenset[tuple[int, int, int, int, int, str]] = frozenset()
    """(branch, step, attempt of the step, files, attempt that moved it, state)"""

    @property
    def own_branch(self) -> bool:
        return False

    def steps(self) -> list[StepId]:
        return [StepId(s, b, a) for b, s, a, _ in self.final]

    def torn(self) -> list[StepId]:
        """Committed steps that are not whole."""
        return [StepId(s, b, a) for b, s, a, files in self.final if files != WHOLE]

    def unpublished(self) -> list[StepId]:
        """What the next attempt is to publish."""
        return [StepId(s, b, a) for b, s, a, files, by in self.making if files == WHOLE and by == a]

    def remains(self) -> list[Remain]:
        made = [
            Remain(b, s, by, "making", f"{b}/{s}-{by}", p == WHOLE and by == a)
            for b, s, a, p, by in self.making
        ]
        moved = [
            Remain(b, s, by, state, f"{b}/{s}-{by}-{state}") for b, s, _, _, by, state in self.trash
        ]
        return made + moved

    def in_limbo(self, step: StepId) -> bool:
        """Condemned, and not yet removed or put back."""
        return any(
            StepId(t[1], t[0], t[2]) == step and t[3] == WHOLE and t[5] == "deleted"
            for t in self.trash
        )

    def was_committed(self, step: StepId, remain: Remain) -> bool:
        """Is it a step that was condemned, not a half-made one?

        The head may have gone on from an image while an older attempt cleared up what had been
        made of the same step; that is no step to put back.
        """
        old = self._trashed(remain.branch, remain.step, remain.attempt, "deleted")
        return old is not None and (old[2], old[3]) == (step.attempt, WHOLE)

    def occupant(self, step: StepId) -> StepId | None:
        """The committed step under the number of `step`."""
        return next(
            (s for s in self.steps() if (s.branch, s.step) == (step.branch, step.step)), None
        )

    def write(self, step: StepId, file: int, maker: int) -> Tier:
        mine = self._made(step, maker)
        made = (step.branch, step.step, step.attempt, (mine[3] if mine else 0) | file, maker)
        return self._replace(making=self.making - {mine} | {made})

    def prepare(self, step: StepId) -> Tier:
        return self

    def publish(self, step: StepId, owner: int, maker: int) -> Tier | None:
        """None: what was made is gone. The place is free."""
        made = self._made(step, maker)
        if made is None:
            return None
        return self._replace(making=self.making - {made}, final=self.final | {made[:4]})

    def taken(self, step: StepId, maker: int) -> bool:
        """Does something stand in the way of publishing?"""
        return self._made(step, maker) is not None and self.occupant(step) is not None

    def set_aside(self, step: StepId, owner: int) -> Tier:
        there = next(f for f in self.final if f[:2] == (step.branch, step.step))
        moved = (*there, owner, "aside")
        return self._replace(final=self.final - {there}, trash=self.trash | {moved})

    def condemn(self, step: StepId, owner: int) -> Tier | None:
        there = next((f for f in self.final if StepId(f[1], f[0], f[2]) == step), None)
        if there is None:
            return None
        moved = (*there, owner, "deleted")
        return self._replace(final=self.final - {there}, trash=self.trash | {moved})

    def put_back(self, step: StepId, by: int) -> Tier | None:
        old = self._trashed(step.branch, step.step, by, "deleted")
        if old is None or self.occupant(step) is not None:
            return None
        return self._replace(trash=self.trash - {old}, final=self.final | {old[:4]})

    def take_over(self, remain: Remain, owner: int) -> Tier | None:
        if remain.state == "making":
            key = (remain.branch, remain.step, remain.attempt)
            made = next((m for m in self.making if (*m[:2], m[4]) == key), None)
            if made is None:
                return None
            moved = (*made[:4], owner, "deleted")
            return self._replace(making=self.making - {made}, trash=self.trash | {moved})
        old = self._trashed(remain.branch, remain.step, remain.attempt, remain.state)
        if old is None:
            return None
        moved = (*old[:4], owner, "deleted")
        return self._replace(trash=self.trash - {old} | {moved})

    def remove(self, branch: int, step: int, owner: int) -> tuple[Tier, bool]:
        """What was condemned by `owner`; True when that was all."""
        gone = {t for t in self.trash if (t[0], t[1], t[4]) == (branch, step, owner)}
        return self._replace(trash=self.trash - gone), True

    def _made(self, step: StepId, maker: int) -> tuple | None:
        key = (step.branch, step.step, step.attempt, maker)
        return next((m for m in self.making if (*m[:3], m[4]) == key), None)

    def _trashed(self, branch: int, step: int, by: int, state: str) -> tuple | None:
        key = (branch, step, by, state)
        return next((t for t in self.trash if (t[0], t[1], t[4], t[5]) == key), None)


class Place(NamedTuple):
    """Where a step lies in a store without rename; the attempt that makes it is its branch."""

    branch: int
    step: int
    files: int = 0
    state: Literal["", "prepared", "committed", "condemned"] = ""
    """What stands in the place of the marker."""
    by: int = 0
    was_committed: bool = False

    @property
    def id(self) -> StepId:
        return StepId(self.step, self.branch, self.branch)


class SwapTier(NamedTuple):
    """A store that does not rename: a step is made where it stays, and its marker is swapped."""

    places: frozenset[Place] = frozenset()

    @property
    def own_branch(self) -> bool:
        return True

    def steps(self) -> list[StepId]:
        return [p.id for p in self.places if p.state == "committed"]

    def torn(self) -> list[StepId]:
        return [p.id for p in self.places if p.state == "committed" and p.files != WHOLE]

    def unpublished(self) -> list[StepId]:
        return [p.id for p in self.places if p.state in ("", "prepared") and p.files == WHOLE]

    def remains(self) -> list[Remain]:
        found = []
        for p in self.places:
            name = f"{p.branch}/{p.step}"
            if p.state in ("", "prepared"):
                whole = p.files == WHOLE
                found.append(Remain(p.branch, p.step, p.branch, "making", name, whole))
            elif p.state == "condemned":
                found.append(Remain(p.branch, p.step, p.by, "deleted", name))
        return found

    def in_limbo(self, step: StepId) -> bool:
        p = self._at(step.branch, step.step)
        return p.state == "condemned" and p.was_committed and p.files == WHOLE

    def was_committed(self, step: StepId, remain: Remain) -> bool:
        return self._at(step.branch, step.step).was_committed

    def occupant(self, step: StepId) -> StepId | None:
        p = self._at(step.branch, step.step)
        return p.id if p.state == "committed" else None

    def write(self, step: StepId, file: int, maker: int) -> SwapTier:
        p = self._at(step.branch, step.step)
        return self._with(p._replace(files=p.files | file))

    def prepare(self, step: StepId) -> SwapTier:
        p = self._at(step.branch, step.step)
        return self if p.state else self._with(p._replace(state="prepared"))

    def publish(self, step: StepId, owner: int, maker: int) -> SwapTier | None:
        """Swap what was prepared, or what an older attempt condemned as unfinished.

        Whether the files are still there is not looked at.
        """
        p = self._at(step.branch, step.step)
        unfinished = p.state == "condemned" and not p.was_committed and p.by < owner
        if p.state != "prepared" and not unfinished:
            return None
        return self._with(p._replace(state="committed", by=0, was_committed=False))

    def taken(self, step: StepId, maker: int) -> bool:
        return False

    def condemn(self, step: StepId, owner: int) -> SwapTier | None:
        p = self._at(step.branch, step.step)
        if p.state != "committed":
            return None
        return self._with(p._replace(state="condemned", by=owner, was_committed=True))

    def put_back(self, step: StepId, by: int) -> SwapTier | None:
        p = self._at(step.branch, step.step)
        if (p.state, p.by, p.was_committed) != ("condemned", by, True):
            return None
        return self._with(p._replace(state="committed", by=0, was_committed=False))

    def take_over(self, remain: Remain, owner: int) -> SwapTier | None:
        p = self._at(remain.branch, remain.step)
        if remain.state == "making":
            free = p.state in ("", "prepared")
            return self._with(p._replace(state="condemned", by=owner)) if free else None
        if (p.state, p.by) != ("condemned", remain.attempt):
            return None
        return self._with(p._replace(by=owner))

    def remove(self, branch: int, step: int, owner: int) -> tuple[SwapTier, bool]:
        """First the files, then the marker."""
        p = self._at(branch, step)
        if p.files:
            return self._with(p._replace(files=0)), False
        return self._with(p._replace(state="", by=0, was_committed=False)), True

    def _at(self, branch: int, step: int) -> Place:
        found = (p for p in self.places if p[:2] == (branch, step))
        return next(found, Place(branch, step))

    def _with(self, place: Place) -> SwapTier:
        rest = {p for p in self.places if p[:2] != place[:2]}
        return SwapTier(frozenset(rest | ({place} if place.files or place.state else set())))

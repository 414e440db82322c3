"""The states of a step in a store, and the one atomic operation that leads from each to the next.

A step is *in the making*, then *committed*, then *condemned* by an attempt, then gone. From
condemned it can be put back. `ckpt.commit` has the order in which an attempt looks at the owner and
changes a state; here is how a state is held, so that of all who want to change it one succeeds:

======================= =============================== ========================================
state                   a store that renames            a store that swaps
======================= =============================== ========================================
in the making by n      directory `<step>...-tmp-a<n>`  directory `<step>`, no marker; when all else
                                                        is durable, `Unpublished` in its place
committed               directory `<step>`              the marker
condemned by n          `<step>...-tmp-a<n>-deleted`    `Unpublished`, condemned by n, in its place
======================= =============================== ========================================

Without rename a step is made where it will stay. So each attempt there has a branch of its own, and
the branch number is the number of the attempt that makes its steps. What stands in the place of the
marker is only ever replaced by swaps: whoever was paused for long finds that it has changed.
"""

from __future__ import annotations

import abc
import contextlib
from dataclasses import dataclass
from typing import final

from ckpt import layout
from ckpt.errors import AlreadyExists, Damaged, Misuse, NotFound
from ckpt.layout import Marker, Unpublished
from ckpt.lineage import Remain, StepId
from ckpt.store import Store, SwappingStore


@dataclass(frozen=True)
class Branch:
    """What lies in the directory of a branch."""

    steps: tuple[StepId, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()
    """(name, reason)"""
    remains: tuple[Remain, ...] = ()


class Publishing(abc.ABC):
    """How a store holds the states of steps.

    Every change raises NotFound when the step is not, or no longer, in the state it starts from.
    """

    @abc.abstractmethod
    def making(self, step: StepId, maker: int | None = None) -> str:
        """Where the attempt of `step` makes it, or `maker`, a later one that has its images.

        Under its own name: what an older attempt still plans with the names of older ones is no
        harm to it. The same `maker` goes to `complete` and `publish`.
        """

    @abc.abstractmethod
    def complete(self, step: StepId, marker: bytes, maker: int | None = None) -> None:
        """All files but the marker are durable; what can be done ahead of publishing is done."""

    @abc.abstractmethod
    def publish(self, step: StepId, marker: bytes, owner: int, maker: int | None = None) -> None:
        """In the making -> committed, by `owner`, who has seen it in the making.

        Raises AlreadyExists when something else stands there.
        """

    @abc.abstractmethod
    def set_aside(self, step: StepId, owner: int) -> None:
        """Move what stands in the way of `step` away, under a name of `owner`."""

    @abc.abstractmethod
    def condemn(self, step: StepId, owner: int) -> None:
        """Committed -> condemned by `owner`."""

    @abc.abstractmethod
    def put_back(self, step: StepId, by: int) -> None:
        """Condemned by `by` -> committed. Fine when somebody else was faster."""

    @abc.abstractmethod
    def was_committed(self, step: StepId, remain: Remain) -> bool:
        """Is a remain that was condemned `step`, whole, and not one that was left half-made?

        An attempt may go on from an image while an older one condemns what was made of it so far.
        """

    @abc.abstractmethod
    def take_over(self, remain: Remain, owner: int) -> None:
        """In the making, or condemned by another -> condemned by `owner`."""

    @abc.abstractmethod
    def remove(self, branch: int, step: int, owner: int) -> None:
        """Condemned by `owner` -> gone."""

    @abc.abstractmethod
    def stands(self, step: StepId) -> bool:
        """Is there a step, committed or damaged, under that number?"""

    @abc.abstractmethod
    def list_branch(self, branch: int) -> Branch:
        """The steps of a branch and their states; reads markers only."""


def of(store: Store) -> Publishing:
    """The way of a store."""
    if store.renames:
        return ByRename(store)
    if isinstance(store, SwappingStore):
        return BySwap(store)
    raise Misuse(f"{store.location}: can neither rename nor swap; no step can be published there")


@final
class ByRename(Publishing):
    """States are names of directories."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def making(self, step: StepId, maker: int | None = None) -> str:
        by = step.attempt if maker is None else maker
        return layout.making_name(step.branch, step.step, by)

    def complete(self, step: StepId, marker: bytes, maker: int | None = None) -> None:
        self._store.put(f"{self.making(step, maker)}/{layout.MARKER}", marker)

    def publish(self, step: StepId, marker: bytes, owner: int, maker: int | None = None) -> None:
        self._store.move(self.making(step, maker), layout.step_name(step.branch, step.step))

    def set_aside(self, step: StepId, owner: int) -> None:
        aside = layout.aside_name(step.branch, step.step, owner)
        self._store.delete_tree(aside)
        self._store.move(layout.step_name(step.branch, step.step), aside)

    def condemn(self, step: StepId, owner: int) -> None:
        condemned = layout.deleted_name(step.branch, step.step, owner)
        self._store.delete_tree(condemned)
        self._store.move(layout.step_name(step.branch, step.step), condemned)

    def put_back(self, step: StepId, by: int) -> None:
        condemned = layout.deleted_name(step.branch, step.step, by)
        with contextlib.suppress(NotFound, AlreadyExists):
            self._store.move(condemned, layout.step_name(step.branch, step.step))

    def was_committed(self, step: StepId, remain: Remain) -> bool:
        # The marker is the last file; with it a step is whole, be it published or about to be.
        key = f"{remain.name}/{layout.MARKER}"
        try:
            found = layout.parse_marker(self._store.read(key), f"{self._store.location}/{key}")
        except (NotFound, Damaged):
            return False
        return isinstance(found, Marker) and found.id == step

    def take_over(self, remain: Remain, owner: int) -> None:
        # Out of the way under a name of ours, so that nobody publishes half of it.
        mine = layout.deleted_name(remain.branch, remain.step, owner)
        self._store.delete_tree(mine)
        self._store.move(remain.name, mine)

    def remove(self, branch: int, step: int, owner: int) -> None:
        self._store.delete_tree(layout.deleted_name(branch, step, owner))

    def stands(self, step: StepId) -> bool:
        return self._store.exists(layout.step_name(step.branch, step.step))

    def list_branch(self, branch: int) -> Branch:
        steps, damaged, remains = [], [], []
        for entry in self._store.list(layout.branch_name(branch)):
            if not entry.is_dir:
                continue
            remain = layout.parse_temporary_name(branch, entry.name)
            if remain is not None:
                remains.append(remain)
                continue
            step = layout.parse_step_name(entry.name)
            if step is None:
                continue
            try:
                found = self._marker_now(branch, step)
            except Damaged as error:
                damaged.append((layout.step_name(branch, step), str(error)))
            else:
                if found is not None:
                    steps.append(found.id)
        return Branch(tuple(steps), tuple(damaged), tuple(remains))

    def _marker_now(self, branch: int, step: int) -> Marker | None:
        """The marker of a step that was just listed; None when the step is gone by now."""
        name = layout.step_name(branch, step)
        for _ in range(3):
            try:
                return read_marker(self._store, branch, step)
            except NotFound:
                if not self._store.exists(name):
                    return None
                # Without a marker, or condemned and put back between these two calls.
        raise Damaged(f"{self._store.location}/{name}: {layout.MARKER} is absent")


@final
class BySwap(Publishing):
    """States are what stands in the place of the marker."""

    def __init__(self, store: SwappingStore) -> None:
        self._store = store

    def making(self, step: StepId, maker: int | None = None) -> str:
        del maker  # made where it stays; what an older attempt plans fails at the swap
        return layout.step_name(step.branch, step.step)

    def complete(self, step: StepId, marker: bytes, maker: int | None = None) -> None:
        with contextlib.suppress(AlreadyExists):
            prepared = Unpublished(step, None, None).emit()
            self._store.put_if_absent(_marker_key(step.branch, step.step), prepared)

    def publish(self, step: StepId, marker: bytes, owner: int, maker: int | None = None) -> None:
        found, old = self._standing(step.branch, step.step)
        # Condemned as unfinished by an attempt before `owner`, which has seen it after its claim:
        # whoever did that looks before it removes anything, and will find the claim.
        if (
            isinstance(found, Marker)
            or found.manifest is not None
            or (found.condemned_by is not None and found.condemned_by >= owner)
        ):
            raise AlreadyExists(f"{self._where(step.branch, step.step)}: {_told(found)}")
        self._store.swap(_marker_key(step.branch, step.step), old, marker)

    def set_aside(self, step: StepId, owner: int) -> None:
        place = layout.step_name(step.branch, step.step)
        raise AlreadyExists(
            f"{self._store.location}/{place}: holds another step, though only attempt "
            f"{step.branch} makes steps on branch {step.branch}; something foreign wrote there"
        )

    def condemn(self, step: StepId, owner: int) -> None:
        found, old = self._standing(step.branch, step.step)
        if not isinstance(found, Marker) or found.id != step:
            raise NotFound(f"{self._where(step.branch, step.step)}: {_told(found)}")
        new = Unpublished(step, owner, found.manifest).emit()
        self._store.swap(_marker_key(step.branch, step.step), old, new)

    def put_back(self, step: StepId, by: int) -> None:
        with contextlib.suppress(NotFound):
            found, old = self._standing(step.branch, step.step)
            condemned = isinstance(found, Unpublished) and found.condemned_by == by
            if condemned and found.manifest is not None:
                marker = Marker(found.id, found.manifest).emit()
                self._store.swap(_marker_key(step.branch, step.step), old, marker)

    def was_committed(self, step: StepId, remain: Remain) -> bool:
        try:
            found, _ = self._standing(remain.branch, remain.step)
        except (NotFound, Damaged):
            return False
        return isinstance(found, Unpublished) and found.id == step and found.manifest is not None

    def take_over(self, remain: Remain, owner: int) -> None:
        key = _marker_key(remain.branch, remain.step)
        by = None if remain.state == "making" else remain.attempt
        try:
            found, old = self._standing(remain.branch, remain.step)
        except NotFound:
            step = StepId(remain.step, remain.branch, remain.attempt)
            if by is not None:
                raise
            try:
                self._store.put_if_absent(key, Unpublished(step, owner, None).emit())
            except AlreadyExists as error:
                raise NotFound(f"{self._store.location}: {step} is in other hands") from error
            return
        if isinstance(found, Marker) or found.condemned_by != by:
            raise NotFound(f"{self._where(remain.branch, remain.step)}: {_told(found)}")
        self._store.swap(key, old, Unpublished(found.id, owner, found.manifest).emit())

    def remove(self, branch: int, step: int, owner: int) -> None:
        # Its state is known until nothing else of it is left.
        self._store.delete_tree_but(layout.step_name(branch, step), layout.MARKER)
        self._store.delete(_marker_key(branch, step))

    def stands(self, step: StepId) -> bool:
        try:
            return isinstance(self._standing(step.branch, step.step)[0], Marker)
        except NotFound:
            return False
        except Damaged:
            return True

    def _standing(self, branch: int, step: int) -> tuple[Marker | Unpublished, bytes]:
        data = self._store.read(_marker_key(branch, step))
        return _checked(data, branch, step, self._where(branch, step)), data

    def _where(self, branch: int, step: int) -> str:
        return f"{self._store.location}/{_marker_key(branch, step)}"

    def list_branch(self, branch: int) -> Branch:
        names = [e.name for e in self._store.list(layout.branch_name(branch)) if e.is_dir]
        numbers = [n for n in map(layout.parse_step_name, names) if n is not None]
        markers = self._store.read_many([_marker_key(branch, number) for number in numbers])
        steps, damaged, remains = [], [], []
        for number, data in zip(numbers, markers, strict=True):
            name = layout.step_name(branch, number)
            try:
                if isinstance(data, NotFound):
                    remains.append(self._unfinished(branch, number))
                    continue
                if isinstance(data, Damaged):
                    raise data
                found = _checked(data, branch, number, self._where(branch, number))
            except Damaged as error:
                damaged.append((name, str(error)))
                continue
            if isinstance(found, Marker):
                steps.append(found.id)
            elif found.condemned_by is None:
                remains.append(Remain(branch, number, found.id.attempt, "making", name))
            else:
                remains.append(Remain(branch, number, found.condemned_by, "deleted", name))
        return Branch(tuple(steps), tuple(damaged), tuple(remains))

    def _unfinished(self, branch: int, step: int) -> Remain:
        """A step without marker. Raises Damaged if it is not one that its branch's attempt made."""
        name = layout.step_name(branch, step)
        names = [entry.name for entry in self._store.list(name)]
        makers = {layout.parse_part_name(each) for each in names} - {None, branch}
        if makers:
            raise Damaged(
                f"{self._store.location}/{name}: {layout.MARKER} is absent, and it was made by "
                f"attempt {makers}, which has another branch: a copy from elsewhere"
            )
        return Remain(branch, step, branch, "making", name)


def read_marker(store: Store, branch: int, step: int) -> Marker:
    """The marker of a step, checked against the place where it lies.

    Raises:
        NotFound: no marker there, or the step is condemned.
        Damaged: it does not parse, or belongs elsewhere.
    """
    key = _marker_key(branch, step)
    where = f"{store.location}/{key}"
    marker = _checked(store.read(key), branch, step, where)
    if isinstance(marker, Unpublished):
        raise NotFound(f"{where}: {_told(marker)}")
    return marker


def _checked(data: bytes, branch: int, step: int, where: str) -> Marker | Unpublished:
    found = layout.parse_marker(data, where)
    if (found.id.branch, found.id.step) != (branch, step):
        raise Damaged(
            f"{where}: belongs to {found.id}, found in branch {branch} as step {step}; "
            "the directory was renamed or its files were mixed up"
        )
    return found


def _told(found: Marker | Unpublished) -> str:
    if isinstance(found, Marker):
        return f"{found.id} is committed"
    if found.condemned_by is None:
        return f"{found.id} is not published yet"
    return f"attempt {found.condemned_by} is removing {found.id}"


def _marker_key(branch: int, step: int) -> str:
    return f"{layout.step_name(branch, step)}/{layout.MARKER}"

"""Images on this host, in the arena and in Local tiers, seen as steps of the run.

Every small file of a step is a pure function of its images (`commit.step_files`). So the image of
a run of one process is a step for whoever reads, with every digest, before any Shared tier has it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never, final

import numpy as np

from ckpt import commit, disk, layout
from ckpt.arena import Arena
from ckpt.errors import CheckpointError, Damaged, Misuse, NotFound, StoreFailed
from ckpt.image import Header
from ckpt.lending import Loan
from ckpt.lineage import Decision, Lineage, StepId, counts
from ckpt.local import LocalImages
from ckpt.open_images import FileImage, ImageReader
from ckpt.slot_files import StoredImage
from ckpt.slots import step_of
from ckpt.store import Entry, Store

MEMORY = "memory"


@dataclass(frozen=True, eq=False)
class HostImage:
    """This process's share of a step, on this host; the chunks were not looked at."""

    id: StepId
    tier: str
    """memory, local, local-2, ..."""
    header: Header
    slot: int | None
    """Of the arena; None in a Local tier."""
    open: Callable[[], ImageReader]
    """Raises NotFound, Damaged, StoreFailed."""


@dataclass(frozen=True)
class Unreadable:
    """An image or a step of which only the name can be read."""

    id: StepId
    """With attempt 0 where the name does not tell it."""
    tier: str
    reason: str


@dataclass(frozen=True)
class Hosted:
    """What is on this host, nearest tier first."""

    images: tuple[HostImage, ...] = ()
    damaged: tuple[Unreadable, ...] = ()
    silent: Mapping[str, StoreFailed] = field(default_factory=dict)
    """Tiers that did not answer: what is there is not known."""

    def counting(
        self, line: Lineage, decisions: Mapping[int, Decision], index: int, count: int
    ) -> Hosted:
        """Those that belong to the run of this lineage, as saved by process `index` of `count`."""
        return Hosted(
            tuple(
                each
                for each in self.images
                if counts(line, each.id)
                and is_of_run(each.header, decisions)
                and (each.header.meta.get("process"), each.header.meta.get("processes"))
                == (index, count)
            ),
            tuple(each for each in self.damaged if counts(line, each.id)),
            self.silent,
        )

    def without_spent(
        self, kept: int, durable: Collection[StepId], newest: StepId | None
    ) -> Hosted:
        """Without snapshots in memory that have served: none of the `kept` newest, older than the
        `newest` step of the durable tiers, and in none of them."""
        memory = sorted((each.id for each in self.images if each.slot is not None), reverse=True)
        spent = {
            step
            for step in memory[kept:]
            if step not in durable and newest is not None and step.step < newest.step
        }
        images = tuple(each for each in self.images if each.slot is None or each.id not in spent)
        return Hosted(images, self.damaged, self.silent)


def is_of_run(header: Header, decisions: Mapping[int, Decision]) -> bool:
    """Was an image made by the attempt of its number in this run, not in an older one at the same
    location? The attempts of two runs decided at different times."""
    decision = decisions.get(header.meta.get("attempt", 0))
    told = header.meta.get("decided_ns")
    return decision is not None and type(told) is int and told == decision.time_ns


def host_images(arena: Arena | None, locals_: Mapping[str, LocalImages]) -> Hosted:
    """What the arena and the Local tiers of this host hold for this process."""
    images: list[HostImage] = []
    damaged: list[Unreadable] = []
    silent: dict[str, StoreFailed] = {}
    for stored in arena.valid_images() if arena is not None else ():
        try:
            step = step_of(stored.header)
        except Damaged:
            continue  # an image, but none of a step

        def opened(stored: StoredImage = stored, arena: Arena | None = arena) -> ImageReader:
            return SlotImage(stored, arena)

        images.append(HostImage(step, MEMORY, stored.header, stored.slot, opened))
    for tier, local in locals_.items():
        try:
            for found in local.list():
                try:
                    header = local.header(found.id)
                except NotFound:
                    continue  # deleted meanwhile
                except StoreFailed:
                    raise
                except CheckpointError as error:
                    damaged.append(Unreadable(found.id, tier, str(error)))
                    continue

                def reopened(local: LocalImages = local, step: StepId = found.id) -> ImageReader:
                    return local.open(step)

                images.append(HostImage(found.id, tier, header, None, reopened))
        except StoreFailed as error:
            silent[tier] = error
    return Hosted(tuple(images), tuple(damaged), silent)


@final
class SlotImage(ImageReader):
    """An image in a slot, which is not filled anew while it is open, or while pages of it are lent:
    the `lender` is the arena of this process that sees to it.

    Raises:
        Damaged: it is being filled, or was replaced. NotFound, StoreFailed.
    """

    def __init__(self, stored: StoredImage, lender: Arena | None = None) -> None:
        path = stored.path
        self.name = str(path)
        self.size_bytes = stored.header.size_bytes
        self._number, self._lender = stored.slot, lender
        self._loan: Loan | None = None
        with disk.translated(path):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            self._lock = os.open(path, flags)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._image = FileImage(path)
            except BlockingIOError:
                os.close(self._lock)
                raise Damaged(f"{path}: a newer snapshot is being copied into this slot") from None
            except BaseException:
                os.close(self._lock)
                raise

    def read_into(self, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self._image.read_into(ranges)

    def lend(self, offset: int, nbytes: int) -> np.ndarray | None:
        if self._lender is not None:
            self._loan = self._lender.loan(self._number, self._lock, self.size_bytes)
            self._lender = None
        return None if self._loan is None else self._loan.lend(offset, nbytes)

    def close(self) -> None:
        self._image.close()
        if self._loan is not None:
            self._loan.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@final
class Imaged(Store):
    """A run of which one step is an image on this host; the attempt records are those of `home`.

    Read-only. Raises Damaged, from what reads the step, when the image makes none.
    """

    renames = True

    def __init__(self, home: Store, image: HostImage) -> None:
        self.location = image.header.where
        self._home, self._image = home, image
        self._prefix = layout.step_name(image.id.branch, image.id.step)
        name = layout.image_name(image.id.attempt, 0)
        self._image_key = f"{self._prefix}/{name}"
        self._files: dict[str, bytes] | None = None

    def __repr__(self) -> str:
        return f"Imaged({self.location!r}, {self._image.id})"

    def read(self, key: str) -> bytes:
        if _is_record(key):
            return self._home.read(key)
        if key.startswith(f"{self._prefix}/"):
            data = self._small_files().get(key.removeprefix(f"{self._prefix}/"))
            if data is not None:
                return data
        raise NotFound(f"{self.location}/{key}: not there")

    def list(self, prefix: str) -> list[Entry]:
        if _is_record(prefix):
            return self._home.list(prefix)
        sizes = {f"{self._prefix}/{name}": len(data) for name, data in self._small_files().items()}
        sizes[self._image_key] = self._image.header.size_bytes
        above = f"{prefix}/" if prefix else ""
        found: dict[str, Entry] = {}
        for key, size_bytes in sizes.items():
            if key.startswith(above):
                name, _, below = key.removeprefix(above).partition("/")
                found[name] = Entry(name, bool(below), 0 if below else size_bytes)
        return [found[name] for name in sorted(found)]

    def exists(self, key: str) -> bool:
        if _is_record(key):
            return self._home.exists(key)
        above, _, name = key.rpartition("/")
        return any(entry.name == name for entry in self.list(above))

    def open_image(self, key: str) -> ImageReader:
        if key != self._image_key:
            raise NotFound(f"{self.location}/{key}: not there")
        return self._image.open()

    def _small_files(self) -> dict[str, bytes]:
        if self._files is None:
            header = self._image.header
            try:
                if header.meta["processes"] != 1:
                    raise Damaged(
                        f"{self.location}: wanted the image of a run of one process, found that of "
                        f"one of {header.meta['processes']}"
                    )
                part = commit.part_of(header)
                name = layout.part_name(part.attempt, part.process)
                self._files = {name: part.emit(), **commit.step_files([header])}
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise Damaged(f"{self.location}: no step can be made of it: {error!r}") from error
        return self._files

    def _refuse(self) -> Never:
        raise Misuse(f"{self.location}: an image on this host, only to be read")

    def put(self, key: str, data: bytes) -> None:
        self._refuse()

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._refuse()

    def delete(self, key: str) -> None:
        self._refuse()

    def delete_tree(self, prefix: str) -> None:
        self._refuse()

    def move(self, source: str, target: str) -> None:
        self._refuse()

    def write_image(self, key: str, data: Any, cuts: Sequence[int] = ()) -> None:
        self._refuse()


def _is_record(key: str) -> bool:
    return key.split("/", 1)[0] == layout.ATTEMPTS


def nearest(images: Iterable[HostImage]) -> dict[StepId, list[HostImage]]:
    """The images of each step, nearest tier first."""
    found: dict[StepId, list[HostImage]] = {}
    for image in images:
        found.setdefault(image.id, []).append(image)
    return found

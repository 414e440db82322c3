"""The way of one job into one tier: what it takes, step by step, so that a failure can be made up.

A delivery remembers what is durable already. Called again after `StoreFailed` it goes on from there
and needs neither slot nor Local image a second time. What an earlier writer of the same attempt
has left is found and taken over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from ckpt import attempts, commit, layout, mirrors, promotion, publishing
from ckpt.course import Course
from ckpt.errors import CheckpointError, Damaged, NotFound, PeerFailed, StoreFailed
from ckpt.image import Header
from ckpt.lanes import Figures, Lane
from ckpt.local import LocalImages
from ckpt.promotion import ImageWindows
from ckpt.slots import Slots, step_of
from ckpt.steps import read_manifest
from ckpt.store import Store
from ckpt.windows import Source, Told, size_of, window_of

POLL_S = 0.02
POLL_LIMIT_S = 0.5


@dataclass(frozen=True)
class Depot:
    """Where images are on this host, and which process of how many this is."""

    slots: Slots
    images: Mapping[str, LocalImages]
    """By Local tier, nearest first."""
    home: Store
    index: int
    count: int
    timeout_s: float
    """How long process 0 waits for the parts of the others."""


@final
class ToLocal:
    """An image file; the image comes from the slot, or from another Local tier.

    Args:
        swept: the Local tiers from which remains of dead writers were removed.
    """

    def __init__(self, depot: Depot, course: Course, lane: Lane, swept: set[str]) -> None:
        self._depot, self._course, self._lane = depot, course, lane
        self._swept = swept

    def run(self) -> Figures:
        """See `Delivery`."""
        step = self._course.id
        images = self._depot.images[self._lane.tier]
        if self._lane.tier not in self._swept:
            images.clear()
            self._swept.add(self._lane.tier)
        with _source(self._depot, self._course, self._lane) as (header, source):
            try:
                there = images.header(step).digest
            except (NotFound, Damaged):
                there = ""
            # A writer may have died before it told. What an older run at the same location has
            # left under the same numbers is another image.
            if there != header.digest:
                images.write(header, Told(source, self._lane.beat_bulk))
        return _figures(self._course, header.size_bytes)


@final
class ToShared:
    """Image, part, and on process 0 the step itself.

    Args:
        known: what steps of this tier have in common.
    """

    def __init__(
        self,
        depot: Depot,
        course: Course,
        lane: Lane,
        store: Store,
        compression: str | None,
        known: commit.Known,
    ) -> None:
        self._depot, self._course, self._lane = depot, course, lane
        self._store, self._compression, self._known = store, compression, known
        self._making = publishing.of(store).making(course.id, course.owner)
        self._compressed: tuple[Header, memoryview] | None = None
        self._written: Header | None = None
        """Its image is durable."""
        self._part_is_durable = False
        self._until_s = 0.0
        self._others: dict[int, Header] = {}

    def run(self) -> Figures:
        """See `Delivery`."""
        step, owner = self._course.id, self._course.owner
        with attempts.explained(self._depot.home, owner):
            attempts.look(self._depot.home, owner)
            found = self._published()
            if found is not None:
                self._course.let_go(self._lane.tier)
                attempts.look(self._depot.home, owner)
                return self._told(found)
            if self._written is None:
                self._written = self._standing()
            if self._written is None:
                self._written = self._write()
            if not self._part_is_durable:
                part = commit.part_of(self._written)
                name = layout.part_name(step.attempt, self._depot.index)
                self._store.put(f"{self._making}/{name}", part.emit())
                self._part_is_durable = True
                self._until_s = time.monotonic() + self._depot.timeout_s
            # Not before the part: who has to begin again needs the image.
            self._course.let_go(self._lane.tier)
            if self._depot.index != 0:
                return self._told(self._written.size_bytes)
            headers = self._all_headers(self._written)
            self._publish(headers)
        return self._told(sum(header.size_bytes for header in headers))

    def _told(self, size_bytes: int) -> Figures:
        more = self._course.job.figures if self._depot.index == 0 else {}
        return {**more, **_figures(self._course, size_bytes)}

    def _published(self) -> int | None:
        """The bytes of the step, if it is there: a call failed behind it, or a writer died."""
        step = self._course.id
        try:
            if publishing.read_marker(self._store, step.branch, step.step).id != step:
                return None
        except (NotFound, Damaged):
            return None
        return sum(ref.size_bytes for ref in read_manifest(self._store, step).images)

    def _standing(self) -> Header | None:
        """Of the image that a writer before this one has left, with its part.

        It must not be written again: process 0 may be about to publish it.
        """
        step, index = self._course.id, self._depot.index
        try:
            part = commit.read_part(self._store, self._making, step.attempt, index)
            header = commit.read_header(self._store, self._making, part)
            same = (step_of(header), header.meta.get("process")) == (step, index)
        except (NotFound, Damaged):
            return None
        if not same or header.compression != self._compression:
            return None
        self._lane.beat()
        return header

    def _write(self) -> Header:
        if self._compressed is not None:
            header, data = self._compressed
            self._write_image(header, data)
            self._compressed = None
            return header
        with _source(self._depot, self._course, self._lane) as (header, source):
            if self._compression is None:
                self._write_image(header, source)
                return header
            with self._lane.aside():
                data = window_of(source, 0, size_of(source))
                self._compressed = _compressed(header, data)
            del data
        # The next snapshot may be taken while this one is being written.
        self._course.let_go(self._lane.tier)
        return self._write()

    def _write_image(self, header: Header, source: Source) -> None:
        told = Told(source, self._lane.beat_bulk)
        commit.write_image(self._store, self._making, header, told)
        self._lane.beat()

    def _all_headers(self, own: Header) -> list[Header]:
        """Our own; of the others the parts, by name, then the headers of their images."""
        headers = []
        for process in range(self._depot.count):
            if process == self._depot.index:
                headers.append(own)
                continue
            if process not in self._others:
                self._others[process] = self._header_of(process)
            headers.append(self._others[process])
        return headers

    def _header_of(self, process: int) -> Header:
        step, pause_s = self._course.id, POLL_S
        while True:
            try:
                part = commit.read_part(self._store, self._making, step.attempt, process)
                break
            except NotFound:
                self._course.check(self._lane.tier)
            if time.monotonic() >= self._until_s:
                raise PeerFailed(
                    f"step {step.step}: process {process} of {self._depot.count} has not written "
                    f"its part within {self._depot.timeout_s:.0f} s; it may be dead or stuck"
                )
            with self._lane.aside():
                self._course.pause(self._lane.tier, pause_s)
            pause_s = min(POLL_LIMIT_S, pause_s * 1.5)
        self._lane.beat()
        return commit.read_header(self._store, self._making, part)

    def _publish(self, headers: Sequence[Header]) -> None:
        """The small files, the marker. The claims that fence it are those of the home."""
        step, owner, home = self._course.id, self._course.owner, self._depot.home
        marker = commit.finish(self._store, step, headers, self._known, maker=owner)
        self._lane.beat()
        if self._store is not home:
            mirrors.copy_records(home, self._store)
            attempts.look(home, owner)
            self._lane.beat()
        line = self._course.line
        commit.publish(self._store, step, marker, line, owner=owner, maker=owner)
        if self._store is not home:
            attempts.look(home, owner)


def _figures(course: Course, size_bytes: int) -> Figures:
    durable_s = round(time.monotonic() - course.arrived_s, 6)
    return {"durable_s": durable_s, "bytes": size_bytes}


@contextlib.contextmanager
def _source(depot: Depot, course: Course, lane: Lane) -> Iterator[tuple[Header, Source]]:
    """The image, from where it holds up least: a Local tier that has it, else the slot.

    What comes from a Local tier has been verified.

    Raises:
        Damaged, StoreFailed: the Local image is, or its disk has, and the slot was given back.
        NotFound: there is none.
    """
    step, tier = course.id, lane.tier
    if course.job.slot is None:
        near = [name for name in depot.images if name != tier]
    elif tier in depot.images:
        near = []
    else:
        with lane.aside():
            near = course.landed()
    faults: list[CheckpointError] = []
    with contextlib.ExitStack() as opened:
        for name in near:
            try:
                images = depot.images[name]
                reader = opened.enter_context(images.open(step))
                header, windows = images.header_of(step, reader), ImageWindows(reader)
                promotion.verify(header, windows, lane.beat_bulk)
            except (NotFound, Damaged, StoreFailed) as error:
                faults.append(error)
                continue
            yield header, windows
            return
        slot = course.job.slot
        if slot is not None and course.hold(tier):
            header, data = opened.enter_context(depot.slots.reading(slot, step))
            yield header, data
            return
    for kind in (StoreFailed, Damaged):  # the first may pass
        for fault in faults:
            if isinstance(fault, kind):
                raise fault
    text = f"{step}: its slot was given back, and no Local tier has its image"
    raise NotFound(text) from next(iter(faults), None)


def _compressed(header: Header, data: memoryview) -> tuple[Header, memoryview]:
    from ckpt.compressing import compressed  # here: most tiers have no use for it

    return compressed(header, data)

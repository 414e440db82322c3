"""Is everything what was saved? One function per invariant of FORMAT.md; nothing is changed.

::

    check_records       M6  claims and decisions are what was put
    check_markers       M1  what has the name of a step has a marker that agrees with its place
    check_marker        M2  the marker of one step is still that
    check_manifest      M2  the manifest is the one that the marker names
    check_files         M2  small files have the sizes and digests of the manifest (`ckpt.steps`)
    check_images        M2  images have the sizes and headers of the manifest
    check_leaf_digests  M2  the chunk tables give the digests of the tree record (`ckpt.steps`)
    check_chunks        M2  every chunk has digest and CRC; left out of a shallow look

Each trusts what those above it have checked. The other invariants are about orders of events, and
leave nothing that could be looked at.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckpt import attempts, commit, grid, image, layout, publishing, threads
from ckpt.arguments import shown
from ckpt.errors import (
    CheckpointError,
    Damaged,
    Misuse,
    NotFound,
    StoreFailed,
    Unsupported,
)
from ckpt.image import Header
from ckpt.lineage import StepId, counts
from ckpt.open_images import ImageReader
from ckpt.orbax_files import undescribed
from ckpt.publishing import read_marker
from ckpt.resolving import resolve
from ckpt.steps import (
    Damage,
    Manifest,
    OpenStep,
    check_files,
    check_leaf_digests,
    check_ours,
    open_step,
    read_manifest,
)
from ckpt.store import Store

Progress = Callable[[int, int], None]
"""Told the bytes done, and the bytes in all."""

_WINDOW_BYTES = 8 << 20
"""Neighbouring small chunks are read together, up to this much."""

_WORTH_THREADS_BYTES = 1 << 20


@dataclass(frozen=True)
class StepReport:
    """What was found in one step."""

    id: StepId | None
    """None: its marker could not be read."""
    name: str
    damage: tuple[Damage, ...]
    bytes_read: int = 0
    counts: bool = True
    """Does the step belong to the lineage?"""

    @property
    def intact(self) -> bool:
        return not self.damage


@dataclass(frozen=True)
class Verification:
    """What was found at a location."""

    location: str
    steps: tuple[StepReport, ...]
    records: tuple[Damage, ...] = ()
    """Attempt records that are not what was written."""
    unfinished: tuple[str, ...] = ()
    """Temporary names; the next attempt publishes or removes them."""
    not_looked_at: tuple[str, ...] = ()
    """Steps of Orbax, which stores no digests."""

    @property
    def intact(self) -> bool:
        """Nothing is damaged. Unfinished steps are no damage."""
        return not self.records and all(step.intact for step in self.steps)

    @property
    def damage(self) -> tuple[Damage, ...]:
        """Everything that was found, in one list."""
        return (*self.records, *(each for step in self.steps for each in step.damage))


def verify(
    location: str | os.PathLike[str],
    *,
    shallow: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Check a run, or the step at `location`, against the digests taken when it was saved.

    Args:
        shallow: leave out the chunks: read small files and image headers only.
        progress: told (bytes done, bytes in all) while chunks are read.

    Raises:
        NotFound: neither run nor step. StoreFailed: the store did not answer.
        Unsupported: steps of Orbax only. Beside others they are passed over, and named.
    """
    if progress is not None and not callable(progress):
        raise Misuse(
            f"progress: wanted a function of bytes done and bytes in all, found {shown(progress)}"
        )
    try:
        place = resolve(location)
    except Damaged as error:
        # The marker of the one step, or an attempt record of the run.
        where = os.fspath(location)
        return Verification(where, (), (Damage(where, str(error)),))
    store = place.store
    if place.alone:
        raise undescribed(store.location)
    if place.step is not None:
        check_ours(store, place.step)
        report = verify_step(store, place.step, shallow=shallow, progress=progress)
        return Verification(store.location, (report,))
    records = check_records(store)
    try:
        listing = attempts.list_run(store)
    except Unsupported as error:
        records = records or [Damage(layout.ATTEMPTS, str(error))]
        return Verification(store.location, (), tuple(records))
    foreign = tuple(str(step.step) for step in listing.steps if not step.attempt)
    if foreign and not (listing.numbers or listing.damaged):
        raise undescribed(store.location)
    records = _of_decisions(records, listing)
    try:
        line = listing.lineage
    except Damaged as error:
        # Nobody knows what counts; the steps can be looked at all the same.
        records, line = records or [Damage(layout.ATTEMPTS, str(error))], ()
    reports = check_markers(store, listing)
    ours = [step for step in listing.steps if step.attempt]
    for step, told in zip(ours, _shares(store, ours, progress), strict=True):
        found = verify_step(store, step, shallow=shallow, progress=told)
        if found.damage and not publishing.of(store).stands(step):
            continue  # its trainer has deleted it meanwhile
        reports.append(
            StepReport(step, found.name, found.damage, found.bytes_read, counts(line, step))
        )
    unfinished = tuple(remain.name for remain in listing.remains)
    return Verification(store.location, tuple(reports), tuple(records), unfinished, foreign)


def _shares(
    store: Store, steps: list[StepId], progress: Progress | None
) -> Iterator[Progress | None]:
    """For each step a progress that counts on from the steps before it."""
    sizes = []
    for step in steps:
        try:
            sizes.append(read_manifest(store, step).payload_bytes)
        except (Damaged, NotFound, Unsupported):
            sizes.append(0)
    total, before = sum(sizes), 0
    for size in sizes:
        yield None if progress is None else _offset(progress, before, total)
        before += size


def _offset(progress: Progress, before: int, total: int) -> Progress:
    return lambda done, _: progress(before + done, total)


def verify_step(
    store: Store, step: StepId, *, shallow: bool = False, progress: Progress | None = None
) -> StepReport:
    """Check one committed step. Raises StoreFailed when the store did not answer."""
    name = layout.step_name(step.branch, step.step)
    try:
        opened = open_step(store, step)
    except StoreFailed:
        raise
    except CheckpointError as error:
        return StepReport(step, name, tuple(_why_not(store, step, error)))
    damage = list(opened.damage)
    damage += check_leaf_digests(opened)
    bytes_read = 0
    if not shallow:
        found, bytes_read = check_chunks(opened, progress)
        damage += found
    return StepReport(step, name, tuple(damage), bytes_read)


def check_step(store: Store, step: StepId) -> tuple[Damage, ...]:
    """Check all that a restore reads, chunks included. Returns damage that it does not meet.

    Raises:
        Damaged, NotFound: as a restore would.
    """
    opened = open_step(store, step)
    damage = check_leaf_digests(opened) + check_chunks(opened)[0]
    if damage:
        lines = "".join(f"\n  {each}" for each in damage[:20])
        raise Damaged(f"{store.location}/{opened.prefix}: not what was saved:{lines}")
    return opened.damage


def _why_not(store: Store, step: StepId, error: CheckpointError) -> list[Damage]:
    """A step that cannot be opened, as far as can be told file by file."""
    damage = check_marker(store, step) or check_manifest(store, step)
    if damage:
        return damage
    name, manifest = layout.step_name(step.branch, step.step), read_manifest(store, step)
    damage = check_files(store, name, manifest) + check_images(store, name, manifest)
    return damage or [Damage.by(store, name, error)]


def check_markers(store: Store, listing: attempts.Listing) -> list[StepReport]:
    """M1: what has the name of a step has a marker that parses and agrees with its place."""
    return [
        StepReport(None, name, (Damage.by(store, name, why),), counts=False)
        for name, why in listing.damaged
    ]


def check_marker(store: Store, step: StepId) -> list[Damage]:
    """M2: the marker of a step that was listed is still there, and whole."""
    try:
        read_marker(store, step.branch, step.step)
    except (Damaged, NotFound, Unsupported) as error:
        key = f"{layout.step_name(step.branch, step.step)}/{layout.MARKER}"
        return [Damage.by(store, key, error)]
    return []


def check_manifest(store: Store, step: StepId) -> list[Damage]:
    """M2: the manifest has the digest that the marker names, and is that of this step."""
    try:
        read_manifest(store, step)
    except (Damaged, NotFound, Unsupported) as error:
        key = f"{layout.step_name(step.branch, step.step)}/{layout.MANIFEST}"
        return [Damage.by(store, key, error)]
    return []


def check_images(store: Store, prefix: str, manifest: Manifest) -> list[Damage]:
    """M2: images have the size and the header that the manifest says."""
    damage = []
    for ref in manifest.images:
        part = layout.Part(
            manifest.id.step,
            manifest.id.attempt,
            ref.process,
            len(manifest.images),
            ref.size_bytes,
            ref.header,
        )
        try:
            commit.read_header(store, prefix, part)
        except (Damaged, NotFound, Unsupported) as error:
            damage.append(Damage.by(store, f"{prefix}/{ref.name}", error))
    return damage


def check_chunks(step: OpenStep, progress: Progress | None = None) -> tuple[list[Damage], int]:
    """M2: every chunk has its digest, and its CRC-32C stands behind it; and bytes read."""
    damage: list[Damage] = []
    names = {leaf.param: leaf.name for leaf in step.leaves}
    total, done = step.manifest.payload_bytes, 0
    for header, ref in zip(step.headers, step.manifest.images, strict=True):
        key = f"{step.prefix}/{ref.name}"
        with step.store.open_image(key) as reader:
            for rows in _runs(header):
                found = _check_rows(header, reader, rows)
                for row, what in found:
                    param = header.arrays[int(header.columns.array[row])].param
                    what = what.removeprefix(f"{header.where}: ").removeprefix(f"{param}, ")
                    damage.append(Damage.by(step.store, key, what, names.get(param, param)))
                done += int(header.columns.nbytes[rows[0] : rows[1]].sum())
                if progress is not None:
                    progress(done, total)
    return damage, done


def _runs(header: Header) -> Iterator[tuple[int, int]]:
    """Rows [first, stop) whose chunks lie close together; a large chunk is a run by itself."""
    offsets, sizes = header.columns.offset.tolist(), header.columns.stored.tolist()
    first = 0
    for row in range(1, len(offsets) + 1):
        if (
            row == len(offsets)
            or offsets[row] < offsets[row - 1]
            or offsets[row] + sizes[row] - offsets[first] > _WINDOW_BYTES
        ):
            yield first, row
            first = row


def _check_rows(
    header: Header, reader: ImageReader, rows: tuple[int, int]
) -> list[tuple[int, str]]:
    first, stop = rows
    offsets, sizes = header.columns.offset, header.columns.stored
    start = int(offsets[first])
    end = int(offsets[stop - 1]) + int(sizes[stop - 1]) + grid.CRC_BYTES
    try:
        data = memoryview(reader.read(start, end - start))
    except Damaged as error:
        return [(row, str(error)) for row in range(first, stop)]

    def check(row: int) -> tuple[int, str] | None:
        at = int(offsets[row]) - start
        try:
            image.verify_chunk(header, row, data[at : at + int(sizes[row]) + grid.CRC_BYTES])
        except Damaged as error:
            return row, str(error)
        return None

    if end - start < _WORTH_THREADS_BYTES:
        found = [check(row) for row in range(first, stop)]
    else:
        found = threads.each(check, range(first, stop), 2)
    return [each for each in found if each is not None]


def _of_decisions(records: list[Damage], listing: attempts.Listing) -> list[Damage]:
    """What is wrong with the records; of a decision also what became of it."""
    better = [Damage(file, why) for file, why in listing.records.damage]
    known = {each.file for each in better}
    return [*(each for each in records if each.file not in known), *better]


def check_records(store: Store) -> list[Damage]:
    """M6: claims and decisions are what was put, by their seals."""
    damage = []
    for entry in store.list(layout.ATTEMPTS):
        key = f"{layout.ATTEMPTS}/{entry.name}"
        parse: Callable[[bytes, str], object] | None = None
        if layout.parse_claim_name(entry.name) is not None:
            parse = layout.parse_claim
        elif layout.parse_decision_name(entry.name) is not None:
            parse = layout.parse_decision
        if parse is None:
            continue
        try:
            parse(store.read(key), f"{store.location}/{key}")
        except (Damaged, Unsupported) as error:
            damage.append(Damage.by(store, key, error))
    return damage

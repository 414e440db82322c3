"""Hosts of a run, without a manager: an arena, a local disk, and the home that all of them share.

A host starts attempts, copies snapshots and brings them to its tiers, and dies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows import Rows

from ckpt import commit, image, layout, publishing, snapshot, tree
from ckpt.arena import Arena, Slot
from ckpt.imaged import Hosted, host_images
from ckpt.lineage import StepId
from ckpt.local import LocalImages
from ckpt.meta import Notes, meta_of
from ckpt.processes import Alone, Processes
from ckpt.reader import Restored
from ckpt.snapshot import Snapshot
from ckpt.specs import ArraySpec, ShardSpec
from ckpt.start import Start, Started, Wish
from ckpt.states import take
from ckpt.store import FileStore, Store
from ckpt.values import stored

_calls = itertools.count()


def state_of(tag: int) -> dict[str, Any]:
    """A pure function of its number."""
    rng = np.random.default_rng(tag)
    return {
        "w": rng.standard_normal((8, 6), np.float32),
        "b": rng.integers(0, 2**32, (8, 5), np.uint32),
        "tag": tag,
    }


def bits(state: dict[str, Any]) -> list[Any]:
    arrays = [np.asarray(state[name]) for name in ("w", "b")]
    return [*((str(a.dtype), a.shape, a.tobytes()) for a in arrays), state["tag"]]


class Host:
    """One process of a run on a host of its own, or on one with others."""

    def __init__(
        self,
        root: Path,
        place: Path,
        processes: Processes | None = None,
        others: Mapping[str, Store] | None = None,
    ) -> None:
        self.root, self.place = root, place
        self.processes = processes if processes is not None else Alone()
        self.home = FileStore(root)
        self.others = dict(others or {})
        self.locals = {"local": LocalImages(place / "disk", str(root), self.processes.index)}
        self.arena: Arena | None = None
        self.started: Started | None = None

    def hosted(self) -> Hosted:
        return host_images(self.arena, self.locals)

    def start(self, kind: Any = "resume", step: int | None = None, **wish: Any) -> Restored:
        """Begin an attempt; the data of what it went on from are in `self.rows`."""
        if self.arena is None:
            place = self.place / f"arena-{self.processes.index}"
            self.arena = Arena(place, owner={"run": str(self.root)}, slots=3)
        self.rows = Rows()
        call = {"like": state_of(0), "data": self.rows, **wish}
        name = f"call-{next(_calls)}" if self.processes.count == 1 else wish.pop("name", "call")
        call.pop("name", None)
        held = self.started.number if self.started is not None else None
        with self.processes.matter(name, 30) as matter:
            start = Start(self.home, matter, held, host=self.hosted, others=self.others)
            self.started = start.run(Wish(kind, step, **call))
        return self.started.restored

    def id_of(self, step: int) -> StepId:
        assert self.started is not None
        return StepId(step, self.started.decision.branch, self.started.number)

    def copy(self, step: int, tag: int | None = None) -> Snapshot:
        """The state of a step into the arena; its slot stays held."""
        assert self.started is not None
        assert self.arena is not None
        self.rows.take()
        flat = tree.flatten(state_of(step if tag is None else tag))
        notes = Notes(extra={"tag": tag})
        processes = self.processes
        meta = meta_of(self.id_of(step), self.started.decision, take(self.rows), notes, processes)
        if processes.count == 1:
            return snapshot.take(flat, self.arena, meta)
        held = [
            (spec, stored(value, spec))
            for spec, value in zip(flat.specs, flat.values, strict=True)
            if spec.storage_dtype is not None
        ]
        arrays, shards, sources = [], [], []
        for number, (spec, value) in enumerate(held):
            array = np.asarray(value)
            split = processes.count if array.ndim else 1  # scalars are written by process 0
            part = array[processes.index * 8 // split :][: 8 // split] if array.ndim else array
            chunk = part.shape
            arrays.append(ArraySpec(spec.param, str(spec.storage_dtype), array.shape, chunk))
            if array.ndim or processes.index == 0:
                start = (processes.index * 8 // split, 0)[: array.ndim]
                shards.append(ShardSpec(number, start, part.shape))
                sources.append(part)
        record = flat.outline.record if processes.index == 0 else b""
        plan = image.plan(arrays, shards, {}).with_meta(meta, record)
        slot: Slot = self.arena.claim(plan.size_bytes)
        header = image.fill(plan, slot.buffer, sources, where=str(slot.path))
        slot.filled()
        return Snapshot(slot, header, None)  # type: ignore[arg-type]

    def to_local(self, snap: Snapshot) -> None:
        self.locals["local"].write(snap.header, snap.slot.buffer[: snap.header.size_bytes])

    def to_shared(self, snap: Snapshot, store: Store | None = None) -> None:
        """A run of one process: the image, its part, the step; acknowledged."""
        assert self.started is not None
        store = self.home if store is None else store
        header, meta = snap.header, snap.header.meta
        step = StepId(meta["step"], meta["branch"], meta["attempt"])
        making = publishing.of(store).making(step)
        commit.write_image(store, making, header, snap.slot.buffer[: header.size_bytes])
        part = commit.part_of(header)
        store.put(f"{making}/{layout.part_name(part.attempt, part.process)}", part.emit())
        marker = commit.finish(store, step, [header])
        commit.publish(store, step, marker, self.started.line, owner=self.started.number)

    def die(self) -> None:
        """As a killed process does: the kernel drops its locks, the files stay."""
        if self.arena is not None:
            self.arena.close(remove=False)
        self.arena = self.started = None

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close(remove=True)
            self.arena = None


def flip(path: Path, offset: int) -> None:
    """Another byte in a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def check(restored: Any, host: Host, step: int, tier: str) -> None:
    assert (restored.step, restored.report.tier) == (step, tier)
    assert bits(restored.state) == bits(state_of(step))
    assert host.rows.take() == [2 * step, 2 * step + 1]
    assert restored.report.source.step == step


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "run", tmp_path / "host")
    yield host
    host.close()


def other_host(host: Host) -> Host:
    """Another one with the same home; nothing of what was on the first."""
    found = Host(host.root, host.place.with_name(f"{host.place.name}-other"))
    found.others = host.others
    return found


def payload(image: Any) -> int:
    """Where the first chunk of an image lies."""
    return int(image.header.columns.offset[0])

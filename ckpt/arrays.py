"""From images to arrays: read what this process needs, verify it, place it on devices.

Any sharding can be read from images that any other sharding wrote. Nothing is handed out before
every chunk that was read is verified; a chunk that no image holds is damage, never zeros.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from ckpt.chunk_uses import Use, Uses, cells_of, remembered_uses, uses_of, walk
from ckpt.errors import Damaged, Misuse
from ckpt.fetch import LISTED, Chunk, Copy, Fetch, ImageFile, aligned_bytes, aligned_empty
from ckpt.grid import round_up
from ckpt.image import Header
from ckpt.placement import ALIGNMENT_BYTES, Box, HostLeaf, boxes, is_single, place, put, whole
from ckpt.specs import ArraySpec, dtype_of

__all__ = ["ImageFile", "Report", "Request", "read_arrays"]

Images = Sequence[tuple[Header, ImageFile]]
Progress = Callable[[int, int], None]
"""Told the bytes done, and the bytes in all."""

_FEW_CHUNKS = 64
_SHARED_BELOW_BYTES = 4096
_BLOCK_BYTES = 256 * 1024


class Request(NamedTuple):
    """One array that is wanted.

    `param` is its name in the images. `sharding`, of the array as stored, gives a `jax.Array` with
    this process's parts of it; None gives the whole array on the host. `name` is the leaf path for
    messages. `memory_kind` replaces that of the sharding.
    """

    param: str
    sharding: jax.sharding.Sharding | None = None
    name: str = ""
    memory_kind: str | None = None


@dataclass(frozen=True)
class Report:
    """What a restore read, and how long it took."""

    bytes_read: int
    """From the images: whole chunks, their CRCs, and gaps between small neighbours."""
    bytes_needed: int
    """Of the parts that this process holds; replicas count once."""
    chunks: int
    """How many were read and verified."""
    plan_s: float
    read_s: float
    """Reading, verifying, and copying what could not be read in place."""
    place_s: float
    """Building device arrays."""


def read_arrays(
    images: Images,
    requests: Sequence[Request],
    *,
    budget_bytes: int = 1 << 30,
    threads: int = 2,
    progress: Progress | None = None,
) -> tuple[list[Any], Report]:
    """Arrays for `requests`, in their order: `np.ndarray` (whole), or `jax.Array` where sharded.

    Arrays have the dtype and shape that are stored, and share no memory with an image or arena.
    Of the images only chunks that intersect what is needed are read, in place where they lie in one
    piece. `budget_bytes` bounds the scratch memory, and the host memory of sharded leaves that are
    on their way to devices which do not share it; a chunk or leaf above it goes alone.

    Raises:
        Damaged: chunks are absent or not what was written; all are named, up to a bound.
        Mismatch: a sharding does not fit its array.
        Unsupported: JAX would narrow the dtype of a sharded array.
        StoreFailed: an image could not be read.
        Misuse: no thread, or no budget.
    """
    if threads < 1 or budget_bytes < 1:
        raise Misuse(f"wanted at least 1 thread and 1 byte, found {threads} and {budget_bytes}")
    clock = _Phases()
    catalog = _Catalog(images)
    leaves = [_Leaf(catalog, request) for request in requests]
    missing = [line for leaf in leaves for line in leaf.missing]
    if missing:
        raise Damaged(_absent(missing, images))
    fetch = Fetch(images, budget_bytes=budget_bytes, threads=threads)
    done, total = 0, sum(leaf.chunk_bytes for leaf in leaves)

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    arrays: dict[int, Any] = {}
    for group in _groups(leaves, budget_bytes):
        chunks = [chunk for i in group for chunk in leaves[i].chunks()]
        clock.end("plan")
        fetch.run(chunks, advance)
        clock.end("read")
        if fetch.is_intact:
            arrays.update(zip(group, _finish([leaves[i] for i in group]), strict=True))
        for i in group:
            leaves[i].release()
        clock.end("place")
    fetch.raise_damage()
    report = Report(
        bytes_read=fetch.bytes_read,
        bytes_needed=sum(leaf.nbytes for leaf in leaves),
        chunks=fetch.chunks,
        plan_s=clock.spent_s["plan"],
        read_s=clock.spent_s["read"],
        place_s=clock.spent_s["place"],
    )
    return [arrays[i] for i in range(len(leaves))], report


def _groups(leaves: Sequence[_Leaf], budget_bytes: int) -> Iterator[list[int]]:
    """Numbers of the leaves that are read together."""
    group: list[int] = []
    staged_bytes = 0
    for i, leaf in enumerate(leaves):
        nbytes = 0 if leaf.sharding is None else leaf.nbytes
        if group and staged_bytes + nbytes > budget_bytes:
            yield group
            group, staged_bytes = [], 0
        group.append(i)
        staged_bytes += nbytes
    if group:
        yield group


def _finish(leaves: Sequence[_Leaf]) -> list[Any]:
    found: list[Any] = [leaf.on_host() for leaf in leaves]
    plain = [i for i, leaf in enumerate(leaves) if leaf.is_plain]
    arrays = put([found[i] for i in plain], [leaves[i].sharding for i in plain])
    others = [i for i, leaf in enumerate(leaves) if leaf.sharding is not None and not leaf.is_plain]
    arrays += place([leaves[i].on_devices() for i in others])
    # Until the copy is made the buffers live; and what fails should fail here.
    for i, array in zip([*plain, *others], jax.block_until_ready(arrays), strict=True):
        found[i] = array
    return found


class _Phases:
    """Seconds spent in each phase: the time since the last `end` belongs to the phase it names."""

    def __init__(self) -> None:
        self.spent_s = {"plan": 0.0, "read": 0.0, "place": 0.0}
        self._since = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.spent_s[phase] += now - self._since
        self._since = now


class _Catalog:
    """Where the chunks of each array lie, over all images."""

    def __init__(self, images: Images) -> None:
        self.headers = [header for header, _ in images]
        self._files = [file for _, file in images]
        self._order: list[np.ndarray] = []
        self._first: list[list[int]] = []
        self._places: dict[str, list[tuple[int, int]]] = {}
        self._forms: dict[Any, _Form] = {}
        self.room = _Room()
        for number, header in enumerate(self.headers):
            array = header.columns.array
            order = np.argsort(array, kind="stable")
            bounds = np.searchsorted(array[order], np.arange(len(header.arrays) + 1))
            self._order.append(order)
            self._first.append(bounds.tolist())
            for index, spec in enumerate(header.arrays):
                self._places.setdefault(spec.param, []).append((number, index))

    def spec(self, request: Request) -> ArraySpec:
        """The array as stored; all images must agree on it."""
        found = [(self.headers[i], self.headers[i].arrays[a]) for i, a in self._at(request)]
        (first, wanted), *others = found
        for header, spec in others:
            if spec != wanted:
                raise Damaged(
                    f"leaf {_name(request)}: images disagree: {first.where} has {wanted}, "
                    f"{header.where} has {spec}"
                )
        return wanted

    def rows(self, request: Request) -> list[tuple[int, np.ndarray]]:
        """Image number, and the rows in its table that belong to the array."""
        found = []
        for image, index in self._at(request):
            start, stop = self._first[image][index : index + 2]
            if stop > start:
                found.append((image, self._order[image][start:stop]))
        return found

    def first_row(self, request: Request) -> tuple[int, int] | None:
        """Image number and row of one chunk of the array; None if no image holds any."""
        for image, index in self._at(request):
            start, stop = self._first[image][index : index + 2]
            if stop > start:
                return image, int(self._order[image][start])
        return None

    def form(self, spec: ArraySpec, request: Request) -> _Form:
        """What this leaf has in common with others of its kind."""
        # The requests keep the shardings, so identity holds; to hash one takes longer.
        key = (spec.dtype, spec.shape, spec.chunk_shape, id(request.sharding), request.memory_kind)
        found = self._forms.get(key)
        if found is None:
            found = self._forms[key] = _form(spec, request)
        return found

    def lent(self, image: int, row: int, nbytes: int) -> np.ndarray | None:
        """u8[nbytes]: the chunk where it lies, if its image lends it."""
        columns = self.headers[image].columns
        if columns.frames is not None:
            return None
        return self._files[image].lend(int(columns.offset[row]), nbytes)

    def _at(self, request: Request) -> list[tuple[int, int]]:
        if request.param not in self._places:
            where = ", ".join(header.where for header in self.headers[:4]) or "no image"
            raise Damaged(
                f"leaf {_name(request)}: wanted array {request.param!r}, found none of that name "
                f"in {where}"
            )
        return self._places[request.param]


class _Room:
    """Buffers, aligned as JAX wants them; small ones share a block, which costs a tenth.

    A block lives as long as any of its buffers, so it is no larger than what that may waste.
    """

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._at = 0

    def take(self, nbytes: int) -> np.ndarray:
        """u8[nbytes], not initialised."""
        if nbytes > _SHARED_BELOW_BYTES:
            return aligned_bytes(nbytes, ALIGNMENT_BYTES)
        start = self._at
        if start + nbytes > len(self._block):
            self._block, start = aligned_bytes(_BLOCK_BYTES, ALIGNMENT_BYTES), 0
        self._at = start + round_up(nbytes, ALIGNMENT_BYTES)
        return self._block[start : start + nbytes]


class _Leaf:
    """One request: its buffers, and the chunks that fill them."""

    def __init__(self, catalog: _Catalog, request: Request) -> None:
        self._request, self._catalog = request, catalog
        self.name = _name(request)
        self.spec = catalog.spec(request)
        self._form = catalog.form(self.spec, request)
        self.sharding, self.dtype = self._form.sharding, self._form.dtype
        self.boxes, self.nbytes = self._form.boxes, self._form.nbytes
        self._buffers: list[np.ndarray] = []
        self._found: dict[tuple[int, ...], tuple[int, int]] = {}
        self.missing = self._find()

    def chunks(self) -> list[Chunk]:
        """Allocate the buffers; all cells are known to exist, so this is no more than is stored."""
        if self._form.whole_chunk:
            ((image, row),) = self._found.values()
            lent = self._catalog.lent(image, row, self.nbytes)
            raw = self._catalog.room.take(self.nbytes) if lent is None else lent
            self._buffers.append(raw.view(self.dtype).reshape(self.spec.shape))
            offset = int(self._catalog.headers[image].columns.offset[row])
            form = (self.spec.chunk_shape, self.dtype, lent is not None)
            return [Chunk(image, row, self.name, offset, self.nbytes, raw, (), *form)]
        find_uses = remembered_uses if len(self._found) <= _FEW_CHUNKS else uses_of
        uses = find_uses(self.spec.chunk_shape, self.boxes)
        lent_boxes = self._lent(uses)
        for number, shape in enumerate(self._form.shapes):
            if number in lent_boxes:
                self._buffers.append(lent_boxes[number].view(self.dtype).reshape(shape))
            else:
                self._buffers.append(aligned_empty(shape, self.dtype, ALIGNMENT_BYTES))
        return [self._chunk(cell, parts, lent_boxes) for cell, parts in uses.items()]

    def _lent(self, uses: Uses) -> dict[int, np.ndarray]:
        """By number, the boxes that are a chunk each and lie where they are."""
        found = {}
        for cell, parts in uses.items():
            for use in parts:
                if use.in_place and self._form.shapes[use.box] == self.spec.chunk_shape:
                    lent = self._catalog.lent(*self._found[cell], self.spec.chunk_bytes)
                    if lent is not None:
                        found[use.box] = lent
        return found

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all chunks that are needed."""
        return len(self._found) * self.spec.chunk_bytes

    def release(self) -> None:
        """Forget the buffers; what was made of them keeps them as long as it needs them."""
        self._buffers = []

    def on_host(self) -> np.ndarray | None:
        """The first buffer; None where this process holds no part of the array."""
        return self._buffers[0] if self._buffers else None

    @property
    def is_plain(self) -> bool:
        """Whether it goes as a whole to one device."""
        return self._form.plain

    def on_devices(self) -> HostLeaf:
        assert self.sharding is not None
        parts = dict(zip(self.boxes, self._buffers, strict=True))
        return HostLeaf(self.name, self.spec.shape, self.dtype, self.sharding, parts)

    def _find(self) -> list[str]:
        """Look up the cells that are needed; what no image holds, as lines for the error."""
        if self._form.cells == 0:
            return []
        if self._form.one_chunk:
            only = self._catalog.first_row(self._request)
            if only is None:
                return [f"leaf {self.name}: {self.spec.param}, its only chunk"]
            self._found[(0,) * len(self.spec.shape)] = only
            return []
        held = self._held(self._catalog.rows(self._request))
        # A header may speak of more chunks than there are; so walk no further than what is held.
        missing: list[str] = []
        for box in self.boxes:
            for cell in walk(cells_of(self.spec.chunk_shape, box)):
                if cell in held:
                    self._found[cell] = held[cell]
                elif len(missing) < LISTED:
                    missing.append(f"leaf {self.name}: {self.spec.param}, chunk {cell}")
                else:
                    return [*missing, f"leaf {self.name}: and others"]
        return missing

    def _held(self, rows: Sequence[tuple[int, np.ndarray]]) -> dict[tuple[int, ...], Any]:
        held: dict[tuple[int, ...], tuple[int, int]] = {}
        for image, some in rows:
            grid = self._catalog.headers[image].columns.grid[some, : len(self.spec.shape)]
            inside = np.zeros(len(some), bool)
            for box in self.boxes:
                cells = cells_of(self.spec.chunk_shape, box)
                start, stop = [c.start for c in cells], [c.stop for c in cells]
                inside |= ((grid >= start) & (grid < stop)).all(axis=1)
            for cell, row in zip(grid[inside].tolist(), some[inside].tolist(), strict=True):
                held.setdefault(tuple(cell), (image, row))
        return held

    def _chunk(self, cell: tuple[int, ...], uses: Sequence[Use], lent: Container[int]) -> Chunk:
        image, row = self._found[cell]
        columns = self._catalog.headers[image].columns
        direct, copies = None, []
        uses = sorted(uses, key=lambda use: use.box not in lent)
        for use in uses:
            target = self._buffers[use.box][use.target]
            if use.in_place and direct is None:
                direct = target.reshape(-1).view(np.uint8)
            else:
                copies.append(Copy(target, use.part))
        return Chunk(
            image=image,
            row=row,
            leaf=self.name,
            offset=int(columns.offset[row]),
            nbytes=self.spec.chunk_bytes,
            direct=direct,
            copies=tuple(copies),
            shape=self.spec.chunk_shape,
            dtype=self.dtype,
            lent=uses[0].box in lent,
        )


@dataclass(frozen=True, slots=True)
class _Form:
    """What many leaves have in common: shape, dtype, chunks and sharding, and what follows."""

    dtype: np.dtype[Any]
    sharding: jax.sharding.Sharding | None
    boxes: tuple[Box, ...]
    nbytes: int
    """Of all boxes."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the boxes."""
    cells: int
    """Chunks that are needed; those of several boxes count each time."""
    one_chunk: bool
    """Whether the array has no other chunk."""
    whole_chunk: bool
    """Whether that chunk is the array, and all of it is wanted in one piece."""
    plain: bool
    """Whether it then goes to one device."""


def _form(spec: ArraySpec, request: Request) -> _Form:
    dtype, sharding = dtype_of(spec.dtype), request.sharding
    if sharding is not None and request.memory_kind is not None:
        sharding = sharding.with_memory_kind(request.memory_kind)
    wanted: tuple[Box, ...] = (whole(spec.shape),)
    if sharding is not None:
        wanted = boxes(spec.shape, dtype, sharding, _name(request))
    one_chunk = math.prod(spec.grid) == 1
    whole_chunk = one_chunk and wanted == (whole(spec.shape),)
    return _Form(
        dtype,
        sharding,
        wanted,
        nbytes=sum(map(_count, wanted)) * dtype.itemsize,
        shapes=tuple(tuple(stop - start for start, stop in box) for box in wanted),
        cells=sum(math.prod(map(len, cells_of(spec.chunk_shape, box))) for box in wanted),
        one_chunk=one_chunk,
        whole_chunk=whole_chunk,
        plain=whole_chunk and is_single(sharding),
    )


def _count(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _name(request: Request) -> str:
    return request.name or request.param


def _absent(missing: Sequence[str], images: Images) -> str:
    where = ", ".join(header.where for header, _ in images[:4])
    lines = "".join(f"\n  {line}" for line in missing[:LISTED])
    more = "\n  and others" if len(missing) > LISTED else ""
    which = "not in the image" if len(images) == 1 else f"in none of the {len(images)} images"
    return f"chunks that are needed are {which} ({where}):{lines}{more}"

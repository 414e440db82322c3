"""From durable images to a committed step (FORMAT.md section 6).

Every file of a step but the images is a pure function of the images (`step_files`), so whoever
finishes a commit, the attempt itself or a later one, writes the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import xxhash

from ckpt import attempts, layout, lineage, ocdbt, orbax_json, pieces, publishing
from ckpt.btree import renewed
from ckpt.errors import AlreadyExists, Damaged, NotFound, StoreFailed
from ckpt.image import Header, decode
from ckpt.layout import Part
from ckpt.leaves import EmptySpec, LeafSpec, each_from_json
from ckpt.lineage import Lineage, Remain, StepId
from ckpt.recurring import Contents, Places, Recurring, Template
from ckpt.specs import ArraySpec
from ckpt.store import Store
from ckpt.union import common_state
from ckpt.windows import Source

Json = Any


def read_part(store: Store, prefix: str, attempt: int, process: int) -> Part:
    """The receipt of one process. Raises NotFound, Damaged."""
    key = f"{prefix}/{layout.part_name(attempt, process)}"
    where = f"{store.location}/{key}"
    part = Part.parse(store.read(key), where)
    if (part.attempt, part.process) != (attempt, process) or not process < part.processes:
        raise Damaged(f"{where}: belongs to process {part.process} of attempt {part.attempt}")
    return part


def read_header(store: Store, prefix: str, part: Part) -> Header:
    """The header of the image that a part speaks of.

    Raises:
        Damaged: the image is absent, has another size, or another header.
    """
    key = f"{prefix}/{layout.image_name(part.attempt, part.process)}"
    where = f"{store.location}/{key}"
    try:
        reader = store.open_image(key)
    except NotFound as error:
        raise Damaged(f"{where}: the image is absent; its part is there") from error
    with reader:
        if reader.size_bytes != part.size_bytes:
            raise Damaged(
                f"{where}: wanted {part.size_bytes} bytes, found {reader.size_bytes}; "
                "the file was cut or replaced"
            )
        header = decode(reader.read, reader.size_bytes, where)
    if header.digest != part.header:
        raise Damaged(
            f"{where}: wanted header {part.header}, found {header.digest}; "
            "the image belongs to another step"
        )
    return header


def read_headers(store: Store, prefix: str, attempt: int) -> list[Header]:
    """The headers of all images under `prefix`, checked against their parts."""
    first = read_part(store, prefix, attempt, 0)
    parts = [first, *(read_part(store, prefix, attempt, i) for i in range(1, first.processes))]
    return [read_header(store, prefix, part) for part in parts]


def is_complete(store: Store, remain: Remain) -> bool:
    """Are all parts and images of a step in the making there and in agreement?

    A question of the shallow kind: chunks are verified when the step is read.
    """
    try:
        first = read_part(store, remain.name, remain.attempt, 0)
        for process in range(first.processes):
            part = read_part(store, remain.name, remain.attempt, process)
            if (part.step, part.processes) != (remain.step, first.processes):
                return False
            read_header(store, remain.name, part)
    except (NotFound, Damaged):
        return False
    return True


# --- the small files, a pure function ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Same:
    """What is the same in all steps of an attempt that have one structure."""

    files: dict[str, bytes]
    arrays: int
    digested: list[str]
    """Params of the leaves with digests, in the order of the tree record."""
    record: Callable[[Sequence[str]], bytes]
    """`tree.json` from the digests of these leaves."""


@final
class Known:
    """What other steps have as well: the files of their structure, and an index of their chunks."""

    def __init__(self) -> None:
        self.same: Recurring[_Same] = Recurring()
        self.index: Recurring[ocdbt.Database] = Recurring()
        """Under some uuid and time."""


def _same(headers: Sequence[Header]) -> _Same:
    meta, tree = headers[0].meta, _parse_tree(headers[0])
    leaves = list(each_from_json(tree["leaves"]))
    empty = [EmptySpec.from_json(node) for node in tree["empty"]]
    by_param = {spec.param: spec for header in headers for spec in header.arrays}
    arrays = [by_param[leaf.param] for leaf in leaves if leaf.param in by_param]
    files = orbax_json.files(
        leaves,
        arrays,
        [(node.keys, node.orbax_type) for node in empty],
        item=layout.ITEM,
        device=meta["record"]["device"],
        init_ns=meta["time_ns"],
        commit_ns=meta["time_ns"],
    )
    digested = [spec.param for spec in arrays]
    template = Template.cut(
        lambda digest: _tree(tree, leaves, dict.fromkeys(digested, digest)), len(digested)
    )

    def record(digests: Sequence[str]) -> bytes:
        if template is not None:
            return layout.close(template.fill(digests))
        return layout.close(_tree(tree, leaves, dict(zip(digested, digests, strict=True))))

    return _Same(files, len(arrays), digested, record)


def _parse_tree(header: Header) -> dict[str, Json]:
    try:
        tree = json.loads(header.tree)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{header.where}: the tree record is no JSON ({error})") from error
    if not isinstance(tree, dict) or not tree.keys() >= {"structure", "leaves", "empty"}:
        raise Damaged(f"{header.where}: no tree record: {header.tree[:200]!r}")
    return tree


def step_files(
    headers: Sequence[Header], cut_bytes: int | None = None, known: Known | None = None
) -> dict[str, bytes]:
    """All small files of a step but the parts, by name relative to the step; the marker last.

    `headers` are those of the images of process 0, 1, ... The record of the step is in the first.
    `known` remembers what other steps of the same structure have as well.
    `cut_bytes` is that of the store: the index points into the objects of cut images.

    Raises:
        Damaged: the images do not belong together, or a chunk of an array is in none of them.
    """
    meta, record = headers[0].meta, headers[0].meta["record"]
    attempt, step, branch = meta["attempt"], meta["step"], meta["branch"]
    for number, header in enumerate(headers):
        found = (header.meta.get("step"), header.meta.get("attempt"), header.meta.get("process"))
        if found != (step, attempt, number):
            raise Damaged(
                f"{header.where}: wanted process {number} of step {step}, attempt {attempt}; "
                f"found (step, attempt, process) = {found}"
            )

    known = Known() if known is None else known
    contents = Contents(tuple(headers), (attempt, record["device"]))
    same = known.same.get(contents, lambda: _same(headers))
    # The names of objects have the size of the image, which changes with figures and texts.
    cut = cut_bytes and (cut_bytes, *(header.size_bytes for header in headers))
    index = known.index.get(
        Places(same, tuple(headers), (cut,)), lambda: _index(headers, attempt, cut_bytes)
    )
    index = renewed(index, _uuid(headers), meta["time_ns"])
    digests = leaf_digests(headers)
    files = {
        **same.files,
        layout.index_name(attempt): index.nodes,
        layout.ORBAX_STEP: orbax_json.checkpoint_metadata(
            layout.ITEM, init_ns=meta["time_ns"], commit_ns=meta["time_ns"]
        ),
        f"{layout.ITEM}/manifest.ocdbt": index.manifest,
        layout.TREE: same.record([digests[param] for param in same.digested]),
    }
    manifest = layout.seal(
        {
            "format": layout.FORMAT,
            "step": step,
            "branch": branch,
            "attempt": attempt,
            "parent": record["parent"],
            "decision": record.get("decision"),
            "time_ns": meta["time_ns"],
            "images": [
                {
                    "name": layout.image_name(attempt, number),
                    "size_bytes": header.size_bytes,
                    "header": header.digest,
                }
                for number, header in enumerate(headers)
            ],
            "files": {
                name: {"size_bytes": len(data), "digest": layout.digest(data)}
                for name, data in {**_parts(headers), **files}.items()
            },
            "bytes": int(sum(int(header.columns.nbytes.sum()) for header in headers)),
            "arrays": same.arrays,
            "data": _data(headers),
            **{name: record.get(name) for name in ("metrics", "extra", "guard", "environment")},
        }
    )
    marker = layout.Marker(StepId(step, branch, attempt), layout.digest(manifest))
    return {**files, layout.MANIFEST: manifest, layout.MARKER: marker.emit()}


def part_of(header: Header) -> Part:
    """The receipt for an image."""
    meta = header.meta
    return Part(
        meta["step"],
        meta["attempt"],
        meta["process"],
        meta["processes"],
        header.size_bytes,
        header.digest,
    )


def _parts(headers: Sequence[Header]) -> dict[str, bytes]:
    parts = [part_of(header) for header in headers]
    return {layout.part_name(part.attempt, part.process): part.emit() for part in parts}


def _index(headers: Sequence[Header], attempt: int, cut_bytes: int | None) -> ocdbt.Database:
    prefix = f"{layout.ITEM}/"
    images = [layout.image_name(attempt, i).removeprefix(prefix) for i in range(len(headers))]
    return ocdbt.index(
        headers,
        images,
        layout.index_name(attempt).removeprefix(prefix),
        uuid=_uuid(headers),
        time_ns=headers[0].meta["time_ns"],
        objects=[
            pieces.objects(header, image, cut_bytes)
            for header, image in zip(headers, images, strict=True)
        ],
    )


def _uuid(headers: Sequence[Header]) -> bytes:
    return xxhash.xxh3_128_digest(":".join(header.digest for header in headers).encode())


def _tree(tree: dict[str, Json], leaves: Sequence[LeafSpec], digests: dict[str, str]) -> bytes:
    return layout.canonical(
        {
            "format": layout.FORMAT,
            "structure": tree["structure"],
            "empty": tree["empty"],
            "leaves": [
                {**leaf.to_json(), "digest": digests[leaf.param]}
                if leaf.param in digests
                else leaf.to_json()
                for leaf in leaves
            ],
            "hidden_from_orbax": [leaf.name for leaf in leaves if not leaf.orbax],
        }
    )


def leaf_digests(headers: Sequence[Header]) -> dict[str, str]:
    """Digest of each array: xxh3-128 over its chunk digests in grid order, by param."""
    params: dict[str, int] = {}
    arrays: list[ArraySpec] = []
    rows, cells, digests = [], [], []
    width = max((h.columns.grid.shape[1] for h in headers), default=0)
    for header in headers:
        numbers = []
        for spec in header.arrays:
            if spec.param not in params:
                params[spec.param] = len(arrays)
                arrays.append(spec)
            numbers.append(params[spec.param])
        columns = header.columns
        rows.append(np.array(numbers, np.int64)[columns.array.astype(np.int64)])
        grid = columns.grid.astype(np.int64)
        cells.append(np.pad(grid, ((0, 0), (0, width - grid.shape[1]))))
        digests.append(columns.digest)
    row, cell, digest = np.concatenate(rows), np.concatenate(cells), np.concatenate(digests)
    order = np.lexsort((*cell.T[::-1], row))
    row, digest = row[order], digest[order]
    ends = np.searchsorted(row, np.arange(len(arrays)), side="right").tolist()
    starts = [0, *ends][: len(ends)]
    return {
        spec.param: layout.digest(digest[start:end].tobytes())
        for spec, start, end in zip(arrays, starts, ends, strict=True)
    }


def _data(headers: Sequence[Header]) -> dict[str, Json]:
    """Iterator states by name: one that is good for any number of processes, or one for each."""
    found: dict[str, Json] = {}
    names = headers[0].meta["data"].keys()
    for header in headers:
        if header.meta["data"].keys() != names:
            raise Damaged(
                f"{header.where}: wanted iterators {sorted(names)} as in process 0, found "
                f"{sorted(header.meta['data'])}; give save() the same ones in all processes"
            )
    for name in names:
        taken = [header.meta["data"][name] for header in headers]
        state = common_state(taken)
        found[name] = {
            "batch_size": taken[0]["batch_size"],
            **({"states": [t["state"] for t in taken]} if state is None else {"state": state}),
        }
    return found


# --- writing and publishing --------------------------------------------------------------------


def write_image(store: Store, prefix: str, header: Header, data: Source) -> None:
    """Write the image of `header` under `prefix`, cut as the store wants it; durable."""
    key = f"{prefix}/{layout.image_name(header.meta['attempt'], header.meta['process'])}"
    borders = pieces.cuts(header, store.cut_bytes)
    if borders:
        store.write_image(key, data, borders)
    else:
        store.write_image(key, data)


def finish(
    store: Store,
    step: StepId,
    headers: Sequence[Header],
    known: Known | None = None,
    *,
    maker: int | None = None,
) -> bytes:
    """Write the small files of a step whose images and parts are durable. Returns its marker.

    `maker`: see `Publishing.making`.
    """
    states = publishing.of(store)
    files = step_files(headers, store.cut_bytes, known)
    marker = files.pop(layout.MARKER)
    making = states.making(step, maker)
    store.put_many({f"{making}/{name}": data for name, data in files.items()})
    states.complete(step, marker, maker)
    return marker


def publish(
    store: Store,
    step: StepId,
    marker: bytes,
    line: Lineage,
    *,
    owner: int,
    maker: int | None = None,
) -> None:
    """Look, commit, look again. Returns when the step is acknowledged.

    `line` is the lineage of the head, `owner` the attempt that must own the run: that of the step
    for a save, a later one for a roll-forward.

    Raises:
        Superseded: a newer attempt owns the run; whether the step counts is for its lineage to say.
        StoreFailed: the step vanished, though the attempt that made it owns the run.
        NotFound: the step of an older attempt vanished.
        AlreadyExists: another step that counts stands there, or one that is damaged.
    """
    states = publishing.of(store)
    place = f"{store.location}/{layout.step_name(step.branch, step.step)}"
    attempts.look(store, owner)
    while True:
        try:
            states.publish(step, marker, owner, maker)
            break
        except NotFound as error:
            # Rolled forward or removed by somebody else: the look tells, or it is there already.
            attempts.look(store, owner)
            if _occupant(store, step) != step:
                # For a save this is strange; a roll-forward may have met a slow older attempt.
                gone = StoreFailed if owner == step.attempt else NotFound
                raise gone(f"{place}: vanished while it was being published") from error
            break
        except AlreadyExists:
            occupant = _occupant(store, step)
            if occupant == step:
                break
            if not lineage.may_be_remade(line, owner, occupant):
                attempts.look(store, owner)
                there = (
                    f"{occupant} is there and counts" if occupant else "what is there is damaged"
                )
                raise AlreadyExists(
                    f"{place}: {there}; attempt {owner} must not replace it"
                ) from None
            states.set_aside(step, owner)
    attempts.look(store, owner)


def _occupant(store: Store, step: StepId) -> StepId | None:
    try:
        return publishing.read_marker(store, step.branch, step.step).id
    except (NotFound, Damaged):
        return None

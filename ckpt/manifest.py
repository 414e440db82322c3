"""`manifest.json`: what a committed step consists of, and which decision its attempt had made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt import layout
from ckpt.errors import Damaged, Misuse, NotFound, Unsupported
from ckpt.lineage import Decision, StepId
from ckpt.publishing import read_marker
from ckpt.store import Store, check_key

Json = Any
_NAME_LIMIT = 200


@dataclass(frozen=True)
class ImageRef:
    """An image as the manifest names it; its path is rebuilt from numbers."""

    name: str
    process: int
    size_bytes: int
    header: str


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`, parsed."""

    id: StepId
    parent: StepId | None
    time_ns: int
    images: tuple[ImageRef, ...]
    files: dict[str, tuple[int, str]]
    """Name -> (size in bytes, digest)."""
    data: dict[str, Json]
    metrics: dict[str, float] | None
    extra: Json
    guard: Json
    environment: dict[str, Json]
    payload_bytes: int
    """Bytes of all chunks."""
    decision: Decision | None = None
    """That of the attempt which made the step; None: not told, by a release before the first."""

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Raises Damaged, Unsupported."""
        doc = layout.unseal(data, where)
        step = StepId(*(layout.natural(doc, n, where) for n in ("step", "branch", "attempt")))
        images = []
        for number, entry in enumerate(as_list(doc, "images", where)):
            name = layout.image_name(step.attempt, number)
            if not isinstance(entry, dict) or entry.get("name") != name:
                raise Damaged(f"{where}: image {number}: wanted {name}, found {entry!r}")
            size = layout.natural(entry, "size_bytes", where)
            images.append(ImageRef(name, number, size, layout.hex_digest(entry, "header", where)))
        if not images:
            raise Damaged(f"{where}: 'images': wanted that of each process, found none")
        files: dict[str, tuple[int, str]] = {}
        for name, entry in _dict(doc, "files", where).items():
            files[_file_name(name, where)] = (
                layout.natural(entry, "size_bytes", where),
                layout.hex_digest(entry, "digest", where),
            )
        if layout.TREE not in files:
            raise Damaged(f"{where}: 'files': wanted {layout.TREE} among them, found none")
        return cls(
            step,
            layout.parse_step_id(doc.get("parent"), where),
            layout.natural(doc, "time_ns", where),
            tuple(images),
            files,
            _data(doc, where),
            _metrics(doc, where),
            doc.get("extra"),
            doc.get("guard"),
            _object(doc, "environment", where) or {},
            layout.natural(doc, "bytes", where),
            _decision(doc, where),
        )


def check_ours(store: Store, step: StepId) -> None:
    """Raises Unsupported for a step of Orbax."""
    if not step.attempt:
        raise Unsupported(
            f"{store.location}/{step.step}: written by Orbax, which keeps neither digests nor a "
            "manifest: it can be restored, but not verified; save it once with ckpt to have them"
        )


def read_manifest(store: Store, step: StepId) -> Manifest:
    """The manifest of a committed step, checked against its marker.

    Raises:
        NotFound: no such step.
        Damaged: marker or manifest are not what was written.
        Unsupported: a step of Orbax, which has neither.
    """
    check_ours(store, step)
    prefix = layout.step_name(step.branch, step.step)
    marker = read_marker(store, step.branch, step.step)
    key = f"{prefix}/{layout.MANIFEST}"
    where = f"{store.location}/{key}"
    data = _read_present(store, key)
    found = layout.digest(data)
    if found != marker.manifest:
        raise Damaged(f"{where}: wanted digest {marker.manifest}, found {found}")
    manifest = Manifest.parse(data, where)
    if manifest.id != marker.id:
        raise Damaged(f"{where}: belongs to {manifest.id}, the marker says {marker.id}")
    return manifest


def _read_present(store: Store, key: str) -> bytes:
    """A file without which a committed step is damaged."""
    try:
        return store.read(key)
    except NotFound as error:
        raise Damaged(f"{store.location}/{key}: absent from a committed step") from error


def as_list(doc: dict[str, Json], name: str, where: str) -> Sequence[Json]:
    """A member that must be a list. Raises Damaged."""
    value = doc.get(name)
    if not isinstance(value, list):
        raise Damaged(f"{where}: {name!r}: wanted a list, found {type(value).__name__}")
    return value


def _decision(doc: dict[str, Json], where: str) -> Decision | None:
    told = doc.get("decision")
    if told is None:
        return None
    if not isinstance(told, dict):
        raise Damaged(f"{where}: 'decision': wanted an object, found {type(told).__name__}")
    own = {name: doc.get(name) for name in ("attempt", "branch", "parent")}
    return layout.decision_of({**told, **own}, where)


def _object(doc: dict[str, Json], name: str, where: str) -> dict[str, Json] | None:
    value = doc.get(name)
    if value is not None and not isinstance(value, dict):
        raise Damaged(f"{where}: {name!r}: wanted an object, found {type(value).__name__}")
    return value


def _metrics(doc: dict[str, Json], where: str) -> dict[str, float] | None:
    value = _object(doc, "metrics", where)
    for name, figure in (value or {}).items():
        if isinstance(figure, bool) or not isinstance(figure, int | float):
            raise Damaged(f"{where}: metric {name!r:.80}: wanted a number, found {figure!r:.80}")
    return value


def _data(doc: dict[str, Json], where: str) -> dict[str, Json]:
    """An entry has the state that all processes have in common, or one for each of them."""
    value = _dict(doc, "data", where)
    for name, entry in value.items():
        if "state" not in entry and not (isinstance(entry.get("states"), list) and entry["states"]):
            raise Damaged(f"{where}: data {name!r:.80}: wanted its state, found none")
    return value


def _file_name(name: str, where: str) -> str:
    """A name that stays inside the step, whoever has sealed it."""
    try:
        if len(name) > _NAME_LIMIT:
            raise Misuse(f"a name of {len(name)} characters")
        return check_key(name)
    except Misuse as error:
        raise Damaged(f"{where}: 'files': wanted names of files of the step: {error}") from error


def _dict(doc: dict[str, Json], name: str, where: str) -> dict[str, Json]:
    value = doc.get(name)
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise Damaged(f"{where}: {name!r}: wanted objects by name, found {json.dumps(value)[:80]}")
    return value

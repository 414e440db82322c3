"""One committed step, opened: everything but the chunks, checked along the chain of digests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from ckpt import collector, commit, layout
from ckpt.errors import Damaged, NotFound, Unsupported
from ckpt.image import Header
from ckpt.layout import Part
from ckpt.leaves import LeafSpec, each_from_json
from ckpt.lineage import StepId
from ckpt.publishing import read_marker
from ckpt.store import Store

Json = Any


@dataclass(frozen=True)
class Damage:
    """Something wrong with a file of a step."""

    file: str
    """Name in the store."""
    what: str
    leaf: str = ""
    """Path of the leaf it touches, if it is one."""

    def __str__(self) -> str:
        return f"{self.file}: {f'leaf {self.leaf}: ' if self.leaf else ''}{self.what}"


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

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Raises Damaged, Unsupported."""
        doc = layout.unseal(data, where)
        step = StepId(*(layout.natural(doc, n, where) for n in ("step", "branch", "attempt")))
        images = []
        for number, entry in enumerate(_list(doc, "images", where)):
            name = layout.image_name(step.attempt, number)
            if not isinstance(entry, dict) or entry.get("name") != name:
                raise Damaged(f"{where}: image {number}: wanted {name}, found {entry!r}")
            size = layout.natural(entry, "size_bytes", where)
            images.append(ImageRef(name, number, size, layout.hex_digest(entry, "header", where)))
        files = {}
        for name, entry in _dict(doc, "files", where).items():
            files[name] = (
                layout.natural(entry, "size_bytes", where),
                layout.hex_digest(entry, "digest", where),
            )
        return cls(
            step,
            layout.parse_step_id(doc.get("parent"), where),
            layout.natural(doc, "time_ns", where),
            tuple(images),
            files,
            _dict(doc, "data", where),
            doc.get("metrics"),
            doc.get("extra"),
            doc.get("guard"),
            doc.get("environment") or {},
            layout.natural(doc, "bytes", where),
        )


@final
@dataclass(frozen=True)
class OpenStep:
    """A step whose small files were read; `damage` lists what is wrong with files that a restore
    by us does not need (but Orbax may)."""

    store: Store
    prefix: str
    manifest: Manifest
    structure: Json
    leaves: tuple[LeafSpec, ...]
    leaf_digests: dict[str, str]
    """By leaf name; absent for leaves held in the record."""
    headers: tuple[Header, ...]
    damage: tuple[Damage, ...]

    @property
    def id(self) -> StepId:
        return self.manifest.id

    @property
    def hidden_from_orbax(self) -> list[str]:
        """Leaves that Orbax will not see."""
        return [leaf.name for leaf in self.leaves if not leaf.orbax]


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


def open_step(store: Store, step: StepId) -> OpenStep:
    """Read and check everything of a step but its chunks.

    Raises:
        NotFound: no such step.
        Damaged: a file that a restore needs is not what was written; all of them are named.
    """
    with collector.waiting():
        return _open_step(store, step)


def _open_step(store: Store, step: StepId) -> OpenStep:
    prefix = layout.step_name(step.branch, step.step)
    manifest = read_manifest(store, step)
    damage = check_files(store, prefix, manifest)
    # A part only vouches for its image until the manifest does; the others are for Orbax.
    needed = f"{prefix}/{layout.TREE}"
    fatal = [each for each in damage if each.file == needed]
    headers = []
    for image in manifest.images:
        try:
            headers.append(_header(store, prefix, manifest, image))
        except (Damaged, NotFound) as error:
            fatal.append(Damage(f"{prefix}/{image.name}", str(error)))
    if fatal:
        raise Damaged(
            f"{store.location}/{prefix}: {step} is damaged:"
            + "".join(f"\n  {each}" for each in fatal)
        )
    where = f"{store.location}/{needed}"
    tree = layout.unseal(store.read(needed), where)
    entries = [entry if isinstance(entry, dict) else {} for entry in _list(tree, "leaves", where)]
    plain = ({k: v for k, v in entry.items() if k != "digest"} for entry in entries)
    leaves = tuple(each_from_json(plain))
    digests = {
        leaf.name: str(entry["digest"])
        for leaf, entry in zip(leaves, entries, strict=True)
        if entry.get("digest") is not None
    }
    return OpenStep(
        store,
        prefix,
        manifest,
        tree.get("structure"),
        leaves,
        digests,
        tuple(headers),
        tuple(each for each in damage if each not in fatal),
    )


def check_files(store: Store, prefix: str, manifest: Manifest) -> list[Damage]:
    """Size and digest of every small file that the manifest names."""
    damage = []
    keys = [f"{prefix}/{name}" for name in manifest.files]
    wanted = manifest.files.values()
    for key, (size, digest), data in zip(keys, wanted, store.read_many(keys), strict=True):
        if isinstance(data, NotFound):
            damage.append(Damage(key, "absent"))
        elif isinstance(data, Damaged):
            damage.append(Damage(key, str(data)))
        elif len(data) != size:
            damage.append(Damage(key, f"wanted {size} bytes, found {len(data)}"))
        elif (found := layout.digest(data)) != digest:
            damage.append(Damage(key, f"wanted digest {digest}, found {found}"))
    return damage


def _header(store: Store, prefix: str, manifest: Manifest, image: ImageRef) -> Header:
    step = manifest.id
    part = Part(
        step.step,
        step.attempt,
        image.process,
        len(manifest.images),
        image.size_bytes,
        image.header,
    )
    return commit.read_header(store, prefix, part)


def check_leaf_digests(step: OpenStep) -> list[Damage]:
    """The chunk tables give the leaf digests that the tree record has."""
    found = commit.leaf_digests(step.headers)
    key = f"{step.prefix}/{layout.TREE}"
    return [
        Damage(key, f"wanted digest {wanted}, the chunk tables give {found.get(leaf.param)}", name)
        for leaf in step.leaves
        for name, wanted in [(leaf.name, step.leaf_digests.get(leaf.name))]
        if leaf.storage_dtype is not None and found.get(leaf.param) != wanted
    ]


def _read_present(store: Store, key: str) -> bytes:
    """A file without which a committed step is damaged."""
    try:
        return store.read(key)
    except NotFound as error:
        raise Damaged(f"{store.location}/{key}: absent from a committed step") from error


def _list(doc: dict[str, Json], name: str, where: str) -> Sequence[Json]:
    value = doc.get(name)
    if not isinstance(value, list):
        raise Damaged(f"{where}: {name!r}: wanted a list, found {type(value).__name__}")
    return value


def _dict(doc: dict[str, Json], name: str, where: str) -> dict[str, Json]:
    value = doc.get(name)
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        raise Damaged(f"{where}: {name!r}: wanted objects by name, found {json.dumps(value)[:80]}")
    return value

"""One committed step, opened: everything but the chunks, checked along the chain of digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from ckpt import collector, commit, layout, records
from ckpt.errors import Damaged, NotFound
from ckpt.image import Header
from ckpt.layout import Part
from ckpt.leaves import LeafSpec, each_from_json, must_be_distinct
from ckpt.lineage import StepId
from ckpt.manifest import ImageRef, Manifest, as_list, check_ours, read_manifest
from ckpt.store import Store

__all__ = [
    "Damage",
    "ImageRef",
    "Manifest",
    "OpenStep",
    "check_files",
    "check_leaf_digests",
    "check_ours",
    "open_step",
    "read_manifest",
]

Json = Any


@dataclass(frozen=True)
class Damage:
    """Something wrong with a file of a step."""

    file: str
    """Name in the store."""
    what: str
    leaf: str = ""
    """Path of the leaf it touches, if it is one."""

    @classmethod
    def by(cls, store: Store, file: str, error: Exception | str, leaf: str = "") -> Damage:
        """What an error tells, which may begin with the path of the file."""
        text = str(error)
        for place in (f"{store.location}/{file}", file):
            text = text.removeprefix(f"{place}: ").removeprefix(f"{place}/")
        return cls(file, text, leaf)

    def __str__(self) -> str:
        return f"{self.file}: {f'leaf {self.leaf}: ' if self.leaf else ''}{self.what}"


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
    records.must_be_of_this_run(store, manifest)
    damage = check_files(store, prefix, manifest)
    # A part only vouches for its image until the manifest does; the others are for Orbax.
    needed = f"{prefix}/{layout.TREE}"
    fatal = [each for each in damage if each.file == needed]
    headers = []
    for image in manifest.images:
        try:
            headers.append(_header(store, prefix, manifest, image))
        except (Damaged, NotFound) as error:
            fatal.append(Damage.by(store, f"{prefix}/{image.name}", error))
    if fatal:
        raise Damaged(
            f"{store.location}/{prefix}: not what was saved:"
            + "".join(f"\n  {each}" for each in fatal)
        )
    where = f"{store.location}/{needed}"
    data = store.read(needed)
    if layout.digest(data) != manifest.files[layout.TREE][1]:
        raise Damaged(f"{where}: changed while it was read")
    tree = layout.unseal(data, where)
    entries = [entry if isinstance(entry, dict) else {} for entry in as_list(tree, "leaves", where)]
    plain = ({k: v for k, v in entry.items() if k != "digest"} for entry in entries)
    leaves = tuple(each_from_json(plain))
    must_be_distinct(leaves)
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
            damage.append(Damage.by(store, key, data))
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

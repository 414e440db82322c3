"""Names and small documents of a run's root; FORMAT.md section 1 has the map.

Parsing treats every byte as hostile: names are rebuilt from numbers, never taken from a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from ckpt.errors import Damaged, Unsupported
from ckpt.lineage import KINDS, Claim, Decision, Remain, StepId
from ckpt.wording import counted

FORMAT = 1

MARKER = "commit_success.txt"
MANIFEST = "manifest.json"
TREE = "tree.json"
ORBAX_STEP = "_CHECKPOINT_METADATA"
ORBAX_V1 = "orbax.checkpoint"
ITEM = "state"
ATTEMPTS = "attempts"
PINS = "pins"
LOG = "log"
FLUSH = "flush"
DAMAGED = ".damaged"
"""Ends the name under which a damaged decision is kept when it is written anew."""
MAX_STEP = 10**18 - 1
"""The largest step number: names have up to 18 digits, and longer ones are foreign."""

_SEAL = re.compile(rb',"seal":"([0-9a-f]{32})"}\Z')
# All for `fullmatch`, and ASCII digits only: "7\n" and Arabic digits are foreign names.
_CLAIM = re.compile(r"([1-9][0-9]{0,17})\.json")
_DECISION = re.compile(r"([1-9][0-9]{0,17})\.from\.json")
_BRANCH = re.compile(r"branch-([1-9][0-9]{0,17})")
_STEP = re.compile(r"(0|[1-9][0-9]{0,17})")
_TEMPORARY = re.compile(
    r"(0|[1-9][0-9]{0,17})\.orbax-checkpoint-tmp-a([1-9][0-9]{0,17})(-deleted|-aside)?"
)
_PART = re.compile(r"part-a([1-9]\d{0,17})-p(0|[1-9]\d{0,17})\.json")
_PIN = re.compile(r"(0|[1-9][0-9]{0,17})-(0|[1-9][0-9]{0,17})\.json")

Json = Any


def digest(data: bytes | memoryview) -> str:
    """xxh3-128 in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def seal(document: Mapping[str, Json]) -> bytes:
    """Canonical JSON of an object with its digest as the last member."""
    return close(canonical(document))


def canonical(document: Mapping[str, Json]) -> bytes:
    """The one JSON text of an object; in ASCII, which also holds text that has no encoding."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def close(text: bytes) -> bytes:
    """A canonical text with its digest as the last member."""
    return text[:-1] + b',"seal":"' + digest(text).encode() + b'"}'


def unseal(data: bytes, where: str) -> dict[str, Json]:
    """The object in sealed JSON.

    Raises:
        Damaged: the seal is absent or disagrees, or the text is no JSON object.
        Unsupported: a newer format version.
    """
    found = _SEAL.search(data)
    if found is None:
        raise Damaged(f"{where}: wanted sealed JSON, found {_peek(data)}; the file is damaged")
    text = data[: found.start()] + b"}"
    if digest(text) != found.group(1).decode():
        raise Damaged(f"{where}: its seal does not match its text; the file is damaged")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{where}: sealed, but no JSON ({error})") from error
    if not isinstance(document, dict):
        raise Damaged(f"{where}: wanted a JSON object, found {type(document).__name__}")
    version = document.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise Damaged(f"{where}: wanted a format number, found {version!r}")
    if version > FORMAT:
        raise Unsupported(
            f"{where}: written in format {version}, this release reads up to {FORMAT}; "
            "install a newer release"
        )
    return document


def _peek(data: bytes) -> str:
    return "an empty file" if not data else f"{counted(len(data), 'byte')} beginning {data[:24]!r}"


# --- names -----------------------------------------------------------------------------------


def branch_name(branch: int) -> str:
    """The directory of a branch; the root itself for branch 0."""
    return f"branch-{branch}" if branch else ""


def step_name(branch: int, step: int) -> str:
    """The final name of a step."""
    return f"branch-{branch}/{step}" if branch else str(step)


def making_name(branch: int, step: int, attempt: int) -> str:
    """The name of a step while `attempt` makes it."""
    return f"branch-{branch}/{step}.orbax-checkpoint-tmp-a{attempt}"


def deleted_name(branch: int, step: int, attempt: int) -> str:
    """The name of a step while `attempt` deletes it."""
    return making_name(branch, step, attempt) + "-deleted"


def aside_name(branch: int, step: int, attempt: int) -> str:
    """The name under which `attempt` moves away a step that counts for nothing."""
    return making_name(branch, step, attempt) + "-aside"


def image_name(attempt: int, process: int) -> str:
    """An image, relative to the step."""
    return f"{ITEM}/d/a{attempt}-p{process}.image"


def index_name(attempt: int) -> str:
    """The file of index nodes, relative to the step."""
    return f"{ITEM}/d/a{attempt}.index"


def part_name(attempt: int, process: int) -> str:
    """The receipt of one process, relative to the step."""
    return f"part-a{attempt}-p{process}.json"


def claim_name(attempt: int) -> str:
    return f"{ATTEMPTS}/{attempt}.json"


def decision_name(attempt: int) -> str:
    return f"{ATTEMPTS}/{attempt}.from.json"


def log_name(attempt: int) -> str:
    return f"{LOG}/a{attempt}.jsonl"


def pin_name(step: StepId) -> str:
    return f"{PINS}/{step.branch}-{step.step}.json"


def parse_claim_name(name: str) -> int | None:
    """The attempt number in the name of a claim, or None."""
    found = _CLAIM.fullmatch(name)
    return int(found.group(1)) if found else None


def parse_decision_name(name: str) -> int | None:
    found = _DECISION.fullmatch(name)
    return int(found.group(1)) if found else None


def parse_branch_name(name: str) -> int | None:
    found = _BRANCH.fullmatch(name)
    return int(found.group(1)) if found else None


def parse_step_name(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found.group(1)) if found else None


def parse_full_step_name(name: str) -> tuple[int, int]:
    """(branch, step) of what `step_name` gives."""
    branch, _, step = name.rpartition("/")
    return (parse_branch_name(branch) or 0, int(step))


def parse_part_name(name: str) -> int | None:
    """The attempt number in the name of a part, or None."""
    found = _PART.fullmatch(name)
    return int(found.group(1)) if found else None


def parse_pin_name(name: str) -> tuple[int, int] | None:
    """(branch, step) in the name of a pin, or None."""
    found = _PIN.fullmatch(name)
    return (int(found.group(1)), int(found.group(2))) if found else None


def parse_temporary_name(branch: int, name: str) -> Remain | None:
    """A temporary name of ours, or None for a foreign one."""
    found = _TEMPORARY.fullmatch(name)
    if found is None:
        return None
    states = {None: "making", "-deleted": "deleted", "-aside": "aside"}
    state: Any = states[found.group(3)]
    full = f"{branch_name(branch)}/{name}"
    return Remain(branch, int(found.group(1)), int(found.group(2)), state, full)


# --- documents -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marker:
    """The file whose presence commits a step; holds what listing needs."""

    id: StepId
    manifest: str
    """xxh3-128 (hex) of manifest.json."""

    def emit(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "step": self.id.step,
                "branch": self.id.branch,
                "attempt": self.id.attempt,
                "manifest": self.manifest,
            }
        )

    @classmethod
    def parse(cls, data: bytes, where: str) -> Marker:
        doc = unseal(data, where)
        return cls(
            StepId(
                natural(doc, "step", where),
                natural(doc, "branch", where),
                natural(doc, "attempt", where),
            ),
            hex_digest(doc, "manifest", where),
        )


@dataclass(frozen=True)
class Unpublished:
    """What stands in the place of a marker, where there is no rename, before a step is committed
    and while it is removed."""

    id: StepId
    condemned_by: int | None
    """The attempt that removes the step; None: it is prepared, and will be published."""
    manifest: str | None
    """That of the marker it took the place of; None: the step was not committed."""

    def emit(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "step": self.id.step,
                "branch": self.id.branch,
                "attempt": self.id.attempt,
                "condemned_by": self.condemned_by,
                "manifest": self.manifest,
                "published": False,
            }
        )


def parse_marker(data: bytes, where: str) -> Marker | Unpublished:
    """What stands in the place of a marker. Raises Damaged, Unsupported."""
    doc = unseal(data, where)
    if "published" not in doc:
        return Marker.parse(data, where)
    by, manifest = doc.get("condemned_by"), doc.get("manifest")
    return Unpublished(
        StepId(*(natural(doc, name, where) for name in ("step", "branch", "attempt"))),
        None if by is None else natural(doc, "condemned_by", where),
        None if manifest is None else hex_digest(doc, "manifest", where),
    )


@dataclass(frozen=True)
class Part:
    """The receipt of one process for one step: its image is durable."""

    step: int
    attempt: int
    process: int
    processes: int
    size_bytes: int
    """Size of the image."""
    header: str
    """Digest of the image's header and table, which hold the digest of every chunk."""

    def emit(self) -> bytes:
        return seal(
            {
                "format": FORMAT,
                "step": self.step,
                "attempt": self.attempt,
                "process": self.process,
                "processes": self.processes,
                "image": image_name(self.attempt, self.process),
                "size_bytes": self.size_bytes,
                "header": self.header,
            }
        )

    @classmethod
    def parse(cls, data: bytes, where: str) -> Part:
        doc = unseal(data, where)
        return cls(
            natural(doc, "step", where),
            natural(doc, "attempt", where),
            natural(doc, "process", where),
            natural(doc, "processes", where),
            natural(doc, "size_bytes", where),
            hex_digest(doc, "header", where),
        )


def emit_claim(claim: Claim) -> bytes:
    return seal(
        {
            "format": FORMAT,
            "attempt": claim.attempt,
            "kind": claim.kind,
            "host": claim.host,
            "pid": claim.pid,
            "time_ns": claim.time_ns,
        }
    )


def parse_claim(data: bytes, where: str) -> Claim:
    doc = unseal(data, where)
    return Claim(
        natural(doc, "attempt", where),
        _kind(doc, where),
        str(doc.get("host", "?")),
        natural(doc, "pid", where),
        natural(doc, "time_ns", where),
    )


def emit_decision(decision: Decision) -> bytes:
    return seal(
        {
            "format": FORMAT,
            "attempt": decision.attempt,
            "parent": emit_step_id(decision.parent),
            "branch": decision.branch,
            **decision_members(decision),
        }
    )


def decision_members(decision: Decision) -> dict[str, Json]:
    """What a manifest says of its attempt's decision, beside attempt, branch and parent."""
    return {
        "kind": decision.kind,
        "reason": decision.reason,
        "skips": {k: [list(r) for r in v] for k, v in decision.skips.items()},
        "time_ns": decision.time_ns,
        "guard": decision.guard,
    }


def parse_decision(data: bytes, where: str) -> Decision:
    return decision_of(unseal(data, where), where)


def decision_of(doc: Mapping[str, Json], where: str) -> Decision:
    """The decision with these members. Raises Damaged."""
    return Decision(
        natural(doc, "attempt", where),
        _kind(doc, where),
        parse_step_id(doc.get("parent"), where),
        natural(doc, "branch", where),
        str(doc.get("reason", "")),
        _skips(doc.get("skips"), where),
        natural(doc, "time_ns", where),
        doc.get("guard"),
    )


def emit_step_id(step: StepId | None) -> Json:
    if step is None:
        return None
    return {"step": step.step, "branch": step.branch, "attempt": step.attempt}


def parse_step_id(value: Json, where: str) -> StepId | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise Damaged(f"{where}: wanted a step, found {value!r}")
    return StepId(*(natural(value, name, where) for name in ("step", "branch", "attempt")))


def natural(document: Mapping[str, Json], name: str, where: str) -> int:
    """A member that must be a whole number from 0 to 2^62."""
    value = document.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1 << 62:
        raise Damaged(f"{where}: {name!r}: wanted a whole number, found {value!r}")
    return value


def hex_digest(document: Mapping[str, Json], name: str, where: str) -> str:
    """A member that must be an xxh3-128 in hex."""
    value = document.get(name)
    if not isinstance(value, str) or re.fullmatch("[0-9a-f]{32}", value) is None:
        raise Damaged(f"{where}: {name!r}: wanted 32 hex digits, found {value!r}")
    return value


def _kind(document: Mapping[str, Json], where: str) -> Any:
    value = document.get("kind")
    if value not in KINDS:
        raise Damaged(f"{where}: 'kind': wanted one of {', '.join(KINDS)}, found {value!r}")
    return value


def _skips(value: Json, where: str) -> dict[str, list[tuple[int, int]]]:
    try:
        if not isinstance(value, dict):
            raise TypeError
        return {
            str(name): [(_natural_pair(each)) for each in ranges] for name, ranges in value.items()
        }
    except (TypeError, ValueError) as error:
        raise Damaged(
            f"{where}: 'skips': wanted ranges by iterator name, found {value!r}"
        ) from error


def _natural_pair(value: Json) -> tuple[int, int]:
    start, stop = value
    if not (type(start) is int and type(stop) is int and 0 <= start <= stop):
        raise ValueError(value)
    return start, stop

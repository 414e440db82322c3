"""What an index was made from, so that an index of other data is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from datapipe.sources import sidecar
from formats.errors import Mismatch
from formats.files import Pattern
from formats.source import json_digest

if TYPE_CHECKING:
    from formats.source import Source

_PREFIX: Final = "source."
_READING: Final = ("columns", "fill_null")  # how records are read, not which records they are


@dataclass(frozen=True)
class Origin:
    """The source of an index, and the function that made it.

    source: see `identifying_fields`.
    function: `module:name`; empty if there was none.
    version: of the function.
    """

    source: Mapping[str, str | int]
    function: str = ""
    version: str = ""

    @staticmethod
    def of(source: Source, function: str = "", version: str = "") -> Origin:
        """Asks the source for its fingerprint."""
        return Origin(identifying_fields(source.fingerprint()), function, version)

    def to_json(self) -> dict[str, str | int]:
        """For the header of a sidecar."""
        fields = {_PREFIX + name: value for name, value in self.source.items()}
        return {**fields, "function": self.function, "version": self.version}

    @staticmethod
    def from_json(about: Mapping[str, Any], path: Pattern) -> Origin:
        """Raises Damaged: a field is missing."""
        fields = {
            name.removeprefix(_PREFIX): value
            for name, value in about.items()
            if name.startswith(_PREFIX)
        }
        sidecar.text(fields, "digest", path)
        return Origin(
            fields, sidecar.text(about, "function", path), sidecar.text(about, "version", path)
        )

    def require(self, source: Source, path: Pattern) -> None:
        """Raises Mismatch unless it was made from `source`, whichever of its columns are read."""
        wanted = identifying_fields(source.fingerprint())
        if wanted["digest"] != self.source["digest"]:
            made = f", made by {self.function} {self.version}" if self.function else ""
            raise Mismatch(
                f"{os.fspath(path)}{made}, is an index of other data; build it again with "
                "`ckpt data index`",
                [
                    f"{name}: wanted {wanted.get(name)}, found {self.source.get(name)}"
                    for name in sorted({*wanted, *self.source})
                    if wanted.get(name) != self.source.get(name)
                ],
            )


def identifying_fields(fingerprint: Mapping[str, Any]) -> dict[str, str | int]:
    """Which records a fingerprint belongs to: a digest, and fields that show differences."""
    left_out = {"digest", *(_READING if "fill_null" in fingerprint else ())}
    records = {name: value for name, value in fingerprint.items() if name not in left_out}
    files = fingerprint.get("files")
    if not isinstance(files, list):  # not one of ours: its digest stands for all of it
        return {"digest": json_digest(fingerprint)} | _plain(records)
    found = {"digest": json_digest(records), **_plain(records), "files": len(files)}
    sizes = [each.get("bytes") if isinstance(each, Mapping) else None for each in files]
    known = [size for size in sizes if isinstance(size, int)]
    return found | {"bytes": sum(known)} if len(known) == len(files) else found


def _plain(fields: Mapping[str, Any]) -> dict[str, str | int]:
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, str | int) and len(str(value)) <= 80
    }

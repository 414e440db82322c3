"""Growth by appended files: from the fingerprint of a source to those it had before."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from formats.errors import Mismatch
from formats.source import sealed


def leading(fingerprint: Mapping[str, Any], records: int) -> list[dict[str, Any]]:
    """The fingerprints that a source of the leading files alone may have had.

    It had `records` records: files are taken whole, since their digests are. There are several
    candidates where files hold no records, and since names are relative to the fixed part of the
    pattern: fewer files may have had a deeper one, so that the directories that all of them share
    may or may not be in their names.

    Raises: Mismatch where the first `records` records are no whole number of files, or the
    fingerprint does not tell of files and their records.
    """
    files = fingerprint.get("files")
    if not isinstance(files, list) or not all(map(_tells_records, files)):
        raise Mismatch(
            "its fingerprint tells of no files with their records: only a source of files can grow"
        )
    counts = [file["records"] for file in files]
    if sum(counts) != fingerprint.get("records"):
        raise Mismatch(
            f"its files hold {sum(counts)} records, and it has {fingerprint.get('records')}: what "
            "is filtered or packed cannot grow"
        )
    ends = list(itertools.accumulate(counts))
    if records not in ends:
        across = next((n for n, end in enumerate(ends) if end > records), None)
        place = "" if across is None else f" ({files[across]['name']} lies across)"
        raise Mismatch(
            f"its first {records} records are no whole number of files{place}: a file that was "
            "there has changed or is gone, or another one now stands before it"
        )
    found = []
    for number in (number for number, end in enumerate(ends, 1) if end == records):
        some = files[:number]
        for names in _names([file["name"] for file in some]):
            renamed = [file | {"name": name} for file, name in zip(some, names, strict=True)]
            rest = {name: value for name, value in fingerprint.items() if name != "digest"}
            found.append(sealed(rest | {"records": records, "files": renamed}))
    return found


def _tells_records(file: object) -> bool:
    """Whether an entry of a fingerprint has the name of a file and its number of records."""
    if not isinstance(file, Mapping):
        return False
    return isinstance(file.get("name"), str) and isinstance(file.get("records"), int)


def _names(names: list[str]) -> list[list[str]]:
    """The names, and the names without one, two, ... of the leading directories they share."""
    parts = [name.split("/") for name in names]
    shared = 0
    while all(len(each) > shared + 1 and each[shared] == parts[0][shared] for each in parts):
        shared += 1
    return [["/".join(each[depth:]) for each in parts] for depth in range(shared + 1)]

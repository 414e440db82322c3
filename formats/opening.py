"""One way in: a pattern becomes a source."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from formats.arrayrecord import ArrayRecordSource
from formats.errors import Misuse, Unsupported
from formats.files import File, Pattern, find
from formats.parquet import ParquetSource
from formats.source import Source

_SUFFIXES = {
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".parquet": "parquet",
}
_FORMATS = ("array_record", "parquet")


def open_source(
    pattern: Pattern | Sequence[Pattern],
    *,
    columns: Sequence[str] | None = None,
    format: str | None = None,
    fill_null: Mapping[str, Any] | None = None,
) -> Source:
    """Open the files that match `pattern`, one or a list of patterns, paths or URLs, as one source.

    Records are numbered through the files in the order of `formats.files.find`: the matches of a
    pattern sorted by path as plain text. The format follows from the suffix (`.array_record`,
    `.arrayrecord`, `.parquet`, each also with `-00000-of-00010` behind it) unless `format` says
    `array_record` or `parquet`. `columns` and `fill_null` belong to Parquet: see `ParquetSource`.
    Files without records are fine; so is a source without any, which a `Pipeline` then refuses.

    Raises: NotFound when nothing matches, saying what is there; Misuse for mixed formats or
    arguments that do not fit; Unsupported for a format or location that cannot be read; Damaged or
    StoreFailed for a file that cannot be read; Mismatch for differing schemas.
    """
    files = find(pattern)
    name = _format(files) if format is None else format
    if name == "parquet":
        return ParquetSource(files, columns=columns, fill_null=fill_null)
    if name != "array_record":
        close = difflib.get_close_matches(name, _FORMATS, n=1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        raise Misuse(f"format={name!r} is none of {', '.join(_FORMATS)}{guess}")
    if columns is not None or fill_null is not None:
        raise Misuse("ArrayRecord files have no columns: leave out columns= and fill_null=")
    return ArrayRecordSource(files)


def _format(files: Sequence[File]) -> str:
    """The one format that all suffixes name."""
    first: dict[str, str] = {}
    for file in files:
        suffix = posixpath.splitext(re.sub(r"-\d+-of-\d+$", "", file.path))[1]
        if suffix.lower() not in _SUFFIXES:
            raise Unsupported(
                f"{file.path}: its suffix {suffix!r} is none of {', '.join(_SUFFIXES)};"
                " narrow the pattern, or say format="
            )
        first.setdefault(_SUFFIXES[suffix.lower()], file.path)
    if len(first) > 1:
        found = ", ".join(f"{name} ({path})" for name, path in sorted(first.items()))
        raise Misuse(f"the pattern matches files of several formats: {found}; narrow it")
    return next(iter(first))

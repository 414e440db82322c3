"""One way in: a pattern becomes a source."""

from __future__ import annotations

import difflib
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from formats.errors import Misuse, Unsupported
from formats.files import File, Pattern, find
from formats.source import Source

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_SUFFIXES = {
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
    ".arrow": "arrow",
    ".bin": "tokens",
    ".feather": "arrow",
    ".npy": "tokens",
    ".parquet": "parquet",
}
_OPTIONS = {
    "array_record": (),
    "arrow": ("columns", "fill_null"),
    "parquet": ("columns", "fill_null", "cache", "cache_bytes"),
    "tokens": ("window", "stride", "dtype", "header_bytes"),
}
_TITLES = {
    "array_record": "ArrayRecord files have no columns",
    "arrow": "Arrow files are columns, memory-mapped as they are",
    "parquet": "Parquet files are columns",
    "tokens": "token files are one array of integers",
}


def open_source(
    pattern: Pattern | Sequence[Pattern],
    *,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    fill_null: Mapping[str, Any] | None = None,
    cache: Pattern | None = None,
    cache_bytes: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    dtype: DTypeLike | None = None,
    header_bytes: int | None = None,
) -> Source:
    """Open the files that match `pattern`, one or a list of patterns, paths or URLs, as one source.

    Records are numbered through the files in the order of `formats.files.find`: the matches of a
    pattern sorted by path as plain text. The format follows from the suffix, also with
    `-00000-of-00010` behind it, unless `format` says it:

    - `array_record` (`.array_record`, `.arrayrecord`): records of bytes;
    - `parquet` (`.parquet`): rows of columns. `columns`, `fill_null` and `cache_bytes`: see
      `ParquetSource`; `cache`, a local directory, makes any order of rows cheap: see
      `ParquetSource.cached`;
    - `arrow` (`.arrow`, `.feather`): rows of columns, with `columns` and `fill_null` too;
    - `tokens` (`.bin`, `.npy`): windows of `window` tokens. `window`, which has to be given,
      `stride`, `dtype` and `header_bytes`: see `TokenSource`.

    Files without records are fine; so is a source without any, which a `Pipeline` then refuses.

    Raises: NotFound when nothing matches, saying what is there; Misuse for mixed formats or
    arguments that do not fit; Unsupported for a format or location that cannot be read; Damaged or
    StoreFailed for a file that cannot be read; Mismatch for differing schemas.
    """
    files = find(pattern)
    name = _format(files) if format is None else format
    if not isinstance(name, str):
        raise Misuse(f"format={name!r:.80}: wanted one of {', '.join(_OPTIONS)}")
    if name not in _OPTIONS:
        close = difflib.get_close_matches(name, _OPTIONS, n=1)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        raise Misuse(f"format={name!r} is none of {', '.join(_OPTIONS)}{guess}")
    given = {
        "columns": columns,
        "fill_null": fill_null,
        "cache": cache,
        "cache_bytes": cache_bytes,
        "window": window,
        "stride": stride,
        "dtype": dtype,
        "header_bytes": header_bytes,
    }
    options = {key: value for key, value in given.items() if value is not None}
    odd = [f"{key}=" for key in options if key not in _OPTIONS[name]]
    if odd:
        raise Misuse(f"{_TITLES[name]}: leave out {' and '.join(odd)} ({files[0].path})")
    return _open(name, files, options)


def _open(name: str, files: Sequence[File], options: dict[str, Any]) -> Source:
    """Only the reader that is needed is imported."""
    if name == "array_record":
        from formats.arrayrecord import ArrayRecordSource

        return ArrayRecordSource(files)
    if name == "arrow":
        from formats.arrow import ArrowSource

        return ArrowSource(files, **options)
    if name == "tokens":
        from formats.tokens import TokenSource

        if "window" not in options:
            raise Misuse(
                f"{files[0].path}: token files need window=, the tokens in a record, such as"
                " window=2048"
            )
        return TokenSource(files, **options)
    from formats.parquet import ParquetSource

    directory = options.pop("cache", None)
    source = ParquetSource(files, **options)
    return source if directory is None else source.cached(directory)


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

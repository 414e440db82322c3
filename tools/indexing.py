"""What `ckpt data index` does: it asks a function about every record and writes a sidecar."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from datapipe.sources import sidecar
from datapipe.sources.index_building import Progress, kept_by, lengths_by
from datapipe.sources.origin import Origin
from formats import DataError, open_source
from tools.failures import Refusal, kind_of

if TYPE_CHECKING:
    from formats import Source

Kind = Literal["keep", "lengths"]


@dataclass(frozen=True)
class Indexed:
    """An index that was written.

    records: of the source.
    kept: records that are kept; None for an index of lengths.
    tokens: of all documents; None for an index of kept records.
    size_bytes: of the sidecar.
    seconds: for all of it: reading, the function, writing.
    """

    path: str
    kind: Kind
    records: int
    kept: int | None
    tokens: int | None
    function: str
    version: str
    size_bytes: int
    seconds: float


def index(
    patterns: Sequence[str],
    path: str,
    *,
    kind: Kind,
    function: str,
    version: str,
    opening: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Indexed:
    """Write the index that a function makes of a source.

    Args:
      patterns: of the files of the source.
      path: of the sidecar; an index that is there is replaced.
      kind: "keep": the function says whether a record is kept; "lengths": how many tokens it has.
      function: `module:name`; the module is looked for in the current directory, too.
      version: of the function.
      opening: further arguments of `open_source`: the pipeline that is to take the index opens
        its source with the same ones, but for the columns.

    Raises:
      Refusal: something else is at `path`; no such function; what is wrong with the source, the
      function, or the sidecar.
    """
    begun = time.monotonic()
    _must_be_free(path)
    with (
        _told_to_the_shell(),
        _searched(os.getcwd()),
        open_source(list(patterns), **(opening or {})) as source,
    ):
        made = _function(function)
        kept, tokens = _written(
            source, path, kind, made, Origin.of(source, function, version), progress
        )
        return Indexed(
            path=path,
            kind=kind,
            records=len(source),
            kept=kept,
            tokens=tokens,
            function=function,
            version=version,
            size_bytes=os.path.getsize(path),
            seconds=time.monotonic() - begun,
        )


def _written(
    source: Source,
    path: str,
    kind: Kind,
    function: Callable[[Any], Any],
    origin: Origin,
    progress: Progress | None,
) -> tuple[int | None, int | None]:
    """Makes and writes the index; the number of records that are kept, or of tokens."""
    if kind == "keep":
        kept = kept_by(source, function, progress)
        kept.save(path, origin)
        return len(kept), None
    lengths = lengths_by(source, function, progress)
    lengths.save(path, origin)
    return None, int(lengths.tokens.sum(dtype="int64"))


def _must_be_free(path: str) -> None:
    """Refuses to replace anything but an index, before any work is done."""
    if os.path.lexists(path) and not sidecar.is_one(path):
        raise Refusal("AlreadyExists", f"{path} is there and no index; name another file")
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise Refusal("NotFound", f"{path}: there is no directory for it")


_OPTIONS: Final = {
    "columns": "--column",
    "dtype": "--dtype",
    "fill_null": "--fill-null",
    "format": "--format",
    "header_bytes": "--header-bytes",
    "stride": "--stride",
    "window": "--window",
}
"""Arguments of `open_source`, and the options of the command that stand for them."""
_ARGUMENT: Final = re.compile(rf"(?<!\w)({'|'.join(_OPTIONS)})=")
_FILL: Final = re.compile(r"(?<!\w)fill_null=\{'([^']*)': \.\.\.\}")


@contextlib.contextmanager
def _told_to_the_shell() -> Iterator[None]:
    """Turns errors into refusals that name options of the command, not arguments of Python."""
    try:
        yield
    except DataError as error:
        told = _FILL.sub(r"--fill-null '\1=...'", str(error))
        told = _ARGUMENT.sub(lambda found: f"{_OPTIONS[found[1]]}=", told)
        raise Refusal(kind_of(error), told) from error


@contextlib.contextmanager
def _searched(directory: str) -> Iterator[None]:
    """Lets modules be imported from there, also by the function when it is called."""
    before = list(sys.path)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path[:] = before


def _function(name: str) -> Callable[[Any], Any]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        message = f"wanted module:name, such as filters:good, found {name!r}"
        raise Refusal("Misuse", f"--function: {message}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        message = f"{name} cannot be had: {error} (searched the current directory, too)"
        raise Refusal("Misuse", f"--function: {message}") from error
    except Exception as error:
        message = f"{name} cannot be had: {module} fails: {type(error).__name__}: {error}"
        raise Refusal("Misuse", f"--function: {message}") from error
    if not callable(found):
        raise Refusal("Misuse", f"--function: {name} cannot be called, it is {found!r:.80}")
    called: Callable[[Any], Any] = found
    return called

"""Files of a source: patterns to sorted lists of files, and atomic writing.

Local paths are listed by the operating system, URLs through fsspec.
"""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import posixpath
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias, cast

import fsspec

from formats.arguments import checked_path, checked_paths
from formats.errors import DataError, Misuse, NotFound, StoreFailed, Unsupported

Pattern: TypeAlias = "str | os.PathLike[str]"

THREADS = 16
"""Files opened at a time: these threads wait for storage and do not compute."""
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class File:
    """One file of a source.

    path: local path or URL, to open it by.
    name: relative to the fixed part of the pattern, with `/`; what fingerprints hold.
    size_bytes: when it was listed.
    """

    path: str
    name: str
    size_bytes: int

    @property
    def is_url(self) -> bool:
        """Whether it is opened through fsspec."""
        return _is_url(self.path)


def find(patterns: Pattern | Sequence[Pattern]) -> tuple[File, ...]:
    """The files that match, in the order that numbers their records.

    The matches of one pattern are sorted by path, character by character and whatever the locale:
    `part-10` comes before `part-2`, so number files with leading zeros. Of a list, the patterns
    keep their order. `*`, `?`, `[...]` and `**` (any number of directories) are wild, and never
    match a leading dot of a local file; a path that exists is taken literally.

    Raises: NotFound for a pattern that matches nothing, saying what is there instead; Misuse for
    an empty list, what is no path or no list of them, or a file that matches twice; StoreFailed;
    Unsupported for an unknown scheme.
    """
    given = checked_paths("pattern", patterns)
    if not given:
        raise Misuse("no pattern given: an empty list names no files")
    matched: list[tuple[str, int]] = []
    fixed: list[str] = []
    for pattern in given:
        place, matches = _matches(pattern)
        fixed.append(place)
        matched += sorted(matches)
    seen: set[str] = set()
    for path, _ in matched:
        if path in seen:
            raise Misuse(f"{path} matches twice in {given}")
        seen.add(path)
    root = _common(fixed)
    return tuple(File(path, path[len(root) :].lstrip("/"), size) for path, size in matched)


def as_found(files: object) -> tuple[File, ...]:
    """What a reader is given, if it is what `find` returns. Raises: Misuse."""
    if isinstance(files, Sequence) and files and all(isinstance(each, File) for each in files):
        return tuple(files)
    raise Misuse(
        f"files: wanted what formats.files.find(pattern) returns, found {type(files).__name__}"
        f" {files!r:.80}; formats.open_source(pattern) opens paths"
    )


def open_binary(file: File) -> BinaryIO:
    """The bytes of `file`, seekable, opened for reading.

    Raises: NotFound, StoreFailed; both name the file.
    """
    with naming(file.path):
        if file.is_url:
            system, path = _system(file.path)
            return cast(BinaryIO, system.open(path, "rb"))
        return open(file.path, "rb")


@contextlib.contextmanager
def naming(path: str, done: str = "read") -> Iterator[None]:
    """Turn what a file system raises into NotFound or StoreFailed that names `path`."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file") from error
    except PermissionError as error:
        raise StoreFailed(f"{path}: may not be {done} by this user ({error})") from error
    except Exception as error:  # clients of object stores raise types of their own
        raise StoreFailed(f"{path}: cannot be {done} ({type(error).__name__}: {error})") from error


@contextlib.contextmanager
def replacing(path: Pattern, temporary: str | None = None) -> Iterator[str]:
    """A temporary name beside the local `path`, which takes its place once all went well.

    Durable when the block is left; on an error the temporary file goes and `path` is as it was.

    temporary: a name in the same directory, of a file that nobody else writes to; a fresh one
        unless given.

    Raises: NotFound when there is no directory for it; Misuse for what is no name of a file;
    StoreFailed when the file cannot be put in its place.
    """
    target = os.path.abspath(checked_path("path", path))
    if os.path.isdir(target):
        raise Misuse(f"path={target}: wanted the name of a file, found a directory")
    directory, name = os.path.split(target)
    if not os.path.isdir(directory):
        raise NotFound(f"{target} cannot be written: there is no directory {directory}")
    if temporary is None:
        temporary = os.path.join(directory, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with naming(target, "written"):
            _sync(temporary)
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    with naming(target, "written"):
        _sync(directory)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_url(path: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def _system(url: str) -> tuple[Any, str]:
    """The fsspec file system of `url` and the path in it."""
    try:
        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except (ImportError, ValueError) as error:
        scheme = url.split("://")[0]
        raise Unsupported(
            f"{url}: no reader for {scheme}:// is installed ({error});"
            " install the fsspec package for it, or mount or copy the files"
        ) from error


def _matches(pattern: str) -> tuple[str, list[tuple[str, int]]]:
    """The fixed directory of `pattern`, and path and size of each file that matches."""
    if pattern.startswith("file://"):
        pattern = pattern.removeprefix("file://")
    return _remote_matches(pattern) if _is_url(pattern) else _local_matches(pattern)


def _local_matches(pattern: str) -> tuple[str, list[tuple[str, int]]]:
    full = os.path.abspath(pattern)
    if os.path.exists(full):
        place, paths = os.path.dirname(full), [full]
    else:
        place = _fixed_part(full)
        paths = [p for p in glob.glob(full, recursive=True) if not os.path.isdir(p)]
    if not paths or os.path.isdir(paths[0]):
        raise NotFound(_nothing(pattern, full, place, os.path.isdir, os.listdir))
    found = []
    for path in paths:
        with naming(path):
            found.append((path, os.stat(path).st_size))
    return place, found


def _remote_matches(pattern: str) -> tuple[str, list[tuple[str, int]]]:
    system, full = _system(pattern)
    with naming(pattern):
        if system.isfile(full):
            place, infos = posixpath.dirname(full), {full: system.info(full)}
        else:
            place, infos = _fixed_part(full), system.glob(full, detail=True)
        found = [
            (system.unstrip_protocol(path), int(info["size"] or 0))
            for path, info in infos.items()
            if info["type"] == "file"
        ]
        if not found:

            def names(directory: str) -> list[str]:
                listed = system.ls(directory, detail=False)
                return [posixpath.basename(p.rstrip("/")) for p in listed]

            raise NotFound(_nothing(pattern, full, place, system.isdir, names))
        return system.unstrip_protocol(place), found


def _fixed_part(path: str) -> str:
    """The directory above the first wild component of `path`."""
    parts = path.split("/")
    wild = next((i for i, part in enumerate(parts) if _WILD.search(part)), len(parts) - 1)
    return "/".join(parts[:wild]) or "/"


def _common(places: list[str]) -> str:
    """The deepest directory that holds all of `places`."""
    shared = places[0].split("/")
    for place in places[1:]:
        parts = place.split("/")
        same = [a == b for a, b in zip(shared, parts, strict=False)]
        shared = shared[: (*same, False).index(False)]
    return "/".join(shared)


def _nothing(pattern: str, full: str, place: str, is_dir: Any, names: Any) -> str:
    """The message for a pattern without a match: where it looked, what is there, a guess."""
    if is_dir(full):
        there = sorted(names(full))
        return (
            f"{pattern!r} is a directory ({_listed(there)});"
            f" give a pattern for the files in it{_guess(full, '*', there)}"
        )
    wanted = full[len(place) :].lstrip("/").split("/")[0]
    while not is_dir(place) and posixpath.dirname(place) != place:
        place, wanted = posixpath.split(place)
    if not is_dir(place):
        return f"no file matches {pattern!r}: there is no {place}"
    there = sorted(names(place))
    return f"no file matches {pattern!r}: {place} {_holds(there)}{_guess(place, wanted, there)}"


def _holds(there: list[str]) -> str:
    return f"holds {_listed(there)}" if there else "is empty"


def _listed(there: list[str], limit: int = 6) -> str:
    more = f" and {len(there) - limit} more" if len(there) > limit else ""
    return (", ".join(there[:limit]) or "empty") + more


def _guess(place: str, wanted: str, there: list[str]) -> str:
    """`; did you mean ...?`: the closest among the names that are there and their suffixes."""
    suffixes = sorted({"*" + name[name.index(".") :] for name in there if name.find(".") > 0})
    close = difflib.get_close_matches(wanted, [*suffixes, *there], n=1, cutoff=0.6)
    if not close and len(suffixes) == 1:
        close = suffixes
    return f"; did you mean {posixpath.join(place, close[0])!r}?" if close else ""

"""From what was typed to a run or a step; and what was probably meant when there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from ckpt import layout
from ckpt.errors import Misuse, NotFound
from ckpt.resolving import Place, resolve
from ckpt.store import Store, open_store

_LOOKED_AT = 2000
"""Names of a directory that are looked at for a hint; it may be any directory."""


def place_at(location: str) -> Place:
    """The run, or the one step, at a location.

    Raises:
        NotFound: neither; says what lies there, and what was probably meant.
        Damaged, StoreFailed: as `ckpt.resolving.resolve`.
    """
    try:
        return resolve(location)
    except NotFound as error:
        meant = [str(path) for path in nearby(Path(os.path.abspath(location)))]
        if not meant or "://" in location:
            raise
        raise NotFound(f"{error}; did you mean {' or '.join(meant)}?") from error


def run_at(location: str) -> Store:
    """The store of the run at a location.

    Raises:
        Misuse: it is one step of a run. Else as `place_at`.
    """
    store = open_store(location)
    if any(layout.parse_claim_name(entry.name) for entry in store.list(layout.ATTEMPTS)):
        return store  # without listing its steps once more
    place = place_at(location)
    if place.alone:
        raise Misuse(f"{location}: one step of Orbax, in no run; `ckpt inspect` describes it")
    if place.step is not None:
        raise Misuse(f"{location}: one step; wanted its run, {place.store.location}")
    return place.store


def nearby(path: Path) -> list[Path]:
    """Up to three runs or steps that somebody who gave `path` probably meant."""
    for parent in path.parents:
        if _is_run(parent):
            if path.exists():
                return [parent]
            break
    if path.is_dir():
        return list(islice((each for each in _children(path) if _is_run(each)), 3))
    return [each for each in _similar(path) if each.exists()][:3]


def _similar(path: Path) -> Iterator[Path]:
    """Paths that differ from `path` in its first component that is not there."""
    missing = path
    while not missing.parent.exists() and missing.parent != missing:
        missing = missing.parent
    rest = path.relative_to(missing)
    names = [each.name for each in _children(missing.parent) if each.is_dir()]
    number = layout.parse_step_name(missing.name)
    if number is not None:
        steps = [step for name in names if (step := layout.parse_step_name(name)) is not None]
        close = [str(step) for step in sorted(steps, key=lambda step: abs(step - number))]
    else:
        close = get_close_matches(missing.name, names, n=3, cutoff=0.6)
    for name in close:
        yield missing.parent / name / rest


def _is_run(path: Path) -> bool:
    return (path / layout.ATTEMPTS).is_dir()


def _children(path: Path) -> list[Path]:
    try:
        return sorted(islice(path.iterdir(), _LOOKED_AT))
    except OSError:
        return []  # a hint is not worth an error

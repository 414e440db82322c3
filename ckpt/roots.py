"""Is a location a place for a run? Not one inside another run's steps, records or branches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ckpt import attempts, layout, publishing
from ckpt.errors import CheckpointError, Misuse
from ckpt.store import FileStore, Store, open_store


def must_be_a_root(store: Store) -> None:
    """Refuse a root that is, or lies in, a step or a directory of another run; reads only.

    Raises:
        Misuse: it names the root of that run, where there is one.
    """
    for place in _places(store):
        for above, name in _upwards(place):
            if why := _belongs(above, name):
                raise Misuse(f"{store.location}: no root of a run: {why}")
    if isinstance(store, FileStore) and _is_step(store):
        raise Misuse(
            f"{store.location}: no root of a run: it is a step; give the directory of its run, or "
            "ckpt.restore() this step and use another root"
        )


def _places(store: Store) -> list[str]:
    if not isinstance(store, FileStore):
        return [store.location]
    return list(dict.fromkeys((store.location, os.path.realpath(store.location))))


def _upwards(path: str) -> Iterator[tuple[str, str]]:
    """(directory, name in it) of a path and of all above it."""
    while True:
        above, name = os.path.split(path)
        if not above or not name or above.endswith(("://", ":/")):
            return
        yield above, name
        path = above


def _belongs(above: str, name: str) -> str:
    """Why `name` in `above` is part of a run; empty when it is not."""
    branch = layout.parse_branch_name(name)
    if branch is None and name not in (layout.ATTEMPTS, layout.LOG, layout.PINS, layout.FLUSH):
        return ""
    ours = False
    with contextlib.suppress(CheckpointError):  # what cannot be read is nobody's run
        root = open_store(above)
        ours = bool(attempts.list_claims(root))
        if not ours and branch is not None:
            ours = bool(publishing.of(root).list_branch(branch).steps)
    return f"{name} is a directory of the run {above}; give {above}" if ours else ""


def _is_step(store: Store) -> bool:
    with contextlib.suppress(CheckpointError):
        layout.parse_marker(store.read(layout.MARKER), store.location)
        return store.exists(layout.MANIFEST)
    return False

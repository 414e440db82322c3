"""Arenas with something else in place of their files: never opened, waited for, or followed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from arena_slots import OWNER, put
from no_files import KINDS, put_in_the_way, remove

from ckpt.arena import Arena
from ckpt.errors import StoreFailed
from ckpt.owning import remove_stale, stale_arenas


@pytest.mark.parametrize("name", ["slot-0", "slot-7", "lock"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_arena_is_refused_and_left(tmp_path: Path, name: str, kind: str) -> None:
    directory, precious = tmp_path / "arena", tmp_path / "precious"
    directory.mkdir(mode=0o700)
    precious.write_text("x")
    put_in_the_way(directory / name, kind, precious)
    wanted = rf"/{name}: wanted a file of an arena, found a {kind} \(.*; remove it"
    for _ in range(2):
        with pytest.raises(StoreFailed, match=wanted):
            Arena(directory, owner=OWNER)
    assert os.path.lexists(directory / name)
    assert precious.read_text() == "x"
    remove(directory / name, kind)
    Arena(directory, owner=OWNER).close(remove=True)  # the refused one kept no lock


@pytest.mark.parametrize("name", ["slot-0", "lock"])
@pytest.mark.parametrize("kind", KINDS)
def test_whoever_looks_for_what_the_dead_left_goes_on(tmp_path: Path, name: str, kind: str) -> None:
    dead = Arena(tmp_path / "dead", owner=OWNER)
    put(dead, 3).release()
    dead.close(remove=False)
    precious = tmp_path / "precious"
    precious.write_text("x")
    (dead.directory / name).unlink()
    put_in_the_way(dead.directory / name, kind, precious)
    known = 1 if name == "slot-0" else 0
    assert len(stale_arenas(tmp_path)) == known
    assert len(remove_stale(tmp_path, older_than_s=-3600)) == known
    assert precious.read_text() == "x"
    assert os.path.lexists(dead.directory / name) == (not known or kind == "directory")

"""The directory of an arena: it goes with the arena that made it, and a user's own stays."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
from arena_slots import OWNER, put

import ckpt
from ckpt.arena import Arena
from ckpt.errors import InUse
from ckpt.owning import _make_private, remove_stale

STATE = {"w": np.zeros(3)}


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("deaths", [0, 1, 2])
def test_only_what_was_made_is_removed(tmp_path: Path, is_there: bool, deaths: int) -> None:
    """Also by a later owner: those before have died."""
    place = tmp_path / "arena"
    if is_there:
        place.mkdir(mode=0o700)
    for step in range(deaths):
        arena = Arena(place, owner=OWNER)
        put(arena, step).release()
        arena.close(remove=False)
    Arena(place, owner=OWNER).close(remove=True)
    assert place.exists() == is_there
    assert not is_there or not list(place.iterdir())


@pytest.mark.parametrize("is_there", [False, True])
def test_who_frees_what_the_dead_left_does_likewise(tmp_path: Path, is_there: bool) -> None:
    place = tmp_path / "arena"
    if is_there:
        place.mkdir(mode=0o700)
    Arena(place, owner=OWNER).close(remove=False)
    (freed,) = remove_stale(tmp_path, older_than_s=-3600)
    assert freed.directory == place
    assert place.exists() == is_there
    assert not is_there or not list(place.iterdir())


def test_made_by_one_who_was_killed_right_after(tmp_path: Path) -> None:
    place = tmp_path / "arena"
    _make_private(place)
    Arena(place, owner=OWNER).close(remove=True)
    assert not place.exists()


def test_what_lies_above_is_private_too(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b" / "arena"
    Arena(place, owner=OWNER).close(remove=True)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "a", tmp_path / "a" / "b")]
    assert modes == [0o700, 0o700]


def test_two_runs_need_two_directories(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", owner={"run": "runs/a"})
    with pytest.raises(InUse, match=r"manager of another run: .* run runs/a, .* two directories"):
        Arena(tmp_path / "arena", owner={"run": "runs/b"})
    with pytest.raises(InUse, match="another manager of this run in this process"):
        Arena(tmp_path / "arena", owner={"run": "runs/a"})
    arena.close(remove=True)


def test_a_manager_leaves_the_directory_that_was_given(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir(mode=0o700)
    for step in (1, 2):
        with ckpt.CheckpointManager(ckpt.Memory(), tmp_path / "run", arena=place) as m:
            m.resume(like=STATE)
            m.save(step, STATE)
        assert list(place.iterdir()) == []

"""One owner of an arena: other arenas, processes, forks, and a race for a place."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from arena_slots import OWNER, arena, child, forked, plan_of, put, steps

from ckpt.arena import Arena
from ckpt.errors import InUse
from ckpt.owning import remove_stale, stale_arenas

__all__ = ["arena"]  # a fixture

HOLD = """
import sys
from ckpt.arena import Arena
arena = Arena(sys.argv[1], owner={"run": "the other run"})
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_second_arena_is_refused_and_the_owner_named(arena: Arena) -> None:
    with pytest.raises(
        InUse, match=rf"{arena.directory} .* pid {os.getpid()} .* run runs/a, since "
    ):
        Arena(arena.directory, owner=OWNER)
    put(arena, 3)
    assert steps(arena) == {0: 3}, "the refused one did harm"


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    directory = tmp_path / "arena"
    other = child(HOLD, directory)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InUse, match=rf"pid {other.pid} on host \S+, run the other run"):
            Arena(directory, owner=OWNER)
    finally:
        other.kill()
        other.communicate()
    arena = Arena(directory, owner=OWNER)
    assert json.loads((directory / "lock").read_text())["pid"] == os.getpid()
    arena.close(remove=True)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    with forked(tmp_path / "arena", "") as parent:
        with pytest.raises(InUse):
            Arena(tmp_path / "arena", owner=OWNER)
        parent.kill()
        parent.wait()
        Arena(tmp_path / "arena", owner=OWNER).close(remove=True)


def test_a_lock_that_says_nothing_still_refuses(arena: Arena) -> None:
    for text in ("", "[]", '{"pid"'):
        (arena.directory / "lock").write_text(text)
        with pytest.raises(InUse, match=r"pid \? on host \?"):
            Arena(arena.directory, owner=OWNER)


def test_stale_arenas_are_found_and_freed(tmp_path: Path) -> None:
    live = Arena(tmp_path / "x-p0", owner=OWNER)
    dead = Arena(tmp_path / "y-p0", owner={"run": "dead"})
    put(live, 1)
    put(dead, 2)
    dead.close(remove=False)
    (tmp_path / "y-p0" / "notes").write_text("mine")
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o700)
    (foreign / "lock").write_text("{}")
    (foreign / "slot-0").write_text("not an arena")
    for name, age_s in (("early-p0", 3600), ("beginning-p0", 0)):  # killed before it wrote the text
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name / "lock", (time.time() - age_s,) * 2)
    (tmp_path / "link").symlink_to(tmp_path / "y-p0")

    early, found = stale_arenas(tmp_path)
    assert early.directory == tmp_path / "early-p0"
    assert (found.directory, found.owner["run"]) == (tmp_path / "y-p0", "dead")
    assert found.size_bytes >= plan_of(100, 2).size_bytes
    assert found.newest_ns == json.loads((tmp_path / "y-p0" / "lock").read_text())["since_ns"]
    six_hours_ns = int(6 * 3600 * 1e9)

    def removed(age_ns: int) -> list[Path]:
        now_ns = found.newest_ns + age_ns
        return [each.directory for each in remove_stale(tmp_path, now_ns=lambda: now_ns)]

    assert removed(six_hours_ns) == [tmp_path / "early-p0"], "somebody may come back for the other"
    assert remove_stale(tmp_path, keep=tmp_path / "y-p0", older_than_s=0) == []
    assert removed(six_hours_ns + 1) == [tmp_path / "y-p0"]
    assert stale_arenas(tmp_path) == []
    assert [p.name for p in (tmp_path / "y-p0").iterdir()] == ["notes"]
    assert (foreign / "slot-0").exists()
    assert steps(live) == {0: 1}
    live.close(remove=True)


def test_many_racing_for_one_directory(tmp_path: Path) -> None:
    """Whoever gets it is alone, also while others remove the directory under it."""
    inside, seen, refused = [0], [0], [0]
    start = threading.Barrier(6)

    def race() -> None:
        start.wait()
        for _ in range(60):
            try:
                arena = Arena(tmp_path / "arena", owner=OWNER)
            except InUse:
                refused[0] += 1
                continue
            inside[0] += 1
            assert inside[0] == 1
            assert (tmp_path / "arena" / "lock").exists()
            seen[0] += 1
            inside[0] -= 1
            arena.close(remove=True)

    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            race()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert errors == []
    assert seen[0] > 0
    assert not (tmp_path / "arena").exists()

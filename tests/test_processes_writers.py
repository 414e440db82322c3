"""Two processes of one run on one host, each with a writer process, and all kinds of tiers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import process_stage as stage
import pytest
from process_play import Seen, ids, joined, play, same
from process_states import is_gone
from process_writers import (
    LAST_COMMON,
    LAST_LOCAL,
    LAST_SHARED,
    LIMIT_S,
    tiered,
    wait_until,
)

import ckpt
from ckpt import attempts
from ckpt.store import FileStore

Children = list[subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("writers")
    yield place
    shutil.rmtree(place)


def told(place: Path, scene: str, children: Children) -> list[dict[str, Any]]:
    """What both processes say when they are where they are to die."""
    files = [place / f"{scene}.told-{index}" for index in (0, 1)]
    while not all(file.exists() for file in files):
        assert all(each.poll() is None for each in children), "one has ended before its time"
        time.sleep(0.02)
    return [json.loads(file.read_text()) for file in files]


def wait_for_writers(said: list[dict[str, Any]]) -> None:
    for each in said:
        wait_until(lambda pid=each["writer"]: is_gone(pid), "a writer stays")


def kill(children: Children) -> None:
    for each in reversed(children):  # process 0 has the coordination service
        each.kill()


@pytest.fixture(scope="module")
def orphaned(place: Path) -> Path:
    """Both trainers were killed; their writers have done what was left to do."""
    said: list[dict[str, Any]] = []

    def die(children: Children) -> None:
        said.extend(told(place, "orphaned", children))
        kill(children)

    play(place, "orphaned", meanwhile=die)
    wait_for_writers(said)
    return place / "orphaned"


@pytest.fixture(scope="module")
def all_dead(place: Path) -> Path:
    """Trainers and writers were killed at once."""

    def die(children: Children) -> None:
        said = told(place, "all_dead", children)
        for each in said:  # or a writer would see its trainer die, or a trainer its writer
            os.kill(each["writer"], signal.SIGSTOP)
        kill(children)
        for each in said:
            os.kill(each["writer"], signal.SIGKILL)
        wait_for_writers(said)

    play(place, "all_dead", meanwhile=die)
    return place / "all_dead"


@pytest.fixture(scope="module")
def terminated(place: Path) -> Path:
    """SIGTERM came to the groups of two trainers that run no Python; they were killed later."""
    said: list[dict[str, Any]] = []

    def die(children: Children) -> None:
        said.extend(told(place, "terminated", children))
        for each in children:
            os.killpg(each.pid, signal.SIGTERM)
        home = FileStore(place / "terminated")

        def is_there() -> bool:
            return LAST_COMMON in [step.step for step in attempts.list_run(home).counting]

        wait_until(is_there, "nothing was flushed")
        assert [each.poll() for each in children] == [None, None], "nobody but the writers did it"
        assert not any(is_gone(each["writer"]) for each in said)
        kill(children)

    play(place, "terminated", meanwhile=die)
    wait_for_writers(said)
    return place / "terminated"


@pytest.fixture(scope="module")
def seen(place: Path, orphaned: Path, all_dead: Path, terminated: Path) -> Seen:
    """One pair of processes plays what nobody but a writer dies of, and goes on from the dead."""
    with tiered(place / "of_one") as m, stage.pipeline().iterator() as data:
        m.resume(data=data)
        for step in (1, 2):
            next(data)
            m.save(step, stage.state(step), data=data, force=True)
        m.wait_until_finished()
    for run in (orphaned, all_dead):
        for copy in place.glob(f"{run.name}*"):
            if copy.is_dir():
                shutil.copytree(copy, place / f"alone_{copy.name}")
    scenes = ("levels", "writer_killed")
    after = ("levels", "orphaned", "all_dead", "terminated", "of_one")
    found, statuses = play(place, *scenes, *(f"after_{name}" for name in after))
    assert statuses == [0, 0]
    print({scene: round(each[0]["took"], 1) for scene, each in found.items()})
    return found


def steps_at(root: Path) -> list[int]:
    """What counts there; each step was verified."""
    found = ckpt.verify(root)
    assert found.intact, found.damage
    return [step.step for step in attempts.list_run(FileStore(root)).counting]


def is_undisturbed(seen: Seen, scene: str, step: int, steps: list[int]) -> None:
    """Both processes went on from `step`, bit for bit, and saved another one."""
    found = seen[f"after_{scene}"]
    assert same(found, "restored") == step
    assert same(found, "wrong") == []
    assert same(found, "lost") == []
    assert same(found, "tier") == "shared"
    assert same(found, "position") == 16 * step
    assert joined(*(each["coming"] for each in found)) == ids(step, 1)
    assert same(found, "steps") == [*steps, step + 1]


def test_what_is_acknowledged_is_there_for_both(seen: Seen) -> None:
    found = seen["levels"]
    wanted = {
        "memory": [1, 2, 3, 4, 5],
        "local": [2, 4],
        "shared": [4],
    }
    there = same(found, "there")
    assert {tier: [s for s, t, _ in there if t == tier] for tier in wanted} == wanted
    assert all(holders == [0, 1] for _, _, holders in there), there
    assert same(found, "steps") == [4]
    assert joined(*(each["seen"] for each in found)) == ids(0, 5)


def test_the_processes_do_not_meet_in_the_arena(place: Path, seen: Seen) -> None:
    zero, one = seen["levels"]
    assert [Path(each["arena"]) for each in (zero, one)] == [
        place / "levels.arena" / f"p{index}" for index in (0, 1)
    ]
    assert zero["writer"] != one["writer"]
    assert list((place / "levels.arena").iterdir()) == [], "all that is left is their place"


def test_what_was_in_memory_only_is_at_home_after_the_close(seen: Seen) -> None:
    is_undisturbed(seen, "levels", 5, [4, 5])


def test_a_writer_that_is_killed_has_a_successor(place: Path, seen: Seen) -> None:
    zero, one = found = seen["writer_killed"]
    assert [each["restarts"] for each in found] == [0, 1]
    assert [each["is_another"] for each in found] == [False, True]
    assert same([zero, one], "newest") == {"memory": 3, "local": 3, "shared": 3}
    assert same([zero, one], "steps") == [1, 2, 3]
    assert steps_at(place / "writer_killed") == [1, 2, 3]


def test_the_writers_of_killed_trainers_finish_what_both_have(place: Path, seen: Seen) -> None:
    assert steps_at(place / "alone_orphaned") == [LAST_SHARED, LAST_COMMON]
    is_undisturbed(seen, "orphaned", LAST_COMMON, [LAST_SHARED, LAST_COMMON])


def test_without_any_writer_the_next_pair_finds_what_both_have(place: Path, seen: Seen) -> None:
    assert steps_at(place / "alone_all_dead") == [LAST_SHARED]
    is_undisturbed(seen, "all_dead", LAST_COMMON, [LAST_SHARED, LAST_COMMON])


def test_sigterm_brings_home_what_both_have(place: Path, seen: Seen) -> None:
    is_undisturbed(seen, "terminated", LAST_COMMON, [LAST_SHARED, LAST_COMMON])


def test_two_go_on_from_one(seen: Seen) -> None:
    is_undisturbed(seen, "of_one", 2, [1, 2])


@pytest.mark.parametrize(
    ("run", "step"), [("alone_orphaned", LAST_COMMON), ("alone_all_dead", LAST_SHARED)]
)
def test_one_goes_on_from_two(place: Path, seen: Seen, run: str, step: int) -> None:
    """From home: the images of two processes on the host are those of none."""
    assert LAST_SHARED < LAST_LOCAL < LAST_COMMON
    with tiered(place / run) as m, stage.pipeline().iterator() as data:
        restored = m.resume(like=stage.like(), data=data)
        assert (restored.step, restored.report.tier) == (step, "shared")
        assert restored.report.lost == ()
        assert stage.differences(restored.state, step) == []
        assert next(data)["id"].tolist() == ids(step, 1)[0]
        pending = m.save(step + 1, stage.state(step + 1), data=data, force=True)
        assert pending is not None
        pending.wait(timeout=LIMIT_S)
    assert steps_at(place / run)[-1] == step + 1


def test_all_runs_are_intact(place: Path, seen: Seen) -> None:
    for scene in ("levels", "orphaned", "all_dead", "terminated", "of_one"):
        assert steps_at(place / scene)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random(tmp_path: Path, seed: int) -> None:
    """Whoever dies when on the host, no step that was acknowledged in memory is lost."""
    rng = random.Random(seed)
    scene = "at_random"
    files = [tmp_path / f"{scene}.told-{index}" for index in (0, 1)]
    writers: list[int] = []
    acked = 0

    def die(children: Children) -> None:
        said = told(tmp_path, scene, children)
        time.sleep(rng.uniform(0, 1.0))
        pids = [each["writer"] for each in said]
        for writer in rng.choice(([], [0], [1], [0, 1])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[writer], signal.SIGKILL)
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.5))
        for victim in rng.choice(([0, 1], [1, 0])):
            children[victim].kill()

    for number in range(10):
        note = f"seed {seed}, round {number}"
        for file in files:
            file.unlink(missing_ok=True)
        play(tmp_path, scene, meanwhile=die)
        said = [json.loads(file.read_text()) for file in files]
        for each in said:
            assert each["wrong"] == [], note
            assert each["restored"] >= acked, note
            assert each["position"] == 16 * each["restored"], note
        acked = max(each["acked"] for each in said)
        writers += [each["writer"] for each in said]
    wait_for_writers([{"writer": pid} for pid in writers])
    assert steps_at(tmp_path / scene), f"seed {seed}"

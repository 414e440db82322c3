"""One of several processes dies, at many points: who is told, and what the next attempt does."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import process_stage as stage
import pytest
from process_play import headers_of, ids, joined, manager, place, play, same

import ckpt
from ckpt import attempts, commit, layout
from ckpt.store import FileStore

__all__ = ["place"]  # a fixture


@pytest.fixture(scope="module")
def killed(place: Path) -> Iterator[Path]:
    """Copies of runs in which a process was killed; nothing has been cleaned up."""
    _, first = play(place, "killed_before_finishing")
    _, second = play(place, "killed_before_publishing")
    for statuses in (first, second):
        # JAX ends the others when process 0, which holds the coordination service, dies.
        assert statuses == [-signal.SIGKILL, -signal.SIGABRT]
    return place


def test_a_process_that_dies_before_its_part(place: Path, tmp_path: Path) -> None:
    found, statuses = play(place, "killed_before_its_part")
    assert statuses == [0, -signal.SIGKILL]
    [survivor, _] = found["killed_before_its_part"]
    assert survivor["steps"] == [1, 2]
    assert survivor["error"]["type"] == "PeerFailed"
    assert "step 3: process 1 of 2 has not written its part" in survivor["error"]["text"]
    root = place / "killed_before_its_part"
    left = "branch-1/3.orbax-checkpoint-tmp-a1"
    assert (root / left).is_dir()
    assert not (root / "branch-1" / "3").exists()

    two = shutil.copytree(root, tmp_path / "dead_part")
    found, _ = play(tmp_path, "dead_part")
    for each in found["dead_part"]:
        assert each["restored"] == 2
        assert each["wrong"] == []
        assert each["rolled_forward"] == [f"removed {left}"]
        assert each["steps"] == [1, 2, 5]
    assert joined(*(each["coming"] for each in found["dead_part"])) == ids(2, 3)
    assert attempts.list_run(FileStore(two)).remains == ()
    assert ckpt.verify(two).intact

    one = shutil.copytree(root, tmp_path / "alone")
    with manager(one) as m, stage.pipeline().iterator() as data:
        restored = m.resume(like=stage.like(), data=data)
        assert restored.step == 2
        assert restored.report.rolled_forward == (f"removed {left}",)
        assert stage.differences(restored.state, 2) == []
        assert next(data)["id"].tolist() == ids(2, 1)[0]
        m.save(3, stage.state(3), data=data).wait()
    assert ckpt.verify(one).intact
    assert [path.name for path in sorted((one / "branch-1").iterdir())] == ["1", "2", "3"]


def test_a_process_that_dies_while_it_restores(place: Path) -> None:
    found, statuses = play(place, "killed_while_restoring")
    assert statuses == [0, -signal.SIGKILL]
    error = found["killed_while_restoring"][0]["error"]
    assert error["type"] == "PeerFailed"
    assert "process 1 of 2 was not heard of within 2 s" in error["text"]
    with manager(place / "killed_while_restoring") as m:
        restored = m.resume(like=stage.like())
        assert stage.differences(restored.state, 1) == []


@pytest.mark.parametrize("scene", ["killed_before_finishing", "killed_before_publishing"])
def test_a_step_with_all_its_parts_is_rolled_forward(
    killed: Path, tmp_path: Path, scene: str
) -> None:
    root = shutil.copytree(killed / scene, tmp_path / "run")
    left = root / "branch-1" / "3.orbax-checkpoint-tmp-a1"
    assert sorted(path.name for path in left.iterdir() if path.name.startswith("part"))
    assert (left / layout.MANIFEST).exists() == (scene == "killed_before_publishing")
    with manager(root) as m, stage.pipeline().iterator() as data:
        restored = m.resume(like=stage.like(), data=data)
        assert restored.report.rolled_forward == ("published step 3 (branch 1, attempt 1)",)
        assert restored.step == 3
        assert stage.differences(restored.state, 3) == []
        assert next(data)["id"].tolist() == ids(3, 1)[0]
    assert ckpt.verify(root).intact
    # What was finished later has the bytes that an undisturbed commit has.
    for number in (2, 3):
        name, headers = headers_of(root, number)
        wanted = commit.step_files(headers)
        for key, data in wanted.items():
            assert (root / name / key).read_bytes() == data, f"step {number}: {key}"
        small = {key for key, _ in FileStore(root).walk(name) if not key.endswith(".image")}
        parts = {layout.part_name(1, process) for process in (0, 1)}
        assert small == {f"{name}/{key}" for key in (*wanted, *parts)}


def test_two_processes_roll_forward(killed: Path, tmp_path: Path) -> None:
    scenes = ("killed_before_finishing", "killed_before_publishing")
    for scene in scenes:
        shutil.copytree(killed / scene, tmp_path / f"after_{scene}")
    found, _ = play(tmp_path, *(f"after_{scene}" for scene in scenes))
    for each in found.values():
        assert same(each, "restored") == 3
        assert same(each, "wrong") == []
        assert same(each, "rolled_forward") == ["published step 3 (branch 1, attempt 1)"]
        assert same(each, "steps") == [1, 2, 3, 6]
        assert joined(*(host["coming"] for host in each)) == ids(3, 3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random(tmp_path: Path, seed: int) -> None:
    """Whoever is killed when, the next pair goes on from the newest step that was acknowledged."""
    rng = random.Random(seed)
    scene = "killed_at_random"

    def kill(children: list[subprocess.Popen[bytes]]) -> None:
        began = [tmp_path / f"{scene}.began-{index}" for index in (0, 1)]
        early = rng.random() < 0.3
        while not early and not all(file.exists() for file in began):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 2.5 if early else 1.0))
        for victim in rng.choice(([0], [1], [0, 1], [1, 0])):
            children[victim].kill()

    for number in range(12):
        note = f"seed {seed}, round {number}"
        for file in tmp_path.glob(f"{scene}*.*"):
            if not file.is_dir() and "told" not in file.name:
                file.unlink()
        told = [int(file.read_text() or 0) for file in tmp_path.glob(f"{scene}.told-*")]
        play(tmp_path, scene, meanwhile=kill)
        for file in tmp_path.glob(f"{scene}.began-*"):
            found = json.loads(file.read_text())
            assert found["wrong"] == [], note
            assert found["restored"] >= max(told, default=0), note
            assert found["position"] == 16 * found["restored"], note
    with manager(tmp_path / scene) as m, stage.pipeline().iterator() as data:
        restored = m.resume(like=stage.like(), data=data)
        assert stage.differences(restored.state, restored.step) == [], f"seed {seed}"
        assert m.all_steps() == list(range(1, restored.step + 1)), f"seed {seed}"
    assert ckpt.verify(tmp_path / scene).intact, f"seed {seed}"


def test_children_end_by_themselves(killed: Path) -> None:
    """No arena of a killed child lies where others look for their own."""
    arenas = [path for path in killed.rglob("*.arena-*") if path.is_dir()]
    assert arenas  # on disk, beside the run: they are gone with the directory
    assert os.path.commonpath([killed, *arenas]) == str(killed)

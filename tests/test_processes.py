"""Several processes of one run, under `jax.distributed` on CPU: real children, real kills."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import process_child as child
import pytest

import ckpt
from ckpt import attempts, commit, layout
from ckpt.processes import Alone, Matter, Processes
from ckpt.store import FileStore

HERE = Path(__file__).parent
Seen = dict[str, list[dict[str, Any]]]
"""What each process saw of a scene."""


def play(
    directory: Path,
    *scenes: str,
    count: int = 2,
    meanwhile: Callable[[list[subprocess.Popen[bytes]]], None] | None = None,
) -> tuple[Seen, list[int]]:
    """Runs the scenes in `count` processes; what they saw, and the exit statuses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={child.DEVICES // count}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    logs = [directory / f"{scenes[0]}.{index}.log" for index in range(count)]
    with contextlib.ExitStack() as stack:
        children: list[subprocess.Popen[bytes]] = []
        for index, log in enumerate(logs):
            words = [str(index), str(count), str(port), str(directory), *scenes]
            process = subprocess.Popen(
                [sys.executable, str(HERE / "process_child.py"), *words],
                env=environment,
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            children.append(process)
        if meanwhile is not None:
            meanwhile(children)
        statuses = [process.wait(timeout=150) for process in children]
    seen: Seen = {}
    for scene in scenes:
        files = [directory / f"{scene}.{index}.json" for index in range(count)]
        seen[scene] = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        for index, each in enumerate(seen[scene]):
            assert "raised" not in each, f"{scene}, process {index}: {each['raised']}"
    if any(status not in (0, -signal.SIGKILL, -signal.SIGABRT) for status in statuses):
        raise AssertionError(f"{statuses}: {[log.read_text()[-3000:] for log in logs]}")
    return seen, statuses


TOGETHER = (
    "save_and_resume",
    "rewind",
    "damaged_for_one",
    "unsupported_for_one",
    "store_fails_for_one",
    "late_part",
    "mismatch_for_one",
    "other_data_for_one",
    "unreadable_for_one",
    "user_error_in_one",
    "little",
    "elsewhere",
    "guarded",
    "preempted_in_one",
    "own_states",
    "iterators_of_one",
    "other_trees",
    "late_call",
    "other_calls",
    "two_runs",
    "superseded",
    "default_place",
    "board",
    "from_one",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("processes")
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def seen(place: Path) -> Seen:
    """One pair of processes plays everything that nobody dies of."""
    with manager(place / "from_one") as m, child.pipeline().iterator() as data:
        m.resume(data=data)
        for step in (1, 2):
            next(data)
            m.save(step, child.state(step), data=data)
        m.wait_until_finished()
    found, statuses = play(place, *TOGETHER)
    assert statuses == [0, 0]
    print({scene: round(each[0]["took"], 1) for scene, each in found.items()})
    return found


def manager(root: Path, **options: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(
        ckpt.Shared(root, **options), arena=root.with_name(f"{root.name}.arena")
    )


@contextlib.contextmanager
def batches(first: int) -> Iterator[Any]:
    """The single-process iterator, standing at batch `first`."""
    with child.pipeline().iterator() as data:
        for _ in range(first):
            next(data)
        yield data


def ids(first: int, count: int) -> list[list[int]]:
    """Batches as a single process has them."""
    with batches(first) as data:
        return [next(data)["id"].tolist() for _ in range(count)]


def joined(*hosts: list[dict[str, list[int]]]) -> list[list[int]]:
    """The batches of which each host had some rows; all of them together, no row twice."""
    found = []
    for parts in zip(*hosts, strict=True):
        rows = {int(start): rows for part in parts for start, rows in part.items()}
        assert len(rows) == sum(map(len, parts)) == child.DEVICES
        found.append([row for start in sorted(rows) for row in rows[start]])
    return found


def same(found: list[dict[str, Any]], *names: str) -> Any:
    """What both processes saw alike."""
    for name in names or found[0]:
        assert found[0][name] == found[1][name], name
    return found[0][names[0]] if names else found[0]


def headers_of(root: Path, number: int) -> tuple[str, list[Any]]:
    store = FileStore(root)
    step = next(step for step in attempts.list_run(store).counting if step.step == number)
    name = layout.step_name(step.branch, step.step)
    return name, commit.read_headers(store, name, step.attempt)


# --- saving and restoring -------------------------------------------------------------------------


def test_two_processes_save_and_resume(place: Path, seen: Seen) -> None:
    found = seen["save_and_resume"]
    assert same(found, "fresh")
    assert same(found, "said")[:2] == [0, 0]  # what was said of a step goes when the next is saved
    assert same(found, "said")[2] > 0
    assert same(found, "restored") == 3
    assert same(found, "extra") == {"at": 3}
    assert same(found, "metrics") == {"loss": 3.0}
    assert same(found, "wrong") == []
    assert same(found, "steps") == [1, 2, 3, 6]
    assert same(found, "position", "restored_position")["next_example"] == 48
    assert found[0]["position"] == found[0]["restored_position"]
    assert joined(*(each["seen"] for each in found)) == ids(0, 3)
    assert joined(*(each["coming"] for each in found)) == ids(3, 3)


def test_one_process_goes_on_from_two(place: Path, seen: Seen, tmp_path: Path) -> None:
    root = shutil.copytree(place / "save_and_resume", tmp_path / "run")
    for turned in (False, True):
        restored = ckpt.restore(root, like=child.like(turned=turned))
        assert child.differences(restored.state, 6, turned=turned) == []
    with manager(root) as m, child.pipeline().iterator() as data:
        restored = m.resume(like=child.like(), data=data)
        assert restored.step == 6
        assert child.differences(restored.state, 6) == []
        assert [next(data)["id"].tolist() for _ in range(4)] == ids(6, 4)


def test_two_processes_go_on_from_one(seen: Seen) -> None:
    found = seen["from_one"]
    assert same(found, "restored") == 2
    assert same(found, "wrong") == []
    assert joined(*(each["coming"] for each in found)) == ids(2, 3)


def test_without_a_template_the_host_has_everything(place: Path, seen: Seen) -> None:
    state = ckpt.restore(place / "save_and_resume", step=3).state
    for name, value in child.wanted(3).items():
        leaf = child.jax.random.key_data(state[name]) if name.startswith("key") else state[name]
        assert np.asarray(leaf).tobytes() == value.tobytes(), name
    assert state["static"] == child.HOST_VALUES


def test_each_chunk_is_written_once_in_the_run(place: Path, seen: Seen) -> None:
    for number in (1, 2, 3):
        _, headers = headers_of(place / "save_and_resume", number)
        assert len(headers) == 2
        chunks: dict[tuple[Any, ...], int] = {}
        nbytes = 0
        for header in headers:
            columns = header.columns
            for row, array in enumerate(columns.array.tolist()):
                cell = (header.arrays[array].param, *columns.grid[row].tolist())
                chunks[cell] = chunks.get(cell, 0) + 1
            nbytes += int(columns.nbytes.sum())
        assert set(chunks.values()) == {1}
        scalars = 8 + 1 + 8  # lr, on, step
        arrays = sum(value.nbytes for value in child.wanted(number).values())
        assert nbytes == arrays + scalars
        assert all(len(header.columns.array) > 4 for header in headers)  # both had some to write


def test_verify_finds_nothing(place: Path, seen: Seen) -> None:
    for scene in ("save_and_resume", "rewind", "from_one", "store_fails_for_one", "other_calls"):
        found = ckpt.verify(place / scene)
        assert found.intact, found.damage
        assert found.steps


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
def test_orbax_opens_what_two_processes_saved(place: Path, seen: Seen) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(place / "save_and_resume" / "branch-1") as theirs:
        assert theirs.all_steps() == [1, 2, 3, 6]
        found = theirs.restore(3)["state"]
    values = child.wanted(3)
    for name in ("rows", "columns", "both", "half", "replicated", "one", "host"):
        assert np.asarray(found[name]).tobytes() == values[name].tobytes(), name


def test_a_run_with_retention_and_rewinds(place: Path, seen: Seen) -> None:
    found = seen["rewind"]
    decisions, steps = same(found, "decisions"), same(found, "steps")
    assert len(decisions) == 4
    assert "'rewind'" in decisions[2][0]
    assert "spike" in decisions[2][0]
    assert steps == [[4, 6, 7], [4, 8, 9], [4, 6, 7], [4, 7, 8]]
    assert same(found, "wrong") == []
    positions = same(found, "positions")
    # Steps 7 and 8 had used batches 6 and 7.
    assert [each["skips"] for each in positions] == [[], [], [[96, 128]], [[96, 128]]]
    order = ids(0, 12)
    wanted = order[:9] + order[4:6] + order[8:10]
    assert joined(*(each["seen"] for each in found)) == wanted
    with manager(place / "rewind") as m, child.pipeline().iterator() as data:
        assert m.resume(like=child.like(), data=data).step == 8
        assert next(data)["id"].tolist() == order[10]


# --- one process has trouble ----------------------------------------------------------------------


def test_a_step_that_is_damaged_for_one_is_damaged_for_all(seen: Seen) -> None:
    found = seen["damaged_for_one"]
    assert same(found, "restored") == 2
    assert same(found, "same")
    [[step, reason]] = same(found, "lost")
    assert step == 3
    assert "process 1: Damaged: " in reason
    assert "rows" in reason
    assert "process 0" not in reason
    assert same(found, "position") == 32
    assert "'fallback'" in same(found, "decision")
    # The same without a manager, since the template lies on devices of both.
    assert same(found, "looked") == [2, [[step, reason]]]
    for each in found:
        assert each["by_path"]["type"] == "Damaged"
        assert "process 1: Damaged: " in each["by_path"]["text"]


def test_a_leaf_that_cannot_be_saved_is_told_at_once(seen: Seen) -> None:
    zero, one = seen["unsupported_for_one"]
    assert one["save"]["type"] == "Unsupported"
    assert zero["save"] is None
    assert zero["wait"]["type"] == "PeerFailed"
    assert "process 1 failed: Unsupported: " in zero["wait"]["text"]
    assert "host" in zero["wait"]["text"]
    assert same([zero, one], "steps") == [1, 3]


def test_a_failed_write_on_one_host_costs_one_step(seen: Seen) -> None:
    found = seen["store_fails_for_one"]
    assert same(found, "steps") == [1, 3, 4, 5, 6]
    zero, one = ([(e["type"], e["text"]) for e in each["errors"]] for each in found)
    assert [kind for kind, _ in one] == ["StoreFailed"]
    [(kind, text)] = zero
    assert kind == "PeerFailed"
    assert "process 1 failed: StoreFailed" in text
    assert "disk on fire" in text


def test_a_part_that_comes_too_late(seen: Seen) -> None:
    found = seen["late_part"]
    zero, one = (each["error"] for each in found)
    assert zero["type"] == one["type"] == "PeerFailed"
    assert "step 2: process 1 of 2 has not written its part within 1 s" in zero["text"]
    assert one["text"] == zero["text"]
    assert same(found, "steps") == [1, 3]
    assert same(found, "unfinished") == 1
    assert same(found, "done") == ["removed branch-1/2.orbax-checkpoint-tmp-a1"]


def test_a_template_that_differs_on_one_process(seen: Seen) -> None:
    found = seen["mismatch_for_one"]
    zero, one = (each["error"] for each in found)
    assert one["type"] == "Mismatch"
    assert zero["type"] == "PeerFailed"
    assert "process 1: Mismatch: " in zero["text"]
    assert "extra" in zero["text"]
    assert same(found, "untouched", "back")
    assert same(found, "restored") == 1
    assert same(found, "wrong") == []


def test_a_pipeline_that_differs_on_one_process(seen: Seen) -> None:
    found = seen["other_data_for_one"]
    zero, one = (each["error"] for each in found)
    assert (zero["type"], one["type"]) == ("PeerFailed", "Mismatch")
    assert "process 1 failed: Mismatch: " in zero["text"]
    assert "seed" in zero["text"]
    assert same(found, "stayed")


def test_a_store_that_one_process_cannot_reach(seen: Seen) -> None:
    found = seen["unreadable_for_one"]
    zero, one = (each["error"] for each in found)
    assert (zero["type"], one["type"]) == ("PeerFailed", "StoreFailed")
    assert "process 1 failed: StoreFailed: " in zero["text"]
    assert "no route to host" in zero["text"]
    assert same(found, "restored") == 1


def test_a_program_that_ends_with_an_error_on_one_process(seen: Seen) -> None:
    zero, one = (each["errors"] for each in seen["user_error_in_one"])
    assert one == []
    for error in zero:
        assert error["type"] == "PeerFailed"
        assert "process 1 takes no part in" in error["text"]
        assert "it raised ZeroDivisionError" in error["text"]


def test_nothing_to_write(place: Path, seen: Seen) -> None:
    assert same(seen["little"], "same") == [True] * 4
    assert ckpt.verify(place / "little").intact


def test_an_array_that_is_on_one_process_only(seen: Seen) -> None:
    zero, one = (each["error"] for each in seen["elsewhere"])
    assert (zero["type"], one["type"]) == ("Unsupported", "PeerFailed")
    assert "away: lies on devices of process 1 only" in zero["text"]
    assert zero["text"] in one["text"]
    assert same(seen["elsewhere"], "steps") == []


def test_a_guard_decides_the_same_everywhere(place: Path, seen: Seen) -> None:
    found = seen["guarded"]
    assert len(same(found, "rewinds")) == 1
    same(found, "decision", "weight")
    assert ckpt.restore(place / "guarded").step == 60
    assert ckpt.verify(place / "guarded").intact


def test_all_stop_at_the_same_step_when_one_is_preempted(seen: Seen) -> None:
    found = seen["preempted_in_one"]
    assert same(found, "preempted")
    assert 7 <= same(found, "step") < 2000
    assert same(found, "steps") == [found[0]["step"]]


def test_iterators_with_a_state_for_each_process(place: Path, seen: Seen) -> None:
    found = seen["own_states"]
    assert [each["at"] for each in found] == [
        {"differing": 10, "equal": 7},
        {"differing": 11, "equal": 7},
    ]
    saved = same(found, "saved")
    assert saved["differing"]["states"] == [{"next_index": 10}, {"next_index": 11}]
    assert saved["equal"]["states"] == [{"next_index": 7}] * 2
    root = place / "own_states"
    for name in ("differing", "equal"):
        wanted = f"'{name}' was saved with a state for each of 2 processes, here are 1"
        data = {name: child.Counter(5)}
        with pytest.raises(ckpt.Mismatch, match=wanted):
            ckpt.restore(root, data=data)
        with manager(root) as m, pytest.raises(ckpt.Mismatch, match=wanted):
            m.resume(data=data)
        assert data[name].at == 5


def test_iterators_that_only_some_processes_give(seen: Seen) -> None:
    found = seen["iterators_of_one"]
    for each in found:
        assert each["saved"]["type"] == "Damaged"
        assert "wanted iterators ['a', 'b'] as in process 0, found ['a']" in each["saved"]["text"]
        assert each["resumed"]["type"] == "Misuse"
        assert "data is ['a', 'b'] in process 0 and ['a'] in process 1" in each["resumed"]["text"]
    assert same(found, "steps") == [1]


def test_trees_that_differ_between_processes(seen: Seen) -> None:
    found = seen["other_trees"]
    for each in found:
        assert each["error"]["type"] == "Damaged"
        assert "array 'host': wanted the same in every image" in each["error"]["text"]
    assert same(found, "steps") == []


def test_a_process_that_calls_too_late(seen: Seen) -> None:
    found = seen["late_call"]
    zero, one = (each["error"] for each in found)
    assert zero["type"] == one["type"] == "PeerFailed"
    assert "process 1 of 2 was not heard of within 0 s" in zero["text"]
    assert one["text"] == zero["text"]
    assert not same(found, "claimed")
    assert same(found, "fresh")


def test_processes_that_make_different_calls(seen: Seen) -> None:
    found = seen["other_calls"]
    for each in found:
        assert each["absent"]["type"] == "NotFound"
        assert each["other"]["type"] == "Misuse"
        assert "'resume' in process 0 and 'restore' in process 1" in each["other"]["text"]
        assert each["gone"]["type"] == "NotFound"
        assert "step 7 is not in the lineage" in each["gone"]["text"]
        assert each["deleted"] is None
        assert each["newest"]["type"] == "Misuse"
    assert same(found, "steps") == [1, 3]
    assert same(found, "attempt") == 2


def test_two_runs_in_one_job(seen: Seen) -> None:
    found = seen["two_runs"]
    assert same(found, "steps") == [[1, 2, 3], [11, 12, 13]]
    assert same(found, "restored") == 3


def test_all_processes_learn_that_the_run_was_taken_over(seen: Seen) -> None:
    for each in seen["superseded"]:
        errors = [each["waited"], *each["later"]]
        assert [error["type"] for error in errors] == ["Superseded"] * 3
        assert "attempt 1 no longer owns the run" in errors[0]["text"]


def test_two_processes_on_one_host_have_two_arenas(seen: Seen) -> None:
    found = seen["default_place"]
    assert same(found, "steps") == [1]
    places = [each["arena"] for each in found]
    assert places[0] != places[1]
    assert not any(Path(place).exists() for place in places)


def test_the_board(seen: Seen) -> None:
    found = seen["board"]
    assert same(found, "large")
    assert same(found, "both") == [True, True]
    assert same(found, "failures") == []
    assert same(found, "forgotten") == [True, 0, True]
    assert same(found, "boards")[0].endswith("-2/x")
    assert found[0]["boards"][1].endswith("-1/x")


# --- one process dies -----------------------------------------------------------------------------


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
    with manager(one) as m, child.pipeline().iterator() as data:
        restored = m.resume(like=child.like(), data=data)
        assert restored.step == 2
        assert restored.report.rolled_forward == (f"removed {left}",)
        assert child.differences(restored.state, 2) == []
        assert next(data)["id"].tolist() == ids(2, 1)[0]
        m.save(3, child.state(3), data=data).wait()
    assert ckpt.verify(one).intact
    assert [path.name for path in sorted((one / "branch-1").iterdir())] == ["1", "2", "3"]


def test_a_process_that_dies_while_it_restores(place: Path) -> None:
    found, statuses = play(place, "killed_while_restoring")
    assert statuses == [0, -signal.SIGKILL]
    error = found["killed_while_restoring"][0]["error"]
    assert error["type"] == "PeerFailed"
    assert "process 1 of 2 was not heard of within 2 s" in error["text"]
    with manager(place / "killed_while_restoring") as m:
        restored = m.resume(like=child.like())
        assert child.differences(restored.state, 1) == []


@pytest.mark.parametrize("scene", ["killed_before_finishing", "killed_before_publishing"])
def test_a_step_with_all_its_parts_is_rolled_forward(
    killed: Path, tmp_path: Path, scene: str
) -> None:
    root = shutil.copytree(killed / scene, tmp_path / "run")
    left = root / "branch-1" / "3.orbax-checkpoint-tmp-a1"
    assert sorted(path.name for path in left.iterdir() if path.name.startswith("part"))
    assert (left / layout.MANIFEST).exists() == (scene == "killed_before_publishing")
    with manager(root) as m, child.pipeline().iterator() as data:
        restored = m.resume(like=child.like(), data=data)
        assert restored.report.rolled_forward == ("published step 3 (branch 1, attempt 1)",)
        assert restored.step == 3
        assert child.differences(restored.state, 3) == []
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
    with manager(tmp_path / scene) as m, child.pipeline().iterator() as data:
        restored = m.resume(like=child.like(), data=data)
        assert child.differences(restored.state, restored.step) == [], f"seed {seed}"
        assert m.all_steps() == list(range(1, restored.step + 1)), f"seed {seed}"
    assert ckpt.verify(tmp_path / scene).intact, f"seed {seed}"


# --- matters, in threads instead of processes -----------------------------------------------------


class Board:
    """What the coordination service does, in memory."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()
        self.questions = 0


class Member(Processes):
    """One of several threads that talk over a board."""

    def __init__(self, board: Board, index: int, count: int) -> None:
        self.board, self.index, self.count = board, index, count

    def put(self, key: str, text: str) -> None:
        with self.board.changed:
            self.board.texts[key] = text
            self.board.changed.notify_all()

    def get(self, key: str, wait_s: float) -> str | None:
        with self.board.changed:
            self.board.questions += 1
            self.board.changed.wait_for(lambda: key in self.board.texts, wait_s)
            return self.board.texts.get(key)

    def below(self, prefix: str) -> dict[str, str]:
        with self.board.changed:
            return {
                key.rsplit("/", 1)[1]: text
                for key, text in self.board.texts.items()
                if key.startswith(f"{prefix}/")
            }

    def remove(self, prefix: str) -> None:
        with self.board.changed:
            for key in [key for key in self.board.texts if key.startswith(f"{prefix}/")]:
                del self.board.texts[key]


def together(act: Any, count: int = 3, timeout_s: float = 30.0) -> list[Any]:
    """What `act(matter)` gives, or raises, in each of several threads."""
    board = Board()
    found: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            with Member(board, index, count).matter("m", timeout_s) as matter:
                found[index] = act(matter)
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_decisions_and_votes_are_the_same_everywhere() -> None:
    def act(matter: Matter) -> Any:
        decided = matter.decide("a", lambda: {"by": matter.index})
        return decided, matter.gather("b", matter.index * 10)

    assert together(act) == [({"by": 0}, [0, 10, 20])] * 3


@pytest.mark.parametrize("kind", ["NotFound", "Damaged", "Misuse", "Superseded", "Mismatch"])
def test_what_process_0_finds_out_is_so_for_all(kind: str) -> None:
    def make() -> None:
        raise getattr(ckpt, kind)("because")

    found = together(lambda matter: matter.decide("a", make))
    assert [type(error).__name__ for error in found] == [kind] * 3
    assert [str(error) for error in found[1:]] == ["process 0: because"] * 2


@pytest.mark.parametrize("error", [ckpt.StoreFailed("because"), KeyError("because")])
def test_what_fails_in_process_0_is_a_failed_peer(error: Exception) -> None:
    def make() -> None:
        raise error

    found = together(lambda matter: matter.decide("a", make))
    assert found[0] is error
    for other in found[1:]:
        assert type(other) is ckpt.PeerFailed
        assert str(other) == f"process 0 failed: {type(error).__name__}: {error}"


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_everybody_hears_the_first_cause(culprit: int) -> None:
    def act(matter: Matter) -> None:
        if matter.index == culprit:
            raise ckpt.StoreFailed("disk on fire")
        try:
            matter.gather("a", 1)
        finally:
            time.sleep(0.2 * matter.index)

    found = together(act)
    assert type(found.pop(culprit)) is ckpt.StoreFailed
    for error in found:
        assert type(error) is ckpt.PeerFailed
        assert str(error) == f"process {culprit} failed: StoreFailed: disk on fire"


def test_a_silent_process_is_named_to_all() -> None:
    def act(matter: Matter) -> Any:
        if matter.index == 1:
            return "elsewhere"
        return matter.gather("a", 1)

    zero, one, two = together(act, timeout_s=0.3)
    assert one == "elsewhere"
    assert type(zero) is type(two) is ckpt.PeerFailed
    assert str(zero) == str(two)
    assert "process 1 of 3 was not heard of" in str(zero)


def test_waiting_asks_seldom() -> None:
    board = Board()
    with pytest.raises(ckpt.PeerFailed, match="process 0 of 2"):
        Member(board, 1, 2).matter("m", 0.5).decide("a", lambda: 1)
    assert board.questions < 8


def test_one_process_needs_no_others() -> None:
    with Alone().matter("m") as matter:
        assert matter.decide("a", lambda: [1]) == [1]
        assert matter.gather("b", 2) == [2]
        matter.check()
        matter.forget()


def test_children_end_by_themselves(killed: Path) -> None:
    """No arena of a killed child lies where others look for their own."""
    arenas = [path for path in killed.rglob("*.arena-*") if path.is_dir()]
    assert arenas  # on disk, beside the run: they are gone with the directory
    assert os.path.commonpath([killed, *arenas]) == str(killed)

"""Several processes of one run, under `jax.distributed` on CPU: real children."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import process_scenes
import process_stage as stage
import process_troubles
import pytest
from process_play import Seen, headers_of, ids, joined, manager, place, play, same

import ckpt

__all__ = ["place"]  # a fixture

TOGETHER = (*process_scenes.SCENES, *process_troubles.SCENES, "from_one")


@pytest.fixture(scope="module")
def seen(place: Path) -> Seen:
    """One pair of processes plays everything that nobody dies of."""
    with manager(place / "from_one") as m, stage.pipeline().iterator() as data:
        m.resume(data=data)
        for step in (1, 2):
            next(data)
            m.save(step, stage.state(step), data=data)
        m.wait_until_finished()
    found, statuses = play(place, *TOGETHER)
    assert statuses == [0, 0]
    print({scene: round(each[0]["took"], 1) for scene, each in found.items()})
    return found


# --- saving and restoring -------------------------------------------------------------------------


def test_two_processes_save_and_resume(place: Path, seen: Seen) -> None:
    found = seen["save_and_resume"]
    assert same(found, "fresh")
    assert same(found, "said") == [0, 0, 0]  # nothing is said of a step that is not said of others
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
        restored = ckpt.restore(root, like=stage.like(turned=turned))
        assert stage.differences(restored.state, 6, turned=turned) == []
    with manager(root) as m, stage.pipeline().iterator() as data:
        restored = m.resume(like=stage.like(), data=data)
        assert restored.step == 6
        assert stage.differences(restored.state, 6) == []
        assert [next(data)["id"].tolist() for _ in range(4)] == ids(6, 4)


def test_two_processes_go_on_from_one(seen: Seen) -> None:
    found = seen["from_one"]
    assert same(found, "restored") == 2
    assert same(found, "wrong") == []
    assert joined(*(each["coming"] for each in found)) == ids(2, 3)


def test_without_a_template_the_host_has_everything(place: Path, seen: Seen) -> None:
    state = ckpt.restore(place / "save_and_resume", step=3).state
    for name, value in stage.wanted(3).items():
        leaf = stage.jax.random.key_data(state[name]) if name.startswith("key") else state[name]
        assert np.asarray(leaf).tobytes() == value.tobytes(), name
    assert state["static"] == stage.HOST_VALUES


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
        arrays = sum(value.nbytes for value in stage.wanted(number).values())
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
    values = stage.wanted(3)
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
    assert [each["skips"] for each in positions] == [[], [], [96, 32], [96, 32]]
    order = ids(0, 12)
    wanted = order[:9] + order[4:6] + order[8:10]
    assert joined(*(each["seen"] for each in found)) == wanted
    with manager(place / "rewind") as m, stage.pipeline().iterator() as data:
        assert m.resume(like=stage.like(), data=data).step == 8
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
    for each in (zero, one):  # the number is spent: one part was written, and the other refused
        assert each["again"]["type"] == "PeerFailed"
        assert each["again"]["text"] == zero["wait"]["text"]
    assert same([zero, one], "steps", "restored") == [1, 3]


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
        data = {name: stage.Counter(5)}
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


def test_the_newest_step_saved_again(seen: Seen) -> None:
    found = seen["saved_again"]
    assert same(found, "same") is None
    zero, one = (each["other"] for each in found)
    assert zero is None  # its own part is the same, and it waits for nobody
    assert one["type"] == "AlreadyExists"
    assert same(found, "steps") == [1, 2]


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
    assert same(found, "attempt") == 3  # an image on a host could have been that of step 7


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


def test_a_step_is_compressed_by_all_processes_or_by_none(place: Path, seen: Seen) -> None:
    found = seen["compressed"]
    assert same(found, "wrong") == []
    assert same(found, "steps") == [1]
    _, headers = headers_of(place / "compressed", 1)
    assert [header.compression for header in headers] == ["zstd", "zstd"]
    assert [each["error"]["type"] for each in found] == ["Damaged", "Damaged"]
    for each in found:
        assert "p1.image is compressed and d/a2-p0.image is not" in each["error"]["text"]


def test_the_board(seen: Seen) -> None:
    found = seen["board"]
    assert same(found, "large")
    assert same(found, "both") == [True, True]
    assert same(found, "failures") == []
    assert same(found, "forgotten") == [True, 0, True]
    assert same(found, "boards")[0].endswith("-2/x")
    assert found[0]["boards"][1].endswith("-1/x")

"""The manager in one process: start, resume, owners, leftovers, and calls of one step."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from managed_run import assert_same, manager, pipeline, root, save_steps, state_of

import ckpt
from ckpt import attempts, commit
from ckpt.layout import Marker
from ckpt.lineage import StepId
from ckpt.owning import remove_stale

__all__ = ["root"]  # a fixture


# --- starting and resuming -------------------------------------------------------------------


def test_a_fresh_run_says_so(root: Path) -> None:
    start = state_of(0)
    with manager(root) as m:
        restored = m.resume(like=start)
        assert restored.report.fresh
        assert restored.step == 0
        assert restored.state is start
        assert m.latest_step() is None


def test_resume_goes_on_where_it_was(root: Path) -> None:
    with manager(root) as m, pipeline().iterator() as data:
        m.resume(like=state_of(0), data=data)
        save_steps(m, range(1, 4), data)
        coming = next(data)
    with manager(root) as m, pipeline().iterator() as data:
        restored = m.resume(like=state_of(0), data=data)
        assert not restored.report.fresh
        assert restored.step == 3
        assert_same(restored.state, state_of(3))
        np.testing.assert_array_equal(next(data)["id"], coming["id"])


def test_a_mistyped_root_stays_as_it_is(root: Path) -> None:
    with manager(root) as m:
        with pytest.raises(ckpt.NotFound, match="no such directory"):
            m.resume(like=state_of(0), must_exist=True)
        with pytest.raises(ckpt.NotFound, match="no such directory"):
            m.restore()
    assert not root.exists()
    root.mkdir()
    (root / "notes.txt").write_text("mine")
    with manager(root) as m, pytest.raises(ckpt.NotFound, match=r"notes\.txt"):
        m.resume(must_exist=True)
    assert [p.name for p in root.iterdir()] == ["notes.txt"]


def test_an_absent_step_names_what_is_there(root: Path) -> None:
    with manager(root) as m:
        m.resume()
        save_steps(m, [5, 6])
        with pytest.raises(ckpt.NotFound, match=r"step 7 is not .* there: 5, 6"):
            m.restore(7)
        assert m.all_steps() == [5, 6]


def test_saving_into_a_run_without_resuming_is_refused(root: Path) -> None:
    with manager(root) as m:
        save_steps(m, [1])  # a run without steps may be begun by save
    with manager(root) as m, pytest.raises(ckpt.Misuse, match="call resume"):
        m.save(2, state_of(2))


def test_the_exact_structure_without_a_template(root: Path) -> None:
    tree = {"b": [np.float32(2), (1, "text", None)], "a": {3: jnp.ones(2, jnp.bfloat16), 1: {}}}
    with manager(root) as m:
        m.save(1, tree)
        m.wait_until_finished()
    found = ckpt.restore(root).state
    assert type(found["b"][1]) is tuple
    assert found["b"][1] == (1, "text", None)
    assert type(found["b"][0]) is np.float32
    assert list(found["a"]) == [1, 3]
    assert found["a"][3].dtype == jnp.bfloat16


def test_all_differences_at_once(root: Path) -> None:
    with manager(root) as m:
        m.save(1, {"a": jnp.ones((2, 3)), "b": jnp.ones(2), "c": 1})
        m.wait_until_finished()
        like = {"a": jnp.ones((2, 4)), "b": jnp.ones(2, jnp.int32), "d": jnp.ones(1), "c": 1}
        with pytest.raises(ckpt.Mismatch) as caught:
            m.resume(like=like)
    assert caught.value.differences == (
        "a: wanted float32[2,4], found float32[2,3]",
        "b: wanted int32[2], found float32[2]",
        "d: wanted float32[1], found nothing",
    )


# --- one owner -------------------------------------------------------------------------------


def test_a_second_live_manager_is_refused_and_named(root: Path) -> None:
    with manager(root) as first, manager(root) as second:
        first.resume()
        with pytest.raises(ckpt.InUse, match=r"pid \d+"):
            second.resume()


def test_the_default_place_of_the_arena_is_freed(root: Path) -> None:
    with ckpt.CheckpointManager(root) as m:
        m.save(1, state_of(1)).wait()
        place = m._saves.arena.directory
        assert place.is_dir()
    assert not place.exists()
    remove_stale(place.parent)


def test_a_newer_attempt_supersedes(root: Path) -> None:
    elsewhere = ckpt.CheckpointManager(root, arena=root.with_name("other-host"))
    with manager(root) as old, elsewhere as new:
        old.resume()
        save_steps(old, [1, 2])
        new.resume()
        pending = old.save(3, state_of(3))
        with pytest.raises(ckpt.Superseded, match=r"attempt 1 no longer .*attempt 2 \(resume, pid"):
            pending.wait()
        for _ in range(2):
            with pytest.raises(ckpt.Superseded):
                old.save(4, state_of(4))
        assert new.all_steps() == [1, 2]
        save_steps(new, [3, 4])
        assert ckpt.open(root).all_steps() == [1, 2, 3, 4]


def test_a_step_that_is_in_the_way_and_counts_for_nothing(root: Path) -> None:
    """A store that lists late can leave one: it is moved aside, and the next attempt removes it."""
    with manager(root) as m:
        m.resume()
        save_steps(m, [1, 2])
        m.resume()
        store = m._store
        late = root / "branch-1" / "3"
        (root / "branch-1" / "2").rename(late)
        # Attempt 1 reaches up to step 2, where attempt 2 took over.
        marker = Marker.parse((late / "commit_success.txt").read_bytes(), "marker")
        late_marker = replace(marker, id=StepId(3, 1, 1))
        (late / "commit_success.txt").write_bytes(late_marker.emit())
        save_steps(m, [3])
        assert m.all_steps() == [1, 3]
        aside = [r.state for r in attempts.list_run(store).remains]
        assert aside == ["aside"]
        m.resume()
        assert attempts.list_run(store).remains == ()


# --- leftovers, other people's files -------------------------------------------------------------


def test_roll_forward_publishes_what_is_complete(root: Path, monkeypatch) -> None:
    def stop(*args, **options):
        raise ckpt.StoreFailed("killed before the rename")

    with manager(root) as m:
        m.resume()
        save_steps(m, [1])
        with monkeypatch.context() as patch:
            patch.setattr(commit, "publish", stop)
            with pytest.raises(ckpt.StoreFailed):
                m.save(2, state_of(2)).wait()
        assert ckpt.open(root).all_steps() == [1]
        restored = m.resume(like=state_of(0))
        assert restored.report.rolled_forward == ("published step 2 (branch 1, attempt 1)",)
        assert_same(restored.state, state_of(2))
        assert m.all_steps() == [1, 2]


def test_foreign_names_are_left_alone(root: Path) -> None:
    (root / "branch-1" / "notes").mkdir(parents=True)
    (root / "branch-1" / "7.orbax-checkpoint-tmp").mkdir()
    (root / "8.orbax-checkpoint-tmp-1234").mkdir()
    (root / "results").mkdir()
    with manager(root, keep=ckpt.Keep(last=1)) as m:
        m.resume()
        save_steps(m, [1, 2, 3])
        m.resume()
    for name in (
        "branch-1/notes",
        "branch-1/7.orbax-checkpoint-tmp",
        "8.orbax-checkpoint-tmp-1234",
        "results",
    ):
        assert (root / name).is_dir()


def test_a_root_that_orbax_filled_is_the_oldest_part(root: Path) -> None:
    import orbax.checkpoint as ocp

    state = {"w": jnp.arange(8.0), "n": 3}
    with ocp.CheckpointManager(root.absolute()) as theirs:
        theirs.save(10, args=ocp.args.StandardSave(state))
        theirs.wait_until_finished()
    with manager(root, keep=ckpt.Keep(last=1)) as m:
        restored = m.resume(like=state)
        assert restored.step == 10
        assert_same(restored.state, state)
        save_steps(m, [11, 12, 13])
        m._tenure.finish_attempt()
        assert m.all_steps() == [10, 13]


def test_wait_for_new_step(root: Path) -> None:
    with manager(root) as m:
        m.resume()
        save_steps(m, [1])
        reader = ckpt.open(root)
        with pytest.raises(TimeoutError):
            reader.wait_for_new_step(timeout=0.3)
        m.save(2, state_of(2))
        assert reader.wait_for_new_step(1, timeout=60) == 2


def test_the_log_tells_what_happened(root: Path) -> None:
    with manager(root, keep=ckpt.Keep(last=1)) as m:
        m.resume()
        save_steps(m, [1, 2])
        m._tenure.finish_attempt()
    lines = [json.loads(line) for line in (root / "log" / "a1.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [
        ("save", 1),
        ("save", 2),
        ("delete", 1),
    ]
    assert all(line["time_ns"] <= time.time_ns() for line in lines)


def test_one_shot_calls(root: Path) -> None:
    assert ckpt.save(root, state_of(1)) == 0
    assert ckpt.save(root, state_of(2), extra={"a": 1}) == 1
    assert ckpt.save(root, state_of(7), step=7) == 7
    assert_same(ckpt.restore(root, like=state_of(0)).state, state_of(7))
    assert ckpt.restore(root, step=1).extra == {"a": 1}
    with pytest.raises(ckpt.Misuse):
        ckpt.save(root, state_of(7), step=7)
    assert ckpt.verify(root).intact
    ckpt.rewind(root, 1, reason="by hand")
    assert ckpt.open(root).all_steps() == [0, 1]
    with pytest.raises(ckpt.NotFound, match="no such directory"):
        ckpt.restore(root / "elsewhere")

"""The manager in one process: save, restore, resume, rewind, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_source import Columns

import ckpt
from ckpt import attempts, commit
from ckpt.layout import Marker
from ckpt.lineage import StepId
from ckpt.owning import remove_stale
from ckpt.store import FileStore
from datapipe import Pipeline


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def manager(root: Path, **options) -> ckpt.CheckpointManager:
    """With slots on disk, where no other test looks."""
    tier = options.pop("tier", None) or ckpt.Shared(root, **options)
    return ckpt.CheckpointManager(tier, arena=root.with_name(f"{root.name}-arena"))


def state_of(step: int) -> dict:
    key = jax.random.fold_in(jax.random.key(7), step)
    return {"w": jax.random.normal(key, (64, 16)), "key": key, "step": step, "np": np.full(5, step)}


def assert_same(found, wanted) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if isinstance(b, jax.Array) and jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def pipeline(batch_size: int = 4, seed: int = 3) -> Pipeline:
    return Pipeline(Columns(97), batch_size=batch_size, seed=seed)


def save_steps(m: ckpt.CheckpointManager, steps, data=None) -> None:
    for step in steps:
        if data is not None:
            next(data)
        m.save(step, state_of(step), data=data)
    m.wait_until_finished()


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


# --- saving ----------------------------------------------------------------------------------


class Untouchable:
    def get_state(self):
        raise AssertionError("touched")

    def set_state(self, state):
        raise AssertionError("touched")


def test_a_step_that_is_not_due_costs_nothing(root: Path) -> None:
    with manager(root, every=10) as m:
        assert m.save(7, state_of(7), data=Untouchable()) is None
        assert not m.should_save(7)
        assert m.should_save(20)
        assert m.save(7, state_of(7), force=True) is not None
    assert not root.with_name("run-arena").exists()


def test_the_state_may_be_donated_at_once(root: Path) -> None:
    step = jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    with manager(root) as m:
        x = jnp.arange(1 << 16, dtype=jnp.float32)
        for number in range(1, 9):
            x = step(x)
            wanted = np.array(x)
            m.save(number, {"x": x})
            for _ in range(5):
                x = step(x)
            m.wait_until_finished()
            np.testing.assert_array_equal(ckpt.restore(root).state["x"], wanted)


def test_host_arrays_are_copied(root: Path) -> None:
    array = np.arange(1000)
    with manager(root) as m:
        m.save(1, {"a": array})
        array[:] = 0
        m.wait_until_finished()
    np.testing.assert_array_equal(ckpt.restore(root).state["a"], np.arange(1000))


def test_steps_only_grow(root: Path) -> None:
    with manager(root) as m:
        first = m.save(5, state_of(5))
        assert m.save(5, state_of(5), force=True) is first
        with pytest.raises(ckpt.Misuse, match="already reached step 5"):
            m.save(4, state_of(4))
        m.wait_until_finished()
        m.resume(like=state_of(0))
        assert m.save(5, state_of(5)).done()  # what was restored is saved already
        with pytest.raises(ckpt.Misuse, match="whole number"):
            m.save(-1, state_of(1))


def test_pending_says_what_is_due(root: Path) -> None:
    with manager(root) as m:
        pending = m.save(1, state_of(1))
        assert pending.done("snapshot")
        pending.wait("snapshot")
        pending.wait("shared", timeout=60)
        assert pending.done()
        with pytest.raises(ckpt.Misuse, match="not due; due are: snapshot, shared"):
            pending.wait("bucket")


def test_data_that_ran_ahead_is_noticed(root: Path) -> None:
    with manager(root) as m, pipeline().iterator() as data:
        m.resume(data=data)
        save_steps(m, [1], data)
        next(data)
        next(data)
        with pytest.raises(ckpt.Misuse, match="moved 1 batches too far"):
            m.save(2, state_of(2), data=data)
        with pytest.raises(ckpt.Misuse, match="moved 1 batches too little"):
            m.save(4, state_of(4), data=data)
        m.save(3, state_of(3), data=data).wait()


def test_several_iterators(root: Path) -> None:
    def both():
        return {"text": pipeline(4).iterator(), "images": pipeline(2, seed=9).iterator()}

    with manager(root) as m:
        data = both()
        m.resume(data=data)
        for each in data.values():
            next(each)
        m.save(1, state_of(1), data=data).wait()
        coming = {name: next(each)["id"] for name, each in data.items()}
        data = both()
        m.resume(data=data)
        for name, each in data.items():
            np.testing.assert_array_equal(next(each)["id"], coming[name])
        with pytest.raises(ckpt.Mismatch, match=r"iterators audio .*saved: images, text"):
            m.resume(data={"audio": pipeline().iterator()})


def test_extra_metrics_and_environment_travel_along(root: Path) -> None:
    with manager(root) as m:
        m.save(1, state_of(1), metrics={"loss": jnp.float32(0.5)}, extra={"ramp": [1, None]}).wait()
        restored = m.resume()
        assert restored.metrics == {"loss": 0.5}
        assert restored.extra == {"ramp": [1, None]}
        with pytest.raises(ckpt.Misuse, match="extra: wanted a JSON value"):
            m.save(2, state_of(2), extra={"x": object()})
    found = ckpt.metadata(root)
    assert found.environment["jax"] == jax.__version__
    assert found.leaves["w"].shape == (64, 16)


def test_inside_a_running_event_loop(root: Path) -> None:
    async def main():
        with manager(root) as m:
            m.save(1, state_of(1)).wait()
            return m.resume(like=state_of(0)).step

    assert asyncio.run(main()) == 1


def test_leaving_without_waiting_loses_nothing(root: Path) -> None:
    script = f"""
import numpy as np, ckpt
m = ckpt.CheckpointManager({str(root)!r}, arena={str(root) + "-arena"!r})
m.save(1, {{"x": np.arange(1 << 20)}})
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    np.testing.assert_array_equal(ckpt.restore(root).state["x"], np.arange(1 << 20))
    assert not root.with_name("run-arena").exists()


# --- what goes wrong in the background ---------------------------------------------------------


@pytest.fixture
def broken_disk(monkeypatch: pytest.MonkeyPatch):
    """Images cannot be written while the list is not empty."""
    faults = []
    good = FileStore.write_image

    def write(self, key, data, cuts=()):
        if faults:
            raise ckpt.StoreFailed(faults[0])
        good(self, key, data, cuts)

    monkeypatch.setattr(FileStore, "write_image", write)
    return faults


def test_a_failed_save_is_never_lost(root: Path, broken_disk: list) -> None:
    m = manager(root)
    broken_disk.append("disk on fire")
    pending = m.save(1, state_of(1))
    with pytest.raises(ckpt.StoreFailed, match="disk on fire"):
        pending.wait()
    m.save(2, state_of(2)).ended(None)
    with pytest.raises(ckpt.StoreFailed, match="disk on fire"):
        m.save(3, state_of(3))
    m.save(3, state_of(3)).ended(None)
    with pytest.raises(ckpt.StoreFailed, match="disk on fire"):
        m.close()
    broken_disk.clear()
    with manager(root) as m:
        assert ckpt.open(root).all_steps() == []
        restored = m.resume()  # the snapshot is still in the arena
        assert (restored.step, restored.report.tier) == (3, "memory")
        assert_same(restored.state, state_of(3))
        save_steps(m, [4])
        assert ckpt.open(root).all_steps() == [2, 3, 4]  # those of the two slots


def test_an_error_in_the_body_is_the_one_that_is_seen(root: Path, broken_disk: list) -> None:
    broken_disk.append("disk on fire")

    def train():
        with manager(root) as m:
            m.save(1, state_of(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


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


# --- rewinding -------------------------------------------------------------------------------


def trained(m: ckpt.CheckpointManager, data, steps) -> list[np.ndarray]:
    """Saves every step; returns the record ids of each batch."""
    seen = []
    for step in steps:
        seen.append(next(data)["id"].copy())
        m.save(step, state_of(step), data=data)
    m.wait_until_finished()
    return seen


def test_rewind_never_serves_the_skipped_batches_again(root: Path) -> None:
    with pipeline().iterator() as straight:
        order = [next(straight)["id"].copy() for _ in range(20)]
    with manager(root) as m, pipeline().iterator() as data:
        m.resume(data=data)
        assert_same(trained(m, data, range(1, 9)), order[:8])
        restored = m.rewind(3, skip_steps=range(6, 8), reason="spike at 6", data=data)
        assert restored.step == 3
        assert_same(restored.state["w"], np.asarray(state_of(3)["w"]))
        # Steps 6 and 7 had used batches 5 and 6.
        kept = order[3:5] + order[7:]
        assert_same(trained(m, data, range(4, 8)), kept[:4])
        assert m.all_steps() == [1, 2, 3, 4, 5, 6, 7]
    with manager(root) as m, pipeline(batch_size=2).iterator() as data:
        m.resume(data=data)
        rest = np.concatenate([next(data)["id"] for _ in range(10)])
        np.testing.assert_array_equal(rest, np.concatenate(kept[4:9]))


def test_rewind_by_batches_and_by_steps_agree(root: Path) -> None:
    for name, how in (("a", {"skip_steps": range(4, 6)}), ("b", {"skip_batches": range(3, 5)})):
        with manager(root / name) as m, pipeline().iterator() as data:
            m.resume(data=data)
            trained(m, data, range(1, 7))
            m.rewind(2, reason="", data=data, **how)
            assert data.plan.skipped == [(12, 20)]


def test_skips_are_kept_before_and_after_the_next_save(root: Path) -> None:
    with manager(root) as m, pipeline().iterator() as data:
        m.resume(data=data)
        trained(m, data, range(1, 7))
        m.rewind(4, skip_batches=range(5, 6), data=data)
    for steps in ([5], [6], []):
        with manager(root) as m, pipeline().iterator() as data:
            restored = m.resume(data=data)
            assert data.plan.skipped == [(20, 24)]
            assert m._tenure.attempt.decision.branch == 2
            trained(m, data, steps)
    with manager(root) as m, pipeline().iterator() as data:
        m.rewind(2, skip_batches=range(8, 9), data=data, reason="again")
        assert data.plan.skipped[0] == (20, 24)
        assert len(data.plan.skipped) == 2
        restored = m.resume(data=data)
        assert restored.step == 2
        assert len(data.plan.skipped) == 2


def test_abandoned_steps_stay_and_do_not_count(root: Path) -> None:
    with manager(root) as m:
        m.resume()
        save_steps(m, range(1, 6))
        m.rewind(2)
        save_steps(m, range(3, 5))
        assert m.all_steps() == [1, 2, 3, 4]
        assert_same(ckpt.restore(root, like=state_of(0)).state, state_of(4))
        with pytest.raises(ckpt.NotFound):
            m.rewind(5)
    assert ckpt.restore(root / "branch-1" / "5").step == 5
    assert (root / "branch-2" / "3").is_dir()


def test_a_rewind_needs_something_that_can_skip(root: Path) -> None:
    class Plain:
        def __init__(self):
            self.state = {"next": 0}

        def get_state(self):
            return dict(self.state)

        def set_state(self, state):
            self.state = dict(state)

    with manager(root) as m:
        data = Plain()
        m.resume(data=data)
        m.save(1, state_of(1), data=data).wait()
        with pytest.raises(ckpt.Misuse, match="Plain cannot skip batches"):
            m.rewind(1, skip_batches=range(1, 2), data=data)
        with pytest.raises(ckpt.Misuse, match="give `data`"):
            m.rewind(1, skip_batches=range(1, 2))
        with pytest.raises(ckpt.Misuse, match="not both"):
            m.rewind(1, skip_batches=range(1, 2), skip_steps=range(1, 2), data=data)
        m.rewind(1, data=data)


def test_an_older_step_opens_a_branch_and_the_newest_does_not(root: Path) -> None:
    with manager(root) as m:
        m.resume()
        save_steps(m, [1, 2, 3])
        m.restore()
        assert m._tenure.attempt.decision.branch == 1
        m.restore(3)
        assert m._tenure.attempt.decision.branch == 1
        m.restore(2)
        assert m._tenure.attempt.decision.branch == m._tenure.attempt.number
        save_steps(m, [3])
        m.resume()
        assert m.all_steps() == [1, 2, 3]


# --- retention -------------------------------------------------------------------------------


def test_keep_last_every_and_best(root: Path) -> None:
    keep = ckpt.Keep(last=2, every=4, best=ckpt.Best("loss"))
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 4.0, 5: float("nan"), 6: 3.0, 7: 3.0, 8: 3.0, 9: 3.0}
    with manager(root, keep=keep) as m:
        m.resume()
        for step, loss in losses.items():
            m.save(step, state_of(step), metrics={"loss": loss}).wait()
        m.wait_until_finished()
        m._tenure.finish_attempt()
        assert m.all_steps() == [2, 4, 8, 9]
        assert m.best_step() == 2


def test_a_worsening_metric_never_evicts_the_newest(root: Path) -> None:
    with manager(root, keep=ckpt.Keep(best=ckpt.Best("loss"))) as m:
        m.resume()
        for step in range(1, 11):
            m.save(step, state_of(step), metrics={"loss": step}).wait()
            assert m.latest_step() == step
        m._tenure.finish_attempt()
        assert m.all_steps() == [1, 10]


def test_pinned_steps_stay(root: Path) -> None:
    with manager(root, keep=ckpt.Keep(last=1)) as m:
        m.resume()
        m.save(1, state_of(1)).wait()
        ckpt.pin(root, 1)
        save_steps(m, [2, 3])
        m._tenure.finish_attempt()
        assert m.all_steps() == [1, 3]
        ckpt.unpin(root, 1)
        m.save(4, state_of(4)).wait()
        m._tenure.finish_attempt()
        assert m.all_steps() == [4]


def test_the_fork_point_stays_until_two_steps_of_its_branch(root: Path) -> None:
    with manager(root, keep=ckpt.Keep(last=1)) as m:
        m.resume()
        save_steps(m, [1, 2])
        m.rewind(2)
        save_steps(m, [3])
        m._tenure.finish_attempt()
        assert m.all_steps() == [2, 3]
        save_steps(m, [4])
        m._tenure.finish_attempt()
        assert m.all_steps() == [4]


def test_delete(root: Path) -> None:
    with manager(root) as m:
        m.resume()
        save_steps(m, [1, 2, 3])
        m.delete(2)
        assert m.all_steps() == [1, 3]
        with pytest.raises(ckpt.Misuse, match="newest of the run"):
            m.delete(3)


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

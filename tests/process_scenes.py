"""Scenes in which all goes well, as each of several processes plays and sees them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from process_stage import (
    Counter,
    Stage,
    data_sharding,
    differences,
    error_of,
    like,
    pipeline,
    rows_of,
    shardings,
    spread,
    state,
)

import ckpt
from ckpt.processes import Distributed, of_run


def save_and_resume(stage: Stage) -> dict[str, Any]:
    """Three steps; another manager goes on from the newest, under other shardings."""
    seen = []
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        fresh = m.resume(like=like(), data=data).report.fresh
        for step in range(1, 4):
            seen.append(rows_of(next(data)))
            m.save(step, state(step), data=data, metrics={"loss": step}, extra={"at": step})
        m.wait_until_finished()
        position = data.get_state()
        stage.meet()
        said = [len(m.processes.below(f"a1/s{step}")) for step in range(1, 4)]
        stage.meet()
    found = {"fresh": fresh, "seen": seen, "position": position, "said": said}
    return {**found, **resume(stage, turned=True)}


def resume(stage: Stage, *, turned: bool = False) -> dict[str, Any]:
    """Go on from what there is and save one more step."""
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        restored = m.resume(like=like(turned=turned), data=data)
        found = {
            "restored": restored.step,
            "wrong": differences(restored.state, restored.step, turned=turned),
            "extra": restored.extra,
            "metrics": restored.metrics,
            "rolled_forward": restored.report.rolled_forward,
            "lost": [[lost.step, lost.reason] for lost in restored.report.lost],
            "restored_position": data.get_state(),
            "coming": [rows_of(next(data)) for _ in range(3)],
        }
        step = restored.step + 3
        m.save(step, state(step), data=data).wait()
        return {**found, "steps": m.all_steps(), "attempt": m._tenure.attempt.number}


def rewind(stage: Stage) -> dict[str, Any]:
    """A run with retention that resumes, rewinds with skips, goes on, and resumes again."""
    keep = ckpt.Keep(last=2, every=4)
    decisions, positions, seen, steps, wrong = [], [], [], [], []

    def train(m: ckpt.CheckpointManager, data: Any, numbers: range) -> None:
        for step in numbers:
            seen.append(rows_of(next(data)))
            m.save(step, state(step), data=data)
        m.wait_until_finished()
        m._tenure.finish_attempt()  # retention follows the last save
        stage.meet()
        steps.append(m.all_steps())

    def begun(m: ckpt.CheckpointManager, restored: ckpt.Restored, data: Any) -> None:
        assert m._tenure.attempt is not None
        decisions.append(
            [str(m._tenure.attempt.decision), [str(reach) for reach in m._tenure.attempt.line]]
        )
        positions.append(data.get_state())
        if not restored.report.fresh:
            wrong.extend(differences(restored.state, restored.step))

    with (
        stage.manager(keep=keep) as m,
        pipeline().iterator(sharding=data_sharding()) as data,
    ):
        begun(m, m.resume(like=like(), data=data), data)
        train(m, data, range(1, 8))
        begun(m, m.resume(like=like(), data=data), data)
        train(m, data, range(8, 10))
        skip = range(7, 9)
        begun(m, m.rewind(4, skip_steps=skip, reason="spike", like=like(), data=data), data)
        train(m, data, range(5, 8))
    with (
        stage.manager(keep=keep) as m,
        pipeline().iterator(sharding=data_sharding()) as data,
    ):
        begun(m, m.resume(like=like(), data=data), data)
        train(m, data, range(8, 9))
    return {
        "decisions": decisions,
        "positions": positions,
        "seen": seen,
        "steps": steps,
        "wrong": wrong,
    }


def little(stage: Stage) -> dict[str, Any]:
    """Trees of which process 1 has nothing to write, or nobody has."""
    everywhere = shardings()["replicated"]
    trees: dict[int, Any] = {
        1: {"a": spread(np.arange(5, dtype=np.int32), everywhere)},
        2: {"a": np.arange(3)},
        3: {},
        4: {"a": spread(np.zeros((0, 4), np.float32), shardings()["rows"]), "b": "text"},
    }
    found = []
    with stage.manager() as m:
        m.resume()
        for step, tree in trees.items():
            m.save(step, tree).wait()
    for step, tree in trees.items():
        restored = ckpt.restore(stage.root, like=tree, step=step).state
        found.append(_shards(restored) == _shards(tree))
    return {"same": found}


def _shards(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        name: str([np.asarray(shard.data) for shard in leaf.addressable_shards])
        if isinstance(leaf, jax.Array)
        else str(leaf)
        for name, leaf in tree.items()
    }


def guarded(stage: Stage) -> dict[str, Any]:
    """The loop helper with a guard: the spike comes out of a computation on all devices."""
    poison = np.array(pipeline().plan.records(range(40, 43))).ravel().astype(np.int32)
    guard = ckpt.SpikeGuard(
        window=16, warm_up=8, cool_down=3, consecutive=2, margin=4, skip_before=2, skip_after=6
    )

    @jax.jit
    def step_of(weights: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        bad = jnp.isin(ids, poison).all()
        total = ids.sum()
        return weights + total.astype(np.float32), 1 + 0.01 * (total % 7) + 50.0 * bad

    zeros = {"w": spread(np.zeros((16, 2), np.float32), shardings()["rows"])}
    with (
        stage.manager(every=5) as m,
        pipeline().iterator(sharding=data_sharding()) as data,
        ckpt.Run(m, zeros, data, steps=60, guard=guard) as run,
    ):
        for _, batch in run:
            weights, loss = step_of(run.state["w"], batch["id"])
            run.update({"w": weights}, loss=loss)
        assert m._tenure.attempt is not None
        return {
            "rewinds": [str(each) for each in run.rewinds],
            "decision": str(m._tenure.attempt.decision),
            "weight": float(run.state["w"].addressable_data(0)[0, 0]),
        }


def preempted_in_one(stage: Stage) -> dict[str, Any]:
    """Process 1 is sent SIGTERM in the middle of the loop."""
    zeros = {"w": spread(np.zeros((16, 2), np.float32), shardings()["rows"])}
    add = jax.jit(lambda weights, ids: weights + ids.sum().astype(np.float32))
    with (
        stage.manager(every=10_000) as m,
        pipeline(epochs=1000).iterator(sharding=data_sharding()) as data,
        ckpt.Run(m, zeros, data, steps=2000) as run,
    ):
        for step, batch in run:
            if (stage.index, step) == (1, 7):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            run.update({"w": add(run.state["w"], batch["id"])})
    return {"preempted": run.preempted, "step": run.step, "steps": m.all_steps()}


def own_states(stage: Stage) -> dict[str, Any]:
    """Iterators whose state is that of their process: differing ones, and equal ones."""
    with stage.manager() as m:
        mine = {"differing": Counter(10 + stage.index), "equal": Counter(7)}
        m.resume(data=mine)
        m.save(1, state(1), data=mine).wait()
    with stage.manager() as m:
        found = {"differing": Counter(0), "equal": Counter(0)}
        m.resume(like=like(), data=found)
        manifest = m._reader.manifest(m._reader.find(1))
        return {"at": {name: each.at for name, each in found.items()}, "saved": manifest.data}


def two_runs(stage: Stage) -> dict[str, Any]:
    """Two managers at once, for two runs; and one that only process 0 made, to look."""
    second = Stage(f"{stage.scene}/second", stage.root.parent, stage.index, stage.count)
    second._arenas = stage.root.parent / f"second.arena-{stage.index}"
    if stage.index == 0:
        ckpt.CheckpointManager(stage.root).all_steps()
    with stage.manager() as a, second.manager() as b:
        a.resume()
        b.resume()
        for step in range(1, 4):
            a.save(step, state(step))
            b.save(step + 10, state(step + 10))
        for m in (a, b):
            m.wait_until_finished()
        steps = [a.all_steps(), b.all_steps()]
    with stage.manager() as again:
        return {"steps": steps, "restored": again.resume(like=like()).step}


def default_place(stage: Stage) -> dict[str, Any]:
    """The arenas of two processes on one host lie apart without being told so."""
    with ckpt.CheckpointManager(stage.root) as m:
        m.save(1, state(1)).wait()
        assert m._saves.arena is not None
        return {"arena": str(m._saves.arena.directory), "steps": m.all_steps()}


def compressed(stage: Stage) -> dict[str, Any]:
    """A step of a tier that compresses; then one of which only process 1 thinks that it does."""
    with stage.manager(compression="zstd") as m:
        m.resume()
        m.save(1, state(1)).wait()
    with stage.manager(compression="zstd" if stage.index else None) as m:
        restored = m.resume(like=like(turned=True))
        error = error_of(m.save(2, state(2)).wait)
        return {
            "wrong": differences(restored.state, 1, turned=True),
            "error": error,
            "steps": m.all_steps(),
        }


def board(stage: Stage) -> dict[str, Any]:
    """The coordination service itself: large values, threads at once, what is forgotten."""
    processes = of_run("board")
    if stage.count == 1:
        return {}
    assert isinstance(processes, Distributed)
    large = [{"attempt": n, "branch": 1, "step": n} for n in range(100_000)]
    with processes.matter("large") as matter:
        heard = matter.decide("steps", lambda: large)
        both = matter.gather("states", [stage.index] * 100_000)
    failures: list[BaseException] = []

    def talk(thread: int) -> None:
        try:
            for n in range(40):
                with processes.matter(f"t{thread}-{n}", 60.0) as matter:
                    assert matter.decide("x", lambda n=n: [thread, n]) == [thread, n]
                    assert matter.gather("y", stage.index + n) == [n, n + 1]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stage.meet()
    before = len(processes.below("t1-5"))
    stage.meet()
    if stage.index == 0:
        processes.matter("t1-5").forget()
    stage.meet()
    return {
        "large": heard == large,
        "both": [set(each) == {n} for n, each in enumerate(both)],
        "failures": [repr(error) for error in failures],
        "forgotten": [before > 0, len(processes.below("t1-5")), len(processes.below("t1-6")) > 0],
        "boards": [Distributed("board")._path("x"), Distributed("other")._path("x")],
    }


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    scene.__name__: scene
    for scene in (
        save_and_resume,
        rewind,
        little,
        guarded,
        preempted_in_one,
        own_states,
        two_runs,
        default_place,
        compressed,
        board,
    )
}

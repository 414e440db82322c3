"""One of several processes of a run: plays scenes and writes down what it saw.

Run as `process_child.py <index> <count> <port> <directory> <scene> ...`. Each scene has its own
run under the directory; what it returns goes to `<directory>/<scene>.<index>.json`. With one
process there is no coordination service, and the devices are the same eight in all.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from memory_source import Columns

import ckpt
from ckpt import attempts, commit, layout, start
from ckpt.processes import Distributed, of_run
from ckpt.store import FileStore
from datapipe import Pipeline

DEVICES = 8
"""Of all processes together."""

# --- the tree that is saved: a pure function of the step ------------------------------------------


def wanted(step: int) -> dict[str, np.ndarray]:
    """The values of all arrays of `state`; keys as their data."""
    rng = np.random.default_rng(step)
    return {
        "rows": rng.normal(size=(16, 6)).astype(np.float32),
        "columns": rng.normal(size=(6, 16)).astype(np.float32),
        "both": rng.integers(-9, 9, (8, 8), np.int32),
        "half": rng.normal(size=(8, 2, 3)).astype(ml_dtypes.bfloat16),
        "replicated": rng.integers(0, 99, 5).astype(np.int32),
        "unusual": rng.normal(size=(16,)).astype(ml_dtypes.float8_e4m3),
        "keys": rng.integers(0, 2**32, (8, 2), np.uint32),
        "one": rng.normal(size=3).astype(np.float32),
        "key": np.asarray(jax.random.key_data(jax.random.key(step))),
        "host": rng.integers(0, 9, (3, 4)).astype(np.int16),
    }


HOST_VALUES = {"lr": 0.1, "name": "run", "big": 2**70, "blob": b"\0\1", "on": True}


def shardings(*, turned: bool = False) -> dict[str, Any]:
    """Where the arrays are; `turned` gives the same arrays other shardings."""
    line = Mesh(np.array(jax.devices()), ("x",))
    plane = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    spec = PartitionSpec
    rows, columns = NamedSharding(line, spec("x")), NamedSharding(line, spec(None, "x"))
    everywhere = NamedSharding(line, spec())
    local = SingleDeviceSharding(jax.local_devices()[-1])
    if turned:
        return {
            "rows": NamedSharding(plane, spec(None, "y")),
            "columns": NamedSharding(plane, spec("y", "x")),
            "both": columns,
            "half": everywhere,
            "replicated": everywhere,
            "unusual": NamedSharding(plane, spec("y")),
            "keys": NamedSharding(plane, spec("x")),
            "one": everywhere,
            "key": everywhere,
        }
    return {
        "rows": rows,
        "columns": columns,
        "both": NamedSharding(plane, spec("x", "y")),
        "half": NamedSharding(plane, spec("x")),
        "replicated": everywhere,
        "unusual": rows,
        "keys": rows,
        "one": local,
        "key": local,
    }


def state(step: int, *, turned: bool = False) -> dict[str, Any]:
    """The tree of a step on this process's devices."""
    values = wanted(step)
    found: dict[str, Any] = {"host": values.pop("host"), "static": dict(HOST_VALUES), "step": step}
    for name, sharding in shardings(turned=turned).items():
        array = spread(values[name], sharding)
        found[name] = jax.random.wrap_key_data(array) if name.startswith("key") else array
    return found


def spread(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index], dtype=value.dtype
    )


def like(*, turned: bool = False) -> dict[str, Any]:
    """A template without values of the arrays."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(spec, state(0, turned=turned))


def differences(found: dict[str, Any], step: int, *, turned: bool = False) -> list[str]:
    """What of a restored tree is not bit for bit what this process must have of it."""
    wrong = []
    for name, value in wanted(step).items():
        leaf = found[name]
        if name == "host":
            if not (isinstance(leaf, np.ndarray) and _same(leaf, value)):
                wrong.append(f"host: {leaf!r}")
            continue
        if leaf.sharding != shardings(turned=turned)[name]:
            wrong.append(f"{name}: {leaf.sharding}")
        array = jax.random.key_data(leaf) if name.startswith("key") else leaf
        if len(array.addressable_shards) != len(leaf.sharding.addressable_devices):
            wrong.append(f"{name}: {len(array.addressable_shards)} shards")
        for shard in array.addressable_shards:
            if not _same(np.asarray(shard.data), value[shard.index]):
                wrong.append(f"{name}{shard.index}: {shard.data}")
    if (found["static"], found["step"]) != (HOST_VALUES, step):
        wrong.append(f"host values: {found['static']}, {found['step']}")
    return wrong


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


# --- the data -------------------------------------------------------------------------------------


def pipeline(seed: int = 5, epochs: int = 20) -> Pipeline:
    return Pipeline(Columns(200), batch_size=16, seed=seed, epochs=epochs).map(
        _numbers, version="1"
    )


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    return {"id": record["id"], "row": record["row"]}


def data_sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


def rows_of(batch: dict[str, jax.Array]) -> dict[str, list[int]]:
    """The rows of a batch that this process holds: first row -> ids."""
    return {
        str(shard.index[0].indices(16)[0]): np.asarray(shard.data).tolist()
        for shard in batch["id"].addressable_shards
    }


class Counter:
    """An iterator like Grain's: its state is that of one process."""

    def __init__(self, start: int) -> None:
        self.at = start

    def get_state(self) -> dict[str, int]:
        return {"next_index": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["next_index"]


# --- scenes ---------------------------------------------------------------------------------------


class Stage:
    """A run under a directory, as one process sees it."""

    def __init__(self, scene: str, directory: Path, index: int, count: int) -> None:
        self.root = directory / scene
        self.scene, self.index, self.count = scene, index, count
        self._arenas = directory / f"{scene}.arena-{index}"
        self._meetings = 0

    def manager(self, *, timeout_s: float = 60.0, **options: Any) -> ckpt.CheckpointManager:
        tier = ckpt.Shared(self.root, **options)
        return ckpt.CheckpointManager(tier, arena=self._arenas, timeout_s=timeout_s)

    def meet(self) -> None:
        """Wait for all processes, by other means than those that are tested."""
        from jax._src import distributed

        client = distributed.global_state.client
        if client is not None:
            self._meetings += 1
            client.wait_at_barrier(f"{self.scene}-{self._meetings}", 120_000)


def error_of(act: Callable[[], Any]) -> dict[str, Any] | None:
    """Type and text of the error that a call ends with, and how long it took."""
    begun = time.monotonic()
    try:
        act()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - begun,
        }
    return None


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
        said = [len(m._processes.below(f"a1/s{step}")) for step in range(1, 4)]
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
        return {**found, "steps": m.all_steps(), "attempt": m._attempt.number}


def rewind(stage: Stage) -> dict[str, Any]:
    """A run with retention that resumes, rewinds with skips, goes on, and resumes again."""
    keep = ckpt.Keep(last=2, every=4)
    decisions, positions, seen, steps, wrong = [], [], [], [], []

    def train(m: ckpt.CheckpointManager, data: Any, numbers: range) -> None:
        for step in numbers:
            seen.append(rows_of(next(data)))
            m.save(step, state(step), data=data)
        m.wait_until_finished()
        m._finish_attempt()  # retention follows the last save
        stage.meet()
        steps.append(m.all_steps())

    def begun(m: ckpt.CheckpointManager, restored: ckpt.Restored, data: Any) -> None:
        assert m._attempt is not None
        decisions.append([str(m._attempt.decision), [str(reach) for reach in m._attempt.line]])
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


def damaged_for_one(stage: Stage) -> dict[str, Any]:
    """Of the newest step only chunks are damaged that process 1 alone reads."""
    rows = shardings()["rows"]
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        m.resume(data=data)
        for step in (1, 2, 3):
            next(data)
            m.save(step, {"rows": spread(wanted(step)["rows"], rows)}, data=data)
        m.wait_until_finished()
    stage.meet()
    if stage.index == 1:
        step = next(s for s in attempts.list_run(FileStore(stage.root)).steps if s.step == 3)
        name = layout.step_name(step.branch, step.step)
        part = commit.read_part(FileStore(stage.root), name, step.attempt, 1)
        header = commit.read_header(FileStore(stage.root), name, part)
        image = stage.root / name / layout.image_name(step.attempt, 1)
        raw = bytearray(image.read_bytes())
        raw[int(header.columns.offset[0]) + 5] ^= 4
        image.write_bytes(raw)
    stage.meet()
    template = {"rows": jax.ShapeDtypeStruct((16, 6), np.float32, sharding=rows)}
    looked = ckpt.restore(stage.root, like=template)
    by_path = error_of(lambda: ckpt.restore(stage.root / "branch-1" / "3", like=template))
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        restored = m.resume(like=template, data=data)
        assert m._attempt is not None
        shards = restored.state["rows"].addressable_shards
        return {
            "restored": restored.step,
            "same": all(_same(np.asarray(s.data), wanted(2)["rows"][s.index]) for s in shards),
            "lost": [[lost.step, lost.reason] for lost in restored.report.lost],
            "position": data.get_state()["next_example"],
            "decision": str(m._attempt.decision),
            "looked": [looked.step, [[lost.step, lost.reason] for lost in looked.report.lost]],
            "by_path": by_path,
        }


def unsupported_for_one(stage: Stage) -> dict[str, Any]:
    """A leaf of process 1 cannot be saved: process 0 hears it, and the run goes on."""
    with stage.manager() as m:
        m.resume()
        m.save(1, state(1)).wait()
        tree = state(2) if stage.index == 0 else {**state(2), "host": object()}
        save_error = error_of(lambda: m.save(2, tree))
        wait_error = None if save_error else error_of(lambda: m._last_pending.wait())
        m.save(3, state(3)).wait()
        return {"save": save_error, "wait": wait_error, "steps": m.all_steps()}


def store_fails_for_one(stage: Stage) -> dict[str, Any]:
    """One image cannot be written; a trainer that only notes errors goes on saving."""
    good = FileStore.write_image

    def write(self: FileStore, key: str, data: memoryview) -> None:
        if stage.index == 1 and "/2.orbax" in key:
            raise ckpt.StoreFailed(f"{key}: disk on fire")
        good(self, key, data)

    FileStore.write_image = write  # type: ignore[method-assign]
    errors = []
    try:
        with stage.manager() as m:
            m.resume()
            for step in range(1, 7):
                errors.append(error_of(lambda step=step: m.save(step, state(step))))
            errors.append(error_of(m.wait_until_finished))
            return {"errors": [error for error in errors if error], "steps": m.all_steps()}
    finally:
        FileStore.write_image = good  # type: ignore[method-assign]


def late_part(stage: Stage) -> dict[str, Any]:
    """Process 1 writes its part after process 0 has given it up."""
    good = FileStore.write_image
    gate = threading.Event()

    def write(self: FileStore, key: str, data: memoryview) -> None:
        if stage.index == 1 and "/2.orbax" in key:
            assert gate.wait(60)
        good(self, key, data)

    FileStore.write_image = write  # type: ignore[method-assign]
    try:
        with stage.manager(timeout_s=1.0) as m:
            m.resume()
            m.save(1, state(1)).wait()
            pending = m.save(2, state(2))
            error = error_of(pending.wait) if stage.index == 0 else None
            stage.meet()
            gate.set()
            error = error or error_of(pending.wait)
            stage.meet()
            m.save(3, state(3)).wait()
            steps, unfinished = m.all_steps(), len(attempts.list_run(m._store).remains)
            stage.meet()
            done = m.resume(like=like()).report.rolled_forward
            return {"error": error, "steps": steps, "unfinished": unfinished, "done": done}
    finally:
        FileStore.write_image = good  # type: ignore[method-assign]


def mismatch_for_one(stage: Stage) -> dict[str, Any]:
    """`like` differs on process 1 only; then on nobody."""
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        m.resume(data=data)
        next(data)
        m.save(1, state(1), data=data).wait()
        before = data.get_state()
        next(data)
        template = like()
        if stage.index == 1:
            template["extra"] = np.zeros(3)
        error = error_of(lambda: m.resume(like=template, data=data))
        untouched = data.get_state() != before
        restored = m.resume(like=like(), data=data)
        return {
            "error": error,
            "untouched": untouched,
            "restored": restored.step,
            "wrong": differences(restored.state, 1),
            "back": data.get_state() == before,
        }


def other_data_for_one(stage: Stage) -> dict[str, Any]:
    """The pipeline of process 1 has another seed: no iterator moves, on neither."""
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        m.resume(data=data)
        next(data)
        m.save(1, state(1), data=data).wait()
    with stage.manager() as m, pipeline(5 + stage.index).iterator() as data:
        before = data.get_state()
        error = error_of(lambda: m.resume(like=like(), data=data))
        return {"error": error, "stayed": data.get_state() == before}


def unreadable_for_one(stage: Stage) -> dict[str, Any]:
    """The store does not answer process 1 when it lists the run."""
    with stage.manager() as m:
        m.resume()
        m.save(1, state(1)).wait()
        good = FileStore.list

        def fail(self: FileStore, prefix: str) -> Any:
            raise ckpt.StoreFailed(f"{prefix}: no route to host")

        if stage.index == 1:
            FileStore.list = fail  # type: ignore[method-assign]
        try:
            error = error_of(m.resume)
        finally:
            FileStore.list = good  # type: ignore[method-assign]
        return {"error": error, "restored": m.resume(like=like()).step}


def user_error_in_one(stage: Stage) -> dict[str, Any]:
    """The program of process 1 ends with an error of its own, while process 0 waits for it."""
    errors = []
    for act in ("save", "resume"):
        with contextlib.suppress(ZeroDivisionError), stage.manager() as m:
            m.resume()
            stage.meet()
            if stage.index == 1:
                raise ZeroDivisionError
            if act == "save":
                errors.append(error_of(lambda m=m: m.save(1, state(1)).wait()))
            else:
                errors.append(error_of(m.resume))
    return {"errors": errors}


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


def elsewhere(stage: Stage) -> dict[str, Any]:
    """An array that lies on the devices of process 1 only."""
    devices = jax.devices()[DEVICES // 2 :]
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    tree = {"away": spread(np.arange(8, dtype=np.float32), sharding)}
    with stage.manager() as m:
        m.resume()
        return {"error": error_of(lambda: m.save(1, tree).wait()), "steps": m.all_steps()}


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
        assert m._attempt is not None
        return {
            "rewinds": [str(each) for each in run.rewinds],
            "decision": str(m._attempt.decision),
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


def iterators_of_one(stage: Stage) -> dict[str, Any]:
    """Process 1 forgets an iterator: in a save, and when it resumes."""
    with stage.manager() as m:
        m.resume()
        data = {"a": Counter(1), "b": Counter(2)}
        some = data if stage.index == 0 else {"a": data["a"]}
        saved = error_of(lambda: m.save(1, state(1), data=some).wait())
        resumed = error_of(lambda: m.resume(data=some))
        m.resume(data=data)
        m.save(1, state(1), data=data).wait()
        return {"saved": saved, "resumed": resumed, "steps": m.all_steps()}


def other_trees(stage: Stage) -> dict[str, Any]:
    """A host array has another shape on process 1."""
    with stage.manager() as m:
        m.resume()
        tree = {**state(1), "host": np.zeros(3 + stage.index)}
        return {"error": error_of(lambda: m.save(1, tree).wait()), "steps": m.all_steps()}


def late_call(stage: Stage) -> dict[str, Any]:
    """Process 1 calls resume after process 0 has given it up; the next call is in time."""
    with stage.manager(timeout_s=0.5) as m:
        if stage.index == 1:
            stage.meet()
        error = error_of(lambda: m.resume(like=like()))
        if stage.index == 0:
            stage.meet()
        claimed = stage.root.exists()
        stage.meet()
        return {"error": error, "claimed": claimed, "fresh": m.resume(like=like()).report.fresh}


def other_calls(stage: Stage) -> dict[str, Any]:
    """The processes disagree about what is to be done; and agree on what is not there."""
    with stage.manager() as m:
        absent = error_of(m.restore)
        m.resume()
        for step in (1, 2, 3):
            m.save(step, state(step)).wait()
        error = error_of(m.resume if stage.index == 0 else lambda: m.restore(1))
        gone = error_of(lambda: m.restore(7))
        m.resume(like=like())
        deleted = error_of(lambda: m.delete(2))
        newest = error_of(lambda: m.delete(3))
        return {
            "absent": absent,
            "other": error,
            "gone": gone,
            "deleted": deleted,
            "newest": newest,
            "steps": m.all_steps(),
            "attempt": m._attempt.number,
        }


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


def superseded(stage: Stage) -> dict[str, Any]:
    """Somebody else takes the run over: all processes learn that there is no way on."""
    with stage.manager() as m:
        m.resume()
        m.save(1, state(1)).wait()
        if stage.index == 0:
            attempts.claim(m._store, "resume")
        stage.meet()
        waited = error_of(m.save(2, state(2)).wait)
        later = [error_of(lambda: m.save(3, state(3))), error_of(m.resume)]
        return {"waited": waited, "later": later}


def default_place(stage: Stage) -> dict[str, Any]:
    """The arenas of two processes on one host lie apart without being told so."""
    with ckpt.CheckpointManager(stage.root) as m:
        m.save(1, state(1)).wait()
        assert m._arena is not None
        return {"arena": str(m._arena.directory), "steps": m.all_steps()}


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


# --- scenes that kill -----------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def killed_before_its_part(stage: Stage) -> dict[str, Any]:
    """Process 1 dies while it writes its image of step 3."""
    good = FileStore.write_image

    def write(self: FileStore, key: str, data: memoryview) -> None:
        if stage.index == 1 and "/3.orbax" in key:
            path = stage.root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data[: len(data) // 2])
            die()
        good(self, key, data)

    FileStore.write_image = write  # type: ignore[method-assign]
    with stage.manager(timeout_s=2.0) as m, pipeline().iterator(sharding=data_sharding()) as data:
        m.resume(like=like(), data=data)
        for step in (1, 2):
            next(data)
            m.save(step, state(step), data=data).wait()
        next(data)
        error = error_of(lambda: m.save(3, state(3), data=data).wait())
        return {"error": error, "steps": m.all_steps()}


def killed_while_restoring(stage: Stage) -> dict[str, Any]:
    """Process 1 dies while it reads the newest step."""
    with stage.manager(timeout_s=2.0) as m:
        m.resume()
        m.save(1, state(1)).wait()
        stage.meet()
        if stage.index == 1:
            start.load = lambda *args: die()
        error = error_of(lambda: m.resume(like=like()))
        return {"error": error, "steps": m.all_steps()}


def killed_at_random(stage: Stage) -> dict[str, Any]:
    """Goes on from what is there and saves every step until somebody is killed from outside."""
    told = stage.root.with_name(f"{stage.scene}.told-{stage.index}")
    with stage.manager(timeout_s=2.0) as m, pipeline().iterator(sharding=data_sharding()) as data:
        restored = m.resume(like=like(), data=data)
        found = {"restored": restored.step, "wrong": [], "error": None}
        if not restored.report.fresh:
            found["wrong"] = differences(restored.state, restored.step)
        found["position"] = data.get_state()["next_example"]
        (stage.root.parent / f"{stage.scene}.began-{stage.index}").write_text(json.dumps(found))
        for step in range(restored.step + 1, restored.step + 1000):
            next(data)
            pending = m.save(step, state(step), data=data)
            if error := error_of(pending.wait):
                return {**found, "error": error}
            told.write_text(str(step))
    return found


def killed_before_finishing(stage: Stage) -> dict[str, Any]:
    """Process 0 dies when both parts of step 3 are there, and none of the small files."""
    return _killed_in(stage, "finish")


def killed_before_publishing(stage: Stage) -> dict[str, Any]:
    """Process 0 dies when everything of step 3 is there but its name."""
    return _killed_in(stage, "publish")


def _killed_in(stage: Stage, function: str) -> dict[str, Any]:
    good = getattr(commit, function)
    saving = 0

    def patched(*args: Any, **options: Any) -> None:
        if saving == 3:
            die()
        good(*args, **options)

    setattr(commit, function, patched)
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        m.resume(like=like(), data=data)
        for saving in (1, 2, 3):
            next(data)
            m.save(saving, state(saving), data=data).wait()
        return {}


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    scene.__name__: scene
    for scene in (
        save_and_resume,
        rewind,
        damaged_for_one,
        unsupported_for_one,
        store_fails_for_one,
        late_part,
        mismatch_for_one,
        other_data_for_one,
        unreadable_for_one,
        user_error_in_one,
        little,
        elsewhere,
        guarded,
        preempted_in_one,
        own_states,
        iterators_of_one,
        other_trees,
        late_call,
        other_calls,
        two_runs,
        superseded,
        default_place,
        board,
        killed_before_its_part,
        killed_while_restoring,
        killed_at_random,
        killed_before_finishing,
        killed_before_publishing,
    )
}


def main() -> None:
    index, count, port = (int(word) for word in sys.argv[1:4])
    directory = Path(sys.argv[4])
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            count,
            index,
            initialization_timeout=15 if sys.argv[5] == killed_at_random.__name__ else 60,
            shutdown_timeout_seconds=60,
        )
    for scene in sys.argv[5:]:
        stage = Stage(scene.partition("=")[0], directory, index, count)
        stage.meet()
        begun = time.monotonic()
        try:
            found = SCENES.get(scene, resume)(stage)
        except Exception:
            found = {"raised": traceback.format_exc()}
        found["took"] = time.monotonic() - begun
        (directory / f"{scene}.{index}.json").write_text(json.dumps(found))
    if sys.argv[5].startswith("killed"):
        os._exit(0)  # a peer is dead: jax.distributed would wait for its farewell, and abort
    if count > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()

"""Scenes in which one of several processes has trouble."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from process_stage import (
    DEVICES,
    Counter,
    Stage,
    data_sharding,
    differences,
    error_of,
    like,
    pipeline,
    same_bits,
    shardings,
    spread,
    state,
    wanted,
)

import ckpt
from ckpt import attempts, commit, layout
from ckpt.store import FileStore


def damaged_for_one(stage: Stage) -> dict[str, Any]:
    """Of the newest step only chunks are damaged that process 1 alone reads."""
    rows, names = shardings()["rows"], ("rows", "unusual")
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        m.resume(data=data)
        for step in (1, 2, 3):
            next(data)
            m.save(step, {name: spread(wanted(step)[name], rows) for name in names}, data=data)
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
    template = {name: like()[name] for name in names}
    looked = ckpt.restore(stage.root, like=template)
    by_path = error_of(lambda: ckpt.restore(stage.root / "branch-1" / "3", like=template))
    with stage.manager() as m, pipeline().iterator(sharding=data_sharding()) as data:
        restored = m.resume(like=template, data=data)
        assert m._tenure.attempt is not None
        shards = restored.state["rows"].addressable_shards
        return {
            "restored": restored.step,
            "same": all(same_bits(np.asarray(s.data), wanted(2)["rows"][s.index]) for s in shards),
            "lost": [[lost.step, lost.reason] for lost in restored.report.lost],
            "position": data.get_state()["next_example"],
            "decision": str(m._tenure.attempt.decision),
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
        wait_error = None if save_error else error_of(lambda: m._background.pendings[-1].wait())
        stage.meet()  # or process 1 writes its part in time after all
        again = error_of(lambda: m.save(2, state(2)).wait())
        m.save(3, state(3)).wait()
        found = {"save": save_error, "wait": wait_error, "again": again, "steps": m.all_steps()}
        return {**found, "restored": m.resume(like=like()).step}


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


def elsewhere(stage: Stage) -> dict[str, Any]:
    """An array that lies on the devices of process 1 only."""
    devices = jax.devices()[DEVICES // 2 :]
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    tree = {"away": spread(np.arange(8, dtype=np.float32), sharding)}
    with stage.manager() as m:
        m.resume()
        return {"error": error_of(lambda: m.save(1, tree).wait()), "steps": m.all_steps()}


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


def saved_again(stage: Stage) -> dict[str, Any]:
    """The newest step once more: with its values, and with others on process 1."""
    with stage.manager() as m:
        m.resume()
        m.save(1, state(1)).wait()
        same = error_of(lambda: m.save(1, state(1)).wait())
        other = error_of(lambda: m.save(1, state(1 + stage.index)).wait())
        m.save(2, state(2)).wait()
        return {"same": same, "other": other, "steps": m.all_steps()}


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
            "attempt": m._tenure.attempt.number,
        }


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


SCENES: dict[str, Callable[[Stage], dict[str, Any]]] = {
    scene.__name__: scene
    for scene in (
        damaged_for_one,
        unsupported_for_one,
        store_fails_for_one,
        late_part,
        mismatch_for_one,
        other_data_for_one,
        unreadable_for_one,
        user_error_in_one,
        elsewhere,
        iterators_of_one,
        other_trees,
        saved_again,
        late_call,
        other_calls,
        superseded,
    )
}

"""What may be given to `save`, and what is refused before anything is written."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_source import Columns

import ckpt
from ckpt import layout
from ckpt.store import FileStore
from datapipe import Pipeline


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def manager(root: Path, **options) -> ckpt.CheckpointManager:
    """With slots on disk, where no other test looks."""
    slots = options.pop("slots", 2)
    tier = ckpt.Shared(root, **options)
    return ckpt.CheckpointManager(tier, arena=root.with_name(f"{root.name}-arena"), slots=slots)


def state_of(step: int) -> dict:
    key = jax.random.fold_in(jax.random.key(7), step)
    return {"w": jax.random.normal(key, (64, 16)), "key": key, "step": step, "np": np.full(5, step)}


# --- step numbers ------------------------------------------------------------------------------


def test_the_largest_step_number_can_be_named_and_the_next_is_refused(root: Path) -> None:
    assert layout.parse_step_name(str(layout.MAX_STEP)) == layout.MAX_STEP
    assert layout.parse_step_name(str(layout.MAX_STEP + 1)) is None
    with manager(root) as m:
        for step in (layout.MAX_STEP + 1, 10**19, 2**63, 10**10_000):
            for call in (
                lambda step=step: m.save(step, state_of(1)),
                lambda step=step: m.restore(step),
                lambda step=step: m.rewind(step),
                lambda step=step: m.delete(step),
                lambda step=step: ckpt.save(root, state_of(1), step=step),
            ):
                with pytest.raises(ckpt.Misuse, match=f"at most {layout.MAX_STEP}, .*18 digits"):
                    call()
        assert not root.exists()
        m.save(layout.MAX_STEP, state_of(1)).wait()
        assert m.all_steps() == [layout.MAX_STEP]
    with manager(root) as m:
        assert m.resume().step == layout.MAX_STEP
    with pytest.raises(ckpt.Misuse, match="at most"):
        ckpt.save(root, state_of(2))


# --- a step that is saved again ----------------------------------------------------------------


def changed(step: int, name: str) -> dict:
    state = state_of(step)
    was = state[name]
    other = {
        "w": lambda: was.at[63, 15].add(1),
        "key": lambda: jax.random.fold_in(was, 1),
        "step": lambda: was + 1,
        "np": lambda: np.append(was[:-1], was[-1] + 1),
    }
    return {**state, name: other[name]()}


@pytest.mark.parametrize("restored", [False, True], ids=["saved", "restored"])
@pytest.mark.parametrize("slots", [1, 2])
def test_a_step_saved_again_with_other_values_is_refused(
    root: Path, slots: int, restored: bool
) -> None:
    with manager(root, slots=slots) as m:
        first = m.save(5, state_of(5))
        if restored:
            m.resume(like=state_of(0))
        for name in ("w", "key", "step", "np"):
            with pytest.raises(
                ckpt.AlreadyExists, match=f"step 5 is saved already.*\n  {name}: other"
            ):
                m.save(5, changed(5, name))
        for other, line in (
            ({"w": state_of(5)["w"]}, "key: wanted nothing"),
            ({**state_of(5), "more": np.ones(2)}, r"more: wanted float64\[2\], found nothing"),
            ({**state_of(5), "np": np.ones(5, np.int32)}, r"np: wanted int32\[5\]"),
        ):
            with pytest.raises(ckpt.AlreadyExists, match=line):
                m.save(5, other)
        again = m.save(5, state_of(5))
        assert again is first or (restored and again.done())
        m.save(6, changed(5, "w")).wait()
        assert m.all_steps() == [5, 6]
    for step in (5, 6):
        wanted = state_of(5) if step == 5 else changed(5, "w")
        found = ckpt.restore(root, like=wanted, step=step).state
        np.testing.assert_array_equal(found["w"], wanted["w"])


def test_values_in_the_record_and_containers_count_too(root: Path) -> None:
    def state(text: str = "a", big: int = 2**70, kind: type = list) -> dict:
        return {"text": text, "big": big, "layers": kind([np.zeros(2)])}

    with manager(root) as m:
        first = m.save(1, state())
        with pytest.raises(ckpt.AlreadyExists, match="text: another value"):
            m.save(1, state(text="b"))
        for big in (2**70 + 1, 3):
            with pytest.raises(ckpt.AlreadyExists, match="big: another value"):
                m.save(1, state(big=big))
        with pytest.raises(ckpt.AlreadyExists, match="other containers"):
            m.save(1, state(kind=tuple))
        assert m.save(1, state()) is first


def test_many_other_leaves_are_counted(root: Path) -> None:
    with manager(root) as m:
        m.save(1, [np.float32(i) for i in range(30)])
        with pytest.raises(ckpt.AlreadyExists, match="and 10 more"):
            m.save(1, [np.float32(-1)] * 30)


@pytest.mark.parametrize("restored", [False, True], ids=["saved", "restored"])
def test_the_same_values_under_another_sharding_are_the_same(root: Path, restored: bool) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    values = jnp.arange(64 * 8, dtype=jnp.float32).reshape(64, 8)

    def state(spec: tuple, add: int = 0) -> dict:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return {"w": jax.device_put(values + add, sharding), "b": np.ones(3)}

    with manager(root) as m:
        first = m.save(1, state(("x",)))
        if restored:
            m.resume(like=state(()))
        for spec in ((None, "x"), (), ("x",)):
            again = m.save(1, state(spec))
            assert again is first or (restored and again.done())
            with pytest.raises(ckpt.AlreadyExists, match="\n  w: other values"):
                m.save(1, state(spec, add=1))
        assert m.all_steps() == [1]


def test_a_step_whose_save_failed_gives_its_error_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ckpt.StoreFailed("disk on fire")

    monkeypatch.setattr("ckpt.store.FileStore.write_image", fail)
    with manager(root) as m:
        pending = m.save(1, state_of(1))
        assert m.save(1, state_of(2)) is pending
        with pytest.raises(ckpt.StoreFailed, match="on fire"):
            pending.wait()


# --- a step without the data of the one before -------------------------------------------------


def pipeline(batch_size: int = 4, seed: int = 3) -> Pipeline:
    return Pipeline(Columns(97), batch_size=batch_size, seed=seed)


def with_data(root: Path, step: int = 1) -> None:
    with manager(root) as m, pipeline().iterator() as data:
        m.resume(data=data)
        for _ in range(step):
            next(data)
        m.save(step, state_of(step), data=data).wait()


FORGOTTEN = r"the iterators 'data', and save\(\) got no `data`.*data=\{\}"


@pytest.mark.parametrize("begin", ["go on", "resume", "restore", "rewind"])
def test_data_that_is_forgotten_at_save_is_named(
    root: Path, begin: str, caplog: pytest.LogCaptureFixture
) -> None:
    with_data(root)
    with manager(root) as m, pipeline().iterator() as data:
        if begin == "go on":
            m.resume(data=data)
            next(data)
            m.save(2, state_of(2), data=data)
        else:
            {"resume": m.resume, "restore": m.restore, "rewind": lambda: m.rewind(1)}[begin]()
        told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert len(told) == (begin != "go on"), told
        assert all("step 1: has the position of the iterators 'data'" in each for each in told)
        with pytest.raises(ckpt.Misuse, match=FORGOTTEN):
            m.save(3, state_of(3))
        m.save(3, state_of(3), data={}).wait()
        m.save(4, state_of(4)).wait()  # none from now on
        assert m.all_steps()[-2:] == [3, 4]


def test_an_empty_mapping_at_resume_says_that_there_is_no_data(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_data(root)
    with manager(root) as m:
        m.resume(data={})
        m.save(2, state_of(2)).wait()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_an_iterator_that_is_left_out_at_resume_is_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager(root) as m:
        data = {"text": pipeline().iterator(), "images": pipeline(2).iterator()}
        m.save(1, state_of(1), data=data).wait()
        m.resume(data={"text": data["text"]})
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "iterators 'images', which were not given" in record.getMessage()


def test_one_call_does_not_drop_the_data_of_a_run(root: Path) -> None:
    with_data(root)
    attempts = sorted(path.name for path in (root / "attempts").iterdir())
    with pytest.raises(ckpt.Misuse, match=FORGOTTEN):
        ckpt.save(root, state_of(2))
    assert sorted(path.name for path in (root / "attempts").iterdir()) == attempts
    with pipeline().iterator() as data:
        assert ckpt.save(root, state_of(2), data=data) == 2
    assert ckpt.save(root, state_of(3), data={}) == 3
    assert ckpt.save(root, state_of(4)) == 4


# --- several threads ---------------------------------------------------------------------------


def test_threads_that_save_before_resume_make_one_attempt(root: Path) -> None:
    errors: list[BaseException] = []
    gate = threading.Barrier(4)

    def save(step: int) -> None:
        gate.wait()
        try:
            m.save(step, state_of(step)).wait()
        except ckpt.Misuse as error:  # a higher step was faster
            if "already reached" not in str(error):
                errors.append(error)
        except BaseException as error:
            errors.append(error)

    with manager(root) as m:
        threads = [threading.Thread(target=save, args=(step,)) for step in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert m.latest_step() == 4
    assert [path.name for path in (root / "attempts").glob("?.json")] == ["1.json"]


# --- what is no JSON ---------------------------------------------------------------------------


def nested(depth: int, kind: type = list) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("name", ["extra", "guard", "data"])
@pytest.mark.parametrize("kind", [list, dict])
def test_a_value_nested_too_deep_is_refused_at_once(root: Path, name: str, kind: type) -> None:
    class Odd:
        def __init__(self, state: object) -> None:
            self.state = state

        def get_state(self) -> object:
            return self.state

        def set_state(self, state: object) -> None:
            self.state = state

    def given(value: object) -> dict:
        return {name: Odd(value) if name == "data" else value}

    with manager(root) as m:
        for depth in (101, 500, 950, 5_000, 100_000):
            with pytest.raises(ckpt.Misuse, match=f"{name}.*at most 100 levels"):
                m.save(1, state_of(1), **given(nested(depth, kind)))
        m.save(1, state_of(1), **given(nested(100, kind))).wait()
        if name == "data":
            again = Odd(None)
            m.resume(data=again)
            assert again.state == nested(100, kind)
        else:
            assert getattr(m.resume(), name) == nested(100, kind)


def test_metrics_that_are_no_numbers_are_refused(root: Path) -> None:
    with manager(root) as m:
        for bad in ({"loss": nested(5_000)}, {"loss": 10**400}, {"loss": "a"}, ["loss"]):
            with pytest.raises(ckpt.Misuse, match=r"metrics: .*wanted (a number|numbers by name)"):
                m.save(1, state_of(1), metrics=bad)


# --- before anything was restored --------------------------------------------------------------


def test_whatever_comes_before_resume_says_what_is_missing(root: Path) -> None:
    with manager(root) as m:
        m.save(1, state_of(1)).wait()
    for call in (lambda m: m.save(2, state_of(2)), lambda m: m.delete(1)):
        with (
            manager(root) as m,
            pytest.raises(ckpt.Misuse, match=r"resume\(\) or restore\(\) first"),
        ):
            call(m)


# --- managers that nobody closed ---------------------------------------------------------------


def test_a_second_manager_of_the_same_process_is_told_so(root: Path) -> None:
    with manager(root) as first, manager(root) as second:
        first.resume()
        with pytest.raises(ckpt.InUse, match=r"in this process: pid .*close\(\) that one first"):
            second.resume()


@pytest.mark.parametrize("saves", [0, 1, 3])
def test_a_manager_that_is_dropped_finishes_and_lets_go(
    root: Path, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = FileStore.write_image

    def slow(*args: Any) -> None:
        time.sleep(0.1)
        good(*args)

    monkeypatch.setattr(FileStore, "write_image", slow)
    dropped = manager(root)
    dropped.resume()
    for step in range(1, saves + 1):
        dropped.save(step, state_of(step))
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    with manager(root) as m:
        assert m.resume().step == saves
        assert m.all_steps() == [*range(1, saves + 1)]
    assert not root.with_name("run-arena").exists()


def test_what_a_dropped_manager_could_not_save_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ckpt.StoreFailed("disk on fire")

    monkeypatch.setattr(FileStore, "write_image", fail)
    manager(root).save(1, state_of(1))
    gc.collect()
    with manager(root) as m:
        m._saves.own_arena()  # once the other one has let go of it
        monkeypatch.undo()
        assert m.resume().report.tier == "memory"
    assert any("disk on fire" in record.getMessage() for record in caplog.records)


def test_a_save_of_a_manager_dropped_before_the_end_of_the_program_is_there(root: Path) -> None:
    script = f"""
import numpy as np, ckpt
def main():
    m = ckpt.CheckpointManager({str(root)!r}, arena={str(root) + "-arena"!r})
    m.save(1, {{"x": np.arange(1 << 20)}})
main()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    np.testing.assert_array_equal(ckpt.restore(root).state["x"], np.arange(1 << 20))
    assert not root.with_name("run-arena").exists()

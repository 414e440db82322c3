"""The loop helper against a manager in memory: resume, saves, misuse."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_in_memory import (
    GUARD,
    Batches,
    MemoryManager,
    Unreadable,
    plain,
    reference,
    run_to,
    start,
    train,
)

from ckpt.errors import Misuse, NotFound
from ckpt.run import Run
from ckpt.spike import SpikeGuard


@pytest.fixture
def manager() -> MemoryManager:
    return MemoryManager()


def test_a_straight_run_yields_steps_from_one_and_saves_the_last(manager: MemoryManager) -> None:
    seen = []
    data = Batches()
    with Run(manager, start(), data, steps=12) as run:
        for step, batch in run:
            seen.append((step, batch))
            state, loss = train(run.state, batch, frozenset())
            pending = run.update(state, loss=loss, extra={"step": step})
            assert (pending is not None) == (step in (5, 10, 12))
            assert run.step == step
    assert seen == [(n + 1, n) for n in range(12)]
    assert manager.all_steps() == [5, 10, 12]
    assert manager.lineage[12][0].extra == {"step": 12}
    assert manager.lineage[12][0].metrics == {"loss": pytest.approx(2.2)}
    assert manager.lineage[12][1]["next"] == 12
    assert not run.preempted


@pytest.mark.parametrize("guard", [None, GUARD], ids=["unguarded", "guarded"])
def test_crash_and_resume_anywhere_equals_the_straight_run(guard: SpikeGuard | None) -> None:
    for crash_after in range(1, 24):
        manager = MemoryManager()
        with pytest.raises(KeyboardInterrupt):
            run_to(manager, 23, guard=guard, crash_after=crash_after)
        run, data = run_to(manager, 23, guard=guard)
        assert plain(run.state) == reference(23, set()), crash_after
        assert data.next == 23


def test_a_finished_run_entered_again_does_nothing(manager: MemoryManager) -> None:
    run_to(manager, 12)
    before = list(manager.log)
    run, _ = run_to(manager, 12)
    assert manager.log == [*before, ("waited",)]
    assert plain(run.state) == reference(12, set())


def test_a_longer_run_goes_on_from_a_finished_one(manager: MemoryManager) -> None:
    run_to(manager, 12)
    run, _ = run_to(manager, 20)
    assert manager.all_steps() == [0, 5, 10, 12, 15, 20]
    assert plain(run.state) == reference(20, set())


def test_without_a_guard_no_value_is_read_between_saves(manager: MemoryManager) -> None:
    with Run(manager, start(), Batches(), steps=4) as run:
        for step, _ in run:
            run.update(run.state, loss=Unreadable() if step < 4 else 1)


def test_leaving_early_after_an_update_saves_that_step(manager: MemoryManager) -> None:
    with Run(manager, start(), Batches(), steps=100) as run:
        for step, _ in run:
            run.update(run.state, loss=1.0)
            if step == 7:
                break
    assert manager.all_steps() == [5, 7]


def test_leaving_with_a_batch_in_hand_warns_and_does_not_save(manager: MemoryManager) -> None:
    run = Run(manager, start(), Batches(), steps=100).__enter__()
    for step, _ in run:
        if step == 7:
            break
        run.update(run.state, loss=1.0)
    with pytest.warns(UserWarning, match="step 6 is not saved, the newest saved step is 5"):
        run.__exit__(None, None, None)
    assert manager.all_steps() == [5]


def test_the_end_of_the_data_ends_the_run_with_a_save(manager: MemoryManager) -> None:
    run, _ = run_to(manager, 100, data=Batches(length=13), guard=None)
    assert run.step == 13
    assert manager.all_steps() == [5, 10, 13]


def test_a_background_error_comes_out_at_the_end(manager: MemoryManager) -> None:
    manager.fails = OSError("disk gone")
    with pytest.raises(OSError, match="disk gone"):
        run_to(manager, 7)


def test_must_exist_is_passed_on(manager: MemoryManager) -> None:
    with pytest.raises(NotFound), Run(manager, start(), Batches(), steps=1, must_exist=True):
        pass


def test_wrong_use_is_named(manager: MemoryManager) -> None:
    any_manager: Any = manager
    with pytest.raises(Misuse, match="number of updates"):
        Run(any_manager, start(), Batches(), steps=-1)
    with pytest.raises(Misuse, match="wanted one iterator, found dict"):
        Run(any_manager, start(), {"a": Batches()}, steps=1)
    run = Run(any_manager, start(), Batches(), steps=3, guard=GUARD)
    with pytest.raises(Misuse, match="not been entered"):
        next(iter(run))
    with run:
        with pytest.raises(Misuse, match="update without a batch, after step 0"):
            run.update(run.state, loss=1.0)
        with pytest.raises(Misuse, match="step 1 got a batch but no update"):
            for _ in run:
                pass
        with pytest.raises(Misuse, match=r"watches 'loss'.*found \['perplexity'\]"):
            run.update(run.state, perplexity=1.0)
        run.update(run.state, loss=1.0)
    with pytest.raises(Misuse, match="entered once"):
        run.__enter__()


def other_states() -> list[tuple[Any, str]]:
    good = start()
    return [
        ({"sum": good["sum"]}, "poison: wanted float32[], found nothing"),
        ({**good, "more": jnp.ones(2)}, "more: wanted nothing, found float32[2]"),
        ({**good, "sum": jnp.zeros(5, jnp.int32)}, "sum: wanted int32[4], found int32[5]"),
        ({**good, "sum": jnp.zeros(4)}, "sum: wanted int32[4], found float32[4]"),
        ({**good, "sum": good}, "sum/poison: wanted nothing, found float32[]"),
        ({**good, "poison": 0.0}, "poison: wanted float32[], found Python float"),
        (good["sum"], "~: wanted nothing, found int32[4]"),
        (None, "sum: wanted int32[4], found nothing"),
    ]


@pytest.mark.parametrize("resumed", [False, True], ids=["fresh", "resumed"])
@pytest.mark.parametrize(("other", "line"), other_states(), ids=lambda value: str(value)[:20])
def test_a_state_that_could_not_be_restored_is_refused_at_once(
    manager: MemoryManager, other: Any, line: str, resumed: bool
) -> None:
    if resumed:
        run_to(manager, 6)
    with Run(manager, start(), Batches(), steps=10, guard=GUARD) as run:
        for step, _ in run:
            with pytest.raises(Misuse, match=f"update {step}: .*\n(  .*\n)*  {re.escape(line)}"):
                run.update(other, loss=1.0)
            run.update(start(), loss=1.0)
        assert run.step == 10


def test_containers_and_static_data_may_change(manager: MemoryManager) -> None:
    def state(count: int) -> Any:
        layers = [jnp.zeros(2), np.float32(1)]
        return {"layers": layers if count % 2 else tuple(layers), "n": count}

    with Run(manager, state(0), Batches(), steps=4) as run:
        for step, _ in run:
            run.update(state(step))


def test_keys_and_shardings_stay_in_the_like_of_a_rewind(manager: MemoryManager) -> None:
    from ckpt.run import _specs

    state = {"key": jax.random.key(3), "x": jnp.ones((2, 3), jnp.bfloat16), "n": 5}
    specs = _specs(state)
    assert specs["n"] == 5
    for name in ("key", "x"):
        assert isinstance(specs[name], jax.ShapeDtypeStruct)
        assert specs[name].dtype == state[name].dtype
        assert specs[name].sharding == state[name].sharding

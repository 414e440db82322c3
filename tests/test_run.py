"""The loop helper against a manager in memory: resume, saves, rewinds, preemption, misuse."""

from __future__ import annotations

import copy
import math
import os
import re
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_source import Records

from ckpt.errors import Misuse, NotFound
from ckpt.loading import Loading
from ckpt.manager import CheckpointManager
from ckpt.retention import Keep
from ckpt.run import Run
from ckpt.spike import GuardState, SpikeGuard, TooManyRewinds
from ckpt.tiers import Shared
from datapipe import Pipeline

GUARD = SpikeGuard(
    window=16,
    warm_up=8,
    cool_down=3,
    consecutive=2,
    margin=4,
    skip_before=2,
    skip_after=6,
    max_rewinds=3,
)


class Batches:
    """Batch k holds the number k of the plan; `bad` numbers make the loss spike."""

    batch_size = 1

    def __init__(self, length: int = 10_000) -> None:
        self.length, self.next, self.skips = length, 0, []  # type: ignore[var-annotated]

    def skip(self, ranges: Any) -> None:
        raise AssertionError("the manager in memory puts them into `skips`")

    def span(self, state: Any, first: int, stop: int, skips: Any = ()) -> Any:
        raise AssertionError("the manager in memory counts them itself")

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> int:
        while any(first <= self.next < stop for first, stop in self.skips):
            self.next += 1
        if self.next >= self.length:
            raise StopIteration
        self.next += 1
        return self.next - 1

    def get_state(self) -> dict[str, Any]:
        return {"next": self.next, "skips": copy.deepcopy(self.skips)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.next, self.skips = state["next"], copy.deepcopy(state["skips"])

    def ahead(self, count: int) -> list[int]:
        twin = Batches(self.length)
        twin.set_state(self.get_state())
        return [next(twin) for _ in range(count)]


@dataclass
class Restored:
    step: int
    state: Any
    extra: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    guard: Any = None
    guard_before_rewind: Any = None


class Pending:
    def ended(self) -> bool:
        return True


class MemoryManager:
    """What `Run` uses of a manager, in memory. Survives its Run, as a store does."""

    def __init__(self, every: int = 5, keep: Keep | None = None) -> None:
        self.every = every
        self.tier = Shared("memory", every=every, keep=keep or Keep())
        self.lineage: dict[int, tuple[Restored, dict[str, Any]]] = {}
        self.log: list[tuple[Any, ...]] = []
        self.skips: list[tuple[int, int]] = []
        self.reasons: list[str] = []
        self.guard_before_rewind: Any = None
        self.fails: BaseException | None = None

    def should_save(self, step: int) -> bool:
        return step % self.every == 0

    def all_steps(self) -> list[int]:
        return sorted(self.lineage)

    def wait_until_finished(self) -> None:
        self.log.append(("waited",))
        if self.fails:
            raise self.fails

    def save(
        self,
        step: int,
        state: Any,
        *,
        data: Any,
        metrics: Any,
        extra: Any,
        guard: Any,
        force: bool,
    ) -> Pending | None:
        if not (force or self.should_save(step)):
            return None
        assert step not in self.lineage
        assert all(isinstance(value, float) for value in metrics.values())
        state = jax.tree.map(np.array, state)
        self.lineage[step] = Restored(step, state, extra, metrics, guard), data.get_state()
        self.log.append(("saved", step))
        self.guard_before_rewind = None
        return Pending()

    def resume(self, *, like: Any, data: Any, must_exist: bool, loading: Loading) -> Restored:
        assert loading == Loading()
        if not self.lineage:
            if must_exist:
                raise NotFound("nothing")
            return Restored(0, like)
        return self._position(max(self.lineage), data)

    def rewind(
        self,
        to: int,
        *,
        skip_steps: range,
        reason: str,
        like: Any,
        data: Any,
        guard: Any,
        loading: Loading,
    ) -> Restored:
        assert loading == Loading()
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(like))
        self.log.append(("rewound", to, skip_steps))
        assert skip_steps.start > to, "the real one refuses what `to` has learnt from"
        self.reasons.append(reason)
        _, state = self.lineage[to]
        batches = Batches()
        batches.set_state(state)
        coming = batches.ahead(skip_steps.stop)
        picked = [coming[step - to - 1] for step in skip_steps if step > to]
        self.skips += [(number, number + 1) for number in picked]
        self.lineage = {step: it for step, it in self.lineage.items() if step <= to}
        self.guard_before_rewind = guard
        return self._position(to, data)

    def _position(self, step: int, data: Any) -> Restored:
        restored, state = self.lineage[step]
        data.set_state(state)
        data.skips = sorted({*map(tuple, data.skips), *self.skips})
        restored = copy.deepcopy(restored)
        restored.guard_before_rewind = self.guard_before_rewind
        return restored


def start() -> dict[str, Any]:
    return {"sum": jnp.zeros(4, jnp.int32), "poison": jnp.float32(0)}


def plain(state: Any) -> dict[str, Any]:
    return {"sum": np.asarray(state["sum"]).tolist(), "poison": float(state["poison"])}


def train(state: Any, batch: int, bad: frozenset[int]) -> tuple[Any, jax.Array]:
    """Any order of batches gives another `sum`; a bad batch leaves the loss high for long."""
    folded = (jnp.asarray(state["sum"]) * 31 + batch) % 100_003
    poison = jnp.float32(np.float32(state["poison"]) * np.float32(0.9) + 9 * (batch in bad))
    loss = 2.0 + 0.1 * (batch % 3) + poison
    return {**state, "sum": folded, "poison": poison}, loss


@pytest.fixture
def manager() -> MemoryManager:
    return MemoryManager()


def run_to(
    manager: Any,
    steps: int,
    *,
    bad: frozenset[int] = frozenset(),
    guard: SpikeGuard | None = GUARD,
    data: Batches | None = None,
    crash_after: int | None = None,
) -> tuple[Run, Batches]:
    data = data or Batches()
    done = 0
    with Run(manager, start(), data, steps=steps, guard=guard) as run:
        for _, batch in run:
            new_state, loss = train(run.state, batch, bad)
            run.update(new_state, loss=loss)
            done += 1
            if done == crash_after:
                raise KeyboardInterrupt
    return run, data


def reference(steps: int, skipped: set[int], bad: frozenset[int] = frozenset()) -> dict[str, Any]:
    data = Batches()
    data.skips = [(number, number + 1) for number in sorted(skipped)]
    run, _ = run_to(MemoryManager(), steps, data=data, bad=bad, guard=None)
    return plain(run.state)


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


@pytest.mark.parametrize("lag", [0, 1, 2, 7])
def test_a_spike_rewinds_and_the_rest_equals_a_run_that_never_saw_it(lag: int) -> None:
    bad = frozenset({22, 23})  # the batches of steps 23 and 24
    manager, guard = MemoryManager(), SpikeGuard(**{**vars(GUARD), "lag": lag})
    run, data = run_to(manager, 60, bad=bad, guard=guard)
    (rewound,) = run.rewinds
    assert (rewound.onset, rewound.to, rewound.skip) == (23, 15, range(21, 29))
    assert plain(run.state) == reference(60, set(range(20, 28)))
    assert data.next == 68
    # The saved history outlives the rewind.
    assert [s.onset for s in GuardState.from_json(manager.lineage[60][0].guard).history] == [23]


def test_when_the_guard_fires_is_a_function_of_the_values_alone() -> None:
    """Whether a save falls between the spike and its lagged reading changes nothing."""
    bad = frozenset({22, 23})
    for crash_after in range(16, 40):
        manager = MemoryManager()
        with pytest.raises(KeyboardInterrupt):
            run_to(manager, 60, bad=bad, crash_after=crash_after)
        run, _ = run_to(manager, 60, bad=bad)
        history = GuardState.from_json(manager.lineage[60][0].guard).history
        assert [spike.onset for spike in history] == [23], crash_after
        assert plain(run.state) == reference(60, set(range(20, 28))), crash_after


def test_a_spike_in_the_last_steps_is_not_saved_as_the_end(manager: MemoryManager) -> None:
    run, _ = run_to(manager, 30, bad=frozenset({28}))
    assert [rewound.onset for rewound in run.rewinds] == [29]
    assert plain(run.state) == reference(30, set(range(26, 34)))


def test_two_spikes_rewind_twice(manager: MemoryManager) -> None:
    bad = frozenset({22, 23, 50, 51})
    run, _ = run_to(manager, 70, bad=bad)
    assert [rewound.onset for rewound in run.rewinds] == [23, 43]
    assert plain(run.state) == reference(70, set(range(20, 28)) | set(range(48, 56)))


def test_a_run_that_always_spikes_gives_up_with_the_history(manager: MemoryManager) -> None:
    with pytest.raises(TooManyRewinds) as caught:
        run_to(manager, 300, bad=frozenset(range(20, 300)))
    assert len(caught.value.history) == 4


def test_a_loss_that_is_nan_rewinds_to_step_zero_of_a_fresh_run(manager: MemoryManager) -> None:
    data, poisoned = Batches(), {4}
    with Run(manager, start(), data, steps=10, guard=GUARD) as run:
        for _, batch in run:
            state, loss = train(run.state, batch, frozenset())
            run.update(state, loss=math.nan if batch in poisoned else loss)
    assert [(r.onset, r.to) for r in run.rewinds] == [(5, 0)]
    assert plain(run.state) == reference(10, set(range(2, 10)))


@pytest.mark.parametrize("onset", [1, 2, 3, 4, 5])
def test_a_spike_early_in_a_run_goes_back_to_its_start(manager: MemoryManager, onset: int) -> None:
    data = Batches()
    with Run(manager, start(), data, steps=12, guard=GUARD) as run:
        for _, batch in run:
            state, loss = train(run.state, batch, frozenset())
            run.update(state, loss=math.nan if batch == onset - 1 else loss)
    (rewound,) = run.rewinds
    assert (rewound.onset, rewound.to) == (onset, 0)
    assert rewound.skip == range(max(1, onset - 2), onset + 6)
    early = f"; no step at or before {onset - 4} is saved, so back to the oldest, 0"
    assert rewound.reason.endswith(early) == (onset < 4)
    assert manager.reasons == [rewound.reason]
    assert plain(run.state) == reference(12, {step - 1 for step in rewound.skip})


@pytest.mark.parametrize(("kept", "skip"), [(21, range(22, 29)), (18, range(21, 29))])
def test_the_oldest_step_left_is_taken_and_keeps_what_it_has_learnt(kept: int, skip: range) -> None:
    """As when `Keep` or a person deleted what lies far enough back."""
    manager = MemoryManager(every=1)
    bad = {22}
    with Run(manager, start(), Batches(), steps=40, guard=GUARD) as run:
        for step, batch in run:
            state, loss = train(run.state, batch, frozenset())
            for old in range(kept if step == 22 else 0):
                manager.lineage.pop(old, None)
            run.update(state, loss=math.nan if batch in bad else loss)
    (rewound,) = run.rewinds
    assert (rewound.onset, rewound.to, rewound.skip) == (
        23,
        max(kept, 19) if kept > 19 else 19,
        skip,
    )
    assert ("no step at or before 19" in rewound.reason) == (kept > 19)
    assert plain(run.state) == reference(40, {step - 1 for step in skip})


def test_no_step_before_the_spike_is_an_error(manager: MemoryManager) -> None:
    def lose_all() -> None:
        with Run(manager, start(), Batches(), steps=12, guard=GUARD) as run:
            for step, _ in run:
                manager.lineage.clear()
                run.update(run.state, loss=math.nan if step == 3 else 1.0)

    with pytest.raises(NotFound, match=r"before step 3, .*found none; save more often"):
        lose_all()


def test_a_guard_that_keep_cannot_serve_is_refused_before_anything_is_written() -> None:
    def enter(every: int, keep: Keep, guard: SpikeGuard = GUARD) -> MemoryManager:
        manager = MemoryManager(every, keep)
        with Run(manager, start(), Batches(), steps=0, guard=guard):
            pass
        return manager

    assert GUARD.reach == 6
    for every, last, kept in ((5, 1, 3), (5, 2, 3), (2, 3, 4), (1, 6, 7), (100, 1, 2)):
        text = rf"back 6 steps .*last {last} are kept, which reach {every * (last - 1)} back; "
        with pytest.raises(Misuse, match=rf"{text}use Keep\(last={kept}\)"):
            enter(every, Keep(last=last))
        enter(every, Keep(last=kept))
    enter(100, Keep(last=3), SpikeGuard())  # that of the README
    enter(1, Keep(last=1, every=50))
    enter(1, Keep())


def test_a_guard_wants_data_that_can_skip(manager: MemoryManager) -> None:
    class Plain:
        def __next__(self) -> int:
            return 0

        def get_state(self) -> Any:
            return {}

        def set_state(self, state: Any) -> None:
            raise AssertionError(state)

    run = Run(manager, start(), Plain(), steps=1, guard=GUARD)
    with pytest.raises(Misuse, match=r"Plain cannot skip batches .*without a guard"):
        run.__enter__()
    assert manager.log == []
    with Run(manager, start(), Plain(), steps=1) as run:
        for _ in run:
            run.update(start())


class Unreadable:
    def __float__(self) -> float:
        raise AssertionError("read too early")


def test_values_are_read_late_and_where_a_step_is_saved() -> None:
    manager, reads = MemoryManager(every=10), []

    class Value:
        def __init__(self, step: int) -> None:
            self.step = step

        def __float__(self) -> float:
            reads.append(self.step)
            return 2.0

    seen = {}
    with Run(manager, start(), Batches(), steps=12, guard=GUARD) as run:
        for step, _ in run:
            run.update(run.state, loss=Value(step), other=1.0 if step >= 10 else Unreadable())
            seen[step] = max(reads, default=0)
    assert seen == {**{n: max(0, n - 2) for n in range(1, 10)}, 10: 10, 11: 10, 12: 12}


def test_without_a_guard_no_value_is_read_between_saves(manager: MemoryManager) -> None:
    with Run(manager, start(), Batches(), steps=4) as run:
        for step, _ in run:
            run.update(run.state, loss=Unreadable() if step < 4 else 1)


def test_sigterm_saves_the_current_step_and_leaves(manager: MemoryManager) -> None:
    called = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    try:
        installed = signal.getsignal(signal.SIGTERM)
        data = Batches()
        with Run(manager, start(), data, steps=100, guard=GUARD) as run:
            for step, batch in run:
                if step == 8:
                    os.kill(os.getpid(), signal.SIGTERM)
                state, loss = train(run.state, batch, frozenset())
                run.update(state, loss=loss)
        assert run.preempted
        assert run.step == 8
        assert manager.all_steps() == [0, 5, 8]
        assert called == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is installed
    finally:
        signal.signal(signal.SIGTERM, before)
    run, _ = run_to(manager, 23)
    assert not run.preempted
    assert plain(run.state) == reference(23, set())


def test_the_handler_is_put_back_after_an_error(manager: MemoryManager) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_to(manager, 9, crash_after=2)
    assert signal.getsignal(signal.SIGTERM) is before
    assert manager.all_steps() == [0]  # an exception saves nothing more


def test_it_works_off_the_main_thread(manager: MemoryManager) -> None:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(run_to(manager, 7)[0]))
    thread.start()
    thread.join()
    assert runs[0].step == 7


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


# --- with the real manager and the real data -----------------------------------------------------

STEPS = 60
BAD = range(22, 26)  # batches


def really_run(
    root: Path, *, crash_after: int | None = None, skips: Any = (), bad: Any = BAD
) -> Any:
    """60 updates with keys, donation and dropout-like noise; the state and the data at the end."""
    pipe = Pipeline(Records(2000), batch_size=4, seed=9).map(int_of, version="1")
    noise = set(pipe.plan.records(bad).tolist())
    data = pipe.iterator()
    data.skip(skips)
    start = {"key": jax.random.key(3), "sum": jnp.zeros(4), "poison": jnp.float32(0)}

    @jax.jit(donate_argnums=0)
    def step_fn(state: Any, batch: jax.Array, bad: jax.Array) -> tuple[Any, jax.Array]:
        key, use = jax.random.split(state["key"])
        total = state["sum"] * 0.9 + batch + jax.random.uniform(use, (4,))
        poison = state["poison"] * 0.9 + 9 * bad
        return {"key": key, "sum": total, "poison": poison}, 2 + 1e-4 * total.mean() + poison

    done = 0
    tier = Shared(root, every=5, keep=Keep(last=3))
    with CheckpointManager(tier) as manager:
        with Run(manager, start, data, steps=STEPS, guard=GUARD) as run:
            for _, batch in run:
                is_bad = bool(noise & set(batch.tolist()))
                state, loss = step_fn(run.state, batch.astype(np.float32), jnp.float32(is_bad))
                run.update(state, loss=loss, extra={"done": run.step + 1})
                done += 1
                if done == crash_after:
                    raise KeyboardInterrupt
        guard = GuardState.from_json(manager.restore(like=run.state).guard)
    end = {**run.state, "key": jax.random.key_data(run.state["key"])}
    return jax.tree.map(lambda x: np.asarray(x).tobytes(), end), data.get_state(), guard, run


def int_of(record: bytes) -> np.int64:
    return np.int64(record.rstrip(b"."))


@pytest.mark.parametrize("crashes", [(), (17, 3, 9), (26, 1, 1), (24, 2, 20, 4)])
def test_kills_and_rewinds_end_in_the_bits_of_the_undisturbed_run(
    tmp_path: Path, crashes: tuple[int, ...]
) -> None:
    for crash_after in crashes:
        with pytest.raises(KeyboardInterrupt):
            really_run(tmp_path / "run", crash_after=crash_after)
    state, position, guard, _ = really_run(tmp_path / "run")
    assert [spike.onset for spike in guard.history] == [23]
    # The skipped batches are those of steps 21 to 28, on the lineage where the spike was seen.
    assert position["skips"] == [[80, 112]]
    expected, where, _, run = really_run(tmp_path / "reference", skips=[(80, 112)])
    assert run.rewinds == []
    assert position == where
    assert state == expected


def test_one_bad_loss_early_does_not_end_the_run_of_the_readme(tmp_path: Path) -> None:
    data = Pipeline(Records(2000), batch_size=4, seed=9).map(int_of, version="1").iterator()
    tier = Shared(tmp_path / "run", every=100, keep=Keep(last=3))
    seen = []
    with (
        CheckpointManager(tier, arena=tmp_path / "arena") as manager,
        Run(manager, {"w": jnp.ones(2)}, data, guard=SpikeGuard(), steps=40) as run,
    ):
        for step, _ in run:
            seen.append(step)
            run.update(run.state, loss=math.nan if step == 21 and seen.count(21) == 1 else 1.0)
        assert [rewound.to for rewound in run.rewinds] == [0]
        assert manager._reader.listing().head.reason == run.rewinds[0].reason
    assert seen[-40:] == [*range(1, 41)]
    assert data.get_state()["skips"] == [[0, 220 * 4]]

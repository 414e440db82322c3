"""The loop helper with a guard: spikes, rewinds, and what is refused."""

from __future__ import annotations

import math
from typing import Any

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
from ckpt.retention import Keep
from ckpt.run import Run
from ckpt.spike import GuardState, SpikeGuard, TooManyRewinds
from ckpt.tiers import Local, Memory, Shared, Tiers


@pytest.fixture
def manager() -> MemoryManager:
    return MemoryManager()


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


def test_with_several_tiers_one_that_serves_the_guard_is_enough() -> None:
    def enter(*tiers: Any) -> None:
        manager: Any = MemoryManager(5, Keep(last=1))
        manager.tiers = Tiers.of(tiers)
        with Run(manager, start(), Batches(), steps=0, guard=GUARD):
            pass

    near = Shared("memory", every=5, keep=Keep(last=1))
    enter(Memory(), near, Shared("far", every=10, keep=Keep(last=2)))
    enter(Local("/disk", every=1, keep=Keep(last=7)), near)
    with pytest.raises(Misuse, match=r"no tier keeps steps that long: .*shared saves every 5"):
        enter(Memory(), near)


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


@pytest.mark.parametrize("again", [0, 1, 2, 6])
def test_killed_between_a_rewind_and_the_first_save_after_it(again: int) -> None:
    """The guard goes on as it was after the rewind, so a second spike counts from there."""
    bad = frozenset({22, 23, 50, 51})
    expected, _ = run_to(MemoryManager(), 70, bad=bad)
    assert len(expected.rewinds) == 2

    class Killed(MemoryManager):
        kills = 0

        def rewind(self, *args: Any, **given: Any) -> Any:
            restored = super().rewind(*args, **given)
            if self.kills:
                self.kills -= 1
                raise KeyboardInterrupt  # the decision stands, and nobody hears of it
            return restored

    manager = Killed()
    for kills in (1, 1):
        manager.kills = kills
        with pytest.raises(KeyboardInterrupt):
            run_to(manager, 70, bad=bad)
        manager.kills = 0
        for crash_after in range(again):  # and again, before anything is saved
            with pytest.raises(KeyboardInterrupt):
                run_to(manager, 70, bad=bad, crash_after=min(crash_after + 1, 4))
    run, _ = run_to(manager, 70, bad=bad)
    assert plain(run.state) == plain(expected.state)
    history = GuardState.from_json(manager.lineage[70][0].guard).history
    assert [spike.onset for spike in history] == [23, 43]
    assert run._guard_state == expected._guard_state


def test_three_rewinds_in_a_row_and_one_too_many_across_restarts(manager: MemoryManager) -> None:
    """Each spike comes right after the rewind of the one before; the count is the run's."""
    found: list[type[BaseException]] = []
    while len(found) < 40 and TooManyRewinds not in found:
        with pytest.raises((KeyboardInterrupt, TooManyRewinds)) as caught:
            run_to(manager, 300, bad=frozenset(range(20, 300)), crash_after=7)
        found.append(caught.type)
    assert TooManyRewinds in found
    assert len(getattr(caught.value, "history", ())) == GUARD.max_rewinds + 1
    assert found.count(KeyboardInterrupt) > 3
    assert len([each for each in manager.log if each[0] == "rewound"]) == GUARD.max_rewinds


def test_a_rewind_and_the_cost_of_saves_are_noted(manager: MemoryManager) -> None:
    run_to(manager, 60, bad=frozenset({22, 23}))
    (spike,) = [each for each in manager.notes if each["event"] == "spike"]
    assert (spike["onset"], spike["seen"], spike["to"], spike["suspect"]) == (23, 24, 15, [])
    costs = [each for each in manager.notes if each["event"] == "inflation"]
    assert {each["step"] for each in costs} <= {e[1] for e in manager.log if e[0] == "saved"}
    assert len(costs) > 5
    assert all(each["steps"] == 1 for each in costs)
    late = MemoryManager(every=1)
    run_to(late, 30, bad=frozenset({22, 23}))
    (spike,) = [each for each in late.notes if each["event"] == "spike"]
    assert spike["suspect"] == [23]  # saved while it was not yet clear that it was a spike

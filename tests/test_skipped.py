"""Skipped steps are the examples that were served in them, whatever the batch size is since."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import answer, ckpt_command, refusal
from hypothesis import given
from hypothesis import strategies as st
from memory_source import Columns
from rows import Rows

import ckpt
from ckpt.errors import Misuse
from ckpt.lineage import Decision, StepId, counting, decide, lineage
from ckpt.manifest import Manifest
from ckpt.skipped import course_of
from ckpt.spans import Commit, Counted, Now
from ckpt.states import spans_of
from datapipe import Pipeline
from tools import rewinding

STATE = {"w": np.zeros(2)}
SIZES = (1, 2, 3, 4, 6, 8)


def iterator(batch_size: int, remainder: Any = "carry") -> Any:
    pipeline = Pipeline(Columns(97), batch_size=batch_size, seed=3, remainder=remainder)
    return pipeline.iterator(prefetch=0)


def mixed(batch_size: int, weights: tuple[int, ...]) -> Any:
    """As many sources as weights."""
    sources = {name: Columns(97, name=name) for name in "abc"[: len(weights)]}
    shares = dict(zip(sources, weights, strict=True))
    pipeline = Pipeline(sources, batch_size=batch_size, seed=3, weights=shares)
    return pipeline.iterator(prefetch=0, on_change="segment")


# --- any history, by the pure functions -----------------------------------------------------------


class Trained:
    """A run that writes down every example of every step. Reads no data."""

    def __init__(
        self, sizes: list[int], remainder: str = "carry", weights: tuple[int, ...] = ()
    ) -> None:
        self.remainder = remainder
        self.weights = weights
        self.mixtures: set[tuple[int, ...]] = set()
        self.decisions: dict[int, Decision] = {}
        self.commits: dict[StepId, Commit] = {}
        self.served: dict[tuple[int, int], set[int]] = {}
        """(attempt, batch) -> its examples."""
        self.told: list[str] = []
        self.begin("start", None, sizes[0])
        self.save()

    @property
    def head(self) -> Decision:
        return self.decisions[max(self.decisions)]

    @property
    def line(self) -> Any:
        return lineage(self.decisions, self.head)

    @property
    def counts(self) -> list[StepId]:
        return counting(self.line, self.commits)

    def begin(self, kind: Any, parent: StepId | None, size: int, skips: Any = None) -> None:
        number = len(self.decisions) + 1
        newest = max(self.counts, default=None) if self.decisions else None
        current = self.head if self.decisions else None
        self.decisions[number] = decide(
            number, kind, parent=parent, newest=newest, current=current, skips=skips
        )
        self.told.append(
            f"{number}: {kind} from {parent}, {size} a batch, weights {self.weights}, skips {skips}"
        )
        self.data = self.iterator(size)
        self.mixtures.add(self.weights)
        self.step = 0
        if parent is not None:
            self.data.set_state(self.commits[parent].state)
            self.step = parent.step
        self.data.skip(self.head.skips.get("data", ()))

    def iterator(self, size: int) -> Any:
        return mixed(size, self.weights) if self.weights else iterator(size, self.remainder)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            at, plan = self.data.next_example, self.data.plan
            self.served[self.head.attempt, self.step] = members(plan.addresses(plan.span(at, 0, 1)))
            self.data.seek(plan.advance(at))
            self.step += 1
        self.told.append(f"trained to {self.step}")

    def ramp(self) -> None:
        """Twice as large batches from now on, by the same attempt."""
        state = self.data.get_state()
        self.data = self.iterator(2 * self.data.batch_size)
        self.data.set_state(state)
        self.told.append(f"{self.data.batch_size} a batch")

    def save(self) -> None:
        step = StepId(self.step, self.head.branch, self.head.attempt)
        taken = {(each.branch, each.step) for each in self.commits}
        if (step.branch, step.step) not in taken:
            size = self.data.batch_size
            self.commits[step] = Commit(step.step, step.attempt, self.data.get_state(), size)
            self.told.append(f"saved {step}")

    def held(self, batches: range, *, live: bool = True) -> Counted:
        """As a rewind asks for it."""
        number = self.head.attempt
        now = Now(self.data.batch_size, self.data.get_state(), number if live else None)
        spans = spans_of("data", self.data)
        course = course_of(
            "data", self.line, self.counts, self.manifest, self.decisions, spans, now
        )
        base = max(step for step in self.counts if step.step <= batches.start)
        return course.held(batches, self.commits[base])

    def manifest(self, step: StepId) -> Any:
        each = self.commits[step]
        entry = {"state": each.state, "batch_size": each.batch_size}
        return Manifest(step, None, 0, (), {}, {"data": entry}, None, None, None, {}, 0)

    def examples(self, batches: range) -> set[int]:
        """The oracle: what the lineage served in them, and what it will, if it goes on."""
        found: set[int] = set()
        for reach in self.line:
            for batch in batches:
                if reach.after <= batch and (reach.upto is None or batch < reach.upto):
                    found |= self.served.get((reach.attempt, batch), set())
        for batch in range(max(batches.start, self.step), batches.stop):
            ahead = self.data.span(self.data.get_state(), batch - self.step, batch - self.step + 1)
            found |= members(ahead)
        return found


def members(ranges: Any) -> set[int]:
    return {example for start, stop in ranges for example in range(start, stop)}


def weighted(draw: Any, before: tuple[int, ...]) -> tuple[int, ...]:
    """Weights of the sources there are, and now and then of one more."""
    count = draw(st.integers(max(2, len(before)), 3), label="sources")
    shares = st.lists(st.integers(0, 3), min_size=count, max_size=count).filter(any)
    return tuple(draw(shares, label="weights"))


def played(draw: Any, sizes: list[int], *, retire: bool, mixing: bool = False) -> Trained:
    if mixing:
        run = Trained(sizes, weights=weighted(draw, ()))
    else:
        run = Trained(sizes, draw(st.sampled_from(["carry", "drop", "keep"]), label="remainder"))
    operations = ["train", "train", "save", "restart", "rewind", "back"]
    operations += ["retire"] if retire else ["ramp"]
    operations += ["weights"] if mixing else []
    for operation in draw(st.lists(st.sampled_from(operations), max_size=14), label="played"):
        size = draw(st.sampled_from(sizes), label="size")
        if operation == "train":
            run.train(draw(st.integers(1, 6), label="steps"))
        elif operation == "save":
            run.save()
        elif operation == "restart":
            run.begin("resume", max(run.counts), size)
        elif operation == "rewind":
            to = draw(st.sampled_from(run.counts), label="to")
            first = to.step + draw(st.integers(0, 6), label="first")
            skipped = run.held(range(first, first + draw(st.integers(1, 5), label="length")))
            run.begin("rewind", to, size, {"data": skipped.ranges})
        elif operation == "back":
            to = draw(st.sampled_from(sorted(run.commits)), label="back to")
            run.begin("rewind", to, size)
        elif operation == "weights":  # from the next start on
            run.weights = weighted(draw, run.weights)
        elif operation == "ramp" and run.data.batch_size <= 24:
            run.save()
            run.ramp()
        elif operation == "retire" and len(run.counts) > 2:
            # The first stays, so that there is something to count from, and the newest always does.
            gone = draw(st.sampled_from(run.counts[1:-1]), label="retired")
            if run.head.parent != gone:
                del run.commits[gone]
                run.told.append(f"retired {gone}")
    return run


def drawn(draw: Any, run: Trained) -> range:
    first = draw(st.integers(0, run.step), label="asked for")
    return range(first, first + draw(st.integers(1, 12), label="so many"))


@given(st.data())
def test_what_was_served_is_skipped_and_nothing_else(data: st.DataObject) -> None:
    """Every step that was gone on from is there, and the attempt that is running has served."""
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), label="sizes")
    run = played(data.draw, sizes, retire=False, mixing=data.draw(st.booleans(), label="mixing"))
    run.train(1)
    batches = drawn(data.draw, run)
    found = run.held(batches)
    last = run.commits[max(run.counts)]
    ramped = last.attempt == run.head.attempt and last.batch_size != run.data.batch_size
    if batches.start < run.step and not (ramped and batches.stop > last.step):
        assert found.covering == (), (run.told, found)
        assert members(found.ranges) == run.examples(batches), (run.told, found)
    assert run.examples(batches) <= members(found.ranges), (run.told, found)


@given(st.data())
def test_whatever_retention_has_left_all_that_was_served_is_skipped(data: st.DataObject) -> None:
    """Where sizes are lost, more is skipped, and told."""
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), label="sizes")
    run = played(data.draw, sizes, retire=True, mixing=data.draw(st.booleans(), label="mixing"))
    run.train(1)
    batches = drawn(data.draw, run)
    found = run.held(batches)
    assert run.examples(batches) <= members(found.ranges), (run.told, found)
    if not found.covering:
        assert members(found.ranges) == run.examples(batches), (run.told, found)
    if len(set(sizes)) == len(run.mixtures) == 1:
        assert found.covering == (), (run.told, found)


@given(st.data())
def test_the_attempt_before_is_meant_where_this_one_has_served_nothing(
    data: st.DataObject,
) -> None:
    """It has seen the spike, and died before it saved a step."""
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2), label="sizes")
    run = Trained(sizes)
    run.train(data.draw(st.integers(1, 6)))
    run.save()
    run.train(data.draw(st.integers(1, 12)))
    batches = range(data.draw(st.integers(0, run.step - 1)), run.step)
    before = run.examples(batches)
    run.begin("resume", max(run.counts), sizes[-1])
    live = data.draw(st.booleans(), label="resumed")
    found = run.held(batches, live=live)
    assert before <= members(found.ranges), (run.told, found)
    assert bool(found.covering) == (sizes[0] != sizes[-1] and batches.stop > run.step)


def test_a_step_that_was_gone_on_from_is_lost_with_its_host() -> None:
    run = Trained([8])
    run.train(3)
    run.save()
    run.begin("resume", max(run.counts), 6)
    run.train(2)
    del run.commits[max(run.counts)]
    for first in range(5):
        batches = range(first, 5)
        found = run.held(batches)
        assert members(found.ranges) == run.examples(batches), first
        assert found.covering == ()


def test_what_is_left_out_since_was_served_before_the_border() -> None:
    """One goes back to a branch on which it had not been left out yet."""
    run = Trained([4])
    run.train(4)
    run.save()
    left = max(run.counts)
    run.begin("rewind", min(run.counts), 4, {"data": run.held(range(1, 3)).ranges})
    run.begin("rewind", left, 3)
    run.train(3)
    run.save()
    run.train(1)
    for lost in (None, left):
        run.commits.pop(lost, None)
        for first in range(8):
            batches = range(first, first + 1)
            found = run.held(batches)
            assert members(found.ranges) == run.examples(batches), (first, lost)
            assert found.covering == ()


def test_batches_that_grow_within_one_attempt() -> None:
    """What each commit tells; where one at a change is gone, all between its neighbours."""
    run = Trained([2])
    for _ in range(3):
        for _ in range(4):
            run.train(1)
            run.save()
        run.ramp()
    ranges = [range(first, stop) for first in range(12) for stop in range(first + 1, 13)]
    for batches in ranges:
        found = run.held(batches)
        assert (members(found.ranges), found.covering) == (run.examples(batches), ()), batches
    for step in (4, 8):
        del run.commits[StepId(step, 1, 1)]
    unclear = {3, 4, 7, 8}
    for batches in ranges:
        found = run.held(batches)
        assert run.examples(batches) <= members(found.ranges), batches
        assert {batch for part in found.covering for batch in part} == unclear & {*batches}, batches


def test_few_commits_are_looked_at() -> None:
    """Those of a bucket are far away."""
    run = Trained([8])
    for size in (8, 6):
        for _ in range(100):
            run.train(1)
            run.save()
        if size == 8:
            run.begin("resume", max(run.counts), 6)
    looked: list[StepId] = []
    manifest = run.manifest
    run.manifest = lambda step: looked.append(step) or manifest(step)  # type: ignore[method-assign,func-returns-value]
    batches = range(20, 180)
    assert members(run.held(batches).ranges) == run.examples(batches)
    assert len(looked) < 20


# --- runs -----------------------------------------------------------------------------------------


def manager(place: Path, **how: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(ckpt.Shared(place / "run", **how), arena=place / "arena")


def trained(m: ckpt.CheckpointManager, data: Any, steps: range) -> None:
    for step in steps:
        next(data)
        m.save(step, STATE, data=data)
    m.wait_until_finished()


def eight_then_six(place: Path) -> None:
    with manager(place) as m, iterator(8) as data:
        m.resume(data=data)
        trained(m, data, range(1, 17))
    with manager(place) as m, iterator(6) as data:
        m.resume(data=data)
        trained(m, data, range(17, 20))


@pytest.mark.parametrize(
    ("to", "steps", "wanted"),
    [
        (6, range(8, 12), [[56, 88]]),
        (14, range(15, 19), [[112, 140]]),  # two of each size
        (18, range(19, 22), [[140, 158]]),  # two that are still to come
    ],
)
def test_steps_before_a_change_of_the_batch_size(
    tmp_path: Path, to: int, steps: range, wanted: list[list[int]]
) -> None:
    """As the command says it, as the next trainer does it, and as the same one does."""
    eight_then_six(tmp_path)
    root = tmp_path / "run"
    option = f"{steps.start}:{steps.stop}"
    planned = answer(
        "rewind", root, "--to", to, "--skip-steps", option, "--reason", "x", "--dry-run"
    )
    assert (planned["new_skips"], planned["covering"]) == ({"data": wanted}, [])
    with manager(tmp_path) as m, iterator(6) as data:
        m.resume(data=data)
        m.rewind(to, skip_steps=steps, data=data)
        assert [list(each) for each in data.plan.skipped] == wanted


def test_steps_of_a_trainer_that_died_before_it_saved_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eight_then_six(tmp_path)
    with manager(tmp_path) as m, iterator(2) as data:
        m.resume(data=data)
        with caplog.at_level(logging.WARNING, "ckpt"):
            m.rewind(18, skip_steps=range(22, 24), data=data)
    # Six each they were [146 + 6, 146 + 18), two each [146 + 4, 146 + 8).
    assert data.plan.skipped == [(150, 170)]
    assert "steps 22 to 23 is not known for certain" in caplog.text


def test_a_commit_that_retention_took_from_the_border(tmp_path: Path) -> None:
    """What is left on either side tells what each of them served."""
    with manager(tmp_path, keep=ckpt.Keep(every=10, last=1)) as m, iterator(8) as data:
        m.resume(data=data)
        trained(m, data, range(1, 14))
    with manager(tmp_path, keep=ckpt.Keep(every=10, last=1)) as m, iterator(6) as data:
        m.resume(data=data)
        trained(m, data, range(14, 24))
        assert m.all_steps()[:2] == [10, 20]
        m.rewind(10, skip_steps=range(13, 16), data=data)
    assert data.plan.skipped == [(96, 116)]


def test_each_of_several_iterators_is_counted_with_its_own_sizes(tmp_path: Path) -> None:
    skipped = {}
    for sizes, steps in (((8, 3), range(1, 9)), ((6, 5), range(9, 12))):
        data = dict(zip(("text", "images"), map(iterator, sizes), strict=True))
        with manager(tmp_path) as m:
            m.resume(data=data)
            for step in steps:
                for each in data.values():
                    next(each)
                m.save(step, STATE, data=data)
            m.wait_until_finished()
            if steps.start == 9:
                m.rewind(4, skip_steps=range(8, 10), data=data)
                skipped = {name: each.plan.skipped for name, each in data.items()}
        for each in data.values():
            each.close()
    assert skipped == {"text": [(56, 70)], "images": [(21, 29)]}


def test_a_guard_leaves_out_what_was_served_before_the_change(tmp_path: Path) -> None:
    guard = ckpt.SpikeGuard(
        window=30, warm_up=10, cool_down=2, margin=8, skip_before=6, skip_after=3, consecutive=2
    )
    for size, steps in ((8, 20), (4, 30)):
        with (
            manager(tmp_path) as m,
            iterator(size) as data,
            ckpt.Run(m, STATE, data, guard=guard, steps=steps) as run,
        ):
            for step, _ in run:
                bad = step in (23, 24) and not run.rewinds
                run.update(run.state, loss=50.0 if bad else 1 + 0.01 * (step % 7))
    # Onset 23: steps 17 to 25, of which 17 to 20 had eight examples each.
    assert [each.skip for each in run.rewinds] == [range(17, 26)]
    assert data.plan.skipped == [(16 * 8, 20 * 8 + 5 * 4)]


@pytest.mark.parametrize("empty", [range(30, 25), range(8, 8)])
@pytest.mark.parametrize("name", ["skip_steps", "skip_batches"])
def test_an_empty_range_is_refused(tmp_path: Path, name: str, empty: range) -> None:
    with manager(tmp_path) as m, iterator(4) as data:
        m.resume(data=data)
        trained(m, data, range(1, 3))
        with pytest.raises(Misuse, match=rf"{name}: range\(\d+, \d+\) is empty"):
            m.rewind(1, data=data, **{name: empty})
        assert m.all_steps() == [1, 2]
        m.rewind(1, data=data)


class Pairs(Rows):
    def __next__(self) -> list[int]:
        return self.take()


class Threes(Pairs):
    batch_size = 3


def test_an_iterator_that_counts_in_its_own_batches_only(tmp_path: Path) -> None:
    with manager(tmp_path) as m:
        data = Pairs()
        m.resume(data=data)
        trained(m, data, range(1, 8))
        m.rewind(4, skip_steps=range(6, 7), data=data)
        assert members(data.skips) == {10, 11}
        trained(m, data, range(5, 9))
    with manager(tmp_path) as m:
        other = Threes()
        m.resume(data=other)
        with pytest.raises(Misuse, match=r"not known to have been 3 .*keyword batch_size"):
            m.rewind(4, skip_steps=range(6, 7), data=other)


def test_the_command_tells_the_two_meanings_of_a_step_by_its_number(tmp_path: Path) -> None:
    """After a rewind by hand the steps before it are those with their batch sizes."""
    eight_then_six(tmp_path)
    root = tmp_path / "run"
    answer("rewind", root, "--to", 15, "--reason", "x", "--yes")
    options = ("--to", 15, "--skip-steps", "18:19", "--reason", "y")
    told = refusal("rewind", root, *options, "--dry-run", code=2)
    assert "--seen-by 2" in told
    planned = answer("rewind", root, *options, "--seen-by", 2, "--dry-run")
    assert planned["new_skips"] == {"data": [[134, 140]]}
    planned = answer("rewind", root, *options, "--seen-by", 3, "--dry-run")
    assert planned["new_skips"] == {"data": [[136, 144]]}


def left(place: Path, sizes: tuple[int, ...]) -> Path:
    """After the nineteen steps two more of each size; then all from 16 on but the newest go."""
    eight_then_six(place)
    step = 19
    for size in sizes:
        with manager(place) as m, iterator(size) as data:
            m.resume(data=data)
            trained(m, data, range(step + 1, step + 3))
            step += 2
    with manager(place) as m:
        m.resume(data={})
        for each in range(16, step):
            m.delete(each)
    return place / "run"


def test_the_size_of_an_attempt_of_which_no_step_is_left_follows_from_its_neighbours(
    tmp_path: Path,
) -> None:
    planned = rewinding.plan(str(left(tmp_path, (4,))), 15, reason="x", skip_steps=range(18, 19))
    assert (planned.new_skips, planned.covering) == ({"data": [(134, 140)]}, ())


def test_of_several_such_attempts_all_is_left_out_and_told(tmp_path: Path) -> None:
    root = left(tmp_path, (4, 2))
    options = ("--to", 15, "--skip-steps", "18:19", "--reason", "x", "--dry-run")
    planned = answer("rewind", root, *options)
    assert (planned["new_skips"], planned["covering"]) == ({"data": [[128, 154]]}, [[17, 18]])
    assert "the batch size of batches 17:18" in ckpt_command("rewind", root, *options).stdout

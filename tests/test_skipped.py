"""Which examples the skipped steps of any history served, by the pure functions."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from memory_source import Columns
from skipping_data import iterator, members

from ckpt.lineage import Decision, StepId, counting, decide, lineage
from ckpt.manifest import Manifest
from ckpt.skipped import course_of
from ckpt.spans import Commit, Counted, Now
from ckpt.states import spans_of
from datapipe import Pipeline

SIZES = (1, 2, 3, 4, 6, 8)


def mixed(batch_size: int, weights: tuple[int, ...]) -> Any:
    """As many sources as weights."""
    sources = {name: Columns(97, name=name) for name in "abc"[: len(weights)]}
    shares = dict(zip(sources, weights, strict=True))
    pipeline = Pipeline(sources, batch_size=batch_size, seed=3, weights=shares)
    return pipeline.iterator(prefetch=0, on_change="segment")


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

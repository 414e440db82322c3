"""A run with tiers whose writer the tests play the trainer of: slots are filled, reports kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

import ckpt
from ckpt import attempts, lanes, lineage, snapshot, tree
from ckpt.arena import Arena, Slot
from ckpt.lineage import Lineage, StepId
from ckpt.messages import Begin, Done, Failed, Job, Released, Report, Setup, Trouble
from ckpt.retention import Keep
from ckpt.store import FileStore, Store
from ckpt.tiers import Durable, Local, Shared
from ckpt.verification import verify
from ckpt.writer import Writer

WAIT_S = 60.0
"""For what is bound to happen; only a test that fails waits so long."""


def state_of(step: int, size: int = 2000) -> dict[str, Any]:
    numbers = np.random.default_rng(step)
    return {"w": numbers.standard_normal(size), "b": np.arange(7) * step}


def meta_of(step: StepId, index: int = 0, count: int = 1) -> dict[str, Any]:
    """As `ckpt.meta` has it."""
    record = {"parent": None, "decision": None, "device": "TFRT_CPU_0", "environment": {}}
    return {
        "step": step.step,
        "attempt": step.attempt,
        "branch": step.branch,
        "process": index,
        "processes": count,
        "time_ns": 1_790_000_000_000_000_000 + step.step,
        "data": {},
        **({"record": record} if index == 0 else {}),
    }


def fill(arena: Arena, step: StepId, index: int = 0, count: int = 1, size: int = 2000) -> Slot:
    """A slot with the snapshot of a step, all of which is in the image of process 0."""
    flat = tree.flatten(state_of(step.step, size) if index == 0 else {})
    return snapshot.take(flat, arena, meta_of(step, index, count), timeout_s=WAIT_S).slot


def begin_run(store: Store, kind: lineage.Kind = "start") -> tuple[int, Lineage]:
    """Claim and decide; the number and lineage of the attempt."""
    number = attempts.claim(store, kind)
    listing = attempts.list_run(store)
    newest = listing.counting[-1] if listing.counting else None
    decision = lineage.decide(
        number, kind, parent=newest, newest=newest, current=listing.head, own_branch=False
    )
    attempts.record(store, decision)
    return number, attempts.list_run(store).lineage


def tiers_of(root: Path, kinds: Sequence[str], **options: Any) -> dict[str, Durable]:
    """Tiers by name: `local`, `shared`, `local-2` and so on, each below `root`."""
    tiers: dict[str, Durable] = {}
    for name in kinds:
        if name.startswith("local"):
            tiers[name] = Local(root / name, keep=Keep(), patience_s=options.get("patience_s", 0))
        else:
            tiers[name] = Shared(root / name, **{"patience_s": 0, **options})
    return tiers


@final
class Play:
    """One process of a run: an arena, a writer, and what it reported."""

    def __init__(
        self,
        root: Path,
        tiers: Mapping[str, Durable],
        stores: Mapping[str, Store] | None = None,
        *,
        slots: int = 4,
        index: int = 0,
        count: int = 1,
        timeout_s: float = WAIT_S,
        begun: tuple[int, Lineage] | None = None,
        **options: Any,
    ) -> None:
        self.tiers, self.index, self.count = dict(tiers), index, count
        self.home = FileStore(tiers["shared"].location)
        self.owner, self.line = begun or begin_run(self.home)
        self.arena = Arena(root / f"arena-p{index}", owner={"run": str(root)}, slots=slots)
        self.setup = Setup(self.tiers, str(self.arena.directory), index, count, timeout_s, 5.0)
        self.reports: list[Report] = []
        self.slots: dict[StepId, Slot] = {}
        self._changed = threading.Condition()
        self._inside = threading.Lock()
        self.writer = Writer(self.setup, self.hear, stores, **options)
        self.writer.tell(Begin(self.owner, self.line))

    def hear(self, report: Report) -> None:
        assert self._inside.acquire(blocking=False), "two reports at once"
        try:
            with self._changed:
                self.reports.append(report)
                if isinstance(report, Released):
                    self.slots.pop(report.id).release()
                self._changed.notify_all()
        finally:
            self._inside.release()

    def id(self, step: int) -> StepId:
        return StepId(step, self.line[0].branch, self.owner)

    def save(self, step: int, *tiers: str, size: int = 2000, **figures: Any) -> StepId:
        """Fill a slot and tell the writer."""
        step_id = self.id(step)
        slot = fill(self.arena, step_id, self.index, self.count, size)
        self.slots[step_id] = slot
        self.writer.tell(Job(step_id, tiers or tuple(self.tiers), slot.number, figures))
        return step_id

    def wait(self, what: Callable[[], Any], why: str = "") -> None:
        """Until it is true after some report."""
        with self._changed:
            assert self._changed.wait_for(what, WAIT_S), (why, self.reports)

    def ends(self) -> dict[tuple[int, str], list[Report]]:
        """Done and Failed by step and tier."""
        found: dict[tuple[int, str], list[Report]] = {}
        for report in self.reports:
            if isinstance(report, Done | Failed) and report.id is not None:
                found.setdefault((report.id.step, report.tier), []).append(report)
        return found

    def ended(self, step: int, tier: str) -> Report:
        """How it ended, once it has."""
        self.wait(lambda: (step, tier) in self.ends(), f"{step} {tier}")
        [report] = self.ends()[step, tier]
        return report

    def done(self, step: int, tier: str) -> Done:
        report = self.ended(step, tier)
        assert isinstance(report, Done), report
        return report

    def error(self, step: int, tier: str) -> BaseException:
        report = self.ended(step, tier)
        assert isinstance(report, Failed), report
        return report.error

    def of(self, kind: type) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]

    def troubles(self, tier: str) -> list[str]:
        return [each.text for each in self.of(Trouble) if each.tier == tier]

    def released(self, step: int) -> bool:
        return any(each.id.step == step for each in self.of(Released))

    def order(self, tier: str) -> list[int]:
        """The steps that ended in a tier, in the order in which they did."""
        return [
            each.id.step
            for each in self.reports
            if getattr(each, "tier", 0) == tier and isinstance(each, Done)
        ]

    def close(self) -> None:
        self.writer.close()
        self.end()

    def finish(self) -> None:
        """After a test, whatever became of it."""
        self.writer.leave(lambda: None).join(5.0)
        self.end()

    def end(self) -> None:
        for slot in self.slots.values():
            slot.release()
        self.arena.close(remove=True)

    def steps(self, tier: str = "shared") -> list[int]:
        """What counts there, after each step was verified."""
        store = FileStore(self.tiers[tier].location)
        found = verify(store.location)
        assert found.intact, found.damage
        assert not found.unfinished, found.unfinished
        return [step.step for step in attempts.list_run(store).counting]


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: Weather, *arguments: Any, **named: Any) -> Any:
        self.meet(name, str(arguments[0]) if arguments else "")
        return getattr(self.inner, name)(*arguments, **named)

    return call


class Weather(Store):
    """Passes everything on to a store in a directory, unless `meet` raises, or takes its time."""

    def __init__(self, location: Any) -> None:
        self.inner = FileStore(location)
        self.location, self.renames = self.inner.location, True
        self.down: BaseException | None = None
        """Raised by every call."""
        self.calm = threading.Event()
        """While it is not set, calls whose name and key `stops` accepts do not return."""
        self.calm.set()
        self.stops: Callable[[str, str], bool] = lambda name, key: True
        self.stopped = threading.Event()
        """One has been stopped."""
        self.calls: list[tuple[str, str]] = []

    def meet(self, name: str, key: str) -> None:
        self.calls.append((name, key))
        if not self.calm.is_set() and self.stops(name, key):
            self.stopped.set()
            assert self.calm.wait(WAIT_S)
        if self.down is not None:
            raise self.down


for _name in (
    *("put", "put_many", "put_if_absent", "read", "read_many", "list", "exists", "delete"),
    *("delete_tree", "clear_temporaries", "move", "write_image", "open_image"),
    *("append", "read_log", "walk"),
):
    setattr(Weather, _name, _passed_on(_name))
Weather.__abstractmethods__ = frozenset()


Start = Callable[..., Play]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(lanes, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(lanes, "SILENT_S", 1.0)
    monkeypatch.setattr(lanes, "SLOWEST_BYTES_PER_S", 1 << 40)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    plays: list[Play] = []

    def begin(*kinds: str, stores: Any = None, keeper: Any = None, **options: Any) -> Play:
        named = {k: options.pop(k) for k in ("patience_s", "compression") if k in options}
        tiers = options.pop("tiers", None) or tiers_of(tmp_path, kinds or ("shared",), **named)
        play = Play(tmp_path, tiers, stores, make_keeper=keeper, **options)
        plays.append(play)
        return play

    yield begin
    for play in plays:
        play.finish()


def check_values(location: Any, steps: Collection[int], size: int = 2000) -> None:
    for step in steps:
        found = ckpt.restore(location, step=step).state
        wanted = state_of(step, size)
        for name in wanted:
            np.testing.assert_array_equal(found[name], wanted[name])


class Notes:
    """A keeper that only remembers."""

    def __init__(self, room: Callable[[], object] = lambda: None) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.room = room
        self.queued: Callable[[], Collection[StepId]] = tuple

    def __call__(self, setup: Any, depot: Any, stores: Any, queued: Any, tell: Any) -> Notes:
        self.queued, self.tell = queued, tell
        return self

    def begin(self, owner: int, line: Any) -> None:
        self.heard.append(("begin", owner))

    def supersede(self, owner: int) -> None:
        self.heard.append(("supersede", owner))

    def saved(self, tier: str, step: StepId, figures: Mapping[str, Any]) -> None:
        self.heard.append(("saved", tier, step.step, dict(figures)))

    def freed(self, tier: str) -> None:
        """Any number of times: it only says that one may look again."""

    def lost(self, tier: str, step: StepId) -> int:
        self.heard.append(("lost", tier, step.step))
        self.room()
        return 0

    def note(self, event: Mapping[str, Any]) -> None:
        self.heard.append(("note", event["event"]))

    def settle(self, then: Callable[[], None]) -> None:
        self.heard.append(("settle",))
        then()

    def close(self) -> None:
        self.heard.append(("close",))

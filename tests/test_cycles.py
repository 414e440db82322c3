"""Kill and start again, many times: the trainer, its writer, both, the whole group.

A training loop with donated buffers, all tiers, and a guard that rewinds on bad data is killed at
drawn moments: during a copy, a write, a publish, a promotion, a rewind, a deletion, or at any time.
At the end of each life, every tier still has the newest step that it was said to have; each start
goes on from all that was acknowledged. In the end the state is bit for bit that of a run that
nobody disturbed, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import acknowledged
import nurseries
import pytest
from acknowledged import Found
from cycle_child import KEPT
from nurseries import Nursery
from pauses.sitecustomize import PAUSE

from ckpt.lineage import Decision, StepId

SEED = int(os.environ.get("CYCLE_SEED", time.time_ns() % 1_000_000))
LIMIT_S = 60.0
TAG = "LASTGOOD_TEST_CYCLE"
"""In the environment of every process of a run, so that those left behind are found."""


class Observer:
    """Reads what trainers say, and writes each line down, durable, before it believes it."""

    def __init__(self, place: Path) -> None:
        self.pipe = place / "pipe"
        os.mkfifo(self.pipe)
        self.events: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.fd = os.open(self.pipe, os.O_RDWR)
        self._log = open(place / "observed.jsonl", "ab")  # noqa: SIM115 - closed by `close`
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        rest = b""
        while True:
            *lines, rest = (rest + os.read(self.fd, 65536)).split(b"\n")
            for line in filter(None, lines):
                self._log.write(line + b"\n")
                self._log.flush()
                os.fsync(self._log.fileno())
                event = json.loads(line)
                with self.changed:
                    self.events.append(event)
                    self.changed.notify_all()
                if event["event"] == "over":
                    return
            if len(rest) > 65536:
                rest = b""  # cut short by a kill

    def wait(self, what: Callable[[], bool], timeout_s: float = LIMIT_S) -> bool:
        with self.changed:
            return self.changed.wait_for(what, timeout_s)

    def close(self) -> None:
        os.write(self.fd, b'\n{"event": "over"}\n')
        self._thread.join()
        self._log.close()
        os.close(self.fd)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """The process that forks trainers."""
    with nurseries.nursery("cycle_child.py", Path(__file__).parent / "pauses") as process:
        yield process


@pytest.fixture
def place() -> Iterator[Path]:
    """In memory, where that is possible: it is processes that die here, not hosts."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="lastgood-cycles-") as name:
        yield Path(name)


class Cycles:
    """A run that is disturbed, and what was acknowledged in it."""

    def __init__(self, nursery: Nursery, place: Path) -> None:
        self.nursery, self.place = nursery, place
        self.tag = f"{os.getpid()}-{place.name}"
        self.observer = Observer(place)
        self.kinds: Counter[str] = Counter()
        self._lives = 0
        self.drained = 0

    def start(
        self, steps: int, pause_s: float = 0.0, at: list[Any] | None = None, pause: str = ""
    ) -> int:
        """A trainer in a process group of its own; its pid."""
        environment = {TAG: self.tag, PAUSE: pause}
        line: dict[str, object] = {
            "place": str(self.place),
            "pipe": str(self.observer.pipe),
            "steps": steps,
            "pause_s": pause_s,
            "environment": environment,
            "at": at,
        }
        self._lives = len(self.observer.events)
        return nurseries.bear(self.nursery, line)

    def wait(self) -> int:
        """How the trainer ended."""
        return nurseries.ended(self.nursery)

    @property
    def said(self) -> list[dict[str, Any]]:
        """By the trainer that was started last."""
        return self.observer.events[self._lives :]

    def has_said(self, event: str, count: int = 1) -> bool:
        return sum(each["event"] == event for each in self.said) >= count

    def writer(self) -> int | None:
        pids = [each["pid"] for each in self.said if each["event"] == "writer"]
        return pids[-1] if pids else None

    @property
    def newest(self) -> int:
        """The newest step of which anything is known."""
        return max((each.get("step", 0) for each in self.observer.events), default=0)

    def drain(self) -> None:
        """Wait until all is written down that dead trainers have said."""
        self.drained += 1
        os.write(self.observer.fd, b'\n{"event": "drained"}\n')
        assert self.observer.wait(
            lambda: self.drained == sum(e["event"] == "drained" for e in self.observer.events)
        ), f"seed {SEED}"

    def look(self) -> Found:
        return acknowledged.look(self.place / "run", self.place / "local", self.place / "arena")

    def check_tiers(self) -> None:
        """After the death of a trainer, its writer may be alive: it decides nothing."""
        self.drain()
        end = time.monotonic() + LIMIT_S / 10
        while missing := acknowledged.not_in_their_tiers(
            self.observer.events, found := self.look(), KEPT
        ):
            # A writer that was superseded while it deleted a step puts it back.
            assert time.monotonic() < end, f"seed {SEED}, {self.kinds}: {missing}\n{found}"
            time.sleep(0.1)

    def check_starts(self) -> None:
        """Each start went on from what had been acknowledged, or from later."""
        self.drain()
        wrong = acknowledged.not_gone_on_from(self.observer.events, self.look().decisions)
        assert not wrong, f"seed {SEED}: {wrong}"

    def processes(self) -> dict[int, str]:
        """Those of this run that are there."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                wanted = f"{TAG}={self.tag}".encode()
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if "cycle_child" not in command or entry.name != str(self.nursery.pid):
                        found[int(entry.name)] = command
        return found

    def wait_for_all(self) -> None:
        """Until no process of the run is there."""
        assert comes(lambda: not self.processes(), LIMIT_S), f"seed {SEED}: {self.processes()}"

    def close(self) -> None:
        self.observer.close()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


MOMENTS: dict[str, tuple[list[Any] | None, str | None]] = {
    "any time": (None, None),
    "copy": (["copy", 4], None),
    "decision": (["decide", 1], None),
    "rewind": (["decide", 2], None),
    "claim": (["claim", 2], None),
    "local write": (None, "FileStore.write_image:2"),
    "publish": (None, "FileStore.move:1"),
    "second publish": (None, "FileStore.move:2"),
    "small files": (None, "FileStore.put_many:2"),
    "deletion": (None, "FileStore.delete_tree:1"),
    "local image": (None, "LocalImages.write:2"),
    "promotion": (None, "LocalImages.open:1"),
    "local deletion": (None, "LocalImages.delete:1"),
}
VICTIMS = ("trainer", "writer", "both", "group")
BEFORE_THE_WRITER = ("decision",)
ENDLESS = 10**6
"""Steps of a life that ends by a kill alone: each moment comes."""


def disturb(cycles: Cycles, draw: random.Random, moment: str, victim: str) -> None:
    """One life with one kill in it."""
    told = cycles.place / f"told-{sum(cycles.kinds.values())}"
    at, pause = MOMENTS[moment]
    trainer = cycles.start(
        ENDLESS,
        draw.choice([0.0, 0.002]),
        None if at is None else [*at, str(told)],
        "" if pause is None else f"{pause}:{told}",
    )
    if moment == "any time":
        assert cycles.observer.wait(lambda: cycles.has_said("restored")), f"seed {SEED}"
        time.sleep(draw.uniform(0.0, 0.5))
    else:
        assert comes(told.exists, LIMIT_S), f"seed {SEED}: {moment} never came: {_errors(cycles)}"
        time.sleep(draw.choice([0.0, 0.05]))
    if victim in ("writer", "both"):
        assert comes(lambda: cycles.writer() is not None, LIMIT_S), (
            f"seed {SEED}: {_errors(cycles)}"
        )
    writer = cycles.writer()
    cycles.kinds[f"{victim} at {moment}"] += 1
    if victim == "group":
        os.killpg(trainer, signal.SIGKILL)
    if victim != "trainer":
        kill(writer)
    if victim == "writer":
        time.sleep(draw.uniform(0.0, 0.5))
    kill(trainer)
    code = cycles.wait()
    assert code == -signal.SIGKILL, f"seed {SEED}: {code}, {_errors(cycles)}"
    cycles.check_tiers()
    if draw.random() < 0.15:
        cycles.wait_for_all()


def comes(what: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.002)
    return found


def last_of(cycles: Cycles) -> dict[str, Any]:
    ended = [each for each in cycles.observer.events if each["event"] == "ended"]
    return ended[-1]


def play(nursery: Nursery, place: Path, rounds: int) -> None:
    """In each round the run is killed at each moment once."""
    draw = random.Random(SEED)
    (place / "disturbed").mkdir()
    (place / "undisturbed").mkdir()
    cycles = Cycles(nursery, place / "disturbed")
    plain = Cycles(nursery, place / "undisturbed")
    try:
        for _ in range(rounds):
            victims = draw.sample(VICTIMS, len(VICTIMS))
            for number, moment in enumerate(draw.sample(list(MOMENTS), len(MOMENTS))):
                victim = victims[number % len(victims)]
                if moment in BEFORE_THE_WRITER:
                    victim = draw.choice(("trainer", "group"))
                disturb(cycles, draw, moment, victim)
        print(f"seed {SEED}", dict(cycles.kinds))
        steps = cycles.newest + 40
        for each in (cycles, plain):
            each.start(steps)
            assert each.wait() == 0, f"seed {SEED}: {_errors(each)}"
            each.drain()
        assert last_of(cycles) == last_of(plain), f"seed {SEED}"
        assert last_of(plain)["skips"], "the loss spiked, and was rewound"
        # A writer that was paused may have woken after the last start had cleared up.
        cycles.wait_for_all()
        cycles.start(steps)
        assert cycles.wait() == 0, f"seed {SEED}: {_errors(cycles)}"
        cycles.check_starts()
        assert last_of(cycles) == last_of(plain), f"seed {SEED}"
        for each in (cycles, plain):
            each.wait_for_all()
            _check_nothing_left(each.place)
    finally:
        cycles.close()
        plain.close()


def _errors(cycles: Cycles) -> str:
    with contextlib.suppress(FileNotFoundError):
        return (cycles.place / "errors").read_text()
    return "no error was written down"


def _check_nothing_left(place: Path) -> None:
    assert not (place / "arena").exists(), f"seed {SEED}: {list((place / 'arena').iterdir())}"
    names = [path.name for path in (place / "run").rglob("*") if "tmp" in path.name]
    assert not names, f"seed {SEED}"
    assert not (place / "run/flush").exists() or not list((place / "run/flush").iterdir())
    images = [path for path in (place / "local").rglob("*") if path.is_file()]
    assert len(images) <= 3, f"seed {SEED}: {images}"


def test_a_kill_at_each_moment_changes_nothing(nursery: Nursery, place: Path) -> None:
    play(nursery, place, 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_kills_at_each_moment_change_nothing(nursery: Nursery, place: Path) -> None:
    play(nursery, place, 8)


# --- that losses are seen -------------------------------------------------------------------


def told(step: int, attempt: int, *tiers: str) -> list[dict[str, Any]]:
    return [
        {"event": "acknowledged", "step": step, "attempt": attempt, "tier": tier} for tier in tiers
    ]


def restored(step: int, attempt: int) -> dict[str, Any]:
    return {"event": "restored", "step": step, "attempt": attempt}


FRESH = Decision(1, "start", None, 1)
BACK = Decision(2, "rewind", StepId(30, 1, 1), 2)
"""To step 30, at which a step of attempt 1 lies."""


def test_a_loss_behind_an_earlier_rewind_is_seen() -> None:
    said = [restored(0, 1), *told(36, 1, "memory"), *told(60, 2, "memory", "shared")]
    for parent, is_lost in ((StepId(60, 2, 2), False), (StepId(48, 2, 2), True)):
        decisions = {1: FRESH, 2: BACK, 3: Decision(3, "resume", parent, 2)}
        events = [*said, restored(parent.step, 3)]
        assert bool(acknowledged.not_gone_on_from(events, decisions)) == is_lost


def test_a_rewind_that_nobody_said_excuses_what_lies_behind_it() -> None:
    events = [restored(0, 1), *told(36, 1, "memory", "shared"), restored(30, 3)]
    decisions = {1: FRESH, 2: BACK, 3: Decision(3, "resume", StepId(30, 1, 1), 2)}
    assert not acknowledged.not_gone_on_from(events, decisions)
    decisions[2] = Decision(2, "resume", StepId(30, 1, 1), 2)
    assert acknowledged.not_gone_on_from(events, decisions)


def test_a_step_lost_in_one_tier_is_seen_though_another_has_it() -> None:
    events = [restored(0, 1), *told(36, 1, "memory", "local", "shared"), *told(38, 1, "memory")]
    whole = {
        "memory": [StepId(38, 1, 1)],
        "local": [StepId(36, 1, 1)],
        "shared": [StepId(36, 1, 1)],
    }
    assert not acknowledged.not_in_their_tiers(events, Found({1: FRESH}, whole), KEPT)
    for tier in KEPT:
        missing = acknowledged.not_in_their_tiers(
            events, Found({1: FRESH}, {**whole, tier: []}), KEPT
        )
        assert [each.split(":")[0] for each in missing] == [tier]
    # Newer ones do not stand for it, unless there are so many that retention took it.
    newer = [StepId(36 + 6 * n, 1, 1) for n in range(1, 5)]
    for count, is_missing in ((3, True), (4, False)):
        found = Found({1: FRESH}, {**whole, "shared": newer[:count]})
        assert bool(acknowledged.not_in_their_tiers(events, found, KEPT)) == is_missing


def test_retention_before_a_rewind_excuses_only_what_has_newer_ones() -> None:
    """Kept were 36, 42, 48 and 54 when the run went back to 45."""
    events = [restored(0, 1), *told(30, 1, "shared")]
    decisions = {1: FRESH, 2: Decision(2, "rewind", StepId(45, 1, 1), 2)}
    for steps, is_missing in (((36, 42, 48, 54), False), ((48, 54), True)):
        there = {"shared": [StepId(step, 1, 1) for step in steps], "memory": [], "local": []}
        found = Found(decisions, there)
        assert bool(acknowledged.not_in_their_tiers(events, found, KEPT)) == is_missing

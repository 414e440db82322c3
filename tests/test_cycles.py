"""Kill and start again, many times: the trainer, its writer, both, the whole group.

A training loop with donated buffers, all tiers, and a guard that rewinds on bad data is killed at
drawn moments: during a copy, a write, a publish, a promotion, a rewind, a deletion, or at any time.
In the end the state is bit for bit that of a run that nobody disturbed, no acknowledged level was
lost on the way, and nothing is left behind.
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

import nurseries
import pytest
from nurseries import Nursery
from pauses.sitecustomize import PAUSE

from ckpt import layout

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
        self._descriptor = os.open(self.pipe, os.O_RDWR)
        self._log = open(place / "observed.jsonl", "ab")  # noqa: SIM115 - closed by `close`
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        rest = b""
        while True:
            *lines, rest = (rest + os.read(self._descriptor, 65536)).split(b"\n")
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
        os.write(self._descriptor, b'\n{"event": "over"}\n')
        self._thread.join()
        self._log.close()
        os.close(self._descriptor)


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

    def __init__(self, nursery: Nursery, place: Path, steps: int) -> None:
        self.nursery, self.place, self.steps = nursery, place, steps
        self.tag = f"{os.getpid()}-{place.name}"
        self.observer = Observer(place)
        self.kinds: Counter[str] = Counter()
        self._lives = 0

    def start(self, pause_s: float, at: list[Any] | None, pause: str | None) -> int:
        """A trainer in a process group of its own; its pid."""
        environment = {TAG: self.tag, PAUSE: pause or ""}
        line: dict[str, object] = {
            "place": str(self.place),
            "pipe": str(self.observer.pipe),
            "steps": self.steps,
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

    def check_honoured(self) -> None:
        """Each start went on from what had been acknowledged, or from later."""
        acknowledged: dict[str, int] = {}
        for event in self.observer.events:
            match event["event"]:
                case "acknowledged":
                    tier = event["tier"]
                    acknowledged[tier] = max(event["step"], acknowledged.get(tier, 0))
                case "rewound":
                    acknowledged = dict.fromkeys(acknowledged, event["step"])
                case "restored":
                    wanted = max(acknowledged.values(), default=0)
                    assert event["step"] >= wanted or self._rewound_unheard(event, wanted), (
                        f"seed {SEED}: {event} after {acknowledged}"
                    )
                    acknowledged = dict.fromkeys(acknowledged, event["step"])

    def _rewound_unheard(self, event: dict[str, Any], wanted: int) -> bool:
        """A rewind was decided, and its trainer died before it could say so."""
        records = sorted((self.place / "run/attempts").glob("*.from.json"))
        rewinds = [
            layout.parse_decision(each.read_bytes(), each.name)
            for each in records
            if b'"rewind"' in each.read_bytes()
        ]
        return any(
            each.parent is not None and each.parent.step <= event["step"] < wanted
            for each in rewinds
        )

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


def disturb(cycles: Cycles, draw: random.Random, number: int) -> int | None:
    """One life with one kill in it; the trainer's exit code if it was not the victim."""
    moment, victim = draw.choice(list(MOMENTS)), draw.choice(VICTIMS)
    told = cycles.place / f"told-{number}"
    at, pause = MOMENTS[moment]
    trainer = cycles.start(
        draw.choice([0.0, 0.002]),
        None if at is None else [*at, str(told)],
        None if pause is None else f"{pause}:{told}",
    )
    if moment == "any time":
        cycles.observer.wait(lambda: cycles.has_said("restored") or cycles.has_said("ended"))
        time.sleep(draw.uniform(0.0, 0.5))
    else:
        end = time.monotonic() + 1.5
        while not told.exists() and time.monotonic() < end and not cycles.has_said("ended"):
            time.sleep(0.002)
        moment = moment if told.exists() else f"{moment}, missed"
        time.sleep(draw.choice([0.0, 0.05]))
    writer = cycles.writer()
    if victim in ("writer", "both") and writer is None:
        victim = "trainer"
    cycles.kinds[f"{victim} at {moment}"] += 1
    if victim == "writer":
        kill(writer)
        time.sleep(draw.uniform(0.0, 0.5))
        if draw.random() < 0.5 and moment == "any time":
            return cycles.wait()
        kill(trainer)
    elif victim == "group":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer, signal.SIGKILL)
        kill(writer)
    else:
        kill(writer if victim == "both" else None)
        kill(trainer)
    code = cycles.wait()
    if draw.random() < 0.3:
        wait_for(lambda: not cycles.processes())
    return None if code == -signal.SIGKILL else code


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end, f"seed {SEED}"
        time.sleep(0.02)


def last_of(cycles: Cycles) -> dict[str, Any]:
    ended = [each for each in cycles.observer.events if each["event"] == "ended"]
    return ended[-1]


def play(nursery: Nursery, place: Path, count: int, steps: int) -> None:
    draw = random.Random(SEED)
    (place / "disturbed").mkdir()
    (place / "undisturbed").mkdir()
    cycles = Cycles(nursery, place / "disturbed", steps)
    plain = Cycles(nursery, place / "undisturbed", steps)
    try:
        plain.start(0.0, None, None)
        assert plain.wait() == 0, (place / "undisturbed/errors").read_text()
        for number in range(count):
            code = disturb(cycles, draw, number)
            assert code in (None, 0), f"seed {SEED}: {_errors(cycles)}"
            if code == 0:
                break
        cycles.start(0.0, None, None)
        assert cycles.wait() == 0, f"seed {SEED}: {_errors(cycles)}"
        print(f"seed {SEED}", dict(cycles.kinds))
        assert plain.observer.wait(lambda: plain.has_said("ended"))
        assert cycles.observer.wait(lambda: cycles.has_said("ended"))
        assert last_of(cycles) == last_of(plain), f"seed {SEED}"
        assert last_of(plain)["skips"], "the loss spiked, and was rewound"
        cycles.check_honoured()
        # A writer that was paused may have woken after the last start had cleared up.
        wait_for(lambda: not cycles.processes() and not plain.processes())
        cycles.start(0.0, None, None)
        assert cycles.wait() == 0, f"seed {SEED}: {_errors(cycles)}"
        assert cycles.observer.wait(lambda: cycles.has_said("ended"))
        assert last_of(cycles) == last_of(plain), f"seed {SEED}"
        for each in (cycles, plain):
            wait_for(lambda each=each: not each.processes())
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


def test_a_dozen_kills_change_nothing(nursery: Nursery, place: Path) -> None:
    play(nursery, place, 12, 400)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_kills_change_nothing(nursery: Nursery, place: Path) -> None:
    play(nursery, place, 100, 4000)

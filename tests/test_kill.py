"""SIGKILL at random moments of starting, saving, deleting and rewinding.

Each moment is drawn within a phase that is seen in the files of the run: an image grows, a part is
there, a name changes. The next start must give the newest committed step, bit for bit, and lose
nothing that the trainer was told is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nurseries
import pytest
from kill_child import same, state_at
from nurseries import Nursery

import ckpt
from ckpt import layout

SEED = int(os.environ.get("KILL_SEED", time.time_ns() % 1_000_000))
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """The process that forks trainers."""
    with nurseries.nursery("kill_child.py") as process:
        yield process


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def arena() -> Iterator[Path]:
    """Where the killed leave their slots; not the usual place, which other tests look into."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="lastgood-kill-") as name:
        yield Path(name, "arena")


class Seen:
    """What the files of a run show at this moment. Everything may vanish while it is looked at."""

    def __init__(self, root: Path, acks: Path) -> None:
        self.claims, self.decisions = set[int](), set[int]()
        self.final, self.states = set[str](), set[str]()
        self.heard = _size(acks)
        for name in _names(root / "attempts"):
            if (number := layout.parse_claim_name(name)) is not None:
                self.claims.add(number)
            elif (number := layout.parse_decision_name(name)) is not None:
                self.decisions.add(number)
        for branch in _names(root):
            if layout.parse_branch_name(branch) is not None:
                for name in _names(root / branch):
                    self._look_at(root / branch / name)

    def _look_at(self, path: Path) -> None:
        if layout.parse_step_name(path.name) is not None:
            self.final.add(f"{path.parent.name}/{path.name}")
        remain = layout.parse_temporary_name(1, path.name)
        if remain is None:
            return
        if remain.state != "making":
            self.states.add(remain.state)
            return
        names = set(_names(path))
        if "commit_success.txt" in names:
            self.states.add("marker")
        elif "manifest.json" in names:
            self.states.add("manifest")
        elif any(name.endswith(".json") for name in names):
            self.states.add("part")
        elif list(_names(path / "state/d")):
            self.states.add("image")
        else:
            self.states.add("making")


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


PHASES: dict[str, Callable[[Seen, Seen], bool]] = {
    "at once": lambda before, now: True,
    "claimed": lambda before, now: now.claims > before.claims,
    "decided": lambda before, now: now.decisions > before.decisions,
    "heard of": lambda before, now: now.heard > before.heard,
    "making": lambda before, now: "making" in now.states,
    "image": lambda before, now: "image" in now.states,
    "part": lambda before, now: "part" in now.states,
    "manifest": lambda before, now: "manifest" in now.states,
    "marker": lambda before, now: "marker" in now.states,
    "named": lambda before, now: bool(now.final - before.final),
    "deleted": lambda before, now: "deleted" in now.states,
    "another claim": lambda before, now: len(now.claims - before.claims) > 1,
    "another decision": lambda before, now: len(now.decisions - before.decisions) > 1,
}


class Drill:
    """A run that is killed again and again, and what is known of it."""

    def __init__(self, root: Path, arena: Path, nursery: Nursery, seed: int) -> None:
        self.root, self.arena, self.nursery, self.seed = root, arena, nursery, seed
        self.acks, self.errors = root.parent / "acks", root.parent / "errors"
        self.rng = random.Random(seed)
        self.read = 0
        self.newest = 0
        self.skips: list[list[int]] = []
        self.rewinding: dict[str, Any] | None = None
        self.history: list[str] = []

    def live(self, rounds: int) -> int:
        """Start a trainer; its pid."""
        order: dict[str, object] = {
            "root": str(self.root),
            "arena": str(self.arena),
            "acks": str(self.acks),
            "errors": str(self.errors),
            "seed": self.rng.randrange(1 << 30),
            "rounds": rounds,
        }
        return nurseries.bear(self.nursery, order)

    def ended(self) -> int:
        return nurseries.ended(self.nursery)

    def kill(self) -> str:
        """One life and death; what was left."""
        phase = self.rng.choice(list(PHASES))
        # Not always the first time that it is seen.
        skip = self.rng.choice([0, 0, 1, 2, 4])
        late_s = self.rng.choice([0.0, 0.0, 0.001, 0.003, 0.01, 0.03]) * self.rng.random()
        reached = PHASES[phase]
        before = Seen(self.root, self.acks)
        pid = self.live(rounds=10_000)
        if phase == "at once":
            late_s = self.rng.uniform(0.0, 0.4)
        end = time.monotonic() + 10
        was = False
        while time.monotonic() < end and Path(f"/proc/{pid}").exists():
            now = Seen(self.root, self.acks)
            is_now = reached(before, now)
            if is_now and not was:
                if skip == 0:
                    break
                skip -= 1
                before = now if phase in ("named", "heard of") else before
            was = is_now and phase not in ("named", "heard of")
            if phase in ("claimed", "decided", "another claim", "another decision") and is_now:
                break
        time.sleep(late_s)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself: told below
            os.kill(pid, signal.SIGKILL)
        status = self.ended()
        left = self.left_over()
        self.history.append(f"{phase} + {1000 * late_s:.1f} ms: {left}")
        assert status == -signal.SIGKILL, f"{self}\n{self.failure()}"
        return left

    def left_over(self) -> str:
        seen = Seen(self.root, self.acks)
        parts = [*sorted(seen.states)]
        if max(seen.claims, default=0) not in {0, *seen.decisions}:
            parts.append("undecided")
        return ", ".join(parts) or "nothing"

    def expected(self) -> int:
        """The newest committed step by the names on the disk."""
        records = sorted(
            (number, name)
            for name in _names(self.root / "attempts")
            if (number := layout.parse_decision_name(name)) is not None
        )
        if not records:
            return 0
        head = json.loads((self.root / "attempts" / records[-1][1]).read_bytes())
        branch = self.root / f"branch-{head['branch']}"
        numbers = (layout.parse_step_name(name) for name in _names(branch))
        steps = [number for number in numbers if number is not None]
        parent = head["parent"]["step"] if head["parent"] else 0
        return max(steps, default=parent)

    def hear(self, expected: int | None = None) -> None:
        """What the trainer said since the last time, checked line by line."""
        if not self.acks.exists():
            return
        lines = self.acks.read_bytes()[self.read :].splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self.read += len(line)
            said = json.loads(line)
            match said.pop("event"):
                case "restored":
                    self.restored(said, expected)
                    expected = None
                case "saved":
                    assert said["step"] == self.newest + 1, f"{self}: {said}"
                    self.newest = said["step"]
                case "rewinding":
                    self.rewinding = said
                case "rewound":
                    assert self.rewinding is not None
                    assert said["step"] == self.rewinding["to"], f"{self}: {said}"
                    self.newest, self.skips, self.rewinding = said["step"], said["skips"], None
                case "closed":
                    pass

    def restored(self, said: dict[str, Any], expected: int | None) -> None:
        what = f"{self}\nrestored {said}, acknowledged was {self.newest}, {expected=}"
        assert said["lost"] == [], what
        step = said["step"]
        if self.rewinding is not None and said["skips"] != self.skips:
            # The rewind was decided, and nobody was told.
            assert step == self.rewinding["to"], what
            assert len(said["skips"]) >= len(self.skips), what
        else:
            assert said["skips"] == self.skips, what
            assert step >= self.newest, f"an acknowledged step is gone: {what}"
        if expected is not None:
            assert step >= expected, what  # what lay in the arena may be newer
        self.newest, self.skips, self.rewinding = step, said["skips"], None

    def failure(self) -> str:
        return self.errors.read_text() if self.errors.exists() else "no error was written"

    def __str__(self) -> str:
        return f"KILL_SEED={self.seed}\n" + "\n".join(self.history)


def drill(run: Drill, kills: int) -> Counter[str]:
    found: Counter[str] = Counter()
    expected: int | None = None
    for _ in range(kills):
        left = run.kill()
        found.update(left.split(", "))
        run.hear(expected)
        expected = run.expected() if run.rewinding is None else None
        assert not run.errors.exists(), f"{run}\n{run.failure()}"
    run.live(rounds=3)
    assert run.ended() == 0, f"{run}\n{run.failure()}"
    run.hear(expected)
    in_order(run)
    return found


def in_order(run: Drill) -> None:
    """After all of it, and a last life that ended well."""
    report = ckpt.verify(run.root)
    assert report.intact, f"{run}\n{report.damage}"
    assert report.unfinished == (), run
    left = [path.name for path in run.root.glob("branch-*/**/*") if "tmp" in path.name]
    assert left == [], run
    restored = ckpt.restore(run.root)
    assert restored.step == run.newest, run
    assert same(restored.state, state_at(run.newest, [(a, b) for a, b in run.skips])), run
    assert not run.arena.exists(), f"{run}\n{list(run.arena.iterdir())}"


def test_thirty_kills(root: Path, arena: Path, nursery: Nursery) -> None:
    found = drill(Drill(root, arena, nursery, SEED), 30)
    print(f"KILL_SEED={SEED}; left by 30 kills: {dict(found)}")
    assert len(found) >= 3, f"KILL_SEED={SEED}: the kills do not spread: {found}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(10))
def test_a_hundred_kills(root: Path, arena: Path, nursery: Nursery, number: int) -> None:
    drill(Drill(root, arena, nursery, SEED + 1 + number), 100)

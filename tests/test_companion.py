"""A writer in a process of its own: it outlives its trainer, and has a successor when it dies."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_states import assert_gone, is_gone, state_of
from waiting import eventually

from ckpt import companion, messages
from ckpt.companion import Companion
from ckpt.errors import StoreFailed
from ckpt.lineage import Reach, StepId
from ckpt.messages import (
    Begin,
    Done,
    Failed,
    Flush,
    Job,
    Note,
    Ready,
    Released,
    Report,
    Said,
    Settle,
    Settled,
    Setup,
)
from ckpt.tiers import Shared

CHILD = Path(__file__).with_name("companion_child.py")
PLAYED = "played_writer"
LINE = (Reach(1, 1, -1, None),)


class Trainer:
    """What a manager would hear."""

    def __init__(self, place: Path, *, module: str = PLAYED) -> None:
        place.mkdir(exist_ok=True)
        self.place = place
        self.changed = threading.Condition()
        self.reports: list[Report] = []
        self.told: list[tuple[StepId, str]] = []
        setup = Setup({"shared": Shared(place)}, str(place / "arena"), 0, 1, 10.0, 3.0)
        self.companion = Companion(setup, self.hear, module=module)
        self.companion.tell(Begin(1, LINE))

    def hear(self, report: Report) -> None:
        with self.changed:
            self.reports.append(report)
            self.changed.notify_all()

    def save(self, step: int, *tiers: str, **figures: Any) -> None:
        id, due = StepId(step, 1, 1), tiers or ("shared",)
        self.told += [(id, tier) for tier in due]
        self.companion.tell(Job(id, due, step % 2, figures))

    def of(self, *kinds: type) -> list[Any]:
        return [each for each in self.reports if isinstance(each, kinds)]

    def wait_for(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, 60), self.reports

    def wait_for_ends(self) -> None:
        self.wait_for(lambda: len(self.of(Done, Failed)) >= len(self.told))

    def must_have_all_once(self) -> None:
        assert Counter((each.id, each.tier) for each in self.of(Done)) == Counter(self.told)
        ids = {id for id, _ in self.told}
        self.wait_for(lambda: len(self.of(Released)) >= len(ids))  # the last comes after its Done
        assert Counter(each.id for each in self.of(Released)) == Counter(ids)

    def written(self) -> list[str]:
        return lines_of(self.place)


def lines_of(place: Path) -> list[str]:
    found = place / "done"
    return found.read_text().splitlines() if found.exists() else []


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path / "run")
    yield trainer
    trainer.companion.close()
    assert_gone(trainer.companion.pid)


# --- told and heard ---------------------------------------------------------------------------


def test_all_is_done_and_told(trainer: Trainer) -> None:
    before = time.monotonic()
    for step in range(1, 6):
        trainer.save(step, "local", "shared")
    trainer.companion.tell(Note({"event": "x"}))
    trainer.companion.tell(Flush())
    trainer.companion.tell(Settle())
    trainer.wait_for(lambda: bool(trainer.of(Settled)))
    trainer.must_have_all_once()
    assert trainer.written()[-2:] == ["note {'event': 'x'}", "flush"]
    assert trainer.of(Ready) == [Ready(trainer.companion.pid)]
    said = trainer.of(Said)
    assert said[0] == Said(logging.INFO, "step 1 comes")
    assert trainer.companion.restarts == 0
    print(f"from nothing to five steps: {time.monotonic() - before:.2f} s")


def test_it_is_in_a_session_of_its_own_and_nice(trainer: Trainer) -> None:
    trainer.wait_for(lambda: bool(trainer.of(Ready)))
    pid = trainer.companion.pid
    assert pid is not None
    assert os.getsid(pid) == pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.readlink(f"/proc/{pid}/fd/0") == os.readlink(f"/proc/{pid}/fd/1") == os.devnull


def test_signals_do_not_end_it(trainer: Trainer) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        # At once, before it can know of signals.
        eventually(lambda: trainer.companion.pid is not None, "no process")
        assert trainer.companion.pid is not None
        os.kill(trainer.companion.pid, number)
    trainer.wait_for(lambda: bool(trainer.of(Ready)))
    os.kill(trainer.companion.pid, signal.SIGPIPE)
    os.kill(trainer.companion.pid, signal.SIGTERM)
    trainer.save(1)
    trainer.wait_for_ends()
    eventually(lambda: "flush" in trainer.written(), "no flush")
    os.write(trainer.companion.wake_fd, bytes([signal.SIGUSR1, signal.SIGTERM]))
    eventually(lambda: trainer.written().count("flush") >= 2, "no flush by the wake socket")
    assert trainer.companion.restarts == 0


def test_close_waits_for_all_that_is_under_way(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "run")
    for step in range(1, 4):
        trainer.save(step, wait=0.1)
    trainer.companion.close()
    trainer.must_have_all_once()
    assert not trainer.companion.is_alive
    assert_gone(trainer.companion.pid)
    trainer.companion.close()


def test_a_writer_that_does_not_go_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(companion, "LEAVE_S", 0.3)
    trainer = Trainer(tmp_path / "run")
    trainer.save(1, wait=0.5)
    trainer.companion.tell(Note({"event": "stay"}))
    trainer.companion.close()
    trainer.must_have_all_once()
    assert trainer.companion.restarts == 0
    assert "killed by SIGKILL" in caplog.text
    assert_gone(trainer.companion.pid)


def test_leave_waits_in_its_thread(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "run")
    last: list[int] = []
    trainer.save(1, wait=0.2)
    thread = trainer.companion.leave(lambda: last.append(len(trainer.of(Done))))
    assert last == []
    thread.join(60)
    assert last == [1]
    assert_gone(trainer.companion.pid)


def test_two_runs_do_not_meet(tmp_path: Path) -> None:
    trainers = [Trainer(tmp_path / name) for name in ("one", "two")]
    for step in range(1, 20):
        for each in trainers:
            each.save(step)
    for each in trainers:
        each.companion.close()
        each.must_have_all_once()
        assert len(each.written()) == 19
    assert trainers[0].companion.pid != trainers[1].companion.pid


def test_nobody_waits_for_a_writer_that_is_stopped(trainer: Trainer) -> None:
    trainer.wait_for(lambda: bool(trainer.of(Ready)))
    pid = trainer.companion.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for step in range(1, 600):  # more than a socket holds
        trainer.save(step, padding="x" * 2000)
    os.kill(pid, signal.SIGCONT)
    trainer.wait_for_ends()
    trainer.must_have_all_once()


# --- the writer dies ----------------------------------------------------------------------------


def test_a_writer_that_is_killed_has_a_successor(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.save(1)
    trainer.save(2, "local", "shared", die="a")
    trainer.save(3)
    trainer.companion.tell(Settle())
    trainer.wait_for(lambda: bool(trainer.of(Settled)))
    trainer.must_have_all_once()
    assert trainer.companion.restarts == 1
    assert len(trainer.of(Ready)) == 2
    assert "killed by SIGKILL" in caplog.text


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    trainer = Trainer(tmp_path / "run")
    for step in range(1, 41):
        trainer.save(step, "local", "shared", wait=0.01)
    kills = 0
    while len(trainer.of(Done)) < len(trainer.told) and kills < 5:
        done = len(trainer.of(Done)) + rng.randint(1, 12)
        trainer.wait_for(lambda: len(trainer.of(Done)) >= min(done, len(trainer.told)))  # noqa: B023
        time.sleep(rng.random() * 0.02)
        pid = trainer.companion.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        kills += 1
    trainer.companion.close()
    trainer.must_have_all_once()
    assert kills >= 3, f"{seed=}"


def test_what_no_writer_survives_fails_and_says_why(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.save(1)
    trainer.wait_for_ends()
    trainer.save(2, "local", "shared", always=True)
    trainer.companion.tell(Settle())
    trainer.wait_for(lambda: len(trainer.of(Failed)) == 2 and bool(trainer.of(Settled)))
    assert {each.tier for each in trainer.of(Failed)} == {"local", "shared"}
    assert Released(StepId(2, 1, 1), 0) in trainer.reports
    error = trainer.of(Failed)[0].error
    assert isinstance(error, StoreFailed)
    assert "exit status 3" in str(error)
    assert "writer='thread'" in str(error)
    assert trainer.companion.restarts >= 2
    trainer.save(3)
    trainer.wait_for(lambda: len(trainer.of(Done)) == 2)
    assert "another one goes on" in caplog.text


@pytest.mark.parametrize("module", ["no_such_module_anywhere", "lines"])
def test_a_writer_that_does_not_start(module: str, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "run", module=module)
    trainer.save(1)
    trainer.companion.close()
    assert [type(each) for each in trainer.of(Failed, Released)] == [Failed, Released]
    assert "exit status" in str(trainer.of(Failed)[0].error)


def test_without_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    trainer = Trainer(tmp_path / "run")
    trainer.save(1)
    trainer.wait_for_ends()
    error = trainer.of(Failed)[0].error
    assert isinstance(error, StoreFailed)
    assert "cannot be started" in str(error)
    monkeypatch.undo()
    trainer.save(2)
    trainer.wait_for(lambda: bool(trainer.of(Done)))
    trainer.companion.close()


def test_of_another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "VERSION", messages.VERSION + 1)
    trainer = Trainer(tmp_path / "run")
    trainer.save(1)
    trainer.companion.close()
    assert "another release" in str(trainer.of(Failed)[0].error)
    assert trainer.companion.restarts == 0, "no other one would do better"


# --- the trainer dies ---------------------------------------------------------------------------


@contextlib.contextmanager
def child(place: Path, what: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A trainer in a process group of its own, in the middle of its saves, and its writer's pid."""
    place.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(CHILD), str(place), PLAYED, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process:
        writer = 0
        try:
            word, number = process.stdout.readline().split()
            assert word == "writer"
            writer = int(number)
            yield process, writer
        finally:
            process.kill()
            if writer:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(writer, signal.SIGCONT)
                eventually(lambda: is_gone(writer), "the writer stays")


def must_say(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    assert any(line == f"{word}\n" for line in process.stdout), f"it has not said {word}"


ALL = ["1 shared", "2 shared", "3 shared"]


def test_what_is_queued_when_the_trainer_is_killed_gets_there(tmp_path: Path) -> None:
    with child(tmp_path / "run") as (process, writer):
        eventually(lambda: bool(lines_of(tmp_path / "run")), "nothing written")
        process.kill()
        eventually(lambda: is_gone(writer), "the writer stays")
        assert lines_of(tmp_path / "run") == [*ALL, "flush"]


def test_sigterm_to_the_whole_group(tmp_path: Path) -> None:
    with child(tmp_path / "run") as (process, writer):
        eventually(lambda: bool(lines_of(tmp_path / "run")), "nothing written")
        os.killpg(process.pid, signal.SIGTERM)
        os.kill(writer, signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM
        eventually(lambda: is_gone(writer), "the writer stays")
        written = lines_of(tmp_path / "run")
        assert written[:3] == ALL
        assert set(written[3:]) == {"flush"}


def test_sigterm_while_a_c_call_of_the_trainer_keeps_the_lock(tmp_path: Path) -> None:
    with child(tmp_path / "run", "keeps the lock") as (process, _):
        must_say(process, "kept")
        process.send_signal(signal.SIGTERM)
        eventually(lambda: "flush" in lines_of(tmp_path / "run"), "no flush")
        assert process.poll() is None, "still in that call"


def test_a_writer_that_hangs_goes_after_the_grace(tmp_path: Path) -> None:
    with child(tmp_path / "run", "hang") as (process, writer):
        must_say(process, "begun")
        process.kill()
        process.wait()
        assert not is_gone(writer)
        eventually(lambda: is_gone(writer), "the writer stays")


def test_a_stopped_writer_notices_when_it_goes_on(tmp_path: Path) -> None:
    with child(tmp_path / "run") as (process, writer):
        must_say(process, "begun")
        os.kill(writer, signal.SIGSTOP)
        process.kill()
        process.wait()
        eventually(lambda: state_of(writer) == "T", "it runs")
        os.kill(writer, signal.SIGCONT)
        eventually(lambda: is_gone(writer), "the writer stays")
        assert lines_of(tmp_path / "run") == [*ALL, "flush"]


def test_a_forked_child_neither_speaks_to_the_writer_nor_keeps_it(tmp_path: Path) -> None:
    with child(tmp_path / "run", "forked") as (process, writer):
        must_say(process, "begun")
        (forked,) = (
            int(pid)
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if int(pid) != writer
        )
        process.kill()
        process.wait()
        try:
            eventually(lambda: is_gone(writer), "it waits for the forked child")
            assert not is_gone(forked)
        finally:
            os.kill(forked, signal.SIGKILL)
        assert lines_of(tmp_path / "run") == [*ALL, "flush"], "or the child has said something"

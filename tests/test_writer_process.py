"""What the writer brings home when its trainer has died: real saves, into real stores."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dying_trainer import fill, state_of, tiers_in
from process_states import assert_gone, is_gone
from waiting import eventually

from ckpt import attempts, lineage, messages
from ckpt.arena import Arena, Slot
from ckpt.companion import Companion
from ckpt.lineage import StepId
from ckpt.messages import Begin, Done, Failed, Job, Ready, Released, Setup
from ckpt.owning import remove_stale
from ckpt.store import FileStore
from ckpt.tiers import Shared
from ckpt.tree import flatten
from ckpt.verification import verify

CHILD = Path(__file__).with_name("dying_trainer.py")
BOTH = ["local", "shared"]


def begin_run(store: FileStore) -> tuple[int, lineage.Lineage]:
    """Claim and decide; the number and lineage of the attempt."""
    number = attempts.claim(store, "start")
    decision = lineage.decide(number, "start", parent=None, newest=None, current=None)
    attempts.record(store, decision)
    return number, attempts.list_run(store).lineage


def tree_record(size: int) -> str:
    return flatten(state_of(1, size)).outline.record.decode()


class Trainer:
    """A process that will die, and its writer."""

    def __init__(self, root: Path, begun: tuple[int, Any], **how: Any) -> None:
        owner, line = begun
        play = {"root": str(root), "index": 0, "count": 1, "owner": owner, "size": 2000, **how}
        play["line"] = [list(vars(each).values()) for each in line]
        play["tree"] = tree_record(play["size"])
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(play)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.writer = int(self.until("writer ").split()[1])

    def until(self, begins: str) -> str:
        """The line it says that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(begins):
                return line
        raise AssertionError(f"it has not said {begins}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def wait_for_writer(self) -> None:
        eventually(lambda: is_gone(self.writer), "the writer stays")


@contextlib.contextmanager
def killed(*trainers: Trainer) -> Iterator[None]:
    try:
        yield
    finally:
        for each in trainers:
            with each.process:
                each.process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.writer, signal.SIGCONT)
            each.wait_for_writer()


def steps_at(place: Path) -> list[int]:
    """What counts there, after each step was verified; nothing is unfinished."""
    found = verify(str(place))
    assert found.intact, found.damage
    assert not found.unfinished, found.unfinished
    return [step.step for step in attempts.list_run(FileStore(str(place))).counting]


def assert_left(root: Path) -> None:
    """Only slots, which a later manager may adopt, or the next clean-up removes."""
    assert "arena-p0" in [stale.directory.name for stale in remove_stale(root, older_than_s=0)]
    assert not list(root.glob("arena*"))
    assert not [p for p in root.rglob("*") if ".tmp-" in p.name]


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_trainer_loses_no_snapshot(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    begun = begin_run(FileStore(str(tmp_path / "shared")))
    last = rng.randint(2, 6)
    trainer = Trainer(tmp_path, begun, steps=last, due=[1, 2], size=300_000)
    with killed(trainer):
        trainer.until(f"filled {last}")
        time.sleep(rng.random() * 0.02)
        trainer.kill()
        trainer.wait_for_writer()
        wanted = sorted({1, 2, last})
        assert steps_at(tmp_path / "shared") == wanted, f"{seed=}"
        assert_left(tmp_path)


def test_sigterm_to_the_group_brings_home_what_lies_in_memory(tmp_path: Path) -> None:
    begun = begin_run(FileStore(str(tmp_path / "shared")))
    trainer = Trainer(tmp_path, begun, steps=3, due=[])
    with killed(trainer):
        trainer.until("filled 3")
        os.killpg(trainer.process.pid, signal.SIGTERM)
        assert trainer.process.wait() == -signal.SIGTERM
        trainer.wait_for_writer()
        assert steps_at(tmp_path / "shared") == [3]
        assert_left(tmp_path)


def test_a_trainer_that_lives_on_hears_of_the_flush(tmp_path: Path) -> None:
    begun = begin_run(FileStore(str(tmp_path / "shared")))
    trainer = Trainer(tmp_path, begun, steps=3, due=[])
    with killed(trainer):
        trainer.until("filled 3")
        os.kill(trainer.writer, signal.SIGTERM)
        trainer.until("done 3 shared")
        assert steps_at(tmp_path / "shared") == [3]
        assert not is_gone(trainer.writer)


def test_two_processes_bring_home_the_newest_that_both_have(tmp_path: Path) -> None:
    begun = begin_run(FileStore(str(tmp_path / "shared")))
    trainers = [Trainer(tmp_path, begun, index=k, count=2, steps=3 + k, due=[1]) for k in range(2)]
    with killed(*trainers):
        for k, each in enumerate(trainers):
            each.until(f"filled {3 + k}")
        for each in trainers:
            each.kill()
        for each in trainers:
            each.wait_for_writer()
        assert steps_at(tmp_path / "shared") == [1, 3]
        assert_left(tmp_path)


def test_a_stopped_writer_finishes_when_it_goes_on(tmp_path: Path) -> None:
    begun = begin_run(FileStore(str(tmp_path / "shared")))
    trainer = Trainer(tmp_path, begun, steps=2, due=[1])
    with killed(trainer):
        os.kill(trainer.writer, signal.SIGSTOP)
        trainer.until("filled 2")
        trainer.kill()
        assert not is_gone(trainer.writer)
        os.kill(trainer.writer, signal.SIGCONT)
        trainer.wait_for_writer()
        assert steps_at(tmp_path / "shared") == [1, 2]


def test_a_writer_that_is_killed_over_and_over(tmp_path: Path) -> None:
    rng, size = random.Random(1), 100_000
    owner, line = begin_run(FileStore(str(tmp_path / "shared")))
    arena = Arena(tmp_path / "arena-p0", owner={"run": "tests"}, slots=3)
    setup = Setup(tiers_in(tmp_path), str(arena.directory), 0, 1, 30.0, 20.0)
    changed, reports = threading.Condition(), list[messages.Report]()
    slots: dict[StepId, Slot] = {}

    def hear(report: messages.Report) -> None:
        with changed:
            reports.append(report)
            if isinstance(report, Released):
                slots.pop(report.id).release()
            changed.notify_all()

    def wait_for(step: int) -> None:
        def is_done() -> bool:
            return any(
                isinstance(r, Done) and (r.id.step, r.tier) == (step, "shared") for r in reports
            )

        with changed:
            assert changed.wait_for(is_done, 60), reports

    companion = Companion(setup, hear)
    companion.tell(Begin(owner, line))
    for step in range(1, 10):
        id = StepId(step, line[0].branch, owner)
        slots[id] = slot = fill(arena, id, 0, 1, size, tree_record(size).encode())
        companion.tell(Job(id, tuple(BOTH), slot.number))
        if step % 3 == 0:
            wait_for(step - 2)
            assert companion.pid is not None
            time.sleep(rng.random() * 0.03)
            os.kill(companion.pid, signal.SIGKILL)
    companion.close()
    assert not slots
    done = [(each.id.step, each.tier) for each in reports if isinstance(each, Done)]
    assert sorted(done) == [(step, tier) for step in range(1, 10) for tier in BOTH]
    assert not [each for each in reports if isinstance(each, Failed)]
    assert companion.restarts >= 2, "the last one may have had nothing left to do"
    assert steps_at(tmp_path / "shared") == list(range(1, 10))
    arena.close(remove=True)


def test_how_soon_it_is_ready(tmp_path: Path) -> None:
    begun = time.monotonic()
    took: list[float] = []
    tiers: dict[str, Any] = {"shared": Shared(tmp_path)}
    setup = Setup(tiers, str(tmp_path / "arena"), 0, 1, 1.0, 1.0)

    def hear(report: messages.Report) -> None:
        if isinstance(report, Ready):
            took.append(time.monotonic() - begun)

    companion = Companion(setup, hear)
    made = time.monotonic() - begun
    companion.close()
    assert len(took) == 1
    assert_gone(companion.pid)
    print(f"\ncompanion made in {1000 * made:.1f} ms, writer ready in {1000 * took[0]:.0f} ms")


def test_it_is_free_of_jax() -> None:
    code = (
        "import sys, ckpt.writer_process, ckpt.writer, ckpt.flush\n"
        "assert not {'jax', 'tensorstore', 'orbax'} & {m.split('.')[0] for m in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- by hand --------------------------------------------------------------------------------------


@contextlib.contextmanager
def by_hand(
    under: tuple[str, ...] = (), **how: Any
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A writer, and the socket of its trainer."""
    here, there = socket.socketpair()
    wake, wake_end = socket.socketpair()
    with here, wake:
        process = subprocess.Popen(
            [
                *(*under, sys.executable, "-m", "ckpt.writer_process"),
                *(str(there.fileno()), str(wake_end.fileno())),
            ],
            pass_fds=(there.fileno(), wake_end.fileno()),
            **how,
        )
        there.close()
        wake_end.close()
        with process:
            try:
                yield process, here
            finally:
                process.kill()


def setup_in(place: Path) -> bytes:
    return messages.emit(Setup({"shared": Shared(place)}, str(place / "a"), 0, 1, 1.0, 1.0))


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"nonsense\n", 76),
        (b'["Setup",{"version":99}]\n', 76),
        (b'["Flush",{}]\n', 76),
        (b"SETUP" + b"nonsense\n", 65),
        (b"SETUP" + b'["Ready",{"pid":1,"version":1}]\n', 65),
        (b"SETUP" + b'["Close",{}]\n', 0),
        (b"", 0),
        (b"SETUP", 0),
    ],
)
def test_what_ends_it(text: bytes, status: int, tmp_path: Path) -> None:
    with by_hand(stderr=subprocess.PIPE) as (process, trainer):
        trainer.sendall(text.replace(b"SETUP", setup_in(tmp_path)))
        trainer.shutdown(socket.SHUT_WR)
        _, said = process.communicate(timeout=60)
        assert process.returncode == status, said
        assert (b"ckpt: writer" in said) == (status != 0)


def test_a_broken_standard_error_does_not_end_it(tmp_path: Path) -> None:
    read, write = os.pipe()
    with by_hand(stderr=write) as (process, trainer):
        os.close(read)
        os.close(write)
        trainer.sendall(setup_in(tmp_path) + messages.emit(Begin(1, ())) + b'["Close",{}]\n')
        assert process.wait(60) == 0


def test_without_standard_error_no_file_takes_its_place(tmp_path: Path) -> None:
    with by_hand(("sh", "-c", 'exec "$@" 2>&-', "sh")) as (process, trainer):
        trainer.sendall(setup_in(tmp_path))
        assert b"Ready" in trainer.recv(1000)
        assert os.readlink(f"/proc/{process.pid}/fd/2") == os.devnull

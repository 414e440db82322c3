"""Checks of ends: closed, collected, killed, and nothing is left running or lying about."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

from datapipe.conformance.check import Check, check
from datapipe.conformance.children import Child, Tell, group
from datapipe.conformance.loader import Loader, Setting
from datapipe.conformance.trial import FailedError, Trial, close, same

_ROUNDS: Final = 100
_THREADS_S = 5.0  # that threads have to end
_LEFT_S = 20.0  # that processes and blocks have to go
_SHARED: Final = "/dev/shm/"
_UNNAMED: Final = " /memfd:"


@check()
def closed_and_collected_at_any_time(trial: Trial) -> None:
    """A deadlock between the thread that works ahead and close or the collector; threads leak."""
    setting = trial.setting()
    batches, states = trial.states(setting)
    before = threading.active_count()
    for round_ in range(_ROUNDS):
        iterator = trial.loader.open(setting)
        first = 0
        if trial.rng.random() < 0.5:
            first = trial.rng.randrange(len(states))
            iterator.set_state(states[first])
        count = trial.rng.choice([0, 1, 2, 3, None])
        found = trial.take(iterator, count)
        wanted = batches[first:] if count is None else batches[first : first + count]
        same(found, wanted, f"round {round_}")
        way = trial.rng.randrange(4)
        if way == 0:
            iterator.set_state(states[1])
        if way < 3:
            close(iterator)
        if way == 2:
            close(iterator)  # twice
        del iterator
        if way == 3 or round_ % 10 == 0:
            gc.collect(1)  # the older ones take long, and do not have it
    _wait_for_threads(before)


def _wait_for_threads(before: int) -> None:
    """Refuses threads that are still there after a while."""
    deadline = time.monotonic() + _THREADS_S
    while threading.active_count() > before + 2:
        if time.monotonic() > deadline:
            left = [thread.name for thread in threading.enumerate()]
            raise FailedError(f"{_ROUNDS} iterators left {len(left) - before} threads: {left[:5]}")
        time.sleep(0.02)


@check("workers")
def killed_and_nothing_is_left(trial: Trial) -> None:
    """Workers outlive a trainer that was killed; shared-memory blocks leak."""
    setting = trial.setting(200, epochs=100, workers=2)
    with Child(_serve_until_killed, trial.loader, setting) as child:
        child.answer(60.0)
        leader = child.process.pid
        blocks = {block for pid in group(leader) for block in _blocks(pid)}
        unnamed = {number for pid in group(leader) for number in _unnamed(pid)}
        since_ticks = _started_ticks(leader)
        os.kill(leader, signal.SIGKILL)
        child.process.wait()
        deadline = time.monotonic() + _LEFT_S
        while (alive := {*group(leader), *_holders(unnamed, since_ticks)}) or _present(blocks):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for pid in _holders(unnamed, since_ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    left = _present(blocks)
    for block in left:
        Path(block).unlink(missing_ok=True)
    if alive or left:
        raise FailedError(
            f"{_LEFT_S:g} s after a kill there are {len(alive)} processes and {len(left)} blocks "
            f"of shared memory: {left[:3]}"
        )


def _serve_until_killed(tell: Tell, loader: Loader, setting: Setting) -> None:
    trial = Trial(loader, 0)
    iterator = loader.open(setting)
    trial.take(iterator, 5)
    tell("serving")
    while True:
        signal.pause()


def _blocks(pid: int) -> set[str]:
    """The files in shared memory that a process maps."""
    try:
        with open(f"/proc/{pid}/maps") as stream:
            places = [line.split(maxsplit=5)[5].strip() for line in stream if _SHARED in line]
    except OSError:
        return set()
    return {place for place in places if not place.endswith("(deleted)")}


def _unnamed(pid: int) -> set[tuple[str, str]]:
    """Device and inode of the memory without a name that a process maps and others can.

    It goes with the last process that maps it, so that it leaks as long as one of these lives.
    """
    try:
        with open(f"/proc/{pid}/maps") as stream:
            fields = [line.split(maxsplit=5) for line in stream if _UNNAMED in line]
    except OSError:
        return set()
    return {(each[3], each[4]) for each in fields}


def _holders(unnamed: set[tuple[str, str]], since_ticks: int) -> set[int]:
    """The processes, of whatever group, that map some of it and were started no earlier."""
    if not unnamed:
        return set()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid for pid in pids if unnamed & _unnamed(pid) and _started_ticks(pid) >= since_ticks}


def _started_ticks(pid: int) -> int:
    """When a process was started, since boot; before all others if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return int(stream.read().rpartition(")")[2].split()[19])
    except OSError:
        return -1


def _present(blocks: set[str]) -> list[str]:
    return sorted(block for block in blocks if os.path.exists(block))


CHECKS: Final[tuple[Check, ...]] = (
    closed_and_collected_at_any_time,
    killed_and_nothing_is_left,
)

"""Plays scenes in child processes, and reads what they saw."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import process_stage as stage
import pytest

import ckpt
from ckpt import attempts, commit, layout
from ckpt.store import FileStore

HERE = Path(__file__).parent
Seen = dict[str, list[dict[str, Any]]]
"""What each process saw of a scene."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where scenes are played; for the whole module."""
    place = tmp_path_factory.mktemp("processes")
    yield place
    shutil.rmtree(place)


def play(
    directory: Path,
    *scenes: str,
    count: int = 2,
    meanwhile: Callable[[list[subprocess.Popen[bytes]]], None] | None = None,
) -> tuple[Seen, list[int]]:
    """Runs the scenes in `count` processes; what they saw, and the exit statuses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={stage.DEVICES // count}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    logs = [directory / f"{scenes[0]}.{index}.log" for index in range(count)]
    with contextlib.ExitStack() as stack:
        children: list[subprocess.Popen[bytes]] = []
        for index, log in enumerate(logs):
            words = [str(index), str(count), str(port), str(directory), *scenes]
            process = subprocess.Popen(
                [sys.executable, str(HERE / "process_child.py"), *words],
                env=environment,
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            children.append(process)
        if meanwhile is not None:
            meanwhile(children)
        statuses = [process.wait(timeout=150) for process in children]
    if any(status not in (0, -signal.SIGKILL, -signal.SIGABRT) for status in statuses):
        raise AssertionError(f"{statuses}: {[log.read_text()[-3000:] for log in logs]}")
    seen: Seen = {}
    for scene in scenes:
        files = [directory / f"{scene}.{index}.json" for index in range(count)]
        seen[scene] = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        for index, each in enumerate(seen[scene]):
            assert "raised" not in each, f"{scene}, process {index}: {each['raised']}"
    return seen, statuses


def manager(root: Path, **options: Any) -> ckpt.CheckpointManager:
    return ckpt.CheckpointManager(
        ckpt.Shared(root, **options), arena=root.with_name(f"{root.name}.arena")
    )


@contextlib.contextmanager
def batches(first: int) -> Iterator[Any]:
    """The single-process iterator, standing at batch `first`."""
    with stage.pipeline().iterator() as data:
        for _ in range(first):
            next(data)
        yield data


def ids(first: int, count: int) -> list[list[int]]:
    """Batches as a single process has them."""
    with batches(first) as data:
        return [next(data)["id"].tolist() for _ in range(count)]


def joined(*hosts: list[dict[str, list[int]]]) -> list[list[int]]:
    """The batches of which each host had some rows; all of them together, no row twice."""
    found = []
    for parts in zip(*hosts, strict=True):
        rows = {int(start): rows for part in parts for start, rows in part.items()}
        assert len(rows) == sum(map(len, parts)) == stage.DEVICES
        found.append([row for start in sorted(rows) for row in rows[start]])
    return found


def same(found: list[dict[str, Any]], *names: str) -> Any:
    """What both processes saw alike."""
    for name in names or found[0]:
        assert found[0][name] == found[1][name], name
    return found[0][names[0]] if names else found[0]


def headers_of(root: Path, number: int) -> tuple[str, list[Any]]:
    store = FileStore(root)
    step = next(step for step in attempts.list_run(store).counting if step.step == number)
    name = layout.step_name(step.branch, step.step)
    return name, commit.read_headers(store, name, step.attempt)

"""A process that has imported everything and forks a trainer for each line it reads.

So a trainer lives after milliseconds. Lines in: the arguments of a life, as a JSON object. Lines
out: the pid of each trainer, then how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

LIMIT_S = 60.0
Nursery = subprocess.Popen[str]


def serve(live: Callable[..., int]) -> None:
    """In that process: `live` is a life, and returns its exit status."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os._exit(live(**json.loads(line)))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


@contextlib.contextmanager
def nursery(script: str, *first: Path) -> Iterator[Nursery]:
    """The process of a script of the tests; `first`: where its modules are looked for first."""
    here = Path(__file__).parent
    path = [*map(str, first), str(here.parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, str(here / script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        },
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(LIMIT_S)
        assert process.stdout is not None
        process.stdout.close()


def bear(process: Nursery, line: dict[str, object]) -> int:
    """Start a life; its pid."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(line) + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def ended(process: Nursery) -> int:
    """Wait for the end of the life that was started last; its exit code."""
    assert process.stdout is not None
    return int(process.stdout.readline())

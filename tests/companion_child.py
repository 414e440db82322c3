"""A trainer with a companion, which is killed: `companion_child.py <directory> <module> <what>`.

Says the pid of its writer when that is ready, then what is reported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from ckpt import signals
from ckpt.companion import Companion
from ckpt.lineage import Reach, StepId
from ckpt.messages import Begin, Job, Note, Ready, Report, Setup
from ckpt.tiers import Shared


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main() -> None:
    directory, module, what = sys.argv[1:4]
    ready = threading.Event()

    def tell(report: Report) -> None:
        if isinstance(report, Ready):
            say(f"writer {report.pid}")
            ready.set()
        else:
            say(type(report).__name__)

    setup = Setup({"shared": Shared(directory)}, f"{directory}/arena", 0, 1, 10.0, 2.0)
    companion = Companion(setup, tell, module=module)
    signals.install(companion.wake_fd)
    companion.tell(Begin(1, (Reach(1, 1, -1, None),)))
    ready.wait(60)
    figures = {"hang": 1} if what == "hang" else {"wait": 0.15}
    for step in range(1, 4):
        companion.tell(Job(StepId(step, 1, 1), ("shared",), None, figures))
    if what == "forked" and os.fork() == 0:
        # Holds no socket, or the writer would think that the trainer lives.
        companion.tell(Note({"event": "of a child"}))
        companion.close()
        assert not companion.is_alive
        signal.pause()
    if what == "keeps the lock":
        text = b"kept\n" + bytes(1 << 20)  # more than a pipe takes: this call does not come back
        arguments = (1, text, ctypes.c_size_t(len(text)))
        threading.Thread(target=ctypes.PyDLL(None).write, args=arguments, daemon=True).start()
        signal.pause()
    say("begun")
    sys.stdin.readline()


if __name__ == "__main__":
    main()

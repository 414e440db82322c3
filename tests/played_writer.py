"""A writer that plays its part without stores: `ckpt.writer_process` with `Played` in it.

What it does to a job stands in the figures of the job: "wait" seconds, "die" (once, until a file of
that name is there), "hang". Each (step, tier) that is done is a line of the file `done` in the
directory of the first tier; so are the flushes.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

from ckpt.messages import (
    Begin,
    Close,
    Done,
    Flush,
    Job,
    Note,
    Released,
    Settle,
    Settled,
    Setup,
    Tell,
    ToWriter,
)
from ckpt.writer_process import serve


class Played:
    def __init__(self, setup: Setup, tell: Tell) -> None:
        self.place = Path(str(next(iter(setup.tiers.values())).location))
        self.tell_trainer = tell
        self.queue: queue.SimpleQueue[ToWriter] = queue.SimpleQueue()
        self.tell = self.queue.put
        self.begun = self.stays = False
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.queue.put(Close())
        self.thread.join()
        if self.stays:
            time.sleep(600)

    def write_down(self, text: str) -> None:
        with (self.place / "done").open("a") as file:
            file.write(text + "\n")

    def loop(self) -> None:
        while True:
            match self.queue.get():
                case Close():
                    return
                case Begin():
                    self.begun = True
                case Flush():
                    self.write_down("flush")
                case Note() as note:
                    self.write_down(f"note {note.event}")
                    self.stays |= note.event["event"] == "stay"
                case Settle() as settle:
                    self.tell_trainer(Settled(settle.number))
                case Job() as job:
                    self.work(job)

    def work(self, job: Job) -> None:
        assert self.begun
        logging.getLogger("ckpt").info("step %d comes", job.id.step)
        if name := job.figures.get("die"):
            try:
                (self.place / name).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        if "always" in job.figures:
            print("stands on standard error", file=sys.stderr)
            os._exit(3)
        if "hang" in job.figures:
            time.sleep(600)
        for tier in job.tiers:
            time.sleep(job.figures.get("wait", 0.0))
            self.write_down(f"{job.id.step} {tier}")
            self.tell_trainer(Done(job.id, tier))
            if job.slot is not None and tier == job.tiers[0]:
                self.tell_trainer(Released(job.id, job.slot))


if __name__ == "__main__":
    os._exit(serve(sys.argv[1:], Played))

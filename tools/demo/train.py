"""The trainer of the demo: what a user would write, plus one line per event on standard output.

It is run, killed and run again as `python -m tools.demo.train ...`, always with the same arguments.
"""

from __future__ import annotations

import argparse
import collections
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import ckpt
from tools.demo import corpus, model

GUARD = ckpt.SpikeGuard(
    window=24, warm_up=20, cool_down=5, consecutive=2, margin=3, skip_before=1, skip_after=12
)


def train(arguments: argparse.Namespace) -> None:
    data = corpus.pipeline(arguments.corpus, arguments.seed).iterator()
    if arguments.skip:
        data.skip([(start, stop) for start, stop in arguments.skip])
    tier = ckpt.Shared(arguments.run, every=arguments.every, keep=ckpt.Keep(last=4))
    with ckpt.CheckpointManager(tier) as manager, Events() as events:
        state = model.start(arguments.seed)
        with ckpt.Run(manager, state, data, guard=GUARD, steps=arguments.steps) as run:
            events.write("resumed", step=run.step)
            train_step = _damaging(model.train_step) if arguments.damage else model.train_step
            for step, batch in run:
                rewinds = len(run.rewinds)
                new_state, loss = train_step(run.state, batch)
                pending = run.update(new_state, loss=loss)
                events.loss(step, loss)
                if pending is not None:
                    events.saving(step, pending)
                for rewound in run.rewinds[rewinds:]:
                    events.rewound(rewound, data.plan.skipped)
        events.drain()
        events.write("done", step=run.step, preempted=run.preempted)


class Events:
    """Writes one JSON object per line: `event`, `t` (monotonic seconds) and what belongs to it.

    A save is reported durable by a thread of its own, so that the loop waits for nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._losses: collections.deque[tuple[int, Any]] = collections.deque()
        self._saves: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *exc: object) -> None:
        self._saves.put(None)
        self._thread.join()

    def write(self, event: str, **what: Any) -> None:
        with self._lock:
            print(json.dumps({"event": event, "t": time.monotonic(), **what}), flush=True)

    def loss(self, step: int, loss: Any) -> None:
        """Reported two updates late, when the device is done with it."""
        self._losses.append((step, loss))
        if len(self._losses) > 2:
            self._report_loss()

    def saving(self, step: int, pending: Any) -> None:
        self.write("saving", step=step)
        self._saves.put((step, pending))

    def rewound(self, rewound: Any, skips: Any) -> None:
        self.drain()
        self.write(
            "rewound",
            onset=rewound.onset,
            to=rewound.to,
            skip=[rewound.skip.start, rewound.skip.stop],
            reason=rewound.reason,
            skips=skips,
        )

    def drain(self) -> None:
        while self._losses:
            self._report_loss()

    def _report_loss(self) -> None:
        step, loss = self._losses.popleft()
        self.write("loss", step=step, value=float(loss))

    def _watch(self) -> None:
        while (item := self._saves.get()) is not None:
            step, pending = item
            begun = time.monotonic()
            try:
                pending.wait()
            except ckpt.CheckpointError as error:
                self.write("failed", step=step, message=str(error))
            else:
                self.write("saved", step=step, seconds=time.monotonic() - begun)


def _damaging(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """`train_step`, whose first call gets the state with one bit of one parameter flipped."""
    damaged = False

    def step(state: model.State, batch: Any) -> tuple[model.State, jax.Array]:
        nonlocal damaged
        if not damaged:
            embed = np.array(state["params"]["embed"])
            embed.view(np.uint32)[ord("e"), 0] ^= 1 << 20
            state = {**state, "params": {**state["params"], "embed": jax.numpy.asarray(embed)}}
            damaged = True
        return train_step(state, batch)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.demo.train", description=__doc__)
    parser.add_argument("--corpus", required=True, help="pattern of the shards")
    parser.add_argument("--run", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, required=True, help="updates to complete")
    parser.add_argument("--every", type=int, required=True, help="updates between saves")
    parser.add_argument("--seed", type=int, required=True, help="of weights, dropout and data")
    parser.add_argument("--skip", type=json.loads, help="examples never to serve: [[start, stop]]")
    parser.add_argument("--damage", action="store_true", help="flip a bit of what is restored")
    train(parser.parse_args())


if __name__ == "__main__":
    main()

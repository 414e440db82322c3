"""Where the time goes: what batches cost, how long the trainer waited, and who keeps it waiting."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from datapipe.batches.cost import Cost
from datapipe.prefetch.pace import Pace

_log = logging.getLogger("datapipe")

TRAINER: Final = "trainer"
"""The stage that holds all others up where nobody waits for data."""
CALM_SHARE: Final = 0.05
"""Who waits for less than this share of the time is not held up by the data."""
STARVING_SHARE: Final = 0.2
WATCHED_S: Final = 30.0
"""So long is looked at before the trainer is said to starve."""
SILENT_S: Final = 60.0
"""So long nothing more is said about it."""


@dataclass(frozen=True)
class Stats:
    """What an iterator has done since it was made.

    batches, records, bytes: delivered to this process; bytes as they were on the host.
    elapsed_s: from the first batch that was asked for to the last one that was delivered.
    records_per_s: over that time.
    waited_s: of it, the time that the consumer spent in `next`; wait_share: as a share.
    reading_s, functions_s, stacking_s, placing_s: spent on the batches delivered, summed over
      threads and workers: in the source, in the functions of the pipeline, putting examples
      together, and starting the way to devices.
    bottleneck: "reading", "functions", "stacking" or "placing", what takes most; or "trainer"
      where the data is hardly waited for.
    """

    batches: int
    records: int
    bytes: int
    elapsed_s: float
    records_per_s: float
    waited_s: float
    wait_share: float
    reading_s: float
    functions_s: float
    stacking_s: float
    placing_s: float
    bottleneck: str


@dataclass
class _Stretch:
    """What happened since some time."""

    start: float
    batches: int = 0
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        self.cost = Cost()

    def add(self, waited_s: float, cost: Cost) -> None:
        self.batches += 1
        self.waited_s += waited_s
        self.cost.add(cost)


class Meter:
    """Counts what is delivered, and says once when the trainer starves.

    Args:
      pace: what the cure may be.
      clock: seconds.
    """

    def __init__(self, pace: Pace, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._pace = pace
        self._all: _Stretch | None = None
        self._last = 0.0  # delivery
        self._watched: _Stretch | None = None
        self._said: float | None = None

    def restart(self) -> None:
        """The position changed: what is waited for now tells nothing about the pace."""
        self._watched = None

    def delivered(self, asked: float, cost: Cost) -> None:
        """A batch is delivered now, that was asked for at that time."""
        now = self._last = self.clock()
        if self._all is None:
            self._all = _Stretch(asked)
        self._all.add(now - asked, cost)
        if self._watched is None:
            self._watched = _Stretch(now)  # the first batch has to be waited for
            return
        self._watched.add(now - asked, cost)
        if now - self._watched.start >= WATCHED_S:
            self._judge(now, self._watched)
            self._watched = _Stretch(now)

    def stats(self) -> Stats:
        """All that was delivered."""
        done = self._all or _Stretch(0.0)
        elapsed = self._last - done.start if done.batches else 0.0
        share = done.waited_s / elapsed if elapsed else 0.0
        cost = done.cost
        return Stats(
            batches=done.batches,
            records=cost.records,
            bytes=cost.size_bytes,
            elapsed_s=elapsed,
            records_per_s=cost.records / elapsed if elapsed else 0.0,
            waited_s=done.waited_s,
            wait_share=share,
            reading_s=cost.reading_s,
            functions_s=cost.functions_s,
            stacking_s=cost.stacking_s,
            placing_s=cost.placing_s,
            bottleneck=TRAINER if share < CALM_SHARE else cost.longest,
        )

    def _judge(self, now: float, stretch: _Stretch) -> None:
        elapsed = now - stretch.start
        share = stretch.waited_s / elapsed
        if share < STARVING_SHARE or (self._said is not None and now - self._said < SILENT_S):
            return
        self._said = now
        stage = stretch.cost.longest
        _log.warning(
            "The trainer waited for data for %.0f %% of the last %.0f s, in which it got %d "
            "batches. Most of the work on them is %s (%.1f s): %s",
            100 * share,
            elapsed,
            stretch.batches,
            _WORDS[stage],
            getattr(stretch.cost, f"{stage}_s"),
            _cure(stage, self._pace),
        )


_WORDS: Final = {
    "reading": "reading the source",
    "functions": "in the functions of the pipeline",
    "stacking": "putting examples together",
    "placing": "bringing them to devices",
}


def _cure(stage: str, pace: Pace) -> str:
    if stage == "placing":
        return "let the functions return less or smaller numbers, such as uint8 or bfloat16"
    ahead = "" if pace.prefetch else ", and prefetch=2, so that they are made meanwhile"
    if stage == "reading":
        more = f"workers={pace.workers + 1}" if pace.workers else f"threads={pace.threads + 1}"
        return (
            f"take {more} or a window larger than {pace.window}{ahead}; or bring the files to a "
            "faster disk"
        )
    if pace.workers:
        return f"take more than workers={pace.workers}{ahead}, or make them faster"
    return f"take workers=2 or more{ahead}, or make them faster"

"""The run that is killed, resumed, rewound, killed and resumed again: driven from its events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from tools.demo.report import Kill, Rewound, Story
from tools.demo.script import Script
from tools.demo.trainer import Event


class Process(Protocol):
    """What is needed of a trainer."""

    def events(self) -> Iterator[Event]: ...

    def kill(self) -> None: ...


Start = Callable[[bool], AbstractContextManager[Process]]  # of a trainer; True: damage its state


@dataclass
class Disturbed:
    """Plays the script on one trainer after another.

    start: begins the next process of the run. watch: called with every event. damage: whether the
    process after the last kill gets a flipped bit.
    """

    script: Script
    start: Start
    watch: Callable[[Event], None]
    damage: bool = False
    story: Story = field(default_factory=Story)
    _durable: int = 0  # newest step of the lineage known to be durable
    _saves_after_rewind: int = 0
    _interrupted: tuple[int, float, int] | None = None  # step, seconds into its save, durable

    def play(self) -> Story:
        begun = time.monotonic()
        while not self._life():
            pass
        self.story.seconds = time.monotonic() - begun
        return self.story

    def _life(self) -> bool:
        """One process, from its start to its kill (False) or to the end of the run (True)."""
        done, hit = False, None
        # The kill after the rewind is the last one.
        last = self._interrupted is not None and bool(self.story.rewinds)
        with self.start(self.damage and last) as trainer:
            for event in trainer.events():
                self.watch(event)
                self._note(event)
                done = done or event["event"] == "done"
                if hit is None and event["event"] == "saving" and self._is_due(event["step"]):
                    number = len(self.story.kills) + self.story.misses
                    after_s = self.script.moment(number, min(s for _, s in self.story.saves))
                    time.sleep(after_s)
                    trainer.kill()
                    self.watch({**event, "event": "killed", "after_s": after_s})
                    hit = (event["step"], after_s, self._durable)
        if hit is not None and not done:
            if self._durable == hit[0]:
                self.story.misses += 1  # it was durable just before the kill: try again
            else:
                self._interrupted = hit
        return done

    def _is_due(self, step: int) -> bool:
        if not self.story.saves or len(self.story.kills) == 2:
            return False
        if not self.story.rewinds:
            return not self.story.kills and step >= self.script.first_kill
        return self._saves_after_rewind > self.script.second_kill

    def _note(self, event: Event) -> None:
        story, kind = self.story, event["event"]
        if kind == "resumed":
            if self._interrupted is not None:
                story.kills.append(Kill(*self._interrupted, resumed=event["step"]))
                self._interrupted = None
            self._durable = event["step"]
        elif kind == "loss":
            story.losses.append((event["step"], event["value"]))
        elif kind == "saving":
            self._saves_after_rewind += bool(story.rewinds)
        elif kind == "saved":
            story.saves.append((event["step"], event["seconds"]))
            self._durable = event["step"]
        elif kind == "rewound":
            story.rewinds.append(
                Rewound(
                    onset=event["onset"],
                    to=event["to"],
                    skip=(event["skip"][0], event["skip"][1]),
                    reason=event["reason"],
                    skips=tuple((start, stop) for start, stop in event["skips"]),
                )
            )
            self._durable = event["to"]

"""Any history of changed weights, sources and lengths, against one drawn example by example."""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plan_oracle import block
from segment_runs import opening, rows

from datapipe.integers import LIMIT
from datapipe.order.mixture import Mixture
from datapipe.order.permute import Permutation


class Drawing:
    """Draws example by example; knows epochs, blocks and what is left out. No arithmetic."""

    def __init__(self, items: tuple[int, ...], weights: tuple[int, ...]) -> None:
        self.config = (items, weights)
        self.at = 0
        self.block: list[int] = []
        self.left: list[list[int]] = [[] for _ in items]
        self.epochs = [-1] * len(items)
        self.ordinals = [0] * len(items)
        self.skips: set[tuple[int, int]] = set()
        self.served: list[tuple[int, int, int, int]] = []
        """Source, ordinal, epoch, item."""
        self.blocks: list[tuple[tuple[int, ...], list[int]]] = []
        """Weights, and the sources of each block that was begun."""
        self.before = (-1, self.config, self.block)
        """Where the last change was, and what was in force until there."""

    def change(self, items: tuple[int, ...], weights: tuple[int, ...]) -> None:
        """As a restart finds it. What was changed at this very place was never in force."""
        if self.config == (items, weights):
            return
        if self.before[0] != self.at:
            self.before = (self.at, self.config, self.block)
        new = len(items) - len(self.ordinals)
        self.config, self.block = (items, weights), []
        if self.config == self.before[1]:
            self.block = [*self.before[2]]
        self.left += [[] for _ in range(new)]
        self.epochs += [-1] * new
        self.ordinals += [0] * new

    def batch(self, size: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        while len(found) < size:
            source, ordinal, epoch, item = self.draw()
            if (source, ordinal) not in self.skips:
                self.served.append((source, ordinal, epoch, item))
                found.append((source, item))
        return found

    def draw(self) -> tuple[int, int, int, int]:
        items, weights = self.config
        if not self.block:
            self.block = block(Mixture.of(weights).counts)
            self.blocks.append((weights, [*self.block]))
        source = self.block.pop(0)
        if not self.left[source]:
            self.epochs[source] += 1
            order = Permutation(items[source], seed=3, epoch=self.epochs[source], stream=source)
            self.left[source] = order(np.arange(items[source])).tolist()
        ordinal = self.ordinals[source]
        self.ordinals[source] += 1
        self.at += 1
        return source, ordinal, self.epochs[source], self.left[source].pop(0)


class History:
    """One run of many starts: what the pipeline serves, next to what is drawn."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        count = draw(st.integers(1, 2), label="sources")
        self.files = {name: (self.length(),) for name in "ab"[:count]}
        self.weights = self.shares()
        self.size = 3
        self.skips: list[tuple[int, int]] = []
        self.skipped: set[tuple[int, int]] = set()
        self.saved: list[tuple[Any, Drawing]] = []
        self.told: list[str] = []
        self.data = self.iterator()
        self.model = Drawing(*self.config)
        self.save()

    def length(self) -> int:
        return int(self.draw(st.integers(1, 9), label="records"))

    def shares(self) -> tuple[int, ...]:
        least = st.lists(
            st.integers(0, 4), min_size=len(self.files), max_size=len(self.files)
        ).filter(any)
        return tuple(self.draw(least, label="weights"))

    @property
    def config(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        counts = self.data.plan.order.segments[-1].counts
        return tuple(sum(each) for each in self.files.values()), counts

    def iterator(self) -> Any:
        size = min(self.size, sum(sum(each) for each in self.files.values()))
        return opening(self.files, self.weights, batch_size=size)

    def serve(self) -> None:
        for _ in range(self.draw(st.integers(1, 6), label="batches")):
            found = rows(next(self.data))
            assert found == self.model.batch(self.data.batch_size), self.told
        assert self.data.next_example == self.model.at, self.told

    def save(self) -> None:
        self.saved.append(
            (json.loads(json.dumps(self.data.get_state())), copy.deepcopy(self.model))
        )

    def restart(self, number: int) -> None:
        """From a saved state, with the code of now and all that was ever left out."""
        state, model = self.saved[number]
        self.data = self.iterator()
        self.data.set_state(state)
        self.data.skip(self.skips)
        self.model = copy.deepcopy(model)
        self.model.change(*self.config)
        self.model.skips |= self.skipped
        self.told.append(f"on from {state['next_example']}: {self.files} {self.data.get_state()}")

    def skip(self) -> None:
        """Of what is to come."""
        state = self.data.get_state()
        first = self.draw(st.integers(0, 5), label="first")
        spans = self.data.span(state, first, first + self.draw(st.integers(1, 3), label="length"))
        self.data.skip(spans)
        self.skips += spans
        self.skipped |= {
            divmod(address, LIMIT) for start, stop in spans for address in range(start, stop)
        }
        self.model.skips |= self.skipped
        self.told.append(f"skips {spans}")

    def play(self, operation: str) -> None:
        if operation == "serve":
            self.serve()
        elif operation == "save":
            self.save()
        elif operation == "weights":
            self.weights = self.shares()
        elif operation == "grow":
            name = self.draw(st.sampled_from([*self.files]), label="grows")
            self.files[name] = (*self.files[name], self.length())
        elif operation == "append" and len(self.files) < 3:
            self.files["abc"[len(self.files)]] = (self.length(),)
            self.weights = self.shares()
        elif operation == "size":
            self.size = self.draw(st.integers(1, 5), label="size")
        elif operation == "restart":
            self.save()
            self.restart(-1)
        elif operation == "rewind":
            self.restart(self.draw(st.integers(0, len(self.saved) - 1), label="to"))
        elif operation == "skip":
            self.skip()


CHANGES = ["weights", "grow", "append", "size", "restart", "rewind", "skip", "save"]


@given(st.data())
def test_any_history_serves_what_is_drawn_example_by_example(data: st.DataObject) -> None:
    run = History(data.draw)
    for operation in data.draw(st.lists(st.sampled_from(CHANGES), max_size=14), label="played"):
        run.play(operation)
        run.play("serve")
    run.play("restart")
    run.play("serve")
    served, skipped = run.model.served, run.model.skips
    ids = [(source, epoch, item) for source, _, epoch, item in served]
    assert len({*ids}) == len(ids), "an id came twice within an epoch"
    for source, epoch in enumerate(run.model.epochs):
        ordinals = [o for s, o, e, _ in served if s == source and e < epoch]
        known = {*ordinals} | {o for s, o in skipped if s == source}
        assert {*range(max(ordinals, default=-1) + 1)} <= known, "one was lost"
    for weights, drawn in run.model.blocks:
        shares = [Counter(drawn)[source] for source in range(len(weights))]
        assert all(c * sum(weights) == w * len(drawn) for c, w in zip(shares, weights, strict=True))
    again = run.iterator()
    again.set_state(run.data.get_state())
    assert again.get_state() == run.data.get_state(), "nothing opens without a change"

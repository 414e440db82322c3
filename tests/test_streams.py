"""The order of one source: positions worked out in blocks are those that are asked for alone."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np

from datapipe.order.permute import Permutation
from datapipe.order.streams import Stream, Stretch


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    items=st.integers(1, 60_000),
    seed=st.integers(0, 5),
    number=st.integers(0, 2),
    shuffle=st.sampled_from(["global", "none"]),
    start=st.floats(0, 1),
    count=st.integers(0, 12_000),
    step=st.integers(1, 6),
    mixed=st.booleans(),
)
def test_ordinals_are_placed_as_the_permutation_of_their_epoch_says(
    items, seed, number, shuffle, start, count, step, mixed
):
    stream = Stream((Stretch(0, 0, items),), seed, shuffle, number)
    ordinals = int(start * 3 * items) + step * np.arange(count)
    if mixed:
        ordinals = np.random.default_rng(seed).permutation(ordinals)
    epochs, found = stream.place(ordinals)
    assert np.array_equal(epochs, ordinals // items)
    wanted = ordinals % items
    if shuffle == "global":
        for epoch in set((ordinals // items).tolist()):
            there = ordinals // items == epoch
            order = Permutation(items, seed=seed, epoch=epoch, stream=number)
            wanted[there] = order(wanted[there])
    assert np.array_equal(found, wanted)


def test_neighbouring_batches_are_worked_out_once(monkeypatch):
    sizes = []
    real = Permutation.__call__

    def counted(self, positions):
        sizes.append(np.size(positions))
        return real(self, positions)

    monkeypatch.setattr(Permutation, "__call__", counted)
    stream = Stream((Stretch(0, 0, 100_003),), 1_234_567, "global")
    for batch in range(400):
        stream.place(np.arange(100 * batch, 100 * (batch + 1)))
    assert sizes == [1024] * 40
    for batch in range(40, 60):
        stream.place(np.arange(1000 * batch, 1000 * (batch + 1)))
    assert sizes[40:] == [8192] * 4  # from 32768 on
    for batch in range(60, 90):
        stream.place(np.array([1000 * batch]))
    assert sizes[44:] == [1] * 30

"""Batches of record ids and random numbers, and what is taken of them."""

from __future__ import annotations

import numpy as np
from memory_source import Columns, Records, number

from datapipe import Pipeline


def numbers(count=23, *, batch_size=4, seed=7, epochs=3, remainder="carry", shuffle=True):
    """Batches of record ids, and of random numbers that go with them."""
    pipe = Pipeline(
        Records(count),
        batch_size=batch_size,
        seed=seed,
        epochs=epochs,
        remainder=remainder,
        shuffle=shuffle,
    )
    pipe = pipe.map(number, version="1")
    return pipe.random_map(lambda n, rng: {"n": n, "r": rng.random()}, version="1")


def taken(iterator, count):
    return [next(iterator) for _ in range(count)]


def flat(batches):
    return [n for batch in batches for n in batch["n"].tolist()]


def columns(batch_size=4, epochs=2, count=40):
    """Batches of ids, int32[n], and of rows, float32[n, 2]."""
    pipe = Pipeline(Columns(count), batch_size=batch_size, seed=3, epochs=epochs)
    return pipe.map_batch(lambda b: {"id": b["id"].astype(np.int32), "row": b["row"]}, version="1")

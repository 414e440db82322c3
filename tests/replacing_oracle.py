"""A pipeline with bad records, and what it must serve, found row by row in plain Python."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from memory_source import Records, number

from datapipe import Pipeline
from datapipe.order.permute import mix
from datapipe.order.plan import Plan

Pair = tuple[int, int]
"""Source and record."""


def substitute(source: int, record: int, items: int, bad: Collection[Pair]) -> int:
    """The record in place of a bad one."""
    attempt = 0
    while True:
        candidate = mix(source, record, attempt) % items
        if (source, candidate) not in bad:
            return candidate
        attempt += 1


def served(
    plan: Plan, batches: range, items: list[int], bad: Collection[Pair]
) -> tuple[list[list[Pair]], list[set[Pair]]]:
    """Of each batch its rows as (source, record), and the bad records that came up until it ended.

    Args:
      items: records of each source.
      bad: all of those that are, from the beginning.
    """
    rows: list[list[Pair]] = []
    met: list[set[Pair]] = []
    so_far: set[Pair] = set()
    for batch in batches:
        located = plan.rows(batch)
        found: list[Pair] = []
        planned = zip(located.sources.tolist(), located.items.tolist(), strict=True)
        for source, record in planned:
            attempt = 0
            candidate = record
            while (source, candidate) in bad:
                so_far.add((source, candidate))
                candidate = mix(source, record, attempt) % items[source]
                attempt += 1
            found.append((source, candidate))
        rows.append(found)
        met.append(set(so_far))
    return rows, met


def ids_of(records: Collection[Pair]) -> list[list[int]]:
    """As states write them."""
    if not records:
        return []
    last = max(source for source, _ in records)
    return [sorted(r for s, r in records if s == source) for source in range(last + 1)]


def seeded(seed: int, items: int, count: int) -> set[Pair]:
    """Some records of source 0."""
    rng = np.random.default_rng(seed)
    return {(0, int(record)) for record in rng.choice(items, count, replace=False)}


# -- a pipeline to test ----------------------------------------------------------------------------

BAD = [3, 17, 18, 40, 41, 55]
PAIRS = {(0, record) for record in BAD}


def made(source=None, *, bad=BAD, **options):
    source = source or Records(60, bad=bad)
    arguments = {"batch_size": 7, "seed": 11, "epochs": 3, "on_bad_record": "replace"}
    return Pipeline(source, **{**arguments, **options}).map(number, version="1")


def rows(pipe, **options):
    with pipe.iterator(**options) as iterator:
        return [batch.tolist() for batch in iterator]


def wanted(pipe, bad=PAIRS, items=60):
    """Its batches as lists of records, and what is known to be bad after each."""
    found, met = served(pipe.plan, range(pipe.plan.batches_left(0)), [items], bad)
    return [[record for _, record in batch] for batch in found], met

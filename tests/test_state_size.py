"""How large states are: bounded by what was skipped and opened, whoever runs it."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from memory_source import Columns, Records

from datapipe import Pipeline

HEAD_BYTES = 1024
SKIP_BYTES = 16


def size(state):
    """In a manifest."""
    return len(json.dumps(state, separators=(",", ":")).encode())


class Verbose(Records):
    """Its fingerprint has more fields than a state has room for."""

    def fingerprint(self):
        fields = {f"field_{i:03d}": "x" * (i % 60) for i in range(200)}
        files = [{"name": f"shard-{i:05d}.array_record", "records": 10} for i in range(500)]
        return {
            "format": "memory",
            "digest": "0" * 32,
            "records": len(self),
            "files": files,
            **fields,
        }


class Many(Verbose):
    """Far more records than anybody has."""

    def __init__(self):
        super().__init__(10**9)


@pytest.mark.parametrize(("skip_records", "remainder"), [(False, "carry"), (True, "keep")])
@pytest.mark.parametrize("shuffle", ["global", "blocks"])
@pytest.mark.parametrize("skips", [0, 1, 1000])
def test_a_state_is_a_kilobyte_and_16_bytes_a_skip(skips, shuffle, skip_records, remainder):
    pipe = Pipeline(
        Many(),
        batch_size=256,
        seed=2**64 - 1,
        shuffle=shuffle,
        skip_records=skip_records,
        remainder=remainder,
    )
    pipe = pipe.map(len, version="v" * 32).random_map(max, version="2")
    rng = np.random.default_rng(7)
    starts = np.sort(rng.choice(10**6, skips, replace=False)) * 1000
    with pipe.iterator(prefetch=0) as iterator:
        iterator.seek(2**61)
        iterator.skip([(int(at), int(at) + 900) for at in starts])
        state = iterator.get_state()
        assert len(state["skips"]) == 2 * skips
        assert size(state) <= HEAD_BYTES + SKIP_BYTES * skips, size(state)


@pytest.mark.parametrize("count", [2, 10, 100])
def test_sources_share_the_room_for_what_they_are_made_of(count):
    """A digest each, since a message must name the one that changed; details share what is left."""
    sources = {f"source-{i:03d}": Verbose(50 + i) for i in range(count)}
    state = Pipeline(sources, batch_size=8, seed=1).iterator().get_state()
    assert size(state) <= HEAD_BYTES + 110 * count, size(state)
    assert size(state) >= 32 * count


def test_it_is_the_same_for_any_hosts_workers_and_batch_sizes():
    found = set()
    for devices in (1, 2, 8):
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        for batch_size in (8, 16):
            pipe = Pipeline(Columns(64), batch_size=batch_size, seed=1)
            pipe = pipe.map(_plain, version="1")
            for options in ({"threads": 3, "prefetch": 4}, {"window": 2, "prefetch": 0}):
                with pipe.iterator(sharding=sharding, **options) as iterator:
                    iterator.skip([(3, 5), (20, 28)])
                    for _ in range(64 // batch_size):
                        next(iterator)
                    found.add(json.dumps(iterator.get_state()))
    assert len(found) == 1, found


def _plain(row):
    return {"id": row["id"]}

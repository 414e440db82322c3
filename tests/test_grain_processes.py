"""Iterators of Grain in two processes: each has its own state, one process only what is common."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import process_grain as scenes
import pytest
from grain_kinds import digest, elastic
from process_play import Seen, manager, place, play

import ckpt

__all__ = ["place"]  # a fixture


@pytest.fixture(scope="module")
def seen(place: Path) -> Seen:
    found, statuses = play(place, *scenes.SCENES)
    assert statuses == [0, 0]
    return found


@pytest.mark.parametrize("name", ["sliced", "loader", "elastic"])
def test_each_process_goes_on_with_its_share(seen: Seen, name: str) -> None:
    for index, found in enumerate(seen["grain_shares"]):
        undisturbed = iter(scenes.shares(index, 2)[name]())
        wanted = [digest(next(undisturbed)) for _ in range(scenes.BEFORE + scenes.AFTER)]
        assert found[name] == wanted, index


def test_one_process_goes_on_from_a_position_of_the_run(place: Path, seen: Seen) -> None:
    assert seen["grain_shares"]
    data = iter(elastic(8))
    with manager(place / "grain_shares") as m:
        m.resume(data={"elastic": data})
    undisturbed = iter(elastic(8))
    for _ in range(scenes.BEFORE):
        next(undisturbed)
    for _ in range(scenes.AFTER):
        np.testing.assert_array_equal(next(data), next(undisturbed))


@pytest.mark.parametrize("name", ["sliced", "loader"])
def test_what_is_of_one_process_is_refused_with_both_counts(
    place: Path, seen: Seen, name: str
) -> None:
    assert seen["grain_shares"]
    data = iter(scenes.shares(0, 1)[name]())
    wanted = rf"{name!r} was saved with a state for each of 2 processes, here are 1; use 2.*Elastic"
    with pytest.raises(ckpt.Mismatch, match=wanted):
        ckpt.restore(place / "grain_shares", data={name: data})
    assert digest(next(data)) == digest(next(iter(scenes.shares(0, 1)[name]())))


def test_positions_that_differ_are_no_position_of_the_run(place: Path, seen: Seen) -> None:
    assert seen["grain_out_of_step"]
    root = place / "grain_out_of_step"
    entry = ckpt.metadata(root).data["data"]
    assert entry["states"] == [{"global_next_index": 16}, {"global_next_index": 32}]
    with pytest.raises(ckpt.Mismatch, match="for each of 2 processes, here are 1"):
        ckpt.restore(root, data=iter(elastic(8)))

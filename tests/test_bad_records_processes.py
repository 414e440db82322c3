"""A record that is bad on one host only: both policies, and other numbers of processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import process_bad_records as scenes
import pytest
from process_play import Seen, headers_of, joined, manager, place, play, same
from replacing_oracle import ids_of, served

import ckpt

__all__ = ["place"]  # a fixture

ALL = {(0, record) for bad in scenes.BAD for record in bad}


@pytest.fixture(scope="module")
def seen(place: Path) -> Seen:
    """One pair of processes plays all scenes; a single one began the run of the last."""
    whole = scenes.pipeline(tuple(record for _, record in ALL))
    with manager(place / "alone_before") as m, whole.iterator() as data:
        m.resume(data=data)
        for _ in range(13):
            next(data)
        m.save(13, {"step": 13}, data=data).wait()
    found, statuses = play(place, *scenes.SCENES)
    assert statuses == [0, 0]
    return found


def rows_served(first: int, count: int) -> list[list[int]]:
    """Where all that is bad was known from the beginning."""
    plan = scenes.pipeline().plan
    found, _ = served(plan, range(first, first + count), [200], ALL)
    return [[record for _, record in batch] for batch in found]


def test_one_host_replaces_and_all_know_it_after_a_restore(place: Path, seen: Seen) -> None:
    found = seen["replaced_on_one_host"]
    rows = joined(*(each["seen"] for each in found))
    own = [each["own"]["replaced"] for each in found]
    assert own[0] != own[1]  # each knows what came up in its rows
    known = {record for (ids,) in own for record in ids}
    assert known <= {record for _, record in ALL}
    plan = scenes.pipeline().plan
    for batch, records in zip(rows, plan.records(range(19)).reshape(19, 16).tolist(), strict=True):
        for at, (there, planned) in enumerate(zip(batch, records, strict=True)):
            assert (there != planned) == (planned in scenes.BAD[at // 8])
    assert same(found, "restored") == 13
    position = same(found, "position")  # the union, and all else as it was
    assert position == {**found[0]["own"], "replaced": ids_of({(0, record) for record in known})}
    assert position["next_example"] == 13 * 16
    manifest = ckpt.open(place / "replaced_on_one_host")
    assert manifest.manifest(manifest.find(13)).data["data"]["state"] == position
    _, headers = headers_of(place / "replaced_on_one_host", 13)
    assert [header.meta["data"]["data"]["state"]["replaced"] for header in headers] == own


def union_of(found: list[dict[str, Any]]) -> set[tuple[int, int]]:
    (ids,) = same(found, "position")["replaced"]
    return {(0, record) for record in ids}


def coming(known: set[tuple[int, int]]) -> list[list[int]]:
    found, _ = served(scenes.pipeline().plan, range(13, 19), [200], known)
    return [[record for _, record in batch] for batch in found]


def test_two_go_on_from_two(seen: Seen) -> None:
    found = seen["replaced_on_one_host"]
    assert joined(*(each["coming"] for each in found)) == coming(union_of(found))


@pytest.mark.parametrize("batch_size", [16, 8])
def test_one_goes_on_from_two(place: Path, seen: Seen, tmp_path: Path, batch_size: int) -> None:
    known = union_of(seen["replaced_on_one_host"])
    root = shutil.copytree(place / "replaced_on_one_host", tmp_path / "run")
    for policy in ("raise", "replace"):
        pipe = scenes.pipeline(policy=policy, batch_size=batch_size)
        with manager(root) as m, pipe.iterator() as data:
            assert m.resume(data=data).step == 13
            rows = [record for _ in range(96 // batch_size) for record in next(data)["id"].tolist()]
            assert rows == [record for batch in coming(known) for record in batch]
            assert data.get_state()["replaced"] == ids_of(known)


def test_two_go_on_from_one(seen: Seen) -> None:
    found = seen["alone_before"]
    assert same(found, "restored") == 13
    assert union_of(found) == ALL
    assert joined(*(each["coming"] for each in found)) == rows_served(13, 6) == coming(ALL)


def test_one_host_raises_and_all_leave_it_out(seen: Seen) -> None:
    found = seen["raised_on_one_host"]
    at = same(found, "example")
    assert found[1]["error"] is None
    assert found[0]["error"]["type"] == "BadRecord"
    assert f"iterator.plan.addresses([({at}, {at + 1})])" in found[0]["error"]["text"]
    assert same(found, "kept")
    after = same(found, "after")
    assert after["skips"] == [at, 1]
    assert after["replaced"] == []
    plan = scenes.pipeline().plan.skipping([(at, at + 1)])
    rows = joined(*(each["seen"] for each in found))
    assert rows == plan.records(range(len(rows))).reshape(-1, 16).tolist()

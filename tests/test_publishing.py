"""States of a step in stores that rename and in those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from memory_bucket import memory_store

from ckpt import layout, publishing
from ckpt.errors import AlreadyExists, Misuse, NotFound
from ckpt.kv_requests import Requests
from ckpt.layout import Marker, Unpublished
from ckpt.lineage import Remain, StepId
from ckpt.store import FileStore

STEP = StepId(40, 3, 3)

DIGEST = "0123456789abcdef" * 2

MARKER = Marker(STEP, DIGEST).emit()

PLACE = layout.step_name(3, 40)


def states() -> dict[str, bytes | None]:
    """What may stand in the place of a marker; attempt 5 acts."""
    return {
        "in the making": None,
        "prepared": Unpublished(STEP, None, None).emit(),
        "committed": MARKER,
        "condemned by 4": Unpublished(STEP, 4, DIGEST).emit(),
        "condemned by 5": Unpublished(STEP, 5, DIGEST).emit(),
        "condemned by 6": Unpublished(STEP, 6, DIGEST).emit(),
        "unfinished, condemned by 4": Unpublished(STEP, 4, None).emit(),
        "unfinished, condemned by 6": Unpublished(STEP, 6, None).emit(),
    }


def changes(way: publishing.Publishing) -> dict[str, Callable[[], None]]:
    making = Remain(3, 40, 3, "making", PLACE)
    deleted = Remain(3, 40, 4, "deleted", PLACE)
    return {
        "publish": lambda: way.publish(STEP, MARKER, 5),
        "condemn": lambda: way.condemn(STEP, 5),
        "put back": lambda: way.put_back(STEP, 5),
        "take over what is made": lambda: way.take_over(making, 5),
        "take over what 4 removes": lambda: way.take_over(deleted, 5),
    }


TRANSITIONS = {
    ("in the making", "take over what is made"): "unfinished, condemned by 5",
    ("prepared", "publish"): "committed",
    ("prepared", "take over what is made"): "unfinished, condemned by 5",
    ("committed", "condemn"): "condemned by 5",
    ("condemned by 4", "take over what 4 removes"): "condemned by 5",
    ("condemned by 5", "put back"): "committed",
    ("unfinished, condemned by 4", "publish"): "committed",
    ("unfinished, condemned by 4", "take over what 4 removes"): "unfinished, condemned by 5",
}


@pytest.mark.parametrize("state", states())
def test_every_change_of_every_state(state: str) -> None:
    known = {**states(), "unfinished, condemned by 5": Unpublished(STEP, 5, None).emit()}
    for change in changes(publishing.of(memory_store())):
        store = memory_store()
        way = publishing.of(store)
        before = known[state]
        if before is not None:
            store.put(f"{PLACE}/{layout.MARKER}", before)
        try:
            changes(way)[change]()
        except (NotFound, AlreadyExists):
            assert (state, change) not in TRANSITIONS
        after = store.read_many([f"{PLACE}/{layout.MARKER}"])[0]
        wanted = known[TRANSITIONS.get((state, change), state)]
        assert (after if isinstance(after, bytes) else None) == wanted, f"{state}: {change}"


@pytest.mark.parametrize("state", states())
def test_a_branch_is_listed_by_its_markers(state: str) -> None:
    store, found = memory_store(), states()[state]
    store.put_many({f"{PLACE}/part-a3-p0.json": b"x", f"{PLACE}/tree.json": b"x"})
    if found is not None:
        store.put(f"{PLACE}/{layout.MARKER}", found)
    listed = publishing.of(store).list_branch(3)
    if state == "committed":
        assert listed == publishing.Branch((STEP,))
    elif state in ("in the making", "prepared"):
        assert listed == publishing.Branch(remains=(Remain(3, 40, 3, "making", PLACE),))
    else:
        by = int(state[-1])
        assert listed == publishing.Branch(remains=(Remain(3, 40, by, "deleted", PLACE),))


def test_what_a_foreign_attempt_made_is_damaged() -> None:
    """A copy from a file system that lost its marker: attempt 2 made it on branch 1."""
    store = memory_store()
    store.put_many({"branch-1/7/part-a2-p0.json": b"x", "branch-1/8/commit_success.txt": b"torn"})
    listed = publishing.of(store).list_branch(1)
    assert listed.steps == ()
    assert listed.remains == ()
    assert [name for name, _ in listed.damaged] == ["branch-1/7", "branch-1/8"]


def test_removing_keeps_the_state_until_all_else_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = memory_store()
    keys = [f"{PLACE}/{name}" for name in ("a", "state/d/b", layout.MARKER)]
    store.put_many(dict.fromkeys(keys, b"x"))
    seen = []
    good = Requests.remove
    monkeypatch.setattr(
        Requests, "remove", lambda self, key: (seen.append(key), good(self, key))[1]
    )
    publishing.of(store).remove(3, 40, 5)
    assert seen[-1] == keys[-1]
    assert sorted(seen) == sorted(keys)
    assert store.list("") == []


def test_a_store_has_to_do_one_of_both(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "renames", False)
    with pytest.raises(Misuse, match="neither rename nor swap"):
        publishing.of(FileStore(tmp_path))

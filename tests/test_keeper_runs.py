"""The keeper on real steps and images."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_store import Fault, FaultyStore
from kept_places import Watched, one, settled

import ckpt
from ckpt import attempts, layout, log
from ckpt.commit import read_headers
from ckpt.errors import Superseded
from ckpt.keeping import Keeper, LocalPlace, SharedPlace, why_kept
from ckpt.lineage import StepId
from ckpt.local import LocalImages
from ckpt.mirrors import copy_records
from ckpt.retention import Best, Keep
from ckpt.store import FileStore, Store


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    yield found
    for keeper in found.keepers:
        keeper.close()
        assert not keeper._thread.is_alive()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Branch 1: steps 1 to 4, left at 2; branch 2: 3 to 5; with a loss."""
    root = tmp_path / "run"
    with ckpt.CheckpointManager(root) as manager:
        manager.resume()
        for number in (1, 2, 3, 4):
            manager.save(number, {"a": number}, metrics={"loss": number})
        manager.rewind(2)
        for number in (3, 4, 5):
            manager.save(number, {"a": number}, metrics={"loss": number})
    return root


def names(root: Path) -> list[tuple[int, int]]:
    return [(s.branch, s.step) for s in sorted(attempts.list_run(FileStore(root)).steps, key=_key)]


def _key(step: StepId) -> tuple[int, int]:
    return step.branch, step.step


def shared(
    watched: Watched, root: Path, keep: Keep, store: Store | None = None
) -> tuple[Keeper, StepId]:
    home = FileStore(root)
    listing = attempts.list_run(home)
    assert listing.head is not None
    place = SharedPlace(store or home, keep, home)
    keeper = watched.keeper(home, {"shared": place})
    keeper.begin(listing.head.attempt, listing.lineage)
    return keeper, listing.counting[-1]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        (Keep(last=1), [(1, 3), (1, 4), (2, 5)]),
        (Keep(branches=0), [(1, 1), (1, 2), (2, 3), (2, 4), (2, 5)]),
        (Keep(last=1, branches=0), [(2, 5)]),
        (Keep(best=Best("loss"), branches=0), [(1, 1), (2, 5)]),
        (Keep(best=Best("loss", mode="max"), branches=1), [(1, 3), (1, 4), (2, 5)]),
    ],
)
def test_steps_of_a_run(
    watched: Watched, run: Path, keep: Keep, left: list[tuple[int, int]]
) -> None:
    keeper, newest = shared(watched, run, keep)
    keeper.saved("shared", newest, {})
    assert settled(keeper)
    assert names(run) == left
    assert watched.failed == watched.warnings == []
    assert list(run.rglob("*-deleted")) == []
    gone = {(event.step.branch, event.step.step) for event in _deletions(run)}  # type: ignore[union-attr]
    assert len(gone) + len(left) == 7
    assert ckpt.restore(run).step == 5


def _deletions(root: Path) -> list[log.Event]:
    return [event for event in log.read(FileStore(root), 2).events if event.kind == log.DELETE]


def test_a_newer_attempt_keeps_its_steps(watched: Watched, run: Path) -> None:
    """The old one finds the claim after it has condemned a step, and puts the step back."""
    keeper, newest = shared(watched, run, Keep(last=1, branches=0))
    assert ckpt.rewind(run, 4, branch=1) == StepId(4, 1, 1)
    before = names(run)
    keeper.saved("shared", newest, {})
    assert settled(keeper)
    assert names(run) == before
    (error,) = watched.failed
    assert isinstance(error, Superseded)
    assert "attempt 3" in str(error)


def test_a_further_tier_asks_the_home_who_owns_the_run(
    watched: Watched, run: Path, tmp_path: Path
) -> None:
    home, mirror = FileStore(run), FileStore(tmp_path / "mirror")
    copy_records(home, mirror)
    for branch in ("branch-1", "branch-2"):
        shutil.copytree(run / branch, tmp_path / "mirror" / branch)
    keeper, newest = shared(watched, run, Keep(last=1, branches=0), mirror)
    ckpt.rewind(run, 4, branch=1)  # only the home knows
    keeper.saved("shared", newest, {})
    assert settled(keeper)
    assert names(tmp_path / "mirror") == names(run)
    assert [type(error) for error in watched.failed] == [Superseded]


def test_half_a_deletion_is_finished_by_the_next_look(watched: Watched, run: Path) -> None:
    """The store failed between condemning and removing a step: what is left of it goes, too."""
    # Operations 1 and 2: clear the place for the condemned, move. Number 3 is the removal.
    store = FaultyStore(FileStore(run), [Fault(3, "fail")])
    keeper, newest = shared(watched, run, Keep(last=2), store)
    keeper.saved("shared", newest, {})
    assert settled(keeper)
    assert store.operations[2].startswith("delete_tree"), store.operations
    left = [path.name for path in run.rglob("*-deleted")]
    assert len(left) == 1, left
    assert any("wanted to fail" in text for text in watched.warnings)
    keeper.saved("shared", newest, {})
    assert settled(keeper)
    assert [path.name for path in run.rglob("*-deleted")] == []
    assert names(run) == [(1, 3), (1, 4), (2, 4), (2, 5)]


def test_images_of_a_host(watched: Watched, run: Path, tmp_path: Path) -> None:
    """Figures come out of the images: not all of their steps are in a shared tier."""
    home = FileStore(run)
    listing = attempts.list_run(home)
    images = LocalImages(tmp_path / "local", home.location, 0)
    for step in listing.steps:
        prefix = layout.step_name(step.branch, step.step)
        (header,) = read_headers(home, prefix, step.attempt)
        with home.open_image(f"{prefix}/{layout.image_name(step.attempt, 0)}") as reader:
            data = memoryview(bytes(reader.read(0, header.size_bytes)))
            images.write(header, data)
    queued = {StepId(3, 2, 2)}
    keep = Keep(best=Best("loss"), branches=0)
    keeper = watched.keeper(home, {"local": LocalPlace(images, keep, lambda: queued)})
    assert listing.head is not None
    keeper.begin(listing.head.attempt, listing.lineage)
    keeper.saved("local", listing.counting[-1], {})
    assert settled(keeper)
    assert watched.warnings == []
    left = {(found.id.branch, found.id.step) for found in images.list()}
    assert left == {(1, 1), (2, 3), (2, 5)}


def test_why_a_step_of_a_run_is_kept(run: Path) -> None:
    home = FileStore(run)
    line = attempts.list_run(home).lineage
    assert why_kept(home, line, one(1)) is None
    ckpt.pin(run, 1)
    assert "pinned" in (why_kept(home, line, one(1)) or "")
    assert "newest" in (why_kept(home, line, StepId(5, 2, 2)) or "")


def test_the_keeper_needs_neither_jax_nor_tensorstore() -> None:
    """It runs in the writer's process."""
    code = "import ckpt.keeping, sys; print(*{'jax', 'tensorstore'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout.strip() == b""

"""Records of attempts that are lost or damaged: no step is, and nobody starts anew over them."""

from __future__ import annotations

import functools
import itertools
import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_source import Columns

import ckpt
from ckpt import attempts, layout
from ckpt.errors import Damaged
from ckpt.store import FileStore
from datapipe import Pipeline

RECORDS = [f"attempts/{n}{what}" for n in (1, 2, 3) for what in (".json", ".from.json")]
DECISIONS = [name for name in RECORDS if ".from." in name]
SKIPPED = [[20, 24]]


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.full(4, step, np.float32)}


def iterator() -> Any:
    return Pipeline(Columns(97), batch_size=4, seed=3).iterator()


@functools.cache
def template() -> Path:
    """Attempt 1 saves 1 to 3, attempt 2 goes on with 4 to 6, attempt 3 rewinds to 4 and saves 5
    and 6 anew, without the examples of batch 5."""
    root = Path(tempfile.mkdtemp(prefix="lastgood-records-"))
    _made.append(root)
    for steps in (range(1, 4), range(4, 7)):
        with ckpt.CheckpointManager(root) as m, iterator() as data:
            m.resume(data=data)
            train(m, data, steps)
    with ckpt.CheckpointManager(root) as m, iterator() as data:
        m.rewind(4, data=data, skip_batches=range(5, 6), reason="spike")
        train(m, data, range(5, 7))
    return root


_made: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def _removed() -> Any:
    yield
    for root in _made:
        shutil.rmtree(root)
    _made.clear()
    template.cache_clear()


def train(m: ckpt.CheckpointManager, data: Any, steps: range) -> None:
    for step in steps:
        next(data)
        m.save(step, state_of(step), data=data)
    m.wait_until_finished()


def copy(target: Path) -> Path:
    shutil.copytree(template(), target)
    return target


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copy(tmp_path / "run")


def flip(path: Path, at: int = 40) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 4
    path.write_bytes(data)


def resumed(root: Path) -> tuple[ckpt.Restored, list[Any]]:
    with ckpt.CheckpointManager(root) as m, iterator() as data:
        restored = m.resume(like=state_of(0), data=data)
        return restored, [list(skip) for skip in data.plan.skipped]


def files_of(damage: tuple[Any, ...]) -> set[str]:
    return {each.file for each in damage}


@pytest.mark.parametrize("lost", [*itertools.product((False, True), repeat=6)])
def test_any_records_may_be_absent(root: Path, lost: tuple[bool, ...]) -> None:
    absent = {name for name, gone in zip(RECORDS, lost, strict=True) if gone}
    before = attempts.list_run(FileStore(root))
    for name in absent:
        (root / name).unlink()
    listing = attempts.list_run(FileStore(root))
    assert listing.decisions == before.decisions
    assert listing.lineage == before.lineage
    found = ckpt.verify(root, shallow=True)
    assert files_of(found.records) == absent & set(DECISIONS), absent
    assert all(step.intact for step in found.steps)


@pytest.mark.parametrize("how", ["absent", "flipped", "empty"])
@pytest.mark.parametrize("name", [*DECISIONS, "attempts"])
def test_a_resume_goes_on_and_writes_the_record_anew(
    root: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = DECISIONS if name == "attempts" else [name]
    wanted = {each: (root / each).read_bytes() for each in names}
    for each in names:
        if how == "absent":
            (root / each).unlink()
        elif how == "empty":
            (root / each).write_bytes(b"")
        else:
            flip(root / each)
    if name == "attempts" and how == "absent":
        shutil.rmtree(root / "attempts")
    with caplog.at_level(logging.WARNING, "ckpt"):
        restored, skips = resumed(root)
    assert (restored.step, restored.report.fresh, restored.report.lost) == (6, False, ())
    assert restored.state["w"].tolist() == [6] * 4
    assert skips == SKIPPED
    assert files_of(restored.report.records) == set(names)
    assert all(each in caplog.text for each in names)
    for each, data in wanted.items():
        assert (root / each).read_bytes() == data
        assert (root / f"{each}.damaged").exists() == (how != "absent")
    # From now on all is well, and the number was one that nothing carried.
    assert (root / "attempts/4.from.json").exists()
    assert ckpt.verify(root).intact
    assert resumed(root)[0].report.records == ()


@pytest.mark.parametrize("how", ["restore", "rewind", "one call", "save"])
def test_other_calls_see_the_same_run(root: Path, how: str) -> None:
    shutil.rmtree(root / "attempts")
    with ckpt.CheckpointManager(root) as m:
        if how == "restore":
            assert m.restore(like=state_of(0), step=5).state["w"][0] == 5
        elif how == "rewind":
            assert m.rewind(4, like=state_of(0)).step == 4
        elif how == "save":
            with pytest.raises(ckpt.Misuse, match="holds steps"):
                m.save(7, state_of(7))
    if how == "one call":
        assert files_of(ckpt.restore(root).report.records) == set(DECISIONS)
        assert ckpt.save(root, state_of(7), data={}) == 7
        assert ckpt.restore(root).step == 7


def test_a_new_attempt_takes_a_number_that_nothing_carries(root: Path) -> None:
    store = FileStore(root)
    shutil.rmtree(root / "attempts")
    assert attempts.claim(store, "resume") == 4
    (root / "attempts/4.json").unlink()
    (root / layout.making_name(1, 7, 11)).mkdir()
    assert attempts.claim(store, "resume") == 12
    (root / "attempts/12.json").unlink()
    (root / "branch-20").mkdir()  # empty: nothing of ours carries the number
    assert attempts.claim(store, "resume") == 12
    (root / "attempts/12.json").unlink()
    (root / "branch-20" / "3").mkdir()
    assert attempts.claim(store, "resume") == 21
    (root / "attempts/21.json").rename(root / "attempts/30.from.json")
    assert attempts.list_claims(store)[-1] == 30


def test_a_trainer_whose_claim_is_gone_stops(root: Path) -> None:
    with ckpt.CheckpointManager(root) as m:
        m.resume(like=state_of(0))
        (root / "attempts/4.json").unlink()
        m.save(7, state_of(7), data={}).wait()  # its decision tells of the number as well
        (root / "attempts/4.from.json").unlink()
        with pytest.raises(ckpt.Superseded, match="its claim"):
            m.save(8, state_of(8), data={}).wait()
    assert resumed_step(root) in (7, 8)  # it tells of its own decision


def resumed_step(root: Path) -> int | None:
    return ckpt.open(root).latest_step()


def break_manifests(root: Path, attempt: int) -> None:
    for step in attempts.list_run(FileStore(root)).steps:
        if step.attempt == attempt:
            flip(root / layout.step_name(step.branch, step.step) / layout.MANIFEST)


@pytest.mark.parametrize("how", ["absent", "flipped"])
def test_a_head_that_nobody_explains_is_an_error(root: Path, how: str) -> None:
    break_manifests(root, 3)
    name = "attempts/3.from.json"
    (root / name).unlink() if how == "absent" else flip(root / name)
    before = sorted(root.rglob("*"))
    for call in (resumed, ckpt.restore, lambda path: ckpt.open(path).all_steps()):
        with pytest.raises(Damaged, match=name):
            call(root)
    assert sorted(root.rglob("*")) == before
    found = ckpt.verify(root)
    assert name in files_of(found.records)
    assert len(found.steps) == 8
    # A step by its path is there all the same, and giving the attempt up is a way on.
    assert ckpt.restore(root / "branch-1/6").step == 6
    (root / name).unlink(missing_ok=True)
    shutil.rmtree(root / "branch-3")
    assert resumed(root)[0].step == 6


def test_a_member_of_the_chain_that_nobody_explains_is_an_error(root: Path) -> None:
    break_manifests(root, 1)
    (root / "attempts/1.from.json").unlink()
    with pytest.raises(Damaged, match=r"attempts/1\.from\.json"):
        resumed(root)
    assert "attempts/1.from.json" in files_of(ckpt.verify(root).records)


def test_what_nothing_needs_is_reported_and_left(root: Path) -> None:
    with ckpt.CheckpointManager(root) as m, iterator() as data:
        # The head forks before attempts 2 and 3.
        m.restore(like=state_of(0), step=3, data=data)
        train(m, data, range(4, 5))
    break_manifests(root, 2)
    flip(root / "attempts/2.from.json")
    restored, _ = resumed(root)
    assert (restored.step, restored.report.lost) == (4, ())
    assert files_of(restored.report.records) == {"attempts/2.from.json"}
    assert not (root / "attempts/2.from.json.damaged").exists()


def test_retention_may_have_taken_what_the_lost_records_told_of(root: Path) -> None:
    for step in (1, 2, 3, 4, 5, 6):
        shutil.rmtree(root / f"branch-1/{step}")
    shutil.rmtree(root / "attempts")
    restored, skips = resumed(root)
    assert (restored.step, skips) == (6, SKIPPED)
    assert files_of(restored.report.records) == {"attempts/2.from.json", "attempts/3.from.json"}
    assert ckpt.verify(root).intact
    assert resumed(root)[0].report.records == ()


def test_steps_without_any_record_are_never_taken_for_nothing(root: Path) -> None:
    shutil.rmtree(root / "attempts")
    for attempt in (1, 2, 3):
        break_manifests(root, attempt)
    with pytest.raises(Damaged):
        resumed(root)
    assert not (root / "attempts").exists()
    for marker in root.rglob(layout.MARKER):
        marker.unlink()
    with pytest.raises(Damaged):
        resumed(root)
    assert not (root / "attempts").exists()


_FILES = [
    *RECORDS,
    *(
        f"branch-{b}/{s}/{name}"
        for b, s in [*((1, s) for s in range(1, 7)), (3, 5), (3, 6)]
        for name in (layout.MANIFEST, layout.MARKER)
    ),
]


@settings(max_examples=40)
@given(st.sets(st.sampled_from(_FILES), max_size=14), st.sets(st.sampled_from(_FILES), max_size=3))
def test_whatever_is_lost_the_newest_step_is_restored_or_named(
    absent: set[str], damaged: set[str]
) -> None:
    with tempfile.TemporaryDirectory(prefix="lastgood-records-") as place:
        root = copy(Path(place) / "run")
        for name in absent:
            (root / name).unlink()
        for name in damaged - absent:
            flip(root / name)
        try:
            restored, skips = resumed(root)
        except Damaged:
            return
        assert not restored.report.fresh
        assert restored.state["w"].tolist() == [restored.step] * 4
        assert {6, *(each.step for each in restored.report.lost)} >= {*range(restored.step + 1, 7)}
        assert restored.step == 6 or restored.report.lost[0].step == 6
        assert skips == SKIPPED


def test_a_step_of_another_run_is_no_step_of_this_one(tmp_path: Path) -> None:
    """Both have attempt 1, branch 1 and step 2; a directory was copied back to the wrong place."""
    for name, base in (("ours", 0), ("theirs", 100)):
        with ckpt.CheckpointManager(tmp_path / name, arena=tmp_path / "arena") as manager:
            for step in (1, 2):
                manager.save(step, {"x": np.full(9, base + step)})
    here = tmp_path / "ours/branch-1/2"
    shutil.rmtree(here)
    shutil.copytree(tmp_path / "theirs/branch-1/2", here)
    restored = ckpt.restore(tmp_path / "ours")
    assert restored.step == 1
    assert (restored.state["x"] == 1).all()
    (lost,) = restored.report.lost
    assert lost.step == 2
    assert "belongs to another run" in lost.reason
    with pytest.raises(ckpt.Damaged, match="belongs to another run"):
        ckpt.restore(tmp_path / "ours", step=2)
    assert not ckpt.verify(tmp_path / "ours").intact

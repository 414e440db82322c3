"""Locations that are no place for a run, or are written in another way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt import layout
from ckpt.errors import CheckpointError, Damaged, Misuse, NotFound, Unsupported
from ckpt.steps import Damage
from ckpt.store import FileStore, open_store

STATE = {"w": np.arange(4, dtype=np.float32)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ckpt.CheckpointManager(tmp_path / "run") as m:
        for step in (1, 2, 3):
            m.save(step, STATE)
        m.wait_until_finished()
    return tmp_path / "run"


def names(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


def resume(place: Path) -> None:
    with ckpt.CheckpointManager(place) as m:
        m.resume(like=STATE)


def save(place: Path) -> None:
    with ckpt.CheckpointManager(place) as m:
        m.save(7, STATE).wait()


@pytest.mark.parametrize("call", [resume, save, lambda place: ckpt.save(place, STATE, step=9)])
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        "branch-1",
        "branch-1/3",
        "branch-1/3/state",
        "branch-1/3/state/d",
        "branch-1/4",
        "branch-1/new/run",
        "attempts",
        "log/x",
        "pins",
    ],
)
def test_a_place_inside_a_run_is_refused(
    root: Path, place: str, records: bool, call: Callable[[Path], None]
) -> None:
    if not records:
        shutil.rmtree(root / "attempts")
        if not place.startswith("branch"):
            pytest.skip("then nobody knows whose directory this is")
    before = names(root)
    with pytest.raises(Misuse, match=f"run {root}; give {root}$"):
        call(root / place)
    assert names(root) == before


def test_a_link_into_a_run_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(root / "branch-1" / "3")
    with pytest.raises(Misuse, match=f"give {root}"):
        resume(tmp_path / "latest")


def test_a_copy_of_a_step_is_no_root(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "branch-1" / "3", tmp_path / "final")
    before = names(tmp_path)
    with pytest.raises(Misuse, match="it is a step"):
        resume(tmp_path / "final")
    assert names(tmp_path) == before


def test_other_names_beside_and_inside_a_run_are_free(root: Path, tmp_path: Path) -> None:
    for place in (root / "eval", tmp_path / "branch-1", tmp_path / "log" / "x"):
        save(place)
        assert ckpt.open(place).all_steps() == [7]
    assert ckpt.open(root).all_steps() == [1, 2, 3]


@pytest.mark.parametrize(
    "look", [ckpt.open, ckpt.verify, ckpt.restore], ids=["open", "verify", "restore"]
)
def test_readers_refuse_a_branch(root: Path, look: Callable[[Path], object]) -> None:
    with pytest.raises((Misuse, NotFound), match=str(root)):
        look(root / "branch-1")


def test_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save(Path("~/run"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert ckpt.open("~/run").all_steps() == [7]
    assert open_store("./~").location == str(tmp_path / "~")


@pytest.mark.parametrize("nothing", ["", "file://"])
def test_no_path_is_refused(nothing: str) -> None:
    for call in (ckpt.open, ckpt.restore, ckpt.CheckpointManager):
        with pytest.raises(Misuse, match="wanted a path"):
            call(nothing)


@pytest.mark.parametrize(
    "name",
    [
        "../../../../etc/passwd",
        "/etc/passwd",
        "state/../../x",
        "",
        "a//b",
        ".",
        "a\0b",
        "x" * 5000,
        "\udcff\ud800",
        f"tree.json.tmp-{'0' * 32}",
    ],
)
def test_a_sealed_manifest_with_a_strange_name_is_one_damaged_step(root: Path, name: str) -> None:
    step = root / "branch-1" / "3"
    document = layout.unseal((step / layout.MANIFEST).read_bytes(), "test")
    del_seal = {key: value for key, value in document.items() if key != "seal"}
    del_seal["files"][name] = {"size_bytes": 1, "digest": "0" * 32}
    text = layout.seal(del_seal)
    (step / layout.MANIFEST).write_bytes(text)
    marker = layout.Marker.parse((step / layout.MARKER).read_bytes(), "test")
    (step / layout.MARKER).write_bytes(layout.Marker(marker.id, layout.digest(text)).emit())
    with ckpt.CheckpointManager(root) as m:
        restored = m.resume(like=STATE)
    assert (restored.step, [lost.step for lost in restored.report.lost]) == (2, [3])
    assert [step.intact for step in ckpt.verify(root).steps] == [True, True, False]
    with pytest.raises(Damaged):
        ckpt.restore(step)


def orbax_step(root: Path, step: int) -> None:
    (root / str(step) / "default").mkdir(parents=True)
    (root / str(step) / layout.ORBAX_STEP).write_text("{}")


def test_steps_of_orbax_only_cannot_be_verified(tmp_path: Path) -> None:
    orbax_step(tmp_path / "theirs", 4)
    with pytest.raises(Unsupported, match="written by Orbax"):
        ckpt.verify(tmp_path / "theirs")


def test_steps_of_orbax_beside_ours_are_named(root: Path) -> None:
    orbax_step(root, 0)
    found = ckpt.verify(root)
    assert found.not_looked_at == ("0",)
    assert found.intact
    assert len(found.steps) == 3


def damages(root: Path) -> list[tuple[str, Damage]]:
    """What `verify` says of each file of a step, when it is cut, flipped or gone."""
    step = root / "branch-1" / "3"
    found = []
    for path in sorted(path for path in step.rglob("*") if path.is_file()):
        good = path.read_bytes()
        if not good:
            continue  # Orbax wants it to be there, no more
        for bad in (good[: len(good) // 2], bytes([good[0] ^ 1]) + good[1:], _flip_end(good), None):
            path.unlink() if bad is None else path.write_bytes(bad)
            found += [(path.name, each) for each in ckpt.verify(root).damage]
            path.write_bytes(good)
    return found


def _flip_end(data: bytes) -> bytes:
    at = data.find(STATE["w"].tobytes())
    at = len(data) - 1 if at < 0 else at
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_messages_name_each_place_once(root: Path) -> None:
    found = damages(root)
    assert len(found) > 20
    for name, each in found:
        assert str(root) not in str(each), each
        assert str(each).count(each.file) == 1, each
        assert str(each).count(name) <= 1, each
    assert any(each.leaf == "w" and each.what.startswith("chunk") for _, each in found)


def test_the_store_of_the_message_is_where_it_was(root: Path) -> None:
    error: CheckpointError = Damaged(f"{root}/a/b: cut")
    assert str(Damage.by(FileStore(root), "a/b", error)) == "a/b: cut"
    assert str(Damage.by(FileStore(root), "a", error)) == "a: b: cut"

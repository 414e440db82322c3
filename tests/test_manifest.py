"""A manifest that is sealed and says what cannot be: damage, and the same to all who read it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import Stream

import ckpt
from ckpt import layout

LIKE = {"w": np.arange(4.0)}
_ABSENT = object()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("manifest") / "run"
    with ckpt.CheckpointManager(root, arena=root.with_name("arena")) as manager:
        manager.save(0, LIKE, data=Stream({"at": 1}), metrics={"loss": 0.5}).wait()
    return root


def reseal(root: Path, member: str, value: Any) -> None:
    """Change the manifest of step 0, and give it and the marker the digests that fit."""
    step = root / "branch-1/0"
    document = layout.unseal((step / layout.MANIFEST).read_bytes(), "manifest")
    document[member] = value
    if value is _ABSENT:
        del document[member]
    text = layout.seal(document)
    (step / layout.MANIFEST).write_bytes(text)
    marker = layout.parse_marker((step / layout.MARKER).read_bytes(), "marker")
    assert isinstance(marker, layout.Marker)
    new = layout.Marker(marker.id, layout.digest(text)).emit()
    (step / layout.MARKER).write_bytes(new)


def test_what_was_saved_is_no_damage(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    reseal(root, "extra", 5)
    assert ckpt.verify(root).intact
    assert ckpt.restore(root, LIKE).extra == 5


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("images", []),
        ("images", _ABSENT),
        ("images", {}),
        ("images", [5]),
        ("files", {}),
        ("files", []),
        ("data", []),
        ("data", {"data": {}}),
        ("data", {"data": {"states": 5}}),
        ("data", {"data": {"states": []}}),
        ("metrics", [1]),
        ("metrics", {"loss": "0.5"}),
        ("metrics", {"loss": True}),
        ("environment", [1]),
        ("environment", "x"),
        ("time_ns", "x"),
        ("bytes", -1),
        ("parent", 5),
        ("decision", 5),
        ("step", 1),
    ],
)
def test_damage_is_the_same_to_all(saved: Path, tmp_path: Path, member: str, value: Any) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    reseal(root, member, value)
    calls = [
        lambda: ckpt.restore(root, LIKE, step=0),
        lambda: ckpt.restore(root, LIKE, data=Stream(None), step=0),
        lambda: ckpt.metadata(root),
        lambda: ckpt.open(root).best_step(ckpt.Best("loss")),
    ]
    told = []
    for call in calls:
        with pytest.raises(ckpt.Damaged, match=layout.MANIFEST) as caught:
            call()
        told.append(str(caught.value))
    assert len(set(told)) == 1, told
    (step,) = ckpt.verify(root).steps
    (damage,) = step.damage
    assert damage.file == f"branch-1/0/{layout.MANIFEST}"
    assert damage.what in told[0]


def test_what_is_wrong_is_said_once(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved, root)
    (root / "branch-1/0" / layout.TREE).write_bytes(b"{}")
    with (
        ckpt.CheckpointManager(root, arena=tmp_path / "arena") as manager,
        pytest.raises(ckpt.Damaged) as caught,
    ):
        manager.resume(LIKE)
    told = [record.getMessage() for record in caplog.records if layout.TREE in record.getMessage()]
    assert len(told) == 1
    for text in (*told, str(caught.value)):
        assert text.count("damaged") == 1, text
        assert f"{root}/branch-1/0: not what was saved:" in text

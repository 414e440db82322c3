"""Damage drawn over every file of a step: we find all of it, and nobody gets wrong values unseen.

`python -m tools.bench damage` prints what is asserted here, for as many damages as one likes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from rich.console import Console

import ckpt
from tools.bench import damage_table, damaged_run
from tools.bench.bits import bits
from tools.bench.damage import KINDS, Damage, anatomy, changed, draw, hit_params, is_harmless
from tools.bench.damaged_run import PEERS, DamagedStep, Survey, same_arrays, state_of, survey

SEED = int(os.environ.get("DAMAGE_SEED", time.time_ns() % 1_000_000))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lastgood-damage-") as name:
        yield Path(name)


def must_be_found(found: Survey) -> None:
    """Each one of ours is found and named; others may be wrong only where no CRC can tell."""
    what = f"DAMAGE_SEED={found.seed}"
    missed = [each for each in found.ours if not each.is_found]
    assert not missed, f"{what}: {len(missed)} not found, the first: {missed[0]}"
    assert {each.damage.kind for each in found.ours} == set(KINDS), what
    for reader, answers in found.peers.items():
        for each in answers:
            told = f"{what}: {reader}: {each.damage}: {each.answer}"
            files = {damage_table.kind_of_file(name) for name in each.damage.after}
            if each.answer == "WRONG VALUES":
                # Chunks of another step with their own CRCs, where the index says chunks lie.
                assert (each.damage.kind, files) == ("of another step", {"image"}), told
                assert each.older, told
            if each.answer == "other tree":
                assert "Orbax's JSON" in files, told


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_damage_of_all_kinds_is_found_and_named(
    place: Path, compression: Literal["zstd"] | None
) -> None:
    found = survey(place, 150, SEED, peers=40, compression=compression)
    assert len(found.ours) == 150
    must_be_found(found)
    assert {len(answers) for answers in [*found.peers.values(), found.own]} == {40}


@pytest.mark.parametrize("reader", [*PEERS, "Orbax v0, its own step"])
def test_others_refuse_what_they_need_and_read_what_they_do_not(
    step: DamagedStep, own_step: DamagedStep, reader: str
) -> None:
    theirs, read = (step, PEERS[reader]) if reader in PEERS else (own_step, PEERS["Orbax v0"])
    index, unread = (
        ("state/manifest.ocdbt", "tree.json")
        if theirs is step
        else ("default/manifest.ocdbt", "default/commit_success.txt")
    )
    damages = [Damage("deleted", name, "deleted", {name: None}) for name in (index, unread)]
    answers = theirs.by_others(damages, read)
    assert [each.answer for each in answers] == ["refused", "right"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("number", range(2))
def test_a_thousand_damages(place: Path, number: int, compression: Literal["zstd"] | None) -> None:
    found = survey(place, 1000, SEED + 1 + number, compression=compression)
    must_be_found(found)
    console = Console(width=170)
    damage_table.show(found, console)
    wrong = [each for each in found.own if each.answer == "WRONG VALUES"]
    assert wrong, "Orbax finds everything by now: README says otherwise"


# --- what is drawn -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def step() -> Iterator[DamagedStep]:
    with tempfile.TemporaryDirectory(prefix="lastgood-damage-") as name:
        yield damaged_run.save_ours(Path(name, "run"))


@pytest.fixture(scope="module")
def own_step() -> Iterator[DamagedStep]:
    with tempfile.TemporaryDirectory(prefix="lastgood-damage-") as name:
        yield damaged_run.save_orbax(Path(name, "run"))


def test_damages_are_all_different_and_change_something(step: DamagedStep) -> None:
    damages = step.draw(400, 1)
    assert damages == step.draw(400, 1)
    assert damages != step.draw(400, 2)
    assert len(damages) == 400
    assert {each.kind for each in damages} == set(KINDS)
    assert {each.file for each in damages} == step.files.keys()
    assert len({frozenset(each.after.items()) for each in damages}) == 400
    for each in damages:
        assert any(step.files[name] != data for name, data in each.after.items()), each


def test_files_are_drawn_up_to_the_last_byte() -> None:
    """Whatever the seed, every damage there is comes up when so many are asked for."""
    files, others = {"a": b"1", "b": b"", "c": b"22"}, {"a": b"4", "b": b"", "c": b"55"}
    for seed in [SEED, *range(300)]:
        what = f"DAMAGE_SEED={seed}"
        found = draw(files, others, 10_000, seed)
        for kind, count in {
            "bit flip": 8 + 16,
            "truncation": 1,
            "emptied": 2,
            "zeroed page": 2,
            "deleted": 3,
            "swapped": 3,
            "of another step": 2,
        }.items():
            drawn = [each for each in found if each.kind == kind]
            assert len(drawn) == count, f"{what}: {kind}: {sorted(map(str, drawn))}"
        assert len({frozenset(each.after.items()) for each in found}) == len(found), what
        flips = {each.after["c"] for each in found if (each.file, each.kind) == ("c", "bit flip")}
        assert len(flips) == 16, what


def test_pages_are_zeroed_at_pages_and_at_sectors() -> None:
    files = {"a": b"1" * 10_000}
    starts = [
        int(each.what.split()[2])
        for each in draw(files, {}, 1000, SEED)
        if each.kind == "zeroed page"
    ]
    assert sorted(starts) == list(range(0, 10_000, 512)), f"DAMAGE_SEED={SEED}"


def test_the_bytes_of_an_image_are_known_by_what_they_are(step: DamagedStep) -> None:
    (name,) = [name for name in step.files if name.endswith(".image")]
    data = step.files[name]
    found = anatomy(data, name)
    assert set(found.params) == {"params.w", "params.b", "small", "count", "key"}
    assert found.params.count("params.w") == 4
    assert 0 < (~found.matters).sum() < len(data)
    assert found.matters[found.chunk >= 0].all()
    assert not any(data[at] for at in np.flatnonzero(~found.matters)), "padding is zeros"

    def flipped(at: int) -> Damage:
        new = bytearray(data)
        new[at] ^= 1
        assert changed(data, bytes(new)).tolist() == [at]
        return Damage("bit flip", name, "", {name: bytes(new)})

    images, rng = {name: found}, random.Random(SEED)
    for row, param in enumerate(found.params):
        at = int(rng.choice(np.flatnonzero(found.chunk == row).tolist()))
        assert hit_params(flipped(at), step.files, images) == {param}
        assert not is_harmless(flipped(at), step.files, images)
    padding = int(rng.choice(np.flatnonzero(~found.matters).tolist()))
    assert is_harmless(flipped(padding), step.files, images)
    assert hit_params(flipped(0), step.files, images) == set()
    cut = Damage("truncation", name, "", {name: data[:-1]})
    assert not is_harmless(cut, step.files, images)


# --- what is said --------------------------------------------------------------------------------


def test_a_step_is_whole_again_afterwards(step: DamagedStep) -> None:
    before = {name: (step.path / name).read_bytes() for name in step.files}
    for damage in step.draw(50, SEED):
        with step.damaged(damage):
            assert {n for n in before if not (step.path / n).is_file()} == {
                name for name, data in damage.after.items() if data is None
            }
        assert {name: (step.path / name).read_bytes() for name in step.files} == before


def test_what_goes_unfound_is_told(step: DamagedStep, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify that is blind, and a restore that checks nothing, would be seen."""
    (name,) = [name for name in step.files if name.endswith(".image")]
    at = int(np.flatnonzero(anatomy(step.files[name], name).chunk >= 0)[0])
    data = bytearray(step.files[name])
    data[at] ^= 1
    damage = Damage("bit flip", name, "", {name: bytes(data)})
    (told,) = damaged_run.by_ours(step, [damage])
    assert told.is_found
    assert (told.verify, told.asked, told.newest) == (True, "refused", "older step")

    whole = ckpt.verify(step.path.parent.parent)
    with monkeypatch.context() as patch:
        patch.setattr(ckpt, "verify", lambda root: whole)
        (told,) = damaged_run.by_ours(step, [damage])
        assert (told.is_found, told.verify) == (False, False)
    other = ckpt.restore(step.path.parent.parent, step=damaged_run.OLDER)
    with monkeypatch.context() as patch:
        patch.setattr(ckpt, "restore", lambda root, step=None: other)
        (told,) = damaged_run.by_ours(step, [damage])
        assert (told.is_found, told.asked) == (False, "WRONG VALUES")


def test_values_and_trees_are_told_apart() -> None:
    whole, other = bits(state_of(3)), bits(state_of(2))
    assert same_arrays(whole, whole) == "right"
    assert same_arrays(other, whole) == "WRONG VALUES"
    text = "['text']"
    assert same_arrays({**whole, text: other[text]}, whole) == "other tree"
    assert same_arrays({k: v for k, v in whole.items() if k != text}, whole) == "other tree"


@pytest.mark.parametrize("reader", PEERS)
def test_the_image_of_another_step_is_found_by_us_alone(step: DamagedStep, reader: str) -> None:
    """Whole chunks with their own CRCs at the places that the index names: no CRC can tell."""
    (name,) = [name for name in step.files if name.endswith(".image")]
    damage = Damage("of another step", name, "that of another step", {name: step.others[name]})
    (told,) = damaged_run.by_ours(step, [damage])
    assert told.is_found
    (theirs,) = step.by_others([damage], PEERS[reader])
    assert (theirs.answer, theirs.older) == ("WRONG VALUES", True)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_counts_everything_once() -> None:
    command = [sys.executable, "-m", "tools.bench", "damage", "--json", "--damages", "60"]
    done = subprocess.run(
        [*command, "--seed", str(SEED)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"DAMAGE_SEED={SEED}: {done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout)
    assert (found["seed"], found["damages"], found["ours"]["not found"]) == (SEED, 60, [])
    for by in ("by damage", "by file"):
        assert sum(row["damages"] for row in found["ours"][by].values()) == 60
        assert all(row["WRONG VALUES"] == 0 for row in found["ours"][by].values())
    assert found["others"].keys() == {
        *(f"{name}, our step" for name in PEERS),
        "Orbax v0, its own step",
    }
    for theirs in found["others"].values():
        for by in ("by damage", "by file"):
            assert sum(sum(row.values()) for row in theirs[by].values()) == 60


def test_tables_have_a_row_for_each_kind(place: Path) -> None:
    console = Console(width=170, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    try:
        damage_table.show(survey(place, 40, SEED, peers=4), console)
    finally:
        console.file.close()
    text = console.export_text()
    legend = ("harmless: only padding changed", "not needed: files")
    headings = (*damage_table.OUR_COLUMNS, *damage_table.THEIR_COLUMNS)
    for word in (*headings, *legend, "image", "40 damages"):
        assert word in text, text

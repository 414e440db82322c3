"""Every bit of a small step, and what else can happen to its files but what `test_damage_table`
draws.

What may change without being reported is padding, and which bytes are padding is computed here
from the layout of the image alone. Everything else is reported by `verify` and by `restore`, and no
wrong value ever comes out.
"""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt import grid, image
from ckpt.errors import Damaged
from ckpt.verification import check_step, verify_step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Orbax and what it imports
from damaged_steps import (
    Step,
    by_others,
    flip,
    saved_run,
)

SEED = int(os.environ.get("DAMAGE_SEED", time.time_ns() % 1_000_000))


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    with saved_run() as root:
        yield root


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Iterator[Step]:
    """A step to be damaged in place; mended afterwards, whatever came of it."""
    found = Step(saved, 2)
    found.unharmed("as it was saved")
    shutil.copytree(saved, tmp_path / "whole")
    yield found
    shutil.rmtree(saved)
    shutil.copytree(tmp_path / "whole", saved)


# --- bits ----------------------------------------------------------------------------------------


def test_a_step_is_what_these_tests_think(step: Step) -> None:
    files = step.files()
    assert len(files) >= 13
    (name,) = [name for name in files if name.endswith(".image")]
    size = (step.path / name).stat().st_size
    padding = step.padding(name)
    assert 0 < len(padding) < size - grid.PAGE_BYTES
    assert sum((step.path / each).stat().st_size for each in files) < 32_000


def test_a_flipped_bit_in_any_byte_of_any_file(step: Step) -> None:
    """One bit in every fourth byte, drawn anew in every run; all bits of what listing reads."""
    rng, quarter = random.Random(SEED), SEED % 4
    told = 0
    for name in step.files():
        padding = step.padding(name)
        file = os.open(step.path / name, os.O_RDWR)
        try:
            every = name == "commit_success.txt"
            places = range(0 if every else quarter, os.fstat(file).st_size, 1 if every else 4)
            for at in sorted(set(places) - padding):
                for bit in range(8) if every else [rng.randrange(8)]:
                    what = f"{name}: bit {bit} of byte {at} flipped (seed {SEED})"
                    flip(file, at, 1 << bit)
                    step.reported(name, what)
                    flip(file, at, 1 << bit)
                    told += 1
            # What must not matter at all need not be tried one by one.
            for stretch in np.array_split(sorted(padding), 1 + len(padding) // 32)[quarter::4]:
                flips = [(int(at), 1 << rng.randrange(8)) for at in stretch]
                for at, mask in flips:
                    flip(file, at, mask)
                step.unharmed(f"{name}: flipped in padding {flips} (seed {SEED})")
                for at, mask in flips:
                    flip(file, at, mask)
        finally:
            os.close(file)
    step.unharmed("all flipped back")
    assert told > 2000, told


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_bit_of_every_file(step: Step) -> None:
    for name in step.files():
        padding = step.padding(name)
        file = os.open(step.path / name, os.O_RDWR)
        for at in range(os.fstat(file).st_size):
            for bit in range(8):
                what = f"{name}: bit {bit} of byte {at} flipped"
                flip(file, at, 1 << bit)
                if at in padding:
                    step.unharmed(what)
                else:
                    step.reported(name, what)
                flip(file, at, 1 << bit)
        os.close(file)


def test_padding_may_be_anything_for_everybody(run: Path) -> None:
    """All bytes that we call padding, overwritten: we, TensorStore and Orbax read the same."""
    step = Step(run, 2)
    (name,) = [name for name in step.files() if name.endswith(".image")]
    before = by_others(step)
    data = bytearray((step.path / name).read_bytes())
    padding = step.padding(name)
    for at in padding:
        data[at] ^= 0xFF
    (step.path / name).write_bytes(data)
    step.unharmed("all padding overwritten")
    assert step.padding(name) == padding
    assert by_others(step) == before


# --- files ---------------------------------------------------------------------------------------


def truncations(size: int) -> list[int]:
    return sorted({0, 1, 2, size - 1, size - 2, size // 2, *(size * i // 17 for i in range(17))})


def test_a_file_that_was_cut_or_has_grown(step: Step) -> None:
    for name in step.files():
        path = step.path / name
        data = path.read_bytes()
        for length in truncations(len(data)):
            if 0 <= length < len(data):
                path.write_bytes(data[:length])
                step.reported(name, f"{name} cut to {length} of {len(data)} bytes")
        for more in (b"\n", b"\0", b" ", bytes(4096), data or b"1"):
            path.write_bytes(data + more)
            step.reported(name, f"{name} grown by {len(more)} bytes")
        path.write_bytes(data)
    step.unharmed("all mended")


def test_a_file_that_is_gone_or_is_no_file(step: Step) -> None:
    away = step.root / "away"
    for name in step.files():
        path = step.path / name
        os.rename(path, away)
        step.reported(name, f"{name} deleted")
        path.mkdir()
        step.reported(name, f"{name} is a directory")
        path.rmdir()
        os.mkfifo(path)
        step.reported(name, f"{name} is a pipe")
        path.unlink()
        path.symlink_to("nowhere")
        step.reported(name, f"{name} is a link that leads nowhere")
        path.unlink()
        os.rename(away, path)
    step.unharmed("all mended")


def test_all_small_files_of_another_step(step: Step) -> None:
    """Sealed, whole, in agreement with each other, and of the wrong step."""
    other = Step(step.root, 3)
    both = [name for name in step.files() if not name.endswith(".image")]
    old = {name: (step.path / name).read_bytes() for name in both}
    for name in both:
        (step.path / name).write_bytes((other.path / name).read_bytes())
    step.reported("commit_success.txt", "all small files of step 3")
    marker = "commit_success.txt"
    (step.path / marker).write_bytes(old[marker])
    step.reported("manifest.json", "all small files of step 3 but the marker")
    for name, data in old.items():
        (step.path / name).write_bytes(data)
    step.unharmed("all mended")


def test_chunks_of_an_image_that_were_swapped(step: Step) -> None:
    (name,) = [name for name in step.files() if name.endswith(".image")]
    path = step.path / name
    data = path.read_bytes()
    header = image.decode(lambda at, n: data[at : at + n], len(data), name)
    ranges = image.payload_ranges(header).tolist()
    swapped = 0
    for (a, n), (b, m) in combinations(ranges, 2):
        length = min(n, m)
        damaged = bytearray(data)
        damaged[a : a + length], damaged[b : b + length] = (
            data[b : b + length],
            data[a : a + length],
        )
        if damaged == data:
            continue
        path.write_bytes(damaged)
        step.reported(name, f"{length} bytes at {a} and {b} swapped")
        swapped += 1
    path.write_bytes(data)
    assert swapped > 10
    step.unharmed("all mended")


def test_files_that_do_not_belong_to_a_step_do_it_no_harm(run: Path) -> None:
    step = Step(run, 2)
    foreign = [
        "notes.txt",
        "state/x",
        "state/d/a2-p0.image",
        "state/d/a1-p1.image",
        "part-a1-p1.json",
        f"tree.json.tmp-{'0' * 32}",
        "more/files/here",
    ]
    for name in foreign:
        (step.path / name).parent.mkdir(parents=True, exist_ok=True)
        (step.path / name).write_bytes(b"foreign")
    step.unharmed("foreign files")
    assert ckpt.verify(run).intact
    found = by_others(step)
    for name in foreign:
        (step.path / name).unlink()
    assert by_others(step) == found


def test_damage_is_named_by_leaf_and_file(run: Path) -> None:
    """In words: which leaf, which file, what was wanted and what was found."""
    step = Step(run, 2)
    (name,) = [name for name in step.files() if name.endswith(".image")]
    data = bytearray((step.path / name).read_bytes())
    header = image.decode(lambda at, n: bytes(data[at : at + n]), len(data), name)
    ranges = image.payload_ranges(header).tolist()
    leaves = {"params.w": "params/w", "small": "small", "key": "key"}
    for row, (start, _) in enumerate(ranges):
        param = header.arrays[header.columns.array[row]].param
        if param in leaves:
            data[start] ^= 1
    (step.path / name).write_bytes(data)
    report = verify_step(step.store, step.id)
    assert {each.leaf for each in report.damage} == set(leaves.values())
    assert {each.file for each in report.damage} == {f"branch-1/2/{name}"}
    assert all("wanted digest" in each.what for each in report.damage)
    with pytest.raises(Damaged, match=r"(params/w|params\.w|small|key).*wanted digest"):
        ckpt.restore(step.path)
    with pytest.raises(Damaged, match="wanted digest"):
        check_step(step.store, step.id)

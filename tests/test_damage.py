"""Every bit of a small step, and everything else that can happen to its files.

What may change without being reported is padding, and which bytes are padding is computed here
from the layout of the image alone. Everything else is reported by `verify` and by `restore`, and no
wrong value ever comes out.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
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
from ckpt.reader import Reader
from ckpt.verification import check_step, verify_step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Orbax and what it imports
from damaged_steps import (
    Step,
    bits,
    by_others,
    flip,
    save_steps,
    saved_bits,
)

SEED = int(os.environ.get("DAMAGE_SEED", time.time_ns() % 1_000_000))


@pytest.fixture(scope="module")
def saved() -> Iterator[Path]:
    """A run with four steps, in memory if possible; copied by whoever damages it for good."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="lastgood-damage-") as name:
        root = Path(name, "run")
        save_steps(root, range(1, 5))
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


@pytest.mark.parametrize("quarter", range(4))
def test_a_flipped_bit_in_any_byte_of_any_file(step: Step, quarter: int) -> None:
    """One bit, drawn anew in every run, in every byte; all bits of what listing reads."""
    rng = random.Random(SEED + quarter)
    told = 0
    for name in step.files():
        padding = step.padding(name)
        file = os.open(step.path / name, os.O_RDWR)
        try:
            for at in sorted(set(range(quarter, os.fstat(file).st_size, 4)) - padding):
                for bit in range(8) if name == "commit_success.txt" else [rng.randrange(8)]:
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


def test_a_page_or_a_stretch_of_zeros(step: Step) -> None:
    rng = random.Random(SEED)
    for name in step.files():
        path, padding = step.path / name, step.padding(name)
        data = path.read_bytes()
        for length in (4096, 512, 64, 8):
            for start in (
                range(0, len(data), 4096)
                if length == 4096
                else [rng.randrange(len(data)) for _ in range(min(20, len(data)))]
            ):
                damaged = bytearray(data)
                stretch = range(start, min(start + length, len(data)))
                for at in stretch:
                    damaged[at] = 0
                changed = {at for at in stretch if data[at]} - padding
                path.write_bytes(damaged)
                what = f"{name}: zeros at {start}, {length} bytes (seed {SEED})"
                if changed:
                    step.reported(name, what)
                else:
                    step.unharmed(what)
        path.write_bytes(data)


def test_two_files_that_were_swapped(step: Step) -> None:
    away = step.root / "away"

    def swap(one: Path, other: Path) -> None:
        os.rename(one, away)
        os.rename(other, one)
        os.rename(away, other)

    for one, other in combinations(step.files(), 2):
        if (step.path / one).read_bytes() == (step.path / other).read_bytes():
            continue
        swap(step.path / one, step.path / other)
        report = verify_step(step.store, step.id)
        assert not report.intact, f"{one} and {other} swapped"
        text = "\n".join(map(str, report.damage))
        assert one in text or other in text, text
        try:
            restored = Reader(step.store).restore_step(step.id)
        except Damaged as error:
            if one not in str(error) and other not in str(error):
                raise AssertionError(f"{one} and {other}: reported without a name") from error
        else:
            assert bits(restored.state) == saved_bits(step.step)
            assert {each.file.removeprefix("branch-1/2/") for each in restored.report.damage} == {
                one,
                other,
            }
        swap(step.path / one, step.path / other)
    step.unharmed("all mended")


def test_a_file_of_another_step(step: Step) -> None:
    """Sealed, whole, and of the wrong step: of another number, or of another branch."""
    other = Step(step.root, 3)
    for name in step.files():
        path = step.path / name
        data, theirs = path.read_bytes(), (other.path / name).read_bytes()
        if data == theirs:
            continue
        path.write_bytes(theirs)
        step.reported(name, f"{name} of step 3")
        path.write_bytes(data)
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

"""Every bit of a small step, and everything else that can happen to its files.

What may change without being reported is padding, and which bytes are padding is computed here
from the layout of the image alone. Everything else is reported by `verify` and by `restore`, and no
wrong value ever comes out.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts

import ckpt
from ckpt import grid, image
from ckpt.errors import CheckpointError, Damaged, NotFound
from ckpt.lineage import StepId
from ckpt.manager import CheckpointManager, Shared
from ckpt.reader import Reader
from ckpt.retention import Keep
from ckpt.store import FileStore
from ckpt.verification import check_step, verify_step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Orbax and what it imports
    import orbax.checkpoint.experimental.v1 as orbax

SEED = int(os.environ.get("DAMAGE_SEED", time.time_ns() % 1_000_000))


def state_of(tag: int) -> dict[str, Any]:
    rng = np.random.default_rng(tag)
    return {
        "params": {
            "w": jnp.asarray(rng.standard_normal((3, 4), np.float32)),
            "b": jnp.asarray(rng.standard_normal(5)).astype(jnp.bfloat16),
        },
        "small": rng.integers(-8, 8, (2, 3)).astype(ml_dtypes.int4),
        "f8": rng.standard_normal(3).astype(ml_dtypes.float8_e4m3fn),
        "mask": rng.integers(0, 2, 7).astype(bool),
        "z": np.array(1 + 2j * tag, np.complex64),
        "empty": np.zeros((0, 3), np.int8),
        "key": jax.random.key(tag),
        "counts": (np.int64(tag), tag, float(tag)),
        "text": f"tag {tag}",
    }


def bits(state: Any) -> list[Any]:
    found: list[Any] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if key else leaf)
        found.append((str(path), str(array.dtype), array.shape, array.tobytes()))
    return found


@functools.cache
def saved_bits(tag: int) -> list[Any]:
    return bits(state_of(tag))


class Stream:
    """The least that an iterator must be."""

    def __init__(self) -> None:
        self.at = 0

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def save_steps(root: Path, steps: range) -> None:
    stream = Stream()
    tier = Shared(root, keep=Keep())
    with CheckpointManager(tier, arena=root.parent / f"arena-{steps.start}") as manager:
        manager.resume(data=stream)
        for step in steps:
            stream.at = step
            figures = {"loss": 1 / step}
            manager.save(step, state_of(step), data=stream, metrics=figures, extra={"step": step})
        manager.wait_until_finished(60)


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


@dataclass(frozen=True)
class Step:
    """A step whose files are damaged one by one, and mended again."""

    root: Path
    step: int
    branch: int = 1
    attempt: int = 1

    @property
    def id(self) -> StepId:
        return StepId(self.step, self.branch, self.attempt)

    @property
    def store(self) -> FileStore:
        return FileStore(self.root)

    @property
    def path(self) -> Path:
        return self.root / f"branch-{self.branch}" / str(self.step)

    def files(self) -> list[str]:
        """All files, relative to the step."""
        found = (path for path in self.path.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self.path)) for path in found)

    def padding(self, name: str) -> set[int]:
        """Bytes that nobody reads: in an image, what is neither page, nor table, nor chunk."""
        if not name.endswith(".image"):
            return set()
        data = (self.path / name).read_bytes()
        header = image.decode(lambda at, n: data[at : at + n], len(data), name)
        free = set(range(grid.PAGE_BYTES, len(data)))
        for start, length in image.payload_ranges(header).tolist():
            free -= set(range(start, start + length))
        # The page says where the table lies; see `_PAGE` in ckpt/image.py.
        table_at, table_bytes = np.frombuffer(data, "<u8", 2, offset=24).tolist()
        return free - set(range(table_at, table_at + table_bytes))

    def reported(self, name: str, what: str) -> None:
        """Verify and restore both report damage to a file; no wrong value comes out."""
        report = verify_step(self.store, self.id)
        assert not report.intact, f"{what}: verify says it is intact"
        files = [each.file for each in report.damage]
        assert any(file.endswith(f"/{name}") for file in files), f"{what}: {report.damage}"
        try:
            restored = Reader(self.store).restore_step(self.id)
        except Damaged as error:
            if name not in str(error):
                raise AssertionError(f"{what}: reported without its name") from error
            return
        assert bits(restored.state) == saved_bits(self.step), f"{what}: WRONG VALUES"
        damage = restored.report.damage
        assert any(each.file.endswith(name) for each in damage), f"{what}: {damage}"

    def unharmed(self, what: str) -> None:
        """Nothing is reported, and nothing wrong comes out."""
        report = verify_step(self.store, self.id)
        assert report.intact, f"{what}: {report.damage}"
        restored = Reader(self.store).restore_step(self.id)
        assert restored.report.damage == (), what
        assert bits(restored.state) == saved_bits(self.step), f"{what}: WRONG VALUES"


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


def flip(file: int, at: int, mask: int) -> None:
    byte = os.pread(file, 1, at)[0]
    os.pwrite(file, bytes([byte ^ mask]), at)


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


def by_others(step: Step) -> dict[str, Any]:
    """The arrays as TensorStore and Orbax read them."""
    found: dict[str, Any] = {}
    for param in ("params.w", "params.b", "small", "mask", "f8", "z"):
        base = f"file://{step.path}/state/"
        spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": param}}
        array = ts.open(spec, read=True, context=ts.Context()).result().read().result()
        found[param] = (str(array.dtype), array.shape, array.tobytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state = orbax.load(step.path)
    found["orbax"] = bits({"w": state["params"]["w"], "b": state["params"]["b"], "f8": state["f8"]})
    return found


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


# --- directories ---------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["branch-1/7", "branch-1/1", "branch-9/2", "branch-9/7"])
def test_a_step_directory_under_another_name(run: Path, to: str) -> None:
    shutil.rmtree(run / to, ignore_errors=True)
    (run / to).parent.mkdir(exist_ok=True)
    os.rename(run / "branch-1/2", run / to)
    report = ckpt.verify(run)
    (damaged,) = [each for each in report.steps if not each.intact]
    assert damaged.name == to
    assert "was renamed or its files were mixed up" in str(damaged.damage[0])
    with pytest.raises(Damaged, match="renamed"):
        ckpt.restore(run / to)
    restored = ckpt.restore(run)
    assert bits(restored.state) == bits(state_of(4))
    if to == "branch-1/7":
        assert [(lost.step, "renamed" in lost.reason) for lost in restored.report.lost] == [
            (7, True)
        ]
    else:
        assert restored.report.lost == ()
    wanted = 1 if to == "branch-1/1" else 2
    with pytest.raises(Damaged if to == "branch-1/1" else NotFound):
        ckpt.restore(run, step=wanted)


def test_a_copy_of_a_step_is_none(run: Path) -> None:
    shutil.copytree(run / "branch-1/4", run / "branch-1/5")
    (run / "branch-1/6").mkdir()
    shutil.copytree(run / "branch-1/4/state", run / "branch-1/8/state")
    before = tree_bytes(run)
    restored = ckpt.restore(run)
    assert restored.step == 4
    assert [lost.step for lost in restored.report.lost] == [8, 6, 5]
    assert "commit_success.txt is absent" in restored.report.lost[1].reason
    assert tree_bytes(run) == before


# --- records of attempts -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attempts/1.json", "attempts/1.from.json"])
def test_a_flipped_bit_in_any_byte_of_an_attempt_record(run: Path, name: str) -> None:
    rng = random.Random(SEED)
    size = (run / name).stat().st_size
    file = os.open(run / name, os.O_RDWR)
    for at in range(size):
        mask = 1 << rng.randrange(8)
        what = f"{name}: {mask} at byte {at} (seed {SEED})"
        flip(file, at, mask)
        report = ckpt.verify(run, shallow=True)
        assert not report.intact, what
        assert name in str(report.damage[0]), what
        if "from" in name:
            # Without it nothing can be said of the lineage: never a wrong step instead.
            with pytest.raises(Damaged, match=name):
                ckpt.restore(run)
        elif at % 16 == 0:
            assert ckpt.restore(run).step == 4, what
        flip(file, at, mask)
    os.close(file)
    assert ckpt.verify(run).intact


# --- falling back --------------------------------------------------------------------------------


def damage_image(path: Path) -> None:
    (name,) = (path / "state/d").glob("*.image")
    data = bytearray(name.read_bytes())
    header = image.decode(lambda at, n: bytes(data[at : at + n]), len(data), "")
    start = image.payload_ranges(header)[0, 0]
    data[start] ^= 4
    name.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "image": damage_image,
    "image gone": lambda path: next((path / "state/d").glob("*.image")).unlink(),
    "image cut": lambda path: os.truncate(next((path / "state/d").glob("*.image")), 5000),
    "marker": lambda path: (path / "commit_success.txt").write_bytes(b"{}"),
    "marker gone": lambda path: (path / "commit_success.txt").unlink(),
    "marker empty": lambda path: (path / "commit_success.txt").write_bytes(b""),
    "manifest": lambda path: (path / "manifest.json").write_bytes(b"{}"),
    "manifest gone": lambda path: (path / "manifest.json").unlink(),
    "tree": lambda path: (path / "tree.json").write_bytes(b"{}"),
    "tree gone": lambda path: (path / "tree.json").unlink(),
    "all empty": lambda path: [each.write_bytes(b"") for each in path.rglob("*") if each.is_file()],
    "all gone": lambda path: [each.unlink() for each in path.rglob("*") if each.is_file()],
}


def tree_bytes(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def manager_of(run: Path, keep: Keep | None = None) -> CheckpointManager:
    return CheckpointManager(Shared(run, keep=keep or Keep()), arena=run.parent / "arena")


@pytest.mark.parametrize("newest", DAMAGES)
@pytest.mark.parametrize("before", ["image", "marker"])
def test_the_newest_two_of_four_are_damaged(run: Path, newest: str, before: str) -> None:
    for number, what in ((4, newest), (3, before)):
        DAMAGES[what](run / f"branch-1/{number}")
    damaged = {name: data for name, data in tree_bytes(run).items() if name[:10] >= "branch-1/3"}

    read = ckpt.restore(run)  # changes nothing
    assert (read.step, [lost.step for lost in read.report.lost]) == (2, [4, 3])
    assert len(list((run / "attempts").iterdir())) == 2

    stream = Stream()
    with manager_of(run, Keep(last=1)) as manager:
        restored = manager.resume(data=stream)
        assert bits(restored.state) == bits(state_of(2))
        assert (restored.step, stream.at, restored.extra) == (2, 2, {"step": 2})
        assert [lost.step for lost in restored.report.lost] == [4, 3]
        for lost, what in zip(restored.report.lost, (newest, before), strict=True):
            assert f"branch-1/{lost.step}" in lost.reason, what
        decision = json.loads((run / "attempts/2.from.json").read_bytes())
        assert (decision["kind"], decision["branch"]) == ("fallback", 2)
        assert decision["parent"] == {"attempt": 1, "branch": 1, "step": 2}
        assert decision["reason"] == "step 4 is damaged"
        for number in (3, 4, 5):
            stream.at = number
            manager.save(number, state_of(100 + number), data=stream)
        manager.wait_until_finished(60)

    left = tree_bytes(run)
    assert {name: data for name, data in left.items() if name in damaged} == damaged
    assert (run / "branch-1/4").is_dir()
    with manager_of(run) as manager:
        again = manager.resume(data=stream)
    assert (again.step, again.report.lost) == (5, ())
    assert bits(again.state) == bits(state_of(105))
    assert not ckpt.verify(run).intact  # it is still there, and still told


@pytest.mark.parametrize("what", DAMAGES)
def test_asked_for_by_number_a_damaged_step_is_an_error(run: Path, what: str) -> None:
    DAMAGES[what](run / "branch-1/4")
    before = tree_bytes(run)
    with pytest.raises(Damaged, match="branch-1/4"):
        ckpt.restore(run, step=4)
    with pytest.raises(Damaged, match="branch-1/4"):
        ckpt.restore(run / "branch-1/4")
    with manager_of(run) as manager:
        with pytest.raises(Damaged, match="branch-1/4"):
            manager.restore(4)
        with pytest.raises(NotFound, match="step 9 is not in the lineage"):
            manager.restore(9)
    after = {name: data for name, data in tree_bytes(run).items() if "attempts" not in name}
    assert after == {name: data for name, data in before.items() if "attempts" not in name}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_rewind_to_a_damaged_step_takes_the_one_before(run: Path, what: str) -> None:
    DAMAGES[what](run / "branch-1/3")
    with manager_of(run) as manager:
        restored = manager.rewind(3)
        assert (restored.step, [lost.step for lost in restored.report.lost]) == (2, [3])
        assert bits(restored.state) == bits(state_of(2))
    decision = json.loads((run / "attempts/2.from.json").read_bytes())
    assert (decision["kind"], decision["parent"]["step"]) == ("rewind", 2)


@pytest.mark.parametrize("what", DAMAGES)
def test_nothing_is_left(run: Path, what: str) -> None:
    """Never a fresh start where there was a run."""
    for number in range(1, 5):
        DAMAGES[what](run / f"branch-1/{number}")
    before = tree_bytes(run)
    with pytest.raises(Damaged, match=r"branch-1/4"):
        ckpt.restore(run)
    with manager_of(run) as manager:
        calls: list[Callable[[], object]] = [
            manager.resume,
            lambda: manager.resume(must_exist=True),
            manager.restore,
            lambda: manager.rewind(4),
        ]
        for call in calls:
            with pytest.raises(Damaged, match=r"branch-1/4"):
                call()
        with pytest.raises(CheckpointError):
            manager.save(5, state_of(5))
    left = tree_bytes(run)
    assert {name: left[name] for name in before} == before
    report = ckpt.verify(run)
    assert len([each for each in report.steps if not each.intact]) == 4


def test_what_only_orbax_needs_stops_no_start(run: Path) -> None:
    (run / "branch-1/4/state/_sharding").write_bytes(b"")
    read = ckpt.restore(run)
    assert (read.step, read.report.lost) == (4, ())
    assert [each.file for each in read.report.damage] == ["branch-1/4/state/_sharding"]
    with manager_of(run) as manager:
        restored = manager.resume()
        assert (restored.step, restored.report.damage) == (4, read.report.damage)
    assert ckpt.save(run, state_of(5)) == 5  # which verifies, and does not load
    assert Reader(run).all_steps() == [1, 2, 3, 4, 5]
    assert not ckpt.verify(run).intact

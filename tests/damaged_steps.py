"""A small step with many dtypes, whose files are damaged and mended again."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ckpt import image
from ckpt.errors import Damaged
from ckpt.lineage import StepId
from ckpt.manager import CheckpointManager
from ckpt.reader import Reader
from ckpt.retention import Keep
from ckpt.store import FileStore
from ckpt.tiers import Shared
from ckpt.verification import verify_step
from tools.bench.bits import Bits, bits
from tools.bench.damage import anatomy
from tools.bench.readers import by_tensorstore, by_v1


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


@functools.cache
def saved_bits(tag: int) -> Bits:
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


@contextlib.contextmanager
def saved_run() -> Iterator[Path]:
    """A run with four steps, in memory if possible; copied by whoever damages it for good."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base, prefix="lastgood-damage-") as name:
        root = Path(name, "run")
        save_steps(root, range(1, 5))
        yield root


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
        return set(np.flatnonzero(~anatomy(data, name).matters).tolist())

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
"""What is done to the directory of a step; none of it can be restored afterwards."""


def flip(file: int, at: int, mask: int) -> None:
    byte = os.pread(file, 1, at)[0]
    os.pwrite(file, bytes([byte ^ mask]), at)


def tree_bytes(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def by_others(step: Step) -> dict[str, Any]:
    """The arrays as TensorStore and Orbax read them."""
    found: dict[str, Any] = {}
    for param in ("params.w", "params.b", "small", "mask", "f8", "z"):
        array = by_tensorstore(step.path, param)
        found[param] = (str(array.dtype), array.shape, array.tobytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state = by_v1(step.path)
    found["orbax"] = bits({"w": state["params"]["w"], "b": state["params"]["b"], "f8": state["f8"]})
    return found

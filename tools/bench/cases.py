"""What is saved: states by name and shape, their seeded values, and the digest they must have.

The values of step k are those of the seed after k train steps. A train step multiplies by a
constant: one rounding, so that NumPy, XLA and PyTorch agree bit for bit, and every byte changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

DECAY = np.float32(1 - 2**-10)
"""What a train step multiplies every value by."""

STEP_S = 0.0075
"""What a step of `loops.Loop` is to take undisturbed."""

_WIDTH = 1440  # of the model: 12 blocks of 12 leaves make 1.1 GiB
_PER_NODE = 100  # leaves in one dict of the small-leaves cases


@dataclass(frozen=True)
class Case:
    """A state of f32 leaves, and how it is saved."""

    name: str
    about: str
    shapes: dict[str, tuple[int, ...]]
    """Leaf path `node/leaf` -> shape."""
    saves: int = 4
    """In one process; the first of them is reported by itself."""
    devices: int = 1
    keep: int | None = None
    """Newest steps that are kept while it runs; None for all."""
    pairs: int | None = None
    """At most this many."""
    rivals: bool = True
    """Whether anybody but us takes part by default."""
    watched: bool = False
    """Whether memory is looked at after every save."""

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 4 * sum(map(math.prod, self.shapes.values()))


NAMES = ("leaves", "model", "one", "sharded", "soak", "many")


def cases_of(name: str, scale: float) -> list[Case]:
    """The cases behind a name of `NAMES`; `scale` multiplies bytes, leaves and saves."""
    if name == "leaves":
        count = _scaled(10_000, scale)
        return [Case(name, f"{count:,} leaves of 64 f32", _small(count))]
    if name == "model":
        shapes = _model(scale)
        return [Case(name, f"{len(shapes)} leaves, {_size(shapes)}", shapes)]
    if name == "one":
        shapes = {"model/weight": (_scaled(4096, scale) * 4, 32_768)}
        return [Case(name, f"one leaf, {_size(shapes)}", shapes)]
    if name == "sharded":
        shapes = _model(scale)
        about = f"{len(shapes)} leaves, {_size(shapes)} over 4 CPU devices"
        return [Case(name, about, shapes, devices=4)]
    if name == "soak":
        shapes = {f"model/w{i:02}": (_scaled(1024, scale), 1024) for i in range(16)}
        saves = max(5, round(200 * scale))
        about = f"{saves} saves of {_size(shapes)}"
        return [Case(name, about, shapes, saves=saves, keep=2, pairs=1, watched=True)]
    return [
        Case(f"many-{n}", f"{n:,} leaves of 64 f32", _small(n), pairs=3, rivals=False)
        for n in (_scaled(10_000, scale), _scaled(30_000, scale), _scaled(100_000, scale))
    ]


def values(case: Case, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """The leaves of step 0 by path, in order."""
    generator = np.random.Generator(np.random.SFC64(seed))
    for name, shape in case.shapes.items():
        yield name, generator.standard_normal(shape, np.float32)


def truth(case: Case, seed: int, step: int) -> str:
    """The digest of what a restore of `step` must give."""
    return digest((name, _trained(array, step)) for name, array in values(case, seed))


def digest(leaves: Iterable[tuple[str, np.ndarray]]) -> str:
    """xxh3-128 over path, dtype, shape and bytes of every leaf, in order of the paths given."""
    found = xxhash.xxh3_128()
    for name, array in leaves:
        found.update(f"{name} {array.dtype} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _trained(array: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        array *= DECAY
    return array


def _small(count: int) -> dict[str, tuple[int, ...]]:
    return {f"n{i // _PER_NODE:04}/w{i % _PER_NODE:02}": (64,) for i in range(count)}


def _model(scale: float) -> dict[str, tuple[int, ...]]:
    """Attention and feed-forward matrices of 12 blocks, with their vectors."""
    d = max(8, round(_WIDTH * math.sqrt(scale) / 8) * 8)
    matrices = dict.fromkeys(("key", "out", "query", "value"), (d, d))
    block: dict[str, tuple[int, ...]] = {**matrices, "up": (d, 4 * d), "down": (4 * d, d)}
    block.update(
        dict.fromkeys(("bias_down", "bias_out", "norm1", "norm2", "shift1", "shift2"), (d,))
    )
    return {f"block{i:02}/{name}": block[name] for i in range(12) for name in sorted(block)}


def _scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))


def _size(shapes: dict[str, tuple[int, ...]]) -> str:
    nbytes = 4 * sum(map(math.prod, shapes.values()))
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**28 else f"{nbytes / 2**20:.1f} MiB"

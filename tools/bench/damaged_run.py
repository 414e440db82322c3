"""Two small runs, one of ours and one of Orbax, whose newest steps are damaged and mended again.

Who reads the damaged step: we (verify, the step by its number, the newest step that is intact),
plain TensorStore, and both generations of Orbax.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt
from tools.bench.bits import Bits, bits
from tools.bench.damage import Damage, anatomy, draw, hit_params, is_harmless
from tools.bench.readers import by_tensorstore, by_v0, by_v1, hushed, v0

OLDER, NEWEST = 2, 3
"""Steps of both runs. The newest is damaged, and mixed up with the one before it."""

_BRANCH = "branch-1"
_ARRAYS = ("params.w", "params.b", "small", "count", "key")
"""What TensorStore reads of a step of ours."""

Answer = Literal["refused", "right", "other tree", "WRONG VALUES"]


def state_of(step: int) -> dict[str, Any]:
    """A leaf in four chunks where there are four devices, bfloat16, int4, a key, a number, a text;
    other values at each step, of the same shapes and lengths."""
    rng = np.random.default_rng(step)
    devices = np.array(jax.devices()[:4] if len(jax.devices()) >= 4 else jax.devices()[:1])
    rows = NamedSharding(Mesh(devices, ("x",)), PartitionSpec("x"))
    return {
        "params": {
            "w": jax.device_put(rng.standard_normal((64, 256), np.float32), rows),
            "b": jnp.asarray(rng.standard_normal(5)).astype(jnp.bfloat16),
        },
        "small": rng.integers(-8, 8, (2, 3)).astype(ml_dtypes.int4),
        "key": jax.random.key(step),
        "count": step,
        "text": f"step {step}",
    }


def same_arrays(found: Bits, wanted: Bits) -> Answer:
    """`right`, or what is wrong. Texts come from JSON: another one is another tree."""
    if {path: kind for path, (kind, _) in found.items()} != {
        path: kind for path, (kind, _) in wanted.items()
    }:
        return "other tree"
    wrong = [path for path, leaf in found.items() if leaf != wanted[path]]
    if any(wanted[path][0] != "text" for path in wrong):
        return "WRONG VALUES"
    return "other tree" if wrong else "right"


# --- readers of others ---------------------------------------------------------------------------


def _by_tensorstore(step: Path) -> Bits:
    arrays = {param: by_tensorstore(step, param) for param in _ARRAYS}
    return {name: (f"{a.dtype}{a.shape}", a.tobytes()) for name, a in arrays.items()}


def _by_v0(step: Path) -> Bits:
    return bits(by_v0(step, read_only=True))


Read = Callable[[Path], Bits]
PEERS: dict[str, Read] = {
    "TensorStore": _by_tensorstore,
    "Orbax v0": _by_v0,
    "Orbax v1": lambda step: bits(by_v1(step)),
}


# --- steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """What we said of one damage."""

    damage: Damage
    harmless: bool
    verify: bool
    """It was reported: by the file, and by the leaf where only chunks changed."""
    asked: Literal["refused", "refused, unnamed", "right, reported", "right", "WRONG VALUES"]
    """For the step by its number: refused with the names of file and leaf, or restored exactly,
    with a report of the file."""
    newest: Literal["older step", "same step", "refused", "WRONG VALUES"]
    """For the newest intact step of the run."""
    text: str
    """What verify said."""

    @property
    def is_found(self) -> bool:
        """Named by verify, told by restore, and the run goes on with exact values; or harmless, and
        nothing of the kind."""
        if self.harmless:
            return (self.verify, self.asked, self.newest) == (False, "right", "same step")
        newest = {"refused": "older step", "right, reported": "same step"}.get(self.asked)
        return self.verify and self.newest == newest


@dataclass(frozen=True)
class Theirs:
    """What another reader made of one damage."""

    damage: Damage
    answer: Answer
    older: bool
    """The values are those of the other step, all of them or some."""


@final
class DamagedStep:
    """The newest step of a run; `others` are the files of the step before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = _files(path)
        self.others = _files(path.parent / str(OLDER))

    def draw(self, count: int, seed: int) -> list[Damage]:
        return draw(self.files, self.others, count, seed)

    @contextlib.contextmanager
    def damaged(self, damage: Damage) -> Iterator[None]:
        """Files are as `damage` says within, and as they were afterwards."""
        try:
            for name, data in damage.after.items():
                if data is None:
                    (self.path / name).unlink()
                else:
                    (self.path / name).write_bytes(data)
            yield
        finally:
            for name in damage.after:
                (self.path / name).write_bytes(self.files[name])

    def by_others(
        self, damages: list[Damage], read: Read, tell: Callable[[], None] = lambda: None
    ) -> list[Theirs]:
        """What a reader makes of each damage, compared with what it makes of the whole step."""
        found = []
        with hushed():
            whole, older = read(self.path), read(self.path.parent / str(OLDER))
            for damage in damages:
                with self.damaged(damage):
                    found.append(_answer(damage, self.path, read, whole, older))
                tell()
            assert read(self.path) == whole, "a step was not mended"
        return found


def _answer(damage: Damage, path: Path, read: Read, whole: Bits, older: Bits) -> Theirs:
    try:
        values = read(path)
    except Exception:  # whatever it raises, it has refused
        return Theirs(damage, "refused", older=False)
    answer = same_arrays(values, whole)
    wrong = [leaf for name, leaf in values.items() if leaf != whole.get(name)]
    theirs = bool(wrong) and all(leaf in older.values() for leaf in wrong)
    return Theirs(damage, answer, theirs)


def _files(step: Path) -> dict[str, bytes]:
    found = (path for path in sorted(step.rglob("*")) if path.is_file())
    return {str(path.relative_to(step)): path.read_bytes() for path in found}


# --- ours ----------------------------------------------------------------------------------------


def save_ours(root: Path, *, compression: Literal["zstd"] | None = None) -> DamagedStep:
    """A run of ours with three steps."""
    tier = ckpt.Shared(root, keep=ckpt.Keep(), compression=compression)
    with ckpt.CheckpointManager(tier, arena=root.parent / f"{root.name}-arena") as manager:
        manager.resume()
        for step in range(1, NEWEST + 1):
            manager.save(step, state_of(step), metrics={"loss": 1 / step}, extra={"step": step})
        manager.wait_until_finished()
    return DamagedStep(root / _BRANCH / str(NEWEST))


def save_orbax(root: Path) -> DamagedStep:
    """The same steps by Orbax's manager as it comes; v0 takes no texts."""
    with hushed(), v0.CheckpointManager(root) as manager:
        for step in range(1, NEWEST + 1):
            state = {name: leaf for name, leaf in state_of(step).items() if name != "text"}
            manager.save(step, args=v0.args.StandardSave(state))
        manager.wait_until_finished()
    return DamagedStep(root / str(NEWEST))


def by_ours(
    step: DamagedStep, damages: list[Damage], tell: Callable[[], None] = lambda: None
) -> list[Ours]:
    """What we say of each damage."""
    root = step.path.parent.parent
    wanted = {number: bits(state_of(number)) for number in (OLDER, NEWEST)}
    images = {
        name: anatomy(data, name) for name, data in step.files.items() if name.endswith(".image")
    }
    found = []
    for damage in damages:
        harmless = is_harmless(damage, step.files, images)
        params = hit_params(damage, step.files, images)
        with step.damaged(damage):
            found.append(_judged(root, damage, wanted, params, harmless=harmless))
        tell()
    assert ckpt.verify(root).intact, "a step was not mended"
    return found


def _judged(
    root: Path, damage: Damage, wanted: Mapping[int, Bits], params: set[str], *, harmless: bool
) -> Ours:
    report = ckpt.verify(root)
    leaves = {each.leaf.replace("/", ".") for each in report.damage}
    # Of a step that has no marker only the directory is told, and why.
    text = "; ".join(map(str, report.damage))
    verify = not report.intact and _names(text, damage) and params <= leaves
    asked = _asked(root, damage, wanted, params)
    return Ours(damage, harmless, verify, asked, _newest(root, wanted), text)


def _names(text: str, damage: Damage) -> bool:
    return any(name in text for name in damage.after)


def _asked(root: Path, damage: Damage, wanted: Mapping[int, Bits], params: set[str]) -> Any:
    try:
        restored = ckpt.restore(root, step=NEWEST)
    except ckpt.Damaged as error:
        text = str(error)
        named = _names(text, damage) and all(p in text.replace("/", ".") for p in params)
        return "refused" if named else "refused, unnamed"
    if bits(restored.state) != wanted[NEWEST] or restored.extra != {"step": NEWEST}:
        return "WRONG VALUES"
    if not restored.report.damage:
        return "right"
    named = _names("; ".join(map(str, restored.report.damage)), damage)
    return "right, reported" if named else "right"


def _newest(root: Path, wanted: Mapping[int, Bits]) -> Any:
    try:
        restored = ckpt.restore(root)
    except ckpt.CheckpointError:
        return "refused"
    lost = [each.step for each in restored.report.lost]
    exact = bits(restored.state) == wanted.get(restored.step)
    if not exact or restored.extra != {"step": restored.step}:
        return "WRONG VALUES"
    if (restored.step, lost) == (OLDER, [NEWEST]):
        return "older step"
    return "same step" if (restored.step, lost) == (NEWEST, []) else "WRONG VALUES"


# --- all of it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """What came of one seed. `peers` by reader; `own` is Orbax v0 on a step that Orbax wrote."""

    seed: int
    compression: str | None
    """Of our step."""
    ours: list[Ours]
    peers: dict[str, list[Theirs]]
    own: list[Theirs]


def survey(
    directory: Path,
    count: int,
    seed: int,
    *,
    peers: int | None = None,
    compression: Literal["zstd"] | None = None,
    tell: Callable[[], None] = lambda: None,
) -> Survey:
    """Draw `count` damages to a step of ours, and as many to one of Orbax, and ask everybody.

    Args:
        directory: empty; two runs of some 100 KiB are left in it.
        peers: how many of the damages the others see; None: all.
        compression: of our chunks. Orbax compresses by default.
        tell: called after each damage that somebody has looked at.
    """
    step, theirs = (
        save_ours(directory / "ours", compression=compression),
        save_orbax(directory / "orbax"),
    )
    damages = step.draw(count, seed)
    some = damages
    if peers is not None:
        some = random.Random(seed).sample(damages, min(peers, len(damages)))
    return Survey(
        seed,
        compression,
        by_ours(step, damages, tell),
        {name: step.by_others(some, read, tell) for name, read in PEERS.items()},
        theirs.by_others(theirs.draw(len(some), seed), _by_v0, tell),
    )

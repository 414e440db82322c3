"""Two finished runs, bit for bit: every leaf, the position in the data, the coming batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import xxhash

import ckpt
from tools.demo import corpus, model

COMING = 8  # batches
_PARTS = {"params": "parameters", "opt": "optimizer", "key": "random keys"}
STATE = frozenset(_PARTS.values())


@dataclass(frozen=True)
class Compared:
    """One part of two runs. Digests are hex xxh3-128."""

    part: str
    count: int  # leaves, fields or batches
    size_bytes: int
    ours: str
    theirs: str
    differences: tuple[str, ...]  # what differs, by name

    @property
    def equal(self) -> bool:
        return not self.differences and self.ours == self.theirs

    def to_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "count": self.count,
            "bytes": self.size_bytes,
            "run": self.ours,
            "reference": self.theirs,
            "equal": self.equal,
            "differences": list(self.differences),
        }


def compare(run: str, reference: str, pattern: str, seed: int) -> list[Compared]:
    """Compare the newest steps of the runs at two locations.

    pattern, seed: of the data both were trained on.
    """
    ours, theirs = (dict(_pieces(where, pattern, seed)) for where in (run, reference))
    parts = dict.fromkeys(part for part, _ in [*ours, *theirs])
    return [_compared(part, ours, theirs) for part in parts]


_Pieces = dict[tuple[str, str], bytes]


def _pieces(location: str, pattern: str, seed: int) -> Iterator[tuple[tuple[str, str], bytes]]:
    """((part, name), bytes) of everything that makes up the end of a run."""
    data = corpus.pipeline(pattern, seed).iterator()
    with ckpt.open(location) as reader:
        restored = reader.restore(like=model.start(seed), data=data)
    yield ("step", "step"), str(restored.step).encode()
    for path, leaf in jax.tree_util.tree_flatten_with_path(restored.state)[0]:
        part = _PARTS[path[0].key]
        yield (part, jax.tree_util.keystr(path)), _bytes(leaf)
    for field, value in data.get_state().items():
        yield ("data position", field), json.dumps(value, sort_keys=True).encode()
    for number in range(COMING):
        yield ("coming batches", f"batch {number}"), _bytes(next(data))


def _bytes(leaf: Any) -> bytes:
    """Type, shape and bits of a leaf."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        head = str(leaf.dtype)
        leaf = jax.random.key_data(leaf)
    else:
        head = type(leaf).__name__ if not hasattr(leaf, "dtype") else str(leaf.dtype)
    array = np.asarray(leaf)
    return f"{head} {array.dtype}{array.shape} ".encode() + array.tobytes()


def _compared(part: str, ours: _Pieces, theirs: _Pieces) -> Compared:
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if key[0] == part]
    return Compared(
        part=part,
        count=len(keys),
        size_bytes=sum(len(ours.get(key, b"")) for key in keys),
        ours=_digest(part, ours),
        theirs=_digest(part, theirs),
        differences=tuple(
            name for key in keys if ours.get(key) != theirs.get(key) for name in key[1:]
        ),
    )


def _digest(part: str, pieces: _Pieces) -> str:
    digest = xxhash.xxh3_128()
    for (where, name), value in sorted(pieces.items()):
        if where == part:
            digest.update(f"{name} {len(value)} ".encode() + value)
    return digest.hexdigest()

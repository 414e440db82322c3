"""What is done to records after they are read: user functions, each with a version.

The code of a function cannot be compared, so its `version` stands for it: change it whenever the
function changes what it returns, and states saved under the old one are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from datapipe.order.permute import mix
from datapipe.texts import text
from formats.errors import Misuse

Kind = Literal["map", "random_map", "map_batch"]


@dataclass(frozen=True)
class Transform:
    """One function of the pipeline.

    kind: how it is called: "map": fn(example); "random_map": fn(example, rng); "map_batch":
      fn(batch).
    version: stands for the code of `fn`; 1 to 64 characters.

    Raises:
      Misuse: `fn` cannot be called, or `version` is no such text.
    """

    kind: Kind
    fn: Callable[..., Any]
    version: str

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise Misuse(f".{self.kind} wants a function, found {self.fn!r}")
        version = text(f".{self.kind}: its version", self.version, 1, 64)
        object.__setattr__(self, "version", version)

    @property
    def label(self) -> str:
        """Kind and version, as saved in states."""
        return f"{self.kind} {self.version}"

    def told(self, number: int) -> str:
        """The function as messages name it; `number` in the pipeline is counted from 1."""
        fn = self.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        return f".{self.kind} {name} (function {number} of the pipeline, version={self.version!r})"


def extended(transforms: Sequence[Transform], added: Transform) -> tuple[Transform, ...]:
    """`transforms` and one more.

    Raises:
      Misuse: a function of examples would come after a function of batches.
    """
    if added.kind != "map_batch" and any(done.kind == "map_batch" for done in transforms):
        raise Misuse(
            f".{added.kind} after .map_batch: there are no single examples any more; "
            "put it before, or write it as a .map_batch"
        )
    return (*transforms, added)


def generator(
    seed: int, epoch: int, record: int, position: int, source: int = 0
) -> np.random.Generator:
    """The random numbers of one record of a source in one epoch for the transform at `position`.

    They depend on nothing else: not on batch size, threads, processes, or what ran before. The
    bit stream is Philox, keyed by the record itself beside a mix of the others.
    """
    words = (seed, epoch, position, source) if source else (seed, epoch, position)
    key = np.array([mix(*words), record], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))

"""Steps as others read them: plain TensorStore, and both generations of Orbax."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Orbax and what it imports
    import orbax.checkpoint as v0
    import orbax.checkpoint.experimental.v1 as v1


def by_tensorstore(step: Path, param: str) -> np.ndarray:
    """One array of a step of ours; nothing comes out of a cache."""
    base = f"file://{step}/state/"
    spec = {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": param}}
    return ts.open(spec, read=True, context=ts.Context()).result().read().result()


def by_v0(step: Path, args: Any = None, *, read_only: bool = False) -> Any:
    """The state of a step of ours, or of one that Orbax's manager saved without items.

    Args:
        args: of Orbax, for the state; None: the manager finds out by itself.
        read_only: whether the manager may write into the run.
    """
    options = v0.CheckpointManagerOptions(read_only=True) if read_only else None
    with v0.CheckpointManager(step.parent, options=options) as manager:
        given = v0.args.Composite(state=args) if args is not None else None
        found = manager.restore(int(step.name), args=given)
    if not isinstance(found, v0.args.Composite):
        return found
    if "state" not in found:
        raise ValueError("no item of the name that was saved")
    return found["state"]


def by_v1(step: Path, template: Any = None) -> Any:
    return v1.load(step, template)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Without warnings, log lines, and what Python says of reads that Orbax drops half-way when
    another one fails."""
    before = logging.root.manager.disable
    hooks = sys.unraisablehook, sys.excepthook
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    sys.excepthook = lambda *_: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
            gc.collect()
    finally:
        logging.disable(before)
        sys.unraisablehook, sys.excepthook = hooks

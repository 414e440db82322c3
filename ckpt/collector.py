"""The garbage collector, told to wait."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """No collection inside: where very many objects are made, and none of them is garbage.

    The collector would walk all objects of the process again and again, those of jax included:
    with 10,000 leaves that is half of the time. Ends as it began; other threads may use it, too.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

"""Waiting for what nothing tells of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_PATIENCE_S = 60


def eventually(what: Callable[[], Any], text: str = "it never came true") -> None:
    """Until `what` is true; an error with the text after a minute."""
    end = time.monotonic() + _PATIENCE_S
    while not what():
        assert time.monotonic() < end, text
        time.sleep(0.005)

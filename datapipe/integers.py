"""Integers that callers give: checked, and Python's own from then on."""

from __future__ import annotations

from typing import Final

import numpy as np

from formats.errors import Misuse

LIMIT: Final = 1 << 62
"""Most items of anything: int64 holds them, and the sum of two counts of them."""


def integer(name: str, value: object, first: int, last: int) -> int:
    """`value` as a Python int; NumPy integers pass, and do not overflow afterwards.

    Raises:
      Misuse: it is a bool, a float, or outside [first, last].
    """
    if type(value) is int and first <= value <= last:
        return value
    if isinstance(value, np.integer):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value <= last:
        raise Misuse(f"{name} must be an integer in [{first}, {last}], found {value!r}")
    return value

"""Integers that callers give, one or an array of them: checked, and of one type from then on."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from formats import arguments
from formats.errors import Misuse

LIMIT: Final = arguments.LIMIT
"""Most items of anything, 2^62: int64 holds them, and the sum of two counts of them."""


def integer(name: str, value: object, first: int, last: int) -> int:
    """`value` as a Python int; NumPy integers pass, and do not overflow afterwards.

    Raises:
      Misuse: it is a bool, a float, or outside [first, last].
    """
    if type(value) is int and first <= value <= last:
        return value
    found = arguments.as_integer(value)
    if found is None or not first <= found <= last:
        shown = value if found is None else found
        raise Misuse(f"{name} must be an integer in [{first}, {last}], found {shown!r}")
    return found


def fresh_indices(indices: ArrayLike, n: int) -> NDArray[np.int64]:
    """A C-ordered int64 copy, same shape.

    Raises:
      Misuse: not integers, or one is outside [0, n).
    """
    try:
        given = np.asarray(indices)
    except (TypeError, ValueError) as error:
        raise Misuse(f"indices must be integers ({error})") from error
    if given.size and given.dtype.kind not in "iu":
        raise Misuse(f"indices must be integers, found dtype {given.dtype}")
    values = np.array(given, dtype=np.int64, order="C", copy=True)
    if values.size and values.view(np.uint64).max() >= n:  # a negative one is above 2^63
        raise Misuse(f"index {given[(values < 0) | (values >= n)][0]} is outside [0, {n})")
    return values

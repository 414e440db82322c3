"""Arguments that callers give: refused with their name where they are of another kind.

Each function returns the argument as the rest of the code has it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from formats.errors import Misuse

LIMIT = 1 << 62
"""Most items of anything: int64 holds them, and the sum of two counts of them."""


def checked_path(name: str, value: object) -> str:
    """A path or URL as a text. Raises: Misuse."""
    if not isinstance(value, (str, os.PathLike)):
        raise _other(name, "a path, a text or pathlib.Path", value)
    found: str | bytes = os.fspath(value)
    if not isinstance(found, str):
        raise _other(name, "a path, a text or pathlib.Path", value)
    if not found or "\0" in found:
        raise _other(name, "a path of one character or more, none of which is NUL", value)
    try:
        os.fsencode(found)
    except UnicodeEncodeError as error:
        raise _other(name, f"a path that this system can name ({error})", value) from error
    return found


def checked_paths(name: str, value: object) -> list[str]:
    """One path, or several in their order. Raises: Misuse."""
    if isinstance(value, (str, bytes, os.PathLike)):
        return [checked_path(name, value)]
    return [
        checked_path(f"{name}[{i}]", each) for i, each in enumerate(_listed(name, value, "paths"))
    ]


def texts(name: str, value: object) -> list[str]:
    """Several texts in their order. Raises: Misuse."""
    if isinstance(value, str):
        raise Misuse(f"{name}={value!r:.80}: wanted a list of names, [{value!r:.80}]")
    found = _listed(name, value, "names")
    for each in found:
        if not isinstance(each, str):
            raise _other(name, "a list of names, each a text", each)
    return [str(each) for each in found]


def mapping(name: str, value: object) -> dict[str, Any]:
    """Values by name. Raises: Misuse."""
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        raise _other(name, "values by name, {name: value}", value)
    return dict(value)


def as_integer(value: object) -> int | None:
    """As a Python int, which does not overflow; None: booleans, floats and all else are none."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    return None


def whole(name: str, value: object, least: int, of: str) -> int:
    """An integer from `least` to 2^62; NumPy's are, booleans and floats are none. Raises: Misuse.

    `of`: what it counts.
    """
    found = as_integer(value)
    if found is None or not least <= found <= LIMIT:
        shown = _shown(value) if found is None or abs(found) >= LIMIT else found
        raise Misuse(f"{name}={shown}: wanted a number of {of}, at least {least}")
    return found


def truth(name: str, value: object) -> bool:
    """True or False; NumPy's are. Raises: Misuse."""
    if not isinstance(value, (bool, np.bool_)):
        raise _other(name, "True or False", value)
    return bool(value)


def _listed(name: str, value: object, of: str) -> list[Any]:
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, range))
    if isinstance(value, np.ndarray) and value.ndim == 1:
        is_list = True
    if not is_list:
        raise _other(name, f"a list of {of}, such as [...] or sorted(...)", value)
    return list(cast("Sequence[Any]", value))


def _other(name: str, wanted: str, value: object) -> Misuse:
    return Misuse(f"{name}: wanted {wanted}, found {type(value).__name__} {_shown(value)}")


def _shown(value: object) -> str:
    try:
        return f"{value!r:.80}" if not isinstance(value, int) or abs(value) < LIMIT else "too large"
    except Exception:  # whatever a repr of somebody else does
        return "that cannot be shown"

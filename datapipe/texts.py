"""Texts that callers give, checked, and Python's own from then on; values as messages show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from formats.errors import Misuse

Known = TypeVar("Known", bound=str)


def text(name: str, value: object, first: int, last: int) -> str:
    """`value` as a Python str of so many characters.

    Raises:
      Misuse: it is no text, has fewer than `first` or more than `last` characters, or some that
        UTF-8 does not have.
    """
    if not isinstance(value, str) or not first <= len(value) <= last:
        raise Misuse(f"{name} must be a text of {first} to {last} characters, found {value!r:.80}")
    if not is_utf8(value):
        raise Misuse(
            f"{name} must be a text that can be written in UTF-8, found {value!r:.80}: half of a "
            "surrogate pair, as bytes become that are read with another encoding"
        )
    return str(value)


def one_of(name: str, value: object, known: Sequence[Known]) -> Known:
    """`value`, if it is one of a few texts.

    Raises:
      Misuse: it is none of them.
    """
    for each in known:
        if isinstance(value, str) and each == value:
            return each
    raise Misuse(f"{name} must be one of {', '.join(known)}, found {value!r:.80}")


def is_utf8(value: str) -> bool:
    """Whether UTF-8 has all of its characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """A value as messages show it: its repr, cut to 120 characters."""
    found = repr(value)
    return found if len(found) <= 120 else f"{found[:117]}..."

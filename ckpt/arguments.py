"""What callers give, looked at before anything is done with it."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

from ckpt.errors import Misuse
from ckpt.layout import MAX_STEP


def must_be(value: Any, kind: type, name: str, wanted: str) -> None:
    """Raises Misuse for an argument of another type."""
    if not isinstance(value, kind):
        raise Misuse(f"{name}: wanted {wanted}, found {shown(value)}")


def whole_number(value: Any, name: str, least: int = 1) -> int:
    """An integer of Python, NumPy or JAX; no bool.

    Raises:
        Misuse: it is something else, or below `least`.
    """
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool":
            raise TypeError("a truth value")
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise Misuse(f"{name}: wanted a whole number from {least} on, found {shown(value)}")
    return number


_LONGEST_S = 1e8
"""Three years; the longest that some systems can wait is not much more."""


def seconds(value: Any, name: str) -> float:
    """How long to wait at most: above 0, and no more than three years.

    Raises:
        Misuse: it is something else.
    """
    number = _real(value)
    if number is None or not 0 < number <= _LONGEST_S:
        raise Misuse(
            f"{name}: wanted seconds, above 0 and at most {_LONGEST_S:,.0f}, found {shown(value)}"
        )
    return number


def patience(value: Any, name: str) -> float:
    """Seconds from 0 on; infinity is as good. Raises Misuse for anything else."""
    number = _real(value)
    if number is None or not number >= 0:
        raise Misuse(f"{name}: wanted seconds, found {shown(value)}")
    return number


def time_limit(value: Any, name: str) -> float | None:
    """How long a call may take: below 0, what is left of an earlier limit, is 0; None is for ever,
    and so is anything above three years.

    Raises:
        Misuse: it is no number, or none that can be compared.
    """
    if value is None:
        return None
    number = _real(value)
    if number is None or math.isnan(number):
        raise Misuse(f"{name}: wanted seconds, or None to wait for ever, found {shown(value)}")
    return None if number > _LONGEST_S else max(0.0, number)


def _real(value: Any) -> float | None:
    """A number of Python or NumPy; None for anything else, be it a truth value."""
    number: Any = value if isinstance(value, numbers.Real) else None
    if number is None or isinstance(number, bool):
        return None
    try:
        return float(number)
    except OverflowError:  # a whole number, or a fraction
        return math.inf if number > 0 else -math.inf


def check_step_number(step: Any) -> int:
    """A step number; raises Misuse for anything else."""
    number = whole_number(step, "step", least=0)
    if number > MAX_STEP:
        raise Misuse(
            f"step: wanted at most {MAX_STEP}, since names of steps have up to 18 digits, "
            f"found {_short(number)}"
        )
    return number


def _short(number: int) -> str:
    return str(number) if number < 10**40 else f"a number of {number.bit_length()} bits"


def numbers_by_name(metrics: Any) -> dict[str, float]:
    """Metrics as floats. Raises Misuse for names that are no text, and for no numbers."""
    must_be(metrics, Mapping, "metrics", "numbers by name")
    found = {}
    for name, value in metrics.items():
        must_be(name, str, "metrics: a name", "text")
        try:
            if isinstance(value, str | bytes):
                raise TypeError("it is text")
            found[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            told = f"{shown(value)} ({error})"
            raise Misuse(f"metrics: {name}: wanted a number, found {told}") from error
    return found


def shown(value: Any) -> str:
    """A value in a message: short, and with its type where the text alone misleads."""
    text = f"{value!r:.100}" if isinstance(value, int) and -(10**40) < value < 10**40 else ""
    return text or f"{type(value).__name__} {_text(value):.100}"


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # what cannot be shown, as an integer with too many digits, has a type still
        return "without a text"

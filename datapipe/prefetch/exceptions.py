"""An exception that goes from one process to another and stays what it was.

Type, arguments, fields, notes and causes come along; the tracebacks cannot, and come as a note.
"""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

import cloudpickle


class Raised(NamedTuple):
    """An exception with the one behind it, as a value that can be sent."""

    pickled: bytes
    notes: tuple[str, ...]
    cause: Raised | None  # `raise ... from` it
    context: Raised | None  # raised while it was handled


def packed(error: BaseException, place: str) -> Raised:
    """`error` to be sent; `place` says where it was raised, for the note."""
    text = "".join(traceback.format_exception(error)).rstrip()
    found = _packed(error, 0)
    return found._replace(notes=(*found.notes, f"in {place}:\n{text}"))


def _packed(error: BaseException, depth: int) -> Raised:
    cause = context = None
    if depth < _DEPTH:
        if error.__cause__ is not None:
            cause = _packed(error.__cause__, depth + 1)
        elif error.__context__ is not None and not error.__suppress_context__:
            context = _packed(error.__context__, depth + 1)
    notes = tuple(map(str, getattr(error, "__notes__", ())))
    try:
        pickled = cloudpickle.dumps(error)
        pickle.loads(pickled)  # an __init__ of other arguments shows only here
    except Exception:
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        pickled = pickle.dumps(RuntimeError(f"{name}: {error}"))
    return Raised(pickled, notes, cause, context)


def unpacked(raised: Raised) -> BaseException:
    """The exception again."""
    error: BaseException = pickle.loads(raised.pickled)
    if raised.notes:
        error.__notes__ = list(raised.notes)
    if raised.cause is not None:
        error.__cause__ = unpacked(raised.cause)
    if raised.context is not None:
        error.__context__ = unpacked(raised.context)
    return error


_DEPTH = 16

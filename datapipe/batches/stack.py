"""Examples to a batch: trees of equal structure become one tree with a leading axis.

Inner nodes are dicts, tuples, named tuples and lists. Numbers and arrays of equal shape and dtype
are stacked. Texts, bytes and any other object become an array of objects, which never cuts a long
text to the length of the first. What does not fit together is an error, not a conversion: the
dtype of a batch must not depend on which examples happen to be in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from datapipe.batches.returned import SPENT_CURE, is_array, is_spent
from formats.errors import Mismatch

_NUMBERS: Final[dict[type, type]] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}


def stack(examples: Sequence[Any], names: Sequence[str], by: str = "the source") -> Any:
    """One tree whose leaves have the leading axis len(examples), which is at least 1.

    `names` says what each example is, for messages; `by`, who made them.

    Raises:
      Mismatch: structures, types, shapes or dtypes differ; names the field and both examples. Or
        one holds what can be gone through only once.
    """
    return _stack(examples, names, by, "")


def objects(values: Iterable[Any]) -> NDArray[np.object_]:
    """A one-dimensional array of objects: also where NumPy would see a second axis in them."""
    return np.fromiter(values, np.object_)


def _stack(values: Sequence[Any], names: Sequence[str], by: str, path: str) -> Any:
    first = values[0]
    _alike([_form(value) for value in values], names, path)
    if isinstance(first, Mapping):
        return {
            key: _stack([value[key] for value in values], names, by, f"{path}[{key!r}]")
            for key in first
        }
    if isinstance(first, tuple | list):
        parts = [
            _stack([value[index] for value in values], names, by, f"{path}[{index}]")
            for index in range(len(first))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if type(first) in _NUMBERS:
        return _numbers(values, path)
    if is_array(first):
        return np.stack([np.asarray(value) for value in values])
    for kind in {*map(type, values)}:
        if is_spent(kind):
            raise Mismatch(
                f"{by} has a {kind.__name__} at {path or 'the top'} of an example: {SPENT_CURE}"
            )
    return objects(values)


def _form(value: Any) -> str:
    """What must be the same in all examples, in words."""
    if isinstance(value, Mapping):
        return f"a dict of {sorted(map(repr, value))}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) in _NUMBERS:
        return f"a Python {type(value).__name__}"
    if is_array(value):
        kind = "text" if value.dtype.kind in "US" else str(value.dtype)
        return f"{kind}{list(value.shape)}"
    return "an object"


def _alike(forms: Sequence[str], names: Sequence[str], path: str) -> None:
    for form, name in zip(forms, names, strict=True):
        if form != forms[0]:
            raise Mismatch(
                f"examples do not fit in one batch at {path or 'the top'}: {names[0]} has "
                f"{forms[0]}, {name} has {form}; make them the same in .map (pad, crop, astype)"
            )


def _numbers(values: Sequence[Any], path: str) -> NDArray[Any]:
    try:
        return np.array(values, _NUMBERS[type(values[0])])
    except OverflowError as error:
        raise Mismatch(
            f"an integer at {path or 'the top'} does not fit in 64 bits; "
            "return it as an array or a text"
        ) from error

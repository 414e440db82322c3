"""Columns of a source, read from end to end: filters and lengths are made from them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from datapipe.sizes import size_of
from datapipe.sources.indexes import Kept
from formats.errors import Misuse

if TYPE_CHECKING:
    from formats.source import Batch, Source

Operator = Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"]

_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda found, values: found in values,
    "not in": lambda found, values: found not in values,
}
_FIRST: Final = 64  # records of the first read, which tells how large they are
_GROWTH: Final = 8
_RECORDS: Final = 8192
_BYTES: Final = 64 << 20  # that a read aims at


@dataclass(frozen=True)
class Where:
    """A condition on one column: `Where("score", ">=", 0.5)`, `Where("language", "in", ["de"])`.

    A record without a value, None, never meets it.

    Raises:
      Misuse: no such operator; "in" without values to look among, or others with several.
    """

    column: str
    operator: Operator
    value: Any

    def __post_init__(self) -> None:
        if not isinstance(self.column, str):
            raise Misuse(f"column: wanted the name of one, found {self.column!r:.80}")
        if not isinstance(self.operator, str) or self.operator not in _COMPARE:
            raise Misuse(f"operator: wanted one of {', '.join(_COMPARE)}, found {self.operator!r}")
        has_many = hasattr(self.value, "__iter__") and not isinstance(self.value, str | bytes)
        has_many = has_many and getattr(self.value, "ndim", 1) > 0  # NumPy's scalars in arrays
        wants_many = self.operator in ("in", "not in")
        if has_many != wants_many:
            wanted = "a list of values" if wants_many else "one value"
            raise Misuse(f"{self.operator}: wanted {wanted}, found {self.value!r}")
        if wants_many:
            object.__setattr__(self, "value", tuple(self.value))

    def __call__(self, batch: Batch) -> NDArray[np.bool_]:
        """Which records of a batch meet it, bool[n].

        Raises:
          Misuse: no such column, or its values cannot be compared with this one.
        """
        found = _column(batch, self.column)
        try:
            return self._met(found)
        except Misuse:
            raise
        except (TypeError, ValueError) as error:
            raise Misuse(f"filter: column {self.column!r} {self.operator}: {error}") from error

    def _met(self, found: NDArray[Any] | list[Any]) -> NDArray[np.bool_]:
        compare = _COMPARE[self.operator]
        if not isinstance(found, np.ndarray):
            met = [each is not None and bool(compare(each, self.value)) for each in found]
            return np.array(met, np.bool_)
        if found.ndim != 1:
            raise Misuse(f"filter: column {self.column!r} has {found.shape[1:]} values a record")
        if self.operator in ("in", "not in"):
            return np.isin(found, self._values(found.dtype), invert=self.operator == "not in")
        result = np.asarray(compare(found, self.value))
        if result.shape != found.shape or result.dtype != np.bool_:
            raise Misuse(
                f"filter: column {self.column!r} of {found.dtype} cannot be compared with "
                f"{self.value!r}"
            )
        return result

    def _values(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The values to look among, as ones of a column; floats are rounded as by "=="."""
        found: list[Any] = []
        for value in self.value:
            try:
                if dtype.kind in "US":
                    one = np.asarray(value)
                    fits = one.ndim == 0 and one.dtype.kind == dtype.kind
                elif isinstance(value, complex | np.complexfloating) and dtype.kind != "c":
                    fits = False
                else:
                    with np.errstate(all="ignore"):  # what does not fit is told below
                        one = np.asarray(value).astype(dtype)
                    rounded = dtype.kind in "fc" and isinstance(value, float | complex | np.inexact)
                    fits = one.ndim == 0 and (rounded or bool(one.item() == value))
            except (TypeError, ValueError, OverflowError):
                fits = False
            if not fits:
                raise Misuse(
                    f"filter: column {self.column!r} {self.operator}: wanted values of {dtype}, "
                    f"found {value!r:.80}"
                )
            found.append(one)
        return np.array(found) if found else np.zeros(0, dtype)


@dataclass(frozen=True)
class Values:
    """A column of one value a record, as it is."""

    column: str

    def __call__(self, batch: Batch) -> NDArray[Any]:
        """The values of a batch, [n]. Raises Misuse: there is no such column, or it is a list."""
        found = _column(batch, self.column)
        if not isinstance(found, np.ndarray):
            raise Misuse(f"column {self.column!r}: wanted numbers, found a list")
        return found


def answers(source: Source, questions: Sequence[Where | Values]) -> list[NDArray[Any]]:
    """The answer to each question for all records in their order, [len(source)] each.

    The columns are read together, from end to end, once.

    Raises:
      Misuse: there is no such column; see `Where` and `Values`.
      Whatever the source raises.
    """
    found: list[list[NDArray[Any]]] = [[] for _ in questions]
    with narrowed(source, [each.column for each in questions]) as narrow:
        for _, batch in batches(narrow):
            for parts, question in zip(found, questions, strict=True):
                parts.append(question(batch))
    return [np.concatenate(parts) if parts else np.zeros(0, np.int64) for parts in found]


def meeting_all(met: Sequence[NDArray[np.bool_]]) -> Kept:
    """The records that meet all conditions; `met` has a bool[records] for each."""
    return Kept.of_mask(np.logical_and.reduce(met))


def batches(source: Source) -> Iterator[tuple[int, Batch]]:
    """All records in their order, in batches of up to 8,192 records or about 64 MiB.

    Yields the number of the first record, and the batch.
    """
    first, count = 0, _FIRST
    while first < len(source):
        stop = min(first + count, len(source))
        batch = source.read(np.arange(first, stop))
        fitting = _BYTES * (stop - first) // max(1, size_of(batch))
        yield first, batch
        del batch  # before the next one is read
        first, count = stop, max(1, min(fitting, count * _GROWTH, _RECORDS))


@contextlib.contextmanager
def narrowed(source: Source, columns: Sequence[str]) -> Iterator[Source]:
    """The source reading only these columns, whether or not it reads them itself; if it can."""
    select = getattr(source, "select", None)
    if select is None:
        yield source
        return
    with select(list(dict.fromkeys(columns))) as narrow:
        yield narrow


def _column(batch: Batch, name: str) -> NDArray[Any] | list[Any]:
    if not isinstance(batch, dict):
        raise Misuse(f"no column {name!r}: the source has records of bytes, or trees")
    if name not in batch:
        raise Misuse(f"no column {name!r}, the source has {', '.join(batch)}")
    return batch[name]

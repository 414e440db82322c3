"""What can go wrong with data, by what the caller can do about it.

::

    DataError
    ├── NotFound       no file matches: the one error that ever means "absent"
    ├── BadRecord      one record cannot be read or decoded; the others can (`file`, `position`)
    ├── Mismatch       files, schemas or fingerprints disagree; `differences` lists all of them
    ├── Damaged        a file cannot be read as what its name says
    ├── Unsupported    a format, column type or location this release cannot read
    ├── WorkerFailed   worker processes die again and again, or cannot be started
    ├── StoreFailed    the store did not answer, or refused (never means "absent")
    └── Misuse         the call cannot mean anything here (also a ValueError)
        └── OutOfRange     a record number that the source does not have (also an IndexError)

A message names the place, what was wanted, what was found, and the cure.
"""

from __future__ import annotations

from collections.abc import Sequence


class DataError(Exception):
    """Base of all errors of sources and pipelines."""


class NotFound(DataError):
    """No file matches what was asked for."""


class BadRecord(DataError):
    """One record cannot be read or decoded.

    `index` is its number in the whole source (-1 where that is not known), `file` the file that
    holds it, and `position` its number inside that file.
    """

    def __init__(
        self, message: str, *, index: int = -1, file: str = "", position: int = -1
    ) -> None:
        super().__init__(message)
        self.index = index
        self.file = file
        self.position = position

    def __reduce__(self) -> tuple[object, ...]:
        state = {"index": self.index, "file": self.file, "position": self.position}
        return type(self), (str(self),), state


class Mismatch(DataError):
    """Files, schemas or fingerprints disagree.

    `differences` has one line per difference, each with the place, wanted and found.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        self.message = message
        self.differences = tuple(differences)
        lines = "".join(f"\n  {line}" for line in self.differences)
        super().__init__(message + lines)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.differences)


class Damaged(DataError):
    """A file, or a stretch of it that holds more than one record, cannot be read."""


class Unsupported(DataError):
    """This release cannot read that."""


class StoreFailed(DataError):
    """The store failed or did not answer; says nothing about what it holds."""


class WorkerFailed(DataError):
    """Worker processes die again and again, or cannot be started; nothing is lost."""


class Misuse(DataError, ValueError):
    """The call contradicts itself or the source it is made on."""


class OutOfRange(Misuse, IndexError):
    """A record number below 0 or not below the length of the source."""


def is_of_a_record(error: Exception) -> bool:
    """Whether an error can be the fault of one record, so that other records can still be read.

    Not if a store does not answer, a call is wrong, memory is short, or the system refuses. (Image
    decoders raise `OSError` without a number for bytes that are no image.)
    """
    if isinstance(error, DataError):
        return isinstance(error, BadRecord | Damaged)
    if isinstance(error, MemoryError | ConnectionError | TimeoutError):
        return False
    return not isinstance(error, OSError) or error.errno is None

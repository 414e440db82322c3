"""What can go wrong with a checkpoint, by what the caller can do about it.

::

    CheckpointError
    ├── NotFound          nothing there: the one error that ever means "absent"
    ├── AlreadyExists     something is there already and is left as it is
    ├── Mismatch          saved and wanted trees differ; `differences` lists all of them
    ├── Damaged           bytes disagree with their digests, or cannot be parsed
    ├── Unsupported       a leaf, dtype or format version this release cannot hold or read
    ├── StoreFailed       the store did not answer, or refused (never means "absent")
    ├── PeerFailed        another process of the run failed or did not answer in time
    ├── Superseded        a newer attempt owns the run; this one must stop
    ├── InUse             another live manager on this host holds the run
    └── Misuse            the call cannot mean anything here (also a ValueError)

A message names the place, what was wanted, what was found, and the cure.
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """Base of all errors of this package."""


class NotFound(CheckpointError):
    """There is nothing at the place that was asked for."""


class AlreadyExists(CheckpointError):
    """The place is taken; what is there was left untouched."""


def difference_lines(differences: Sequence[str]) -> str:
    """How a `Mismatch` shows its differences, behind its message."""
    return "".join(f"\n  {line}" for line in differences)


class Mismatch(CheckpointError):
    """What was saved differs from what was asked for.

    `differences` has one line per difference, each with leaf path, wanted and found.
    """

    def __init__(self, message: str, differences: Sequence[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__(message + difference_lines(self.differences))


class Damaged(CheckpointError):
    """Bytes in the store are not the bytes that were saved."""


class Unsupported(CheckpointError):
    """This release cannot hold or read that."""


class StoreFailed(CheckpointError):
    """The store failed or did not answer; says nothing about what it holds."""


class PeerFailed(CheckpointError):
    """Another process of the run failed, or was not heard of in time."""


class Superseded(CheckpointError):
    """A newer attempt owns the run."""


class InUse(CheckpointError):
    """Another live manager on this host holds the run."""


class Misuse(CheckpointError, ValueError):
    """The call contradicts itself or the state of the manager."""

"""Bad records: what becomes of them, what a message says of one, and when there are too many.

A record is bad if its bytes alone decide that: it cannot be read, or a `.map` before any
`.random_map` raises for it. Taking another record mends nothing else: not a store that does not
answer, nor a function that fails by chance or for a whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from datapipe.integers import LIMIT, integer
from datapipe.texts import one_of
from formats.errors import BadRecord

OnBadRecord = Literal["raise", "replace"]
_POLICIES: Final[tuple[OnBadRecord, ...]] = ("raise", "replace")
_NAMED: Final = 3  # bad records that the error about too many of them describes


@dataclass(frozen=True)
class Tolerance:
    """What becomes of bad records.

    Args:
      policy: "raise" an error about the first one, or "replace" each by another record.
      limit: how many may be replaced.

    Raises:
      Misuse: an argument is out of range.
    """

    policy: OnBadRecord = "raise"
    limit: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", one_of("on_bad_record", self.policy, _POLICIES))
        limit = integer("bad_record_limit", self.limit, 0, LIMIT)
        object.__setattr__(self, "limit", limit)


@dataclass(frozen=True)
class Fault:
    """A bad record, where it came up, and why it is bad; plain values that cross processes.

    source, id: as in `datapipe.batches.substitutes`.
    record: its number in the source.
    where: its place in words; `file` and `position` where the source tells them, else "" and -1.
    example, epoch: at which it came up, itself or as a substitute.
    what: what is wrong, as the predicate of a sentence.
    """

    source: int
    id: int
    record: int
    where: str
    file: str
    position: int
    example: int
    epoch: int
    what: str

    @property
    def pair(self) -> tuple[int, int]:
        """(source, id)."""
        return self.source, self.id

    def __str__(self) -> str:
        return (
            f"record {self.record} ({self.where}) {self.what}. It came up in example "
            f"{self.example}, in epoch {self.epoch}"
        )

    def error(self, cure: str) -> BadRecord:
        """As an error."""
        return BadRecord(
            f"{self}: {cure}", index=self.record, file=self.file, position=self.position
        )


def too_many(before: int, found: Sequence[Fault], limit: int) -> BadRecord:
    """The error for more bad records than may be replaced.

    Args:
      before: how many are replaced already.
      found: those that came up now, at least one.
      limit: how many may be replaced.
    """
    named = "".join(f"\n  {fault}" for fault in found[:_NAMED])
    more = f"\n  and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return BadRecord(
        f"{before + len(found)} records are bad, and bad_record_limit={limit} may be replaced: "
        f"mend the source or the .map, or raise the limit. {before} are replaced already (the log "
        f"has named them); now came up:{named}{more}",
        index=found[0].record,
        file=found[0].file,
        position=found[0].position,
    )

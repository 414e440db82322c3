"""Examples by address: ordinal k of source s has the address s * 2^62 + k.

So one list of ranges of integers says which examples of which sources are skipped.
"""

from __future__ import annotations

from typing import Final

from datapipe.integers import LIMIT, integer
from formats.errors import Misuse

END: Final = LIMIT << 10
"""One past the last address: enough for more sources than a mixture may have."""


def addressed(source: int, start: int, stop: int) -> tuple[int, int]:
    """Ordinals start..stop-1 of a source as a range of addresses."""
    return source * LIMIT + start, source * LIMIT + stop


def parted(addresses: tuple[int, int]) -> tuple[int, int, int]:
    """Source, first ordinal and one past the last ordinal of a range of addresses.

    Raises:
      Misuse: it is no range of addresses, or of more than one source.
    """
    try:
        start, stop = addresses
    except (TypeError, ValueError) as error:
        raise Misuse(f"a range is a pair (start, stop), found {addresses!r:.80}") from error
    start = integer("start of a range", start, 0, END)
    stop = integer("stop of a range", stop, start, END)
    source = start // LIMIT
    if stop - source * LIMIT > LIMIT:
        raise Misuse(f"a range of addresses is of one source, found {start} to {stop}")
    return source, start - source * LIMIT, stop - source * LIMIT
